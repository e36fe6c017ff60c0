//! What a config says about plugins.

use std::path::PathBuf;

use opencoti_plugin_api::PluginRoot;
use semver::VersionReq;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// One `[[plugin]]` table.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PluginEntry {
    /// Name in the plugin's manifest, for example `kv-scalar`.
    pub name: String,
    /// Semver requirement, for example `1.2` or `>=1.2, <3`; any version when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<VersionReq>,
    /// The library; searched in the plugin folders when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<PathBuf>,
    /// SHA-256 of the library, 64 hex digits. Checked before any of its code runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sha256: Option<String>,
    /// Kind the plugin must have, for example `kv-codec`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kind: Option<String>,
    /// Its own config table.
    #[serde(default, skip_serializing_if = "Value::is_null")]
    pub config: Value,
}

impl PluginEntry {
    /// An entry that takes any version of a plugin by its name.
    pub fn named(name: impl Into<String>) -> Self {
        PluginEntry { name: name.into(), ..PluginEntry::default() }
    }

    /// The config as the JSON text that crosses.
    pub(crate) fn config_text(&self) -> String {
        match &self.config {
            Value::Null => "{}".to_owned(),
            table => table.to_string(),
        }
    }
}

/// Where plugins are and which ones to load.
#[derive(Clone, Default)]
pub struct RegistryConfig {
    /// Folders searched for libraries, in order.
    pub folders: Vec<PathBuf>,
    /// Folder of the content-addressed copies; [`crate::default_cache_folder`] when `None`.
    pub cache: Option<PathBuf>,
    /// The plugins to load, in order.
    pub plugins: Vec<PluginEntry>,
    /// Roots of plugins that are linked into this binary; they are selected by name like files are.
    pub linked: Vec<&'static PluginRoot>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Deserialize)]
    struct File {
        plugin: Vec<PluginEntry>,
    }

    fn parse(text: &str) -> Result<Vec<PluginEntry>, toml::de::Error> {
        toml::from_str::<File>(text).map(|f| f.plugin)
    }

    #[test]
    fn an_entry_needs_a_name_and_may_say_more() {
        let entries = parse(
            "[[plugin]]\nname = 'kv-scalar'\n\
             [[plugin]]\nname = 'gate'\nversion = '>=1.2, <3'\npath = 'gate.so'\nkind = 'admission-policy'\n\
             config = { mode = 'warn', limits = [1, 2] }\n",
        )
        .unwrap();
        assert_eq!(entries[0], PluginEntry::named("kv-scalar"));
        assert_eq!(entries[0].config_text(), "{}");
        assert!(entries[1].version.as_ref().unwrap().matches(&"2.9.0".parse().unwrap()));
        assert_eq!(entries[1].config_text(), r#"{"mode":"warn","limits":[1,2]}"#);
    }

    #[test]
    fn unknown_keys_and_bad_requirements_are_errors_that_name_them() {
        let message = |text| parse(text).unwrap_err().to_string();
        assert!(message("[[plugin]]\nname = 'a'\nsha = 'b'\n").contains("unknown field `sha`"));
        assert!(message("[[plugin]]\nversion = '1'\n").contains("missing field `name`"));
        assert!(message("[[plugin]]\nname = 'a'\nversion = 'newest'\n").contains("newest"));
    }
}
