//! Causal convolutions and selective scans against plain loops, on any number of threads, and step by step.

#![allow(clippy::unwrap_used, clippy::panic)]

use elmur_engine::rng::Stream;
use elmur_engine::{DType, Element, Graph, Pool, Program, Result, SelectiveScan, Store, Value};

const F32: DType = DType::F32;

fn normal(n: usize, stream: u32) -> Vec<f64> {
    let mut data = vec![0.0; n];
    Stream::new(42, 0, stream).fill_normal(&mut data, 1.0);
    data
}

/// Fails unless numbers differ by at most `tolerance`, relative to the largest of them (at least 1).
fn close(got: &[f64], want: &[f64], tolerance: f64) {
    assert_eq!(got.len(), want.len());
    let scale = want.iter().fold(1.0f64, |most, x| most.max(x.abs()));
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        assert!((g - w).abs() <= tolerance * scale, "element {i}: {g}, want {w}");
    }
}

/// Values and gradients of a graph over named parameters of f32 or f64: its results, then the gradients of
/// the sum of their squares.
fn evaluated<T: Element>(
    inputs: &[(&'static str, Vec<usize>, Vec<f64>)],
    threads: usize,
    of: impl Fn(f64) -> T,
    build: impl FnOnce(&mut Graph, &[Value]) -> Result<Vec<Value>>,
) -> Vec<Vec<T>> {
    let (mut g, store) = (Graph::new(), Store::new());
    let values: Vec<Value> =
        inputs.iter().map(|(name, shape, _)| g.param(name, T::DTYPE, shape.clone()).unwrap()).collect();
    let mut results = build(&mut g, &values).unwrap();
    let mut loss = g.scalar(T::DTYPE, 0.0).unwrap();
    for result in &results {
        let squares = g.mul(*result, *result).unwrap();
        let sum = g.sum(squares).unwrap();
        loss = g.add(loss, sum).unwrap();
    }
    results.extend(g.gradients(loss, &values).unwrap().into_iter().flatten());
    for (i, result) in results.iter().enumerate() {
        g.output(&i.to_string(), *result).unwrap();
    }
    store.declare(&g).unwrap();
    for (name, _, data) in inputs {
        store.set(name, &data.iter().map(|x| of(*x)).collect::<Vec<_>>()).unwrap();
    }
    let mut program = Program::new(&g, &Pool::new(threads), &[&store]).unwrap();
    program.run().unwrap();
    program.run().unwrap();
    (0..results.len()).map(|i| program.get::<T>(&i.to_string()).unwrap().to_vec()).collect()
}

/// Inputs of a causal convolution: x, weight, bias, window.
fn conv_inputs([batch, steps, channels, taps]: [usize; 4]) -> Vec<(&'static str, Vec<usize>, Vec<f64>)> {
    let shapes = [
        ("x", vec![batch, steps, channels]),
        ("weight", vec![taps, channels]),
        ("bias", vec![channels]),
        ("window", vec![batch, taps - 1, channels]),
    ];
    let with_data = |(i, (name, shape)): (usize, (&'static str, Vec<usize>))| {
        let data = normal(shape.iter().product(), i as u32);
        (name, shape, data)
    };
    shapes.into_iter().enumerate().map(with_data).collect()
}

fn conv(g: &mut Graph, inputs: &[Value]) -> Result<Vec<Value>> {
    let conv = g.causal_conv1d_silu(inputs[0], inputs[1], inputs[2], inputs[3])?;
    Ok(vec![conv.y, conv.window])
}

/// [batch, steps, channels, taps], with fewer steps than the window holds and with more.
const CONVOLUTIONS: [[usize; 4]; 4] = [[1, 1, 3, 4], [3, 2, 17, 4], [2, 9, 16, 2], [40, 5, 33, 4]];

#[test]
fn causal_convolution_matches_its_formula() {
    for size in CONVOLUTIONS {
        let [batch, steps, channels, taps] = size;
        let inputs = conv_inputs(size);
        let [x, weight, bias, window] = [0, 1, 2, 3].map(|i| &inputs[i].2);
        // The window and the steps after it, one step after the other.
        let all = |b: usize, i: usize, c: usize| match i.checked_sub(taps - 1) {
            Some(t) => x[(b * steps + t) * channels + c],
            None => window[(b * (taps - 1) + i) * channels + c],
        };
        let (mut y, mut next) = (Vec::new(), Vec::new());
        for b in 0..batch {
            for (t, c) in (0..steps).flat_map(|t| (0..channels).map(move |c| (t, c))) {
                let sum: f64 = (0..taps).map(|k| weight[k * channels + c] * all(b, t + k, c)).sum();
                y.push((bias[c] + sum) / (1.0 + (-bias[c] - sum).exp()));
            }
            for (i, c) in (0..taps - 1).flat_map(|i| (0..channels).map(move |c| (i, c))) {
                next.push(all(b, steps + i, c));
            }
        }
        let got = evaluated::<f64>(&inputs, 2, |x| x, conv);
        close(&got[0], &y, 1e-13);
        close(&got[1], &next, 0.0);
        for (got, want) in evaluated::<f32>(&inputs, 2, |x| x as f32, conv).iter().zip(&got) {
            let got: Vec<f64> = got.iter().map(|x| f64::from(*x)).collect();
            close(&got, want, 3e-5);
        }
    }
}

/// Inputs of a scan: u, delta, a, bc, d, z, state.
fn scan_inputs([batch, steps, channels, states]: [usize; 4]) -> Vec<(&'static str, Vec<usize>, Vec<f64>)> {
    let shapes = [
        ("u", vec![batch, steps, channels]),
        ("delta", vec![batch, steps, channels]),
        ("a", vec![states, channels]),
        ("bc", vec![batch, steps, 2 * states]),
        ("d", vec![channels]),
        ("z", vec![batch, steps, channels]),
        ("state", vec![batch, states, channels]),
    ];
    let with_data = |(i, (name, shape)): (usize, (&'static str, Vec<usize>))| {
        let mut data = normal(shape.iter().product(), i as u32);
        if name == "a" {
            data.iter_mut().for_each(|a| *a = -a.exp());
        }
        (name, shape, data)
    };
    shapes.into_iter().enumerate().map(with_data).collect()
}

fn scan(g: &mut Graph, inputs: &[Value]) -> Result<Vec<Value>> {
    let [u, delta, a, bc, d, z, state] = [0, 1, 2, 3, 4, 5, 6].map(|i| inputs[i]);
    let scanned = g.selective_scan(SelectiveScan { u, delta, a, bc, d, z, state })?;
    Ok(vec![scanned.y, scanned.state])
}

/// [batch, steps, channels, states]: within one chunk of kept states, and several chunks.
const SCANS: [[usize; 4]; 5] =
    [[1, 1, 3, 2], [3, 40, 17, 16], [2, 9, 16, 100], [12, 10, 48, 30], [70, 5, 33, 4]];

#[test]
fn selective_scan_matches_its_formula() {
    for size in SCANS {
        let [batch, steps, channels, states] = size;
        let inputs = scan_inputs(size);
        let [u, delta, a, bc, d, z, state] = [0, 1, 2, 3, 4, 5, 6].map(|i| &inputs[i].2);
        let (mut h, mut y) = (state.clone(), vec![0.0; u.len()]);
        for (b, t) in (0..batch).flat_map(|b| (0..steps).map(move |t| (b, t))) {
            for c in 0..channels {
                let at = (b * steps + t) * channels + c;
                let step = (1.0 + delta[at].exp()).ln();
                let mut read = d[c] * u[at];
                for n in 0..states {
                    let h = &mut h[(b * states + n) * channels + c];
                    let row = &bc[(b * steps + t) * 2 * states..];
                    *h = (step * a[n * channels + c]).exp() * *h + step * u[at] * row[n];
                    read += row[states + n] * *h;
                }
                y[at] = read * z[at] / (1.0 + (-z[at]).exp());
            }
        }
        let got = evaluated::<f64>(&inputs, 2, |x| x, scan);
        close(&got[0], &y, 1e-12);
        close(&got[1], &h, 1e-12);
        // In f32 values and gradients are those of f64, whose gradients `gradients.rs` checks.
        for (got, want) in evaluated::<f32>(&inputs, 2, |x| x as f32, scan).iter().zip(&got) {
            let got: Vec<f64> = got.iter().map(|x| f64::from(*x)).collect();
            close(&got, want, 3e-5);
        }
    }
}

#[test]
fn convolutions_and_scans_have_the_same_bits_on_any_number_of_threads() {
    let bits =
        |results: Vec<Vec<f32>>| -> Vec<u32> { results.into_iter().flatten().map(f32::to_bits).collect() };
    for size in CONVOLUTIONS.into_iter().chain([[70, 9, 130, 4]]) {
        let of = |threads| bits(evaluated::<f32>(&conv_inputs(size), threads, |x| x as f32, conv));
        let one = of(1);
        assert!([2, 5].into_iter().all(|threads| of(threads) == one), "convolution {size:?}");
    }
    for size in SCANS.into_iter().chain([[67, 20, 40, 16]]) {
        let of = |threads| bits(evaluated::<f32>(&scan_inputs(size), threads, |x| x as f32, scan));
        let one = of(1);
        assert!([2, 5].into_iter().all(|threads| of(threads) == one), "scan {size:?}");
    }
}

/// Acting: window and states live in a store, one step at a time, and end as the whole window leaves them.
#[test]
fn convolutions_and_scans_step_like_the_whole_window() {
    for size in SCANS {
        let [batch, steps, channels, states] = size;
        let taps = 4;
        let (scan_data, conv_data) = (scan_inputs(size), conv_inputs([batch, steps, channels, taps]));
        let build = |g: &mut Graph, steps: usize| {
            let mut named = |name: &str, shape: &[usize]| g.param(name, F32, shape.to_vec()).unwrap();
            let bias = named("bias", &[channels]);
            let (weight, a, d) = (
                named("weight", &[taps, channels]),
                named("a", &[states, channels]),
                named("d", &[channels]),
            );
            let mut input = |name: &str, width: usize| g.input(name, F32, [batch, steps, width]).unwrap();
            let (x, delta, bc, z) = (
                input("x", channels),
                input("delta", channels),
                input("bc", 2 * states),
                input("z", channels),
            );
            let window = g.state("window", F32, [batch, taps - 1, channels]).unwrap();
            let state = g.state("state", F32, [batch, states, channels]).unwrap();
            let conv = g.causal_conv1d_silu(x, weight, bias, window).unwrap();
            let scan = SelectiveScan { u: conv.y, delta, a, bc, d, z, state };
            let scanned = g.selective_scan(scan).unwrap();
            g.update(window, conv.window).unwrap();
            g.update(state, scanned.state).unwrap();
            g.output("y", scanned.y).unwrap();
        };
        let all: Vec<_> = scan_data.iter().chain(&conv_data).collect();
        let data = |name: &str| -> Vec<f32> {
            let (_, _, data) = all.iter().find(|(n, _, _)| *n == name).unwrap();
            data.iter().map(|x| *x as f32).collect()
        };
        // In pieces of this many steps: y of all steps, and what the window and the states are at the end.
        let run = |each: usize| {
            let (mut g, store) = (Graph::new(), Store::new());
            build(&mut g, each);
            store.declare(&g).unwrap();
            for name in ["weight", "bias", "a", "d", "window", "state"] {
                store.set(name, &data(name)).unwrap();
            }
            let mut program = Program::new(&g, &Pool::new(2), &[&store]).unwrap();
            let mut y = vec![0.0; batch * steps * channels];
            for start in (0..steps).step_by(each) {
                for (name, width) in
                    [("x", channels), ("delta", channels), ("bc", 2 * states), ("z", channels)]
                {
                    let part = |b: usize| data(name)[(b * steps + start) * width..][..each * width].to_vec();
                    program.set(name, &(0..batch).flat_map(part).collect::<Vec<_>>()).unwrap();
                }
                program.run().unwrap();
                for (b, part) in program.get::<f32>("y").unwrap().chunks_exact(each * channels).enumerate() {
                    y[(b * steps + start) * channels..][..part.len()].copy_from_slice(part);
                }
            }
            (y, store.get::<f32>("window").unwrap(), store.get::<f32>("state").unwrap())
        };
        assert_eq!(run(1), run(steps), "{size:?}");
    }
}
