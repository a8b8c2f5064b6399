//! Which of several devices acts fastest. The answer is measured: policy, number of episodes and machine decide.

use std::time::{Duration, Instant};

use elmur_base::Row;
use elmur_engine::{Device, Pool, Store};
use elmur_model::PolicyConfig;
use elmur_model::session::{Seen, Session};

use crate::error::Result;
use crate::evaluate::{group_size, workers};

/// Longest time that one device is measured, after the steps that make it ready.
const PATIENCE: Duration = Duration::from_millis(500);

/// Steps that make a device ready, and most steps that are measured: segments are that long at least in most
/// policies, so that their ends count too.
const STEPS: usize = 64;

/// The device on which a policy acts out this many episodes fastest; the first of equals. `threads` threads
/// evaluate on the CPU; none: as many as are granted. Takes about a second for each device, on a GPU that has
/// never run the policy a few more.
pub fn faster_device<'a>(
    policy: &PolicyConfig,
    params: &Store,
    episodes: usize,
    threads: Option<usize>,
    devices: &'a [Device],
) -> Result<Option<&'a Device>> {
    let mut best = None;
    for device in devices {
        let time = time_of_step(policy, params, episodes, threads, device)?;
        if best.is_none_or(|(least, _)| time < least) {
            best = Some((time, device));
        }
    }
    Ok(best.map(|(_, device)| device))
}

/// Seconds in which every episode takes a step.
fn time_of_step(
    policy: &PolicyConfig,
    params: &Store,
    episodes: usize,
    threads: Option<usize>,
    device: &Device,
) -> Result<f64> {
    let rows = group_size(episodes, device);
    let groups = episodes.div_ceil(rows);
    let params = params.to(device)?;
    let serial = Device::from(&Pool::new(1));
    let (device, at_once) = if device.is_cpu() { (&serial, workers(threads, groups)) } else { (device, 1) };
    let mut session = Session::new(policy, &params, rows, device)?;
    let (observation, returns) = (Row::zeros(session.observation_widths(), rows), vec![0.0; rows]);
    let mut steps = |patience: Duration| -> Result<f64> {
        let (begin, mut count) = (Instant::now(), 0);
        while count < STEPS && (count == 0 || begin.elapsed() < patience) {
            session.act(Seen { observation: observation.values(), returns: Some(&returns) })?;
            count += 1;
        }
        Ok(begin.elapsed().as_secs_f64() / count as f64)
    };
    steps(PATIENCE)?;
    Ok(steps(PATIENCE)? * groups.div_ceil(at_once) as f64)
}

#[cfg(test)]
mod tests {
    use elmur_model::init;

    use super::*;
    use crate::RunConfig;

    #[test]
    fn one_of_the_devices_is_chosen_and_none_of_none() {
        let config = RunConfig::preset("tmaze-quick").unwrap();
        let params = init::parameters(config.model.architecture(), 0).unwrap();
        let devices = [Device::from(&Pool::new(2)), Device::from(&Pool::new(1))];
        let chosen = faster_device(&config.model, &params, 40, Some(2), &devices).unwrap().unwrap();
        assert!(devices.iter().any(|device| std::ptr::eq(device, chosen)));
        assert!(faster_device(&config.model, &params, 40, None, &[]).unwrap().is_none());
    }
}
