//! Forward values against literal numbers and plain loops, and defined results at the extremes.

#![allow(clippy::unwrap_used, clippy::panic)]

use elmur_engine::rng::{Stream, unit};
use elmur_engine::{
    Activation, AdamW, Attention, AttentionMask, Blend, Conv1d, Conv2d, CrossEntropy, DType, Element, Graph,
    Norm, NormKind, Pool, Program, Qkv, Relative, Result, Store, Value,
};

const F64: DType = DType::F64;
const F32: DType = DType::F32;

/// Builds, runs and returns output `y`.
fn run<T: Element>(build: impl FnOnce(&mut Graph) -> Result<Value>) -> Vec<T> {
    let mut g = Graph::new();
    let y = build(&mut g).unwrap();
    g.output("y", y).unwrap();
    let store = Store::new();
    store.declare(&g).unwrap();
    let mut program = Program::new(&g, &Pool::new(2), &[&store]).unwrap();
    program.run().unwrap();
    program.get::<T>("y").unwrap().to_vec()
}

fn normal(n: usize, stream: u32) -> Vec<f64> {
    let mut data = vec![0.0; n];
    Stream::new(42, 0, stream).fill_normal(&mut data, 1.0);
    data
}

fn close(got: &[f64], want: &[f64], tolerance: f64) {
    assert_eq!(got.len(), want.len());
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        assert!((g - w).abs() <= tolerance * w.abs().max(1.0), "element {i}: {g}, want {w}");
    }
}

#[test]
fn linear_and_activations() {
    let run = |kind| {
        run::<f64>(|g| {
            let x = g.constant(&[1.0, -2.0, 0.5, 3.0], [2, 2])?;
            let w = g.constant(&[1.0, 0.0, 0.5, -1.0, 2.0, 2.0], [3, 2])?;
            let b = g.constant(&[0.0, 0.5, -1.0], [3])?;
            g.linear(x, w, Some(b), kind)
        })
    };
    let z = [1.0, 3.0, -3.0, 0.5, -2.25, 6.0];
    close(&run(Activation::Identity), &z, 0.0);
    close(&run(Activation::Relu), &[1.0, 3.0, 0.0, 0.5, 0.0, 6.0], 0.0);
    close(&run(Activation::Tanh), &z.map(f64::tanh), 1e-15);
    // Φ(1) = 0.841344746068543, Φ(3) = 0.998650101968370, Φ(0.5) = 0.691462461274013.
    let gelu = run(Activation::Gelu);
    close(&gelu[..2], &[0.841344746068543, 2.99595030590511], 1e-12);
    close(&gelu[3..4], &[0.345731230637007], 1e-12);
    close(&run(Activation::Silu), &z.map(|z| z / (1.0 + (-z).exp())), 1e-15);
    close(&run(Activation::Softplus), &z.map(|z| z.exp().ln_1p()), 1e-14);
    close(&run(Activation::Mish), &z.map(|z| z * z.exp().ln_1p().tanh()), 1e-14);
    let ln = run(Activation::Ln);
    close(&[ln[0], ln[1], ln[3], ln[5]], &[0.0, 3f64.ln(), -2f64.ln(), 6f64.ln()], 1e-15);
    assert!(ln[2].is_nan() && ln[4].is_nan());
}

/// Mish and its gradient far from zero in f32, where e^x would overflow or vanish beside 1.
#[test]
fn mish_is_accurate_everywhere() {
    let x: Vec<f64> = (-320..=400).map(|i| f64::from(i) / 4.0).collect();
    let mut g = Graph::new();
    let p = g.param("x", F32, [x.len()]).unwrap();
    let y = g.mish(p).unwrap();
    let loss = g.sum(y).unwrap();
    let dx = g.gradients(loss, &[p]).unwrap()[0].unwrap();
    g.output("y", y).unwrap();
    g.output("dx", dx).unwrap();
    let store = Store::new();
    store.declare(&g).unwrap();
    store.set("x", &x.iter().map(|x| *x as f32).collect::<Vec<_>>()).unwrap();
    let mut program = Program::new(&g, &Pool::new(1), &[&store]).unwrap();
    program.run().unwrap();
    for ((x, y), dx) in x.iter().zip(program.get::<f32>("y").unwrap()).zip(program.get::<f32>("dx").unwrap())
    {
        let t = x.exp().ln_1p().tanh();
        let slope = t + x * (1.0 - t * t) / (1.0 + (-x).exp());
        assert!((f64::from(*y) - x * t).abs() <= 1e-6 * (x * t).abs(), "mish({x}) = {y}");
        assert!((f64::from(*dx) - slope).abs() <= 2e-6 * slope.abs(), "mish'({x}) = {dx}, {slope}");
    }
}

#[test]
fn norms_of_a_known_row() {
    let rows = |kind: u8| {
        run::<f64>(|g| {
            let x = g.constant(&[1.0, 2.0, 3.0, 6.0], [1, 4])?;
            let f = g.constant(&[0.0, 0.0, 0.0, -2.0], [1, 4])?;
            let gamma = g.constant(&[1.0, 1.0, 2.0, 1.0], [4])?;
            let beta = g.constant(&[0.0, 0.0, 0.0, 10.0], [4])?;
            let kind = if kind == 0 { NormKind::Rms } else { NormKind::Layer { beta } };
            Ok(g.residual_norm(x, f, Norm { kind, gamma, eps: 0.0 })?.0)
        })
    };
    let root = 7.5f64.sqrt(); // mean square of 1, 2, 3, 4
    close(&rows(0), &[1.0 / root, 2.0 / root, 6.0 / root, 4.0 / root], 1e-15);
    let deviation = 1.25f64.sqrt();
    close(&rows(1), &[-1.5 / deviation, -0.5 / deviation, 1.0 / deviation, 10.0 + 1.5 / deviation], 1e-15);
}

/// Which keys queries see in a form of attention.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Sees {
    All,
    Causal,
    Ranges,
    Some,
}

/// The formula of `ops/attention.rs` as plain loops, for few queries and for many, which CPUs compute differently.
#[test]
fn attention_matches_its_formula_in_every_form() {
    let (batch, heads, width) = (2, 2, 5);
    let d = heads * width;
    for (queries, keys) in [(1, 4), (3, 7), (9, 20), (20, 37)] {
        let forms = [Sees::All, Sees::Causal, Sees::Ranges, Sees::Some].into_iter();
        for (case, (sees, relative)) in forms.flat_map(|sees| (0..5).map(move |r| (sees, r))).enumerate() {
            // No positions; looking back; a few rows ahead; all rows ahead, of each query or of the next.
            let zero = [None, Some(0), Some(2), Some(keys), Some(keys)][relative];
            let next = relative == 4;
            let start = if case % 2 == 0 { [0, (keys - queries) as i32] } else { [0, 0] };
            let table = zero.map_or(0, |zero| zero + keys + case % 3);
            let (q, kv) = (normal(batch * queries * d, 0), normal(batch * keys * 2 * d, 1));
            let (u, v, r) = (normal(d, 2), normal(d, 3), normal(table * d, 4));
            let bias = normal(heads * queries * keys, 5);
            // Ranges of which some are empty, and some that end before they begin.
            let mut draws = Stream::new(7, case as u64, 0).group(0).concat().into_iter().cycle();
            let mut below = |n: usize| draws.next().unwrap() as usize % n;
            let ranges: Vec<i32> =
                (0..batch * queries).flat_map(|_| [below(keys) as i32, below(keys + 1) as i32]).collect();
            let mask: Vec<bool> = (0..queries * keys).map(|_| below(3) > 0).collect();
            let seen = |b: usize, i: usize, j: usize| match sees {
                Sees::All => true,
                Sees::Causal => j <= start[b] as usize + i,
                Sees::Ranges => {
                    let range = &ranges[2 * (b * queries + i)..];
                    range[0] as usize <= j && j < range[1] as usize
                }
                Sees::Some => mask[i * keys + j],
            };
            let got = run::<f64>(|g| {
                let options = Attention {
                    heads,
                    mask: match sees {
                        Sees::All => AttentionMask::Full,
                        Sees::Causal => AttentionMask::Causal,
                        Sees::Ranges => AttentionMask::Range(g.constant(&ranges, [batch, queries, 2])?),
                        Sees::Some => AttentionMask::Custom(g.constant(&mask, [1, queries, keys])?),
                    },
                    bias: Some(g.constant(&bias, [1, heads, queries, keys])?),
                    relative: match zero {
                        None => None,
                        Some(zero) => Some(Relative {
                            u: g.constant(&u, [heads, width])?,
                            v: g.constant(&v, [heads, width])?,
                            r: g.constant(&r, [table, d])?,
                            zero,
                            next_query_ahead: next,
                        }),
                    },
                    start: Some(g.constant(&start, [batch])?),
                    dropout: None,
                };
                let q = g.constant(&q, [batch, queries, d])?;
                let kv = g.constant(&kv, [batch, keys, 2 * d])?;
                let (y, weights) = g.attention(Qkv::QueryAndPacked { q, kv }, options)?;
                // Both outputs in one row.
                let (y_len, w_len) = (batch * queries * d, batch * heads * queries * keys);
                let (y, weights) = (g.reshape(y, [y_len])?, g.reshape(weights, [w_len])?);
                g.concat(&[y, weights], 0)
            });
            let mut want = vec![0.0; batch * queries * d];
            let mut all_weights = Vec::new();
            for (b, h) in (0..batch).flat_map(|b| (0..heads).map(move |h| (b, h))) {
                for i in 0..queries {
                    let position = start[b] as usize + i;
                    let head =
                        |x: &[f64], row: usize, stride: usize, c: usize| x[row * stride + h * width + c];
                    let score = |j: usize| {
                        let term = |c: usize| {
                            let q_of = |i: usize| head(&q, b * queries + i, d, c);
                            let k = head(&kv, b * keys + j, 2 * d, c);
                            let Some(zero) = zero else { return q_of(i) * k };
                            let content = (q_of(i) + u[h * width + c]) * k;
                            let query = if next && j > position { i + 1 } else { i };
                            let row = (zero + position).checked_sub(j).filter(|row| *row < table);
                            match row {
                                Some(row) if query < queries => {
                                    content + (q_of(query) + v[h * width + c]) * head(&r, row, d, c)
                                }
                                _ => content,
                            }
                        };
                        let sum: f64 = (0..width).map(term).sum();
                        sum / (width as f64).sqrt() + bias[(h * queries + i) * keys + j]
                    };
                    let e: Vec<f64> =
                        (0..keys).map(|j| if seen(b, i, j) { score(j).exp() } else { 0.0 }).collect();
                    let total: f64 = e.iter().sum();
                    let weights: Vec<f64> =
                        e.iter().map(|e| if total == 0.0 { 0.0 } else { e / total }).collect();
                    for (j, c) in (0..keys).flat_map(|j| (0..width).map(move |c| (j, c))) {
                        let value = kv[(b * keys + j) * 2 * d + d + h * width + c];
                        want[(b * queries + i) * d + h * width + c] += weights[j] * value;
                    }
                    all_weights.extend(weights);
                }
            }
            want.extend(all_weights);
            let worst = got.iter().zip(&want).map(|(g, w)| (g - w).abs()).fold(0.0, f64::max);
            assert!(worst < 1e-12, "{queries} to {keys}, {sees:?}, zero {zero:?}, next {next}: {worst:e}");
        }
    }
}

