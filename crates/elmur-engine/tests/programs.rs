//! Graphs, stores and programs: what the planner may do, what it must not, and what users are told.

#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use elmur_engine::rng::Stream;
use elmur_engine::{
    Activation, AdamW, Attention, AttentionMask, Blend, Conv1d, Conv2d, CrossEntropy, DType, Error, Graph,
    Norm, NormKind, Pool, Program, Qkv, Relative, Result, SelectiveScan, Store, TensorType, Value,
};

const F32: DType = DType::F32;
const F64: DType = DType::F64;

fn program(g: &Graph, store: &Store) -> Program {
    store.declare(g).unwrap();
    Program::new(g, &Pool::new(1), &[store]).unwrap()
}

#[test]
fn dead_code_is_not_run() {
    let mut g = Graph::new();
    let x = g.input("x", F32, [4]).unwrap();
    let y = g.scale(x, 2.0).unwrap();
    let _unused = g.exp(y).unwrap();
    g.output("y", y).unwrap();
    let mut p = program(&g, &Store::new());
    assert_eq!(p.steps(), 1);
    p.set("x", &[1.0f32, 2.0, 3.0, 4.0]).unwrap();
    p.run().unwrap();
    assert_eq!(p.get::<f32>("y").unwrap(), [2.0, 4.0, 6.0, 8.0]);
}

#[test]
fn products_with_one_left_operand_run_together_unless_something_reads_the_first() {
    // Aᵀ B and Aᵀ D; the left operands are two reshapes of one input.
    let build = |read_between: bool, names: &[&str]| {
        let mut g = Graph::new();
        let a = g.input("a", F32, [4, 5, 40]).unwrap();
        let mut right = |name: &str, n: usize| g.input(name, F32, [20, n]).unwrap();
        let (b, d) = (right("b", 33), right("d", 7));
        let [first, second] = [0, 1].map(|_| g.reshape(a, [20, 40]).unwrap());
        let mut c = g.matmul_with(first, b, true, false).unwrap();
        if read_between {
            c = g.scale(c, 2.0).unwrap();
        }
        let e = g.matmul_with(second, d, true, false).unwrap();
        for (name, value) in [("c", c), ("e", e)].into_iter().filter(|(name, _)| names.contains(name)) {
            g.output(name, value).unwrap();
        }
        let mut p = program(&g, &Store::new());
        for (name, len) in [("a", 800), ("b", 660), ("d", 140)] {
            if let Ok(input) = p.input_mut::<f32>(name) {
                input.copy_from_slice(&(0..len).map(|i| (i % 17) as f32 * 0.3 - 2.0).collect::<Vec<_>>());
            }
        }
        p.run().unwrap();
        let got = names.iter().map(|name| p.get::<f32>(name).unwrap().to_vec()).collect::<Vec<_>>();
        (p.steps(), got)
    };
    let (steps, together) = build(false, &["c", "e"]);
    assert_eq!(steps, 1);
    let (steps, mut apart) = build(true, &["c", "e"]);
    assert_eq!(steps, 3);
    apart[0].iter_mut().for_each(|c| *c *= 0.5);
    assert_eq!(together, apart);
    let (steps, alone) = build(false, &["e"]);
    assert_eq!((steps, &alone[0]), (1, &apart[1]));
}

#[test]
fn a_long_chain_needs_little_memory() {
    let mut g = Graph::new();
    let x = g.input("x", F32, [1024]).unwrap();
    let mut y = x;
    for _ in 0..100 {
        let z = g.tanh(y).unwrap();
        y = g.transpose(z, &[0]).unwrap(); // not in place, so buffers must alternate
    }
    g.output("y", y).unwrap();
    let p = program(&g, &Store::new());
    assert_eq!(p.steps(), 200);
    assert!(p.arena_bytes() <= 3 * 4096, "{} bytes", p.arena_bytes());
}

#[test]
fn inputs_outputs_and_shared_operands_are_never_overwritten() {
    let mut g = Graph::new();
    let x = g.input("x", F32, [3]).unwrap();
    let doubled = g.add(x, x).unwrap();
    // Could be in place, but `doubled` is read again and is an output.
    let seen = g.scale(doubled, 10.0).unwrap();
    let twice = g.add(doubled, doubled).unwrap();
    let squared = g.mul(twice, twice).unwrap();
    for (name, value) in [("doubled", doubled), ("seen", seen), ("squared", squared)] {
        g.output(name, value).unwrap();
    }
    let mut p = program(&g, &Store::new());
    p.set("x", &[1.0f32, 2.0, 3.0]).unwrap();
    for _ in 0..2 {
        p.run().unwrap();
        assert_eq!(p.get::<f32>("doubled").unwrap(), [2.0, 4.0, 6.0]);
        assert_eq!(p.get::<f32>("seen").unwrap(), [20.0, 40.0, 60.0]);
        assert_eq!(p.get::<f32>("squared").unwrap(), [16.0, 64.0, 144.0]);
        assert_eq!(p.input_mut::<f32>("x").unwrap(), [1.0, 2.0, 3.0]);
    }
}

