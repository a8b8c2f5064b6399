//! Arrays as other programs store them: rows of numbers, decoded from raw elements of any type and byte
//! order, and turned into the columns of a space.

use std::ops::Range;

use elmur_base::{Leaf, Space};

use crate::episode::Column;
use crate::layout::ElementType;

/// What the bytes of an element mean.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Numeric {
    Float,
    Signed,
    Unsigned,
    Flag,
}

/// The type of an array's elements in a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Element {
    pub(crate) numeric: Numeric,
    /// Bytes per element.
    pub(crate) size: usize,
    pub(crate) big_endian: bool,
}

impl Element {
    /// An element type whose numbers can be decoded, or none.
    pub(crate) fn new(numeric: Numeric, size: usize, big_endian: bool) -> Option<Self> {
        let known = match numeric {
            Numeric::Float => [2, 4, 8].contains(&size),
            Numeric::Signed | Numeric::Unsigned => [1, 2, 4, 8].contains(&size),
            Numeric::Flag => size == 1,
        };
        known.then_some(Self { numeric, size, big_endian })
    }

    /// An empty column of the type that the elements are decoded to: bytes to u8, other integers and flags to
    /// i32, floats to f32.
    pub(crate) fn column(self) -> Column {
        let element = match (self.numeric, self.size) {
            (Numeric::Float, _) => ElementType::F32,
            (Numeric::Unsigned, 1) => ElementType::U8,
            _ => ElementType::I32,
        };
        Column::zeros(element, 0)
    }

    /// Appends the numbers of whole elements to a column of the type that [`Element::column`] has.
    pub(crate) fn append(self, data: &[u8], to: &mut Column) -> Result<(), String> {
        let turned: Vec<u8>;
        let data = match self.big_endian && self.size > 1 {
            true => {
                turned = data.chunks_exact(self.size).flat_map(|x| x.iter().rev().copied()).collect();
                &turned
            }
            false => data,
        };
        fn ints<const N: usize, T: TryInto<i32>>(
            data: &[u8],
            to: &mut Vec<i32>,
            number: impl Fn([u8; N]) -> T,
        ) -> Result<(), String> {
            for bytes in data.as_chunks().0 {
                let number = number(*bytes).try_into();
                to.push(number.map_err(|_| "integers beyond 32 bits; save them as floats".to_owned())?);
            }
            Ok(())
        }
        match (to, self.numeric, self.size) {
            (Column::F32(to), Numeric::Float, 2) => {
                to.extend(data.as_chunks().0.iter().map(|x| f32_from_f16(u16::from_le_bytes(*x))));
            }
            (Column::F32(to), Numeric::Float, 4) => {
                to.extend(data.as_chunks().0.iter().map(|x| f32::from_le_bytes(*x)));
            }
            (Column::F32(to), Numeric::Float, _) => {
                to.extend(data.as_chunks().0.iter().map(|x| f64::from_le_bytes(*x) as f32));
            }
            (Column::U8(to), _, _) => to.extend_from_slice(data),
            (Column::I32(to), Numeric::Flag, _) => to.extend(data.iter().map(|x| i32::from(*x != 0))),
            (Column::I32(to), Numeric::Signed, 1) => ints(data, to, i8::from_le_bytes)?,
            (Column::I32(to), Numeric::Signed, 2) => ints(data, to, i16::from_le_bytes)?,
            (Column::I32(to), Numeric::Signed, 4) => ints(data, to, i32::from_le_bytes)?,
            (Column::I32(to), Numeric::Signed, _) => ints(data, to, i64::from_le_bytes)?,
            (Column::I32(to), _, 2) => ints(data, to, u16::from_le_bytes)?,
            (Column::I32(to), _, 4) => ints(data, to, u32::from_le_bytes)?,
            (Column::I32(to), _, _) => ints(data, to, u64::from_le_bytes)?,
            (Column::F32(_), _, _) => return Err("integers where floats were expected".to_owned()),
        }
        Ok(())
    }
}

/// The value of a 16-bit float: sign, 5 bits of exponent, 10 bits of fraction.
pub(crate) fn f32_from_f16(half: u16) -> f32 {
    let sign = if half >> 15 == 1 { -1.0 } else { 1.0 };
    let (exponent, fraction) = (i32::from(half >> 10 & 31), f32::from(half & 1023));
    match (exponent, half & 1023) {
        (0, _) => sign * fraction * 2f32.powi(-24),
        (31, 0) => sign * f32::INFINITY,
        (31, _) => f32::NAN,
        _ => sign * (1024.0 + fraction) * 2f32.powi(exponent - 25),
    }
}

