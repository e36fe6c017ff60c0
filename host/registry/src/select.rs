//! Which file an entry of the config means.

use std::collections::{BTreeMap, BTreeSet};
use std::env::consts::{DLL_PREFIX, DLL_SUFFIX};
use std::path::{Path, PathBuf};

use opencoti_plugin_api::Kind;
use semver::VersionReq;

use crate::config::PluginEntry;
use crate::library::{Candidate, PluginFile, linked};
use crate::refusal::{Refusal, nearest};
use crate::root::known_kinds;

/// Finds plugins by entry; remembers what it has opened.
pub(crate) struct Selector {
    folders: Vec<PathBuf>,
    cache: PathBuf,
    linked: Vec<Candidate>,
    opened: BTreeMap<PathBuf, Result<Candidate, Refusal>>,
}

impl Selector {
    pub(crate) fn new(
        folders: &[PathBuf],
        cache: PathBuf,
        roots: &[&'static opencoti_plugin_api::PluginRoot],
    ) -> Result<Self, Refusal> {
        let linked = roots.iter().map(|r| linked(r)).collect::<Result<_, _>>()?;
        Ok(Selector { folders: folders.to_vec(), cache, linked, opened: BTreeMap::new() })
    }

    /// The plugin of an entry: of its `path`, or the highest matching version in the folders.
    pub(crate) fn resolve(&mut self, entry: &PluginEntry) -> Result<Candidate, Refusal> {
        let kind = entry.kind.as_deref().map(|k| parse_kind(&entry.name, k)).transpose()?;
        let sha256 = entry.sha256.as_deref().map(|s| parse_digest(&entry.name, s)).transpose()?;
        let found = match &entry.path {
            Some(path) => self.by_path(entry, path, sha256.as_deref())?,
            None => self.by_name(entry, sha256.as_deref())?,
        };
        match kind {
            Some(expected) if expected != found.facts.kind => Err(Refusal::WrongKind {
                name: entry.name.clone(),
                found: found.facts.kind.name().to_owned(),
                expected: expected.name().to_owned(),
            }),
            _ => Ok(found),
        }
    }

    fn by_path(&mut self, entry: &PluginEntry, path: &Path, sha256: Option<&str>) -> Result<Candidate, Refusal> {
        let file = PluginFile::read(path)?;
        check_digest(&file, path, sha256)?;
        let found = file.open(&self.cache)?;
        if found.facts.name != entry.name {
            let expected = entry.name.clone();
            return Err(Refusal::WrongName { path: path.into(), found: found.facts.name, expected });
        }
        highest(entry, vec![found])
    }

    fn by_name(&mut self, entry: &PluginEntry, sha256: Option<&str>) -> Result<Candidate, Refusal> {
        let files = libraries(&self.folders);
        let (likely, others): (Vec<_>, Vec<_>) = files.into_iter().partition(|f| is_named_after(f, &entry.name));
        if let Some(expected) = sha256 {
            return self.by_digest(entry, likely, others, expected);
        }
        let mut found: Vec<_> = self.linked.iter().filter(|c| c.facts.name == entry.name).cloned().collect();
        found.extend(self.named(&entry.name, &likely));
        if found.is_empty() {
            // A file of the right name that is refused is what the operator means.
            if let Some(Err(refusal)) = likely.iter().find_map(|f| self.opened.get(f).filter(|r| r.is_err())) {
                return Err(refusal.clone());
            }
            found.extend(self.named(&entry.name, &others));
        }
        if found.is_empty() {
            return Err(self.not_found(&entry.name));
        }
        highest(entry, found)
    }

    /// With a digest only the file that has it is opened: no code of any other runs.
    fn by_digest(
        &mut self,
        entry: &PluginEntry,
        likely: Vec<PathBuf>,
        others: Vec<PathBuf>,
        expected: &str,
    ) -> Result<Candidate, Refusal> {
        let mut other = None;
        for path in likely.iter().chain(&others) {
            let Ok(file) = PluginFile::read(path) else { continue };
            if file.sha256 == expected {
                return self.by_path(entry, path, Some(expected));
            }
            other = other.or_else(|| likely.contains(path).then(|| check_digest(&file, path, Some(expected))));
        }
        match other {
            Some(Err(refusal)) => Err(refusal),
            _ => Err(self.not_found(&entry.name)),
        }
    }

    /// Plugins of that name among `files`.
    fn named(&mut self, name: &str, files: &[PathBuf]) -> Vec<Candidate> {
        files.iter().filter_map(|f| self.open(f).ok()).filter(|c| c.facts.name == name).collect()
    }

    pub(crate) fn open(&mut self, path: &Path) -> Result<Candidate, Refusal> {
        if let Some(known) = self.opened.get(path) {
            return known.clone();
        }
        let opened = PluginFile::read(path).and_then(|f| f.open(&self.cache));
        if let Err(refusal) = &opened {
            tracing::debug!(path = %path.display(), %refusal, "passed over in a plugin folder");
        }
        self.opened.insert(path.into(), opened.clone());
        opened
    }

    fn not_found(&self, name: &str) -> Refusal {
        let opened = self.opened.values().flatten();
        let mut names: Vec<_> = opened.chain(&self.linked).map(|c| c.facts.name.clone()).collect();
        names.sort();
        names.dedup();
        Refusal::NotFound {
            name: name.to_owned(),
            folders: match self.folders.is_empty() {
                true => "any plugin folder, since none is set".to_owned(),
                false => self.folders.iter().map(|f| f.display().to_string()).collect::<Vec<_>>().join(", "),
            },
            nearest: nearest(name, names.iter().map(String::as_str)),
            found: list(&names),
        }
    }
}

/// `a`, `b`; or `nothing`.
pub(crate) fn list<T: AsRef<str>>(names: &[T]) -> String {
    match names.is_empty() {
        true => "nothing".to_owned(),
        false => names.iter().map(|n| format!("`{}`", n.as_ref())).collect::<Vec<_>>().join(", "),
    }
}

/// The libraries of the folders, by the platform's naming; a folder that can't be read has none.
pub(crate) fn libraries(folders: &[PathBuf]) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for folder in folders {
        match std::fs::read_dir(folder) {
            Ok(entries) => files.extend(entries.flatten().map(|e| e.path()).filter(|p| is_library(p))),
            Err(e) => tracing::debug!(folder = %folder.display(), error = %e, "plugin folder cannot be read"),
        }
    }
    files.sort();
    files
}

