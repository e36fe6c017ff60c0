//! Python environments for tests that drive the server with a real client.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result};

use crate::cache;

/// The interpreter of an environment that holds exactly `requirements` (a file in the repository, versions pinned).
pub fn environment(requirements: &str) -> Result<PathBuf> {
    environment_with(requirements, &[])
}

/// As [`environment`], with variables for packages that are built; they are no part of what names the environment.
pub fn environment_with(requirements: &str, variables: &[(&str, &str)]) -> Result<PathBuf> {
    let file = cache::workspace().join(requirements);
    let key = &cache::sha256(&file)?[..16];
    let folder = cache::folder()?.join(format!("venv-{key}"));
    let python = folder.join("bin/python");
    let stamp = folder.join("complete");
    if !stamp.exists() {
        cache::run(Command::new("python3").args(["-m", "venv", "--clear"]).arg(&folder))
            .context("a Python environment could not be made; python3 needs its venv module")?;
        cache::run(
            Command::new(&python)
                .envs(variables.iter().copied())
                .args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--requirement"])
                .arg(&file),
        )?;
        std::fs::write(&stamp, "")?;
    }
    Ok(python)
}
