//! Every op's backward rule against central differences in f64, over random shapes that include extent 1 and
//! widths that are no multiple of any vector. With the feature `cuda` and a GPU the same graphs, in f32, are
//! compared between CPU and GPU.

#![allow(clippy::unwrap_used, clippy::panic)]

#[cfg(feature = "cuda")]
mod gpu;

use elmur_engine::rng::Stream;
use elmur_engine::{
    Activation, Attention, AttentionMask, Blend, Conv1d, Conv2d, CrossEntropy, DType, Graph, Norm, NormKind,
    Qkv, Relative, Result, SelectiveScan, Store, Value, gradcheck,
};

const F64: DType = DType::F64;

/// A source of random shapes, choices and data for one case.
struct Case {
    dtype: DType,
    stream: Stream,
    next: u64,
    names: usize,
}

impl Case {
    fn new(seed: u64, dtype: DType) -> Self {
        Self { dtype, stream: Stream::new(seed, 1, 0), next: 0, names: 0 }
    }

    fn below(&mut self, n: usize) -> usize {
        self.next += 1;
        (self.stream.draw(self.next) as usize) % n
    }

    fn flip(&mut self) -> bool {
        self.below(2) == 1
    }

    /// An extent of at most `max`, often 1, often just off a vector's width.
    fn extent(&mut self, max: usize) -> usize {
        let extents = [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 40, 65];
        let count = extents.iter().filter(|e| **e <= max).count();
        extents[self.below(count)]
    }

    fn normal(&mut self, n: usize) -> Vec<f64> {
        self.next += 1;
        let mut data = vec![0.0; n];
        Stream::new(self.next, 2, 0).fill_normal(&mut data, 1.0);
        data
    }

    /// A parameter with a fresh name.
    fn param(&mut self, g: &mut Graph, shape: impl Into<Vec<usize>>) -> Result<Value> {
        self.names += 1;
        g.param(&format!("p{}", self.names), self.dtype, shape)
    }

    fn indices(&mut self, g: &mut Graph, shape: impl Into<Vec<usize>>, limit: usize) -> Result<Value> {
        let shape = shape.into();
        let data: Vec<i32> = (0..shape.iter().product()).map(|_| self.below(limit) as i32).collect();
        g.constant(&data, shape)
    }

    fn times(&mut self, g: &mut Graph, shape: [usize; 2], from: i64, to: i64) -> Result<Value> {
        let data: Vec<i64> =
            (0..shape[0] * shape[1]).map(|_| from + self.below((to - from) as usize) as i64).collect();
        g.constant(&data, shape)
    }

    /// Σ c y with random c: a loss that every element of y influences differently.
    fn weigh(&mut self, g: &mut Graph, y: Value) -> Result<Value> {
        let shape = g.shape(y)?.to_vec();
        let data = self.normal(shape.iter().product());
        let c = match self.dtype {
            F64 => g.constant(&data, shape)?,
            _ => g.constant(&data.iter().map(|x| *x as f32).collect::<Vec<_>>(), shape)?,
        };
        let product = g.mul(y, c)?;
        g.sum(product)
    }

    fn total(&mut self, g: &mut Graph, ys: &[Value]) -> Result<Value> {
        let mut total = self.weigh(g, ys[0])?;
        for y in &ys[1..] {
            let next = self.weigh(g, *y)?;
            total = g.add(total, next)?;
        }
        Ok(total)
    }
}

/// Checks `cases` random instances of a graph whose outputs `build` returns.
fn check(name: &str, cases: u64, build: impl Fn(&mut Graph, &mut Case) -> Result<Vec<Value>>) {
    for seed in 0..cases {
        let mut case = Case::new(seed, F64);
        let mut g = Graph::new();
        let outputs = build(&mut g, &mut case).unwrap_or_else(|e| panic!("{name}, case {seed}: {e}"));
        let loss = case.total(&mut g, &outputs).unwrap();
        let store = Store::new();
        store.declare(&g).unwrap();
        gradcheck::randomize(&g, &store, seed, 1.0).unwrap();
        let shapes: Vec<_> = g.params().map(|(_, v)| g.shape(v).unwrap().to_vec()).collect();
        let worst = gradcheck::check(&mut g, loss, &store, 1e-5, 24).unwrap();
        assert!(worst.error < 2e-7, "{name}, case {seed}, parameters {shapes:?}: {worst:?}");
        #[cfg(feature = "cuda")]
        gpu::compare(&format!("{name}, case {seed}, parameters {shapes:?}"), seed, || {
            let mut case = Case::new(seed, DType::F32);
            let mut g = Graph::new();
            let outputs = build(&mut g, &mut case)?;
            let loss = case.total(&mut g, &outputs)?;
            Ok((g, outputs, loss))
        });
    }
}

