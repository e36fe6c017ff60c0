//! `#[derive(AbiLayout)]`: writes down the layout of an ABI struct as a constant table.
//!
//! The table is what a plugin exports beside its root, so that the host can compare both sides field by field and
//! say which one differs. Field types are recorded as source text: a changed signature (`*mut u8` to `*mut u16`)
//! keeps its size and would be missed by sizes alone.

use proc_macro::TokenStream;
use proc_macro2::{Delimiter, TokenTree};
use quote::{ToTokens, quote};
use syn::{Attribute, Data, DeriveInput, Error, Fields, Meta, Type, parse_macro_input};

/// Derives `AbiLayout` for a `#[repr(C)]` struct with named fields.
///
/// `#[abi(growing)]` marks a struct that may get more fields at its end in a later minor version (its first field
/// is its size or it is only ever reached through a pointer to the whole); without it the struct is frozen.
#[proc_macro_derive(AbiLayout, attributes(abi))]
pub fn derive_abi_layout(input: TokenStream) -> TokenStream {
    let input = parse_macro_input!(input as DeriveInput);
    expand(&input).unwrap_or_else(Error::into_compile_error).into()
}

fn expand(input: &DeriveInput) -> Result<proc_macro2::TokenStream, Error> {
    if !input.attrs.iter().any(is_repr_c) {
        return Err(Error::new_spanned(&input.ident, "an ABI struct needs #[repr(C)] as its own attribute"));
    }
    let Data::Struct(data) = &input.data else {
        return Err(Error::new_spanned(&input.ident, "only structs cross the ABI; use integer codes for enums"));
    };
    let Fields::Named(fields) = &data.fields else {
        return Err(Error::new_spanned(&input.ident, "an ABI struct names its fields"));
    };
    let growing = input.attrs.iter().any(is_growing);
    let name = &input.ident;
    let name_text = name.to_string();
    let entries = fields.named.iter().map(|field| {
        let ident = field.ident.as_ref().expect("named field");
        let ident_text = ident.to_string();
        let ty = &field.ty;
        let ty_text = type_text(ty);
        quote! {
            ::opencoti_plugin_api::layout::FieldLayout {
                name: ::opencoti_plugin_api::Str::from_static(#ident_text),
                ty: ::opencoti_plugin_api::Str::from_static(#ty_text),
                offset: ::core::mem::offset_of!(#name, #ident) as u32,
                size: ::core::mem::size_of::<#ty>() as u32,
            }
        }
    });
    Ok(quote! {
        impl ::opencoti_plugin_api::layout::AbiLayout for #name {
            const FIELDS: &'static [::opencoti_plugin_api::layout::FieldLayout] = &[#(#entries),*];
            const LAYOUT: ::opencoti_plugin_api::layout::StructLayout =
                ::opencoti_plugin_api::layout::StructLayout::new(
                    #name_text,
                    #growing,
                    ::core::mem::size_of::<#name>(),
                    ::core::mem::align_of::<#name>(),
                    <#name as ::opencoti_plugin_api::layout::AbiLayout>::FIELDS,
                );
        }
    })
}

fn is_repr_c(attr: &Attribute) -> bool {
    attr.path().is_ident("repr") && matches!(&attr.meta, Meta::List(list) if list.tokens.to_string() == "C")
}

fn is_growing(attr: &Attribute) -> bool {
    attr.path().is_ident("abi") && matches!(&attr.meta, Meta::List(list) if list.tokens.to_string() == "growing")
}

/// A type as text that depends on nothing but the type: names of a function's arguments are left out (renaming one
/// changes no ABI), and so is all spacing, which the compiler's printer is free to change between versions.
fn type_text(ty: &Type) -> String {
    let mut ty = ty.clone();
    if let Type::FnPtr(function) = &mut ty {
        function.inputs.iter_mut().for_each(|argument| argument.name = None);
    }
    let mut out = String::new();
    write_tokens(ty.to_token_stream(), &mut out);
    out.replace(",)", ")")
}

fn write_tokens(tokens: proc_macro2::TokenStream, out: &mut String) {
    for token in tokens {
        match token {
            TokenTree::Group(group) => {
                let (open, close) = match group.delimiter() {
                    Delimiter::Parenthesis => ("(", ")"),
                    Delimiter::Bracket => ("[", "]"),
                    Delimiter::Brace => ("{", "}"),
                    Delimiter::None => ("", ""),
                };
                out.push_str(open);
                write_tokens(group.stream(), out);
                out.push_str(close);
            }
            TokenTree::Punct(punct) => out.push(punct.as_char()),
            word => {
                if out.ends_with(|c: char| c.is_alphanumeric() || c == '_' || c == '"') {
                    out.push(' ');
                }
                out.push_str(&word.to_string());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(source: &str) -> String {
        type_text(&syn::parse_str(source).unwrap())
    }

    #[test]
    fn spacing_and_argument_names_do_not_matter() {
        let expected = r#"unsafe extern "C" fn(*mut c_void,*const[u8;4])->Status"#;
        assert_eq!(text("unsafe extern \"C\" fn(a: *mut c_void, b: *const [u8; 4]) -> Status"), expected);
        assert_eq!(text("unsafe extern \"C\" fn (\n    *mut c_void ,\n  *const [ u8 ; 4 ],\n)\n-> Status"), expected);
    }

    #[test]
    fn types_and_mutability_do() {
        assert_eq!(text("*const u8"), "*const u8");
        assert_ne!(text("*const u8"), text("*mut u8"));
        assert_ne!(text("fn(*mut u8)"), text("fn(*mut u16)"));
        assert_ne!(text("fn(u8, u16)"), text("fn(u16, u8)"));
    }
}
