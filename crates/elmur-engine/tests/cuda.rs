//! The CUDA executor: a whole training program against the CPU, memory that comes back, errors that say what
//! is wrong.

#![cfg(feature = "cuda")]
#![allow(clippy::unwrap_used, clippy::panic)]

mod common;
mod gpu;

use elmur_engine::{
    Activation, Attention, AttentionMask, Blend, Conv1d, Conv2d, DType, Gpu, Graph, Norm, NormKind, Pool,
    Precision, Program, Qkv, Relative, Result, SelectiveScan, Store, Value,
};

/// Loss, gradient norm and a parameter after each of ten steps of the policy that uses every op.
fn train(device: impl Into<elmur_engine::Device>) -> Vec<[f32; 3]> {
    let device = device.into();
    let g = common::policy(DType::F32).unwrap();
    let store = Store::on(&device);
    common::fill(&g, &store).unwrap();
    let mut program = Program::new(&g, &device, &[&store]).unwrap();
    common::feed(&mut program).unwrap();
    let step = |_| {
        program.run().unwrap();
        let number = |name: &str| program.get::<f32>(name).unwrap()[0];
        [number("loss"), number("gradient_norm"), store.get::<f32>("head").unwrap()[5]]
    };
    (0..10).map(step).collect()
}

/// In tf32 a choice may fall the other way than in f32: on a CPU, parameters moved by 1e-4 of themselves before every
/// step change the gradient norm of step 8 by up to 0.013, or 7e-3 of the loss, in half of the trials.
#[test]
fn training_follows_the_cpu() {
    for (precision, tolerance) in [(Precision::F32, 1e-3), (Precision::Tf32, 1e-2), (Precision::Bf16, 1e-1)] {
        let Some(gpu) = gpu::gpu(precision) else { return };
        let (cpu, cuda) = (train(&Pool::new(2)), train(gpu));
        for (step, (a, b)) in cpu.iter().zip(&cuda).enumerate() {
            let error = gpu::difference(a, b);
            assert!(error < tolerance, "step {step} in {}: {a:?} and {b:?}", precision.name());
        }
    }
}

/// Compares a graph whose loss is the sum of its output's squares.
fn compare(what: &str, build: impl Fn(&mut Graph) -> Result<Value>) {
    gpu::compare(what, 1, || {
        let mut g = Graph::new();
        let y = build(&mut g)?;
        let squares = g.mul(y, y)?;
        let loss = g.sum(squares)?;
        Ok((g, vec![y], loss))
    });
}

/// LSTMs with weights in registers, in the shared memories of a cluster, and in the second-level cache; one to
/// eight rows to a block, and last blocks with fewer; states before and after the window, and their gradients.
#[test]
fn lstm_windows_agree_with_the_cpu() {
    // In registers: long windows of widths 64 and 128.
    let held =
        [(64, 30, 128), (1, 4, 128), (135, 5, 128), (267, 4, 128), (5, 7, 64), (133, 4, 64), (399, 5, 64)];
    let clusters = [(1, 1, 128), (300, 2, 128), (20, 3, 160), (131, 3, 96), (7, 3, 64)];
    // Widths beyond the threads of a block, and such as divide them unevenly.
    let cache = [(5, 3, 130), (33, 4, 40), (3, 2, 520), (130, 2, 600)];
    for (batch, steps, width) in held.into_iter().chain(clusters).chain(cache) {
        compare(&format!("lstm of {batch} rows, {steps} steps, width {width}"), |g| {
            let x = g.param("x", DType::F32, [batch, steps, 4 * width])?;
            let weight = g.param("weight", DType::F32, [4 * width, width])?;
            let weight = g.scale(weight, 1.0 / (width as f64).sqrt())?;
            let bias = g.param("bias", DType::F32, [4 * width])?;
            let [hidden, cell] = ["hidden", "cell"].map(|name| g.param(name, DType::F32, [batch, width]));
            let lstm = g.lstm(x, weight, bias, hidden?, cell?)?;
            let last = g.mul(lstm.last_hidden, lstm.last_cell)?;
            let last = g.reshape(last, [batch, 1, width])?;
            g.concat(&[lstm.hidden, last], 1)
        });
        // Nothing but the last states is read, the first states need no gradient, and the gates take the place
        // of an x that is computed.
        compare(&format!("last states of an lstm of {batch} rows, {steps} steps, width {width}"), |g| {
            let x = g.param("x", DType::F32, [batch, steps, 4 * width])?;
            let x = g.scale(x, 0.5)?;
            let weight = g.param("weight", DType::F32, [4 * width, width])?;
            let weight = g.scale(weight, 1.0 / (width as f64).sqrt())?;
            let bias = g.full(DType::F32, [4 * width], 0.5)?;
            let first = g.full(DType::F32, [batch, width], 0.25)?;
            let lstm = g.lstm(x, weight, bias, first, first)?;
            g.concat(&[lstm.last_hidden, lstm.last_cell], 1)
        });
    }
}

