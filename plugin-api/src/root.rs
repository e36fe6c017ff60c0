//! The root every plugin exports: who it is, what it was built with, and how to make one.

use core::ffi::c_void;

use opencoti_plugin_api_derive::AbiLayout;

use crate::error::Status;
use crate::host::HostServices;
use crate::layout::LayoutTable;
use crate::text::{Str, TextBuf};

/// Name of the exported function that returns the root: `const PluginRoot *opencoti_plugin_root(void)`.
pub const ROOT_SYMBOL: &str = "opencoti_plugin_root";
/// Name of the exported function that returns the layout table; a plugin in C may leave it out.
pub const LAYOUT_SYMBOL: &str = "opencoti_plugin_layout";
/// First field of every root: the bytes `opencoti` in little-endian order. Tells a plugin from a library that happens
/// to export the symbol.
pub const ROOT_MAGIC: u64 = 0x6974_6f63_6e65_706f;

/// A semantic version of the API.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, AbiLayout)]
pub struct ApiVersion {
    /// Changes when old plugins no longer load.
    pub major: u32,
    /// Changes when fields or extensions are added.
    pub minor: u32,
    /// Changes when nothing but code changes.
    pub patch: u32,
}

impl core::fmt::Display for ApiVersion {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

/// The version of this crate.
pub const API_VERSION: ApiVersion = ApiVersion { major: 1, minor: 0, patch: 0 };

/// Kinds of plugins. On the wire a kind is its name, so that a new one changes no struct.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Kind {
    /// Stores keys and values in fewer bytes.
    KvCodec,
    /// Decides which pages stay on the device.
    ResidencyPolicy,
    /// Rewrites attention plans.
    AttentionVariant,
    /// Proposes tokens.
    Drafter,
    /// Decides whether a request may start.
    AdmissionPolicy,
    /// Shares a GPU between processes.
    PacingPolicy,
    /// Decides how far ahead to draft.
    DraftDepthPolicy,
    /// Images, speech, video.
    MediaEngine,
}

impl Kind {
    /// Every kind this API version knows.
    pub const ALL: [Kind; 8] = [
        Kind::KvCodec,
        Kind::ResidencyPolicy,
        Kind::AttentionVariant,
        Kind::Drafter,
        Kind::AdmissionPolicy,
        Kind::PacingPolicy,
        Kind::DraftDepthPolicy,
        Kind::MediaEngine,
    ];

    /// Its name in manifests and configs.
    pub const fn name(self) -> &'static str {
        match self {
            Kind::KvCodec => "kv-codec",
            Kind::ResidencyPolicy => "residency-policy",
            Kind::AttentionVariant => "attention-variant",
            Kind::Drafter => "drafter",
            Kind::AdmissionPolicy => "admission-policy",
            Kind::PacingPolicy => "pacing-policy",
            Kind::DraftDepthPolicy => "draft-depth-policy",
            Kind::MediaEngine => "media-engine",
        }
    }

    /// The kind of that name.
    pub fn from_name(name: &str) -> Option<Kind> {
        Kind::ALL.into_iter().find(|k| k.name() == name)
    }
}

/// What a plugin says of itself. All text is static: valid for as long as the process lives.
#[repr(C)]
#[derive(Clone, Copy, AbiLayout)]
#[abi(growing)]
pub struct Manifest {
    /// Bytes of this struct as the plugin was built.
    pub size: usize,
    /// Name by which a config selects it, for example `kv-scalar`.
    pub name: Str,
    /// Its own semantic version.
    pub version: Str,
    /// A kind's name ([`Kind::name`]).
    pub kind: Str,
    /// SPDX licence expression.
    pub license: Str,
    /// One line for people.
    pub summary: Str,
    /// What it needs beyond the ABI, names separated by spaces (`files`, `network`); empty for nothing.
    pub capabilities: Str,
    /// JSON schema of its `config` table; empty for none.
    pub config_schema: Str,
}

/// The root of a plugin. Static; reached only through a pointer. `magic`, `size` and `api` keep their places in
/// every major version, so that any host can say what it found.
#[repr(C)]
#[derive(Clone, Copy, AbiLayout)]
#[abi(growing)]
pub struct PluginRoot {
    /// [`ROOT_MAGIC`].
    pub magic: u64,
    /// Bytes of this struct as the plugin was built.
    pub size: usize,
    /// The API it was built with.
    pub api: ApiVersion,
    /// Who it is.
    pub manifest: *const Manifest,
    /// The function table of its kind ([`crate::kv_codec::KvCodecVtbl`] and so on), static.
    pub interface: *const c_void,
    /// `[main-thread]` Makes an instance from its config (JSON text, valid until it returns). `host` stays
    /// valid for as long as the process lives. On success `*out` is set and the instance is given back through `destroy`.
    pub create: unsafe extern "C" fn(
        host: *const HostServices,
        config: Str,
        out: *mut *mut c_void,
        error: *mut TextBuf,
    ) -> Status,
    /// `[main-thread]` Ends an instance; nothing made by it is used afterwards. Not called once the plugin is in
    /// quarantine.
    pub destroy: unsafe extern "C" fn(instance: *mut c_void, error: *mut TextBuf) -> Status,
}

// SAFETY: roots and manifests are static, immutable data.
unsafe impl Send for PluginRoot {}
// SAFETY: as above.
unsafe impl Sync for PluginRoot {}

/// Signature of [`ROOT_SYMBOL`].
pub type RootFn = unsafe extern "C" fn() -> *const PluginRoot;
/// Signature of [`LAYOUT_SYMBOL`].
pub type LayoutFn = unsafe extern "C" fn() -> *const LayoutTable;

/// Reads a field of a growing struct whose other side may be older: `None` when its size ends before the field.
#[macro_export]
macro_rules! field_or_none {
    ($ptr:expr, $ty:ty, $field:ident) => {{
        let ptr: *const $ty = $ptr;
        let end = ::core::mem::offset_of!($ty, $field) + $crate::export::size_of_field(|s: &$ty| &s.$field);
        if (*ptr).size >= end { Some((*ptr).$field) } else { None }
    }};
}
pub use crate::field_or_none;

#[cfg(test)]
mod tests {
    use core::mem::offset_of;

    use super::*;

    #[test]
    fn the_magic_is_readable_text() {
        assert_eq!(&ROOT_MAGIC.to_le_bytes(), b"opencoti");
    }

    #[test]
    fn a_field_beyond_an_older_struct_is_none() {
        let mut manifest = Manifest {
            size: offset_of!(Manifest, config_schema),
            name: Str::from_static("older"),
            version: Str::EMPTY,
            kind: Str::EMPTY,
            license: Str::EMPTY,
            summary: Str::EMPTY,
            capabilities: Str::from_static("files"),
            config_schema: Str::from_static("never read"),
        };
        // SAFETY: the pointer is to a whole, live struct.
        unsafe {
            assert!(field_or_none!(&manifest, Manifest, config_schema).is_none());
            assert_eq!(field_or_none!(&manifest, Manifest, capabilities).unwrap().to_string_lossy(), "files");
            manifest.size += 1;
            assert!(field_or_none!(&manifest, Manifest, config_schema).is_none(), "a field that ends later");
            manifest.size = size_of::<Manifest>();
            assert!(field_or_none!(&manifest, Manifest, config_schema).is_some());
        }
    }

    #[test]
    fn kinds_have_names_that_lead_back() {
        for kind in Kind::ALL {
            assert_eq!(Kind::from_name(kind.name()), Some(kind));
        }
    }
}
