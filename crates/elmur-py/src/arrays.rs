//! Numbers in and out: values of a space as NumPy arrays.
//!
//! On the way in, whatever NumPy can make an array of is taken: arrays of the right type and order are read where they
//! lie, others are converted once. On the way out, every array is fresh and belongs to the caller. A tuple of spaces is a
//! tuple of arrays; dictionaries are taken in the order of their sorted keys.

use elmur::base::{Kind, Leaf, Row, Space, Values, Widths};
use elmur::data::Column;
use numpy::{
    PyArray1, PyArrayDescrMethods, PyArrayDyn, PyArrayMethods, PyReadonlyArrayDyn, PyUntypedArray,
    PyUntypedArrayMethods,
};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyMapping, PyTuple};

use crate::refuse;

/// How values of a space look in Python.
#[derive(Debug, Clone)]
pub struct Layout {
    leaves: Vec<LeafLayout>,
    tree: Tree,
    widths: Widths,
}

#[derive(Debug, Clone)]
struct LeafLayout {
    kind: Kind,
    /// Axes of one value; none for a single integer.
    shape: Vec<usize>,
    /// Numbers of one value.
    len: usize,
    /// First of the leaf's numbers among those of its kind, and how many numbers of the kind a row has.
    at: usize,
    width: usize,
}

#[derive(Debug, Clone)]
enum Tree {
    Leaf(usize),
    Tuple(Vec<Tree>),
}

/// Values that came from Python.
#[derive(Debug)]
pub struct Given<'py> {
    /// Number of values.
    pub rows: usize,
    /// Whether there is an axis of rows, or a single value without one.
    pub batched: bool,
    floats: Numbers<'py, f32>,
    ints: Vec<i32>,
    bytes: Numbers<'py, u8>,
}

/// Numbers where the caller has them, or a copy.
#[derive(Debug)]
enum Numbers<'py, T: numpy::Element> {
    Borrowed(PyReadonlyArrayDyn<'py, T>),
    Own(Vec<T>),
}

impl<T: numpy::Element> Numbers<'_, T> {
    fn slice(&self) -> &[T] {
        match self {
            // Arrays are made contiguous before they are kept.
            Numbers::Borrowed(array) => array.as_slice().unwrap_or_default(),
            Numbers::Own(numbers) => numbers,
        }
    }
}

impl Given<'_> {
    /// The numbers of all rows.
    pub fn values(&self) -> Values<'_> {
        Values { floats: self.floats.slice(), ints: &self.ints, bytes: self.bytes.slice() }
    }
}

/// The numbers of one leaf on their way to Python, [rows, leaf length].
#[derive(Debug)]
pub enum Leaving {
    Floats(Vec<f32>),
    Ints(Vec<i64>),
    Bytes(Vec<u8>),
}

impl Layout {
    /// How values of a space look.
    pub fn of(space: &Space) -> Self {
        let widths = space.widths();
        let mut layout = Self { leaves: Vec::new(), tree: Tree::Tuple(Vec::new()), widths };
        let mut next = Widths::default();
        layout.tree = layout.add(space, &mut next);
        layout
    }

    fn add(&mut self, space: &Space, next: &mut Widths) -> Tree {
        if let Space::Tuple { parts } = space {
            return Tree::Tuple(parts.iter().map(|part| self.add(part, next)).collect());
        }
        for leaf in space.leaves() {
            let shape = match leaf {
                Leaf::Ints(_) if matches!(space, Space::Discrete { .. }) => Vec::new(),
                Leaf::Ints(sizes) => vec![sizes.len()],
                Leaf::Floats { shape, .. } | Leaf::Bytes { shape } => shape.to_vec(),
            };
            let (at, width) = match leaf.kind() {
                Kind::Floats => (&mut next.floats, self.widths.floats),
                Kind::Ints => (&mut next.ints, self.widths.ints),
                Kind::Bytes => (&mut next.bytes, self.widths.bytes),
            };
            self.leaves.push(LeafLayout { kind: leaf.kind(), shape, len: leaf.len(), at: *at, width });
            *at += leaf.len();
        }
        Tree::Leaf(self.leaves.len() - 1)
    }