/// Output of attention with narrow heads and dropout, and the gradients of everything: of queries to a memory with
/// biases by time, or of tokens to each other with relative positions.
fn narrow_attention<T: Element>(
    [batch, queries, keys, heads, width]: [usize; 5],
    memory: bool,
    threads: usize,
    of: impl Fn(f64) -> T,
) -> Vec<Vec<T>> {
    let (mut g, store, d, rows) = (Graph::new(), Store::new(), heads * width, 21);
    let rng = g.rng("rng").unwrap();
    let mut params = Vec::new();
    let mut param = |g: &mut Graph, shape: &[usize]| {
        params.push(g.param(&format!("p{}", params.len()), T::DTYPE, shape.to_vec()).unwrap());
        params[params.len() - 1]
    };
    let mut options = Attention { heads, dropout: Some((0.2, rng)), ..Attention::default() };
    let (q, kv) = (param(&mut g, &[batch, queries, d]), param(&mut g, &[batch, keys, 2 * d]));
    if memory {
        let table = param(&mut g, &[rows, heads]);
        let tokens =
            g.constant(&(0..queries as i64).map(|t| 30 + t).collect::<Vec<_>>(), [1, queries]).unwrap();
        let anchors: Vec<i64> = (0..(batch * keys) as i64).map(|j| j * 7 % 61 - 1).collect();
        let anchors = g.constant(&anchors, [batch, keys]).unwrap();
        options.bias = Some(g.relative_bias(table, tokens, anchors).unwrap());
    } else {
        let [u, v] = [0, 1].map(|_| param(&mut g, &[heads, width]));
        options.relative = Some(Relative::new(u, v, param(&mut g, &[keys, d])));
        options.mask = AttentionMask::Causal;
    }
    let (y, _) = g.attention(Qkv::QueryAndPacked { q, kv }, options).unwrap();
    let squares = g.mul(y, y).unwrap();
    let loss = g.sum(squares).unwrap();
    let grads = g.gradients(loss, &params).unwrap();
    let results: Vec<Value> = std::iter::once(y).chain(grads.into_iter().flatten()).collect();
    for (i, result) in results.iter().enumerate() {
        g.output(&i.to_string(), *result).unwrap();
    }
    store.declare(&g).unwrap();
    for i in 0..params.len() {
        let name = format!("p{i}");
        let data = normal(store.ty(&name).unwrap().len(), i as u32);
        store.set(&name, &data.into_iter().map(&of).collect::<Vec<_>>()).unwrap();
    }
    let mut program = Program::new(&g, &Pool::new(threads), &[&store]).unwrap();
    program.run().unwrap();
    (0..results.len()).map(|i| program.get::<T>(&i.to_string()).unwrap().to_vec()).collect()
}

/// Narrow heads, of which several share a cache line and a task, in numbers that do and do not fill it; keys that fill
/// whole tiles and keys that do not.
const NARROW: [[usize; 5]; 6] = [
    [3, 20, 64, 16, 8],
    [2, 9, 37, 9, 8],
    [2, 20, 64, 3, 16],
    [1, 33, 33, 8, 4],
    [2, 17, 20, 5, 5],
    [17, 8, 16, 11, 2],
];

#[test]
fn narrow_heads_in_f32_are_those_of_f64() {
    for (sizes, memory) in NARROW.into_iter().flat_map(|sizes| [(sizes, true), (sizes, false)]) {
        let exact = narrow_attention::<f64>(sizes, memory, 1, |x| x);
        let single = narrow_attention::<f32>(sizes, memory, 2, |x| x as f32);
        assert_eq!(exact.len(), if memory { 4 } else { 6 });
        for (i, (got, want)) in single.iter().zip(&exact).enumerate() {
            let largest = want.iter().fold(1.0f64, |most, x| most.max(x.abs()));
            let worst = got.iter().zip(want).map(|(a, b)| (f64::from(*a) - b).abs()).fold(0.0, f64::max);
            assert!(worst < 2e-6 * largest, "{sizes:?}, memory {memory}, result {i}: {worst:e} of {largest}");
        }
    }
}

#[test]
fn narrow_heads_have_the_same_bits_on_any_number_of_threads() {
    for (sizes, memory) in NARROW.into_iter().flat_map(|sizes| [(sizes, true), (sizes, false)]) {
        let bits = |threads| {
            let results = narrow_attention::<f32>(sizes, memory, threads, |x| x as f32);
            results.into_iter().flatten().map(f32::to_bits).collect::<Vec<_>>()
        };
        let one = bits(1);
        assert!([2, 5].into_iter().all(|threads| bits(threads) == one), "{sizes:?}, memory {memory}");
    }
}

/// Each batch row draws from its own generator, as it would alone.
#[test]
fn attention_drops_by_the_generator_of_each_row() {
    let (heads, d) = (2, 6);
    for (queries, keys) in [(2, 5), (12, 18)] {
        let (q, kv) = (normal(2 * queries * d, 0), normal(2 * keys * 2 * d, 1));
        let run_rows = |rows: &[usize], states: &[i64], shape: &[usize]| {
            run::<f64>(|g| {
                let part = |x: &[f64], each: usize| -> Vec<f64> {
                    rows.iter().flat_map(|row| x[row * each..(row + 1) * each].to_vec()).collect()
                };
                let q = g.constant(&part(&q, queries * d), [rows.len(), queries, d])?;
                let kv = g.constant(&part(&kv, keys * 2 * d), [rows.len(), keys, 2 * d])?;
                let dropout = Some((0.4, g.constant(states, shape.to_vec())?));
                let options = Attention { heads, dropout, ..Attention::default() };
                Ok(g.attention(Qkv::QueryAndPacked { q, kv }, options)?.0)
            })
        };
        let both = run_rows(&[0, 1], &[5, 1, 9, 2], &[2, 2]);
        let alone = [run_rows(&[0], &[5, 1], &[1, 2]), run_rows(&[1], &[9, 2], &[2])].concat();
        assert_eq!(both, alone);
        assert_ne!(both[..queries * d], run_rows(&[0], &[5, 2], &[2])[..]);
    }
}

/// Stepping with a key/value cache gives what the whole sequence gives.
#[test]
fn a_cache_steps_like_the_whole_sequence() {
    let (batch, tokens, heads, d) = (2, 6, 2, 8);
    let qkv = normal(batch * tokens * 3 * d, 0);
    let whole = run::<f64>(|g| {
        let qkv = g.constant(&qkv, [batch, tokens, 3 * d])?;
        let options = Attention { heads, mask: AttentionMask::Causal, ..Attention::default() };
        Ok(g.attention(Qkv::Packed(qkv), options)?.0)
    });

    let mut g = Graph::new();
    let token = g.input("token", F64, [batch, 1, 3 * d]).unwrap();
    let at = g.input("at", DType::I32, [batch]).unwrap();
    let cache = g.state("cache", F64, [batch, tokens, 2 * d]).unwrap();
    let q = g.slice(token, 2, 0..d).unwrap();
    let row = g.slice(token, 2, d..3 * d).unwrap();
    let row = g.reshape(row, [batch, 2 * d]).unwrap();
    let place = g.input("place", DType::I32, [batch]).unwrap();
    let kv = g.scatter_rows(cache, place, row).unwrap();
    let options = Attention { heads, mask: AttentionMask::Causal, start: Some(at), ..Attention::default() };
    let (y, _) = g.attention(Qkv::QueryAndPacked { q, kv }, options).unwrap();
    g.update(cache, kv).unwrap();
    g.output("y", y).unwrap();
    let store = Store::new();
    store.declare(&g).unwrap();
    let mut program = Program::new(&g, &Pool::new(1), &[&store]).unwrap();
    for t in 0..tokens {
        let token: Vec<f64> =
            (0..batch).flat_map(|b| qkv[(b * tokens + t) * 3 * d..][..3 * d].to_vec()).collect();
        program.set("token", &token).unwrap();
        program.set("at", &vec![t as i32; batch]).unwrap();
        let places: Vec<i32> = (0..batch).map(|b| (b * tokens + t) as i32).collect();
        program.set("place", &places).unwrap();
        program.run().unwrap();
        for b in 0..batch {
            let got = &program.get::<f64>("y").unwrap()[b * d..][..d];
            close(got, &whole[(b * tokens + t) * d..][..d], 1e-14);
        }
    }
    program.set("place", &[(batch * tokens) as i32, 0]).unwrap();
    let before = store.get::<f64>("cache").unwrap();
    let error = program.run().unwrap_err().to_string();
    assert_eq!(error, "scatter_rows: row 12 is outside 0..12");
    assert_eq!(store.get::<f64>("cache").unwrap(), before);
}

