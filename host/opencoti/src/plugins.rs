//! The registry as the settings want it, and `opencoti plugins`.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use opencoti_registry::{PluginEntry, PluginInfo, Registry, RegistryConfig, State};
use serde_json::json;

use crate::settings::{Admission, Settings};

/// Plugins loaded when the config lists none.
const DISTRIBUTION: [&str; 6] = ["kv-scalar", "kv-turbo", "kv-tcq", "kv-kvarn", "residency-resident", "admission-gate"];

/// Loads the plugins that the settings list, or those of the distribution.
pub fn load(settings: &Settings) -> Result<Registry> {
    Ok(Registry::load(&config(settings)?)?)
}

fn config(settings: &Settings) -> Result<RegistryConfig> {
    let mut plugins = match settings.plugins.is_empty() {
        true => DISTRIBUTION.into_iter().map(PluginEntry::named).collect(),
        false => settings.plugins.iter().map(entry).collect::<Result<Vec<_>>>()?,
    };
    for plugin in plugins.iter_mut().filter(|p| p.name == "admission-gate") {
        // The flag is the policy's `mode`, unless its own table says otherwise.
        if plugin.config.is_null() {
            plugin.config = json!({});
        }
        if let Some(table) = plugin.config.as_object_mut() {
            table.entry("mode").or_insert_with(|| json!(mode(settings.admission)));
        }
    }
    Ok(RegistryConfig { folders: folders(settings), cache: settings.plugin_cache.clone(), plugins, linked: Vec::new() })
}

fn mode(admission: Admission) -> &'static str {
    match admission {
        Admission::Off => "off",
        Admission::Warn => "warn",
        Admission::Enforced => "enforced",
    }
}

fn entry(table: &crate::settings::PluginTable) -> Result<PluginEntry> {
    let version = match &table.version {
        None => None,
        Some(text) => Some(text.parse().with_context(|| {
            format!("plugin `{}`: `{text}` is no version requirement such as \"^1.0\"", table.name)
        })?),
    };
    Ok(PluginEntry {
        name: table.name.clone(),
        version,
        path: table.path.clone(),
        sha256: table.sha256.clone(),
        kind: table.kind.clone(),
        config: table.config.clone(),
    })
}

/// The folders that are searched.
pub fn folders(settings: &Settings) -> Vec<PathBuf> {
    if !settings.plugin_dirs.is_empty() {
        return settings.plugin_dirs.iter().map(PathBuf::from).collect();
    }
    let program = std::env::current_exe().and_then(std::fs::canonicalize).ok();
    let beside = program.as_deref().and_then(Path::parent);
    beside.map(|folder| vec![folder.join("plugins"), folder.to_path_buf()]).unwrap_or_default()
}

/// `opencoti plugins`: what the config loads, and what else lies in the folders.
pub fn list(settings: &Settings, json: bool) -> Result<()> {
    let registry = load(settings)?;
    let loaded = registry.describe();
    if json {
        println!("{}", serde_json::to_string_pretty(&loaded)?);
        return Ok(());
    }
    for info in &loaded {
        print!("{}", describe(info));
    }
    let is_loaded = |info: &PluginInfo| loaded.iter().any(|l| l.sha256 == info.sha256);
    for (path, found) in opencoti_registry::discover(&folders(settings), settings.plugin_cache.as_deref()) {
        match found {
            Ok(info) if is_loaded(&info) => {}
            Ok(info) => println!("{} {} (not loaded) {}", info.name, info.version, path.display()),
            Err(refusal) => println!("{}: {refusal}", path.display()),
        }
    }
    Ok(())
}

/// `opencoti plugins FILE`.
pub fn inspect(settings: &Settings, file: &Path, json: bool) -> Result<()> {
    let info = opencoti_registry::inspect(file, settings.plugin_cache.as_deref())?;
    match json {
        true => println!("{}", serde_json::to_string_pretty(&info)?),
        false => print!("{}", describe(&info)),
    }
    Ok(())
}

fn describe(info: &PluginInfo) -> String {
    let mut out = format!("{} {} ({}, API {}) {}\n", info.name, info.version, info.kind, info.api, info.summary);
    let mut line = |what: &str, text: String| out.push_str(&format!("    {what:<10} {text}\n"));
    if let Some(path) = &info.path {
        line("file", path.display().to_string());
    }
    if let Some(hash) = &info.sha256 {
        line("sha256", hash.clone());
    }
    line("layout", info.layout.clone());
    line("licence", info.license.clone());
    if !info.capabilities.is_empty() {
        line("needs", info.capabilities.join(", "));
    }
    if !info.codecs.is_empty() {
        line("codecs", info.codecs.iter().map(|c| c.name.as_str()).collect::<Vec<_>>().join(", "));
    }
    if let State::Quarantined(reason) = &info.state {
        line("quarantine", reason.clone());
    }
    out
}
