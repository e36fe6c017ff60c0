//! Finding, checking and loading plugins.
//!
//! A plugin is a shared library with one root. On the way from a name in the config to a working instance each step
//! may refuse, with one sentence that says what was found, what was expected and what to do ([`Refusal`]):
//!
//! 1. [`PluginEntry`] names a plugin; its file is the entry's `path`, or the highest version in the plugin folders that
//!    meets the requirement (module `select`).
//! 2. The file is read once. Its bytes must be a whole library for this machine (module `image`) and have the expected
//!    SHA-256, and are copied to a name made of their digest (module `cache`): what is mapped can't change on disk, and
//!    a new version under an old path is really the new one.
//! 3. The copy is opened, and its root checked before anything in it is called: magic, API version, layout table,
//!    manifest, function table (modules `library` and `root`).
//! 4. An instance is created from the entry's config, and offered to the engine through the wrappers of
//!    `opencoti_plugin_api::host` ([`Registry`]).
//!
//! Native code is never unmapped: a library that was opened stays for the life of the process, also when it was
//! refused or its last instance is gone. Somewhere a thread of it may still run, or a static string still be shown.

#![deny(missing_docs)]

mod cache;
mod config;
mod image;
mod info;
mod library;
mod refusal;
mod registry;
mod root;
mod select;
mod sink;

pub use cache::default_cache_folder;
pub use config::{PluginEntry, RegistryConfig};
pub use info::{CodecOffer, PluginInfo, State};
pub use refusal::Refusal;
pub use registry::{Registry, discover, inspect};
pub use sink::TracingSink;
