//! `elmur bench block`: what the engine adds to the arithmetic of one transformer block.
//!
//! Training: batch 128 x 10, d = 128, two heads, SwiGLU 1024; forward, backward and AdamW update, against the
//! sum of the block's matrix products alone through the `gemm` crate with as many threads. `gemm_fraction` is
//! the block's rate as a share of that. `engine_products_ms` are the same products through our own kernels.
//!
//! Step: batch 1, one token, forward only, one thread. `overhead_per_op_us` is the time beyond the same
//! products through `gemm`, divided by the number of ops.

use elmur_engine::{
    Activation, AdamW, Attention, AttentionMask, DType, Error, Graph, Norm, NormKind, Pool, Program, Qkv,
    Result, Store, Value,
};
use serde_json::json;

use super::{Times, print, round, take_turns};

/// Options of `elmur bench block`.
#[derive(clap::Args)]
pub struct Args {
    /// Print JSON lines.
    #[arg(long)]
    json: bool,
    /// Use this many threads for training; 0: as many as are granted.
    #[arg(long, default_value_t = 0, value_parser = crate::threads())]
    threads: usize,
    /// Measure this many rounds.
    #[arg(long, default_value_t = 40, value_parser = crate::count(1 << 20))]
    rounds: usize,
    /// Also print the time of every step of the training program.
    #[arg(long)]
    profile: bool,
}

const F32: DType = DType::F32;
const D: usize = 128;
const HEADS: usize = 2;
const HIDDEN: usize = 1024;
const BATCH: usize = 128;
const TOKENS: usize = 10;

/// Runs the benchmark and prints its rows.
pub fn run(args: &Args) -> Result<()> {
    let pool = Pool::new(args.threads);
    training(args, &pool)?;
    step(args)
}

/// A block's parameters, [out, in].
struct Block {
    qkv: Value,
    out: Value,
    norms: [Norm; 2],
    gate_up: Value,
    down: Value,
}

impl Block {
    fn new(g: &mut Graph) -> Result<Self> {
        let mut norm = |name: &str| -> Result<Norm> {
            let gamma = g.param(&format!("{name}.gamma"), F32, [D])?;
            let beta = g.param(&format!("{name}.beta"), F32, [D])?;
            Ok(Norm { kind: NormKind::Layer { beta }, gamma, eps: 1e-8 })
        };
        let norms = [norm("norm1")?, norm("norm2")?];
        Ok(Self {
            qkv: g.param("qkv", F32, [3 * D, D])?,
            out: g.param("out", F32, [D, D])?,
            norms,
            gate_up: g.param("gate_up", F32, [2 * HIDDEN, D])?,
            down: g.param("down", F32, [D, HIDDEN])?,
        })
    }

    fn forward(&self, g: &mut Graph, x: Value) -> Result<Value> {
        let qkv = g.linear(x, self.qkv, None, Activation::Identity)?;
        let options = Attention { heads: HEADS, mask: AttentionMask::Causal, ..Attention::default() };
        let (attended, _) = g.attention(Qkv::Packed(qkv), options)?;
        let attended = g.linear(attended, self.out, None, Activation::Identity)?;
        let (x, _) = g.residual_norm(x, attended, self.norms[0])?;
        let hidden = g.linear(x, self.gate_up, None, Activation::Identity)?;
        let hidden = g.swiglu(hidden)?;
        let y = g.linear(hidden, self.down, None, Activation::Identity)?;
        Ok(g.residual_norm(x, y, self.norms[1])?.0)
    }
}

/// Normal numbers of deviation 0.05 in every parameter, ones in the scales.
fn initialise(graph: &Graph, store: &Store) -> Result<()> {
    for (index, (name, value)) in graph.params().enumerate() {
        let mut data = vec![0.0; graph.ty(value)?.len()];
        elmur_engine::rng::Stream::new(1, 0, index as u32).fill_normal(&mut data, 0.05);
        let gamma = name.ends_with("gamma");
        let data: Vec<f32> = data.into_iter().map(|x| if gamma { 1.0 } else { x as f32 }).collect();
        store.set(name, &data)?;
    }
    Ok(())
}