/// An array of rows: bytes as [`Column::U8`], other integers as `I32`, floats as `F32`.
#[derive(Debug)]
pub(crate) struct Array {
    /// Rows, then the axes of one row.
    pub(crate) shape: Vec<usize>,
    pub(crate) numbers: Column,
}

impl Array {
    pub(crate) fn rows(&self) -> usize {
        self.shape[0]
    }

    /// Numbers per row.
    pub(crate) fn width(&self) -> usize {
        self.shape[1..].iter().product()
    }

    /// Axes of one row; of two axes, a first one of length 1 is dropped.
    pub(crate) fn row_shape(&self) -> &[usize] {
        match &self.shape[1..] {
            [1, k] => std::slice::from_ref(k),
            shape => shape,
        }
    }

    /// The same array with the last axis running fastest, of numbers in which the first does.
    pub(crate) fn from_fortran(shape: Vec<usize>, numbers: Column) -> Self {
        fn turned<T: Copy>(shape: &[usize], x: &[T]) -> Vec<T> {
            let strides: Vec<usize> =
                shape.iter().scan(1, |stride, n| Some(std::mem::replace(stride, *stride * n))).collect();
            let mut place = vec![0; shape.len()];
            let mut all = Vec::with_capacity(x.len());
            for _ in 0..x.len() {
                all.push(x[place.iter().zip(&strides).map(|(i, stride)| i * stride).sum::<usize>()]);
                for axis in (0..shape.len()).rev() {
                    place[axis] += 1;
                    if place[axis] < shape[axis] {
                        break;
                    }
                    place[axis] = 0;
                }
            }
            all
        }
        let numbers = match numbers {
            Column::F32(x) => Column::F32(turned(&shape, &x)),
            Column::I32(x) => Column::I32(turned(&shape, &x)),
            Column::U8(x) => Column::U8(turned(&shape, &x)),
        };
        Self { shape, numbers }
    }

    /// Pictures [rows, height, width, channels] as [rows, channels, height, width]; those without an axis of
    /// channels, [rows, height, width], have one.
    pub(crate) fn channels_first(self) -> Result<Self, String> {
        let (rows, height, width, channels) = match self.shape[..] {
            [rows, height, width] => (rows, height, width, 1),
            [rows, height, width, channels] => (rows, height, width, channels),
            _ => return Err(format!("expected pictures (T, height, width, channels), got {:?}", self.shape)),
        };
        let Column::U8(pixels) = &self.numbers else {
            return Err("expected pictures of bytes, uint8".to_owned());
        };
        let mut turned = Vec::with_capacity(pixels.len());
        for picture in pixels.chunks_exact((height * width * channels).max(1)) {
            append_channels_first(picture, channels, &mut turned);
        }
        Ok(Self { shape: vec![rows, channels, height, width], numbers: Column::U8(turned) })
    }

    /// The array with one more row, which `last` consists of.
    pub(crate) fn followed_by(mut self, last: Array) -> Result<Self, String> {
        if last.shape[1..] != self.shape[1..] || last.rows() != 1 {
            let expected = [&[1], &self.shape[1..]].concat();
            return Err(format!("expected one more observation {expected:?}, got {:?}", last.shape));
        }
        match (&mut self.numbers, last.numbers) {
            (Column::F32(x), Column::F32(last)) => x.extend(last),
            (Column::I32(x), Column::I32(last)) => x.extend(last),
            (Column::U8(x), Column::U8(last)) => x.extend(last),
            _ => return Err("expected numbers of the same type as the other observations".to_owned()),
        }
        self.shape[0] += 1;
        Ok(self)
    }

