//! The engine's error type. Every message says what was expected and what was given.

use crate::dtype::DType;

/// Result of everything in this crate that can fail.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What can go wrong while a graph is built, compiled or fed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An op was given operands it cannot work with.
    #[error("{op}: expected {expected}, got {got}")]
    Op {
        /// The op's name as in the builder method.
        op: &'static str,
        /// What the op accepts.
        expected: String,
        /// What the op was given.
        got: String,
    },
    /// A device that this build does not know, or that this machine does not have.
    #[error("device: expected {expected}, got {got}")]
    Device {
        /// The devices that could be opened.
        expected: String,
        /// The device asked for.
        got: String,
    },
    /// A graph and stores that cannot be compiled for a device.
    #[error("program: expected {expected}, got {got}")]
    Program {
        /// What programs of this device accept.
        expected: String,
        /// What the program was to be made of.
        got: String,
    },
    /// A tensor that no store can hold.
    #[error("`{name}`: expected {expected}, got {got}")]
    Stored {
        /// The name that the tensor was to have.
        name: String,
        /// What stores accept.
        expected: String,
        /// The type of the tensor.
        got: String,
    },
    /// A value of another graph was passed to this one.
    #[error("{op}: the value passed belongs to another graph; build it with this graph's own methods")]
    ForeignValue {
        /// The op or method that was called.
        op: &'static str,
    },
    /// Two parameters, inputs, states or outputs share a name.
    #[error("`{name}` is already the name of a {kind} in this graph; choose another name")]
    DuplicateName {
        /// The name.
        name: String,
        /// The kind of value that has this name already.
        kind: &'static str,
    },
    /// A gradient was asked for of an op that has none.
    #[error("{op} has no gradient for its input {input}; wrap that input in stop_gradient")]
    NoGradient {
        /// The op.
        op: &'static str,
        /// Position of the operand.
        input: usize,
    },
    /// A name that is not known to a graph, store or program.
    #[error("there is no {kind} named `{name}`{}", nearest.as_ref().map(|n| format!("; did you mean `{n}`?")).unwrap_or_default())]
    UnknownName {
        /// What was looked for: input, output, parameter...
        kind: &'static str,
        /// The name asked for.
        name: String,
        /// The most similar existing name.
        nearest: Option<String>,
    },
    /// Data of another element type than the tensor's.
    #[error("`{name}` holds {expected}, got {got} data")]
    ElementType {
        /// The tensor.
        name: String,
        /// Element type of the tensor.
        expected: DType,
        /// The data's element type.
        got: DType,
    },
    /// Data of another length than the tensor's.
    #[error("`{name}` has {expected} elements, got {got}")]
    Length {
        /// The tensor.
        name: String,
        /// Number of elements of the tensor.
        expected: usize,
        /// The data's number of elements.
        got: usize,
    },
    /// A stored tensor does not have the row that was asked for.
    #[error("`{name}` has {rows} rows, got row {got}")]
    RowOutOfRange {
        /// The tensor.
        name: String,
        /// Number of rows of the tensor: the extent of its first axis.
        rows: usize,
        /// The row asked for.
        got: usize,
    },
    /// Data for rows of a stored tensor has another length than these rows.
    #[error("{rows} rows of `{name}` have {expected} elements, got {got}")]
    RowsLength {
        /// The tensor.
        name: String,
        /// The number of rows asked for.
        rows: usize,
        /// The number of elements of these rows.
        expected: usize,
        /// The data's number of elements.
        got: usize,
    },
    /// A tensor in a store does not have the type the graph declares.
    #[error("`{name}` is {expected} in the graph, but {got} in the store")]
    StoreMismatch {
        /// The tensor.
        name: String,
        /// The graph's type.
        expected: String,
        /// The store's type.
        got: String,
    },
    /// Memory could not be allocated.
    #[error("out of memory: {bytes} bytes were asked for {what}")]
    OutOfMemory {
        /// Size of the request.
        bytes: usize,
        /// What the memory was for.
        what: &'static str,
    },
    /// A call of a CUDA library failed.
    #[error("CUDA: {call}: {cause}")]
    Cuda {
        /// Name of the function that was called.
        call: &'static str,
        /// What the library reported.
        cause: String,
    },
    /// A library that a device needs is not on this machine.
    #[error("this device needs {library}, which could not be loaded; install it or use device cpu")]
    MissingLibrary {
        /// Name of the library.
        library: &'static str,
    },
    /// Integer data pointed outside a table (a class, row or position out of range).
    #[error("{op}: {what} {got} is outside 0..{limit}")]
    IndexOutOfRange {
        /// The op.
        op: &'static str,
        /// What the index stands for.
        what: &'static str,
        /// The index found.
        got: i64,
        /// The exclusive upper bound.
        limit: usize,
    },
}

/// The entry of `names` that a misspelt `name` may have meant.
pub(crate) fn nearest<'a>(name: &str, names: impl Iterator<Item = &'a str>) -> Option<String> {
    elmur_base::nearest(name, names).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nearest_name_suggests_only_plausible_ones() {
        let names = ["layers.0.qkv", "layers.0.out", "head"];
        assert_eq!(nearest("layers.0.qvk", names.into_iter()).as_deref(), Some("layers.0.qkv"));
        assert_eq!(nearest("nose", names.into_iter()), None);
        assert_eq!(nearest("hed", names.into_iter()).as_deref(), Some("head"));
    }
}