const ACTIVATIONS: [Activation; 9] = [
    Activation::Identity,
    Activation::Relu,
    Activation::Gelu,
    Activation::Silu,
    Activation::Tanh,
    Activation::Sigmoid,
    Activation::Softplus,
    Activation::Exp,
    Activation::Mish,
];

#[test]
fn linear() {
    check("linear", 48, |g, case| {
        let (rows, width, out) = (case.extent(17), case.extent(40), case.extent(40));
        let x = case.param(g, if case.names % 2 == 0 { vec![rows, width] } else { vec![1, rows, width] })?;
        let w = case.param(g, [out, width])?;
        let w = g.scale(w, 0.3)?;
        let b = if case.flip() { Some(case.param(g, [out])?) } else { None };
        let kind = ACTIVATIONS[case.below(ACTIVATIONS.len())];
        Ok(vec![g.linear(x, w, b, kind)?])
    });
    // x + f(norm(x)) several times with the same weights: sums are made by the layers and by the gradients of
    // norms, and gradients of vectors that are used several times are added up together.
    check("residual layers", 16, |g, case| {
        let (rows, d) = (case.extent(17), 1 + case.extent(40));
        let mut x = case.param(g, [rows, d])?;
        let (w, b, gamma) = (case.param(g, [d, d])?, case.param(g, [d])?, case.param(g, [d])?);
        let w = g.scale(w, 0.3)?;
        let kind = if case.flip() { NormKind::Layer { beta: case.param(g, [d])? } } else { NormKind::Rms };
        for _ in 0..3 {
            let normed = g.norm(x, Norm { kind, gamma, eps: 0.1 })?;
            let y = g.linear(normed, w, case.flip().then_some(b), Activation::Identity)?;
            x = g.accumulate(x, y)?;
        }
        Ok(vec![x])
    });
}

#[test]
fn logarithm() {
    check("ln", 8, |g, case| {
        let shape = [case.extent(9), case.extent(40)];
        let x = case.param(g, shape)?;
        let square = g.mul(x, x)?;
        let positive = g.affine(square, 1.0, 0.1)?;
        Ok(vec![g.ln(positive)?])
    });
}

#[test]
fn a_weight_used_many_times_accumulates_its_gradient() {
    check("shared weight", 8, |g, case| {
        let (rows, d) = (case.extent(9), case.extent(17));
        let w = case.param(g, [d, d])?;
        let mut x = case.param(g, [rows, d])?;
        for _ in 0..4 {
            x = g.linear(x, w, None, Activation::Tanh)?;
        }
        Ok(vec![x])
    });
}

#[test]
fn matmul() {
    check("matmul", 32, |g, case| {
        let (batch, m, n, k) = (case.extent(4), case.extent(17), case.extent(33), case.extent(17));
        let (ta, tb) = (case.flip(), case.flip());
        let matrix = |rows, cols, t: bool| if t { vec![batch, cols, rows] } else { vec![batch, rows, cols] };
        let a = case.param(g, matrix(m, k, ta))?;
        let b = case.param(g, matrix(k, n, tb))?;
        Ok(vec![g.matmul_with(a, b, ta, tb)?])
    });
}

#[test]
fn norms() {
    check("norm", 40, |g, case| {
        let (rows, d) = (case.extent(17), 1 + case.extent(65));
        let x = case.param(g, [rows, d])?;
        let gamma = case.param(g, [d])?;
        let kind = if case.flip() { NormKind::Layer { beta: case.param(g, [d])? } } else { NormKind::Rms };
        let norm = Norm { kind, gamma, eps: 1e-8 };
        match case.below(3) {
            0 => Ok(vec![g.norm(x, norm)?]),
            1 => {
                let f = case.param(g, [rows, d])?;
                Ok(vec![g.residual_norm(x, f, norm)?.0])
            }
            _ => {
                // Pre-norm: the sum goes on as well.
                let f = case.param(g, [rows, d])?;
                let (y, sum) = g.residual_norm(x, f, norm)?;
                Ok(vec![y, sum])
            }
        }
    });
}

