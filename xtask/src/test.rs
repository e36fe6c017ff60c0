//! `cargo xtask test`: everything, with nothing to install by hand.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result};

use crate::cache::{self, cargo};
use crate::{licences, models, python, run};

/// Plugins that tests load, beside the distribution.
const TEST_PLUGINS: [&str; 2] = ["faulty", "faulty-admission"];
/// Seconds for each fuzz target in a test run.
const FUZZ_SECONDS: &str = "20";

/// `cargo xtask test`.
pub fn test(args: &[String]) -> Result<()> {
    let fast = args.iter().any(|a| a == "--fast");
    step("format", || cache::run(cargo().args(["fmt", "--all", "--check"])))?;
    step("lints", || {
        cache::run(cargo().args(["clippy", "--profile", "ci", "--workspace", "--all-targets", "--", "-D", "warnings"]))
    })?;
    step("licences", licences::check)?;
    let plugins: Vec<&str> = run::DISTRIBUTION.into_iter().chain(TEST_PLUGINS).collect();
    let mut folder = None;
    step("host and plugins", || {
        folder = Some(run::build("ci", &plugins)?);
        Ok(())
    })?;
    let folder = folder.context("nothing was built")?;
    let mut models = Vec::new();
    if !fast {
        step("models", || {
            models = models::MODELS[..models::FETCHED_FOR_TESTS].iter().map(models::fetch).collect::<Result<_>>()?;
            Ok(())
        })?;
    }
    let mut compiler = None;
    if !fast {
        step("compiler of CUDA kernels", || {
            compiler = Some(nvrtc()?);
            Ok(())
        })?;
    }
    step("tests", || {
        let mut command = cargo();
        command.args(["test", "--profile", "ci", "--workspace"]).env("OPENCOTI_TEST_PLUGINS", &folder);
        if let Some(compiler) = &compiler {
            // What kernels use is kept by a hash of their source: only what changed is compiled again.
            let kept = cache::folder()?.join("kernel-usage");
            command.env("LD_LIBRARY_PATH", compiler).env("OPENCOTI_TEST_NVRTC", "required");
            command.env("OPENCOTI_TEST_KERNEL_USAGE", kept);
        }
        if let Some(folder) = models.first().and_then(|m| m.parent()) {
            command.env("OPENCOTI_TEST_MODELS", folder);
        }
        cache::run(&mut command)
    })?;
    if fast {
        return Ok(());
    }
    step("fuzzing", || fuzz(&["--seconds".to_owned(), FUZZ_SECONDS.to_owned()]))?;
    // The embedding model generates nothing.
    step("Python clients", || clients(&folder, &models[..2]))
}

/// The folder of NVRTC, which compiles and assembles kernels without a card.
fn nvrtc() -> Result<PathBuf> {
    let python = python::environment("host/cuda/tests/requirements.txt")?;
    let packages = python.parent().and_then(Path::parent).context("the environment has no folder")?.join("lib");
    let versions = std::fs::read_dir(&packages).with_context(|| packages.display().to_string())?;
    let folders = versions.flatten().map(|v| v.path().join("site-packages/nvidia/cu13/lib"));
    { folders }.find(|folder| folder.is_dir()).context("the package nvidia-cuda-nvrtc has no folder of libraries")
}

/// `cargo xtask fuzz`.
pub fn fuzz(args: &[String]) -> Result<()> {
    cache::run(cargo().args(["run", "--profile", "ci", "--package", "opencoti-fuzz", "--quiet", "--"]).args(args))
}

/// The scripted sessions of the OpenAI and Anthropic Python clients, and of the project's own with LangChain and LangGraph, against
/// the server and against the scripted model, whose program the tests have built beside the host's.
fn clients(folder: &Path, models: &[PathBuf]) -> Result<()> {
    let python = python::environment("tests/python/requirements.txt")?;
    let script = cache::workspace().join("tests/python/session.py");
    let mut command = Command::new(python);
    command
        .arg(script)
        .arg(folder.join("opencoti"))
        .arg(folder.join("scripted"))
        .args(models)
        .current_dir(cache::workspace());
    cache::run(command.env("PYTHONDONTWRITEBYTECODE", "1"))
}

fn step(name: &str, body: impl FnOnce() -> Result<()>) -> Result<()> {
    eprintln!("== {name}");
    let start = Instant::now();
    body().with_context(|| format!("step `{name}`"))?;
    eprintln!("== {name}: done in {:.0} s", start.elapsed().as_secs_f64());
    Ok(())
}