#[test]
fn states_are_read_as_they_were_before_the_run() {
    let mut g = Graph::new();
    let a = g.state("a", F32, [2]).unwrap();
    let b = g.state("b", F32, [2]).unwrap();
    // Swap, through a reshape on one side, and read both as outputs.
    let as_row = g.reshape(b, [1, 2]).unwrap();
    let as_row = g.reshape(as_row, [2]).unwrap();
    g.update(a, as_row).unwrap();
    g.update(b, a).unwrap();
    g.output("a", a).unwrap();
    let store = Store::new();
    let mut p = program(&g, &store);
    store.set("a", &[1.0f32, 2.0]).unwrap();
    store.set("b", &[3.0f32, 4.0]).unwrap();
    for round in 0..3 {
        let (a, b) = if round % 2 == 0 { ([1.0, 2.0], [3.0, 4.0]) } else { ([3.0, 4.0], [1.0, 2.0]) };
        assert_eq!(store.get::<f32>("a").unwrap(), a);
        assert_eq!(store.get::<f32>("b").unwrap(), b);
        p.run().unwrap();
        assert_eq!(p.get::<f32>("a").unwrap(), a);
    }
}

#[test]
fn an_update_in_place_waits_for_readers_of_the_old_value() {
    // counter + 1 could be written over the counter at once, but the old value is read afterwards.
    let mut g = Graph::new();
    let counter = g.state("counter", DType::I64, []).unwrap();
    let one = g.scalar(DType::I64, 1.0).unwrap();
    let next = g.add(counter, one).unwrap();
    g.update(counter, next).unwrap();
    let old = g.cast(counter, F64).unwrap();
    let chained = g.add(next, one).unwrap();
    g.output("old", old).unwrap();
    g.output("next", next).unwrap();
    g.output("chained", chained).unwrap();
    let store = Store::new();
    let mut p = program(&g, &store);
    for round in 0..3 {
        p.run().unwrap();
        assert_eq!(p.get::<f64>("old").unwrap(), [f64::from(round)]);
        assert_eq!(p.get::<i64>("next").unwrap(), [i64::from(round) + 1]);
        assert_eq!(p.get::<i64>("chained").unwrap(), [i64::from(round) + 2]);
        assert_eq!(store.get::<i64>("counter").unwrap(), [i64::from(round) + 1]);
    }
}

#[test]
fn two_updates_in_one_chain_end_in_the_same_storage() {
    let mut g = Graph::new();
    let w = g.state("w", F32, [8]).unwrap();
    let mut new = w;
    for _ in 0..3 {
        new = g.affine(new, 2.0, 1.0).unwrap();
    }
    g.update(w, new).unwrap();
    let store = Store::new();
    let mut p = program(&g, &store);
    let arena = p.arena_bytes();
    p.run().unwrap();
    assert_eq!(store.get::<f32>("w").unwrap(), [7.0; 8]);
    assert_eq!(arena, 0, "the chain lives in the state itself");
}

/// A moving average of what AdamW leaves behind reads the new parameters, and all updates stay in place.
#[test]
fn an_average_follows_the_parameters_of_the_same_run() {
    let mut g = Graph::new();
    let p = g.param("p", F64, [3]).unwrap();
    let copy = g.param("copy", F64, [3]).unwrap();
    let lr = g.scalar(F64, 0.5).unwrap();
    let decay = g.input("decay", F64, []).unwrap();
    // Both the parameters and their average are read before they change.
    let product = g.mul(p, copy).unwrap();
    let loss = g.sum(product).unwrap();
    g.output("loss", loss).unwrap();
    let grad = g.gradients(loss, &[p]).unwrap()[0].unwrap();
    let new = g.adamw(AdamW::default(), lr, None, &[(p, grad)]).unwrap();
    g.moving_average(decay, &[(copy, new[0])]).unwrap();
    let store = Store::new();
    let mut program = program(&g, &store);
    store.set("p", &[1.0, 2.0, -3.0]).unwrap();
    store.set("copy", &[5.0, 7.0, 9.0]).unwrap();
    let mut want = [5.0, 7.0, 9.0];
    for decay in [0.9, 0.5, 0.0] {
        let before = store.get::<f64>("p").unwrap();
        program.set("decay", &[decay]).unwrap();
        program.run().unwrap();
        let loss: f64 = before.iter().zip(&want).map(|(p, c)| p * c).sum();
        assert!((program.get::<f64>("loss").unwrap()[0] - loss).abs() < 1e-12);
        let after = store.get::<f64>("p").unwrap();
        assert_ne!(before, after);
        for (want, new) in want.iter_mut().zip(&after) {
            *want = decay * *want + (1.0 - decay) * new;
        }
        let copy = store.get::<f64>("copy").unwrap();
        assert!(copy.iter().zip(&want).all(|(a, b)| (a - b).abs() < 1e-12), "{copy:?} {want:?}");
    }
    assert_eq!(store.get::<f64>("copy").unwrap(), store.get::<f64>("p").unwrap());
    assert!(program.arena_bytes() < 512, "copies of parameters in {} bytes", program.arena_bytes());

    let message = |r: Result<()>| r.unwrap_err().to_string();
    let wide = g.param("wide", F64, [4]).unwrap();
    assert_eq!(
        message(g.moving_average(decay, &[(wide, p)])),
        "moving_average: expected source f64[4], got f64[3]"
    );
    assert_eq!(
        message(g.moving_average(decay, &[(copy, p)])),
        "update: expected one update per parameter or state, got a second for `copy`"
    );
    assert_eq!(
        message(g.moving_average(decay, &[(grad, p)])),
        "update: expected a parameter or state as target, got another kind of value"
    );
}

