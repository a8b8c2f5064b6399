//! Reverse-mode differentiation as graph rewriting: the rule of every op appends the ops that compute the
//! gradients of its inputs.

use std::sync::Arc;

use crate::error::{Error, Result};
use crate::graph::{Graph, Origin, Value};
use crate::types::DType;

/// What the backward rule of an op is given.
pub(crate) struct Backward<'a> {
    pub graph: &'a mut Graph,
    pub inputs: Vec<Value>,
    pub outputs: Vec<Value>,
    grads: Vec<Option<Value>>,
    needs: Vec<bool>,
    results: Vec<Option<Value>>,
}

impl Backward<'_> {
    /// Gradient of the loss with respect to output `output`; none if the loss does not depend on it.
    pub(crate) fn grad(&self, output: usize) -> Option<Value> {
        self.grads[output]
    }

    /// Whether the gradient of input `input` is wanted.
    pub(crate) fn needs(&self, input: usize) -> bool {
        self.needs[input]
    }

    /// Position of the first input whose gradient is wanted.
    pub(crate) fn first_needed(&self) -> Option<usize> {
        self.needs.iter().position(|n| *n)
    }

    /// Reports the gradient of input `input`.
    pub(crate) fn set(&mut self, input: usize, grad: Value) {
        self.results[input] = Some(grad);
    }
}

impl Graph {
    /// Gradients of the scalar `loss` with respect to each value of `wrt`; `None` for a value that the loss
    /// does not depend on.
    ///
    /// Only ops that these gradients need are appended, and they are ops of the graph like any other.
    pub fn gradients(&mut self, loss: Value, wrt: &[Value]) -> Result<Vec<Option<Value>>> {
        const OP: &str = "gradients";
        let ty = self.ty(loss)?.clone();
        if !ty.dtype.is_float() || ty.len() != 1 {
            return Err(Error::Op {
                op: OP,
                expected: "a scalar loss of f32 or f64".into(),
                got: ty.to_string(),
            });
        }
        let mut needs = vec![false; self.values.len()];
        for &value in wrt {
            self.check(OP, value)?;
            if !self.ty_of(value).dtype.is_float() {
                let got = format!("`{}` of {}", self.describe(value), self.ty_of(value));
                return Err(Error::Op { op: OP, expected: "float values to differentiate by".into(), got });
            }
            needs[value.id as usize] = true;
        }
        for node in &self.nodes {
            if !node.op.stops_gradient() && node.inputs.iter().any(|i| needs[i.id as usize]) {
                for output in &node.outputs {
                    needs[output.id as usize] |= self.ty_of(*output).dtype.is_float();
                }
            }
        }

        let mut grads: Vec<Option<Value>> = vec![None; self.values.len()];
        // Further terms of the gradients of small values of `wrt` that no node computes: nothing needs these
        // gradients before the end, where all are added up together.
        let mut terms: Vec<Vec<Value>> = vec![Vec::new(); self.values.len()];
        let one = self.scalar(ty.dtype, 1.0)?;
        grads[loss.id as usize] = Some(self.reshape(one, ty.shape)?);
        let Origin::Node(last) = self.values[loss.id as usize].origin else {
            return Ok(wrt.iter().map(|v| grads[v.id as usize]).collect());
        };
        for index in (0..=last).rev() {
            let node = &self.nodes[index];
            let output_grads: Vec<_> = node.outputs.iter().map(|o| grads[o.id as usize]).collect();
            let input_needs: Vec<_> = node.inputs.iter().map(|i| needs[i.id as usize]).collect();
            if node.op.stops_gradient()
                || output_grads.iter().all(Option::is_none)
                || !input_needs.contains(&true)
            {
                continue;
            }
            let (op, inputs, outputs) = (Arc::clone(&node.op), node.inputs.clone(), node.outputs.clone());
            let mut backward = Backward {
                results: vec![None; inputs.len()],
                graph: self,
                inputs: inputs.clone(),
                outputs,
                grads: output_grads,
                needs: input_needs.clone(),
            };
            let before = backward.graph.nodes.len();
            op.backward(&mut backward)?;
            let results = backward.results;
            for ((input, grad), needed) in inputs.into_iter().zip(&results).zip(input_needs) {
                if let (Some(grad), true) = (*grad, needed) {
                    debug_assert_eq!(self.ty_of(grad), self.ty_of(input));
                    let slot = input.id as usize;
                    // A gradient that was forwarded unchanged, or assigned to two inputs, is shared: nothing
                    // may be added into its buffer.
                    let is_own = results.iter().flatten().filter(|g| **g == grad).count() == 1;
                    let since = if is_own { before } else { usize::MAX };
                    let waits = self.is_small_leaf(input) && wrt.contains(&input);
                    match grads[slot] {
                        None => grads[slot] = Some(grad),
                        Some(sum) if waits => {
                            let adds = terms[slot].is_empty();
                            match if adds { self.accumulated(sum, grad, since) } else { None } {
                                Some(sum) => grads[slot] = Some(sum),
                                None => terms[slot].push(grad),
                            }
                        }
                        Some(sum) => grads[slot] = Some(self.accumulate_since(sum, grad, since)?),
                    }
                }
            }
        }
        self.add_terms(&mut grads, terms)?;
        Ok(wrt.iter().map(|v| grads[v.id as usize]).collect())
    }