#[test]
fn activations_and_softmax() {
    check("activation", 40, |g, case| {
        let shape = [case.extent(5), case.extent(40)];
        let x = case.param(g, shape)?;
        let y = g.activation(x, ACTIVATIONS[case.below(ACTIVATIONS.len())])?;
        Ok(vec![g.softmax(y)?, y])
    });
}

#[test]
fn logsumexp() {
    check("logsumexp", 16, |g, case| {
        let shape = [case.extent(5), case.extent(9), case.extent(40)];
        let x = case.param(g, shape)?;
        let x = g.scale(x, 3.0)?;
        let y = g.logsumexp(x)?;
        Ok(vec![y, g.logsumexp(y)?])
    });
}

#[test]
fn swiglu() {
    check("swiglu", 12, |g, case| {
        let shape = [case.extent(9), 2 * case.extent(33)];
        let h = case.param(g, shape)?;
        Ok(vec![g.swiglu(h)?])
    });
}

/// Attention of `queries` queries to `keys` keys, in a form of the case's choice.
fn attention(
    g: &mut Graph,
    case: &mut Case,
    queries: usize,
    keys: usize,
    width: usize,
) -> Result<Vec<Value>> {
    let (batch, heads) = (case.extent(5), case.extent(3));
    let d = heads * width;
    let packed = if queries == keys { case.below(3) } else { 1 + case.below(2) };
    let qkv = match packed {
        0 => Qkv::Packed(case.param(g, [batch, queries, 3 * d])?),
        1 => Qkv::QueryAndPacked {
            q: case.param(g, [batch, queries, d])?,
            kv: case.param(g, [batch, keys, 2 * d])?,
        },
        _ => Qkv::Separate {
            q: case.param(g, [batch, queries, d])?,
            k: case.param(g, [batch, keys, d])?,
            v: case.param(g, [batch, keys, d])?,
        },
    };
    let mut options = Attention { heads, ..Attention::default() };
    let rows = if case.flip() { batch } else { 1 };
    match case.below(4) {
        0 => {}
        1 => options.mask = AttentionMask::Causal,
        2 => {
            // Random, so that some rows see nothing at all.
            let data: Vec<bool> = (0..rows * queries * keys).map(|_| case.flip()).collect();
            options.mask = AttentionMask::Custom(g.constant(&data, [rows, queries, keys])?);
        }
        _ => {
            // Empty where a range ends before it begins.
            let data: Vec<i32> = (0..rows * queries * 2)
                .map(|i| if i % 2 == 0 { case.below(keys) } else { case.below(3 * keys).min(keys) } as i32)
                .collect();
            options.mask = AttentionMask::Range(g.constant(&data, [rows, queries, 2])?);
        }
    }
    if case.flip() {
        let rows = if case.flip() { batch } else { 1 };
        options.bias = Some(case.param(g, [rows, heads, queries, keys])?);
    }
    if case.flip() {
        options.start = Some(case.indices(g, [batch], keys - queries + 1)?);
    }
    if case.below(3) > 0 {
        // Rows for all negative distances, some, or none.
        let (zero, spare) = ([0, 2, keys][case.below(3)], case.below(3));
        options.relative = Some(Relative {
            u: case.param(g, [heads, width])?,
            v: case.param(g, [heads, width])?,
            r: case.param(g, [zero + keys + spare, d])?,
            zero,
            next_query_ahead: case.flip(),
        });
    }
    if case.flip() {
        options.dropout = Some((0.3, g.rng("rng")?));
    }
    Ok(vec![g.attention(qkv, options)?.0])
}

#[test]
fn attention_in_all_its_forms() {
    check("attention", 128, |g, case| {
        let (queries, width) = (case.extent(7), case.extent(17));
        let keys = if case.below(3) == 0 { queries } else { case.extent(9).max(queries) };
        attention(g, case, queries, keys, width)
    });
}

/// Sequences that CPUs multiply as matrices.
#[test]
fn attention_over_longer_sequences() {
    check("long attention", 64, |g, case| {
        let (queries, width) = (16 + case.below(20), case.extent(33));
        let keys = if case.below(3) == 0 { queries } else { queries + case.below(30) };
        attention(g, case, queries, keys, width)
    });
}

