//! The graph builder: typed values, named parameters, inputs, states and outputs.
//!
//! A graph is in single-assignment form and in execution order: ops run in the order in which they were
//! added. Ops are added by the builder methods in `ops/`; each checks its operands at once and reports what
//! is wrong by name.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::error::{Error, Result, nearest};
use crate::op::Op;
use crate::types::{DType, Element, TensorType};

/// A tensor inside one [`Graph`]. Copies are cheap; a value of another graph is refused with an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Value {
    pub(crate) id: u32,
    graph: u32,
}

/// Where a value comes from.
#[derive(Debug, Clone)]
pub(crate) enum Origin {
    Input,
    Param,
    State,
    Constant(Arc<[u8]>),
    Node(usize),
}

#[derive(Debug, Clone)]
pub(crate) struct ValueInfo {
    pub ty: TensorType,
    pub origin: Origin,
    pub name: Option<String>,
}

#[derive(Debug, Clone)]
pub(crate) struct Node {
    pub op: Arc<dyn Op>,
    pub inputs: Vec<Value>,
    pub outputs: Vec<Value>,
}

/// A computation: built once, then compiled into a [`Program`](crate::Program).
///
/// ```
/// use elmur_engine::{Activation, DType, Graph, Pool, Program, Store};
///
/// // y = relu(x wᵀ + b), its mean, and the gradient of that mean with respect to w.
/// let mut g = Graph::new();
/// let x = g.input("x", DType::F32, [2, 3])?;
/// let w = g.param("w", DType::F32, [4, 3])?;
/// let b = g.param("b", DType::F32, [4])?;
/// let y = g.linear(x, w, Some(b), Activation::Relu)?;
/// let loss = g.mean(y)?;
/// let dw = g.gradients(loss, &[w])?[0].expect("w reaches the loss");
/// g.output("loss", loss)?;
/// g.output("dw", dw)?;
///
/// let store = Store::new();
/// store.declare(&g)?;
/// store.set("w", &[0.5f32; 12])?;
/// let mut program = Program::new(&g, &Pool::new(1), &[&store])?;
/// program.set("x", &[1.0f32, 2.0, 3.0, 0.0, 1.0, 0.0])?;
/// program.run()?;
/// assert_eq!(program.get::<f32>("loss")?, [1.75]);
/// # Ok::<(), elmur_engine::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Graph {
    id: u32,
    pub(crate) values: Vec<ValueInfo>,
    pub(crate) nodes: Vec<Node>,
    names: BTreeMap<String, Value>,
    pub(crate) outputs: Vec<(String, Value)>,
    /// (state or parameter, the value that it takes after the run).
    pub(crate) updates: Vec<(Value, Value)>,
    pub(crate) streams: u32,
}

impl Default for Graph {
    fn default() -> Self {
        Self::new()
    }
}

