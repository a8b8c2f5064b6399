//! `#[derive(Describe)]`: the doc comments of a settings type, by the keys that serde gives its fields.
//!
//! The trait that is derived is `elmur_base::Describe`; use the macro through that crate.

mod names;
mod serde_names;

use proc_macro2::TokenStream;
use quote::quote;
use syn::{Attribute, Data, DeriveInput, Error, Expr, ExprLit, Field, Fields, Lit, Meta, Result, Variant};

use names::Case;
use serde_names::SerdeNames;

/// Implements `elmur_base::Describe` from doc comments.
///
/// Keys are those that serde reads: `rename_all`, `rename`, `tag`, `flatten`, `skip`, `transparent` and
/// `untagged` are respected. Types of fields must be `Describe` too; a field with `#[describe(leaf)]` need
/// not be and is described as a whole.
#[proc_macro_derive(Describe, attributes(describe))]
pub fn derive_describe(input: proc_macro::TokenStream) -> proc_macro::TokenStream {
    let input = syn::parse_macro_input!(input as DeriveInput);
    expand(&input).unwrap_or_else(|e| e.to_compile_error()).into()
}

fn expand(input: &DeriveInput) -> Result<TokenStream> {
    let serde = SerdeNames::of(&input.attrs)?;
    let (describe, choices) = match &input.data {
        Data::Struct(data) => of_struct(&data.fields, &serde)?,
        Data::Enum(data) => of_enum(data.variants.iter(), &serde, &first_paragraph(&input.attrs))?,
        Data::Union(_) => return Err(Error::new_spanned(&input.ident, "expected a struct or an enum")),
    };
    let name = &input.ident;
    let (generics, types, bounds) = input.generics.split_for_impl();
    Ok(quote! {
        #[automatically_derived]
        impl #generics ::elmur_base::Describe for #name #types #bounds {
            #[allow(unused_variables)]
            fn describe(prefix: &str, visit: &mut dyn FnMut(::elmur_base::Description)) {
                #describe
            }

            fn choices() -> ::std::vec::Vec<(::std::string::String, &'static str)> {
                #choices
            }
        }
    })
}

/// Bodies of `describe` and `choices` of a struct.
fn of_struct(fields: &Fields, serde: &SerdeNames) -> Result<(TokenStream, TokenStream)> {
    let none = quote!(::std::vec::Vec::new());
    match fields {
        Fields::Named(fields) => Ok((of_fields(fields.named.iter(), serde.rename_all)?, none)),
        Fields::Unnamed(fields) if fields.unnamed.len() == 1 => {
            let ty = &fields.unnamed[0].ty;
            let describe = quote!(<#ty as ::elmur_base::Describe>::describe(prefix, visit););
            Ok((describe, quote!(<#ty as ::elmur_base::Describe>::choices())))
        }
        Fields::Unnamed(_) | Fields::Unit => Ok((TokenStream::new(), none)),
    }
}

/// Statements that describe fields below `prefix`.
fn of_fields<'a>(fields: impl Iterator<Item = &'a Field>, case: Option<Case>) -> Result<TokenStream> {
    let mut all = TokenStream::new();
    for field in fields {
        let serde = SerdeNames::of(&field.attrs)?;
        if serde.skip {
            continue;
        }
        let ty = &field.ty;
        if serde.flatten {
            all.extend(quote!(<#ty as ::elmur_base::Describe>::describe(prefix, visit);));
            continue;
        }
        let name = field.ident.as_ref().map(ToString::to_string).unwrap_or_default();
        let name = name.trim_start_matches("r#");
        let key = serde.rename.unwrap_or_else(|| case.map_or(name.to_owned(), |case| case.field(name)));
        let text = docs(&field.attrs);
        all.extend(if is_leaf(&field.attrs)? {
            quote!(visit(::elmur_base::Description::new(prefix, #key, #text, ::std::vec::Vec::new()));)
        } else {
            quote!(::elmur_base::describe::field::<#ty>(prefix, #key, #text, visit);)
        });
    }
    Ok(all)
}

/// Bodies of `describe` and `choices` of an enum.
fn of_enum<'a>(
    variants: impl Iterator<Item = &'a Variant>,
    serde: &SerdeNames,
    text: &str,
) -> Result<(TokenStream, TokenStream)> {
    let (mut describe, mut choices) = (TokenStream::new(), TokenStream::new());
    if let Some(tag) = &serde.tag {
        let all = quote!(<Self as ::elmur_base::Describe>::choices());
        describe.extend(quote!(visit(::elmur_base::Description::new(prefix, #tag, #text, #all));));
    }
    for variant in variants {
        let own = SerdeNames::of(&variant.attrs)?;
        if own.skip {
            continue;
        }
        let name = variant.ident.to_string();
        let name =
            own.rename.unwrap_or_else(|| serde.rename_all.map_or(name.clone(), |case| case.variant(&name)));
        let doc = docs(&variant.attrs);
        choices.extend(quote!((::std::string::String::from(#name), #doc),));
        let inner = match &variant.fields {
            Fields::Unit => continue,
            Fields::Named(fields) => of_fields(fields.named.iter(), own.rename_all.or(serde.rename_fields))?,
            Fields::Unnamed(fields) if fields.unnamed.len() == 1 => {
                let ty = &fields.unnamed[0].ty;
                quote!(<#ty as ::elmur_base::Describe>::describe(prefix, visit);)
            }
            Fields::Unnamed(_) => TokenStream::new(),
        };
        describe.extend(match (&serde.tag, serde.untagged) {
            (Some(tag), _) => quote! {
                ::elmur_base::describe::variant(prefix, #tag, #name, visit, |visit| { #inner });
            },
            (None, true) => quote!({ #inner }),
            (None, false) => quote!({
                visit(::elmur_base::Description::new(prefix, #name, #doc, ::std::vec::Vec::new()));
                let prefix = &*::elmur_base::describe::join(prefix, #name);
                #inner
            }),
        });
    }
    Ok((describe, quote!(::std::vec![#choices])))
}

/// A doc comment as one line.
fn docs(attrs: &[Attribute]) -> String {
    lines(attrs).iter().filter(|line| !line.is_empty()).cloned().collect::<Vec<_>>().join(" ")
}

/// The first paragraph of a doc comment as one line: what a type is, without remarks for programmers.
fn first_paragraph(attrs: &[Attribute]) -> String {
    lines(attrs).split(String::is_empty).next().unwrap_or_default().join(" ")
}

/// The lines of a doc comment.
fn lines(attrs: &[Attribute]) -> Vec<String> {
    let mut lines = Vec::new();
    for attr in attrs.iter().filter(|attr| attr.path().is_ident("doc")) {
        if let Meta::NameValue(pair) = &attr.meta
            && let Expr::Lit(ExprLit { lit: Lit::Str(text), .. }) = &pair.value
        {
            let text = text.value();
            lines.extend(text.split('\n').map(|line| line.trim().to_owned()));
        }
    }
    lines
}

/// Whether a field is described as a whole.
fn is_leaf(attrs: &[Attribute]) -> Result<bool> {
    let mut leaf = false;
    for attr in attrs.iter().filter(|attr| attr.path().is_ident("describe")) {
        attr.parse_nested_meta(|meta| {
            leaf |= meta.path.is_ident("leaf");
            if leaf { Ok(()) } else { Err(meta.error("expected `leaf`")) }
        })?;
    }
    Ok(leaf)
}
