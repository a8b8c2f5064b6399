//! `elmur bench conv`: the published image encoder's convolutions on the pictures of a batch, forward and backward to
//! all weights. `runs/conv_peer.py` measures the same in PyTorch.

use elmur_engine::{Activation, Conv2d, DType, Graph, Pool, Program, Result, Store};
use serde_json::json;

use super::{print, round, take_turns};

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
}

/// Outputs, kernel and stride of the published convolutions.
const LAYERS: [(usize, usize, usize); 3] = [(32, 8, 4), (64, 4, 2), (64, 3, 1)];

/// Runs the benchmark and prints its row.
pub fn run(args: &Args) -> Result<()> {
    let mut g = Graph::new();
    let mut x = g.input("images", DType::F32, [args.images, args.channels, args.size, args.size])?;
    let (mut params, mut multiplications) = (Vec::new(), 0.0);
    for (i, (outputs, kernel, stride)) in LAYERS.into_iter().enumerate() {
        let channels = g.shape(x)?[1];
        let weight = g.param(&format!("weight{i}"), DType::F32, [outputs, channels, kernel, kernel])?;
        let bias = g.param(&format!("bias{i}"), DType::F32, [outputs])?;
        let input = x;
        x = g.conv2d(x, weight, Some(bias), Conv2d { stride, padding: 0 }, Activation::Relu)?;
        params.extend([weight, bias]);
        // Forward, gradient of the weight and, but for the pictures, of the input.
        let passes = if g.shape(input)?[1] == args.channels && i == 0 { 2.0 } else { 3.0 };
        multiplications += passes * g.ty(x)?.len() as f64 * (channels * kernel * kernel) as f64;
    }
    let loss = g.sum(x)?;
    for (i, gradient) in g.gradients(loss, &params)?.into_iter().enumerate() {
        if let Some(gradient) = gradient {
            g.output(&format!("gradient{i}"), gradient)?;
        }
    }
    let (pool, store) = (Pool::new(args.threads), Store::new());
    store.declare(&g)?;
    for (name, _) in g.params() {
        let len = store.ty(name)?.len();
        let small = |i: usize| (i * 37 % 101) as f32 / 101.0 * 0.1 - 0.05;
        store.set(name, &(0..len).map(small).collect::<Vec<f32>>())?;
    }
    let mut program = Program::new(&g, &pool, &[&store])?;
    let pixels = program.input_mut::<f32>("images")?;
    pixels.iter_mut().enumerate().for_each(|(i, x)| *x = (i * 31 % 256) as f32 / 255.0);
    let mut task = || program.run();
    let times = &take_turns(args.rounds, &mut [&mut task])?[0];
    let ms = times.ms(0.5);
    print(
        args.json,
        &json!({
            "work": "convolutions, forward and backward", "images": args.images, "channels": args.channels,
            "size": args.size, "threads": pool.threads(), "ms": round(ms), "best_ms": round(times.ms(0.0)),
            "gflop_per_s": round(2e-6 * multiplications / ms),
            "images_per_s": round(args.images as f64 * 1e3 / ms),
        }),
    );
    Ok(())
}
