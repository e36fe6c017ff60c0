//! Extension `opencoti.codec.device-source/1`: a codec's own source for GPUs.
//!
//! The host splices it into its attention kernels and compiles the whole for the card at hand, so that a tile is read in its
//! encoded form by the fused kernel. What the source must offer is the *codec concept* of its language: for `cuda-c++/1` it
//! stands at the top of the host's `attention.cu` and in `docs/cuda.md`. Source for other devices gets other language names.

use core::ffi::c_void;

use opencoti_plugin_api_derive::AbiLayout;

use crate::error::Status;
use crate::kv_codec::KvCodec;
use crate::text::{Str, TextBuf};

/// A source and the type in it that an opened codec is. Both texts live as long as the codec; empty texts say that there is
/// none in the language asked for.
#[repr(C)]
#[derive(Clone, Copy, AbiLayout)]
pub struct DeviceSource {
    /// Source text; the same for all codecs that share it, so that it is compiled in once.
    pub text: Str,
    /// An expression that names the type, for example `my_codec::Codec<128>`.
    pub name: Str,
}

/// Functions of the extension; `codec` is an opened codec. Frozen: a change is a new id.
#[repr(C)]
#[derive(Clone, Copy, AbiLayout)]
pub struct DeviceSourceVtbl {
    /// Bytes of this struct.
    pub size: usize,
    /// `[main-thread]` Writes the source in `language`, for example `cuda-c++/1`, to `*out`.
    pub source:
        unsafe extern "C" fn(codec: *mut c_void, language: Str, out: *mut DeviceSource, error: *mut TextBuf) -> Status,
}

/// The table of a codec type; made by [`DeviceSourceVtbl::of`], so that it can't be of another type.
pub struct DeviceSourceOf<C: ?Sized> {
    pub(crate) table: &'static DeviceSourceVtbl,
    pub(crate) codec: core::marker::PhantomData<fn(&C)>,
}

/// A source as an author gives it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Source<'a> {
    /// Source text.
    pub text: &'a str,
    /// The type in it.
    pub name: &'a str,
}

/// The extension, as an author writes it.
pub trait HasDeviceSource: KvCodec {
    /// The source in a language, if there is one.
    fn device_source(&self, language: &str) -> Option<Source<'_>>;
}
