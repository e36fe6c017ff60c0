//! What the KV codec plugins share: instruction sets, kernels over decoded rows, rotations, the choice of a scale, the
//! reading of options, and the token-wise codec of rotated groups that is made of them.
//!
//! Linked into each plugin; nothing of it crosses the ABI.

pub mod grouped;
pub mod isa;
pub mod lanes;
pub mod options;
pub mod rotation;
pub mod scale;
pub mod tiles;
mod wht;

pub use grouped::{GroupCodec, GroupFormat};
pub use isa::{Isa, Level};
pub use options::Options;
pub use rotation::SignedRotation;
pub use scale::{Fit, ScaleRule};
pub use wht::{block_size, wht};
