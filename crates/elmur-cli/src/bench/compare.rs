//! `elmur bench compare`: the T-Maze model of the paper here and in PyTorch and ONNX Runtime, in alternating rounds.
//!
//! A peer process measures what it is asked to, one JSON line at a time (`compare_peer.py`), so that a machine that grows
//! busy disturbs both sides alike. Ratios are taken round by round.

use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use elmur_engine::{Device, Pool, Precision};
use elmur_model::init;
use elmur_model::session::Weights;
use elmur_train::{Error, Result, RunConfig};
use serde_json::{Value, json};

use super::policy::{Steps, TrainBench};
use super::{print, round};

/// Options of `elmur bench compare`.
#[derive(clap::Args)]
pub struct Args {
    /// Print JSON lines.
    #[arg(long)]
    json: bool,
    /// Run the peers with this Python, which has the packages torch and, for acting, onnxruntime and onnx.
    #[arg(long, value_name = "PATH")]
    peer_python: PathBuf,
    /// Measure this many rounds, each both here and with the peers.
    #[arg(long, default_value_t = 5, value_parser = crate::count(1000))]
    rounds: usize,
    /// Use this many threads for training, for batches and for the second row of single steps; 0: as many as are granted.
    #[arg(long, default_value_t = 0, value_parser = crate::threads())]
    threads: usize,
    /// Measure this many training batches in a round.
    #[arg(long, default_value_t = 5, value_parser = crate::count(1000))]
    batches: usize,
    /// Measure this many segments of ten steps in a round.
    #[arg(long, default_value_t = 30, value_parser = crate::count(1000))]
    segments: usize,
}

/// What is measured on both sides.
struct Work {
    name: String,
    /// Rows of a step; none for training.
    batch: Option<usize>,
    threads: usize,
}

/// Times of one program, one for each round.
struct Measured {
    name: String,
    ms: Vec<f64>,
}

/// Runs `elmur bench compare`.
pub fn run(args: &Args) -> Result<()> {
    let all = Pool::new(args.threads).threads();
    let mut works = vec![Work { name: "train".into(), batch: None, threads: all }];
    let steps = [(1, 1), (1, all), (100, all)].into_iter().enumerate();
    for (_, (batch, threads)) in steps.filter(|(i, _)| *i != 1 || all > 1) {
        works.push(Work { name: format!("step B={batch}"), batch: Some(batch), threads });
    }
    let preset = RunConfig::preset("tmaze")?;
    let mut peer = Peer::start(&args.peer_python)?;
    for work in works {
        let mut own: Vec<Measured> =
            own_names(&work).into_iter().map(|name| Measured { name, ms: Vec::new() }).collect();
        let mut peers: Vec<Measured> = Vec::new();
        for _ in 0..args.rounds {
            for (measured, ms) in own.iter_mut().zip(measure(args, &preset, &work)?) {
                measured.ms.push(ms);
            }
            for (name, ms) in peer.measure(&work, args)? {
                match peers.iter_mut().find(|peer| peer.name == name) {
                    Some(peer) => peer.ms.push(ms),
                    None => peers.push(Measured { name, ms: vec![ms] }),
                }
            }
        }
        report(args, &work, &own, &peers);
    }
    Ok(())
}

/// Names of our own ways of doing some work.
fn own_names(work: &Work) -> Vec<String> {
    match work.batch {
        None => vec!["elmur".into(), "elmur, precision f32".into()],
        Some(_) => vec!["elmur".into(), "elmur, weights of bf16".into()],
    }
}

/// Times of our own ways, in milliseconds.
fn measure(args: &Args, preset: &RunConfig, work: &Work) -> Result<Vec<f64>> {
    let pool = Pool::new(work.threads);
    let Some(batch) = work.batch else {
        // As runs train unless they are told otherwise, and with products of f32 accuracy as the peers' are.
        return [Precision::default(), Precision::F32]
            .into_iter()
            .map(|precision| -> Result<f64> {
                let device = Device::Cpu(pool.clone(), precision);
                let (times, _) = TrainBench::new(preset, false, &device)?.times(&device, args.batches)?;
                Ok(times.ms(0.5))
            })
            .collect();
    };
    let device = Device::from(&pool);
    let params = init::parameters(preset.model.architecture(), 0)?;
    [Weights::F32, Weights::Bf16]
        .into_iter()
        .map(|weights| -> Result<f64> {
            Ok(Steps::measure(&preset.model, &params, batch, &device, args.segments, weights)?.median())
        })
        .collect()
}

