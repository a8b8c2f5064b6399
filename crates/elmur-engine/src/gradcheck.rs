//! Comparison of gradients with central differences, in f64.

use crate::cpu::pool::Pool;
use crate::error::Result;
use crate::graph::{Graph, Value};
use crate::program::Program;
use crate::rng::Stream;
use crate::store::Store;
use crate::types::DType;

/// The worst disagreement that [`check`] found.
#[derive(Debug, Clone)]
pub struct Worst {
    /// |analytic - numeric| / max(1, |analytic|, |numeric|).
    pub error: f64,
    /// Parameter and element with the largest error.
    pub at: (String, usize),
    /// The gradient of that element as the graph computes it.
    pub analytic: f64,
    /// The central difference of that element.
    pub numeric: f64,
}

/// Compares the gradients of the scalar `loss` with respect to all f64 parameters of `graph` with central
/// differences of width 2 `step`, at most `most` elements of each parameter. The store must hold the
/// parameters and states.
///
/// ```
/// use elmur_engine::{DType, Graph, Store, gradcheck};
///
/// let mut g = Graph::new();
/// let x = g.param("x", DType::F64, [3, 5])?;
/// let y = g.softmax(x)?;
/// let y = g.mul(y, y)?;
/// let loss = g.sum(y)?;
/// let store = Store::new();
/// store.declare(&g)?;
/// gradcheck::randomize(&g, &store, 7, 1.0)?;
/// assert!(gradcheck::check(&mut g, loss, &store, 1e-5, 100)?.error < 1e-8);
/// # Ok::<(), elmur_engine::Error>(())
/// ```
pub fn check(graph: &mut Graph, loss: Value, store: &Store, step: f64, most: usize) -> Result<Worst> {
    let params: Vec<(String, Value)> = graph
        .params()
        .filter(|(_, v)| graph.ty_of(*v).dtype == DType::F64)
        .map(|(name, value)| (name.to_owned(), value))
        .collect();
    let values: Vec<Value> = params.iter().map(|(_, v)| *v).collect();
    let grads = graph.gradients(loss, &values)?;
    graph.output("gradcheck.loss", loss)?;
    for ((name, _), grad) in params.iter().zip(&grads) {
        if let Some(grad) = grad {
            graph.output(&format!("gradcheck.{name}"), *grad)?;
        }
    }
    let mut program = Program::new(graph, &Pool::new(1), &[store])?;
    // Updates (generators, counters) must not make two evaluations differ.
    let before = store.duplicate()?;
    let states: Vec<String> = graph.states().map(|(name, _)| name.to_owned()).collect();
    program.run()?;
    let mut analytic = Vec::new();
    for ((name, value), grad) in params.iter().zip(&grads) {
        analytic.push(match grad {
            Some(_) => program.get::<f64>(&format!("gradcheck.{name}"))?.to_vec(),
            None => vec![0.0; graph.ty_of(*value).len()],
        });
    }
    let mut evaluate = |name: &str, data: &[f64]| -> Result<f64> {
        for state in &states {
            copy(&before, store, state)?;
        }
        store.set(name, data)?;
        program.run()?;
        Ok(program.get::<f64>("gradcheck.loss")?[0])
    };
    let mut worst = Worst { error: 0.0, at: (String::new(), 0), analytic: 0.0, numeric: 0.0 };
    for ((name, _), analytic) in params.iter().zip(&analytic) {
        let mut data = before.get::<f64>(name)?;
        let stride = data.len().div_ceil(most.max(1)).max(1);
        for i in (0..data.len()).step_by(stride) {
            let x = data[i];
            data[i] = x + step;
            let above = evaluate(name, &data)?;
            data[i] = x - step;
            let below = evaluate(name, &data)?;
            data[i] = x;
            let numeric = (above - below) / (2.0 * step);
            let error = (analytic[i] - numeric).abs() / analytic[i].abs().max(numeric.abs()).max(1.0);
            if error.is_nan() || error > worst.error {
                worst = Worst { error, at: (name.clone(), i), analytic: analytic[i], numeric };
                if error.is_nan() {
                    return Ok(worst);
                }
            }
        }
        store.set(name, &data)?;
    }
    for state in &states {
        copy(&before, store, state)?;
    }
    Ok(worst)
}

/// Fills every f64 parameter of `graph` with normal numbers.
pub fn randomize(graph: &Graph, store: &Store, seed: u64, std: f64) -> Result<()> {
    for (index, (name, value)) in graph.params().enumerate() {
        let ty = graph.ty(value)?;
        if ty.dtype == DType::F64 {
            let mut data = vec![0.0; ty.len()];
            Stream::new(seed, 0, index as u32).fill_normal(&mut data, std);
            store.set(name, &data)?;
        }
    }
    Ok(())
}

fn copy(from: &Store, to: &Store, name: &str) -> Result<()> {
    match from.ty(name)?.dtype {
        DType::F32 => to.set(name, &from.get::<f32>(name)?),
        DType::F64 => to.set(name, &from.get::<f64>(name)?),
        DType::I32 => to.set(name, &from.get::<i32>(name)?),
        DType::I64 => to.set(name, &from.get::<i64>(name)?),
        DType::Bool => to.set(name, &from.get::<bool>(name)?),
        DType::U8 => to.set(name, &from.get::<u8>(name)?),
    }
}