    /// Whether a value is a small one that no node computes.
    fn is_small_leaf(&self, value: Value) -> bool {
        const SMALL: usize = 1 << 14;
        self.producer(value).is_none() && self.ty_of(value).len() <= SMALL
    }

    /// Adds the further terms to the gradients that have some.
    fn add_terms(&mut self, grads: &mut [Option<Value>], terms: Vec<Vec<Value>>) -> Result<()> {
        for dtype in [DType::F32, DType::F64] {
            let (mut slots, mut lists) = (Vec::new(), Vec::new());
            for (slot, terms) in terms.iter().enumerate() {
                if let (Some(first), true) = (grads[slot], !terms.is_empty())
                    && self.ty_of(first).dtype == dtype
                {
                    slots.push(slot);
                    lists.push([&[first], &terms[..]].concat());
                }
            }
            if !slots.is_empty() {
                let sums = self.add_each(&lists)?;
                slots.into_iter().zip(sums).for_each(|(slot, sum)| grads[slot] = Some(sum));
            }
        }
        Ok(())
    }

    /// `sum + x`, for an `x` that was computed after `sum` and that nothing else uses. Where the op that
    /// computes `x` can add into a buffer, the addition costs nothing.
    pub fn accumulate(&mut self, sum: Value, x: Value) -> Result<Value> {
        self.check("accumulate", sum)?;
        self.check("accumulate", x)?;
        self.accumulate_since(sum, x, 0)
    }

    /// `sum + x`. The node that computes `x` is made to add into `sum` if its number is at least `since`, its
    /// op can do so, nothing else uses its result, and it comes after `sum`.
    fn accumulate_since(&mut self, sum: Value, x: Value, since: usize) -> Result<Value> {
        match self.accumulated(sum, x, since) {
            Some(total) => Ok(total),
            None => self.add(sum, x),
        }
    }

    /// `sum + x` where the node that computes `x` can be made to add into `sum`.
    fn accumulated(&mut self, sum: Value, x: Value, since: usize) -> Option<Value> {
        let node = self.adder(sum, x, since)?;
        let op = self.nodes[node].op.accumulating()?;
        self.nodes[node].op = op;
        self.nodes[node].inputs.push(sum);
        Some(x)
    }

    /// The node that can add `sum` to `x` while it computes `x`. Reshapes between that node and `x` are
    /// allowed.
    fn adder(&self, sum: Value, x: Value, since: usize) -> Option<usize> {
        if self.ty_of(sum) != self.ty_of(x) {
            return None;
        }
        let mut value = x;
        let mut only_use = usize::MAX;
        loop {
            let Origin::Node(node) = self.values[value.id as usize].origin else { return None };
            let uses = |n: &&usize| self.nodes[**n].inputs.contains(&value);
            let later: Vec<usize> = (node + 1..self.nodes.len()).collect();
            let used_once = later.iter().filter(uses).all(|n| *n == only_use);
            let shared = self.outputs.iter().any(|(_, v)| *v == value)
                || self.updates.iter().any(|(_, v)| *v == value);
            if node < since || !used_once || shared {
                return None;
            }
            let types: Vec<_> = self.nodes[node].inputs.iter().map(|v| self.ty_of(*v).clone()).collect();
            let whole = types.first().is_some_and(|ty| ty.len() == self.ty_of(value).len());
            if self.nodes[node].op.alias(&types) == Some(0) && whole {
                (value, only_use) = (self.nodes[node].inputs[0], node);
                continue;
            }
            let before = match self.values[sum.id as usize].origin {
                Origin::Node(first) => first < node,
                _ => true,
            };
            let first = self.nodes[node].outputs[0] == value;
            return (before && first && self.nodes[node].op.accumulating().is_some()).then_some(node);
        }
    }
}