    /// Reads `rows` values, or as many as there are. One row may also come without the axis of rows.
    pub fn read<'py>(
        &self,
        what: &str,
        object: &Bound<'py, PyAny>,
        rows: Option<usize>,
    ) -> PyResult<Given<'py>> {
        let mut given = Given {
            rows: rows.unwrap_or(1),
            batched: true,
            floats: Numbers::Own(Vec::new()),
            ints: Vec::new(),
            bytes: Numbers::Own(Vec::new()),
        };
        let (mut rows, mut copied) = (rows, Row::default());
        for (i, (leaf, object)) in self.leaves.iter().zip(self.flatten(what, object)?).enumerate() {
            let what = self.name(what, i);
            let (array, count, batched) = leaf.shaped(&what, &object, rows)?;
            if i == 0 {
                (given.rows, given.batched, rows) = (count, batched, Some(count));
                copied = Row::zeros(self.widths, count);
            }
            let alone = leaf.len == leaf.width;
            match leaf.kind {
                Kind::Floats => match floats(&what, &array)? {
                    array if alone => given.floats = Numbers::Borrowed(array),
                    array => leaf.spread(array.as_slice()?, &mut copied.floats),
                },
                Kind::Bytes => match bytes(&what, &array)? {
                    array if alone => given.bytes = Numbers::Borrowed(array),
                    array => leaf.spread(array.as_slice()?, &mut copied.bytes),
                },
                Kind::Ints => match ints(&what, &array)? {
                    numbers if alone => given.ints = numbers,
                    numbers => leaf.spread(&numbers, &mut copied.ints),
                },
            }
        }
        if let Numbers::Own(floats) = &mut given.floats {
            *floats = copied.floats;
        }
        if let Numbers::Own(bytes) = &mut given.bytes {
            *bytes = copied.bytes;
        }
        if given.ints.is_empty() {
            given.ints = copied.ints;
        }
        Ok(given)
    }

    /// Reads `rows` values as columns, one per leaf.
    pub fn columns(&self, what: &str, object: &Bound<'_, PyAny>, rows: usize) -> PyResult<Vec<Column>> {
        let read = |(i, (leaf, object)): (usize, (&LeafLayout, Bound<'_, PyAny>))| {
            let what = self.name(what, i);
            let (array, ..) = leaf.shaped(&what, &object, Some(rows))?;
            Ok(match leaf.kind {
                Kind::Floats => Column::F32(floats(&what, &array)?.as_slice()?.to_vec()),
                Kind::Bytes => Column::U8(bytes(&what, &array)?.as_slice()?.to_vec()),
                Kind::Ints => Column::I32(ints(&what, &array)?),
            })
        };
        self.leaves.iter().zip(self.flatten(what, object)?).enumerate().map(read).collect()
    }

    /// Name of a leaf in messages.
    fn name(&self, what: &str, leaf: usize) -> String {
        if self.leaves.len() == 1 { what.to_owned() } else { format!("{what}, part {leaf}") }
    }

    /// One object per leaf.
    fn flatten<'py>(&self, what: &str, object: &Bound<'py, PyAny>) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let mut all = Vec::with_capacity(self.leaves.len());
        flatten(object, &mut all)?;
        if self.leaves.len() == 1 && all.len() != 1 && object.is_instance_of::<PyTuple>() {
            // A tuple of numbers for a vector.
            return Ok(vec![object.clone()]);
        }
        if all.len() == self.leaves.len() {
            return Ok(all);
        }
        let expected = match self.leaves.len() {
            1 => "one array".to_owned(),
            parts => format!("a tuple of {parts} arrays, or a dictionary of them"),
        };
        let got = match all.as_slice() {
            [one] => one.get_type().name()?.to_string(),
            all => format!("{} of them", all.len()),
        };
        Err(refuse(what, expected, got))
    }

    /// Copies values out, leaf by leaf.
    pub fn copy(&self, values: Values<'_>, rows: usize) -> Vec<Leaving> {
        let copy = |leaf: &LeafLayout| match leaf.kind {
            Kind::Floats => Leaving::Floats(leaf.gather(values.floats, rows, |x| x)),
            Kind::Ints => Leaving::Ints(leaf.gather(values.ints, rows, i64::from)),
            Kind::Bytes => Leaving::Bytes(leaf.gather(values.bytes, rows, |x| x)),
        };
        self.leaves.iter().map(copy).collect()
    }

    /// Columns of an episode, leaf by leaf. Bytes of a box of pixels become the numbers they mean.
    pub fn of_columns(&self, columns: Vec<Column>) -> Vec<Leaving> {
        let leaving = |(leaf, column): (&LeafLayout, Column)| match column {
            Column::F32(x) => Leaving::Floats(x),
            Column::I32(x) => Leaving::Ints(x.into_iter().map(i64::from).collect()),
            Column::U8(x) if leaf.kind == Kind::Floats => {
                Leaving::Floats(x.into_iter().map(|b| f32::from(b) / 255.0).collect())
            }
            Column::U8(x) => Leaving::Bytes(x),
        };
        self.leaves.iter().zip(columns).map(leaving).collect()
    }

    /// Arrays of values: `rows` of them, or a single value without an axis of rows.
    pub fn build<'py>(
        &self,
        py: Python<'py>,
        leaves: Vec<Leaving>,
        rows: Option<usize>,
    ) -> PyResult<Bound<'py, PyAny>> {
        self.tree.build(py, &self.arrays(py, leaves, rows)?)
    }

    /// One array per leaf: [`Layout::build`] without its tuples.
    pub fn arrays<'py>(
        &self,
        py: Python<'py>,
        leaves: Vec<Leaving>,
        rows: Option<usize>,
    ) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let mut arrays = Vec::with_capacity(leaves.len());
        for (leaf, numbers) in self.leaves.iter().zip(leaves) {
            let shape: Vec<usize> = rows.into_iter().chain(leaf.shape.iter().copied()).collect();
            arrays.push(match numbers {
                Leaving::Floats(x) => shaped(py, x, &shape)?,
                Leaving::Ints(x) => shaped(py, x, &shape)?,
                Leaving::Bytes(x) => shaped(py, x, &shape)?,
            });
        }
        Ok(arrays)
    }
}