/// Shapes beyond those of `gradients.rs`: more than one round, tile, part or register file; rows that do not
/// fit shared memory.
#[test]
fn larger_shapes_agree_with_the_cpu() {
    for (batch, heads, queries, keys, width, relative) in [
        (3, 4, 20, 256, 8, false),
        (2, 3, 21, 45, 16, false),
        (3, 2, 90, 90, 32, true),
        (2, 2, 37, 37, 64, true),
        (1, 2, 128, 128, 16, true),
        (1, 2, 200, 200, 64, true),
        (2, 2, 309, 309, 16, true),
        (2, 1, 141, 333, 64, false),
        (2, 2, 150, 150, 128, true),
        (2, 1, 20, 70, 128, false),
        (2, 1, 33, 50, 12, false),
    ] {
        compare(&format!("attention of {queries} to {keys}"), |g| {
            let d = heads * width;
            let q = g.param("q", DType::F32, [batch, queries, d])?;
            let kv = g.param("kv", DType::F32, [batch, keys, 2 * d])?;
            let mut options = Attention { heads, ..Attention::default() };
            if relative {
                options.mask = AttentionMask::Causal;
                let [u, v] = ["u", "v"].map(|name| g.param(name, DType::F32, [heads, width]));
                options.relative = Some(Relative::new(u?, v?, g.param("r", DType::F32, [keys, d])?));
            } else {
                options.bias = Some(g.param("bias", DType::F32, [batch, heads, queries, keys])?);
            }
            Ok(g.attention(Qkv::QueryAndPacked { q, kv }, options)?.0)
        });
    }
    // Transformer-XL with memory tokens and a cache; in shared memory, partly in it, and not at all.
    for (batch, heads, tokens, memory, cache, width, wrapped) in [
        (3, 4, 30, 15, 0, 32, false),
        (3, 2, 30, 15, 17, 16, false),
        (2, 3, 12, 4, 21, 20, true),
        (2, 8, 30, 0, 90, 32, false),
        (2, 3, 30, 0, 450, 32, false),
        (2, 2, 71, 7, 63, 64, false),
        (1, 2, 150, 5, 300, 32, true),
        (2, 1, 48, 10, 100, 128, false),
    ] {
        compare(&format!("attention of {tokens} tokens, {memory} memory vectors and {cache} cached"), |g| {
            let (d, rows, keys) = (heads * width, memory + tokens, cache + memory + tokens);
            let q = g.param("q", DType::F32, [batch, rows, d])?;
            let kv = g.param("kv", DType::F32, [batch, keys, 2 * d])?;
            let [u, v] = ["u", "v"].map(|name| g.param(name, DType::F32, [heads, width]));
            let zero = usize::max(memory, 1) - 1;
            let r = g.param("r", DType::F32, [zero + keys, d])?;
            // Of the cache a few rows are empty, others in every batch row.
            let range = |b: usize, i: usize| match i < memory {
                true => [cache, cache + memory],
                false => [(cache / 3 * b).min(cache), cache + i + 1],
            };
            let ranges: Vec<i32> =
                (0..batch).flat_map(|b| (0..rows).flat_map(move |i| range(b, i))).map(|x| x as i32).collect();
            let states: Vec<i64> = (0..2 * batch as i64).collect();
            let options = Attention {
                heads,
                mask: AttentionMask::Range(g.constant(&ranges, [batch, rows, 2])?),
                relative: Some(Relative { u: u?, v: v?, r, zero, next_query_ahead: wrapped }),
                start: Some(g.full(DType::I32, [batch], cache as f64)?),
                dropout: Some((0.1, g.constant(&states, [batch, 2])?)),
                ..Attention::default()
            };
            Ok(g.attention(Qkv::QueryAndPacked { q, kv }, options)?.0)
        });
    }
    compare("relative bias over many tiles", |g| {
        let table = g.param("table", DType::F32, [99, 3])?;
        // Rising times, and times that repeat; some differ by more than the table holds.
        let q: Vec<i64> = (0..9 * 37).map(|i| if i < 200 { i % 37 } else { i * 7 % 11 }).collect();
        let k: Vec<i64> = (0..9 * 70).map(|i| (i * 13 % 100) - 30).collect();
        let (q, k) = (g.constant(&q, [9, 37])?, g.constant(&k, [9, 70])?);
        g.relative_bias(table, q, k)
    });
    compare("relative bias of few of a table's distances", |g| {
        let table = g.param("table", DType::F32, [2047, 4])?;
        // Of a window's 16 steps to slots that were written not long ago, in other rows long ago, or never.
        let q: Vec<i64> = (0..40).flat_map(|b| (0..16).map(move |i| 100 * b + i)).collect();
        let k: Vec<i64> = (0..40)
            .flat_map(|b| {
                (0..32).map(move |j| if j * 7 % 32 < b { 90 * b + j * 11 % 32 } else { i64::MIN / 4 })
            })
            .collect();
        let (q, k) = (g.constant(&q, [40, 16])?, g.constant(&k, [40, 32])?);
        g.relative_bias(table, q, k)
    });
    compare("embeddings of many vectors", |g| {
        let table = g.param("table", DType::F32, [16, 70])?;
        let index: Vec<i32> = (0..2 * 6001).map(|i| i * i % 16).collect();
        let index = g.constant(&index, [6001, 2])?;
        g.embedding_sum(table, index)
    });
    compare("a blend into some of many slots", |g| {
        let (batch, m, w, d) = (6, 41, 9, 70);
        let memory = g.param("memory", DType::F32, [batch, m, d])?;
        let anchors: Vec<i64> = (0..(batch * m) as i64).map(|i| i * 37 % 53 - 5).collect();
        let anchors = g.constant(&anchors, [batch, m])?;
        let (slots, _) = g.lru_select(anchors, w)?;
        let candidates = g.param("candidates", DType::F32, [batch, w, d])?;
        let times = g.constant(&[99i64; 6], [batch])?;
        let active = Some(g.constant(&[true, true, false, true, false, true], [batch])?);
        let blend = Blend { lambda: 0.3, empty_slots_too: false, active };
        Ok(g.lru_blend(memory, anchors, slots, candidates, times, blend)?.0)
    });
    // One tile of 32 channels and several, uneven ones; one chunk of steps and several.
    for (batch, steps, channels, states) in
        [(1, 1, 128, 16), (2, 90, 128, 16), (33, 17, 70, 16), (3, 5, 31, 64), (5, 40, 40, 9)]
    {
        compare(&format!("scan of {batch} x {steps} steps, {channels} channels, {states} states"), |g| {
            let mut row = |name: &str, width: usize| g.param(name, DType::F32, [batch, steps, width]);
            let [x, delta, z] = ["x", "delta", "z"].map(|name| row(name, channels));
            let bc = row("bc", 2 * states)?;
            let [bias, d] = ["bias", "d"].map(|name| g.param(name, DType::F32, [channels]));
            let weight = g.param("weight", DType::F32, [4, channels])?;
            let window = g.param("window", DType::F32, [batch, 3, channels])?;
            let conv = g.causal_conv1d_silu(x?, weight, bias?, window)?;
            let a = g.param("a", DType::F32, [states, channels])?;
            let a = g.exp(a)?;
            let a = g.scale(a, -1.0)?;
            let state = g.param("state", DType::F32, [batch, states, channels])?;
            let scan = SelectiveScan { u: conv.y, delta: delta?, a, bc, d: d?, z: z?, state };
            let scanned = g.selective_scan(scan)?;
            g.concat(&[scanned.y, conv.window, scanned.state], 1)
        });
    }
    compare("norm of long rows", |g| {
        let [x, f] = ["x", "f"].map(|name| g.param(name, DType::F32, [9, 700]));
        let gamma = g.param("gamma", DType::F32, [700])?;
        let beta = g.param("beta", DType::F32, [700])?;
        let norm = Norm { kind: NormKind::Layer { beta }, gamma, eps: 1e-5 };
        Ok(g.residual_norm(x?, f?, norm)?.0)
    });
}

