//! Checking a plugin's root before anything in it is called.

use std::mem::offset_of;
use std::path::Path;

use opencoti_plugin_api::host::{check_interface, check_root_functions};
use opencoti_plugin_api::layout::{LayoutTable, Layouts};
use opencoti_plugin_api::root::ROOT_MAGIC;
use opencoti_plugin_api::{API_VERSION, ApiVersion, Kind, Manifest, PluginRoot, Str, field_or_none};
use semver::Version;

use crate::refusal::Refusal;

/// What the manifest says, checked.
#[derive(Clone, Debug)]
pub(crate) struct Facts {
    pub(crate) name: String,
    pub(crate) version: Version,
    pub(crate) kind: Kind,
    pub(crate) api: ApiVersion,
    pub(crate) layout: LayoutVerdict,
    pub(crate) license: String,
    pub(crate) summary: String,
    pub(crate) capabilities: Vec<String>,
    pub(crate) config_schema: Option<serde_json::Value>,
}

/// How the layouts of both sides were found to agree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LayoutVerdict {
    /// Linked into this binary: one and the same API.
    Linked,
    /// Field by field, nothing differs.
    Same,
    /// Field by field, one side has more at the end of some structs.
    Compatible,
    /// The plugin exports no table.
    SizesOnly,
}

impl LayoutVerdict {
    pub(crate) fn text(self) -> &'static str {
        match self {
            LayoutVerdict::Linked => "linked into the host",
            LayoutVerdict::Same => "layout table agrees in every field",
            LayoutVerdict::Compatible => "layout table agrees but for fields that only one side has",
            LayoutVerdict::SizesOnly => "no layout table: checked by sizes and ids",
        }
    }
}

/// A manifest's strings beyond this are no text for people.
const MAX_TEXT: usize = 64 * 1024;

/// Checks a root and reads its manifest. Nothing of the plugin is called.
///
/// # Safety
/// `root` and `table` are null or what the exported functions of one plugin returned; they are followed as far as what
/// was checked before allows, and must stay valid for ever.
pub(crate) unsafe fn check(
    path: &Path,
    root: *const PluginRoot,
    table: Option<*const LayoutTable>,
) -> Result<(&'static PluginRoot, Facts), Refusal> {
    let broken = |problem: String| Refusal::Broken { path: path.into(), problem };
    // SAFETY: promised by the caller.
    let api = unsafe { check_head(path, root) }?;
    // SAFETY: the root is this API's, so its tables are too.
    let layout = unsafe { check_layout(path, table) }?;
    // SAFETY: the head is right and the size was checked against this build's root.
    unsafe { check_root_functions(root) }.map_err(broken)?;
    // SAFETY: all fields are there, functions are not null, and roots are static.
    let root = unsafe { &*root };
    // SAFETY: the manifest is static data of a plugin of this API.
    let facts = unsafe { read_manifest(path, root.manifest, api, layout) }?;
    // SAFETY: as above; the kind was read from the same root.
    unsafe { check_interface(root, facts.kind) }.map_err(broken)?;
    Ok((root, facts))
}

/// Magic, API version and size, in this order: the first fields keep their places in every version.
unsafe fn check_head(path: &Path, root: *const PluginRoot) -> Result<ApiVersion, Refusal> {
    let path = || path.to_path_buf();
    if root.is_null() || !root.is_aligned() {
        let problem = format!("`opencoti_plugin_root` returned {root:p}, expected the address of a static struct");
        return Err(Refusal::Broken { path: path(), problem });
    }
    // SAFETY: not null and aligned; a root has these three fields at least.
    let (magic, size) = unsafe { ((*root).magic, (*root).size) };
    if magic != ROOT_MAGIC {
        return Err(Refusal::Magic { path: path(), found: magic, expected: ROOT_MAGIC });
    }
    let too_small = |least| {
        let problem = format!("its `PluginRoot` has {size} bytes, expected at least {least}");
        Refusal::Broken { path: path(), problem }
    };
    if size < offset_of!(PluginRoot, manifest) {
        return Err(too_small(offset_of!(PluginRoot, manifest)));
    }
    // SAFETY: within the size.
    let api = unsafe { (*root).api };
    if api.major != API_VERSION.major {
        return Err(Refusal::ApiVersion { path: path(), found: api });
    }
    // All fields of this build's root are of version 1.0, so every plugin of the major version has them.
    if size < size_of::<PluginRoot>() {
        return Err(too_small(size_of::<PluginRoot>()));
    }
    if api.minor > API_VERSION.minor {
        tracing::debug!(path = %path().display(), plugin = %api, host = %API_VERSION, "plugin of a newer minor API version");
    }
    Ok(api)
}