#[test]
fn programs_share_parameters_without_copies() {
    let store = Store::new();
    let mut train = Graph::new();
    let w = train.param("w", F32, [2]).unwrap();
    let lr = train.scalar(F32, 0.5).unwrap();
    let loss = train.sum(w).unwrap();
    let grad = train.gradients(loss, &[w]).unwrap()[0].unwrap();
    train.adamw(AdamW { weight_decay: 0.0, ..AdamW::default() }, lr, None, &[(w, grad)]).unwrap();
    let mut train = program(&train, &store);

    let mut act = Graph::new();
    let w = act.param("w", F32, [2]).unwrap();
    let x = act.input("x", F32, [1, 2]).unwrap();
    let w = act.reshape(w, [1, 2]).unwrap();
    let y = act.linear(x, w, None, Activation::Identity).unwrap();
    act.output("y", y).unwrap();
    // Another session: the same parameters, its own states.
    let private = Store::new();
    let mut act = Program::new(&act, &Pool::new(1), &[&store, &private]).unwrap();
    act.set("x", &[1.0f32, 1.0]).unwrap();
    act.run().unwrap();
    assert_eq!(act.get::<f32>("y").unwrap(), [0.0]);
    train.run().unwrap();
    act.run().unwrap();
    assert!((act.get::<f32>("y").unwrap()[0] + 1.0).abs() < 1e-6, "the update is seen");
}

/// What kernels keep of a weight or of a table of positions follows every change, by hand or by another program.
#[test]
fn what_is_kept_between_runs_follows_the_stores() {
    let (tokens, heads, d) = (90, 2, 64);
    let (mut g, mut other) = (Graph::new(), Graph::new());
    let x = g.input("x", F32, [1, tokens, d]).unwrap();
    let w = g.param("w", F32, [4 * d, d]).unwrap();
    let qkv = g.slice(w, 0, d..4 * d).unwrap();
    let qkv = g.linear(x, qkv, None, Activation::Identity).unwrap();
    let [u, v] = ["u", "v"].map(|name| g.param(name, F32, [heads, d / heads]).unwrap());
    let r = g.state("r", F32, [tokens, d]).unwrap();
    let relative = Some(Relative::new(u, v, r));
    let options = Attention { heads, mask: AttentionMask::Causal, relative, ..Attention::default() };
    let y = g.attention(Qkv::Packed(qkv), options).unwrap().0;
    g.output("y", y).unwrap();
    // Another program halves both.
    for (name, shape) in [("w", [4 * d, d]), ("r", [tokens, d])] {
        let old = if name == "w" { other.param(name, F32, shape) } else { other.state(name, F32, shape) };
        let old = old.unwrap();
        let new = other.scale(old, 0.5).unwrap();
        other.update(old, new).unwrap();
    }

    let (params, states) = (Store::new(), Store::new());
    params.declare_params(&g).unwrap();
    states.declare_states(&g).unwrap();
    let numbers = |len: usize, stream: u32| {
        let mut x = vec![0.0; len];
        Stream::new(3, 0, stream).fill_uniform(&mut x, -1.0, 1.0);
        x.into_iter().map(|x| x as f32).collect::<Vec<_>>()
    };
    for (i, name) in ["w", "u", "v"].into_iter().enumerate() {
        params.set(name, &numbers(params.ty(name).unwrap().len(), i as u32)).unwrap();
    }
    states.set("r", &numbers(tokens * d, 7)).unwrap();
    let compile = |g: &Graph| Program::new(g, &Pool::new(1), &[&params, &states]).unwrap();
    let input = numbers(tokens * d, 8);
    let run = |p: &mut Program| {
        p.set("x", &input).unwrap();
        p.run().unwrap();
        p.get::<f32>("y").unwrap().to_vec()
    };
    let (mut p, mut halve) = (compile(&g), compile(&other));
    let mut seen = vec![run(&mut p)];
    assert_eq!(seen[0], run(&mut p));
    for change in 0..3 {
        match change {
            0 => params.set("w", &numbers(4 * d * d, 9)).unwrap(),
            1 => states.set("r", &numbers(tokens * d, 10)).unwrap(),
            _ => halve.run().unwrap(),
        }
        let got = run(&mut p);
        assert_eq!(got, run(&mut compile(&g)), "change {change}");
        assert!(!seen.contains(&got), "change {change}");
        seen.push(got);
    }
}

#[test]
fn programs_of_several_threads_take_turns_on_a_store() {
    let mut g = Graph::new();
    let counter = g.state("counter", DType::I64, [64]).unwrap();
    let ones = g.constant(&[1i64; 64], [64]).unwrap();
    let next = g.add(counter, ones).unwrap();
    g.update(counter, next).unwrap();
    let store = Store::new();
    store.declare(&g).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            let mut p = Program::new(&g, &Pool::new(1), &[&store]).unwrap();
            scope.spawn(move || (0..500).for_each(|_| p.run().unwrap()));
        }
    });
    assert_eq!(store.get::<i64>("counter").unwrap(), [2000; 64]);
}

#[test]
fn bad_indices_are_found_before_anything_changes() {
    let graph = common::policy(F32).unwrap();
    let store = Store::new();
    common::fill(&graph, &store).unwrap();
    let mut p = Program::new(&graph, &Pool::new(2), &[&store]).unwrap();
    common::feed(&mut p).unwrap();
    p.run().unwrap();
    let before = store.duplicate().unwrap();
    let same = || {
        store.names().iter().all(|n| match store.ty(n).unwrap().dtype {
            F32 => store.get::<f32>(n).unwrap() == before.get::<f32>(n).unwrap(),
            _ => store.get::<i64>(n).unwrap() == before.get::<i64>(n).unwrap(),
        })
    };
    p.input_mut::<i64>("actions").unwrap()[5] = 7;
    assert_eq!(p.run().unwrap_err().to_string(), "cross_entropy: class 7 is outside 0..7");
    assert!(same());
    p.input_mut::<i64>("actions").unwrap()[5] = -10;
    p.input_mut::<i32>("seen").unwrap()[0] = -1;
    assert_eq!(p.run().unwrap_err().to_string(), "embedding: row -1 is outside 0..6");
    assert!(same());
    p.input_mut::<i32>("seen").unwrap()[0] = 0;
    p.run().unwrap();
    assert!(!same());
}

