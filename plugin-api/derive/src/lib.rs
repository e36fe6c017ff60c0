//! `#[derive(AbiLayout)]`: writes down the layout of an ABI struct as a constant table.
//!
//! The table is what a plugin exports beside its root, so that the host can compare both sides field by field and
//! say which one differs. Field types are recorded as source text: a changed signature (`*mut u8` to `*mut u16`)
//! keeps its size and would be missed by sizes alone.

use proc_macro::TokenStream;
use quote::{ToTokens, quote};
use syn::{Attribute, Data, DeriveInput, Error, Fields, Meta, parse_macro_input};

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
        let ty_text = normalise(&ty.to_token_stream().to_string());
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

/// Token text without the spacing that the compiler's printer is free to change between versions.
fn normalise(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        let between_words =
            c == ' ' && out.chars().next_back().is_some_and(is_word) && chars.peek().copied().is_some_and(is_word);
        if c != ' ' || between_words {
            out.push(c);
        }
    }
    out.replace(",)", ")")
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}