#[test]
fn convolution_matches_its_formula() {
    let (batch, channels, outputs) = (2, 3, 4);
    let (height, width, h, w, stride, padding) = (7, 6, 3, 2, 2, 1);
    let (x, k, b) =
        (normal(batch * channels * height * width, 0), normal(outputs * channels * h * w, 1), normal(4, 2));
    let got = run::<f64>(|g| {
        let x = g.constant(&x, [batch, channels, height, width])?;
        let k = g.constant(&k, [outputs, channels, h, w])?;
        let b = g.constant(&b, [outputs])?;
        g.conv2d(x, k, Some(b), Conv2d { stride, padding }, Activation::Identity)
    });
    let (rows, cols) = ((height + 2 - h) / 2 + 1, (width + 2 - w) / 2 + 1);
    let mut want = Vec::new();
    for n in 0..batch {
        for o in 0..outputs {
            for i in 0..rows {
                for j in 0..cols {
                    let mut sum = b[o];
                    for c in 0..channels {
                        for p in 0..h {
                            for q in 0..w {
                                let (r, v) = ((i * stride + p) as isize - 1, (j * stride + q) as isize - 1);
                                if (0..height as isize).contains(&r) && (0..width as isize).contains(&v) {
                                    let pixel =
                                        x[((n * channels + c) * height + r as usize) * width + v as usize];
                                    sum += pixel * k[((o * channels + c) * h + p) * w + q];
                                }
                            }
                        }
                    }
                    want.push(sum);
                }
            }
        }
    }
    close(&got, &want, 1e-13);
}

/// More channels and outputs than a panel and fewer than half of one, more patches than a tile, borders wider than
/// kernels, kernels larger than images, strides that leave gaps; on any number of threads.
#[test]
fn convolutions_of_many_channels_and_their_gradients_match_their_formulas() {
    // Images, channels, rows, columns; outputs, rows and columns of the kernel; stride, padding.
    for (dims, kernel, stride, padding) in [
        ([3, 33, 9, 8], [40, 3, 3], 1, 1),
        ([2, 35, 13, 20], [33, 5, 2], 2, 2),
        ([9, 5, 4, 3], [3, 1, 2], 1, 3),
        ([2, 40, 11, 7], [65, 2, 1], 3, 0),
        ([2, 6, 36, 36], [32, 8, 8], 4, 0),
        ([3, 16, 2, 3], [17, 5, 5], 1, 2),
        ([3, 9, 2, 3], [8, 5, 5], 3, 2),
    ] {
        let ([batch, channels, height, width], [outputs, h, w]) = (dims, kernel);
        let (rows, columns) =
            ((height + 2 * padding - h) / stride + 1, (width + 2 * padding - w) / stride + 1);
        let x = normal(batch * channels * height * width, 0);
        let k = normal(outputs * channels * h * w, 1);
        let r = normal(batch * outputs * rows * columns, 2);
        let conv = Conv2d { stride, padding };
        let (image, weight) = ((&x[..], dims), (&k[..], [outputs, channels, h, w]));
        let got = |dtype: DType, threads: usize| convolved(dtype, threads, conv, image, weight, &r);
        let (mut y, mut dx, mut dk) = (vec![0.0; r.len()], vec![0.0; x.len()], vec![0.0; k.len()]);
        for at in 0..y.len() {
            let (j, i) = (at % columns, at / columns % rows);
            let (o, n) = (at / columns / rows % outputs, at / columns / rows / outputs);
            for tap in 0..channels * h * w {
                let (q, p, c) = (tap % w, tap / w % h, tap / w / h);
                let (row, column) =
                    ((i * stride + p).wrapping_sub(padding), (j * stride + q).wrapping_sub(padding));
                if row < height && column < width {
                    let (pixel, weight) =
                        (((n * channels + c) * height + row) * width + column, o * channels * h * w + tap);
                    y[at] += x[pixel] * k[weight];
                    dx[pixel] += r[at] * k[weight];
                    dk[weight] += r[at] * x[pixel];
                }
            }
        }
        for (dtype, tolerance) in [(F64, 1e-12), (F32, 1e-4)] {
            let one = got(dtype, 1);
            for (got, want) in one.iter().zip([&y, &dx, &dk]) {
                close(got, want, tolerance);
            }
            assert!([2, 5].into_iter().all(|threads| got(dtype, threads) == one), "{dims:?}");
        }
    }
}

/// The convolution of images with kernels, both with their extents, and the gradients of both where that of the
/// result is `r`.
fn convolved(
    dtype: DType,
    threads: usize,
    conv: Conv2d,
    (x, dims): (&[f64], [usize; 4]),
    (k, kernel): (&[f64], [usize; 4]),
    r: &[f64],
) -> [Vec<f64>; 3] {
    let mut g = Graph::new();
    let (x_value, k_value) = (g.param("x", F64, dims).unwrap(), g.param("k", F64, kernel).unwrap());
    let (x_cast, k_cast) = (g.cast(x_value, dtype).unwrap(), g.cast(k_value, dtype).unwrap());
    let y = g.conv2d(x_cast, k_cast, None, conv, Activation::Identity).unwrap();
    let y = g.cast(y, F64).unwrap();
    let r = g.constant(r, g.shape(y).unwrap().to_vec()).unwrap();
    let loss = g.mul(y, r).and_then(|y| g.sum(y)).unwrap();
    let grads = g.gradients(loss, &[x_value, k_value]).unwrap();
    let results = [("y", y), ("dx", grads[0].unwrap()), ("dk", grads[1].unwrap())];
    for (name, value) in results {
        g.output(name, value).unwrap();
    }
    let store = Store::new();
    store.declare(&g).unwrap();
    store.set("x", x).unwrap();
    store.set("k", k).unwrap();
    let mut program = Program::new(&g, &Pool::new(threads), &[&store]).unwrap();
    program.run().unwrap();
    results.map(|(name, _)| program.get::<f64>(name).unwrap().to_vec())
}

#[test]
fn convolution_over_time_matches_its_formula() {
    let (batch, channels, outputs, steps) = (2, 3, 4, 7);
    for (kernel, stride, padding) in [(3, 2, 1), (5, 1, 2), (1, 1, 0), (1, 2, 0), (2, 3, 4)] {
        let conv = Conv1d { stride, padding };
        let (x, w, b) =
            (normal(batch * steps * channels, 0), normal(outputs * kernel * channels, 1), normal(outputs, 2));
        let got = run::<f64>(|g| {
            let x = g.constant(&x, [batch, steps, channels])?;
            let w = g.constant(&w, [outputs, kernel, channels])?;
            let b = g.constant(&b, [outputs])?;
            g.conv1d(x, w, Some(b), conv, Activation::Identity)
        });
        let mut want = Vec::new();
        for n in 0..batch {
            for t in 0..(steps + 2 * padding - kernel) / stride + 1 {
                for o in 0..outputs {
                    let mut sum = b[o];
                    for p in (0..kernel).filter(|p| (padding..steps + padding).contains(&(t * stride + p))) {
                        let at = (n * steps + t * stride + p - padding) * channels;
                        for c in 0..channels {
                            sum += w[(o * kernel + p) * channels + c] * x[at + c];
                        }
                    }
                    want.push(sum);
                }
            }
        }
        close(&got, &want, 1e-13);
    }
}

#[test]
fn transposed_convolution_matches_its_formula() {
    let (batch, channels, outputs, steps) = (2, 3, 4, 5);
    for (kernel, stride, padding) in [(4, 2, 1), (3, 1, 1), (2, 3, 0), (5, 2, 2)] {
        let conv = Conv1d { stride, padding };
        let (x, w, b) =
            (normal(batch * steps * channels, 0), normal(kernel * outputs * channels, 1), normal(outputs, 2));
        let got = run::<f64>(|g| {
            let x = g.constant(&x, [batch, steps, channels])?;
            let w = g.constant(&w, [kernel, outputs, channels])?;
            let b = g.constant(&b, [outputs])?;
            g.conv_transpose1d(x, w, Some(b), conv, Activation::Identity)
        });
        let longer = (steps - 1) * stride + kernel - 2 * padding;
        let mut want: Vec<f64> = (0..batch * longer * outputs).map(|i| b[i % outputs]).collect();
        for n in 0..batch {
            for (t, p) in (0..steps).flat_map(|t| (0..kernel).map(move |p| (t, p))) {
                let place = (t * stride + p).checked_sub(padding).filter(|u| *u < longer);
                let Some(u) = place else { continue };
                for o in 0..outputs {
                    for c in 0..channels {
                        want[(n * longer + u) * outputs + o] +=
                            w[(p * outputs + o) * channels + c] * x[(n * steps + t) * channels + c];
                    }
                }
            }
        }
        close(&got, &want, 1e-13);
    }
}