#[test]
fn routing_and_expert_mixtures() {
    check("experts", 24, |g, case| {
        let (tokens, experts, d, f) = (case.extent(17), 1 + case.below(5), case.extent(17), case.extent(9));
        let k = 1 + case.below(experts);
        let x = case.param(g, [tokens, d])?;
        let logits = case.param(g, [tokens, experts])?;
        let (gates, chosen) = g.route_top_k(logits, k)?;
        let gate_up = case.param(g, [experts, 2 * f, d])?;
        let down = case.param(g, [experts, d, f])?;
        let dropout = if case.flip() { Some((0.2, g.rng("rng")?)) } else { None };
        let y = g.expert_mixture(x, gates, chosen, gate_up, down, dropout)?;
        let balance = g.load_balancing_loss(gates, chosen, experts)?;
        Ok(vec![y, balance])
    });
}

#[test]
fn tables() {
    check("embedding", 16, |g, case| {
        let (rows, d) = (case.extent(9), case.extent(17));
        let table = case.param(g, [rows, d])?;
        let shape = [case.extent(5), case.extent(7)];
        let index = case.indices(g, shape, rows)?;
        Ok(vec![g.embedding(table, index)?])
    });
    check("embedding_sum", 24, |g, case| {
        // Many vectors, so that a table's row has several parts of its gradient; tables of many rows and of few.
        // And vectors wider than what a block of a GPU takes.
        let (most, d) =
            if case.flip() { (65, 3) } else { (3, if case.flip() { 131 } else { case.extent(17) }) };
        let rows = case.extent(40) * if case.flip() { 5 } else { 1 };
        let table = case.param(g, [rows, d])?;
        let shape = [case.extent(most), case.extent(7), case.extent(5)];
        let index = case.indices(g, shape, rows)?;
        Ok(vec![g.embedding_sum(table, index)?])
    });
    check("relative_bias", 24, |g, case| {
        let (batch, queries) = (case.extent(4), case.extent(9));
        // Few, or enough for rows of the table to be taken whole.
        let (keys, heads) = if case.flip() {
            (case.extent(7), case.extent(4))
        } else {
            (16 + case.below(9), 8 + case.below(10))
        };
        let reach = case.extent(9);
        let table = case.param(g, [2 * reach - 1, heads])?;
        let q_rows = if case.flip() { batch } else { 1 };
        let q = case.times(g, [q_rows, queries], 0, 30)?;
        let k_rows = if case.flip() { batch } else { 1 };
        let k = case.times(g, [k_rows, keys], -1, 30)?;
        Ok(vec![g.relative_bias(table, q, k)?])
    });
}

#[test]
fn convolution() {
    check("conv2d", 24, |g, case| {
        let (batch, channels, outputs) = (case.extent(9), case.extent(3), case.extent(5));
        let (h, w) = (1 + case.below(3), 1 + case.below(3));
        let conv = Conv2d { stride: 1 + case.below(4), padding: case.below(3) };
        // Images may be smaller than kernels, where borders make up for it.
        let least = |kernel: usize| kernel.saturating_sub(2 * conv.padding).max(1);
        let (height, width) = (least(h) + case.below(5), least(w) + case.below(9));
        let x = case.param(g, [batch, channels, height, width])?;
        let weight = case.param(g, [outputs, channels, h, w])?;
        let bias = if case.flip() { Some(case.param(g, [outputs])?) } else { None };
        Ok(vec![g.conv2d(x, weight, bias, conv, Activation::Tanh)?])
    });
}