impl Tree {
    fn build<'py>(&self, py: Python<'py>, arrays: &[Bound<'py, PyAny>]) -> PyResult<Bound<'py, PyAny>> {
        match self {
            Tree::Leaf(leaf) => Ok(arrays[*leaf].clone()),
            Tree::Tuple(parts) => {
                let parts = parts.iter().map(|part| part.build(py, arrays)).collect::<PyResult<Vec<_>>>()?;
                Ok(PyTuple::new(py, parts)?.into_any())
            }
        }
    }
}

/// A fresh array that takes over the numbers. Without axes it is a NumPy scalar.
pub fn shaped<'py, T: numpy::Element>(
    py: Python<'py>,
    numbers: Vec<T>,
    shape: &[usize],
) -> PyResult<Bound<'py, PyAny>> {
    let array = PyArray1::from_vec(py, numbers);
    match shape {
        [_] => Ok(array.into_any()),
        [] => array.get_item(0),
        _ => Ok(array.reshape(shape.to_vec())?.into_any()),
    }
}

impl LeafLayout {
    /// The array of a leaf, the number of its rows, and whether it has an axis of rows. Pictures may have their channels
    /// last, as cameras do.
    fn shaped<'py>(
        &self,
        what: &str,
        object: &Bound<'py, PyAny>,
        rows: Option<usize>,
    ) -> PyResult<(Bound<'py, PyUntypedArray>, usize, bool)> {
        let array = as_array(object)?;
        let (shape, axes) = (array.shape(), self.shape.len());
        let numbers: usize = shape.iter().product();
        // An axis of rows in front: certain if there is one axis more than a value has, else if there are several rows.
        let in_front = shape.first().copied().filter(|first| first.checked_mul(self.len) == Some(numbers));
        let (rows, batched) = match (rows, in_front) {
            (Some(wanted), Some(rows)) if rows == wanted && (rows > 1 || shape.len() > axes) => (rows, true),
            (None, Some(rows)) if rows > 0 && (shape.len() > axes || rows > 1) => (rows, true),
            (Some(1) | None, _) if numbers == self.len => (1, false),
            _ => return Err(refuse(what, self.expected(rows), describe(&array)?)),
        };
        let one = if batched { &shape[1..] } else { shape };
        if let ([channels, height, width], [h, w, c]) = (&self.shape[..], one)
            && one != self.shape
            && [h, w, c] == [height, width, channels]
        {
            let moved = array.py().import("numpy")?.call_method1("moveaxis", (&array, -1, -3))?;
            return Ok((moved.cast_into()?, rows, batched));
        }
        Ok((array, rows, batched))
    }

    /// The arrays that are taken, in words.
    fn expected(&self, rows: Option<usize>) -> String {
        let kind = match self.kind {
            Kind::Floats => "numbers",
            Kind::Ints => "integers",
            Kind::Bytes => "bytes (uint8)",
        };
        let rows = rows.map_or("rows".to_owned(), |rows| rows.to_string());
        let axes: Vec<String> =
            std::iter::once(rows).chain(self.shape.iter().map(usize::to_string)).collect();
        format!("{kind} of shape ({})", axes.join(", "))
    }

    /// Writes the leaf's numbers [rows, leaf length] to their places among those of all leaves.
    fn spread<T: Copy>(&self, numbers: &[T], to: &mut [T]) {
        let rows = numbers.chunks_exact(self.len.max(1));
        for (row, to) in rows.zip(to.chunks_exact_mut(self.width.max(1))) {
            to[self.at..self.at + self.len].copy_from_slice(row);
        }
    }

    /// The leaf's numbers [rows, leaf length] from among those of all leaves.
    fn gather<T: Copy, U>(&self, numbers: &[T], rows: usize, convert: impl Fn(T) -> U) -> Vec<U> {
        if self.len == self.width {
            return numbers[..rows * self.len].iter().map(|x| convert(*x)).collect();
        }
        let mut all = Vec::with_capacity(rows * self.len);
        for row in numbers.chunks_exact(self.width).take(rows) {
            all.extend(row[self.at..self.at + self.len].iter().map(|x| convert(*x)));
        }
        all
    }
}

