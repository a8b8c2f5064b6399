//! Arguments of kernels. Up to six are given by position; more are the fields of one struct, which Rust and
//! CUDA name alike and which a test compares without a GPU.

/// The arguments of one kernel call. Every argument starts at a multiple of 8 bytes.
#[derive(Default)]
pub(crate) struct Args {
    words: Vec<u64>,
    starts: Vec<usize>,
    /// Names of the structs among the arguments.
    pub(super) structs: Vec<&'static str>,
}

/// One argument: a number, an address, or a struct defined by [`kernel_args!`].
pub(crate) trait Arg {
    fn push(&self, args: &mut Args);
}

macro_rules! scalar_args {
    ($($ty:ty => |$x:ident| $word:expr),* $(,)?) => {$(
        impl Arg for $ty {
            fn push(&self, args: &mut Args) {
                let $x = *self;
                args.starts.push(args.words.len());
                args.words.push($word);
            }
        }
    )*};
}
scalar_args! {
    u64 => |x| x,
    i32 => |x| u64::from(x as u32),
    u32 => |x| u64::from(x),
    f32 => |x| u64::from(x.to_bits()),
    // Extents: kernels take them as 64-bit integers, or as 32-bit ones where they are known to fit.
    usize => |x| x as u64,
    bool => |x| u64::from(x),
}

/// `args![a, b, c]`: arguments in the kernel's order. `usize` becomes `i64` (or `int`, if the kernel says
/// so), `bool` becomes `int`.
macro_rules! args {
    ($($arg:expr),* $(,)?) => {{
        let mut args = $crate::cuda::args::Args::default();
        $($crate::cuda::args::Arg::push(&$arg, &mut args);)*
        args
    }};
}
pub(crate) use args;

impl Args {
    /// Adds a struct of numbers and addresses.
    pub fn push_struct<T: Copy>(&mut self, name: &'static str, value: &T) {
        const { assert!(align_of::<T>() <= 8 && size_of::<T>() <= 4096) };
        let start = self.words.len();
        self.starts.push(start);
        self.words.resize(start + size_of::<T>().div_ceil(8), 0);
        // SAFETY: as many words have just been added, and words are aligned for all numbers and addresses.
        unsafe { self.words[start..].as_mut_ptr().cast::<T>().write(*value) };
        self.structs.push(name);
    }

    /// Addresses of all arguments, as the driver takes them; valid as long as the arguments.
    pub(super) fn pointers(&mut self) -> Vec<*mut std::ffi::c_void> {
        let words = self.words.as_mut_ptr();
        // SAFETY: starts lie inside the words.
        self.starts.iter().map(|start| unsafe { words.add(*start) }.cast()).collect()
    }
}