#[test]
fn convolution_over_time() {
    check("conv1d", 32, |g, case| {
        let (batch, channels, outputs) = (case.extent(9), case.extent(9), case.extent(9));
        let kernel = 1 + case.below(5);
        let conv = Conv1d { stride: 1 + case.below(3), padding: case.below(4) };
        let steps = kernel + case.below(9);
        let x = case.param(g, [batch, steps, channels])?;
        let weight = case.param(g, [outputs, kernel, channels])?;
        let bias = if case.flip() { Some(case.param(g, [outputs])?) } else { None };
        Ok(vec![g.conv1d(x, weight, bias, conv, Activation::Tanh)?])
    });
    check("conv_transpose1d", 32, |g, case| {
        let (batch, channels, outputs) = (case.extent(9), case.extent(9), case.extent(9));
        let (kernel, steps) = (3 + case.below(3), 1 + case.below(9));
        let conv = Conv1d { stride: 1 + case.below(3), padding: case.below(2) };
        let x = case.param(g, [batch, steps, channels])?;
        let weight = case.param(g, [kernel, outputs, channels])?;
        let bias = if case.flip() { Some(case.param(g, [outputs])?) } else { None };
        Ok(vec![g.conv_transpose1d(x, weight, bias, conv, Activation::Tanh)?])
    });
}

/// Groups of one channel and of all, of widths that are no multiple of a vector; more samples than one partial
/// sum takes.
#[test]
fn group_norm() {
    check("group_norm", 40, |g, case| {
        let batch = [1, 3, 40][case.below(3)];
        let (steps, groups, width) = (1 + case.extent(9), 1 + case.below(8), case.extent(9));
        let channels = groups * width;
        let x = case.param(g, [batch, steps, channels])?;
        let (gamma, beta) = (case.param(g, [channels])?, case.param(g, [channels])?);
        let height = 1 + case.below(4);
        let image = case.param(g, [batch, channels, height, steps])?;
        let steps = g.group_norm(x, groups, gamma, beta, 1e-3)?;
        Ok(vec![steps, g.group_norm(image, groups, gamma, beta, 1e-3)?])
    });
}

#[test]
fn max_pooling() {
    check("max_pool2d", 24, |g, case| {
        let (h, w) = (1 + case.below(4), 1 + case.below(4));
        let (height, width) = (h + case.below(7), w + case.below(7));
        let shape = [case.extent(5), case.extent(4), height, width];
        let x = case.param(g, shape)?;
        let y = g.max_pool2d(x, (h, w))?;
        let global = g.max_pool2d(x, (height, width))?;
        Ok(vec![y, global])
    });
}

#[test]
fn dropout() {
    check("dropout", 12, |g, case| {
        let shape = [case.extent(9), case.extent(65)];
        let x = case.param(g, shape)?;
        let rng = g.rng("rng")?;
        Ok(vec![g.dropout(x, 0.4, rng)?])
    });
}

#[test]
fn losses() {
    check("cross_entropy", 32, |g, case| {
        let (rows, classes) = (case.extent(17), case.extent(33));
        let logits = case.param(g, [rows, classes])?;
        let targets: Vec<i64> =
            (0..rows).map(|_| if case.below(4) == 0 { -10 } else { case.below(classes) as i64 }).collect();
        let targets = g.constant(&targets, [rows])?;
        let label_smoothing = if case.flip() { 0.16 } else { 0.0 };
        Ok(vec![g.cross_entropy(logits, targets, CrossEntropy { label_smoothing, ignored: -10 })?])
    });
    check("weighted_cross_entropy", 32, |g, case| {
        let (rows, classes) = (case.extent(17), case.extent(33));
        let logits = case.param(g, [rows, classes])?;
        let targets = case.indices(g, [rows], classes)?;
        let weights: Vec<f64> = (0..rows).map(|_| case.below(4) as f64 / 2.0).collect();
        let weights = match case.dtype {
            F64 => g.constant(&weights, [rows])?,
            _ => g.constant(&weights.iter().map(|x| *x as f32).collect::<Vec<_>>(), [rows])?,
        };
        let label_smoothing = if case.flip() { 0.16 } else { 0.0 };
        let settings = CrossEntropy { label_smoothing, ignored: -10 };
        Ok(vec![g.weighted_cross_entropy(logits, targets, weights, settings)?])
    });
    check("mse", 24, |g, case| {
        let (rows, cols) = (case.extent(9), case.extent(7));
        let x = case.param(g, [rows, cols])?;
        let t = case.param(g, [rows, cols])?;
        let mask = match case.below(3) {
            0 => None,
            1 => Some(vec![rows]),
            _ => Some(vec![rows, cols]),
        };
        let mask = match mask {
            Some(shape) => {
                let data: Vec<bool> = (0..shape.iter().product()).map(|_| case.flip()).collect();
                Some(g.constant(&data, shape)?)
            }
            None => None,
        };
        Ok(vec![g.mse(x, t, mask)?])
    });
}