    /// Arrays of as many rows and the same type as one, their rows side by side.
    pub(crate) fn beside(arrays: Vec<Array>) -> Result<Self, String> {
        fn joined<T: Copy>(arrays: &[(&[T], usize)], rows: usize) -> Vec<T> {
            let row =
                |row: usize| arrays.iter().flat_map(move |(x, width)| &x[row * width..(row + 1) * width]);
            (0..rows).flat_map(row).copied().collect()
        }
        let rows = arrays.first().map_or(0, Array::rows);
        if arrays.iter().any(|array| array.rows() != rows) {
            return Err("arrays of different numbers of steps".to_owned());
        }
        macro_rules! join {
            ($kind:ident) => {{
                let part = |array: &'_ Array| match &array.numbers {
                    Column::$kind(_) => Some(array.width()),
                    _ => None,
                };
                let widths: Option<Vec<usize>> = arrays.iter().map(part).collect();
                widths.map(|widths| {
                    let parts = arrays.iter().zip(widths).filter_map(|(array, width)| match &array.numbers {
                        Column::$kind(x) => Some((&x[..], width)),
                        _ => None,
                    });
                    Column::$kind(joined(&parts.collect::<Vec<_>>(), rows))
                })
            }};
        }
        let numbers = join!(F32).or_else(|| join!(I32)).or_else(|| join!(U8));
        let numbers = numbers.ok_or_else(|| "arrays of different types".to_owned())?;
        Ok(Self { shape: vec![rows, arrays.iter().map(Array::width).sum()], numbers })
    }

    /// The columns of a space's leaves from one array for each of them, or from a single array for all.
    pub(crate) fn columns_of(
        mut arrays: Vec<(String, Array)>,
        space: &Space,
        limit: u64,
    ) -> Result<Vec<Column>, String> {
        if let [_] = &arrays[..] {
            let (key, array) = arrays.remove(0);
            return array.columns(&key, space, limit);
        }
        let leaves = space.leaves();
        if leaves.len() != arrays.len() {
            let names: Vec<&str> = arrays.iter().map(|(key, _)| key.as_str()).collect();
            return Err(format!(
                "{} observations ({}) for a space of {} parts; choose keys",
                names.len(),
                names.join(", "),
                leaves.len()
            ));
        }
        let column = |((key, array), leaf): ((String, Array), &Leaf<'_>)| {
            array.leaf_columns(&key, std::slice::from_ref(leaf), limit).map(|mut columns| columns.remove(0))
        };
        arrays.into_iter().zip(&leaves).map(column).collect()
    }

    /// The columns of a space's leaves: each row holds their numbers one after the other. No column may take
    /// more than `limit` bytes.
    pub(crate) fn columns(self, key: &str, space: &Space, limit: u64) -> Result<Vec<Column>, String> {
        self.leaf_columns(key, &space.leaves(), limit)
    }

    fn leaf_columns(self, key: &str, leaves: &[Leaf<'_>], limit: u64) -> Result<Vec<Column>, String> {
        let width: usize = leaves.iter().map(Leaf::len).sum();
        let axes = |shape: &[usize]| shape.iter().copied().filter(|n| *n != 1).collect::<Vec<_>>();
        let image = match leaves {
            [Leaf::Floats { shape, .. } | Leaf::Bytes { shape }] if shape.len() > 1 => Some(*shape),
            _ => None,
        };
        if self.width() != width || image.is_some_and(|image| axes(image) != axes(&self.shape[1..])) {
            let expected = image.map_or(format!("{width} numbers"), |image| format!("{image:?}"));
            let got = &self.shape[1..];
            return Err(format!(
                "`{key}`: expected {expected} per step, got {got:?}; give the right spaces, or name all arrays of the \
                 observation (data.keys, --keys)"
            ));
        }
        let fail = |problem| format!("`{key}` {problem}");
        let held = (self.numbers.len() as u64).saturating_mul(4);
        let bytes = self.numbers.view().element_type() == ElementType::U8;
        if bytes && held > limit && leaves.iter().any(|leaf| !stays_bytes(leaf)) {
            return Err(fail(too_large(held, limit)));
        }
        if let [leaf] = leaves {
            return Ok(vec![converted(self.numbers, leaf).map_err(fail)?]);
        }
        let starts = leaves.iter().scan(0, |end, leaf| Some(std::mem::replace(end, *end + leaf.len())));
        let part = |(leaf, start): (&Leaf<'_>, usize)| {
            converted(entries(&self.numbers, width, start..start + leaf.len()), leaf).map_err(fail)
        };
        leaves.iter().zip(starts).map(part).collect()
    }
}

/// Appends a picture [height, width, channels] as [channels, height, width].
pub(crate) fn append_channels_first(picture: &[u8], channels: usize, to: &mut Vec<u8>) {
    for channel in 0..channels {
        to.extend(picture.iter().skip(channel).step_by(channels));
    }
}

pub(crate) fn too_large(bytes: u64, limit: u64) -> String {
    format!("inflates to {bytes} bytes, too large for one file (at most {limit}); save one episode per file")
}

/// Entries `range` of every row.
fn entries(numbers: &Column, width: usize, range: Range<usize>) -> Column {
    fn cut<T: Copy>(x: &[T], width: usize, range: Range<usize>) -> Vec<T> {
        x.chunks_exact(width).flat_map(|row| row[range.clone()].iter().copied()).collect()
    }
    match numbers {
        Column::F32(x) => Column::F32(cut(x, width, range)),
        Column::I32(x) => Column::I32(cut(x, width, range)),
        Column::U8(x) => Column::U8(cut(x, width, range)),
    }
}

