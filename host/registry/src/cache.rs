//! Content-addressed copies of plugin files.
//!
//! The dynamic loader answers a path it has seen with the library it has, also after the file was replaced, and a file
//! overwritten while mapped kills the process. So a library is only ever opened under a name that contains its digest,
//! in a folder of the server's own.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use sha2::{Digest, Sha256};

use crate::refusal::Refusal;

/// The user's cache folder for plugin copies: `$XDG_CACHE_HOME/opencoti/plugins`, `~/.cache/opencoti/plugins`, else one
/// under the folder for temporary files.
pub fn default_cache_folder() -> PathBuf {
    let set = |name| std::env::var_os(name).map(PathBuf::from).filter(|p| p.is_absolute());
    set("XDG_CACHE_HOME")
        .or_else(|| set("HOME").map(|home| home.join(".cache")))
        .unwrap_or_else(std::env::temp_dir)
        .join("opencoti")
        .join("plugins")
}

/// SHA-256 as 64 lower-case hex digits.
pub(crate) fn digest(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect()
}

/// The path of a copy of `bytes`, whose digest is `sha256`, in `folder`; made when it is not there yet.
pub(crate) fn place(original: &Path, bytes: &[u8], sha256: &str, folder: &Path) -> Result<PathBuf, Refusal> {
    let copy = folder.join(copy_name(original, sha256));
    let refuse = |e: io::Error| Refusal::Cache { path: copy.clone(), reason: e.to_string() };
    // What stands under the name was made by an earlier run; it is only trusted if it is the same bytes.
    if fs::read(&copy).is_ok_and(|found| found == bytes) {
        return Ok(copy);
    }
    create_private_folder(folder).map_err(refuse)?;
    let temporary = folder.join(format!(".{}.{}.{}", sha256, std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed)));
    let written = write_private(&temporary, bytes).and_then(|()| fs::rename(&temporary, &copy));
    written.map_err(|e| {
        // Best effort: the copy's own error is the one to report.
        let _ = fs::remove_file(&temporary);
        refuse(e)
    })?;
    Ok(copy)
}

/// Tells apart the temporary files of threads.
static NEXT: AtomicU64 = AtomicU64::new(0);

/// `<file's stem>-<first 16 digits>.<suffix>`: readable in a list of mappings, unique by content.
fn copy_name(original: &Path, sha256: &str) -> String {
    let stem = original.file_stem().unwrap_or_default().to_string_lossy();
    let stem: String = stem.chars().filter(|c| c.is_ascii_alphanumeric() || "-_.".contains(*c)).take(64).collect();
    format!("{stem}-{}{}", &sha256[..16], std::env::consts::DLL_SUFFIX)
}

fn create_private_folder(folder: &Path) -> io::Result<()> {
    let mut builder = fs::DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.create(folder)
}

fn write_private(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut options = OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o500);
    let mut file = options.open(path)?;
    file.write_all(bytes)?;
    file.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_is_named_by_its_content_and_made_once() {
        let folder = tempfile::tempdir().unwrap();
        let cache = folder.path().join("a/b");
        let sha = digest(b"one");
        let first = place(Path::new("/x/libcodec.so"), b"one", &sha, &cache).unwrap();
        assert_eq!(first.file_name().unwrap().to_string_lossy(), format!("libcodec-{}.so", &sha[..16]));
        let made = fs::metadata(&first).unwrap().modified().unwrap();
        assert_eq!(place(Path::new("/x/libcodec.so"), b"one", &sha, &cache).unwrap(), first);
        assert_eq!(fs::metadata(&first).unwrap().modified().unwrap(), made);
        assert_ne!(place(Path::new("/x/libcodec.so"), b"two", &digest(b"two"), &cache).unwrap(), first);
        assert_eq!(fs::read_dir(&cache).unwrap().count(), 2, "no temporary file stays");
    }

    #[test]
    #[cfg(unix)]
    fn a_copy_belongs_to_the_user_alone() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let cache = folder.path().join("cache");
        let copy = place(Path::new("p.so"), b"x", &digest(b"x"), &cache).unwrap();
        assert_eq!(fs::metadata(copy).unwrap().permissions().mode() & 0o777, 0o500);
        assert_eq!(fs::metadata(cache).unwrap().permissions().mode() & 0o777, 0o700);
    }

    #[test]
    fn a_copy_with_other_content_is_replaced() {
        let cache = tempfile::tempdir().unwrap();
        let sha = digest(b"right");
        let name = copy_name(Path::new("p.so"), &sha);
        fs::write(cache.path().join(name), b"wrong").unwrap();
        let copy = place(Path::new("p.so"), b"right", &sha, cache.path()).unwrap();
        assert_eq!(fs::read(copy).unwrap(), b"right");
    }

    #[test]
    fn a_cache_that_cannot_be_written_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        fs::write(&file, b"").unwrap();
        let refusal = place(Path::new("p.so"), b"x", &digest(b"x"), &file).unwrap_err();
        assert!(refusal.to_string().contains("set another plugin cache folder"), "{refusal}");
    }

    #[test]
    fn odd_file_names_do_not_leave_the_folder() {
        let sha = digest(b"");
        assert_eq!(copy_name(Path::new("/tmp/..so x/li b\u{e4}.so"), &sha), format!("lib-{}.so", &sha[..16]));
        assert_eq!(copy_name(Path::new(".."), &sha), format!("-{}.so", &sha[..16]));
    }
}