/// A U-Net's layers in widths and batches as they are trained: several tiles of channels, several parts of
/// rows.
#[test]
fn layers_of_a_u_net_agree_with_the_cpu() {
    for (batch, steps, channels, outputs, groups) in
        [(70, 16, 130, 96, 8), (3, 4, 512, 256, 8), (1, 33, 1, 8, 8)]
    {
        compare(&format!("convolution of {batch} x {steps} x {channels}"), |g| {
            let x = g.param("x", DType::F32, [batch, steps, channels])?;
            let w = g.param("w", DType::F32, [outputs, 5, channels])?;
            let w = g.scale(w, 1.0 / (5.0 * channels as f64).sqrt())?;
            let bias = g.param("bias", DType::F32, [outputs])?;
            let gamma = g.param("gamma", DType::F32, [outputs])?;
            let conv = Conv1d { stride: 1, padding: 2 };
            let y = g.conv1d(x, w, Some(bias), conv, Activation::Identity)?;
            let y = g.group_norm(y, groups, gamma, bias, 1e-5)?;
            let y = g.mish(y)?;
            let up = g.param("up", DType::F32, [4, outputs, outputs])?;
            let up = g.scale(up, 1.0 / (2.0 * outputs as f64).sqrt())?;
            g.conv_transpose1d(y, up, Some(bias), Conv1d { stride: 2, padding: 1 }, Activation::Identity)
        });
    }
    // More pixels and channels of a group than stay in registers.
    for (batch, channels, groups, height, width) in
        [(5, 24, 3, 37, 41), (3, 20, 1, 9, 7), (300, 32, 4, 32, 32), (1, 2, 2, 1, 1)]
    {
        compare(&format!("norm of {batch} x {channels} x {height} x {width}"), |g| {
            let x = g.param("x", DType::F32, [batch, channels, height, width])?;
            let (gamma, beta) =
                (g.param("gamma", DType::F32, [channels])?, g.param("beta", DType::F32, [channels])?);
            g.group_norm(x, groups, gamma, beta, 1e-5)
        });
    }
    // Axes summed on both sides of those that are kept.
    for (shape, target) in [([70, 33, 9, 7], [1, 33, 1, 1]), ([5, 3, 4, 50], [1, 3, 4, 1])] {
        compare(&format!("sum of {shape:?} to {target:?}"), |g| {
            let x = g.param("x", DType::F32, shape)?;
            let square = g.mul(x, x)?;
            g.sum_to(square, target)
        });
    }
    // Many patches, shared among blocks.
    compare("convolution of many images", |g| {
        let x = g.param("x", DType::F32, [130, 6, 64, 64])?;
        let w = g.param("w", DType::F32, [8, 6, 5, 5])?;
        let w = g.scale(w, 1.0 / 12.0)?;
        let bias = g.param("bias", DType::F32, [8])?;
        g.conv2d(x, w, Some(bias), Conv2d { stride: 1, padding: 0 }, Activation::Relu)
    });
    // Convolutions of both image encoders, and kernels with more taps than a word has bits.
    let convolutions = [
        (6, 32, 8, 4, 0),
        (32, 64, 4, 2, 0),
        (64, 64, 3, 1, 0),
        (3, 32, 5, 2, 2),
        (32, 64, 3, 2, 1),
        (64, 64, 3, 1, 1),
        (32, 64, 1, 2, 0),
        (33, 70, 3, 3, 1),
        (5, 40, 7, 1, 3),
        (3, 9, 6, 1, 0),
    ];
    for (channels, outputs, kernel, stride, padding) in convolutions {
        compare(&format!("convolution of {channels} channels, {outputs} outputs, kernel {kernel}"), |g| {
            let x = g.param("x", DType::F32, [7, channels, 20, 23])?;
            let w = g.param("w", DType::F32, [outputs, channels, kernel, kernel])?;
            let w = g.scale(w, 1.0 / ((channels * kernel * kernel) as f64).sqrt())?;
            let bias = g.param("bias", DType::F32, [outputs])?;
            g.conv2d(x, w, Some(bias), Conv2d { stride, padding }, Activation::Relu)
        });
    }
    // Weights that begin between two vectors of four numbers.
    compare("convolution with a part of other weights", |g| {
        let x = g.param("x", DType::F32, [3, 4, 9, 10])?;
        let all = g.param("w", DType::F32, [1 + 6 * 4 * 3 * 3])?;
        let part = g.slice(all, 0, 1..1 + 6 * 4 * 3 * 3)?;
        let w = g.reshape(part, [6, 4, 3, 3])?;
        g.conv2d(x, w, None, Conv2d { stride: 1, padding: 1 }, Activation::Identity)
    });
    compare("pooling of large images", |g| {
        let x = g.param("x", DType::F32, [3, 5, 64, 48])?;
        let y = g.max_pool2d(x, (2, 2))?;
        let all = g.max_pool2d(y, (32, 24))?;
        g.mul(y, all)
    });
}