#[test]
fn memory_writes() {
    check("lru", 32, |g, case| {
        let (batch, m, d) = (case.extent(5), case.extent(9), case.extent(17));
        let w = 1 + case.below(m);
        let memory = case.param(g, [batch, m, d])?;
        let anchors = case.times(g, [batch, m], -2, 5)?;
        let times = g.constant(&vec![9i64; batch], [batch])?;
        let (slots, _) = g.lru_select(anchors, w)?;
        let old = g.gather_slots(memory, slots)?;
        let candidates = case.param(g, [batch, w, d])?;
        let candidates = g.mul(candidates, old)?;
        let rows: Vec<bool> = (0..batch).map(|_| case.flip()).collect();
        let active = if case.flip() { Some(g.constant(&rows, [batch])?) } else { None };
        let blend = Blend { lambda: 0.3, empty_slots_too: case.flip(), active };
        let (memory, anchors) = g.lru_blend(memory, anchors, slots, candidates, times, blend)?;
        // Once more, so that gradients pass through a blend.
        let (slots, _) = g.lru_select(anchors, 1)?;
        let candidates = g.gather_slots(memory, slots)?;
        let candidates = g.tanh(candidates)?;
        Ok(vec![g.lru_blend(memory, anchors, slots, candidates, times, blend)?.0])
    });
}

/// States before the first step may be constants; any of the results may go unused.
#[test]
fn lstm_over_a_window() {
    check("lstm window", 32, |g, case| {
        let (batch, steps, width) = (case.extent(9), [1, 5][case.below(2)], case.extent(17));
        let x = case.param(g, [batch, steps, 4 * width])?;
        let weight = case.param(g, [4 * width, width])?;
        let weight = g.scale(weight, 0.5)?;
        let bias = case.param(g, [4 * width])?;
        let mut first = || match case.flip() {
            true => case.param(g, [batch, width]),
            false => g.full(case.dtype, [batch, width], 0.3),
        };
        let (hidden, cell) = (first()?, first()?);
        let lstm = g.lstm(x, weight, bias, hidden, cell)?;
        let mut results = vec![lstm.hidden, lstm.last_hidden, lstm.last_cell];
        if case.flip() {
            results.remove(case.below(3));
        }
        Ok(results)
    });
}

/// Two windows, one after the other, with one weight: its gradients meet.
#[test]
fn lstm_over_two_windows() {
    check("lstm windows", 4, |g, case| {
        let (batch, steps, width) = (1 + case.below(12), 3, case.extent(9));
        let weight = case.param(g, [4 * width, width])?;
        let bias = case.param(g, [4 * width])?;
        let (hidden, cell) = (case.param(g, [batch, width])?, case.param(g, [batch, width])?);
        let x = case.param(g, [batch, steps, 4 * width])?;
        let one = g.lstm(x, weight, bias, hidden, cell)?;
        let x = case.param(g, [batch, steps, 4 * width])?;
        let two = g.lstm(x, weight, bias, one.last_hidden, one.last_cell)?;
        Ok(vec![one.hidden, two.hidden, two.last_cell])
    });
}

/// Fewer steps than the window holds, and more; any of the results may go unused, and the window before the
/// first step may be constant.
#[test]
fn causal_convolution() {
    check("causal_conv1d_silu", 32, |g, case| {
        let (batch, channels, taps) = (case.extent(40), case.extent(17), 2 + case.below(4));
        let steps = [1, 2, 7][case.below(3)];
        let x = case.param(g, [batch, steps, channels])?;
        let weight = case.param(g, [taps, channels])?;
        let bias = case.param(g, [channels])?;
        let window = match case.flip() {
            true => case.param(g, [batch, taps - 1, channels])?,
            false => g.full(case.dtype, [batch, taps - 1, channels], 0.3)?,
        };
        let conv = g.causal_conv1d_silu(x, weight, bias, window)?;
        let mut results = vec![conv.y, conv.window];
        if case.flip() {
            results.remove(case.below(2));
        }
        Ok(results)
    });
}

