//! From a file to a checked root.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use libloading::Library;
use opencoti_plugin_api::PluginRoot;
use opencoti_plugin_api::root::{LAYOUT_SYMBOL, LayoutFn, ROOT_SYMBOL, RootFn};

use crate::cache;
use crate::image;
use crate::refusal::Refusal;
use crate::root::{self, Facts, LayoutVerdict};

/// Libraries beyond this are not read into memory to find out what they are.
const MAX_FILE: u64 = 1 << 30;

/// A plugin that passed every check and has not been created yet.
#[derive(Clone)]
pub(crate) struct Candidate {
    /// The file it came from; `None` when linked in.
    pub(crate) path: Option<PathBuf>,
    pub(crate) sha256: Option<String>,
    pub(crate) root: &'static PluginRoot,
    pub(crate) facts: Facts,
}

impl Candidate {
    /// Where it is, for messages.
    pub(crate) fn place(&self) -> PathBuf {
        self.path.clone().unwrap_or_else(|| PathBuf::from("(linked in)"))
    }
}

/// A file's bytes, looked at and not yet trusted.
pub(crate) struct PluginFile {
    path: PathBuf,
    bytes: Vec<u8>,
    pub(crate) sha256: String,
}

impl PluginFile {
    /// Reads a file once; everything later works on these bytes.
    pub(crate) fn read(path: &Path) -> Result<Self, Refusal> {
        let bytes = read_regular(path)?;
        let sha256 = cache::digest(&bytes);
        Ok(PluginFile { path: path.into(), bytes, sha256 })
    }

    /// Whether the name of the root symbol occurs in it: without it nothing needs to be opened.
    fn names_root(&self) -> bool {
        contains(&self.bytes, ROOT_SYMBOL.as_bytes())
    }

    /// Opens a content-addressed copy and checks its root. Code of the library runs (its constructors).
    pub(crate) fn open(&self, cache: &Path) -> Result<Candidate, Refusal> {
        image::check(&self.path, &self.bytes)?;
        if !self.names_root() {
            return Err(Refusal::NoRoot { path: self.path.clone() });
        }
        let library = self.open_copy(cache)?;
        // SAFETY: a symbol of this name has this type in every plugin; what it returns is checked.
        let root = unsafe { library.get::<RootFn>(ROOT_SYMBOL) }
            .map(|f| unsafe { f() })
            .map_err(|_| Refusal::NoRoot { path: self.path.clone() })?;
        // SAFETY: as above.
        let table = unsafe { library.get::<LayoutFn>(LAYOUT_SYMBOL) }.ok().map(|f| unsafe { f() });
        // SAFETY: both come from the exported functions of one library, which is never unmapped.
        let (root, facts) = unsafe { root::check(&self.path, root, table) }?;
        Ok(Candidate { path: Some(self.path.clone()), sha256: Some(self.sha256.clone()), root, facts })
    }

    /// The same content is opened once in a process; the library is leaked, see the crate's documentation.
    fn open_copy(&self, cache: &Path) -> Result<&'static Library, Refusal> {
        static OPENED: Mutex<BTreeMap<String, &'static Library>> = Mutex::new(BTreeMap::new());
        // A thread that panicked while it held the lock left the map whole: it is changed by one insertion.
        let mut opened = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(library) = opened.get(&self.sha256) {
            return Ok(library);
        }
        let copy = cache::place(&self.path, &self.bytes, &self.sha256, cache)?;
        let library =
            open_now(&copy).map_err(|e| Refusal::Open { path: self.path.clone(), reason: loader_reason(&e, &copy) })?;
        let library: &'static Library = Box::leak(Box::new(library));
        opened.insert(self.sha256.clone(), library);
        Ok(library)
    }
}

/// A candidate of a root that is linked into this binary.
pub(crate) fn linked(root: &'static PluginRoot) -> Result<Candidate, Refusal> {
    // SAFETY: a static root of this build.
    let (root, facts) = unsafe { root::check(Path::new("(linked in)"), root, None) }?;
    let facts = Facts { layout: LayoutVerdict::Linked, ..facts };
    Ok(Candidate { path: None, sha256: None, root, facts })
}

/// Every symbol is resolved now: a missing one is a refusal here and would be the end of the process at a later call.
#[cfg(unix)]
fn open_now(path: &Path) -> Result<Library, libloading::Error> {
    use libloading::os::unix::{Library as UnixLibrary, RTLD_LOCAL, RTLD_NOW};
    // SAFETY: running the library's constructors is what the operator asked for by listing it.
    unsafe { UnixLibrary::open(Some(path), RTLD_NOW | RTLD_LOCAL) }.map(Library::from)
}

#[cfg(not(unix))]
fn open_now(path: &Path) -> Result<Library, libloading::Error> {
    // SAFETY: running the library's initialisers is what the operator asked for by listing it.
    unsafe { Library::new(path) }
}

/// The loader's own words, without the copy's long name in front.
fn loader_reason(error: &libloading::Error, copy: &Path) -> String {
    let mut text = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        text = cause.to_string();
        source = cause.source();
    }
    text.trim_start_matches(&format!("{}: ", copy.display())).to_owned()
}

fn read_regular(path: &Path) -> Result<Vec<u8>, Refusal> {
    let unreadable = |e: io::Error| match e.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => Refusal::Missing { path: path.into() },
        _ => Refusal::Unreadable { path: path.into(), reason: e.to_string() },
    };
    // Asked of the path before it is opened: opening a pipe waits for its writer.
    let about = std::fs::metadata(path).map_err(unreadable)?;
    if !about.is_file() {
        let found = if about.is_dir() { "a directory" } else { "a device, pipe or socket" };
        return Err(Refusal::NotAFile { path: path.into(), found });
    }
    if about.len() > MAX_FILE {
        return Err(Refusal::TooLarge { path: path.into(), bytes: about.len(), limit: MAX_FILE });
    }
    let mut bytes = Vec::new();
    File::open(path).and_then(|f| f.take(MAX_FILE).read_to_end(&mut bytes)).map_err(unreadable)?;
    Ok(bytes)
}

fn contains(bytes: &[u8], needle: &[u8]) -> bool {
    let first = needle[0];
    let mut rest = bytes;
    while let Some(at) = rest.iter().position(|b| *b == first) {
        rest = &rest[at..];
        if rest.starts_with(needle) {
            return true;
        }
        rest = &rest[1..];
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_needle_is_found_wherever_it_stands() {
        assert!(contains(b"oopencoti", b"opencoti"));
        assert!(contains(b"opencoti", b"opencoti"));
        assert!(!contains(b"opencot", b"opencoti"));
        assert!(!contains(b"", b"opencoti"));
    }
}
