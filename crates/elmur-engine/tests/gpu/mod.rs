//! GPUs for tests, and comparison of one graph on CPU and GPU.

#![allow(dead_code, clippy::print_stderr)]

use std::sync::OnceLock;

use elmur_engine::rng::Stream;
use elmur_engine::{DType, Device, Gpu, Graph, Pool, Precision, Program, Result, Store, Value};

/// The GPU in this precision; none, with the reason printed once, where there is none.
pub fn gpu(precision: Precision) -> Option<&'static Gpu> {
    static GPUS: OnceLock<Option<[Gpu; 3]>> = OnceLock::new();
    let gpus = GPUS.get_or_init(|| {
        let open = || -> Result<[Gpu; 3]> {
            let [a, b, c] = Precision::ALL.map(|precision| Gpu::open(0, precision));
            Ok([a?, b?, c?])
        };
        // runs/gpu-check.sh sets this, so that nothing is skipped there unnoticed.
        let required = std::env::var_os("ELMUR_REQUIRE_GPU").is_some();
        match open() {
            Ok(gpus) => Some(gpus),
            Err(error) if required => panic!("no GPU: {error}"),
            Err(error) => {
                eprintln!("skipped on the GPU: {error}");
                None
            }
        }
    });
    gpus.as_ref().map(|gpus| &gpus[precision as usize])
}

/// Largest difference of two lists, relative to the largest number in them (at least 1).
pub fn difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    let scale = a.iter().fold(1.0f32, |m, x| m.max(x.abs()));
    let worst = a.iter().zip(b).map(|(a, b)| if a.to_bits() == b.to_bits() { 0.0 } else { (a - b).abs() });
    worst.fold(0.0, |m: f32, d| if d.is_nan() { f32::INFINITY } else { m.max(d) }) / scale
}

/// Outputs and gradients of a graph on `device`.
fn results(
    device: &Device,
    seed: u64,
    (mut g, outputs, loss): (Graph, Vec<Value>, Value),
) -> Result<Vec<(String, Vec<f32>)>> {
    let params: Vec<(String, Value)> = g.params().map(|(n, v)| (n.to_owned(), v)).collect();
    let values: Vec<Value> = params.iter().map(|(_, v)| *v).collect();
    let mut named = vec![("loss".to_owned(), loss)];
    named.extend(outputs.iter().enumerate().map(|(i, v)| (format!("output {i}"), *v)));
    for ((name, _), grad) in params.iter().zip(g.gradients(loss, &values)?) {
        named.extend(grad.map(|grad| (format!("gradient of {name}"), grad)));
    }
    for (name, value) in &named {
        g.output(name, *value)?;
    }
    let store = Store::on(device);
    store.declare(&g)?;
    let mut program = Program::new(&g, device, &[&store])?;
    // Other numbers first, so that what one run leaves behind shows in the next.
    for seed in [seed + 1000, seed] {
        for (i, (name, value)) in params.iter().enumerate() {
            let mut data = vec![0.0; g.ty(*value)?.len()];
            Stream::new(seed, 0, i as u32).fill_normal(&mut data, 1.0);
            store.set(name, &data.into_iter().map(|x| x as f32).collect::<Vec<_>>())?;
        }
        program.run()?;
    }
    let read = |(name, value): (String, Value)| -> Result<Option<(String, Vec<f32>)>> {
        if g.ty(value)?.dtype != DType::F32 {
            return Ok(None);
        }
        let data = program.get::<f32>(&name)?.to_vec();
        Ok(Some((name, data)))
    };
    named.into_iter().filter_map(|pair| read(pair).transpose()).collect()
}

/// Builds a graph twice and compares what CPU and GPU make of it, in f32 and tf32, whose 11 bits leave an error of 1e-2
/// in a sum of a thousand products that cancel.
pub fn compare(what: &str, seed: u64, build: impl Fn() -> Result<(Graph, Vec<Value>, Value)>) {
    let want = || results(&Device::from(&Pool::new(1)), seed, build()?);
    for (precision, tolerance) in [(Precision::F32, 2e-4), (Precision::Tf32, 1e-2)] {
        let Some(gpu) = gpu(precision) else { return };
        let got = build().and_then(|parts| results(&Device::from(gpu), seed, parts));
        let got = got.unwrap_or_else(|e| panic!("{what}: {e}"));
        for ((name, want), (_, got)) in want().unwrap().iter().zip(&got) {
            let error = difference(want, got);
            assert!(error <= tolerance, "{what}: {name} differs by {error} in {}", precision.name());
        }
    }
}
