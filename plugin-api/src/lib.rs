//! The plugin ABI of opencoti.
//!
//! One ABI, two faces. Every interface is a `#[repr(C)]` struct of `extern "C"` function pointers plus an opaque
//! object pointer. Rust authors implement a safe trait and call [`export_plugin!`]; C, C++ and Zig authors include
//! `include/opencoti_plugin.h` and fill the same structs.
//!
//! # How it grows
//! Structs marked *growing* get new fields at their end only, in a minor version; every other struct that crosses
//! is frozen. Whatever is optional is an extension, looked up by an id such as [`CPU_TILES_ID`]; an id's struct
//! never changes, a change is a new id. A plugin exports the layout table of the API it was built with and the host
//! accepts it when each struct is a prefix of its counterpart, in either direction ([`layout`]).
//!
//! # Threads
//! Every function carries a label in brackets:
//! `[main-thread]` called while loading, one call at a time; `[engine-thread]` called by the thread that owns the
//! scheduler, one call at a time; `[worker, re-entrant]` called by several threads at once on one object, never on
//! the same tile for writing; `[any-thread]` may be called by anybody at any time.
//!
//! # Panics
//! A panic that leaves an `extern "C"` function aborts the process. The glue that [`export_plugin!`] generates runs
//! every call through [`guard::guard`], which turns a panic into [`Status::PANIC`]; the host then quarantines the
//! plugin. Plugins must be built with `panic = "unwind"`.

#![deny(missing_docs)]

extern crate self as opencoti_plugin_api;

pub mod admission;
pub mod conformance;
pub mod cpu_tiles;
pub mod device_source;
pub mod error;
pub mod export;
pub mod guard;
pub mod health;
pub mod host;
pub mod kv_codec;
pub mod layout;
pub mod residency;
pub mod root;
pub mod text;

pub use cpu_tiles::CPU_TILES_ID;
pub use error::{Error, Status};
pub use opencoti_plugin_api_derive::AbiLayout;
pub use root::{API_VERSION, ApiVersion, Kind, Manifest, PluginRoot};
pub use text::{Str, TextBuf};

/// Tokens in a page of the KV cache. A *tile* is one KV head's share of a page: one layer, one side, one head.
pub const PAGE_TOKENS: usize = 128;

/// Id of the extension by which codecs bring source for the host's attention kernels on GPUs ([`device_source`]).
pub const DEVICE_SOURCE_ID: &str = "opencoti.codec.device-source/1";
/// Id reserved for the graph builder among the host's services.
pub const GRAPH_BUILDER_ID: &str = "opencoti.host.graph-builder/1";
/// Id reserved for GGUF loading among the host's services.
pub const GGUF_ID: &str = "opencoti.host.gguf/1";