/// A state that later ops read as it was before the run changes in its own memory all the same.
#[test]
fn states_change_where_they_lie_after_their_last_reader() {
    let mut g = Graph::new();
    let (x, memory) = (g.input("x", F32, [64]).unwrap(), g.state("memory", F32, [64]).unwrap());
    let new = g.add(memory, x).unwrap();
    g.update(memory, new).unwrap();
    let read = g.mul(memory, x).unwrap();
    let sum = g.sum_to(read, []).unwrap();
    g.output("sum", sum).unwrap();
    let store = Store::new();
    store.declare(&g).unwrap();
    store.set("memory", &[1f32; 64]).unwrap();
    let mut p = Program::new(&g, &Pool::new(1), &[&store]).unwrap();
    p.set("x", &[2f32; 64]).unwrap();
    for (sum, memory) in [(128.0, 3.0), (384.0, 5.0)] {
        p.run().unwrap();
        assert_eq!(p.get::<f32>("sum").unwrap(), [sum]);
        assert_eq!(store.get::<f32>("memory").unwrap(), [memory; 64]);
    }
    assert!(p.arena_bytes() < 3 * 64 * 4, "x, the product and the sum, but no second memory");
}

#[test]
fn profile_names_every_step() {
    let graph = common::policy(F32).unwrap();
    let store = Store::new();
    common::fill(&graph, &store).unwrap();
    let mut p = Program::new(&graph, &Pool::new(2), &[&store]).unwrap();
    common::feed(&mut p).unwrap();
    let times = p.profile(3).unwrap();
    assert_eq!(times.len(), p.steps());
    assert!(times.iter().any(|t| t.op == "attention") && times.iter().any(|t| t.op == "adamw"));
    assert!(times.iter().map(|t| t.time.as_nanos()).sum::<u128>() > 0);
}

