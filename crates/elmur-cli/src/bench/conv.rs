//! `elmur bench conv`: the published image encoder's convolutions on the pictures of a batch, forward and backward to
//! all weights. `runs/conv_peer.py` measures the same in PyTorch.

use elmur_engine::{Activation, Conv2d, DType, Device, Graph, Program, Store};
use elmur_train::Result;
use serde_json::json;

use super::{print, round, take_turns};
use crate::device::DeviceArgs;

/// Options of `elmur bench conv`.
#[derive(clap::Args)]
pub struct Args {
    /// Print JSON lines.
    #[arg(long)]
    json: bool,
    /// Use this many threads; 0: as many as are granted.
    #[arg(long, default_value_t = 0, value_parser = crate::threads())]
    threads: usize,
    /// Measure this many rounds.
    #[arg(long, default_value_t = 5, value_parser = crate::count(1 << 20))]
    rounds: usize,
    /// Convolve this many pictures: 64 crops of 20 steps by default.
    #[arg(long, default_value_t = 1280, value_parser = crate::count(1 << 20))]
    images: usize,
    /// Give pictures this many channels.
    #[arg(long, default_value_t = 6, value_parser = crate::count(1 << 10))]
    channels: usize,
    /// Give pictures this many rows and columns, at least 36.
    #[arg(long, default_value_t = 128, value_parser = crate::count(1 << 12))]
    size: usize,
    #[command(flatten)]
    device: DeviceArgs,
}

/// Outputs, kernel and stride of the published convolutions.
const LAYERS: [(usize, usize, usize); 3] = [(32, 8, 4), (64, 4, 2), (64, 3, 1)];

/// Runs the benchmark and prints its row.
pub fn run(args: &Args) -> Result<()> {
    let mut g = Graph::new();
    // A parameter, so that the pictures are where they are computed with.
    let mut x = g.param("images", DType::F32, [args.images, args.channels, args.size, args.size])?;
    let (mut params, mut multiplications) = (Vec::new(), 0.0);
    for (i, (outputs, kernel, stride)) in LAYERS.into_iter().enumerate() {
        let channels = g.shape(x)?[1];
        let weight = g.param(&format!("weight{i}"), DType::F32, [outputs, channels, kernel, kernel])?;
        let bias = g.param(&format!("bias{i}"), DType::F32, [outputs])?;
        x = g.conv2d(x, weight, Some(bias), Conv2d { stride, padding: 0 }, Activation::Relu)?;
        params.extend([weight, bias]);
        // Forward, gradient of the weight and, but for the pictures, of the input.
        let passes = if i == 0 { 2.0 } else { 3.0 };
        multiplications += passes * g.ty(x)?.len() as f64 * (channels * kernel * kernel) as f64;
    }
    let loss = g.sum(x)?;
    for (i, gradient) in g.gradients(loss, &params)?.into_iter().enumerate() {
        if let Some(gradient) = gradient {
            g.output(&format!("gradient{i}"), gradient)?;
        }
    }
    let (device, store) = (args.device.open(args.threads)?, Store::new());
    store.declare(&g)?;
    for (name, _) in g.params() {
        let len = store.ty(name)?.len();
        let small = |i: usize| (i * 37 % 101) as f32 / 101.0 * 0.1 - 0.05;
        let pixel = |i: usize| (i * 31 % 256) as f32 / 255.0;
        let values: Vec<f32> =
            if name == "images" { (0..len).map(pixel).collect() } else { (0..len).map(small).collect() };
        store.set(name, &values)?;
    }
    let store = store.to(&device)?;
    let mut program = Program::new(&g, &device, &[&store])?;
    let mut task = || -> Result<()> {
        program.run()?;
        Ok(device.synchronize()?)
    };
    let times = &take_turns(args.rounds, &mut [&mut task])?[0];
    let ms = times.ms(0.5);
    let mut row = json!({
        "work": "convolutions, forward and backward", "device": args.device.name(), "images": args.images,
        "channels": args.channels, "size": args.size, "ms": round(ms), "best_ms": round(times.ms(0.0)),
        "gflop_per_s": round(2e-6 * multiplications / ms), "images_per_s": round(args.images as f64 * 1e3 / ms),
    });
    match &device {
        Device::Cpu(pool, precision) => {
            row["threads"] = json!(pool.threads());
            row["precision"] = json!(precision.name());
        }
        #[cfg(feature = "cuda")]
        Device::Cuda(_) => row["precision"] = json!(args.device.precision()?.name()),
    }
    print(args.json, &row);
    Ok(())
}