/// Bins and draws are whole numbers, the same on both devices.
#[test]
fn bins_and_draws_are_those_of_the_cpu() {
    fn results(device: &elmur_engine::Device) -> [Vec<i32>; 2] {
        let mut g = Graph::new();
        let x = g.input("x", DType::F32, [300, 3]).unwrap();
        let thresholds: Vec<f32> = (0..3 * 101).map(|i| (i % 101) as f32 / 20.0 - 2.5).collect();
        let thresholds = g.constant(&thresholds, [3, 101]).unwrap();
        let bins = g.discretize(x, thresholds).unwrap();
        let rng = g.rng("rng").unwrap();
        let draws = g.random_below(100, [7, 77], rng).unwrap();
        g.output("bins", bins).unwrap();
        g.output("draws", draws).unwrap();
        let store = Store::on(device);
        store.declare(&g).unwrap();
        store.set("rng", &[123456789012i64, 3]).unwrap();
        let mut program = Program::new(&g, device, &[&store]).unwrap();
        // Many of these are thresholds, some lie outside of all bins.
        let x: Vec<f32> =
            (0..900).map(|i| if i == 7 { f32::NAN } else { (i % 131) as f32 / 20.0 - 3.0 }).collect();
        program.set("x", &x).unwrap();
        program.run().unwrap();
        ["bins", "draws"].map(|name| program.get::<i32>(name).unwrap().to_vec())
    }
    let Some(gpu) = gpu::gpu(Precision::F32) else { return };
    assert_eq!(results(&gpu.into()), results(&(&Pool::new(1)).into()));
}