fn training(args: &Args, pool: &Pool) -> Result<()> {
    let mut g = Graph::new();
    let block = Block::new(&mut g)?;
    let params: Vec<Value> = g.params().map(|(_, v)| v).collect();
    // The input is a parameter, so that its gradient is computed as inside a stack of blocks.
    let x = g.param("x", F32, [BATCH, TOKENS, D])?;
    let target = g.input("target", F32, [BATCH, TOKENS, D])?;
    let lr = g.input("lr", F32, [])?;
    let y = block.forward(&mut g, x)?;
    let loss = g.mse(y, target, None)?;
    let mut wrt = params.clone();
    wrt.push(x);
    let grads: Vec<Value> = g.gradients(loss, &wrt)?.into_iter().flatten().collect();
    let norm = g.global_norm(&grads[..params.len()])?;
    let pairs: Vec<(Value, Value)> = params.into_iter().zip(grads.iter().copied()).collect();
    g.adamw(AdamW::default(), lr, Some((norm, 5.0)), &pairs)?;
    g.output("loss", loss)?;
    g.output("dx", grads[grads.len() - 1])?;

    let store = Store::new();
    store.declare(&g)?;
    initialise(&g, &store)?;
    let mut program = Program::new(&g, pool, &[&store])?;
    program.set("lr", &[2e-4f32])?;

    let tokens = BATCH * TOKENS;
    let shapes = [(3 * D, D), (D, D), (2 * HIDDEN, D), (D, HIDDEN)];
    let mut peer = Products::new(&shapes, tokens, true);
    let mut own = own_products(&shapes, tokens, pool)?;
    let threads = pool.threads();
    let times = take_turns::<Error>(
        args.rounds,
        &mut [
            &mut || program.run(),
            &mut || {
                peer.run(threads);
                Ok(())
            },
            &mut || own.run(),
        ],
    )?;
    let [block, gemm, own] = &times[..] else { return Ok(()) };
    let flops: usize = shapes.iter().map(|(out, width)| 3 * 2 * tokens * out * width).sum();
    print(
        args.json,
        &json!({
            "bench": "block", "work": "train 128x10 d128 swiglu1024", "threads": threads,
            "ms": round(block.ms(0.5)), "gemm_ms": round(gemm.ms(0.5)), "engine_products_ms": round(own.ms(0.5)),
            "gemm_fraction": round(gemm.ms(0.5) / block.ms(0.5)),
            "gemm_fraction_of_best": round(gemm.ms(0.0) / block.ms(0.0)),
            "gflops": round(flops as f64 / block.ms(0.5) / 1e6),
            "steps": program.steps(), "arena_bytes": program.arena_bytes(),
            "isa": format!("{:?}", elmur_engine::Isa::best()),
        }),
    );
    if args.profile {
        for step in program.profile(args.rounds)? {
            let outputs: Vec<String> = step.outputs.iter().map(ToString::to_string).collect();
            let us = round(step.time.as_secs_f64() * 1e6);
            print(args.json, &json!({"op": step.op, "outputs": outputs.join(" "), "us": us}));
        }
    }
    Ok(())
}

fn step(args: &Args) -> Result<()> {
    let mut g = Graph::new();
    let block = Block::new(&mut g)?;
    let x = g.input("x", F32, [1, 1, D])?;
    let y = block.forward(&mut g, x)?;
    g.output("y", y)?;
    let store = Store::new();
    store.declare(&g)?;
    initialise(&g, &store)?;
    let mut program = Program::new(&g, &Pool::new(1), &[&store])?;
    program.set("x", &[0.5f32; D])?;

    let shapes = [(3 * D, D), (D, D), (2 * HIDDEN, D), (D, HIDDEN)];
    let mut peer = Products::new(&shapes, 1, false);
    let mut tiny = tiny_ops()?;
    let rounds = args.rounds * 50;
    let times: Vec<Times> = take_turns::<Error>(
        rounds,
        &mut [
            &mut || program.run(),
            &mut || {
                peer.run(1);
                Ok(())
            },
            &mut || tiny.run(),
        ],
    )?;
    let [block, products, tiny_time] = &times[..] else { return Ok(()) };
    let overhead = (block.ms(0.5) - products.ms(0.5)) / program.steps() as f64;
    print(
        args.json,
        &json!({
            "bench": "block", "work": "step 1x1 d128 swiglu1024", "threads": 1,
            "p50_us": round(block.ms(0.5) * 1e3), "p99_us": round(block.ms(0.99) * 1e3),
            "products_us": round(products.ms(0.5) * 1e3), "ops": program.steps(),
            "overhead_per_op_us": round(overhead * 1e3),
            "empty_op_us": round(tiny_time.ms(0.5) * 1e3 / tiny.steps() as f64),
        }),
    );
    Ok(())
}

