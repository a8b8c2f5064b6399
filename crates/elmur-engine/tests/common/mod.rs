//! A graph that uses every trainable op: a small policy with convolution, embedding, LSTM, selective scan,
//! relative attention, memory read and write, experts, dropout, both losses, AdamW and averaged
//! parameters.

#![allow(dead_code)]

use elmur_engine::rng::Stream;
use elmur_engine::{
    Activation, AdamW, Attention, AttentionMask, Blend, Conv2d, CrossEntropy, DType, Graph, Norm, NormKind,
    Qkv, Relative, Result, SelectiveScan, Store, Value,
};

pub const B: usize = 12;
pub const T: usize = 10;
pub const D: usize = 48;
pub const H: usize = 3;
pub const M: usize = 4;
pub const N: usize = 30;

fn norm(g: &mut Graph, name: &str, dtype: DType) -> Result<Norm> {
    let gamma = g.param(&format!("{name}.gamma"), dtype, [D])?;
    let kind = if name.ends_with('1') {
        NormKind::Rms
    } else {
        NormKind::Layer { beta: g.param(&format!("{name}.beta"), dtype, [D])? }
    };
    Ok(Norm { kind, gamma, eps: 1e-8 })
}

/// Training program of the policy, with `x` images [B T, 2, 9, 8], `seen` i32 [B, T], `actions` i64 [B T].
pub fn policy(dtype: DType) -> Result<Graph> {
    let mut g = Graph::new();
    let rng = g.rng("rng")?;
    let images = g.input("x", dtype, [B * T, 2, 9, 8])?;
    let seen = g.input("seen", DType::I32, [B, T])?;
    let actions = g.input("actions", DType::I64, [B * T])?;
    let lr = g.input("lr", dtype, [])?;
    let memory = g.state("memory", dtype, [B, M, D])?;
    let anchors = g.state("anchors", DType::I64, [B, M])?;

    let kernel = g.param("conv", dtype, [5, 2, 3, 3])?;
    let kernel_bias = g.param("conv.bias", dtype, [5])?;
    let conv = Conv2d { stride: 2, padding: 1 };
    let x = g.conv2d(images, kernel, Some(kernel_bias), conv, Activation::Relu)?;
    let features = g.ty(x)?.len() / (B * T);
    let x = g.reshape(x, [B, T, features])?;
    let encoder = g.param("encoder", dtype, [D, features])?;
    let encoder_bias = g.param("encoder.bias", dtype, [D])?;
    let x = g.linear(x, encoder, Some(encoder_bias), Activation::Gelu)?;
    let table = g.param("table", dtype, [6, D])?;
    let embedded = g.embedding(table, seen)?;
    let x = g.add(x, embedded)?;
    let x = g.dropout(x, 0.1, rng)?;

    // A recurrence whose states go on from one batch to the next.
    let [hidden, cell] = ["lstm.hidden", "lstm.cell"].map(|name| g.state(name, dtype, [B, D]));
    let (hidden, cell) = (hidden?, cell?);
    let input = g.param("lstm.input", dtype, [4 * D, D])?;
    let recurrent = g.param("lstm.recurrent", dtype, [4 * D, D])?;
    let recurrent_bias = g.param("lstm.bias", dtype, [4 * D])?;
    let gates = g.linear(x, input, None, Activation::Identity)?;
    let lstm = g.lstm(gates, recurrent, recurrent_bias, hidden, cell)?;
    g.update(hidden, lstm.last_hidden)?;
    g.update(cell, lstm.last_cell)?;
    let x = g.add(x, lstm.hidden)?;

    let qkv = g.param("qkv", dtype, [3 * D, D])?;
    let qkv = g.linear(x, qkv, None, Activation::Identity)?;
    let relative = Relative::new(
        g.param("u", dtype, [H, D / H])?,
        g.param("v", dtype, [H, D / H])?,
        g.param("r", dtype, [T, D])?,
    );
    let options = Attention {
        heads: H,
        mask: AttentionMask::Causal,
        relative: Some(relative),
        dropout: Some((0.1, rng)),
        ..Attention::default()
    };
    let (y, _) = g.attention(Qkv::Packed(qkv), options)?;
    let n = norm(&mut g, "norm1", dtype)?;
    let (x, _) = g.residual_norm(x, y, n)?;

    // Read the memory with a bias by time.
    let bias_table = g.param("bias_table", dtype, [15, H])?;
    let times = g.constant(&(20..20 + T as i64).collect::<Vec<_>>(), [1, T])?;
    let bias = g.relative_bias(bias_table, times, anchors)?;
    let kv = g.param("kv", dtype, [2 * D, D])?;
    let kv = g.linear(memory, kv, None, Activation::Identity)?;
    let options = Attention { heads: H, bias: Some(bias), ..Attention::default() };
    let (read, _) = g.attention(Qkv::QueryAndPacked { q: x, kv }, options)?;
    let n = norm(&mut g, "norm2", dtype)?;
    let (x, _) = g.residual_norm(x, read, n)?;

    // Experts.
    let flat = g.reshape(x, [B * T, D])?;
    let router = g.param("router", dtype, [4, D])?;
    let logits = g.linear(flat, router, None, Activation::Identity)?;
    let (gates, chosen) = g.route_top_k(logits, 2)?;
    let gate_up = g.param("gate_up", dtype, [4, 2 * 24, D])?;
    let down = g.param("down", dtype, [4, D, 24])?;
    let mixed = g.expert_mixture(flat, gates, chosen, gate_up, down, Some((0.1, rng)))?;
    let balance = g.load_balancing_loss(gates, chosen, 4)?;
    let flat = g.add(flat, mixed)?;

    // Write the memory.
    let x = g.reshape(flat, [B, T, D])?;
    let (slots, _) = g.lru_select(anchors, 2)?;
    let old = g.gather_slots(memory, slots)?;
    let (candidates, _) =
        g.attention(Qkv::Separate { q: old, k: x, v: x }, Attention { heads: H, ..Attention::default() })?;
    let now = g.constant(&[29i64; B], [B])?;
    let blend = Blend { lambda: 0.3, empty_slots_too: false, active: None };
    let (new_memory, new_anchors) = g.lru_blend(memory, anchors, slots, candidates, now, blend)?;

    // A state-space model, whose states go on from one batch to the next too.
    let window = g.state("ssm.window", dtype, [B, 3, D])?;
    let state = g.state("ssm.state", dtype, [B, N, D])?;
    let taps = g.param("ssm.taps", dtype, [4, D])?;
    let taps_bias = g.param("ssm.taps.bias", dtype, [D])?;
    let conv = g.causal_conv1d_silu(x, taps, taps_bias, window)?;
    let a = g.param("ssm.a", dtype, [N, D])?;
    let a = g.exp(a)?;
    let project = |g: &mut Graph, name: &str, width: usize| {
        let weight = g.param(name, dtype, [width, D])?;
        g.linear(conv.y, weight, None, Activation::Identity)
    };
    let scan = SelectiveScan {
        u: conv.y,
        delta: project(&mut g, "ssm.delta", D)?,
        a: g.scale(a, -1.0)?,
        bc: project(&mut g, "ssm.bc", 2 * N)?,
        d: g.param("ssm.d", dtype, [D])?,
        z: x,
        state,
    };
    let scanned = g.selective_scan(scan)?;
    g.update(window, conv.window)?;
    g.update(state, scanned.state)?;
    let x = g.add(x, scanned.y)?;
    let flat = g.reshape(x, [B * T, D])?;

    let head = g.param("head", dtype, [7, D])?;
    let logits = g.linear(flat, head, None, Activation::Identity)?;
    let settings = CrossEntropy { label_smoothing: 0.1, ignored: -10 };
    let loss = g.cross_entropy(logits, actions, settings)?;
    let zeros = g.zeros_like(new_memory)?;
    let small = g.mse(new_memory, zeros, None)?;
    let small = g.scale(small, 0.01)?;
    let balance = g.scale(balance, 0.01)?;
    let loss = g.add(loss, balance)?;
    let loss = g.add(loss, small)?;

    let named: Vec<Value> = g.params().map(|(_, v)| v).collect();
    let grads = g.gradients(loss, &named)?;
    let pairs: Vec<(Value, Value)> =
        named.into_iter().zip(grads).filter_map(|(p, g)| Some((p, g?))).collect();
    let all: Vec<Value> = pairs.iter().map(|(_, g)| *g).collect();
    let gradient_norm = g.global_norm(&all)?;
    let (decayed, plain) = pairs.split_at(pairs.len() / 2);
    let mut trained = g.adamw(AdamW::default(), lr, Some((gradient_norm, 1.0)), decayed)?;
    let settings = AdamW { weight_decay: 0.0, lr_scale: 0.5, ..AdamW::default() };
    trained.extend(g.adamw(settings, lr, Some((gradient_norm, 1.0)), plain)?);
    let mut averaged = Vec::new();
    for (i, new) in trained.into_iter().enumerate() {
        let shape = g.shape(new)?.to_vec();
        averaged.push((g.param(&format!("average.{i}"), dtype, shape)?, new));
    }
    let decay = g.scalar(dtype, 0.75)?;
    g.moving_average(decay, &averaged)?;
    g.update(memory, new_memory)?;
    g.update(anchors, new_anchors)?;
    g.output("logits", logits)?;
    g.output("loss", loss)?;
    g.output("gradient_norm", gradient_norm)?;
    Ok(g)
}

