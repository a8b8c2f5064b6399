//! What serde's attributes say about names.

use syn::meta::ParseNestedMeta;
use syn::{Attribute, LitStr, Result, Token};

use crate::names::Case;

/// The attributes of one type, variant or field that decide its keys.
#[derive(Default)]
pub struct SerdeNames {
    /// How names of fields (of variants, for an enum) are spelt.
    pub rename_all: Option<Case>,
    /// How names of the fields of an enum's variants are spelt.
    pub rename_fields: Option<Case>,
    /// The name in place of Rust's.
    pub rename: Option<String>,
    /// The key beside the fields that names the variant.
    pub tag: Option<String>,
    /// Variants have no names.
    pub untagged: bool,
    /// Fields lie beside those of the holder.
    pub flatten: bool,
    /// Files do not contain it.
    pub skip: bool,
}

impl SerdeNames {
    /// Reads `#[serde(...)]`; what says nothing of names is passed over.
    pub fn of(attrs: &[Attribute]) -> Result<Self> {
        let mut names = Self::default();
        for attr in attrs.iter().filter(|attr| attr.path().is_ident("serde")) {
            attr.parse_nested_meta(|meta| names.read(&meta))?;
        }
        Ok(names)
    }

    fn read(&mut self, meta: &ParseNestedMeta<'_>) -> Result<()> {
        let is = |name: &str| meta.path.is_ident(name);
        if is("rename_all") || is("rename_all_fields") {
            let Some(text) = text(meta)? else { return Ok(()) };
            let case = Some(Case::of(&text.value()).map_err(|e| syn::Error::new(text.span(), e))?);
            *(if is("rename_all") { &mut self.rename_all } else { &mut self.rename_fields }) = case;
        } else if is("rename") {
            self.rename = text(meta)?.map(|text| text.value());
        } else if is("tag") {
            self.tag = text(meta)?.map(|text| text.value());
        } else if is("content") {
            return Err(meta.error("Describe knows no enums with `content`"));
        } else {
            self.untagged |= is("untagged");
            self.flatten |= is("flatten");
            self.skip |= is("skip") || is("skip_deserializing");
            text(meta)?;
        }
        Ok(())
    }
}

/// The value of an attribute, or of its `deserialize = "..."`; none for one without a value.
fn text(meta: &ParseNestedMeta<'_>) -> Result<Option<LitStr>> {
    if meta.input.peek(Token![=]) {
        return Ok(Some(meta.value()?.parse()?));
    }
    let mut found = None;
    if meta.input.peek(syn::token::Paren) {
        meta.parse_nested_meta(|inner| {
            let value: LitStr = inner.value()?.parse()?;
            if inner.path.is_ident("deserialize") {
                found = Some(value);
            }
            Ok(())
        })?;
    }
    Ok(found)
}
