//! The program and plugin libraries for tests: those of this repository, built by Cargo, and fixtures in C, built by the
//! C compiler.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use anyhow::{Context, Result, bail};

/// Folder of the program and ready plugins; set by `cargo xtask test`, which has built them, so that no test builds anything.
const READY: &str = "OPENCOTI_TEST_PLUGINS";

/// Packages that make the program or a library: `cargo test` of this package builds none of them.
const PACKAGES: [&str; 9] = [
    "opencoti",
    "kv-scalar",
    "kv-turbo",
    "kv-tcq",
    "kv-kvarn",
    "residency-resident",
    "admission-gate",
    "faulty",
    "faulty-admission",
];

/// The folder with the program and the libraries of this repository's plugins, built with the profile of the running
/// test.
pub fn plugin_dir() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| match std::env::var_os(READY) {
        Some(folder) => folder.into(),
        None => build().expect("the program and the plugins build"),
    })
}

/// Path of the program.
pub fn program() -> PathBuf {
    plugin_dir().join(format!("opencoti{}", std::env::consts::EXE_SUFFIX))
}

/// Path of a plugin's library.
pub fn plugin(package: &str) -> PathBuf {
    let name = format!("{}{}{}", std::env::consts::DLL_PREFIX, package.replace('-', "_"), std::env::consts::DLL_SUFFIX);
    plugin_dir().join(name)
}

fn build() -> Result<PathBuf> {
    // .../target/PROFILE/deps/TEST
    let test = std::env::current_exe()?;
    let folder = test.parent().and_then(Path::parent).context("a test runs from target/PROFILE/deps")?;
    let profile = match folder.file_name().and_then(|n| n.to_str()) {
        Some("debug") => "dev",
        Some(profile) => profile,
        None => bail!("{} has no name that can be a profile", folder.display()),
    };
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.args(["build", "--profile", profile]).current_dir(env!("CARGO_MANIFEST_DIR"));
    cargo.args(PACKAGES.iter().flat_map(|p| ["-p", p]));
    let output = cargo.output().context("cargo does not start")?;
    if !output.status.success() {
        bail!("{cargo:?} failed: {}", String::from_utf8_lossy(&output.stderr));
    }
    Ok(folder.to_owned())
}

/// Folder of the fixtures in C.
pub fn c_fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/c")
}

/// Compiles a fixture in C with the plugin header to `library`; `flags` pick its variant.
pub fn compile_c(source: &str, flags: &[&str], library: &Path) -> Result<()> {
    let compiler = std::env::var_os("CC").unwrap_or_else(|| "cc".into());
    let mut cc = Command::new(compiler);
    cc.args(["-std=c11", "-Wall", "-Wextra", "-Werror", "-O1", "-shared", "-fPIC"]);
    cc.args(flags).arg("-I").arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("../plugin-api/include"));
    cc.arg(c_fixtures().join(source)).arg("-o").arg(library);
    let output = cc.output().context("the tests need a C compiler (`cc`, or the one in CC)")?;
    if !output.status.success() {
        bail!("{cc:?} failed: {}", String::from_utf8_lossy(&output.stderr));
    }
    Ok(())
}