/// Moved images are copies of pixels, the same on both devices.
#[test]
fn moved_images_are_those_of_the_cpu() {
    fn results(device: &elmur_engine::Device) -> (Vec<u8>, Vec<f32>) {
        let mut g = Graph::new();
        let bytes = g.input("bytes", DType::U8, [5, 3, 6, 20, 17]).unwrap();
        let rng = g.rng("rng").unwrap();
        let draws = g.random_below(1 << 24, [5, 3], rng).unwrap();
        let draws = g.cast(draws, DType::F32).unwrap();
        let coloured = g.scale(draws, 0.5f64.powi(24)).unwrap();
        let draws = g.slice(coloured, 1, 0..2).unwrap();
        let moved = g.shift_images(bytes, coloured, 7).unwrap();
        let floats = g.cast(bytes, DType::F32).unwrap();
        let floats = g.shift_images(floats, draws, 16).unwrap();
        g.output("moved", moved).unwrap();
        g.output("floats", floats).unwrap();
        let store = Store::on(device);
        store.declare(&g).unwrap();
        store.set("rng", &[12345i64, 6]).unwrap();
        let mut program = Program::new(&g, device, &[&store]).unwrap();
        let pixels: Vec<u8> = (0..5 * 18 * 340).map(|i| (i * 7 + i / 340) as u8).collect();
        program.set("bytes", &pixels).unwrap();
        program.run().unwrap();
        (program.get::<u8>("moved").unwrap().to_vec(), program.get::<f32>("floats").unwrap().to_vec())
    }
    let Some(gpu) = gpu::gpu(Precision::F32) else { return };
    assert_eq!(results(&gpu.into()), results(&(&Pool::new(1)).into()));
}