/// What a user reads after a mistake.
#[test]
fn mistakes_are_explained() {
    let mut g = Graph::new();
    let mut other = Graph::new();
    let x = g.input("x", F32, [2, 8]).unwrap();
    let x64 = g.input("x64", F64, [2, 8]).unwrap();
    let w = g.param("w", F32, [4, 6]).unwrap();
    let index = g.input("index", DType::I32, [2]).unwrap();
    let rng = g.state("rng", DType::I64, [3]).unwrap();
    let foreign = other.input("x", F32, [2, 8]).unwrap();
    let message = |r: Result<Value>| r.unwrap_err().to_string();
    let none = Activation::Identity;
    assert_eq!(
        message(g.linear(x, w, None, none)),
        "linear: expected weight f32[out, 8] for x f32[2, 8], got f32[4, 6]"
    );
    assert_eq!(message(g.linear(index, w, None, none)), "linear: expected x of f32 or f64, got i32[2]");
    assert_eq!(
        message(g.add(x, x64)),
        "add: expected operands of one numeric type, got f32[2, 8] and f64[2, 8]"
    );
    assert_eq!(message(g.add(x, w)), "add: expected shapes that broadcast, got f32[2, 8] and f32[4, 6]");
    assert_eq!(message(g.dropout(x, 0.5, rng)), "dropout: expected rng i64[2], got i64[3]");
    assert_eq!(message(g.dropout(x, 1.0, rng)), "dropout: expected a probability in 0..1, got 1");
    assert_eq!(
        message(g.add(x, foreign)),
        "add: the value passed belongs to another graph; build it with this graph's own methods"
    );
    assert_eq!(
        message(g.param("w", F32, [1])),
        "`w` is already the name of a parameter in this graph; choose another name"
    );
    assert_eq!(
        message(g.slice(x, 1, 6..9)),
        "slice: expected a non-empty range inside axis 1 of f32[2, 8], got 6..9"
    );
    assert_eq!(message(g.reshape(x, [3, 5])), "reshape: expected a shape of 16 elements, got [3, 5]");
    let gates = g.input("gates", F32, [2, 5, 12]).unwrap();
    let (kernel, bias) = (g.param("kernel", F32, [6, 9, 12]).unwrap(), g.param("bias", F32, [12]).unwrap());
    let conv = Conv1d { stride: 1, padding: 1 };
    assert_eq!(
        message(g.conv1d(gates, kernel, None, conv, none)),
        "conv1d: expected x [B, T, C] and weight [O, k, C], k no longer than the padded steps, stride above 0 \
         (Conv1d { stride: 1, padding: 1 }), got f32[2, 5, 12] and f32[6, 9, 12]"
    );
    let image = g.input("image", F32, [1, 1, 1, 300]).unwrap();
    let pixel = g.param("pixel", F32, [1, 1, 1, 1]).unwrap();
    assert!(g.conv2d(image, pixel, None, Conv2d { stride: 255, padding: 0 }, none).is_ok());
    let limits = "conv2d: expected a stride of at most 255; images, their results and weights of less than 2^31 numbers";
    for conv in [Conv2d { stride: 256, padding: 0 }, Conv2d { stride: 255, padding: 1 << 40 }] {
        let refused = message(g.conv2d(image, pixel, None, conv, none));
        assert!(refused.starts_with(limits), "{refused}");
    }
    assert_eq!(
        message(g.conv_transpose1d(x, kernel, None, conv, none)),
        "conv_transpose1d: expected x [B, T, C] and weight [k, O, C], got f32[2, 8] and f32[6, 9, 12]"
    );
    assert_eq!(
        message(g.group_norm(gates, 5, bias, bias, 1e-5)),
        "group_norm: expected a number of groups that divides 12 channels, got 5"
    );
    assert_eq!(
        message(g.max_pool2d(x, (2, 2))),
        "max_pool2d: expected x [B, C, H, W] of at least one window of 2 by 2, got f32[2, 8]"
    );
    assert_eq!(
        message(g.discretize(x, w)),
        "discretize: expected x [..., n] and thresholds [n, bins + 1] of one type, with at least one bin, \
         got f32[2, 8] and f32[4, 6]"
    );
    let lstm = |r: Result<elmur_engine::Lstm>| r.unwrap_err().to_string();
    assert_eq!(lstm(g.lstm(x, w, w, x, x)), "lstm: expected x [batch, steps, 4 width], got f32[2, 8]");
    assert_eq!(lstm(g.lstm(gates, w, w, x, x)), "lstm: expected weight f32[12, 3], got f32[4, 6]");
    let conv = g.causal_conv1d_silu(gates, w, x, gates).unwrap_err().to_string();
    assert_eq!(conv, "causal_conv1d_silu: expected weight f32[4, 12], got f32[4, 6]");
    let scan = SelectiveScan { u: gates, delta: gates, a: w, bc: gates, d: x, z: gates, state: gates };
    let scan = g.selective_scan(scan).unwrap_err().to_string();
    assert_eq!(scan, "selective_scan: expected a f32[4, 12], got f32[4, 6]");
    assert_eq!(
        g.gradients(x, &[w]).unwrap_err().to_string(),
        "gradients: expected a scalar loss of f32 or f64, got f32[2, 8]"
    );
    assert_eq!(
        g.update(x, x).unwrap_err().to_string(),
        "update: expected a parameter or state as target, got another kind of value"
    );
    let cache = g.param("cache", F32, [2, 3, 8]).unwrap();
    let written = g.scatter_rows(cache, index, x).unwrap();
    let loss = g.sum(written).unwrap();
    assert_eq!(
        g.gradients(loss, &[cache]).unwrap_err().to_string(),
        "scatter_rows has no gradient for its input 0; wrap that input in stop_gradient"
    );
    assert_eq!(
        message(g.value("cahe").map(|_| x)),
        "there is no parameter, input or state named `cahe`; did you mean `cache`?"
    );
    assert_eq!(
        message(g.scatter_rows(w, index, x)),
        "scatter_rows: expected values [2, ...] that end as f32[4, 6] does, got f32[2, 8]"
    );
    assert_eq!(message(g.scatter_rows(w, x, x)), "scatter_rows: expected index of i32 or i64, got f32[2, 8]");
    let store = Store::new();
    store.insert("w", TensorType::new(F32, [6, 4])).unwrap();
    g.output("w", w).unwrap();
    assert_eq!(
        Program::new(&g, &Pool::new(1), &[&store]).unwrap_err().to_string(),
        "`w` is f32[4, 6] in the graph, but f32[6, 4] in the store"
    );
    let mut p = program(
        &{
            let mut g = Graph::new();
            let x = g.input("observation", F32, [2]).unwrap();
            g.output("y", x).unwrap();
            g
        },
        &Store::new(),
    );
    let message = |r: Result<()>| r.unwrap_err().to_string();
    assert_eq!(
        message(p.set("observations", &[0f32; 2])),
        "there is no input named `observations`; did you mean `observation`?"
    );
    assert_eq!(message(p.set("observation", &[0f32; 3])), "`observation` has 2 elements, got 3");
    assert_eq!(message(p.set("observation", &[0f64; 2])), "`observation` holds f32, got f64 data");
    assert!(matches!(p.get::<f32>("z"), Err(Error::UnknownName { .. })));
    assert!(matches!(
        Store::new().insert("huge", TensorType::new(F32, [1 << 37])),
        Ok(()) | Err(Error::OutOfMemory { .. })
    ));
}