/// The arrays that tuples and dictionaries hold, in order.
fn flatten<'py>(object: &Bound<'py, PyAny>, all: &mut Vec<Bound<'py, PyAny>>) -> PyResult<()> {
    if object.is_instance_of::<PyUntypedArray>() {
        all.push(object.clone());
    } else if let Ok(tuple) = object.cast::<PyTuple>() {
        tuple.iter().try_for_each(|part| flatten(&part, all))?;
    } else if let Ok(mapping) = object.cast::<PyMapping>() {
        let keys = mapping.keys()?;
        keys.sort()?;
        keys.iter().try_for_each(|key| flatten(&mapping.get_item(key)?, all))?;
    } else {
        all.push(object.clone());
    }
    Ok(())
}

/// The object as an array, of whatever type.
pub fn as_array<'py>(object: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyUntypedArray>> {
    if let Ok(array) = object.cast::<PyUntypedArray>() {
        return Ok(array.clone());
    }
    static ASARRAY: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let asarray = ASARRAY.import(object.py(), "numpy", "asarray")?;
    Ok(asarray.call1((object,))?.cast_into()?)
}

/// A contiguous array of another type.
fn converted<'py>(array: &Bound<'py, PyUntypedArray>, dtype: &str) -> PyResult<Bound<'py, PyAny>> {
    static CONTIGUOUS: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let contiguous = CONTIGUOUS.import(array.py(), "numpy", "ascontiguousarray")?;
    let options = PyDict::new(array.py());
    options.set_item("dtype", dtype)?;
    let converted = contiguous.call((array,), Some(&options))?;
    // `ascontiguousarray` gives scalars an axis.
    converted.call_method1("reshape", (array.shape().to_vec(),))
}

/// Type and shape of an array, in words.
fn describe(array: &Bound<'_, PyUntypedArray>) -> PyResult<String> {
    let shape = PyTuple::new(array.py(), array.shape())?;
    Ok(format!("{} of shape {shape}", array.dtype()))
}