/// Small products are as good as f32 in every precision; these are large enough to be rounded, or so deep
/// that blocks share the depth, some of them unevenly.
#[test]
fn large_products_agree_with_the_cpu() {
    for (m, n, k) in [
        (256, 128, 512),
        (303, 259, 521),
        (2053, 1, 4099),
        (256, 256, 520),
        (300, 260, 260),
        (128, 128, 1056),
        (31, 33, 1093),
    ] {
        compare(&format!("product of {m} x {n} x {k}"), |g| {
            let x = g.param("x", DType::F32, [m, k])?;
            let w = g.param("w", DType::F32, [n, k])?;
            let w = g.scale(w, 1.0 / (k as f64).sqrt())?;
            g.linear(x, w, None, Activation::Identity)
        });
    }
}

#[test]
fn two_queues_work_side_by_side() {
    let Some(gpu) = gpu::gpu(Precision::F32) else { return };
    let alone = train(gpu);
    let others: Vec<Gpu> = (0..3).map(|_| gpu.another().unwrap()).collect();
    std::thread::scope(|scope| {
        let runs: Vec<_> = others.iter().map(|gpu| scope.spawn(move || train(gpu))).collect();
        for run in runs {
            let together = run.join().unwrap();
            for (a, b) in alone.iter().zip(&together) {
                assert!(gpu::difference(a, b) < 1e-4, "{a:?} and {b:?}");
            }
        }
    });
}

