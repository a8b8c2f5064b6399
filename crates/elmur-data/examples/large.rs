//! Writes an `.elmur` file of random pictures, as large as asked: `large PATH BYTES`. What to do at a step is
//! written in the first pixel of its picture.

use std::collections::BTreeMap;
use std::process::ExitCode;

use elmur_base::{Space, Spaces};
use elmur_data::{Column, Episode, Result, Writer};
use elmur_rng::Rng;

/// Steps of an episode, and numbers of a picture: three channels of 64 x 64 pixels.
const STEPS: usize = 200;
const PICTURE: usize = 3 * 64 * 64;

fn main() -> ExitCode {
    let mut args = std::env::args().skip(1);
    let (path, bytes) = (args.next(), args.next().and_then(|bytes| bytes.parse::<usize>().ok()));
    let (Some(path), Some(bytes)) = (path, bytes) else {
        complain("usage: large PATH BYTES");
        return ExitCode::FAILURE;
    };
    match write(&path, bytes) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            complain(&error.to_string());
            ExitCode::FAILURE
        }
    }
}

#[allow(clippy::print_stderr)]
fn complain(text: &str) {
    eprintln!("{text}");
}

fn write(path: &str, bytes: usize) -> Result<()> {
    let spaces =
        Spaces { observation: Space::Bytes { shape: vec![3, 64, 64] }, action: Space::Discrete { n: 4 } };
    let metadata = BTreeMap::from([("env".to_owned(), "random pictures".to_owned())]);
    let mut writer = Writer::replace(path, &spaces, metadata)?;
    let mut rng = Rng::new(0, 0);
    for _ in 0..bytes.div_ceil(STEPS * PICTURE) {
        let pictures: Vec<u8> = (0..STEPS * PICTURE / 4).flat_map(|_| rng.bits().to_le_bytes()).collect();
        let actions = pictures.chunks_exact(PICTURE).map(|picture| i32::from(picture[0]) / 64).collect();
        writer.push(&Episode {
            observations: vec![Column::U8(pictures)],
            actions: vec![Column::I32(actions)],
            rewards: vec![0.0; STEPS],
            terminated: true,
            truncated: false,
            imitate: None,
            labels: None,
            accepted: None,
        })?;
    }
    writer.finish()
}