/// Prints medians, their spread, and how many times faster each of ours is than each peer.
fn report(args: &Args, work: &Work, own: &[Measured], peers: &[Measured]) {
    for measured in own.iter().chain(peers) {
        let [least, median, most] = spread(&measured.ms);
        let mut row = json!({
            "work": work.name, "threads": work.threads, "program": measured.name, "ms": round(median),
            "least_ms": round(least), "most_ms": round(most),
        });
        for own in
            own.iter().filter(|own| own.name != measured.name && !own_names(work).contains(&measured.name))
        {
            let ratios: Vec<f64> = measured.ms.iter().zip(&own.ms).map(|(peer, own)| peer / own).collect();
            let [least, median, most] = spread(&ratios);
            row[format!("{} is faster by", own.name)] =
                json!({"median": round(median), "least": round(least), "most": round(most)});
        }
        print(args.json, &row);
    }
}

/// Least, median and most of some numbers.
fn spread(numbers: &[f64]) -> [f64; 3] {
    let mut sorted = numbers.to_vec();
    sorted.sort_by(f64::total_cmp);
    let at = |i: usize| sorted.get(i).copied().unwrap_or(f64::NAN);
    [at(0), at(sorted.len() / 2), at(sorted.len().saturating_sub(1))]
}

/// The process of the peers.
struct Peer {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    python: PathBuf,
}

impl Drop for Peer {
    fn drop(&mut self) {
        // The process ends by itself when its input does, unless it is in the middle of something.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Peer {
    fn start(python: &std::path::Path) -> Result<Self> {
        let fail = |got: String| Error::Config {
            key: "--peer-python".into(),
            expected:
                "a Python with the packages torch, onnx and onnxruntime (pip install torch onnx onnxruntime)"
                    .into(),
            got,
        };
        let mut child = Command::new(python)
            .args(["-c", include_str!("compare_peer.py")])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .map_err(|error| fail(format!("{}: {error}", python.display())))?;
        let (Some(input), Some(output)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(fail("a process without input and output".into()));
        };
        let mut peer = Self { child, input, output: BufReader::new(output), python: python.to_owned() };
        let first = peer.line()?;
        match first["missing"].as_str() {
            Some(package) => Err(fail(format!("{} without {package}", python.display()))),
            None => Ok(peer),
        }
    }

    /// The next line of the process.
    fn line(&mut self) -> Result<Value> {
        let mut line = String::new();
        let read = self.output.read_line(&mut line);
        let value = read.ok().filter(|bytes| *bytes > 0).and_then(|_| serde_json::from_str(&line).ok());
        value.ok_or_else(|| Error::Config {
            key: "--peer-python".into(),
            expected: "a process that answers one JSON object per line".into(),
            got: format!("{} that ended or wrote {:?}", self.python.display(), line.trim()),
        })
    }

    /// Times of all peers, in milliseconds. Peers that cannot be measured are named once and left out.
    fn measure(&mut self, work: &Work, args: &Args) -> Result<Vec<(String, f64)>> {
        let (kind, batch, rounds) = match work.batch {
            None => ("train", 0, args.batches),
            Some(batch) => ("step", batch, 10 * args.segments),
        };
        let task = json!({"work": kind, "batch": batch, "threads": work.threads, "rounds": rounds});
        // A process that has ended is reported by the missing answer.
        let _ = writeln!(self.input, "{task}").and_then(|()| self.input.flush());
        let mut times = Vec::new();
        loop {
            let answer = self.line()?;
            let peer = answer["peer"].as_str().unwrap_or_default().to_owned();
            if let Some(ms) = answer["ms"].as_f64() {
                times.push((peer, ms));
            } else if let Some(why) = answer["failed"].as_str() {
                crate::note(&format!("{}: {peer} is left out: {why}", work.name));
            } else {
                return Ok(times);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_spread_is_least_median_and_most() {
        assert_eq!(spread(&[3.0, 1.0, 2.0]), [1.0, 2.0, 3.0]);
        assert_eq!(spread(&[5.0]), [5.0, 5.0, 5.0]);
    }
}