/// Inputs of a scan of this many steps that goes on from a state.
fn scan_of(
    g: &mut Graph,
    case: &mut Case,
    a: Value,
    d: Value,
    state: Value,
    steps: usize,
) -> Result<SelectiveScan> {
    let (batch, states, channels) = (g.shape(state)?[0], g.shape(a)?[0], g.shape(a)?[1]);
    Ok(SelectiveScan {
        u: case.param(g, [batch, steps, channels])?,
        delta: case.param(g, [batch, steps, channels])?,
        a,
        bc: case.param(g, [batch, steps, 2 * states])?,
        d,
        z: case.param(g, [batch, steps, channels])?,
        state,
    })
}

/// -e^x of a new parameter: rates of decay, -1 or so.
fn rates(g: &mut Graph, case: &mut Case, states: usize, channels: usize) -> Result<Value> {
    let log = case.param(g, [states, channels])?;
    let log = g.scale(log, 0.5)?;
    let a = g.exp(log)?;
    g.scale(a, -1.0)
}

/// One chunk of kept states and several; channels that fill a vector, fall short of it, and go beyond.
#[test]
fn selective_scan() {
    check("selective_scan", 24, |g, case| {
        let (batch, channels) = (case.extent(3), case.extent(17));
        // Chunks of 256, 85, 16, 16, 8 and 4 steps; 64 states are the most on a GPU.
        let (states, steps) = [(1, 5), (3, 4), (16, 1), (16, 19), (30, 10), (64, 9)][case.below(6)];
        let (a, d) = (rates(g, case, states, channels)?, case.param(g, [channels])?);
        let state = match case.flip() {
            true => case.param(g, [batch, states, channels])?,
            false => g.full(case.dtype, [batch, states, channels], 0.3)?,
        };
        let scan = scan_of(g, case, a, d, state, steps)?;
        let scanned = g.selective_scan(scan)?;
        let mut results = vec![scanned.y, scanned.state];
        if case.flip() {
            results.remove(case.below(2));
        }
        Ok(results)
    });
}

/// Two windows, one after the other: gradients pass through the state, and those of what both share meet.
#[test]
fn selective_scan_over_two_windows() {
    check("selective_scan windows", 6, |g, case| {
        let (batch, states, channels) = (1 + case.below(12), case.extent(9), case.extent(17));
        let (a, d) = (rates(g, case, states, channels)?, case.param(g, [channels])?);
        let state = case.param(g, [batch, states, channels])?;
        let scan = scan_of(g, case, a, d, state, 3)?;
        let one = g.selective_scan(scan)?;
        let scan = scan_of(g, case, a, d, one.state, 2)?;
        let two = g.selective_scan(scan)?;
        Ok(vec![one.y, two.y, two.state])
    });
}

#[test]
fn layouts() {
    check("layout", 32, |g, case| {
        let shape = [case.extent(4), case.extent(5), case.extent(17)];
        let x = case.param(g, shape)?;
        let axes = [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]][case.below(6)];
        let y = g.transpose(x, &axes)?;
        let axis = case.below(3);
        let extent = g.shape(y)?[axis];
        let start = case.below(extent);
        let end = start + 1 + case.below(extent - start);
        let part = g.slice(y, axis, start..end)?;
        let joined = g.concat(&[part, y, part], axis)?;
        let len = g.ty(joined)?.len();
        let flat = g.reshape(joined, [len])?;
        let copy = g.copy(flat)?;
        Ok(vec![copy, y])
    });
}

#[test]
fn arithmetic_with_broadcasting() {
    check("arithmetic", 96, |g, case| {
        let full = [case.extent(4), case.extent(5), case.extent(17)];
        let shape = |case: &mut Case| -> Vec<usize> {
            let skip = case.below(4);
            full[skip..].iter().map(|n| if case.below(3) == 0 { 1 } else { *n }).collect()
        };
        let (a, b) = (shape(case), shape(case));
        let (a, b) = (case.param(g, a)?, case.param(g, b)?);
        let y = match case.below(5) {
            0 => g.add(a, b)?,
            1 => g.sub(a, b)?,
            2 => g.mul(a, b)?,
            3 => g.minimum(a, b)?,
            _ => {
                let divisor = g.exp(b)?;
                g.div(a, divisor)?
            }
        };
        let y = g.affine(y, -1.7, 0.2)?;
        let shape = g.shape(y)?.to_vec();
        let target: Vec<usize> =
            shape[case.below(shape.len() + 1)..].iter().map(|n| if case.flip() { 1 } else { *n }).collect();
        let reduced = if case.flip() { g.sum_to(y, target)? } else { g.mean_to(y, target)? };
        let wide = g.broadcast_to(reduced, shape.clone())?;
        let lead = shape[..case.below(shape.len() + 1)].to_vec();
        let condition: Vec<bool> = (0..lead.iter().product()).map(|_| case.flip()).collect();
        let condition = g.constant(&condition, lead)?;
        let chosen = g.select(condition, wide, y)?;
        let mean = g.mean(y)?;
        Ok(vec![chosen, mean, y])
    });
}