#[test]
fn group_norm_matches_its_formula() {
    let (batch, steps, groups, width) = (3, 5, 2, 3);
    let channels = groups * width;
    let (x, gamma, beta) = (normal(batch * steps * channels, 0), normal(channels, 1), normal(channels, 2));
    let got = run::<f64>(|g| {
        let x = g.constant(&x, [batch, steps, channels])?;
        let (gamma, beta) = (g.constant(&gamma, [channels])?, g.constant(&beta, [channels])?);
        g.group_norm(x, groups, gamma, beta, 1e-5)
    });
    let mut want = vec![0.0; x.len()];
    for (b, group) in (0..batch).flat_map(|b| (0..groups).map(move |group| (b, group))) {
        let at = |i: usize| (b * steps + i / width) * channels + group * width + i % width;
        let count = (steps * width) as f64;
        let mean = (0..steps * width).map(|i| x[at(i)]).sum::<f64>() / count;
        let variance = (0..steps * width).map(|i| (x[at(i)] - mean).powi(2)).sum::<f64>() / count;
        for i in 0..steps * width {
            let c = group * width + i % width;
            want[at(i)] = (x[at(i)] - mean) / (variance + 1e-5).sqrt() * gamma[c] + beta[c];
        }
    }
    close(&got, &want, 1e-13);
    // Images: the same numbers with channels first.
    let as_image = run::<f64>(|g| {
        let x = g.constant(&x, [batch, steps, channels])?;
        let x = g.transpose(x, &[0, 2, 1])?;
        let x = g.reshape(x, [batch, channels, 1, steps])?;
        let (gamma, beta) = (g.constant(&gamma, [channels])?, g.constant(&beta, [channels])?);
        let y = g.group_norm(x, groups, gamma, beta, 1e-5)?;
        let y = g.reshape(y, [batch, channels, steps])?;
        g.transpose(y, &[0, 2, 1])
    });
    close(&as_image, &want, 1e-13);
}

/// Forward and backward of the ops of a U-Net in f32: the same bits for any number of threads.
#[test]
fn convolutions_and_group_norms_have_the_same_bits_on_any_number_of_threads() {
    let bits = |threads: usize| {
        let (batch, steps, channels) = (70, 16, 24);
        let mut g = Graph::new();
        let x = g.param("x", F32, [batch, steps, channels]).unwrap();
        let w = g.param("w", F32, [32, 5, channels]).unwrap();
        let up = g.param("up", F32, [4, 24, 32]).unwrap();
        let (gamma, beta) = (g.param("gamma", F32, [32]).unwrap(), g.param("beta", F32, [32]).unwrap());
        let conv = Conv1d { stride: 2, padding: 1 };
        let y = g.conv1d(x, w, None, conv, Activation::Identity).unwrap();
        let y = g.group_norm(y, 8, gamma, beta, 1e-5).unwrap();
        let y = g.mish(y).unwrap();
        let y = g.conv_transpose1d(y, up, None, conv, Activation::Identity).unwrap();
        let loss = g.mul(y, y).and_then(|y| g.mean(y)).unwrap();
        let params: Vec<(String, Value)> = g.params().map(|(name, v)| (name.to_owned(), v)).collect();
        let values: Vec<Value> = params.iter().map(|(_, v)| *v).collect();
        let grads = g.gradients(loss, &values).unwrap();
        g.output("y", y).unwrap();
        for ((name, _), grad) in params.iter().zip(grads) {
            g.output(name, grad.unwrap()).unwrap();
        }
        let store = Store::new();
        store.declare(&g).unwrap();
        for (i, (name, value)) in params.iter().enumerate() {
            let data = normal(g.ty(*value).unwrap().len(), i as u32);
            store.set(name, &data.iter().map(|x| *x as f32).collect::<Vec<_>>()).unwrap();
        }
        let mut program = Program::new(&g, &Pool::new(threads), &[&store]).unwrap();
        program.run().unwrap();
        let names = params.iter().map(|(name, _)| name.as_str()).chain(["y"]);
        names.map(|name| program.get::<f32>(name).unwrap().to_vec()).collect::<Vec<_>>()
    };
    let one = bits(1);
    assert!(one.iter().flatten().all(|x| x.is_finite()) && one.iter().flatten().any(|x| *x != 0.0));
    assert!([2, 3, 7].into_iter().all(|threads| bits(threads) == one));
}

#[test]
fn max_pooling_takes_the_largest_of_each_window() {
    let pooled = |window| {
        run::<f32>(|g| {
            let mut x: Vec<f32> = (0..30).map(|i| (i * 7 % 30) as f32).collect();
            x[22] = f32::NAN;
            let x = g.constant(&x, [1, 2, 3, 5])?;
            g.max_pool2d(x, window)
        })
    };
    // Images 0 7 14 21 28 / 5 12 19 26 3 / 10 17 24 1 8 and 15 22 29 6 13 / 20 27 NaN 11 18 / 25 2 9 16 23.
    let two = pooled((2, 2));
    assert_eq!(two[..3], [12.0, 26.0, 27.0]);
    assert!(two[3].is_nan() && two.len() == 4);
    assert_eq!(pooled((1, 5))[..4], [28.0, 26.0, 24.0, 29.0]);
    assert_eq!(pooled((3, 3))[0], 24.0);
}

#[test]
fn numbers_are_put_into_the_bins_of_their_dimension() {
    let (inf, nan) = (f64::INFINITY, f64::NAN);
    let bins = run::<i32>(|g| {
        // The second dimension has an empty bin, as equal quantiles make them.
        let thresholds = g.constant(&[0.0, 1.0, 2.0, 4.0, -1.0, 0.0, 0.0, 1.0], [2, 4])?;
        let x = [-5.0, -1.0, 0.0, 0.0, 0.999, 0.5, 1.0, 1.0, 3.0, -inf, 4.0, 7.0, inf, -0.5, nan, nan];
        let x = g.constant(&x, [2, 4, 2])?;
        g.discretize(x, thresholds)
    });
    assert_eq!(bins, [0, 0, 0, 2, 0, 2, 1, 2, 2, 0, 2, 2, 2, 0, 0, 0]);
}

#[test]
fn rows_of_a_table_are_added_up() {
    let (rows, width, size) = (7, 5, 3);
    let table = normal(rows * width, 0);
    let index: Vec<i32> = (0..4 * size as i32).map(|i| i * 5 % rows as i32).collect();
    let sums = run::<f64>(|g| {
        let table = g.constant(&table, [rows, width])?;
        let index = g.constant(&index, [2, 2, size])?;
        g.embedding_sum(table, index)
    });
    let row = |i: i32| &table[i as usize * width..][..width];
    let want = index.chunks(size).flat_map(|of| (0..width).map(|c| of.iter().map(|i| row(*i)[c]).sum()));
    close(&sums, &want.collect::<Vec<f64>>(), 1e-12);
}

#[test]
fn images_move_by_their_row_s_draws_and_repeat_their_edges() {
    // Distances -1, 0 and 1 along an axis are draws of a third each.
    let moved = |draws: [f64; 4]| {
        run::<u8>(|g| {
            let x: Vec<u8> = (0..2 * 2 * 3 * 4).collect();
            let x = g.constant(&x, [2, 2, 3, 4])?;
            let draws = g.constant(&draws, [2, 2])?;
            g.shift_images(x, draws, 1)
        })
    };
    let still: Vec<u8> = (0..48).collect();
    assert_eq!(moved([0.5; 4]), still);
    let y = moved([0.0, 0.5, 0.34, 0.999]);
    // Row 0 shows the line above (the first twice), row 1 the pixel to the right (the last twice).
    assert_eq!(y[..12], [0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7]);
    assert_eq!(y[12..24], [12, 13, 14, 15, 12, 13, 14, 15, 16, 17, 18, 19]);
    assert_eq!(y[24..36], [25, 26, 27, 27, 29, 30, 31, 31, 33, 34, 35, 35]);
    assert_eq!(moved([0.99, 0.0, 0.5, 0.5])[..12], [4, 4, 5, 6, 8, 8, 9, 10, 8, 8, 9, 10]);
    // Every distance is drawn alike, on floats too.
    let far = run::<f64>(|g| {
        let x = g.constant(&(0..5 * 7 * 7).map(|i| (i % 7) as f64).collect::<Vec<_>>(), [5, 7, 7])?;
        let draws: Vec<f64> = (0..5).flat_map(|row| [0.5, 0.2 * row as f64 + 0.1]).collect();
        let draws = g.constant(&draws, [5, 2])?;
        g.shift_images(x, draws, 2)
    });
    assert_eq!((0..5).map(|row| far[49 * row + 24]).collect::<Vec<_>>(), [1.0, 2.0, 3.0, 4.0, 5.0]);
}

#[test]
fn a_third_draw_lets_every_three_channels_change_places() {
    // Six rows of two cameras with one pixel a channel: every order is drawn, and cameras do not mix.
    let changed = run::<u8>(|g| {
        let x = g.constant(&[0u8, 1, 2, 3, 4, 5].repeat(6), [6, 1, 6, 1, 1])?;
        let draws: Vec<f64> = (0..6).flat_map(|row| [0.5, 0.5, (row as f64 + 0.5) / 6.0]).collect();
        let draws = g.constant(&draws, [6, 3])?;
        g.shift_images(x, draws, 0)
    });
    let orders: Vec<&[u8]> = changed.chunks(6).collect();
    assert_eq!(orders[0], [0, 1, 2, 3, 4, 5]);
    let mut first: Vec<&[u8]> = orders.iter().map(|order| &order[..3]).collect();
    first.sort();
    assert_eq!(first, [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]]);
    for order in orders {
        assert!((0..3).all(|c| order[3 + c] == order[c] + 3), "{order:?}");
    }
    // Pictures move as well, and four channels have no threes.
    let both = run::<f64>(|g| {
        let x = g.constant(&(0..27).map(f64::from).collect::<Vec<_>>(), [1, 3, 3, 3])?;
        let draws = g.constant(&[0.5, 0.9, 0.2], [1, 3])?;
        g.shift_images(x, draws, 1)
    });
    assert_eq!(both[..3], [10.0, 11.0, 11.0]);
    assert_eq!(both[18..21], [1.0, 2.0, 2.0]);
    let mut g = Graph::new();
    let x = g.input("x", DType::U8, [1, 4, 3, 3]).unwrap();
    let draws = g.input("draws", DType::F32, [1, 3]).unwrap();
    let error = g.shift_images(x, draws, 1).unwrap_err().to_string();
    assert!(error.contains("threes of channels"), "{error}");
}