#[test]
fn memory_comes_back_from_a_thousand_programs() {
    let Some(gpu) = gpu::gpu(Precision::F32) else { return };
    let build = || {
        let mut g = Graph::new();
        let x = g.input("x", DType::F32, [64, 64]).unwrap();
        let w = g.param("w", DType::F32, [64, 64]).unwrap();
        let y = g.linear(x, w, None, Activation::Gelu).unwrap();
        let y = g.softmax(y).unwrap();
        g.output("y", y).unwrap();
        let store = Store::on(gpu);
        store.declare(&g).unwrap();
        Program::new(&g, gpu, &[&store]).unwrap().run().unwrap();
    };
    (0..10).for_each(|_| build());
    gpu.synchronize().unwrap();
    // Other tests and other processes may allocate meanwhile; a leak of a thousand programs shows every time.
    let lost = || {
        let (before, _) = gpu.memory().unwrap();
        (0..1000).for_each(|_| build());
        gpu.synchronize().unwrap();
        let (after, _) = gpu.memory().unwrap();
        before.saturating_sub(after)
    };
    assert!((0..5).any(|_| lost() < 64 << 20), "five times a thousand programs kept 64 MiB or more");
}

#[test]
fn misuse_is_an_error() {
    let Some(gpu) = gpu::gpu(Precision::F32) else { return };
    let mut g = Graph::new();
    let x = g.input("x", DType::F64, [4]).unwrap();
    let y = g.exp(x).unwrap();
    g.output("y", y).unwrap();
    let error = Program::new(&g, gpu, &[]).unwrap_err().to_string();
    assert!(error.contains("f32 on a GPU"), "{error}");

    let mut g = Graph::new();
    let w = g.param("w", DType::F32, [4]).unwrap();
    let y = g.exp(w).unwrap();
    g.output("y", y).unwrap();
    let host = Store::new();
    host.declare(&g).unwrap();
    let error = Program::new(&g, gpu, &[&host]).unwrap_err().to_string();
    assert!(error.contains("got `w` on Cpu"), "{error}");

    let huge = Store::on(gpu);
    let error =
        huge.insert("x", elmur_engine::TensorType::new(DType::F32, [1 << 37])).unwrap_err().to_string();
    assert!(error.contains("549755813888 bytes"), "{error}");

    let error = Gpu::open(99, Precision::F32).unwrap_err().to_string();
    assert!(error.contains("cuda:99"), "{error}");
}

/// Rows of 1, 3, 4, 8 and 24 bytes, so that words of every width are used, moved by graphs and by stores.
#[test]
fn rows_move_as_on_the_cpu() {
    fn rows<T: elmur_engine::Element>(
        device: &elmur_engine::Device,
        data: &[T],
        width: usize,
    ) -> Vec<Vec<T>> {
        let mut g = Graph::new();
        let bank = g.state("bank", T::DTYPE, [data.len() / width, width]).unwrap();
        let from = g.input("from", DType::I64, [3]).unwrap();
        let to = g.input("to", DType::I32, [3]).unwrap();
        let old = g.gather_rows(bank, from).unwrap();
        let new = g.scatter_rows(bank, to, old).unwrap();
        g.update(bank, new).unwrap();
        g.output("old", old).unwrap();
        let store = Store::on(device);
        store.declare(&g).unwrap();
        store.set("bank", data).unwrap();
        let mut program = Program::new(&g, device, &[&store]).unwrap();
        program.set("from", &[3i64, 0, 0]).unwrap();
        program.set("to", &[1, 4, 4]).unwrap();
        program.run().unwrap();
        let mut found = vec![program.get::<T>("old").unwrap().to_vec(), store.get::<T>("bank").unwrap()];
        found.push(store.get_rows::<T>("bank", &[4, 1, 2, 4]).unwrap());
        store.set_rows("bank", &[0, 1, 3], &store.get_rows::<T>("bank", &[3, 4, 1]).unwrap()).unwrap();
        found.push(store.get::<T>("bank").unwrap());
        found
    }
    fn check<T: elmur_engine::Element>(data: &[T], width: usize) {
        let Some(gpu) = gpu::gpu(Precision::F32) else { return };
        assert_eq!(rows(&gpu.into(), data, width), rows(&(&Pool::new(1)).into(), data, width));
    }
    check(&[true, false, false, true, true], 1);
    check(&(0..15).map(|i| i % 4 == 1).collect::<Vec<_>>(), 3);
    check(&(0..40).map(|i| i % 3 == 1).collect::<Vec<_>>(), 8);
    check(&[1.5f32, 2.5, 3.5, 4.5, 5.5], 1);
    check(&(0..30).map(|i| i as f32).collect::<Vec<_>>(), 6);
    check(&(0..60).collect::<Vec<u8>>(), 12);
    check(&(0..15i64).collect::<Vec<_>>(), 3);
}