/// An LSTM cell unrolled over time, built only from public ops.
#[test]
fn an_lstm_can_be_built() {
    check("lstm", 4, |g, case| {
        let (batch, steps, d) = (case.extent(3), case.extent(4), case.extent(7));
        let x = case.param(g, [steps, batch, d])?;
        let w = case.param(g, [4 * d, 2 * d])?;
        let b = case.param(g, [4 * d])?;
        let mut h = case.param(g, [batch, d])?;
        let mut c = case.param(g, [batch, d])?;
        for t in 0..steps {
            let input = g.slice(x, 0, t..t + 1)?;
            let input = g.reshape(input, [batch, d])?;
            let joined = g.concat(&[input, h], 1)?;
            let gates = g.linear(joined, w, Some(b), Activation::Identity)?;
            let part = |g: &mut Graph, i: usize, kind| {
                let part = g.slice(gates, 1, i * d..(i + 1) * d)?;
                g.activation(part, kind)
            };
            let keep = part(g, 0, Activation::Sigmoid)?;
            let write = part(g, 1, Activation::Sigmoid)?;
            let candidate = part(g, 2, Activation::Tanh)?;
            let show = part(g, 3, Activation::Sigmoid)?;
            let kept = g.mul(keep, c)?;
            let written = g.mul(write, candidate)?;
            c = g.add(kept, written)?;
            let shown = g.tanh(c)?;
            h = g.mul(show, shown)?;
        }
        Ok(vec![h, c])
    });
}

/// A selective state-space recurrence (Mamba's core): h = exp(-softplus(dt) a) h + dt b x, y = c h.
#[test]
fn a_selective_scan_can_be_built() {
    check("selective scan", 4, |g, case| {
        let (batch, steps, d, n) = (case.extent(3), case.extent(4), case.extent(5), case.extent(4));
        let x = case.param(g, [steps, batch, d, 1])?;
        let dt = case.param(g, [steps, batch, d, 1])?;
        let b = case.param(g, [steps, batch, 1, n])?;
        let c = case.param(g, [steps, batch, 1, n])?;
        let a = case.param(g, [1, 1, d, n])?;
        let a = g.exp(a)?;
        let dt = g.softplus(dt)?;
        let decay = g.mul(dt, a)?;
        let decay = g.scale(decay, -1.0)?;
        let decay = g.exp(decay)?;
        let inflow = g.mul(dt, x)?;
        let inflow = g.mul(inflow, b)?;
        let mut h = None;
        let mut outputs = Vec::new();
        for t in 0..steps {
            let at = |g: &mut Graph, v| g.slice(v, 0, t..t + 1);
            let mut next = at(g, inflow)?;
            if let Some(h) = h {
                let decay = at(g, decay)?;
                let kept = g.mul(decay, h)?;
                next = g.add(kept, next)?;
            }
            let c = at(g, c)?;
            let read = g.mul(next, c)?;
            outputs.push(g.sum_to(read, [1, batch, d, 1])?);
            h = Some(next);
        }
        Ok(vec![g.concat(&outputs, 0)?])
    });
}

#[test]
fn gradients_stop_where_told_and_are_absent_without_a_path() {
    let mut g = Graph::new();
    let a = g.param("a", F64, [3]).unwrap();
    let b = g.param("b", F64, [3]).unwrap();
    let c = g.param("c", F64, [3]).unwrap();
    let fixed = g.stop_gradient(a).unwrap();
    let y = g.mul(fixed, b).unwrap();
    let loss = g.sum(y).unwrap();
    let grads = g.gradients(loss, &[a, b, c, loss]).unwrap();
    assert!(grads[0].is_none() && grads[1].is_some() && grads[2].is_none() && grads[3].is_some());
}