/// Defines a struct of kernel arguments that stands in a `.cu` file under the same name, with the same fields
/// in the same order. A test of that name compares the two.
///
/// | Rust | CUDA |
/// |---|---|
/// | `u64` | any pointer, or `u64` |
/// | `usize` | `i64` |
/// | `i32`, `u32`, `f32`, `f64` | `int`, `u32`, `float`, `double` |
/// | `[i32; N]` | `int name[N]` |
/// | a struct of this kind | the struct of this name |
macro_rules! kernel_args {
    ($(#[$meta:meta])* $vis:vis struct $name:ident in $file:literal { $($field:ident: $ty:ty),* $(,)? }) => {
        $(#[$meta])*
        #[repr(C)]
        #[derive(Clone, Copy)]
        $vis struct $name {
            $(pub $field: $ty,)*
        }

        impl $crate::cuda::args::Arg for $name {
            fn push(&self, args: &mut $crate::cuda::args::Args) {
                args.push_struct(stringify!($name), self);
            }
        }

        impl From<$name> for $crate::cuda::args::Args {
            fn from(value: $name) -> Self {
                $crate::cuda::args::args![value]
            }
        }

        #[cfg(test)]
        #[test]
        #[allow(non_snake_case)]
        fn $name() {
            let fields = [$($crate::cuda::args::Field {
                name: stringify!($field),
                ty: stringify!($ty),
                offset: std::mem::offset_of!($name, $field),
                size: size_of::<$ty>(),
                align: align_of::<$ty>(),
            },)*];
            $crate::cuda::args::check_layout(stringify!($name), size_of::<$name>(), &fields, include_str!($file));
        }
    };
}
pub(crate) use kernel_args;

/// A field of a struct of arguments as Rust lays it out.
#[cfg(test)]
pub(crate) struct Field {
    pub name: &'static str,
    pub ty: &'static str,
    pub offset: usize,
    pub size: usize,
    pub align: usize,
}

/// Fails unless `struct name` in a `.cu` file has these fields, in this order, where Rust has them.
#[cfg(test)]
pub(crate) fn check_layout(name: &str, size: usize, fields: &[Field], source: &str) {
    let found = cuda_fields(source, name);
    let names = |list: Vec<&str>| list.join(", ");
    let (ours, theirs) = (fields.iter().map(|f| f.name), found.iter().map(|(name, _)| &**name));
    assert_eq!(names(ours.collect()), names(theirs.collect()), "fields of {name}");
    let (mut end, mut widest) = (0usize, 1);
    for (field, (_, ty)) in fields.iter().zip(&found) {
        let (size, align) = match (&**ty, field.ty) {
            ("*" | "u64", "u64") | ("i64", "usize" | "i64") | ("double", "f64") => (8, 8),
            ("int", "i32") | ("u32", "u32") | ("float", "f32") => (4, 4),
            (array, ours) if ours == array.replace("int[", "[i32; ") => (field.size, 4),
            (structure, ours) if structure == ours => (field.size, field.align),
            (theirs, ours) => panic!("{name}.{} is {ours} in Rust, {theirs} in CUDA", field.name),
        };
        let offset = end.next_multiple_of(align);
        assert_eq!((field.offset, field.size), (offset, size), "offset and size of {name}.{}", field.name);
        (end, widest) = (offset + size, widest.max(align));
    }
    assert_eq!(size, end.next_multiple_of(widest), "size of {name}");
}

/// Names and types of the fields of a struct of plain data. A pointer's type is `*`, an array's
/// `type[count]`.
#[cfg(test)]
fn cuda_fields(source: &str, name: &str) -> Vec<(String, String)> {
    let start = format!("struct {name} {{");
    let body = source.split_once(&start).and_then(|(_, rest)| rest.split_once("};"));
    let (body, _) = body.unwrap_or_else(|| panic!("no `{start}` in the .cu file"));
    let code = |line: &str| line.split("//").next().unwrap_or_default().to_owned();
    let body = body.lines().map(code).collect::<Vec<_>>().join(" ");
    let mut fields = Vec::new();
    for declaration in body.split(';').map(str::trim).filter(|d| !d.is_empty()) {
        let mut base = String::new();
        for (i, declarator) in declaration.split(',').enumerate() {
            let spaced = declarator.replace('*', " * ");
            let mut words: Vec<&str> = spaced.split_whitespace().filter(|w| *w != "const").collect();
            let field = words.pop().unwrap_or_default();
            if i == 0 {
                base = words.iter().filter(|w| **w != "*").copied().collect::<Vec<_>>().join(" ");
            }
            let (field, count) = field.split_once('[').map_or((field, None), |(f, c)| (f, Some(c)));
            let ty = match count {
                _ if words.contains(&"*") => "*".to_owned(),
                Some(count) => format!("{base}[{count}"),
                None => base.clone(),
            };
            fields.push((field.to_owned(), ty));
        }
    }
    fields
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_of_a_cuda_struct_are_read_as_c_reads_them() {
        let source = "struct Other { int x; };\nstruct Some {\n    float *y, *z;  // both\n    \
                      const i64* times;\n    int n, shape[6], m;\n    Steps steps;\n};\n";
        let found = cuda_fields(source, "Some");
        let want = [
            ("y", "*"),
            ("z", "*"),
            ("times", "*"),
            ("n", "int"),
            ("shape", "int[6]"),
            ("m", "int"),
            ("steps", "Steps"),
        ];
        assert_eq!(found, want.map(|(name, ty)| (name.to_owned(), ty.to_owned())));
    }

    #[test]
    #[should_panic = "S.b is f32 in Rust, int in CUDA"]
    fn another_type_is_found() {
        let field = |name, ty, offset| Field { name, ty, offset, size: 4, align: 4 };
        check_layout("S", 8, &[field("a", "i32", 0), field("b", "f32", 4)], "struct S { int a, b; };");
    }

    #[test]
    #[should_panic = "fields of S"]
    fn another_order_is_found() {
        let field = |name, ty, offset| Field { name, ty, offset, size: 4, align: 4 };
        check_layout("S", 8, &[field("a", "i32", 0), field("b", "i32", 4)], "struct S { int b, a; };");
    }

    #[test]
    fn structs_start_at_multiples_of_8_bytes() {
        #[repr(C)]
        #[derive(Clone, Copy)]
        struct Three {
            x: [i32; 3],
        }
        let mut args = args![1u64, 2i32];
        args.push_struct("Three", &Three { x: [3, 4, 5] });
        6u64.push(&mut args);
        let words: Vec<u64> = args.words.clone();
        assert_eq!((words[0], words[1], words[4]), (1, 2, 6));
        assert_eq!(words[2], 3 | 4 << 32);
        assert_eq!((&*args.starts, &*args.structs), (&[0, 1, 2, 4][..], &["Three"][..]));
    }
}
