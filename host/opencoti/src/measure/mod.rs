//! What `bench` and `lab` share: a model with an executor, caches of any pair of codecs, and the ways to show numbers.

pub mod codecs;
pub mod cost;
pub mod floor;
pub mod machine;
pub mod plot;
pub mod rig;
pub mod stats;
pub mod table;

use std::path::Path;

use anyhow::{Context, Result};

/// Writes a result, and says so.
///
/// # Errors
/// The path and what the system says.
pub fn write(path: &Path, text: &str) -> Result<()> {
    std::fs::write(path, text).with_context(|| format!("{} could not be written", path.display()))?;
    eprintln!("wrote {}", path.display());
    Ok(())
}