fn is_library(path: &Path) -> bool {
    path.file_name().and_then(|n| n.to_str()).is_some_and(|n| n.starts_with(DLL_PREFIX) && n.ends_with(DLL_SUFFIX))
}

/// Whether a file is named like a build of the plugin: `libNAME.so` or `libNAME-VERSION.so`, `-` and `_` being alike.
fn is_named_after(path: &Path, name: &str) -> bool {
    let alike = |s: &str| s.replace('-', "_");
    let Some(file) = path.file_name().and_then(|n| n.to_str()) else { return false };
    let Some(stem) = file.strip_prefix(DLL_PREFIX).and_then(|s| s.strip_suffix(DLL_SUFFIX)) else { return false };
    match alike(stem).strip_prefix(&alike(name)) {
        Some(rest) => {
            rest.is_empty() || rest.strip_prefix('_').is_some_and(|v| v.starts_with(|c: char| c.is_ascii_digit()))
        }
        None => false,
    }
}

/// The highest version that meets the requirement; candidates are of one name and not empty.
fn highest(entry: &PluginEntry, found: Vec<Candidate>) -> Result<Candidate, Refusal> {
    let any = VersionReq::STAR;
    let required = entry.version.as_ref();
    // `*` means "whatever is there", also a pre-release.
    let fits = |c: &&Candidate| required.is_none_or(|r| *r == any || r.matches(&c.facts.version));
    let Some(best) = found.iter().filter(fits).max_by(|a, b| a.facts.version.cmp(&b.facts.version)) else {
        let versions: BTreeSet<_> = found.iter().map(|c| &c.facts.version).collect();
        return Err(Refusal::NoVersion {
            name: entry.name.clone(),
            found: versions.into_iter().map(ToString::to_string).collect::<Vec<_>>().join(", "),
            required: required.unwrap_or(&any).to_string(),
        });
    };
    let twin = found.iter().find(|c| c.facts.version == best.facts.version && c.sha256 != best.sha256);
    match twin {
        Some(twin) => Err(Refusal::SameVersion {
            name: entry.name.clone(),
            version: best.facts.version.to_string(),
            first: twin.place(),
            second: best.place(),
        }),
        None => Ok(best.clone()),
    }
}

fn check_digest(file: &PluginFile, path: &Path, expected: Option<&str>) -> Result<(), Refusal> {
    match expected {
        Some(expected) if expected != file.sha256 => {
            Err(Refusal::Checksum { path: path.into(), found: file.sha256.clone(), expected: expected.to_owned() })
        }
        _ => Ok(()),
    }
}

fn parse_digest(name: &str, text: &str) -> Result<String, Refusal> {
    if text.len() == 64 && text.bytes().all(|b| b.is_ascii_hexdigit()) {
        return Ok(text.to_ascii_lowercase());
    }
    Err(Refusal::BadDigest { name: name.to_owned(), found: text.to_owned() })
}

fn parse_kind(name: &str, text: &str) -> Result<Kind, Refusal> {
    Kind::from_name(text).ok_or_else(|| Refusal::BadKind {
        name: name.to_owned(),
        found: text.to_owned(),
        known: known_kinds(),
        nearest: nearest(text, Kind::ALL.iter().map(|k| k.name())),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg(all(unix, not(target_os = "macos")))]
    fn files_are_matched_by_name_with_or_without_a_version() {
        let table = [
            ("libkv_scalar.so", true),
            ("libkv-scalar.so", true),
            ("libkv_scalar-1.2.0.so", true),
            ("libkv_scalar_2.so", true),
            ("libkv_scalarly.so", false),
            ("libkv_scalar_extra.so", false),
            ("kv_scalar.so", false),
            ("libkv_scalar.so.bak", false),
        ];
        for (file, expected) in table {
            assert_eq!(is_named_after(Path::new(file), "kv-scalar"), expected, "{file}");
        }
    }

    #[test]
    fn digests_are_64_hex_digits_in_either_case() {
        assert_eq!(parse_digest("p", &"Ab".repeat(32)).unwrap(), "ab".repeat(32));
        for bad in ["", "abc", &"g".repeat(64), &"a".repeat(65)] {
            assert!(matches!(parse_digest("p", bad), Err(Refusal::BadDigest { .. })));
        }
    }

    #[test]
    fn a_misspelt_kind_gets_the_nearest_one() {
        let refusal = parse_kind("p", "kv-codek").unwrap_err();
        assert!(refusal.to_string().contains("did you mean `kv-codec`"), "{refusal}");
    }
}