/// Random calls with random operands: each either builds or errs, and what was built runs. Nothing panics.
#[test]
fn malformed_graphs_never_panic() {
    let mut built = 0;
    for seed in 0..300 {
        let stream = Stream::new(seed, 3, 0);
        let mut next = 0;
        let mut below = |n: usize| {
            next += 1;
            stream.draw(next) as usize % n
        };
        let mut g = Graph::new();
        let mut values: Vec<Value> = Vec::new();
        let types = [F32, F32, F32, F64, DType::I32, DType::I64, DType::Bool, DType::U8];
        for i in 0..14 {
            let rank = below(5);
            let shape: Vec<usize> = (0..rank).map(|_| [1, 2, 2, 3, 4, 6, 0][below(7)]).collect();
            let dtype = types[below(8)];
            let name = format!("v{i}");
            let value = match below(3) {
                0 => g.input(&name, dtype, shape),
                1 => g.param(&name, dtype, shape),
                _ => g.state(&name, dtype, shape),
            };
            values.extend(value);
        }
        let Ok(rng) = g.rng("rng") else { panic!("rng") };
        for _ in 0..60 {
            if values.is_empty() {
                break;
            }
            let mut v = || values[below(values.len())];
            let (a, b, c, d, e) = (v(), v(), v(), v(), v());
            let n = below(5);
            let flag = below(2) == 0;
            let beta = NormKind::Layer { beta: c };
            let norm = Norm { kind: if flag { NormKind::Rms } else { beta }, gamma: b, eps: 1e-8 };
            let attention = Attention {
                heads: n,
                mask: [AttentionMask::Full, AttentionMask::Causal, AttentionMask::Custom(d)][below(3)],
                bias: if flag { Some(e) } else { None },
                relative: if below(4) == 0 {
                    Some(Relative { zero: below(3), ..Relative::new(c, d, e) })
                } else {
                    None
                },
                start: if below(3) == 0 { Some(d) } else { None },
                dropout: if flag { Some((0.5, rng)) } else { None },
            };
            let settings = CrossEntropy { label_smoothing: 0.1, ignored: -10 };
            let blend =
                Blend { lambda: 0.5, empty_slots_too: flag, active: if n == 1 { Some(a) } else { None } };
            let result: Result<Vec<Value>> = match below(58) {
                0 => g.linear(a, b, flag.then_some(c), Activation::Gelu).map(|v| vec![v]),
                1 => g.matmul_with(a, b, flag, n == 0).map(|v| vec![v]),
                2 => g.norm(a, norm).map(|v| vec![v]),
                3 => g.residual_norm(a, d, norm).map(|(x, y)| vec![x, y]),
                4 => g.attention(Qkv::Packed(a), attention).map(|(x, y)| vec![x, y]),
                5 => g.attention(Qkv::Separate { q: a, k: b, v: b }, attention).map(|(x, y)| vec![x, y]),
                6 => g.attention(Qkv::QueryAndPacked { q: a, kv: b }, attention).map(|(x, y)| vec![x, y]),
                7 => g.swiglu(a).map(|v| vec![v]),
                8 => g.softmax(a).map(|v| vec![v]),
                9 => g.route_top_k(a, n).map(|(x, y)| vec![x, y]),
                10 => g.expert_mixture(a, b, c, d, e, None).map(|v| vec![v]),
                11 => g.load_balancing_loss(a, b, n).map(|v| vec![v]),
                12 => g.embedding(a, b).map(|v| vec![v]),
                13 => g.relative_bias(a, b, c).map(|v| vec![v]),
                14 => g.relu(a).map(|v| vec![v]),
                15 => {
                    let conv = Conv2d { stride: n, padding: below(3) };
                    g.conv2d(a, b, flag.then_some(c), conv, Activation::Relu).map(|v| vec![v])
                }
                16 => g.dropout(a, 0.3, if flag { rng } else { b }).map(|v| vec![v]),
                17 => g.cross_entropy(a, b, settings).map(|v| vec![v]),
                18 => g.mse(a, b, flag.then_some(c)).map(|v| vec![v]),
                19 => g.lru_select(a, n).map(|(x, y)| vec![x, y]),
                20 => g.gather_slots(a, b).map(|v| vec![v]),
                21 => g.lru_blend(a, b, c, d, e, blend).map(|(x, y)| vec![x, y]),
                22 => g.concat(&[a, b, c][..n.min(3)], below(3)).map(|v| vec![v]),
                23 => g.slice(a, below(3), below(4)..below(6)).map(|v| vec![v]),
                24 => {
                    g.transpose(a, &[[0, 1, 2], [2, 0, 1], [1, 0, 3]][below(3)][..n.min(3)]).map(|v| vec![v])
                }
                25 => g.reshape(a, vec![below(5); below(3)]).map(|v| vec![v]),
                26 => g.add(a, b).map(|v| vec![v]),
                27 => g.mul(a, b).map(|v| vec![v]),
                28 => g.sub(a, b).map(|v| vec![v]),
                29 => g.select(a, b, c).map(|v| vec![v]),
                30 => g.cast(a, types[below(8)]).map(|v| vec![v]),
                31 => g.sum_to(a, vec![1; below(4)]).map(|v| vec![v]),
                32 => g.broadcast_to(a, vec![2; below(8)]).map(|v| vec![v]),
                33 => g.mean(a).map(|v| vec![v]),
                34 => g.argmax(a).map(|v| vec![v]),
                35 => g.update(a, b).map(|()| vec![]),
                36 => g.global_norm(&[a, b]).map(|v| vec![v]),
                37 => g.adamw(AdamW::default(), a, None, &[(b, c)]),
                38 => g.gradients(a, &[b, c]).map(|grads| grads.into_iter().flatten().collect()),
                39 => g.gather_rows(a, b).map(|v| vec![v]),
                40 => g.scatter_rows(a, b, c).map(|v| vec![v]),
                42 => g.moving_average(a, &[(b, c)]).map(|()| vec![]),
                43 => g.minimum(a, b).map(|v| vec![v]),
                44 => g.div(a, b).map(|v| vec![v]),
                45 => g.logsumexp(a).map(|v| vec![v]),
                46 => {
                    let conv = Conv1d { stride: n, padding: below(3) };
                    g.conv1d(a, b, flag.then_some(c), conv, Activation::Mish).map(|v| vec![v])
                }
                47 => {
                    let conv = Conv1d { stride: n, padding: below(3) };
                    g.conv_transpose1d(a, b, flag.then_some(c), conv, Activation::Relu).map(|v| vec![v])
                }
                48 => g.group_norm(a, n, b, c, 1e-5).map(|v| vec![v]),
                49 => g.max_pool2d(a, (n, below(3))).map(|v| vec![v]),
                50 => g.discretize(a, b).map(|v| vec![v]),
                56 => g.embedding_sum(a, b).map(|v| vec![v]),
                51 => g.random_below(n, vec![2; below(3)], rng).map(|v| vec![v]),
                55 => g.shift_images(a, b, below(3)).map(|v| vec![v]),
                54 => g.weighted_cross_entropy(a, b, c, settings).map(|v| vec![v]),
                41 => g.lstm(a, b, c, d, e).map(|l| vec![l.hidden, l.last_hidden, l.last_cell]),
                52 => g.causal_conv1d_silu(a, b, c, d).map(|c| vec![c.y, c.window]),
                53 => {
                    let scan = SelectiveScan { u: a, delta: a, a: b, bc: c, d, z: a, state: e };
                    g.selective_scan(scan).map(|s| vec![s.y, s.state])
                }
                _ => g.random_normal(types[below(8)], vec![2; below(3)], 1.0, rng).map(|v| vec![v]),
            };
            values.extend(result.into_iter().flatten());
        }
        for (i, value) in values.iter().enumerate() {
            g.output(&format!("out{i}"), *value).unwrap();
        }
        let store = Store::new();
        store.declare(&g).unwrap();
        let mut program = Program::new(&g, &Pool::new(1), &[&store]).unwrap();
        // Zeros everywhere; indices may still be out of range, which is an error of its own.
        built += usize::from(program.run().is_ok());
    }
    assert!(built > 250, "only {built} of 300 random graphs ran");
}

