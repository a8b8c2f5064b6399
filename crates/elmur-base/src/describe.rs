//! Descriptions of settings, gathered from the doc comments of the types that hold them.
//!
//! `#[derive(Describe)]` beside serde's derives is all that a settings type needs.

use std::collections::BTreeMap;
use std::path::PathBuf;

/// What is said about one setting.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Description {
    /// Dotted key as in files and on command lines; a part `*` stands for any index of a list.
    pub key: String,
    /// The doc comment of the setting, in one line.
    pub text: String,
    /// Names that the setting may take, with what they mean; empty where it is not a choice among names.
    pub choices: Vec<(String, &'static str)>,
    /// The setting exists only where the setting of this key has this value, such as (`model.kind`, `dt`).
    pub when: Option<(String, String)>,
}

impl Description {
    /// A description of the setting `name` below `prefix`.
    pub fn new(prefix: &str, name: &str, text: &str, choices: Vec<(String, &'static str)>) -> Self {
        Self { key: join(prefix, name), text: text.to_owned(), choices, when: None }
    }

    /// Whether this describes the setting of this key: part by part the same, `*` being any part.
    pub fn is_of(&self, key: &str) -> bool {
        let (mut own, mut asked) = (self.key.split('.'), key.split('.'));
        loop {
            match (own.next(), asked.next()) {
                (None, None) => return true,
                (Some(own), Some(asked)) if own == "*" || own == asked => {}
                _ => return false,
            }
        }
    }
}

/// A type whose settings have descriptions. Plain values have none of their own: the field that holds them is
/// described.
pub trait Describe {
    /// Hands `visit` the description of every setting below the dotted key `prefix`, which is empty for the
    /// outermost type.
    fn describe(prefix: &str, visit: &mut dyn FnMut(Description)) {
        let _ = (prefix, visit);
    }

    /// For enums: the names of all variants as files have them, with their doc comments.
    fn choices() -> Vec<(String, &'static str)> {
        Vec::new()
    }
}

/// Descriptions of all settings of a type, in the order of its fields.
pub fn describe_all<T: Describe>() -> Vec<Description> {
    let mut all = Vec::new();
    T::describe("", &mut |description| all.push(description));
    all
}

/// The description of the setting of this key, or of the nearest setting that contains it: an entry of a list
/// of numbers is described by the list.
pub fn description_of<'a>(all: &'a [Description], key: &str) -> Option<&'a Description> {
    let mut key = key;
    loop {
        if let Some(found) = all.iter().find(|d| d.is_of(key)) {
            return Some(found);
        }
        key = key.rsplit_once('.')?.0;
    }
}

/// `prefix.name`, or `name` where there is no prefix.
pub fn join(prefix: &str, name: &str) -> String {
    if prefix.is_empty() { name.to_owned() } else { format!("{prefix}.{name}") }
}

/// Describes a field and what lies below it; called by derived code.
pub fn field<T: Describe>(prefix: &str, name: &str, text: &str, visit: &mut dyn FnMut(Description)) {
    let own = Description::new(prefix, name, text, T::choices());
    let key = own.key.clone();
    visit(own);
    T::describe(&key, visit);
}

/// Describes the fields of one variant of an enum that is told apart by `tag`; called by derived code.
pub fn variant(
    prefix: &str,
    tag: &str,
    name: &str,
    visit: &mut dyn FnMut(Description),
    fields: impl FnOnce(&mut dyn FnMut(Description)),
) {
    fields(&mut |mut description| {
        description.when.get_or_insert_with(|| (join(prefix, tag), name.to_owned()));
        visit(description);
    });
}

macro_rules! plain {
    ($($ty:ty)*) => { $(impl Describe for $ty {})* };
}

plain!(bool char String PathBuf f32 f64 u8 u16 u32 u64 u128 usize i8 i16 i32 i64 i128 isize);

macro_rules! tuples {
    ($(($($name:ident)*))*) => { $(impl<$($name),*> Describe for ($($name,)*) {})* };
}

tuples!((A)(A B)(A B C)(A B C D));

impl<T: Describe> Describe for Option<T> {
    fn describe(prefix: &str, visit: &mut dyn FnMut(Description)) {
        T::describe(prefix, visit);
    }

    fn choices() -> Vec<(String, &'static str)> {
        T::choices()
    }
}

impl<T: Describe> Describe for Box<T> {
    fn describe(prefix: &str, visit: &mut dyn FnMut(Description)) {
        T::describe(prefix, visit);
    }

    fn choices() -> Vec<(String, &'static str)> {
        T::choices()
    }
}

impl<T: Describe> Describe for Vec<T> {
    fn describe(prefix: &str, visit: &mut dyn FnMut(Description)) {
        T::describe(&join(prefix, "*"), visit);
    }

    fn choices() -> Vec<(String, &'static str)> {
        T::choices()
    }
}

impl<T: Describe, const N: usize> Describe for [T; N] {
    fn describe(prefix: &str, visit: &mut dyn FnMut(Description)) {
        Vec::<T>::describe(prefix, visit);
    }

    fn choices() -> Vec<(String, &'static str)> {
        T::choices()
    }
}

impl<T: Describe> Describe for BTreeMap<String, T> {
    fn describe(prefix: &str, visit: &mut dyn FnMut(Description)) {
        Vec::<T>::describe(prefix, visit);
    }

    fn choices() -> Vec<(String, &'static str)> {
        T::choices()
    }
}
