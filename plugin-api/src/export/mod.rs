//! The plugin's side: makes the C structs from an author's traits.
//!
//! ```ignore
//! struct MyCodecs;
//! impl Plugin for MyCodecs { /* ABOUT, create */ }
//! impl KvCodecs for MyCodecs { /* codecs, open */ }
//! opencoti_plugin_api::export_plugin!(kv_codec: MyCodecs);
//! ```
//! Keep the logic in a library crate and the export in a crate of its own with `crate-type = ["cdylib"]`: two plugins
//! that export the root cannot be linked into one binary.

mod codec;
mod policy;

use core::ffi::c_void;
use core::marker::PhantomData;
use core::mem::size_of;

use crate::admission::AdmissionPolicy;
use crate::error::{Error, Status};
use crate::guard::guard;
use crate::host::{Host, HostServices};
use crate::kv_codec::KvCodecs;
use crate::residency::ResidencyPolicy;
use crate::root::{API_VERSION, Kind, Manifest, PluginRoot, ROOT_MAGIC};
use crate::text::{Str, TextBuf};

/// What an author says of a plugin.
#[derive(Clone, Copy, Debug)]
pub struct About {
    /// Name by which a config selects it.
    pub name: &'static str,
    /// Semantic version, usually `env!("CARGO_PKG_VERSION")`.
    pub version: &'static str,
    /// SPDX expression.
    pub license: &'static str,
    /// One line for people.
    pub summary: &'static str,
    /// What it needs beyond the ABI; empty for nothing.
    pub capabilities: &'static str,
    /// JSON schema of its config; empty for none.
    pub config_schema: &'static str,
}

/// A plugin of any kind.
pub trait Plugin: Sized + Send + Sync + 'static {
    /// Who it is.
    const ABOUT: About;

    /// Makes an instance. `config` is the `config` table of its `[[plugin]]` entry as JSON, `{}` when absent.
    fn create(host: Host, config: &serde_json::Value) -> Result<Self, Error>;
}

/// Exports a plugin: the root and the layout table.
#[macro_export]
macro_rules! export_plugin {
    (kv_codec: $plugin:ty) => {
        $crate::export_plugin!(@root $crate::export::kv_codec_root::<$plugin>());
    };
    (residency_policy: $plugin:ty) => {
        $crate::export_plugin!(@root $crate::export::residency_policy_root::<$plugin>());
    };
    (admission_policy: $plugin:ty) => {
        $crate::export_plugin!(@root $crate::export::admission_policy_root::<$plugin>());
    };
    (@root $root:expr) => {
        /// The root of this plugin.
        // SAFETY: the name is the ABI's; a plugin library exports it once.
        #[unsafe(no_mangle)]
        pub extern "C" fn opencoti_plugin_root() -> *const $crate::PluginRoot {
            $root
        }
        /// The layout table of the API this plugin was built with.
        // SAFETY: as above.
        #[unsafe(no_mangle)]
        pub extern "C" fn opencoti_plugin_layout() -> *const $crate::layout::LayoutTable {
            &$crate::layout::LAYOUT_TABLE
        }
    };
}

/// Offset just past a field; used by [`crate::field_or_none!`].
#[doc(hidden)]
pub const fn size_of_field<S, F>(_: fn(&S) -> &F) -> usize {
    size_of::<F>()
}

/// The root of a codec plugin.
pub fn kv_codec_root<P: Plugin + KvCodecs>() -> &'static PluginRoot {
    <Glue<P>>::KV_CODEC_ROOT
}

/// The root of a residency policy.
pub fn residency_policy_root<P: Plugin + ResidencyPolicy>() -> &'static PluginRoot {
    <Glue<P>>::RESIDENCY_ROOT
}

/// The root of an admission policy.
pub fn admission_policy_root<P: Plugin + AdmissionPolicy>() -> &'static PluginRoot {
    <Glue<P>>::ADMISSION_ROOT
}

/// Carries the constants of a plugin type: tables and root are made at compile time.
struct Glue<P>(PhantomData<P>);

impl<P: Plugin> Glue<P> {
    const fn manifest(kind: Kind) -> Manifest {
        Manifest {
            size: size_of::<Manifest>(),
            name: Str::from_static(P::ABOUT.name),
            version: Str::from_static(P::ABOUT.version),
            kind: Str::from_static(kind.name()),
            license: Str::from_static(P::ABOUT.license),
            summary: Str::from_static(P::ABOUT.summary),
            capabilities: Str::from_static(P::ABOUT.capabilities),
            config_schema: Str::from_static(P::ABOUT.config_schema),
        }
    }

    const fn root(manifest: *const Manifest, interface: *const c_void) -> PluginRoot {
        PluginRoot {
            magic: ROOT_MAGIC,
            size: size_of::<PluginRoot>(),
            api: API_VERSION,
            manifest,
            interface,
            create: create::<P>,
            destroy: destroy::<P>,
        }
    }
}

/// An object the host got from this plugin and gives back with a call.
///
/// # Safety
/// `ptr` is what `create` or `open` of the same plugin returned, as a `T`, and has not been ended.
unsafe fn object<'a, T>(ptr: *mut c_void) -> &'a T {
    // SAFETY: promised by the caller.
    unsafe { &*ptr.cast::<T>() }
}

fn parse_json(text: &str, what: &str) -> Result<serde_json::Value, Error> {
    if text.trim().is_empty() {
        return Ok(serde_json::Value::Object(Default::default()));
    }
    serde_json::from_str(text).map_err(|e| Error::new(format!("the {what} cannot be read as JSON: {e}")))
}

unsafe extern "C" fn create<P: Plugin>(
    host: *const HostServices,
    config: Str,
    out: *mut *mut c_void,
    error: *mut TextBuf,
) -> Status {
    // SAFETY: pointers are valid during the call by the root's contract.
    unsafe {
        guard(error, || {
            let config = parse_json(&config.to_string_lossy(), "config")?;
            let plugin = P::create(Host::new(host), &config)?;
            *out = Box::into_raw(Box::new(plugin)).cast();
            Ok(())
        })
    }
}

unsafe extern "C" fn destroy<P: Plugin>(instance: *mut c_void, error: *mut TextBuf) -> Status {
    // SAFETY: made by `create` of this plugin and destroyed once.
    unsafe {
        guard(error, || {
            drop(Box::from_raw(instance.cast::<P>()));
            Ok(())
        })
    }
}
