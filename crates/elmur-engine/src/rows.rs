//! Single rows of stored tensors: reading or replacing a few of many costs no more than those few.

use crate::allocation::bytes_of;
use crate::error::{Error, Result};
use crate::store::{Store, Tensor};
use crate::types::Element;

impl Store {
    /// Copies of the given rows of `name`, one after the other. A row is one entry of the first axis; a
    /// scalar has none.
    ///
    /// ```
    /// use elmur_engine::{DType, Store, TensorType};
    ///
    /// let store = Store::new();
    /// store.insert("memory", TensorType::new(DType::F32, [3, 2]))?;
    /// store.set_rows("memory", &[2, 0], &[5.0f32, 6.0, 1.0, 2.0])?;
    /// assert_eq!(store.get::<f32>("memory")?, [1.0, 2.0, 0.0, 0.0, 5.0, 6.0]);
    /// assert_eq!(store.get_rows::<f32>("memory", &[2])?, [5.0, 6.0]);
    /// # Ok::<(), elmur_engine::Error>(())
    /// ```
    pub fn get_rows<T: Element>(&self, name: &str, rows: &[usize]) -> Result<Vec<T>> {
        let tensor = self.checked::<T>(name)?;
        check_range(name, &tensor, rows)?;
        let mut data = vec![T::default(); rows.len() * row_len(&tensor)];
        self.copy_rows(name, &tensor, rows, &mut data)?;
        Ok(data)
    }

    /// Copies the given rows of `name` into `target`, one after the other, without allocating.
    pub fn read_rows_into<T: Element>(&self, name: &str, rows: &[usize], target: &mut [T]) -> Result<()> {
        self.copy_rows(name, &self.checked::<T>(name)?, rows, target)
    }

    /// Replaces the given rows of `name` by `data`, which holds them one after the other. Where a row is
    /// given twice, the later data stays. Rows out of range and data of another length are errors, and then
    /// nothing changes.
    pub fn set_rows<T: Element>(&self, name: &str, rows: &[usize], data: &[T]) -> Result<()> {
        let tensor = self.checked::<T>(name)?;
        check_range(name, &tensor, rows)?;
        check_len(name, &tensor, rows, data.len())?;
        let (row, mut rest) = (row_len(&tensor), data);
        let parts = runs(rows).map(|run| {
            let (part, after) = rest.split_at(run.len() * row);
            rest = after;
            (run[0] * row * size_of::<T>(), bytes_of(part))
        });
        let _guard = self.lock().write();
        // SAFETY: all rows lie inside the tensor, and the lock excludes every other reader and writer.
        unsafe { tensor.buffer.write(parts) }
    }

    fn copy_rows<T: Element>(
        &self,
        name: &str,
        tensor: &Tensor,
        rows: &[usize],
        target: &mut [T],
    ) -> Result<()> {
        check_range(name, tensor, rows)?;
        check_len(name, tensor, rows, target.len())?;
        let (row, mut rest) = (row_len(tensor), target);
        let parts = runs(rows).map(|run| {
            let (part, after) = std::mem::take(&mut rest).split_at_mut(run.len() * row);
            rest = after;
            // SAFETY: elements are plain numbers without padding.
            let bytes =
                unsafe { std::slice::from_raw_parts_mut(part.as_mut_ptr().cast(), size_of_val(part)) };
            (run[0] * row * size_of::<T>(), bytes)
        });
        let _guard = self.lock().read();
        // SAFETY: all rows lie inside the tensor, and the lock excludes writers. What is copied are elements
        // of this type.
        unsafe { tensor.buffer.read(parts) }
    }
}

/// Elements of one row.
fn row_len(tensor: &Tensor) -> usize {
    tensor.ty.shape.iter().skip(1).product()
}

/// Runs of rows that follow each other in the tensor, so that one copy serves each run.
fn runs(rows: &[usize]) -> impl Iterator<Item = &[usize]> {
    rows.chunk_by(|a, b| *b == a + 1)
}

fn check_range(name: &str, tensor: &Tensor, rows: &[usize]) -> Result<()> {
    let limit = tensor.ty.shape.first().copied().unwrap_or(0);
    match rows.iter().find(|row| **row >= limit) {
        Some(row) => Err(Error::RowOutOfRange { name: name.to_owned(), rows: limit, got: *row }),
        None => Ok(()),
    }
}

fn check_len(name: &str, tensor: &Tensor, rows: &[usize], got: usize) -> Result<()> {
    let expected = rows.len().saturating_mul(row_len(tensor));
    if expected == got {
        return Ok(());
    }
    Err(Error::RowsLength { name: name.to_owned(), rows: rows.len(), expected, got })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::{DType, TensorType};

    #[test]
    fn rows_are_read_and_replaced_in_the_order_given() {
        let store = Store::new();
        store.insert("times", TensorType::new(DType::I64, [5, 2])).unwrap();
        store.set("times", &(0..10i64).collect::<Vec<_>>()).unwrap();
        assert_eq!(store.get_rows::<i64>("times", &[4, 1, 2, 1]).unwrap(), [8, 9, 2, 3, 4, 5, 2, 3]);
        assert_eq!(store.get_rows::<i64>("times", &[]).unwrap(), []);
        store.set_rows("times", &[3, 0, 1], &[-1i64, -2, -3, -4, -5, -6]).unwrap();
        assert_eq!(store.get::<i64>("times").unwrap(), [-3, -4, -5, -6, 4, 5, -1, -2, 8, 9]);
        store.set_rows("times", &[2, 2], &[0i64, 0, 7, 7]).unwrap();
        let mut row = [0i64; 2];
        store.read_rows_into("times", &[2], &mut row).unwrap();
        assert_eq!(row, [7, 7]);
    }

    #[test]
    fn rows_that_do_not_fit_are_errors_and_change_nothing() {
        let store = Store::new();
        store.insert("m", TensorType::new(DType::F32, [3, 2, 2])).unwrap();
        store.insert("scalar", TensorType::new(DType::F32, [])).unwrap();
        let message = |r: Result<()>| r.unwrap_err().to_string();
        assert_eq!(message(store.set_rows("m", &[0, 3], &[1.0f32; 8])), "`m` has 3 rows, got row 3");
        assert_eq!(
            message(store.set_rows("m", &[0, 2], &[1.0f32; 7])),
            "2 rows of `m` have 8 elements, got 7"
        );
        assert_eq!(message(store.set_rows("m", &[0], &[1.0f64; 4])), "`m` holds f32, got f64 data");
        assert_eq!(message(store.set_rows("scalar", &[0], &[1.0f32])), "`scalar` has 0 rows, got row 0");
        assert_eq!(store.get::<f32>("m").unwrap(), [0.0; 12]);
        assert_eq!(message(store.get_rows::<f32>("m", &[usize::MAX]).map(drop)), {
            format!("`m` has 3 rows, got row {}", usize::MAX)
        });
        let mut short = [0.0f32; 3];
        assert_eq!(
            message(store.read_rows_into("m", &[1], &mut short)),
            "1 rows of `m` have 4 elements, got 3"
        );
    }
}
