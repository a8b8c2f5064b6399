//! The CUDA executor: a whole training program against the CPU, memory that comes back, errors that say what is wrong.

#![cfg(feature = "cuda")]
#![allow(clippy::unwrap_used, clippy::panic)]

mod common;
mod gpu;

use elmur_engine::{DType, Gpu, Graph, Pool, Precision, Program, Store};

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

#[test]
fn training_follows_the_cpu() {
    for (precision, tolerance) in [(Precision::F32, 1e-3), (Precision::Tf32, 5e-3), (Precision::Bf16, 1e-1)] {
        let Some(gpu) = gpu::gpu(precision) else { return };
        let (cpu, cuda) = (train(&Pool::new(2)), train(gpu));
        for (step, (a, b)) in cpu.iter().zip(&cuda).enumerate() {
            let error = gpu::difference(a, b);
            assert!(error < tolerance, "step {step} in {}: {a:?} and {b:?}", precision.name());
        }
    }
}

/// Small products are as good as f32 in every precision; these are large enough to be rounded.
#[test]
fn large_products_agree_with_the_cpu() {
    for (m, n, k) in [(256, 128, 512), (303, 259, 521), (2053, 1, 4099)] {
        gpu::compare(&format!("product of {m} x {n} x {k}"), 1, || {
            let mut g = Graph::new();
            let x = g.param("x", DType::F32, [m, k])?;
            let w = g.param("w", DType::F32, [n, k])?;
            let w = g.scale(w, 1.0 / (k as f64).sqrt())?;
            let y = g.linear(x, w, None, elmur_engine::Activation::Identity)?;
            let squares = g.mul(y, y)?;
            let loss = g.sum(squares)?;
            Ok((g, vec![y], loss))
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
        let y = g.linear(x, w, None, elmur_engine::Activation::Gelu).unwrap();
        let y = g.softmax(y).unwrap();
        g.output("y", y).unwrap();
        let store = Store::on(gpu);
        store.declare(&g).unwrap();
        Program::new(&g, gpu, &[&store]).unwrap().run().unwrap();
    };
    (0..10).for_each(|_| build());
    gpu.synchronize().unwrap();
    let (before, _) = gpu.memory().unwrap();
    (0..1000).for_each(|_| build());
    gpu.synchronize().unwrap();
    let (after, _) = gpu.memory().unwrap();
    // Other tests of this process allocate at the same time; a leak would be a thousand programs large.
    assert!(before.saturating_sub(after) < 64 << 20, "{before} bytes free before, {after} after");
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
    assert!(error.contains("`w` elsewhere"), "{error}");

    let huge = Store::on(gpu);
    let error =
        huge.insert("x", elmur_engine::TensorType::new(DType::F32, [1 << 37])).unwrap_err().to_string();
    assert!(error.contains("549755813888 bytes"), "{error}");

    let error = Gpu::open(99, Precision::F32).unwrap_err().to_string();
    assert!(error.contains("cuda:99"), "{error}");
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
