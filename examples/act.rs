//! A policy in a control loop, as a robot's runtime would embed it.
//!
//! ```sh
//! cargo run --release --example act                          # fresh weights of a preset
//! cargo run --release --example act -- out/demo 2000 500     # a run or checkpoint, steps, steps per second
//! ```

#![allow(clippy::print_stdout)]

use std::error::Error;
use std::path::PathBuf;
use std::thread::sleep;
use std::time::{Duration, Instant};

use elmur::base::Row;
use elmur::engine::Pool;
use elmur::model::session::{Choose, Seen, Session};
use elmur::model::{Checkpoint, Snapshot, init, presets};
use elmur::train::RunFolder;

/// Robots that act under one policy, each in a row of its own.
const ROBOTS: usize = 3;
/// Steps of an episode of each robot; the last robot's never ends.
const EPISODES: [u64; ROBOTS] = [70, 110, u64::MAX];
/// What a policy that is told a return to reach is told.
const RETURNS: [f32; ROBOTS] = [1.0; ROBOTS];

/// Where a robot reads its sensors: numbers of the right kind for the policy.
fn sense(step: usize, observations: &mut Row) {
    for (i, number) in observations.floats.iter_mut().enumerate() {
        *number = (step as f32 / 7.0 + i as f32).sin();
    }
}

/// Where a robot moves.
fn actuate(_actions: &Row) {}

/// The bytes of a saved policy. A program can also have them built in: `include_bytes!` of a checkpoint's
/// `model.safetensors`.
fn saved(path: Option<&String>) -> Result<Vec<u8>, Box<dyn Error>> {
    if let Some(path) = path.map(PathBuf::from) {
        let folder = if RunFolder::is_run(&path) { RunFolder::open(&path)?.best() } else { path };
        return Ok(Checkpoint::load(&folder)?.to_bytes()?);
    }
    let config = presets::model("tmaze-quick").ok_or("no such preset")?;
    let params = init::parameters(config.architecture(), 0)?;
    Ok(Checkpoint { config, params }.to_bytes()?)
}

/// A session that has run every program once: they are compiled when first needed, not in the loop.
fn warm(policy: &Checkpoint) -> Result<Session, elmur::model::Error> {
    let mut session = Session::new(&policy.config, &policy.params, ROBOTS, &Pool::new(1))?;
    let observation = Row::zeros(session.observation_widths(), ROBOTS);
    for _ in 0..session.architecture().window().steps {
        session.act(Seen { observation: observation.values(), returns: Some(&RETURNS) })?;
    }
    Ok(session)
}

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let steps: usize = args.get(1).map_or(Ok(300), |text| text.parse())?;
    let rate: f64 = args.get(2).map_or(Ok(200.0), |text| text.parse())?;

    let policy = Checkpoint::from_bytes(&saved(args.first())?)?;
    let mut session = warm(&policy)?;
    let all: Vec<usize> = (0..ROBOTS).collect();
    session.reset(&[(0, 10), (1, 11), (2, 12)])?; // (row, seed)
    let mut next_seed = 13;
    let mut observations = Row::zeros(session.observation_widths(), ROBOTS);
    let mut actions = Row::zeros(session.action_widths(), ROBOTS);

    let (mut latencies, mut late) = (Vec::with_capacity(steps), 0);
    let period = Duration::try_from_secs_f64(1.0 / rate)?;
    let mut tick = Instant::now();
    for step in 0..steps {
        sense(step, &mut observations);
        let begin = Instant::now();
        let seen = Seen { observation: observations.values(), returns: Some(&RETURNS) };
        session.select_action(&all, seen, Choose::Greedy, actions.as_mut())?;
        latencies.push(begin.elapsed());
        actuate(&actions);

        // Episodes end at their own times; the other rows go on undisturbed.
        for row in 0..ROBOTS {
            if session.times()[row] == EPISODES[row] {
                session.reset(&[(row, next_seed)])?;
                println!("step {step}: robot {row} begins another episode");
                next_seed += 1;
            }
        }
        // What the robots remember survives the end of a process: a session made anew goes on from the bytes.
        if step == steps / 2 {
            let bytes = session.snapshot(&all)?.to_bytes()?;
            session = warm(&policy)?;
            session.restore(&all, &Snapshot::from_bytes(&bytes)?)?;
            println!("step {step}: restored {} bytes, at times {:?}", bytes.len(), session.times());
            tick = Instant::now();
        }

        tick += period;
        match tick.checked_duration_since(Instant::now()) {
            Some(rest) => sleep(rest),
            None => late += 1,
        }
    }

    latencies.sort_unstable();
    let percentile = |p: usize| latencies.get(steps * p / 100).map_or(0.0, |time| time.as_secs_f64() * 1e6);
    println!("{steps} steps of {ROBOTS} robots at {rate} per second, {late} late");
    println!("latency per step: p50 {:.0} us, p99 {:.0} us", percentile(50), percentile(99));
    Ok(())
}