#[test]
fn whole_numbers_are_drawn_evenly() {
    let mut g = Graph::new();
    let rng = g.rng("rng").unwrap();
    let y = g.random_below(7, [20_000], rng).unwrap();
    g.output("y", y).unwrap();
    let store = Store::new();
    store.declare(&g).unwrap();
    store.set("rng", &[9i64, 4]).unwrap();
    let mut program = Program::new(&g, &Pool::new(2), &[&store]).unwrap();
    program.run().unwrap();
    let first = program.get::<i32>("y").unwrap().to_vec();
    let stream = Stream::new(9, 4, 0);
    for (i, y) in first.iter().enumerate() {
        assert_eq!(*y, (7.0 * unit(stream.draw(i as u64))) as i32);
    }
    for number in 0..7 {
        let count = first.iter().filter(|y| **y == number).count();
        assert!(count.abs_diff(20_000 / 7) < 200, "{number} was drawn {count} times");
    }
    program.run().unwrap();
    assert_ne!(program.get::<i32>("y").unwrap(), first);
}

#[test]
fn experts_match_a_dense_computation() {
    let (tokens, experts, d, f, k) = (9, 5, 6, 4, 2);
    let (x, logits) = (normal(tokens * d, 0), normal(tokens * experts, 1));
    let (up, down) = (normal(experts * 2 * f * d, 2), normal(experts * d * f, 3));
    let got = run::<f64>(|g| {
        let x = g.constant(&x, [tokens, d])?;
        let logits = g.constant(&logits, [tokens, experts])?;
        let (gates, chosen) = g.route_top_k(logits, k)?;
        let up = g.constant(&up, [experts, 2 * f, d])?;
        let down = g.constant(&down, [experts, d, f])?;
        g.expert_mixture(x, gates, chosen, up, down, None)
    });
    let mut want = vec![0.0; tokens * d];
    for n in 0..tokens {
        let row = &logits[n * experts..][..experts];
        let mut order: Vec<usize> = (0..experts).collect();
        order.sort_by(|a, b| row[*b].total_cmp(&row[*a]));
        let total: f64 = order[..k].iter().map(|e| row[*e].exp()).sum();
        for &e in &order[..k] {
            let linear =
                |i: usize| -> f64 { (0..d).map(|c| up[(e * 2 * f + i) * d + c] * x[n * d + c]).sum() };
            let hidden: Vec<f64> =
                (0..f).map(|i| linear(i) / (1.0 + (-linear(i)).exp()) * linear(f + i)).collect();
            for c in 0..d {
                let y: f64 = (0..f).map(|i| down[(e * d + c) * f + i] * hidden[i]).sum();
                want[n * d + c] += row[e].exp() / total * y;
            }
        }
    }
    close(&got, &want, 1e-12);
}

#[test]
fn load_balancing_is_one_when_even_and_counts_gates() {
    let loss = |experts: [i32; 4], gates: [f64; 4]| {
        run::<f64>(|g| {
            let gates = g.constant(&gates, [4, 1])?;
            let experts = g.constant(&experts, [4, 1])?;
            g.load_balancing_loss(gates, experts, 2)
        })[0]
    };
    assert_eq!(loss([0, 1, 0, 1], [1.0; 4]), 1.0);
    assert_eq!(loss([0, 0, 0, 0], [1.0; 4]), 2.0);
    assert_eq!(loss([0, 0, 0, 1], [0.5, 0.5, 1.0, 1.0]), 2.0 * (0.75 * 0.5 + 0.25 * 0.25));
}

#[test]
fn cross_entropy_of_known_rows() {
    let loss = |targets: &[i64], label_smoothing: f64| {
        run::<f64>(|g| {
            let logits = g.constant(&[0.0, 3f64.ln(), 0.0, 0.0], [2, 2])?;
            let targets = g.constant(targets, [2])?;
            g.cross_entropy(logits, targets, CrossEntropy { label_smoothing, ignored: -10 })
        })[0]
    };
    let (a, b) = ((4.0f64 / 3.0).ln(), 2f64.ln());
    close(&[loss(&[1, 0], 0.0)], &[(a + b) / 2.0], 1e-15);
    close(&[loss(&[1, -10], 0.0)], &[a], 1e-15);
    close(&[loss(&[0, -10], 0.2)], &[0.8 * 4f64.ln() + 0.1 * (4f64.ln() + a)], 1e-15);
    assert_eq!(loss(&[-10, -10], 0.2), 0.0);
}

#[test]
fn weighted_cross_entropy_is_the_weighted_sum_of_known_rows() {
    let loss = |targets: &[i64], weights: &[f64], first: f64| {
        run::<f64>(|g| {
            let logits = g.constant(&[first, 3f64.ln(), 0.0, 0.0], [2, 2])?;
            let (targets, weights) = (g.constant(targets, [2])?, g.constant(weights, [2])?);
            let settings = CrossEntropy { label_smoothing: 0.0, ignored: -10 };
            g.weighted_cross_entropy(logits, targets, weights, settings)
        })[0]
    };
    let (a, b) = ((4.0f64 / 3.0).ln(), 2f64.ln());
    close(&[loss(&[1, 0], &[5.0, 0.25], 0.0)], &[5.0 * a + 0.25 * b], 1e-15);
    close(&[loss(&[1, -10], &[0.5, 7.0], 0.0)], &[0.5 * a], 1e-15);
    // A row that does not count may be impossible.
    close(&[loss(&[0, 1], &[0.0, 2.0], f64::NEG_INFINITY)], &[2.0 * b], 1e-15);
}

#[test]
fn lru_prefers_empty_then_oldest_then_lowest() {
    let slots = run::<i32>(|g| {
        let anchors = g.constant(&[5i64, -1, 3, -7, 4, 4, 4, 4, 9, 8, 7, -1], [3, 4])?;
        Ok(g.lru_select(anchors, 3)?.0)
    });
    assert_eq!(slots, [1, 3, 2, 0, 1, 2, 3, 2, 1]);

    let blended = |empty_slots_too| {
        run::<f64>(|g| {
            let memory = g.constant(&[1.0, 2.0, 3.0], [1, 3, 1])?;
            let anchors = g.constant(&[4i64, -1, 6], [1, 3])?;
            let (slots, _) = g.lru_select(anchors, 2)?;
            let candidates = g.constant(&[10.0, 20.0], [1, 2, 1])?;
            let time = g.constant(&[9i64], [1])?;
            let blend = Blend { lambda: 0.25, empty_slots_too, active: None };
            let (memory, anchors) = g.lru_blend(memory, anchors, slots, candidates, time, blend)?;
            let anchors = g.cast(anchors, F64)?;
            let anchors = g.reshape(anchors, [1, 3, 1])?;
            g.concat(&[memory, anchors], 0)
        })
    };
    assert_eq!(blended(false), [0.25 * 20.0 + 0.75, 10.0, 3.0, 9.0, 9.0, 6.0]);
    assert_eq!(blended(true), [5.75, 0.25 * 10.0 + 1.5, 3.0, 9.0, 9.0, 6.0]);
}