/// Numbers as floats: those of the array if it has contiguous float32, else converted from any real numbers.
pub fn floats<'py>(what: &str, array: &Bound<'py, PyUntypedArray>) -> PyResult<PyReadonlyArrayDyn<'py, f32>> {
    if let Ok(array) = array.cast::<PyArrayDyn<f32>>()
        && array.is_c_contiguous()
    {
        return Ok(array.try_readonly()?);
    }
    if !b"fiub".contains(&array.dtype().kind()) {
        return Err(refuse(what, "real numbers (float32, or what converts to it)", describe(array)?));
    }
    Ok(converted(array, "float32")?.cast_into::<PyArrayDyn<f32>>()?.try_readonly()?)
}

/// Numbers as integers, converted from any integers or booleans.
pub fn ints(what: &str, array: &Bound<'_, PyUntypedArray>) -> PyResult<Vec<i32>> {
    let array = match array.cast::<PyArrayDyn<i64>>() {
        Ok(array) => array.clone(),
        Err(_) if b"iub".contains(&array.dtype().kind()) => converted(array, "int64")?.cast_into()?,
        Err(_) => return Err(refuse(what, "integers", describe(array)?)),
    };
    let narrow = |x: &i64| i32::try_from(*x).map_err(|_| refuse(what, "integers of 32 bits", x));
    array.try_readonly()?.as_array().iter().map(narrow).collect()
}

/// Numbers as bytes: those of the array if it has contiguous uint8, else converted from integers from 0 to 255.
fn bytes<'py>(what: &str, array: &Bound<'py, PyUntypedArray>) -> PyResult<PyReadonlyArrayDyn<'py, u8>> {
    if let Ok(array) = array.cast::<PyArrayDyn<u8>>()
        && array.is_c_contiguous()
    {
        return Ok(array.try_readonly()?);
    }
    let expected = "bytes (uint8), or integers from 0 to 255";
    if !b"iub".contains(&array.dtype().kind()) {
        return Err(refuse(what, expected, describe(array)?));
    }
    if let Some(wrong) = ints(what, array)?.into_iter().find(|x| !(0..256).contains(x)) {
        return Err(refuse(what, expected, wrong));
    }
    Ok(converted(array, "uint8")?.cast_into::<PyArrayDyn<u8>>()?.try_readonly()?)
}

/// One flag per row, from booleans or integers; a single flag if there is a single row.
pub fn flags(what: &str, object: &Bound<'_, PyAny>, rows: usize) -> PyResult<Vec<bool>> {
    let array = as_array(object)?;
    let fits = array.shape() == [rows] || (rows == 1 && array.shape().is_empty());
    if !fits || !b"biu".contains(&array.dtype().kind()) {
        return Err(refuse(what, format!("booleans of shape ({rows},)"), describe(&array)?));
    }
    if let Ok(array) = array.cast::<PyArrayDyn<bool>>() {
        return Ok(array.try_readonly()?.as_array().iter().copied().collect());
    }
    Ok(ints(what, &array)?.into_iter().map(|flag| flag != 0).collect())
}

/// Numbers of rows below `count`: all for none, one, several, or a mask of booleans.
pub fn row_numbers(object: Option<&Bound<'_, PyAny>>, count: usize) -> PyResult<Vec<usize>> {
    let Some(object) = object else { return Ok((0..count).collect()) };
    let array = as_array(object)?;
    if array.dtype().kind() == b'b' {
        let mask = flags("rows", object, count)?;
        return Ok((0..count).filter(|row| mask[*row]).collect());
    }
    if array.is_empty() {
        return Ok(Vec::new());
    }
    let number = |row: i32| match usize::try_from(row) {
        Ok(row) if row < count => Ok(row),
        _ => Err(refuse("rows", format!("numbers from 0 to {}", count - 1), row)),
    };
    ints("rows", &array)?.into_iter().map(number).collect()
}

/// One float per row, from any numbers; a single number serves all rows.
pub fn floats_per_row(what: &str, object: &Bound<'_, PyAny>, rows: usize) -> PyResult<Vec<f32>> {
    let array = as_array(object)?;
    let numbers = floats(what, &array)?;
    match numbers.as_slice()? {
        [one] => Ok(vec![*one; rows]),
        all if all.len() == rows => Ok(all.to_vec()),
        _ => Err(refuse(what, format!("numbers of shape ({rows},)"), describe(&array)?)),
    }
}