/// Values of outputs after one run of a graph over the state `w` = 1, 2, 3, 10, 20, 30.
fn outputs_of(build: impl FnOnce(&mut Graph, Value) -> Result<()>) -> (Program, Store) {
    let mut g = Graph::new();
    let w = g.param("w", F64, [2, 3]).unwrap();
    build(&mut g, w).unwrap();
    let store = Store::new();
    let mut p = program(&g, &store);
    store.set("w", &[1.0, 2.0, 3.0, 10.0, 20.0, 30.0]).unwrap();
    p.run().unwrap();
    (p, store)
}

#[test]
fn a_gradient_that_is_passed_on_is_not_accumulated_into() {
    // W = A + B, used together with A alone: the gradient of W is shared by A and B.
    for (first, second) in [(0, 1), (1, 0)] {
        let mut g = Graph::new();
        let names = ["a", "b"];
        let parts = [first, second].map(|i| g.param(names[i], F64, [3, 3]).unwrap());
        let x = g.param("x", F64, [2, 3]).unwrap();
        let w = g.add(parts[0], parts[1]).unwrap();
        let y = g.linear(x, w, None, Activation::Identity).unwrap();
        let y = g.linear(y, parts[0], None, Activation::Tanh).unwrap();
        let twice = g.add(y, y).unwrap();
        let loss = g.sum(twice).unwrap();
        let store = Store::new();
        store.declare(&g).unwrap();
        elmur_engine::gradcheck::randomize(&g, &store, 1, 0.5).unwrap();
        let worst = elmur_engine::gradcheck::check(&mut g, loss, &store, 1e-5, 100).unwrap();
        assert!(worst.error < 1e-8, "{worst:?}");
    }
}

#[test]
fn a_window_of_a_buffer_is_not_taken_for_the_whole() {
    let (p, _) = outputs_of(|g, w| {
        let doubled = g.scale(w, 1.0)?;
        let top = g.slice(doubled, 0, 0..1)?;
        let zeros = g.constant(&[0.0; 6], [2, 3])?;
        let y = g.add(top, zeros)?;
        g.output("y", y)
    });
    assert_eq!(p.get::<f64>("y").unwrap(), [1.0, 2.0, 3.0, 1.0, 2.0, 3.0]);
}

#[test]
fn an_intermediate_value_can_update_another_state() {
    for swap in [false, true] {
        let (_, store) = outputs_of(|g, w| {
            let b = g.state("b", F64, [2, 3])?;
            let once = g.affine(w, 1.0, 1.0)?;
            let twice = g.affine(once, 1.0, 1.0)?;
            let updates = if swap { [(b, once), (w, twice)] } else { [(w, twice), (b, once)] };
            updates.into_iter().try_for_each(|(target, new)| g.update(target, new))
        });
        assert_eq!(store.get::<f64>("b").unwrap()[0], 2.0);
        assert_eq!(store.get::<f64>("w").unwrap()[0], 3.0);
    }
}

