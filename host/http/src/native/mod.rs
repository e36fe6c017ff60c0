//! llama.cpp's own routes.

pub(crate) mod completion;
pub(crate) mod embedding;
pub(crate) mod props;
pub(crate) mod slots;
pub(crate) mod tokens;
