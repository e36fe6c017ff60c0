//! Why a plugin is not used: one sentence each, with what was found, what was expected and what to do.

use std::path::PathBuf;

use opencoti_plugin_api::{API_VERSION, ApiVersion};
use thiserror::Error;

/// A refusal. Its text is one sentence for the operator; details go to the log at debug level.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum Refusal {
    /// No such file.
    #[error("plugin file {} does not exist; correct the entry's `path` or build the plugin", path.display())]
    Missing {
        /// The file.
        path: PathBuf,
    },
    /// Something other than a regular file.
    #[error("{} is {found}, expected a shared library; give the path of the library file", path.display())]
    NotAFile {
        /// The path.
        path: PathBuf,
        /// What it is.
        found: &'static str,
    },
    /// A file that can't be read.
    #[error("plugin file {} cannot be read ({reason}); make it readable for the user the server runs as", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        reason: String,
    },
    /// A file beyond any library's size.
    #[error("plugin file {} has {bytes} bytes, expected at most {limit}; it is hardly a plugin", path.display())]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// Its size.
        bytes: u64,
        /// The limit.
        limit: u64,
    },
    /// A file that does not begin like a library.
    #[error(
        "{} is not a shared library (starts with {starts_with}), expected {expected}; give the path of the built plugin",
        path.display()
    )]
    NotALibrary {
        /// The file.
        path: PathBuf,
        /// Its first bytes.
        starts_with: String,
        /// What begins otherwise.
        expected: &'static str,
    },
    /// A library that is not whole or not for this machine.
    #[error("{} cannot be loaded here: found {found}, expected {expected}; get or build the plugin again", path.display())]
    WrongImage {
        /// The file.
        path: PathBuf,
        /// What was found.
        found: String,
        /// What was expected.
        expected: String,
    },
    /// A `sha256` that is none.
    #[error("`sha256` of plugin `{name}` is `{found}`, expected 64 hex digits; take them from `sha256sum FILE`")]
    BadDigest {
        /// The entry.
        name: String,
        /// The value.
        found: String,
    },
    /// Another file than the config means.
    #[error(
        "plugin file {} has the SHA-256 {found}, expected {expected}; restore the file, or change `sha256` if you trust it",
        path.display()
    )]
    Checksum {
        /// The file.
        path: PathBuf,
        /// Its digest.
        found: String,
        /// The entry's.
        expected: String,
    },
    /// The copy could not be made.
    #[error("plugin copy {} cannot be written ({reason}); make its folder writable or set another plugin cache folder", path.display())]
    Cache {
        /// The copy.
        path: PathBuf,
        /// The system's reason.
        reason: String,
    },
    /// The dynamic loader refuses.
    #[error("{} cannot be opened by the system's loader ({reason}); install what it needs or build it again", path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// The loader's reason.
        reason: String,
    },
    /// A library without the root symbol.
    #[error(
        "{} is a shared library but no plugin: it exports no `opencoti_plugin_root`; export it with `export_plugin!` or \
         as `opencoti_plugin.h` says",
        path.display()
    )]
    NoRoot {
        /// The file.
        path: PathBuf,
    },
    /// A root that is none.
    #[error("{} has a root with the magic {found:#018x}, expected {expected:#018x}; it is no plugin of opencoti", path.display())]
    Magic {
        /// The file.
        path: PathBuf,
        /// The magic.
        found: u64,
        /// The right one.
        expected: u64,
    },
    /// Another major version.
    #[error(
        "{} was built for plugin API {found}, expected {}.x; use a plugin built for that, or a host of the plugin's version",
        path.display(),
        API_VERSION.major
    )]
    ApiVersion {
        /// The file.
        path: PathBuf,
        /// Its version.
        found: ApiVersion,
    },
    /// Structs that differ in more than additions.
    #[error(
        "{} was built with another layout of the plugin API: {difference}; build it with an unchanged API of version {}.x",
        path.display(),
        API_VERSION.major
    )]
    Layout {
        /// The file.
        path: PathBuf,
        /// The first difference.
        difference: String,
    },
    /// A root, manifest or table that can't be right.
    #[error("{} is broken: {problem}; report it to the plugin's author", path.display())]
    Broken {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// A kind nobody knows.
    #[error("{} is a plugin of unknown kind `{found}`, expected one of {known}; it needs a newer host", path.display())]
    UnknownKind {
        /// The file.
        path: PathBuf,
        /// The manifest's kind.
        found: String,
        /// Kinds of this API.
        known: String,
    },
    /// A kind this host has no use for yet.
    #[error(
        "plugin `{name}` is of kind `{kind}`, which this version of the host cannot use; remove its entry or update the host"
    )]
    UnusedKind {
        /// The plugin.
        name: String,
        /// Its kind.
        kind: String,
    },
    /// Another kind than the entry demands.
    #[error(
        "plugin `{name}` is of kind `{found}`, expected `{expected}` by its entry; correct `kind` or name another plugin"
    )]
    WrongKind {
        /// The plugin.
        name: String,
        /// Its kind.
        found: String,
        /// The entry's.
        expected: String,
    },
    /// A `kind` that is none.
    #[error("`kind` of plugin `{name}` is `{found}`, expected one of {known}{}", did_you_mean(nearest))]
    BadKind {
        /// The entry.
        name: String,
        /// The value.
        found: String,
        /// The valid ones.
        known: String,
        /// The most similar valid one.
        nearest: Option<String>,
    },
    /// The file at `path` is another plugin.
    #[error("{} is the plugin `{found}`, expected `{expected}` by its entry; correct `name` or `path`", path.display())]
    WrongName {
        /// The file.
        path: PathBuf,
        /// Its name.
        found: String,
        /// The entry's.
        expected: String,
    },
    /// No file of that name.
    #[error(
        "plugin `{name}` was not found in {folders} (there: {found}){}; correct `name`, or set `path`",
        did_you_mean(nearest)
    )]
    NotFound {
        /// The entry.
        name: String,
        /// Folders searched.
        folders: String,
        /// Plugins found there.
        found: String,
        /// The most similar name there.
        nearest: Option<String>,
    },
    /// No version that fits.
    #[error(
        "plugin `{name}` was found in version {found}, expected {required}; install a matching version or change `version`"
    )]
    NoVersion {
        /// The plugin.
        name: String,
        /// Versions found.
        found: String,
        /// The requirement.
        required: String,
    },
    /// Two different files of one name and version.
    #[error(
        "plugin `{name}` {version} was found twice, as {} and as {}; set `path` or `sha256` to say which one",
        first.display(),
        second.display()
    )]
    SameVersion {
        /// The plugin.
        name: String,
        /// The version.
        version: String,
        /// A file.
        first: PathBuf,
        /// Another.
        second: PathBuf,
    },
    /// The plugin itself refuses.
    #[error("plugin `{name}` did not start: {reason}")]
    Create {
        /// The plugin.
        name: String,
        /// Its reason.
        reason: String,
    },
    /// Two entries where one is allowed.
    #[error(
        "plugins `{first}` and `{second}` are both of kind `{kind}`, expected at most one; remove one of the entries"
    )]
    TwoOfAKind {
        /// A plugin.
        first: String,
        /// Another.
        second: String,
        /// Their kind.
        kind: &'static str,
    },
    /// One plugin listed twice.
    #[error("plugin `{name}` is listed twice, expected one entry for each plugin; remove one of them")]
    Twice {
        /// The plugin.
        name: String,
    },
    /// A codec nobody offers.
    #[error(
        "codec `{codec}` is offered by no plugin (offered: {offered}){}; list a plugin that has it",
        did_you_mean(nearest)
    )]
    NoCodec {
        /// The codec.
        codec: String,
        /// What there is.
        offered: String,
        /// The most similar one.
        nearest: Option<String>,
    },
    /// A codec that several plugins offer.
    #[error(
        "codec `{codec}` is offered by the plugins `{first}` and `{second}`; write `{first}/{codec}` or `{second}/{codec}`"
    )]
    TwoCodecs {
        /// The codec.
        codec: String,
        /// A plugin.
        first: String,
        /// Another.
        second: String,
    },
}

fn did_you_mean(nearest: &Option<String>) -> String {
    nearest.as_ref().map_or(String::new(), |n| format!("; did you mean `{n}`"))
}

/// The most similar of `names`, if any is similar at all.
pub(crate) fn nearest<'a>(name: &str, names: impl Iterator<Item = &'a str>) -> Option<String> {
    names
        .map(|n| (strsim::jaro_winkler(name, n), n))
        .filter(|(similarity, _)| *similarity > 0.8)
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .map(|(_, n)| n.to_owned())
}