#[test]
fn any_subset_of_an_ops_outputs_may_be_read() {
    let (p, _) = outputs_of(|g, w| {
        let gamma = g.constant(&[1.0; 3], [3])?;
        let (_, sum) = g.residual_norm(w, w, Norm { kind: NormKind::Rms, gamma, eps: 1e-8 })?;
        g.output("sum", sum)?;
        let tokens = g.reshape(w, [1, 2, 3])?;
        let options = Attention { heads: 1, ..Attention::default() };
        let (_, weights) = g.attention(Qkv::Separate { q: tokens, k: tokens, v: tokens }, options)?;
        g.output("weights", weights)?;
        let x = g.constant(&[0.0; 24], [2, 1, 12])?;
        let (weight, bias) = (g.constant(&[0.0; 36], [12, 3])?, g.constant(&[0.0; 12], [12])?);
        let lstm = g.lstm(x, weight, bias, w, w)?;
        g.output("cell", lstm.last_cell)?;
        // With zeros the state halves: exp(softplus(0) a) = 1/2 for a = -1.
        let (x, a) = (g.constant(&[0.0; 6], [1, 2, 3])?, g.constant(&[-1.0; 3], [1, 3])?);
        let (bc, d) = (g.constant(&[0.0; 4], [1, 2, 2])?, g.constant(&[0.0; 3], [3])?);
        let state = g.constant(&[4.0, 8.0, 12.0], [1, 1, 3])?;
        let scan = SelectiveScan { u: x, delta: x, a, bc, d, z: x, state };
        let scanned = g.selective_scan(scan)?;
        g.output("state", scanned.state)?;
        let window = g.causal_conv1d_silu(tokens, w, d, state)?.window;
        g.output("window", window)?;
        let (gates, _) = g.route_top_k(w, 1)?;
        g.output("gates", gates)
    });
    assert_eq!(p.get::<f64>("sum").unwrap(), [2.0, 4.0, 6.0, 20.0, 40.0, 60.0]);
    assert_eq!(p.get::<f64>("cell").unwrap(), [0.5, 1.0, 1.5, 5.0, 10.0, 15.0]);
    assert_eq!(p.get::<f64>("state").unwrap(), [1.0, 2.0, 3.0]);
    assert_eq!(p.get::<f64>("window").unwrap(), [10.0, 20.0, 30.0]);
    assert_eq!(p.get::<f64>("gates").unwrap(), [1.0, 1.0]);
    assert!((p.get::<f64>("weights").unwrap().iter().sum::<f64>() - 2.0).abs() < 1e-12);
}

#[test]
fn an_lstm_keeps_for_its_gradient_only_what_a_gradient_reads() {
    let arena = |differentiate: bool| {
        let mut g = Graph::new();
        let (batch, steps, width) = (2, 50, 64);
        let x = g.param("x", F32, [batch, steps, 4 * width]).unwrap();
        let w = g.param("w", F32, [4 * width, width]).unwrap();
        let b = g.param("b", F32, [4 * width]).unwrap();
        let [hidden, cell] = ["h", "c"].map(|name| g.state(name, F32, [batch, width]).unwrap());
        let lstm = g.lstm(x, w, b, hidden, cell).unwrap();
        g.update(hidden, lstm.last_hidden).unwrap();
        g.update(cell, lstm.last_cell).unwrap();
        if differentiate {
            let loss = g.sum(lstm.hidden).unwrap();
            let grad = g.gradients(loss, &[x]).unwrap()[0].unwrap();
            g.output("grad", grad).unwrap();
        }
        program(&g, &Store::new()).arena_bytes()
    };
    // Scratch for a product and at most two states; the states are updated in place.
    assert_eq!(arena(false), 4 * 6 * 2 * 64);
    // The gates, whose place dz takes, and the cell states.
    assert!(arena(true) > 4 * 5 * 2 * 50 * 64);
}

#[test]
fn a_sum_that_the_graph_has_is_not_computed_again() {
    let mut g = Graph::new();
    let x = g.input("x", F64, [2, 3, 4]).unwrap();
    let flat = |g: &mut Graph| g.reshape(x, [6, 4]).unwrap();
    let [one, two] = [flat(&mut g), flat(&mut g)];
    let columns = g.sum_to(one, [4]).unwrap();
    assert_eq!(g.sum_to(two, [4]).unwrap(), columns);
    // Another shape of the sum or of what is summed, or other numbers, are another sum.
    let other = g.scale(x, 2.0).unwrap();
    for (from, shape) in [(one, vec![6, 1]), (x, vec![4]), (x, vec![3, 4]), (other, vec![4])] {
        assert_ne!(g.sum_to(from, shape).unwrap(), columns);
    }
}

#[test]
fn slots_out_of_range_are_errors_in_gradients_too() {
    let mut g = Graph::new();
    let memory = g.param("memory", F64, [2, 3, 1]).unwrap();
    let slots = g.input("slots", DType::I32, [2, 1]).unwrap();
    let read = g.gather_slots(memory, slots).unwrap();
    let loss = g.sum(read).unwrap();
    let grad = g.gradients(loss, &[memory]).unwrap()[0].unwrap();
    g.output("grad", grad).unwrap();
    let mut p = program(&g, &Store::new());
    p.set("slots", &[4i32, 0]).unwrap();
    assert_eq!(p.run().unwrap_err().to_string(), "gather_slots_grad: slot 4 is outside 0..3");
    p.set("slots", &[2i32, 0]).unwrap();
    p.run().unwrap();
    assert_eq!(p.get::<f64>("grad").unwrap(), [0.0, 0.0, 1.0, 1.0, 0.0, 0.0]);
}

#[test]
fn gradients_through_attention_weights_are_refused() {
    let mut g = Graph::new();
    let x = g.param("x", F64, [1, 2, 4]).unwrap();
    let options = Attention { heads: 1, ..Attention::default() };
    let (y, weights) = g.attention(Qkv::Separate { q: x, k: x, v: x }, options).unwrap();
    let (a, b) = (g.sum(y).unwrap(), g.sum(weights).unwrap());
    let loss = g.add(a, b).unwrap();
    assert!(matches!(g.gradients(loss, &[x]), Err(Error::NoGradient { op: "attention weights", .. })));
}