/// Declares and fills parameters and states; f32 graphs only.
pub fn fill(g: &Graph, store: &Store) -> Result<()> {
    store.declare(g)?;
    for (i, (name, value)) in g.params().enumerate() {
        let mut data = vec![0.0; g.ty(value)?.len()];
        Stream::new(5, 0, i as u32).fill_normal(&mut data, 0.2);
        store.set(name, &data.into_iter().map(|x| x as f32).collect::<Vec<_>>())?;
    }
    store.set("anchors", &[-1i64; B * M])?;
    store.set("rng", &[77i64, 0])
}

/// Fills the inputs of a program of [`policy`].
pub fn feed(program: &mut elmur_engine::Program) -> Result<()> {
    let mut x = vec![0.0; B * T * 2 * 9 * 8];
    Stream::new(6, 0, 0).fill_uniform(&mut x, 0.0, 1.0);
    program.set("x", &x.into_iter().map(|x| x as f32).collect::<Vec<_>>())?;
    program.set("seen", &(0..(B * T) as i32).map(|i| i * 7 % 6).collect::<Vec<_>>())?;
    let action = |i: i64| if i % 9 == 0 { -10 } else { i * 5 % 7 };
    program.set("actions", &(0..(B * T) as i64).map(action).collect::<Vec<_>>())?;
    program.set("lr", &[1e-2f32])
}