impl Graph {
    /// An empty graph.
    pub fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        Self {
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            values: Vec::new(),
            nodes: Vec::new(),
            names: BTreeMap::new(),
            outputs: Vec::new(),
            updates: Vec::new(),
            streams: 0,
        }
    }

    /// A tensor that the caller provides before each run.
    pub fn input(&mut self, name: &str, dtype: DType, shape: impl Into<Vec<usize>>) -> Result<Value> {
        self.named("input", name, TensorType::new(dtype, shape), Origin::Input)
    }

    /// A trainable tensor, kept in a [`Store`](crate::Store).
    pub fn param(&mut self, name: &str, dtype: DType, shape: impl Into<Vec<usize>>) -> Result<Value> {
        self.named("param", name, TensorType::new(dtype, shape), Origin::Param)
    }

    /// A tensor that persists between runs (memory, caches, moments, counters), kept in a
    /// [`Store`](crate::Store).
    pub fn state(&mut self, name: &str, dtype: DType, shape: impl Into<Vec<usize>>) -> Result<Value> {
        self.named("state", name, TensorType::new(dtype, shape), Origin::State)
    }

    /// A tensor whose contents never change.
    pub fn constant<T: Element>(&mut self, data: &[T], shape: impl Into<Vec<usize>>) -> Result<Value> {
        let ty = TensorType::new(T::DTYPE, shape);
        ty.check("constant")?;
        if ty.len() != data.len() {
            let expected = format!("{} elements for {ty}", ty.len());
            return Err(Error::Op { op: "constant", expected, got: data.len().to_string() });
        }
        // SAFETY: elements are plain numbers without padding.
        let bytes = unsafe { std::slice::from_raw_parts(data.as_ptr().cast::<u8>(), size_of_val(data)) };
        Ok(self.add_value(ty, Origin::Constant(bytes.into()), None))
    }

    /// A constant scalar of the given element type.
    pub fn scalar(&mut self, dtype: DType, x: f64) -> Result<Value> {
        match dtype {
            DType::F32 => self.constant(&[x as f32], []),
            DType::F64 => self.constant(&[x], []),
            DType::I32 => self.constant(&[x as i32], []),
            DType::I64 => self.constant(&[x as i64], []),
            DType::Bool => self.constant(&[x != 0.0], []),
            DType::U8 => self.constant(&[x as u8], []),
        }
    }

    /// The number that a constant float scalar holds.
    pub(crate) fn constant_scalar(&self, value: Value) -> Option<f64> {
        let info = &self.values[value.id as usize];
        match (&info.origin, info.ty.dtype) {
            (Origin::Constant(bytes), DType::F32) if info.ty.shape.is_empty() => {
                Some(f64::from(f32::from_ne_bytes(bytes[..].try_into().ok()?)))
            }
            (Origin::Constant(bytes), DType::F64) if info.ty.shape.is_empty() => {
                Some(f64::from_ne_bytes(bytes[..].try_into().ok()?))
            }
            _ => None,
        }
    }

    /// Makes `value` readable after a run under `name`. A parameter or state is read as it was before the
    /// run.
    pub fn output(&mut self, name: &str, value: Value) -> Result<()> {
        self.check("output", value)?;
        if self.outputs.iter().any(|(n, _)| n == name) {
            return Err(Error::DuplicateName { name: name.to_owned(), kind: "output" });
        }
        let value = if self.is_stored(value) { self.copy(value)? } else { value };
        self.outputs.push((name.to_owned(), value));
        Ok(())
    }

    /// At the end of a run, `target` (a parameter or state) takes the value `new`. Reading `target` inside
    /// the graph always gives the value from before the run.
    pub fn update(&mut self, target: Value, new: Value) -> Result<()> {
        let (old_ty, new_ty) = (self.ty(target)?.clone(), self.ty(new)?.clone());
        let origin = &self.values[target.id as usize].origin;
        let fail =
            |expected: &str, got: String| Err(Error::Op { op: "update", expected: expected.to_owned(), got });
        if !matches!(origin, Origin::Param | Origin::State) {
            return fail("a parameter or state as target", "another kind of value".to_owned());
        }
        if old_ty != new_ty {
            return fail(&format!("{old_ty}"), new_ty.to_string());
        }
        if self.updates.iter().any(|(t, _)| *t == target) {
            return fail(
                "one update per parameter or state",
                format!("a second for `{}`", self.describe(target)),
            );
        }
        // A state that becomes the value of another state must be read before it is overwritten: copy it
        // first.
        let new = if self.is_stored(new) { self.copy(new)? } else { new };
        self.updates.push((target, new));
        Ok(())
    }

    /// Element type and shape of a value.
    pub fn ty(&self, value: Value) -> Result<&TensorType> {
        self.check("ty", value)?;
        Ok(&self.values[value.id as usize].ty)
    }

    /// Shape of a value.
    pub fn shape(&self, value: Value) -> Result<&[usize]> {
        Ok(&self.ty(value)?.shape)
    }

    /// Names and values of all parameters, by name.
    pub fn params(&self) -> impl Iterator<Item = (&str, Value)> {
        self.named_values(|origin| matches!(origin, Origin::Param))
    }

    /// Names and values of all inputs, by name.
    pub fn inputs(&self) -> impl Iterator<Item = (&str, Value)> {
        self.named_values(|origin| matches!(origin, Origin::Input))
    }

    /// Names and values of all states, by name.
    pub fn states(&self) -> impl Iterator<Item = (&str, Value)> {
        self.named_values(|origin| matches!(origin, Origin::State))
    }

    /// The parameter, input or state of this name, if there is one.
    pub fn find(&self, name: &str) -> Option<Value> {
        self.names.get(name).copied()
    }

    /// The parameter, input or state of this name, or an error that suggests the nearest.
    pub fn value(&self, name: &str) -> Result<Value> {
        self.find(name).ok_or_else(|| Error::UnknownName {
            kind: "parameter, input or state",
            name: name.to_owned(),
            nearest: nearest(name, self.names.keys().map(String::as_str)),
        })
    }

    /// Number of ops, dead ones included.
    pub fn len(&self) -> usize {
        self.nodes.len()
    }

    /// Whether there are no ops.
    pub fn is_empty(&self) -> bool {
        self.nodes.is_empty()
    }

    fn named_values(&self, keep: impl Fn(&Origin) -> bool) -> impl Iterator<Item = (&str, Value)> {
        self.names
            .iter()
            .filter(move |(_, v)| keep(&self.values[v.id as usize].origin))
            .map(|(n, v)| (&**n, *v))
    }

    fn named(&mut self, op: &'static str, name: &str, ty: TensorType, origin: Origin) -> Result<Value> {
        ty.check(op)?;
        if let Some(existing) = self.names.get(name) {
            let kind = match self.values[existing.id as usize].origin {
                Origin::Param => "parameter",
                Origin::Input => "input",
                _ => "state",
            };
            return Err(Error::DuplicateName { name: name.to_owned(), kind });
        }
        let value = self.add_value(ty, origin, Some(name.to_owned()));
        self.names.insert(name.to_owned(), value);
        Ok(value)
    }

    fn add_value(&mut self, ty: TensorType, origin: Origin, name: Option<String>) -> Value {
        let id = self.values.len() as u32;
        self.values.push(ValueInfo { ty, origin, name });
        Value { id, graph: self.id }
    }

    pub(crate) fn check(&self, op: &'static str, value: Value) -> Result<()> {
        let known = value.graph == self.id && (value.id as usize) < self.values.len();
        if known { Ok(()) } else { Err(Error::ForeignValue { op }) }
    }

    /// Adds an op; returns its outputs.
    pub(crate) fn push(&mut self, op: impl Op + 'static, inputs: &[Value]) -> Result<Vec<Value>> {
        let mut types = Vec::with_capacity(inputs.len());
        for &input in inputs {
            self.check(op.name(), input)?;
            types.push(self.values[input.id as usize].ty.clone());
        }
        let output_types = op.infer(&types)?;
        for ty in &output_types {
            ty.check(op.name())?;
        }
        let node = self.nodes.len();
        let outputs: Vec<Value> =
            output_types.into_iter().map(|ty| self.add_value(ty, Origin::Node(node), None)).collect();
        self.nodes.push(Node { op: Arc::new(op), inputs: inputs.to_vec(), outputs: outputs.clone() });
        Ok(outputs)
    }

    /// Adds an op; returns its first output.
    pub(crate) fn push1(&mut self, op: impl Op + 'static, inputs: &[Value]) -> Result<Value> {
        Ok(self.push(op, inputs)?[0])
    }

    /// The value with this number.
    pub(crate) fn value_at(&self, id: usize) -> Value {
        Value { id: id as u32, graph: self.id }
    }

    /// The node that computes a value; none for inputs, parameters, states and constants.
    pub(crate) fn producer(&self, value: Value) -> Option<&Node> {
        match self.values[value.id as usize].origin {
            Origin::Node(node) => Some(&self.nodes[node]),
            _ => None,
        }
    }

    /// Whether a value is a parameter or state, or an alias of one.
    fn is_stored(&self, mut value: Value) -> bool {
        loop {
            match self.producer(value) {
                None => {
                    let origin = &self.values[value.id as usize].origin;
                    return matches!(origin, Origin::Param | Origin::State);
                }
                Some(node) => match node.inputs.first() {
                    Some(&input) if node.op.alias(std::slice::from_ref(self.ty_of(input))).is_some() => {
                        value = input;
                    }
                    _ => return false,
                },
            }
        }
    }

    pub(crate) fn ty_of(&self, value: Value) -> &TensorType {
        &self.values[value.id as usize].ty
    }

    /// A value's name or number, for messages.
    pub(crate) fn describe(&self, value: Value) -> String {
        self.values[value.id as usize].name.clone().unwrap_or_else(|| format!("#{}", value.id))
    }
}