/// An LSTM's inputs for a window [batch, steps, width]: x, weight, bias, hidden, cell.
fn lstm_inputs([batch, steps, width]: [usize; 3]) -> [(&'static str, Vec<usize>, Vec<f64>); 5] {
    let shapes = [
        ("x", vec![batch, steps, 4 * width]),
        ("weight", vec![4 * width, width]),
        ("bias", vec![4 * width]),
        ("hidden", vec![batch, width]),
        ("cell", vec![batch, width]),
    ];
    let mut stream = 0;
    shapes.map(|(name, shape)| {
        stream += 1;
        let scale = if name == "weight" { 1.0 / (width as f64).sqrt() } else { 1.0 };
        let data = normal(shape.iter().product(), stream).into_iter().map(|x| scale * x).collect();
        (name, shape, data)
    })
}

/// Hidden states, last hidden state, last cell state of an LSTM, then the gradients of its five inputs.
fn lstm<T: Element>(window: [usize; 3], threads: usize, of: impl Fn(f64) -> T) -> Vec<Vec<T>> {
    let (mut g, store) = (Graph::new(), Store::new());
    let inputs = lstm_inputs(window);
    let [x, weight, bias, hidden, cell] =
        [0, 1, 2, 3, 4].map(|i| g.param(inputs[i].0, T::DTYPE, inputs[i].1.clone()).unwrap());
    let lstm = g.lstm(x, weight, bias, hidden, cell).unwrap();
    let squares = g.mul(lstm.hidden, lstm.hidden).unwrap();
    let last = g.mul(lstm.last_hidden, lstm.last_cell).unwrap();
    let (squares, last) = (g.sum(squares).unwrap(), g.sum(last).unwrap());
    let loss = g.add(squares, last).unwrap();
    let grads = g.gradients(loss, &[x, weight, bias, hidden, cell]).unwrap();
    let results =
        [lstm.hidden, lstm.last_hidden, lstm.last_cell].into_iter().chain(grads.into_iter().flatten());
    let results: Vec<Value> = results.collect();
    for (i, result) in results.iter().enumerate() {
        g.output(&i.to_string(), *result).unwrap();
    }
    store.declare(&g).unwrap();
    for (name, _, data) in inputs {
        store.set(name, &data.into_iter().map(&of).collect::<Vec<_>>()).unwrap();
    }
    let mut program = Program::new(&g, &Pool::new(threads), &[&store]).unwrap();
    program.run().unwrap();
    program.run().unwrap();
    (0..results.len()).map(|i| program.get::<T>(&i.to_string()).unwrap().to_vec()).collect()
}

/// Few rows, whose products read the weight as it lies, and more, for which it is packed.
const LSTM_WINDOWS: [[usize; 3]; 5] = [[1, 1, 3], [3, 5, 9], [9, 5, 7], [33, 5, 65], [64, 5, 40]];

#[test]
fn lstm_matches_its_formula() {
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    for window in LSTM_WINDOWS {
        let [batch, steps, width] = window;
        let [x, weight, bias, hidden, cell] = lstm_inputs(window).map(|(_, _, data)| data);
        let (mut h, mut c, mut all) = (hidden, cell, vec![0.0; batch * steps * width]);
        for t in 0..steps {
            for b in 0..batch {
                let gate = |n: usize| {
                    let product: f64 = (0..width).map(|k| weight[n * width + k] * h[b * width + k]).sum();
                    x[(b * steps + t) * 4 * width + n] + product + bias[n]
                };
                let z: Vec<f64> = (0..4 * width).map(gate).collect();
                for j in 0..width {
                    let [i, f, g, o] = [0, 1, 2, 3].map(|quarter| z[quarter * width + j]);
                    let at = b * width + j;
                    c[at] = sigmoid(f) * c[at] + sigmoid(i) * g.tanh();
                    h[at] = sigmoid(o) * c[at].tanh();
                    all[(b * steps + t) * width + j] = h[at];
                }
            }
        }
        let got = lstm::<f64>(window, 2, |x| x);
        for (got, want) in got.iter().zip([&all, &h, &c]) {
            close(got, want, 1e-13);
        }
        // In f32 values and gradients are those of f64, whose gradients `gradients.rs` checks.
        for (got, want) in lstm::<f32>(window, 2, |x| x as f32).iter().zip(&got) {
            let got: Vec<f64> = got.iter().map(|x| f64::from(*x)).collect();
            close(&got, want, 3e-5);
        }
    }
}

#[test]
fn lstm_has_the_same_bits_on_any_number_of_threads() {
    for window in LSTM_WINDOWS.into_iter().chain([[5, 3, 128], [70, 3, 33], [100, 2, 32], [64, 2, 128]]) {
        let bits = |threads| {
            let results = lstm::<f32>(window, threads, |x| x as f32);
            results.into_iter().flatten().map(f32::to_bits).collect::<Vec<_>>()
        };
        let one = bits(1);
        assert!([2, 5].into_iter().all(|threads| bits(threads) == one), "{window:?}");
    }
}

/// Gates may take the place of an x that is computed, and not of one that is stored.
#[test]
fn lstm_of_a_computed_x_is_that_of_a_stored_one() {
    for window in LSTM_WINDOWS {
        let run = |computed: bool| {
            let (mut g, store) = (Graph::new(), Store::new());
            let inputs = lstm_inputs(window);
            let [x, weight, bias, hidden, cell] =
                [0, 1, 2, 3, 4].map(|i| g.param(inputs[i].0, F32, inputs[i].1.clone()).unwrap());
            let half = g.scale(x, 0.5).unwrap();
            let gates = if computed { g.add(half, half).unwrap() } else { x };
            let lstm = g.lstm(gates, weight, bias, hidden, cell).unwrap();
            let squares = g.mul(lstm.hidden, lstm.hidden).unwrap();
            let loss = g.sum(squares).unwrap();
            let grads = g.gradients(loss, &[x, weight, bias, hidden, cell]).unwrap();
            g.output("hidden", lstm.hidden).unwrap();
            for (i, grad) in grads.iter().enumerate() {
                g.output(&i.to_string(), grad.unwrap()).unwrap();
            }
            store.declare(&g).unwrap();
            for (name, _, data) in inputs {
                store.set(name, &data.into_iter().map(|x| x as f32).collect::<Vec<_>>()).unwrap();
            }
            let mut program = Program::new(&g, &Pool::new(2), &[&store]).unwrap();
            program.run().unwrap();
            program.run().unwrap();
            ["hidden", "0", "1", "2", "3", "4"].map(|name| program.get::<f32>(name).unwrap().to_vec())
        };
        assert_eq!(run(true), run(false), "{window:?}");
    }
}

/// Products with dz, of enough rows for a matrix unit.
#[test]
fn lstm_input_gradients_are_products_with_those_of_the_gates() {
    let (batch, steps, width, n) = (70, 3, 32, 40);
    let floats = |len, stream| normal(len, stream).into_iter().map(|x| 0.3 * x as f32).collect::<Vec<_>>();
    let (x, w) = (floats(batch * steps * n, 0), floats(4 * width * n, 1));
    let run = |threads: usize| {
        let mut g = Graph::new();
        let inputs = g.input("x", F32, [batch, steps, n]).unwrap();
        let weight = g.param("w", F32, [4 * width, n]).unwrap();
        let recurrent = g.constant(&floats(4 * width * width, 2), [4 * width, width]).unwrap();
        let bias = g.constant(&floats(4 * width, 3), [4 * width]).unwrap();
        let first = g.constant(&floats(batch * width, 4), [batch, width]).unwrap();
        let z = g.linear(inputs, weight, None, Activation::Identity).unwrap();
        let hidden = g.lstm(z, recurrent, bias, first, first).unwrap().hidden;
        let squares = g.mul(hidden, hidden).unwrap();
        let loss = g.sum(squares).unwrap();
        for (name, grad) in ["dz", "dx", "dw"].iter().zip(g.gradients(loss, &[z, inputs, weight]).unwrap()) {
            g.output(name, grad.unwrap()).unwrap();
        }
        let store = Store::new();
        store.declare(&g).unwrap();
        store.set("w", &w).unwrap();
        let mut program = Program::new(&g, &Pool::new(threads), &[&store]).unwrap();
        program.set("x", &x).unwrap();
        program.run().unwrap();
        ["dz", "dx", "dw"].map(|name| program.get::<f32>(name).unwrap().to_vec())
    };
    let got = run(1);
    assert_eq!(run(3), got);
    let f64s = |x: &[f32]| x.iter().map(|x| f64::from(*x)).collect::<Vec<_>>();
    let (x, w, [dz, dx, dw]) = (f64s(&x), f64s(&w), got.map(|grad| f64s(&grad)));
    let rows = batch * steps;
    let sum = |count: usize, term: &dyn Fn(usize) -> f64| (0..count).map(term).sum::<f64>();
    let want: Vec<f64> =
        (0..rows * n).map(|at| sum(4 * width, &|i| dz[at / n * 4 * width + i] * w[i * n + at % n])).collect();
    close(&dx, &want, 1e-5);
    let want: Vec<f64> = (0..4 * width * n)
        .map(|at| sum(rows, &|row| dz[row * 4 * width + at / n] * x[row * n + at % n]))
        .collect();
    close(&dw, &want, 1e-4);
}

/// Acting: the states live in a store, one step at a time.
#[test]
fn lstm_steps_like_the_whole_window() {
    for window in LSTM_WINDOWS {
        let [batch, steps, width] = window;
        let whole = lstm::<f32>(window, 2, |x| x as f32);
        let (mut g, store) = (Graph::new(), Store::new());
        let [x, weight, bias, hidden, cell] =
            lstm_inputs(window).map(|(_, _, data)| data.into_iter().map(|x| x as f32).collect::<Vec<_>>());
        let row = g.input("x", F32, [batch, 1, 4 * width]).unwrap();
        let w = g.param("weight", F32, [4 * width, width]).unwrap();
        let b = g.param("bias", F32, [4 * width]).unwrap();
        let h = g.state("hidden", F32, [batch, width]).unwrap();
        let c = g.state("cell", F32, [batch, width]).unwrap();
        let next = g.lstm(row, w, b, h, c).unwrap();
        g.update(h, next.last_hidden).unwrap();
        g.update(c, next.last_cell).unwrap();
        g.output("hidden", next.hidden).unwrap();
        store.declare(&g).unwrap();
        for (name, data) in [("weight", weight), ("bias", bias), ("hidden", hidden), ("cell", cell)] {
            store.set(name, &data).unwrap();
        }
        let mut program = Program::new(&g, &Pool::new(2), &[&store]).unwrap();
        for t in 0..steps {
            let at = |b: usize, columns: usize| (b * steps + t) * columns..(b * steps + t + 1) * columns;
            let rows: Vec<f32> = (0..batch).flat_map(|b| x[at(b, 4 * width)].to_vec()).collect();
            program.set("x", &rows).unwrap();
            program.run().unwrap();
            let want: Vec<f32> = (0..batch).flat_map(|b| whole[0][at(b, width)].to_vec()).collect();
            assert_eq!(program.get::<f32>("hidden").unwrap(), want, "{window:?}, step {t}");
        }
        assert_eq!(store.get::<f32>("hidden").unwrap(), whole[1]);
        assert_eq!(store.get::<f32>("cell").unwrap(), whole[2]);
    }
}

#[test]
fn softplus_is_accurate_far_from_zero() {
    let x = [-80.0f32, -30.0, -1.0, -1e-3, 0.0, 2.0, 30.0, 80.0];
    let got: Vec<f32> = run(|g| {
        let x = g.constant(&x, [8])?;
        g.softplus(x)
    });
    for (x, got) in x.into_iter().zip(got) {
        let want = f64::from(x).max(0.0) + (-f64::from(x).abs()).exp().ln_1p();
        assert!((f64::from(got) - want).abs() <= 3e-7 * want, "softplus({x}) = {got}, want {want}");
    }
}

#[test]
fn relative_bias_clamps_differences_of_times() {
    let bias = run::<f64>(|g| {
        let table = g.constant(&[-20.0, -21.0, -10.0, -11.0, 0.0, 1.0, 10.0, 11.0, 20.0, 21.0], [5, 2])?;
        let q = g.constant(&[100i64, 101], [1, 2])?;
        let k = g.constant(&[-1i64, 100, i64::MAX], [1, 3])?;
        g.relative_bias(table, q, k)
    });
    assert_eq!(bias, [20.0, 0.0, -20.0, 20.0, 10.0, -20.0, 21.0, 1.0, -21.0, 21.0, 11.0, -21.0]);
}

#[test]
fn dropout_follows_the_documented_draws_and_advances() {
    let mut g = Graph::new();
    let rng = g.rng("rng").unwrap();
    let x = g.constant(&vec![1.0f32; 1000], [1000]).unwrap();
    let first = g.dropout(x, 0.25, rng).unwrap();
    let second = g.dropout(x, 0.25, rng).unwrap();
    g.output("first", first).unwrap();
    g.output("second", second).unwrap();
    let store = Store::new();
    store.declare(&g).unwrap();
    store.set("rng", &[123i64, 6]).unwrap();
    let mut program = Program::new(&g, &Pool::new(2), &[&store]).unwrap();
    for step in 6..9 {
        program.run().unwrap();
        for (stream, name) in ["first", "second"].into_iter().enumerate() {
            let draws = Stream::new(123, step, stream as u32);
            let kept = |i: usize| unit(draws.draw(i as u64)) >= 0.25;
            let want: Vec<f32> = (0..1000).map(|i| if kept(i) { 1.0 / 0.75 } else { 0.0 }).collect();
            assert_eq!(program.get::<f32>(name).unwrap(), want);
        }
    }
    assert_eq!(store.get::<i64>("rng").unwrap(), [123, 9]);
}

#[test]
fn random_normal_has_its_moments() {
    let x = run::<f64>(|g| {
        let rng = g.rng("rng")?;
        g.random_normal(F64, [101, 203], 0.5, rng)
    });
    let mean = x.iter().sum::<f64>() / x.len() as f64;
    let variance = x.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / x.len() as f64;
    assert!(mean.abs() < 0.015 && (variance - 0.25).abs() < 0.01, "{mean} {variance}");
}

/// Two steps of PyTorch's AdamW (lr 0.1, betas 0.9 / 0.99, eps 1e-8, decay 0.05) with clipping to norm 1,
/// worked out by hand from the published update rule.
#[test]
fn adamw_follows_the_update_rule() {
    let mut g = Graph::new();
    let p = g.param("p", F64, [2]).unwrap();
    let lr = g.scalar(F64, 0.1).unwrap();
    let half = g.mul(p, p).unwrap();
    let half = g.sum(half).unwrap();
    let loss = g.scale(half, 2.0).unwrap(); // gradient 4 p
    let grad = g.gradients(loss, &[p]).unwrap()[0].unwrap();
    let norm = g.global_norm(&[grad]).unwrap();
    let settings = AdamW { betas: (0.9, 0.99), eps: 1e-8, weight_decay: 0.05, lr_scale: 1.0 };
    g.adamw(settings, lr, Some((norm, 1.0)), &[(p, grad)]).unwrap();
    let store = Store::new();
    store.declare(&g).unwrap();
    store.set("p", &[3.0, -4.0]).unwrap();
    let mut program = Program::new(&g, &Pool::new(1), &[&store]).unwrap();
    let (mut p, mut m, mut v) = ([3.0f64, -4.0], [0.0; 2], [0.0; 2]);
    for t in 1..=2 {
        program.run().unwrap();
        let norm = (16.0 * (p[0] * p[0] + p[1] * p[1])).sqrt();
        let clip = (1.0 / (norm + 1e-6)).min(1.0);
        for i in 0..2 {
            let g = 4.0 * p[i] * clip;
            m[i] = 0.9 * m[i] + 0.1 * g;
            v[i] = 0.99 * v[i] + 0.01 * g * g;
            let (c1, c2) = (1.0 - 0.9f64.powi(t), 1.0 - 0.99f64.powi(t));
            p[i] = p[i] * (1.0 - 0.1 * 0.05) - 0.1 / c1 * m[i] / ((v[i] / c2).sqrt() + 1e-8);
        }
        close(&store.get::<f64>("p").unwrap(), &p, 1e-14);
    }
}

#[test]
fn layouts_move_elements_of_every_type() {
    let parts = run::<bool>(|g| {
        let x = g.constant(&[true, false, false, true, true, true], [2, 3])?;
        let x = g.transpose(x, &[1, 0])?;
        let top = g.slice(x, 0, 0..2)?;
        g.concat(&[top, x], 0)
    });
    assert_eq!(parts, [true, true, false, true, true, true, false, true, false, true]);
    let tail = run::<i64>(|g| {
        let x = g.constant(&[1i64, 2, 3, 4, 5, 6], [2, 3])?;
        g.slice(x, 1, 1..3)
    });
    assert_eq!(tail, [2, 3, 5, 6]);
    let bytes = run::<u8>(|g| {
        let x = g.constant(&[1u8, 2, 3, 253, 254, 255], [2, 3])?;
        let zeros = g.zeros_like(x)?;
        let rows = g.constant(&[false, true], [2])?;
        let x = g.select(rows, x, zeros)?;
        let flat = g.reshape(x, [3, 2])?;
        let sevens = g.full(DType::U8, [1, 2], 7.0)?;
        g.concat(&[flat, sevens], 0)
    });
    assert_eq!(bytes, [0, 0, 0, 253, 254, 255, 7, 7]);
}

#[test]
fn bytes_are_cast_to_and_from_every_type() {
    let all: Vec<u8> = (0..=255).collect();
    fn from_bytes<T: Element>(all: &[u8], want: impl Fn(u8) -> T) {
        let got = run::<T>(|g| {
            let x = g.constant(all, [256])?;
            g.cast(x, T::DTYPE)
        });
        assert_eq!(got, all.iter().map(|x| want(*x)).collect::<Vec<_>>());
    }
    from_bytes(&all, f32::from);
    from_bytes(&all, f64::from);
    from_bytes(&all, i32::from);
    from_bytes(&all, i64::from);
    from_bytes(&all, |x| x != 0);
    let to_bytes = |build: fn(&mut Graph) -> Result<Value>| {
        run::<u8>(|g| {
            let x = build(g)?;
            g.cast(x, DType::U8)
        })
    };
    assert_eq!(to_bytes(|g| g.constant(&[-1.5f32, 0.9, 254.9, 300.0, f32::NAN], [5])), [0, 0, 254, 255, 0]);
    assert_eq!(to_bytes(|g| g.constant(&[-1i64, 7, 256, i64::MAX], [4])), [0, 7, 255, 255]);
    assert_eq!(to_bytes(|g| g.constant(&[true, false], [2])), [1, 0]);
}

/// Pixels as a program's input and as a state, from bytes to numbers between 0 and 1.
#[test]
fn pixels_become_numbers() {
    let mut g = Graph::new();
    let pixels = g.input("pixels", DType::U8, [2, 3]).unwrap();
    let before = g.state("before", DType::U8, [2, 3]).unwrap();
    let both = g.concat(&[before, pixels], 1).unwrap();
    let numbers = g.cast(both, F32).unwrap();
    let numbers = g.scale(numbers, 1.0 / 255.0).unwrap();
    g.update(before, pixels).unwrap();
    g.output("numbers", numbers).unwrap();
    g.output("bytes", both).unwrap();
    let store = Store::new();
    store.declare(&g).unwrap();
    store.set("before", &[255u8; 6]).unwrap();
    let mut program = Program::new(&g, &Pool::new(1), &[&store]).unwrap();
    program.set("pixels", &[0u8, 51, 102, 153, 204, 255]).unwrap();
    program.run().unwrap();
    assert_eq!(
        program.get::<u8>("bytes").unwrap(),
        [255, 255, 255, 0, 51, 102, 255, 255, 255, 153, 204, 255]
    );
    let numbers: Vec<f64> = program.get::<f32>("numbers").unwrap().iter().map(|x| f64::from(*x)).collect();
    close(&numbers, &[1.0, 1.0, 1.0, 0.0, 0.2, 0.4, 1.0, 1.0, 1.0, 0.6, 0.8, 1.0], 1e-7);
    assert_eq!(store.get::<u8>("before").unwrap(), [0, 51, 102, 153, 204, 255]);
    assert!(program.set("pixels", &[0i32; 6]).unwrap_err().to_string().contains("holds u8, got i32"));
    let refused = g.add(pixels, before).unwrap_err().to_string();
    assert_eq!(refused, "add: expected operands of one numeric type, got u8[2, 3] and u8[2, 3]");
}

#[test]
fn rows_of_every_type_are_gathered_and_scattered() {
    fn check<T: Element>(table: &[T], values: &[T], rest: &[usize]) {
        let width: usize = rest.iter().product();
        let (rows, index) = (table.len() / width, [4i64, 0, 2, 0, 4]);
        // Repeated rows carry equal values, as they must.
        let values: Vec<T> =
            index.iter().flat_map(|r| &values[*r as usize * width..][..width]).copied().collect();
        let shape = |n: usize| [&[n], rest].concat();
        let scattered = run::<T>(|g| {
            let table = g.constant(table, shape(rows))?;
            let index = g.constant(&index, [5])?;
            let values = g.constant(&values, shape(5))?;
            g.scatter_rows(table, index, values)
        });
        let mut want = table.to_vec();
        for (i, row) in index.iter().enumerate() {
            want[*row as usize * width..][..width].copy_from_slice(&values[i * width..][..width]);
        }
        assert_eq!(scattered, want);
        let gathered = run::<T>(|g| {
            let table = g.constant(&want, shape(rows))?;
            let index = g.constant(&index.map(|row| row as i32), [5])?;
            g.gather_rows(table, index)
        });
        assert_eq!(gathered, values);
    }
    let (old, new) = (normal(7 * 6, 0), normal(7 * 6, 1));
    check(&old, &new, &[3, 2]);
    check(
        &old.iter().map(|x| *x as f32).collect::<Vec<_>>(),
        &new.iter().map(|x| *x as f32).collect::<Vec<_>>(),
        &[6],
    );
    let bits = |data: &[f64]| data.iter().map(|x| *x > 0.0).collect::<Vec<_>>();
    check(&bits(&old), &bits(&new), &[1, 6]);
    check(&(0..7i64).collect::<Vec<_>>(), &(10..17i64).collect::<Vec<_>>(), &[]);
    check(&(0..35).collect::<Vec<u8>>(), &(200..235).collect::<Vec<u8>>(), &[5]);
    // Enough for several tasks.
    let (old, new) = (normal(500 * 300, 2), normal(500 * 300, 3));
    check(&old, &new, &[300]);
}

/// A state's rows are read, changed and written back; every reader sees the state from before the run.
#[test]
fn a_states_rows_are_updated_in_place_after_they_are_read() {
    let (rows, width) = (1000, 8);
    for read_again in [false, true] {
        let mut g = Graph::new();
        let bank = g.state("bank", F64, [rows, width]).unwrap();
        let index = g.input("index", DType::I32, [3]).unwrap();
        let old = g.gather_rows(bank, index).unwrap();
        let new = g.affine(old, 2.0, 1.0).unwrap();
        let updated = g.scatter_rows(bank, index, new).unwrap();
        g.update(bank, updated).unwrap();
        g.output("old", old).unwrap();
        if read_again {
            let again = g.gather_rows(bank, index).unwrap();
            g.output("again", again).unwrap();
        }
        let store = Store::new();
        store.declare(&g).unwrap();
        let mut want = normal(rows * width, 0);
        store.set("bank", &want).unwrap();
        let mut program = Program::new(&g, &Pool::new(2), &[&store]).unwrap();
        if !read_again {
            assert!(program.arena_bytes() < 1024, "{} bytes", program.arena_bytes());
        }
        for index in [[7, 999, 0], [5, 5, 7]] {
            program.set("index", &index).unwrap();
            program.run().unwrap();
            let read: Vec<f64> =
                index.iter().flat_map(|r| want[*r as usize * width..][..width].to_vec()).collect();
            assert_eq!(program.get::<f64>("old").unwrap(), read);
            if read_again {
                assert_eq!(program.get::<f64>("again").unwrap(), read);
            }
            for (i, row) in index.iter().enumerate() {
                (0..width).for_each(|c| want[*row as usize * width + c] = 2.0 * read[i * width + c] + 1.0);
            }
            assert_eq!(store.get::<f64>("bank").unwrap(), want);
        }
        program.set("index", &[0, 1000, 1]).unwrap();
        assert!(program.run().unwrap_err().to_string().ends_with("row 1000 is outside 0..1000"));
        assert_eq!(store.get::<f64>("bank").unwrap(), want);
    }
}

#[test]
fn a_minimum_keeps_what_is_no_number_and_sends_gradients_to_the_smaller() {
    let nan = f64::NAN;
    let smaller = run::<f64>(|g| {
        let a = g.constant(&[1.0, 2.0, nan, 4.0, nan], [5])?;
        let b = g.constant(&[2.0, 1.0, 0.0, nan, nan], [5])?;
        g.minimum(a, b)
    });
    assert_eq!(smaller[..2], [1.0, 1.0]);
    assert!(smaller[2..].iter().all(|x| x.is_nan()), "{smaller:?}");

    let mut g = Graph::new();
    let a = g.param("a", F32, [2, 3]).unwrap();
    let b = g.param("b", F32, [3]).unwrap();
    let y = g.minimum(a, b).unwrap();
    let loss = g.sum(y).unwrap();
    let grads = g.gradients(loss, &[a, b]).unwrap();
    g.output("da", grads[0].unwrap()).unwrap();
    g.output("db", grads[1].unwrap()).unwrap();
    let store = Store::new();
    store.declare(&g).unwrap();
    store.set("a", &[1.0f32, 5.0, 3.0, 0.0, -1.0, 4.0]).unwrap();
    store.set("b", &[0.5f32, 2.0, 3.0]).unwrap();
    let mut program = Program::new(&g, &Pool::new(1), &[&store]).unwrap();
    program.run().unwrap();
    assert_eq!(program.get::<f32>("da").unwrap(), [0.0, 0.0, 1.0, 1.0, 1.0, 0.0]);
    assert_eq!(program.get::<f32>("db").unwrap(), [1.0, 1.0, 1.0]);
}

#[test]
fn division_broadcasts() {
    let ratios = run::<f32>(|g| {
        let a = g.constant(&[1.0f32, 2.0, 3.0, -8.0], [2, 2])?;
        let b = g.constant(&[4.0f32, -2.0], [2, 1])?;
        g.div(a, b)
    });
    assert_eq!(ratios, [0.25, 0.5, -1.5, 4.0]);
}

/// Sums of equal numbers, numbers beyond the range of e^x, rows of -inf, inf and NaN.
#[test]
fn logsumexp_of_known_rows() {
    let (inf, nan) = (f64::INFINITY, f64::NAN);
    let y = run::<f64>(|g| {
        let rows = [
            [0.0, 0.0, 0.0],
            [1000.0, 1000.0, -1000.0],
            [-1000.0, -1001.0, -inf],
            [-inf, -inf, -inf],
            [0.0, inf, 0.0],
            [-inf, nan, -inf],
        ];
        let x = g.constant(rows.as_flattened(), [6, 3])?;
        g.logsumexp(x)
    });
    let want = [3f64.ln(), 1000.0 + 2f64.ln(), -1000.0 + (-1f64).exp().ln_1p(), -inf, inf];
    close(&y[..3], &want[..3], 1e-14);
    assert_eq!(y[3..5], want[3..]);
    assert!(y[5].is_nan());
}

#[test]
fn argmax_takes_the_first_of_equals() {
    let best = run::<i32>(|g| {
        let x = g.constant(&[1.0f32, 3.0, 3.0, -1.0, -1.0, -2.0], [2, 3])?;
        g.argmax(x)
    });
    assert_eq!(best, [1, 0]);
}

/// Softmax, attention, norms and losses at ±1e4, in both precisions: finite, and right where the answer is
/// known.
#[test]
fn extreme_inputs_give_defined_results() {
    let extremes = [1e4, -1e4, 0.0, 1e4, -1e4, -1e4, 1e-30, 1e4];
    let soft = run::<f32>(|g| {
        let x = g.constant(&extremes.map(|x| x as f32), [2, 4])?;
        g.softmax(x)
    });
    assert_eq!(soft, [0.5, 0.0, 0.0, 0.5, 0.0, 0.0, 0.0, 1.0]);

    let infinite = run::<f64>(|g| {
        let x = g.constant(&[f64::NEG_INFINITY, f64::NEG_INFINITY, 0.0, f64::NEG_INFINITY], [2, 2])?;
        g.softmax(x)
    });
    assert_eq!(infinite, [0.0, 0.0, 1.0, 0.0]);

    let normed = run::<f32>(|g| {
        let x = g.constant(&[1e4f32, -1e4, 1e4, -1e4, 7.0, 7.0, 7.0, 7.0], [2, 4])?;
        let gamma = g.constant(&[1.0f32; 4], [4])?;
        let beta = g.constant(&[0.0f32; 4], [4])?;
        g.norm(x, Norm { kind: NormKind::Layer { beta }, gamma, eps: 1e-8 })
    });
    assert_eq!(normed, [1.0, -1.0, 1.0, -1.0, 0.0, 0.0, 0.0, 0.0]);

    let mut g = Graph::new();
    let logits = g.param("logits", F32, [2, 4]).unwrap();
    let targets = g.constant(&[1i32, 3], [2]).unwrap();
    let settings = CrossEntropy { label_smoothing: 0.1, ignored: -10 };
    let loss = g.cross_entropy(logits, targets, settings).unwrap();
    let grad = g.gradients(loss, &[logits]).unwrap()[0].unwrap();
    g.output("loss", loss).unwrap();
    g.output("grad", grad).unwrap();
    let store = Store::new();
    store.declare(&g).unwrap();
    store.set("logits", &extremes.map(|x| x as f32)).unwrap();
    let mut program = Program::new(&g, &Pool::new(1), &[&store]).unwrap();
    program.run().unwrap();
    let loss = program.get::<f32>("loss").unwrap()[0];
    let row = |x: &[f64], target: usize| {
        let top = x.iter().copied().fold(f64::MIN, f64::max);
        let lse = top + x.iter().map(|v| (v - top).exp()).sum::<f64>().ln();
        0.9 * (lse - x[target]) + 0.1 * (lse - x.iter().sum::<f64>() / 4.0)
    };
    let want = (row(&extremes[..4], 1) + row(&extremes[4..], 3)) / 2.0;
    assert!((f64::from(loss) - want).abs() < 1e-2, "{loss} {want}");
    assert!(program.get::<f32>("grad").unwrap().iter().all(|g| g.is_finite()));
}

#[test]
fn a_query_that_sees_nothing_gets_zeros_and_no_gradient() {
    let mut g = Graph::new();
    let q = g.param("q", F32, [1, 2, 4]).unwrap();
    let k = g.param("k", F32, [1, 3, 4]).unwrap();
    let mask = g.constant(&[false, false, false, true, false, true], [1, 2, 3]).unwrap();
    let options = Attention { heads: 2, mask: AttentionMask::Custom(mask), ..Attention::default() };
    let (y, weights) = g.attention(Qkv::Separate { q, k, v: k }, options).unwrap();
    let loss = g.sum(y).unwrap();
    let grads = g.gradients(loss, &[q, k]).unwrap();
    for (name, value) in
        [("y", y), ("weights", weights), ("dq", grads[0].unwrap()), ("dk", grads[1].unwrap())]
    {
        g.output(name, value).unwrap();
    }
    let store = Store::new();
    store.declare(&g).unwrap();
    store.set("q", &[1e4f32; 8]).unwrap();
    store.set("k", &[-1e4f32; 12]).unwrap();
    let mut program = Program::new(&g, &Pool::new(1), &[&store]).unwrap();
    program.run().unwrap();
    assert_eq!(program.get::<f32>("y").unwrap(), [0.0, 0.0, 0.0, 0.0, -1e4, -1e4, -1e4, -1e4]);
    assert_eq!(program.get::<f32>("weights").unwrap(), [0.0, 0.0, 0.0, 0.5, 0.0, 0.5].repeat(2));
    for name in ["dq", "dk"] {
        assert!(program.get::<f32>(name).unwrap().iter().all(|g| g.is_finite()), "{name}");
    }
    assert_eq!(program.get::<f32>("dq").unwrap()[..4], [0.0; 4]);
}