/// Bytes as inputs, states and outputs, moved and cast to every type and back.
#[test]
fn bytes_are_cast_as_on_the_cpu() {
    fn results(device: &elmur_engine::Device) -> [String; 6] {
        let mut g = Graph::new();
        let pixels = g.input("pixels", DType::U8, [4, 5]).unwrap();
        let before = g.state("before", DType::U8, [4, 5]).unwrap();
        let part = g.slice(pixels, 1, 1..4).unwrap();
        let both = g.concat(&[before, part], 1).unwrap();
        let rows = g.constant(&[true, false, false, true], [4]).unwrap();
        let dark = g.full(DType::U8, [4, 8], 3.0).unwrap();
        let chosen = g.select(rows, both, dark).unwrap();
        let chosen = g.transpose(chosen, &[1, 0]).unwrap();
        g.output("bytes", chosen).unwrap();
        for dtype in [DType::F32, DType::I32, DType::I64, DType::Bool] {
            let cast = g.cast(chosen, dtype).unwrap();
            let cast = if dtype == DType::F32 { g.affine(cast, 2.0, -99.5).unwrap() } else { cast };
            g.output(&dtype.to_string(), cast).unwrap();
            if dtype == DType::F32 {
                let back = g.cast(cast, DType::U8).unwrap();
                g.output("back", back).unwrap();
            }
        }
        g.update(before, pixels).unwrap();
        let store = Store::on(device);
        store.declare(&g).unwrap();
        store.set("before", &(100..120).collect::<Vec<u8>>()).unwrap();
        let mut program = Program::new(&g, device, &[&store]).unwrap();
        program.set("pixels", &(0..20).map(|i| 255 - 12 * i).collect::<Vec<u8>>()).unwrap();
        program.run().unwrap();
        program.run().unwrap();
        [
            format!("{:?}", program.get::<u8>("bytes").unwrap()),
            format!("{:?}", program.get::<f32>("f32").unwrap()),
            format!("{:?}", program.get::<i32>("i32").unwrap()),
            format!("{:?}", program.get::<i64>("i64").unwrap()),
            format!("{:?}", program.get::<bool>("bool").unwrap()),
            format!("{:?}", program.get::<u8>("back").unwrap()),
        ]
    }
    let Some(gpu) = gpu::gpu(Precision::F32) else { return };
    assert_eq!(results(&gpu.into()), results(&(&Pool::new(1)).into()));
}

#[test]
fn out_of_range_inputs_change_nothing() {
    let Some(gpu) = gpu::gpu(Precision::F32) else { return };
    let mut g = Graph::new();
    let table = g.param("table", DType::F32, [3, 2]).unwrap();
    let index = g.input("index", DType::I32, [2, 2]).unwrap();
    let row = g.slice(index, 0, 1..2).unwrap();
    let y = g.embedding(table, row).unwrap();
    g.output("y", y).unwrap();
    let store = Store::on(gpu);
    store.declare(&g).unwrap();
    store.set("table", &[1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0]).unwrap();
    let mut program = Program::new(&g, gpu, &[&store]).unwrap();
    program.set("index", &[9, 9, 2, 0]).unwrap();
    program.run().unwrap();
    assert_eq!(program.get::<f32>("y").unwrap(), [5.0, 6.0, 1.0, 2.0]);
    program.set("index", &[0, 0, 3, 0]).unwrap();
    assert!(program.run().unwrap_err().to_string().contains("row 3 is outside 0..3"));
}