/// A hundred ops on one number each: nothing but overhead.
fn tiny_ops() -> Result<Program> {
    let mut g = Graph::new();
    let x = g.input("x", F32, [1])?;
    let mut y = x;
    for _ in 0..100 {
        y = g.add(y, x)?;
    }
    g.output("y", y)?;
    Program::new(&g, &Pool::new(1), &[])
}

/// The products of linear maps (out, in) through the `gemm` crate: forward, and where `training` both
/// gradients.
struct Products {
    tokens: usize,
    training: bool,
    /// Weight, input, output, weight gradient.
    maps: Vec<(usize, usize, [Vec<f32>; 4])>,
}

impl Products {
    fn new(shapes: &[(usize, usize)], tokens: usize, training: bool) -> Self {
        let filled = |n: usize| (0..n).map(|i| (i % 17) as f32 * 0.01).collect::<Vec<f32>>();
        let map = |&(out, width): &(usize, usize)| {
            (
                out,
                width,
                [filled(out * width), filled(tokens * width), filled(tokens * out), filled(out * width)],
            )
        };
        Self { tokens, training, maps: shapes.iter().map(map).collect() }
    }

    fn run(&mut self, threads: usize) {
        let tokens = self.tokens;
        for (out, width, [w, x, y, dw]) in &mut self.maps {
            let (out, width) = (*out, *width);
            product(threads, (tokens, out, width), y, x, (width, 1), w, (1, width));
            if self.training {
                product(threads, (tokens, width, out), x, y, (out, 1), w, (width, 1));
                product(threads, (out, width, tokens), dw, y, (1, out), x, (width, 1));
            }
        }
    }
}

/// C [m, n] = A B with (row, column) strides of A and B.
fn product(
    threads: usize,
    (m, n, k): (usize, usize, usize),
    c: &mut [f32],
    a: &[f32],
    a_strides: (usize, usize),
    b: &[f32],
    b_strides: (usize, usize),
) {
    assert!(c.len() >= m * n && a.len() >= m * k && b.len() >= k * n);
    let parallelism = if threads > 1 { gemm::Parallelism::Rayon(threads) } else { gemm::Parallelism::None };
    // SAFETY: the lengths were checked, and C overlaps neither operand.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            c.as_mut_ptr(),
            1,
            n as isize,
            false,
            a.as_ptr(),
            a_strides.1 as isize,
            a_strides.0 as isize,
            b.as_ptr(),
            b_strides.1 as isize,
            b_strides.0 as isize,
            0.0,
            1.0,
            false,
            false,
            false,
            parallelism,
        );
    }
}

/// The training products through the engine.
fn own_products(shapes: &[(usize, usize)], tokens: usize, pool: &Pool) -> Result<Program> {
    let mut g = Graph::new();
    for (i, &(out, width)) in shapes.iter().enumerate() {
        let w = g.param(&format!("w{i}"), F32, [out, width])?;
        let x = g.param(&format!("x{i}"), F32, [tokens, width])?;
        let dy = g.param(&format!("dy{i}"), F32, [tokens, out])?;
        for (name, value) in [
            ("y", g.matmul_with(x, w, false, true)?),
            ("dx", g.matmul(dy, w)?),
            ("dw", g.matmul_with(dy, x, true, false)?),
        ] {
            g.output(&format!("{name}{i}"), value)?;
        }
    }
    let store = Store::new();
    store.declare(&g)?;
    initialise(&g, &store)?;
    Program::new(&g, pool, &[&store])
}