unsafe fn check_layout(path: &Path, table: Option<*const LayoutTable>) -> Result<LayoutVerdict, Refusal> {
    let Some(table) = table else { return Ok(LayoutVerdict::SizesOnly) };
    // SAFETY: promised by the caller of `check`.
    let theirs = unsafe { Layouts::read(table) }.ok_or_else(|| Refusal::Broken {
        path: path.into(),
        problem: "`opencoti_plugin_layout` returned no layout table".to_owned(),
    })?;
    let ours = Layouts::ours();
    ours.check_against(&theirs).map_err(|difference| {
        tracing::debug!(path = %path.display(), ?theirs, "layout of the refused plugin");
        Refusal::Layout { path: path.into(), difference }
    })?;
    let same = ours.structs.iter().all(|s| theirs.structs.contains(s)) && theirs.structs.len() == ours.structs.len();
    Ok(if same { LayoutVerdict::Same } else { LayoutVerdict::Compatible })
}

unsafe fn read_manifest(
    path: &Path,
    manifest: *const Manifest,
    api: ApiVersion,
    layout: LayoutVerdict,
) -> Result<Facts, Refusal> {
    let broken = |problem: String| Refusal::Broken { path: path.into(), problem };
    if manifest.is_null() || !manifest.is_aligned() {
        return Err(broken(format!("its manifest is at {manifest:p}, expected the address of a static struct")));
    }
    // SAFETY: promised by the caller; a manifest starts with its size.
    let size = unsafe { (*manifest).size };
    if size < offset_of!(Manifest, license) {
        let least = offset_of!(Manifest, license);
        return Err(broken(format!("its manifest has {size} bytes, expected at least {least}")));
    }
    let text = |field: &str, value: Option<Str>| {
        // SAFETY: manifest strings are static; null and absurd lengths are refused.
        unsafe { manifest_text(value.unwrap_or(Str::EMPTY)) }
            .map_err(|problem| broken(format!("`{field}` of its manifest {problem}")))
    };
    // SAFETY: fields are only read as far as the size reaches.
    let (name, version, kind, license, summary, capabilities, schema) = unsafe {
        (
            text("name", field_or_none!(manifest, Manifest, name))?,
            text("version", field_or_none!(manifest, Manifest, version))?,
            text("kind", field_or_none!(manifest, Manifest, kind))?,
            text("license", field_or_none!(manifest, Manifest, license))?,
            text("summary", field_or_none!(manifest, Manifest, summary))?,
            text("capabilities", field_or_none!(manifest, Manifest, capabilities))?,
            text("config_schema", field_or_none!(manifest, Manifest, config_schema))?,
        )
    };
    check_name(name).map_err(broken)?;
    let version = Version::parse(version)
        .map_err(|e| broken(format!("`version` of its manifest is `{version}`, expected a semantic version ({e})")))?;
    let kind = Kind::from_name(kind).ok_or_else(|| Refusal::UnknownKind {
        path: path.into(),
        found: kind.to_owned(),
        known: known_kinds(),
    })?;
    let config_schema = match schema {
        "" => None,
        json => Some(
            serde_json::from_str(json)
                .map_err(|e| broken(format!("`config_schema` of its manifest is not JSON ({e})")))?,
        ),
    };
    Ok(Facts {
        name: name.to_owned(),
        version,
        kind,
        api,
        layout,
        license: license.to_owned(),
        summary: summary.to_owned(),
        capabilities: capabilities.split_whitespace().map(str::to_owned).collect(),
        config_schema,
    })
}

unsafe fn manifest_text(value: Str) -> Result<&'static str, String> {
    if value.len > MAX_TEXT {
        return Err(format!("has {} bytes, expected at most {MAX_TEXT}", value.len));
    }
    // SAFETY: promised by the caller; the length is bounded.
    unsafe { value.as_static() }.ok_or_else(|| "is not UTF-8 text".to_owned())
}

/// Names stand in configs, addresses and metrics.
fn check_name(name: &str) -> Result<(), String> {
    let allowed = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-' || c == '_' || c == '.';
    if name.is_empty() || name.len() > 64 || !name.chars().all(allowed) {
        return Err(format!(
            "`name` of its manifest is {name:?}, expected 1 to 64 lower-case letters, digits, `-`, `_` or `.`"
        ));
    }
    Ok(())
}

/// All kinds of this API, for messages.
pub(crate) fn known_kinds() -> String {
    Kind::ALL.map(|k| format!("`{}`", k.name())).join(", ")
}
