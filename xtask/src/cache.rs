//! Where fetched things live: outside the repository, checked by hash.

use std::fs::File;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use sha2::{Digest, Sha256};

/// The cache folder, made if need be.
pub fn folder() -> Result<PathBuf> {
    let folder = match std::env::var_os("OPENCOTI_CACHE") {
        Some(folder) => PathBuf::from(folder),
        None => match std::env::var_os("XDG_CACHE_HOME") {
            Some(base) => PathBuf::from(base).join("opencoti"),
            None => PathBuf::from(std::env::var_os("HOME").context("HOME is not set; set OPENCOTI_CACHE to a folder")?)
                .join(".cache/opencoti"),
        },
    };
    std::fs::create_dir_all(&folder).with_context(|| format!("the cache folder {} can't be made", folder.display()))?;
    Ok(folder)
}

/// The workspace's root.
pub fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().map_or_else(|| PathBuf::from("."), Path::to_path_buf)
}

/// SHA-256 of a file, hexadecimal.
pub fn sha256(path: &Path) -> Result<String> {
    let mut file = File::open(path).with_context(|| format!("{} can't be opened", path.display()))?;
    let mut hash = Sha256::new();
    let mut buffer = vec![0u8; 1 << 20];
    loop {
        let n = file.read(&mut buffer)?;
        if n == 0 {
            break;
        }
        hash.update(&buffer[..n]);
    }
    Ok(hash.finalize().iter().map(|b| format!("{b:02x}")).collect())
}

/// Concatenates files into one, through a temporary name, and checks the hash.
pub fn join_checked(parts: &[PathBuf], target: &Path, expected: &str) -> Result<()> {
    let temporary = target.with_extension("partial");
    let mut out = File::create(&temporary).with_context(|| format!("{} can't be written", temporary.display()))?;
    for part in parts {
        let mut part = File::open(part).with_context(|| format!("{} is missing in the package", part.display()))?;
        std::io::copy(&mut part, &mut out)?;
    }
    out.flush()?;
    drop(out);
    let found = sha256(&temporary)?;
    if found != expected {
        std::fs::remove_file(&temporary)?;
        bail!("{} has SHA-256 {found}, expected {expected}; it was not kept", target.display());
    }
    std::fs::rename(&temporary, target)?;
    Ok(())
}

/// Runs a command and fails with its name when it fails.
pub fn run(command: &mut Command) -> Result<()> {
    let shown = format!("{command:?}").replace('"', "");
    let status = command.status().with_context(|| format!("`{shown}` can't be started"))?;
    if !status.success() {
        bail!("`{shown}` failed ({status})");
    }
    Ok(())
}

/// Cargo, as this xtask was started with.
pub fn cargo() -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(workspace());
    command
}