/// Converts numbers to an element type that the leaf can be recorded in.
fn converted(numbers: Column, leaf: &Leaf<'_>) -> Result<Column, String> {
    Ok(match (leaf, numbers) {
        (Leaf::Ints(_), Column::U8(x)) => Column::I32(x.into_iter().map(i32::from).collect()),
        (Leaf::Ints(_), Column::F32(x)) => {
            let whole = |x: &f32| x.fract() == 0.0 && (0.0..=16_777_216.0).contains(x);
            if let Some(x) = x.iter().find(|x| !whole(x)) {
                return Err(format!("holds {x} where the space has integers; give the right spaces"));
            }
            Column::I32(x.into_iter().map(|x| x as i32).collect())
        }
        (Leaf::Floats { .. }, Column::U8(x)) if stays_bytes(leaf) => Column::U8(x),
        (Leaf::Floats { .. }, numbers) => Column::F32(floats(numbers)),
        (Leaf::Bytes { .. }, numbers) if numbers.view().element_type() != ElementType::U8 => {
            let name = numbers.view().element_type().name();
            return Err(format!("holds {name} where the space has bytes; save x.astype('uint8')"));
        }
        (_, numbers) => numbers,
    })
}

/// Whether bytes are recorded as bytes in this leaf: a camera, or a box of pixels, which ends at 1.
fn stays_bytes(leaf: &Leaf<'_>) -> bool {
    match leaf {
        Leaf::Ints(_) => false,
        Leaf::Floats { high, .. } => high.iter().all(|high| *high <= 1.0),
        Leaf::Bytes { .. } => true,
    }
}

/// The numbers as floats.
pub(crate) fn floats(numbers: Column) -> Vec<f32> {
    match numbers {
        Column::F32(x) => x,
        Column::I32(x) => x.into_iter().map(|x| x as f32).collect(),
        Column::U8(x) => x.into_iter().map(f32::from).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_of_every_type_and_byte_order_are_decoded() {
        let read = |numeric, size, big, bytes: &[u8]| {
            let element = Element::new(numeric, size, big).unwrap();
            let mut column = element.column();
            element.append(bytes, &mut column).map(|()| column)
        };
        let halves: Vec<u8> =
            [0x3c00u16, 0xc000, 0x0001, 0x7bff].iter().flat_map(|x| x.to_be_bytes()).collect();
        let expected = Column::F32(vec![1.0, -2.0, 2f32.powi(-24), 65504.0]);
        assert_eq!(read(Numeric::Float, 2, true, &halves).unwrap(), expected);
        assert_eq!(read(Numeric::Float, 8, true, &1.5f64.to_be_bytes()).unwrap(), Column::F32(vec![1.5]));
        assert_eq!(read(Numeric::Signed, 2, true, &[0xff, 0xf8]).unwrap(), Column::I32(vec![-8]));
        assert_eq!(read(Numeric::Unsigned, 1, false, &[200]).unwrap(), Column::U8(vec![200]));
        assert_eq!(read(Numeric::Flag, 1, false, &[0, 1]).unwrap(), Column::I32(vec![0, 1]));
        assert!(read(Numeric::Unsigned, 8, false, &[255; 8]).unwrap_err().contains("beyond 32 bits"));
        assert!(f32_from_f16(0x7e00).is_nan() && f32_from_f16(0xfc00) == f32::NEG_INFINITY);
        assert_eq!(Element::new(Numeric::Float, 16, false), None);
    }

    #[test]
    fn fortran_order_becomes_c_order() {
        // x[i][j] = 10 i + j of shape (2, 3), first axis fastest.
        let array = Array::from_fortran(vec![2, 3], Column::I32(vec![0, 10, 1, 11, 2, 12]));
        assert_eq!(array.numbers, Column::I32(vec![0, 1, 2, 10, 11, 12]));
    }

    #[test]
    fn pictures_get_their_channels_first() {
        let array = Array { shape: vec![1, 1, 2, 3], numbers: Column::U8(vec![1, 2, 3, 4, 5, 6]) };
        let turned = array.channels_first().unwrap();
        assert_eq!((turned.shape, turned.numbers), (vec![1, 3, 1, 2], Column::U8(vec![1, 4, 2, 5, 3, 6])));
    }
}
