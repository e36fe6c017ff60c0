//! `cargo xtask run`: from a clean clone to a running server.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::cache;
use crate::models;

/// Packages that make up a distribution: the host and its plugins.
pub const DISTRIBUTION: [&str; 7] =
    ["opencoti", "kv-scalar", "kv-turbo", "kv-tcq", "kv-kvarn", "residency-resident", "admission-gate"];

/// Builds what a user runs, in the given profile, and returns its folder.
pub fn build(profile: &str, packages: &[&str]) -> Result<PathBuf> {
    let mut command = cache::cargo();
    command.args(["build", "--profile", profile]);
    for package in packages {
        command.args(["--package", package]);
    }
    cache::run(&mut command)?;
    Ok(target_folder()?.join(if profile == "dev" { "debug" } else { profile }))
}

/// Cargo's target folder.
pub fn target_folder() -> Result<PathBuf> {
    let output = cache::cargo().args(["metadata", "--format-version", "1", "--no-deps", "--offline"]).output()?;
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout).context("cargo metadata is no JSON")?;
    metadata["target_directory"].as_str().map(PathBuf::from).context("cargo metadata names no target folder")
}

/// `cargo xtask synth`.
pub fn synth(args: &[String]) -> Result<()> {
    let mut command = cache::cargo();
    command.args(["run", "--release", "--quiet", "--package", "opencoti-model", "--example", "synth", "--"]).args(args);
    cache::run(&mut command)
}

/// `cargo xtask run`.
pub fn run(args: &[String]) -> Result<()> {
    let (own, flags) = match args.iter().position(|a| a == "--") {
        Some(at) => (&args[..at], &args[at + 1..]),
        None => (args, &[][..]),
    };
    let mut model = None;
    let mut own = own.iter();
    while let Some(arg) = own.next() {
        match arg.as_str() {
            "--model" => model = Some(own.next().context("--model needs a name or a file")?.as_str()),
            other => bail!("`{other}` is not understood; flags of the server go behind `--`"),
        }
    }
    let folder = build("release", &DISTRIBUTION)?;
    let binary = folder.join("opencoti");
    let config = cache::workspace().join("opencoti.toml");
    let path = match (model, config.exists()) {
        (None, true) => None,
        (name, _) => Some(resolve(name.unwrap_or(models::MODELS[0].name))?),
    };
    if !config.exists() {
        let example = Command::new(&binary).args(["help-config", "--example"]).arg("--model").args(&path).output()?;
        if !example.status.success() {
            bail!("the example config could not be made: {}", String::from_utf8_lossy(&example.stderr));
        }
        std::fs::write(&config, example.stdout)?;
        eprintln!("wrote {}", config.display());
    }
    let mut server = Command::new(&binary);
    server.arg("serve").arg("--config").arg(&config).arg("--print-curl");
    if let Some(path) = path {
        server.arg("--model").arg(path);
    }
    cache::run(server.args(flags))
}

/// The file of a model by name, fetched if need be, or a file as it is.
pub fn resolve(model: &str) -> Result<PathBuf> {
    match models::find(model) {
        Some(model) => models::fetch(model),
        None if Path::new(model).is_file() => Ok(std::fs::canonicalize(model)?),
        None => bail!(models::unknown(model)),
    }
}
