//! Layers of configuration: defaults, config file, environment, command line; each overrides the one before.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::flags::FLAGS;
use crate::settings::{PluginTable, Settings};

/// A config that can't be used; one sentence.
#[derive(Debug, PartialEq, Eq)]
pub struct ConfigError(pub String);

impl std::fmt::Display for ConfigError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for ConfigError {}

/// Keys of a `[[plugin]]` table.
const PLUGIN_KEYS: [&str; 6] = ["name", "version", "path", "sha256", "kind", "config"];

/// Merges the layers. `arguments` are flags given on the command line, by long name.
pub fn merge(
    file: Option<&Path>,
    environment: impl Fn(&str) -> Option<String>,
    arguments: &BTreeMap<String, String>,
) -> Result<Settings, ConfigError> {
    let mut settings = Settings::with_defaults();
    if let Some(path) = file {
        let text = std::fs::read_to_string(path)
            .map_err(|e| ConfigError(format!("the config file {} can't be read: {e}", path.display())))?;
        apply_toml(&mut settings, &text, &path.display().to_string(), path.parent())?;
    }
    for flag in FLAGS {
        if let Some(text) = environment(&flag.env()) {
            (flag.set_text)(&mut settings, &text).map_err(|e| ConfigError(format!("{}: {e}", flag.env())))?;
        }
    }
    for flag in FLAGS {
        if let Some(text) = arguments.get(flag.long) {
            (flag.set_text)(&mut settings, text).map_err(|e| ConfigError(format!("--{}: {e}", flag.long)))?;
        }
    }
    Ok(settings)
}

/// Applies a config file's text. Relative paths of plugins are relative to the file's folder.
pub fn apply_toml(settings: &mut Settings, text: &str, name: &str, folder: Option<&Path>) -> Result<(), ConfigError> {
    let root: toml::Table = text
        .parse()
        .map_err(|e: toml::de::Error| ConfigError(format!("{name} is not valid TOML: {}", one_line(&e))))?;
    for (table, value) in &root {
        if table == "plugin" {
            settings.plugins = plugin_tables(value, name, folder)?;
            continue;
        }
        if !FLAGS.iter().any(|f| f.table() == table) {
            return Err(unknown(name, table, FLAGS.iter().map(|f| f.table()).chain(["plugin"])));
        }
        let toml::Value::Table(entries) = value else {
            return Err(ConfigError(format!("{name}: `{table}` is a value, expected a table `[{table}]`")));
        };
        apply_entries(settings, table, entries, name)?;
    }
    Ok(())
}

/// Applies the entries of a table, and those of the tables in it that are no values of a flag.
fn apply_entries(settings: &mut Settings, table: &str, entries: &toml::Table, name: &str) -> Result<(), ConfigError> {
    for (leaf, value) in entries {
        let key = format!("{table}.{leaf}");
        match (FLAGS.iter().find(|f| f.key == key), value) {
            (Some(flag), _) => {
                (flag.set_toml)(settings, value).map_err(|e| ConfigError(format!("{name}: `{key}`: {e}")))?;
            }
            (None, toml::Value::Table(inner)) if FLAGS.iter().any(|f| f.key.starts_with(&format!("{key}."))) => {
                apply_entries(settings, &key, inner, name)?;
            }
            _ => return Err(unknown(name, &key, FLAGS.iter().map(|f| f.key))),
        }
    }
    Ok(())
}

fn one_line(error: &toml::de::Error) -> String {
    error.to_string().split('\n').map(str::trim).filter(|l| !l.is_empty()).collect::<Vec<_>>().join(" ")
}

fn unknown<'a>(name: &str, key: &str, valid: impl Iterator<Item = &'a str>) -> ConfigError {
    let nearest = valid
        .map(|v| (strsim::damerau_levenshtein(key, v), v))
        .min()
        .map_or(String::new(), |(_, v)| format!("; the nearest valid one is `{v}`"));
    ConfigError(format!("{name}: unknown key `{key}`{nearest}"))
}

fn plugin_tables(value: &toml::Value, name: &str, folder: Option<&Path>) -> Result<Vec<PluginTable>, ConfigError> {
    let tables = value
        .as_array()
        .ok_or_else(|| ConfigError(format!("{name}: `plugin` is a value, expected tables `[[plugin]]`")))?;
    tables.iter().enumerate().map(|(i, table)| plugin_table(table, i, name, folder)).collect()
}

fn plugin_table(
    value: &toml::Value,
    index: usize,
    name: &str,
    folder: Option<&Path>,
) -> Result<PluginTable, ConfigError> {
    let path = format!("plugin[{index}]");
    let table =
        value.as_table().ok_or_else(|| ConfigError(format!("{name}: `{path}` is a value, expected a table")))?;
    if let Some(key) = table.keys().find(|k| !PLUGIN_KEYS.contains(&k.as_str())) {
        return Err(unknown(name, key, PLUGIN_KEYS.into_iter()));
    }
    let text = |key: &str| match table.get(key) {
        None => Ok(None),
        Some(toml::Value::String(s)) => Ok(Some(s.clone())),
        Some(other) => Err(ConfigError(format!("{name}: `{path}.{key}`: found {other}, expected a string"))),
    };
    let config = match table.get("config") {
        None => serde_json::json!({}),
        Some(config @ toml::Value::Table(_)) => serde_json::to_value(config)
            .map_err(|e| ConfigError(format!("{name}: `{path}.config` can't be passed on: {e}")))?,
        Some(other) => return Err(ConfigError(format!("{name}: `{path}.config`: found {other}, expected a table"))),
    };
    Ok(PluginTable {
        name: text("name")?.ok_or_else(|| ConfigError(format!("{name}: `{path}` has no `name`")))?,
        version: text("version")?,
        path: text("path")?.map(|p| folder.map_or_else(|| PathBuf::from(&p), |f| f.join(&p))),
        sha256: text("sha256")?,
        kind: text("kind")?,
        config,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Settings, ConfigError> {
        let mut settings = Settings::with_defaults();
        apply_toml(&mut settings, text, "opencoti.toml", None).map(|()| settings)
    }

    #[test]
    fn an_unknown_key_names_the_nearest_valid_one() {
        assert_eq!(
            parse("[server]\nprot = 1").unwrap_err().0,
            "opencoti.toml: unknown key `server.prot`; the nearest valid one is `server.port`"
        );
        assert_eq!(
            parse("[servre]\nport = 1").unwrap_err().0,
            "opencoti.toml: unknown key `servre`; the nearest valid one is `server`"
        );
        assert!(parse("[[plugin]]\nname = 'x'\nshasum = 'y'").unwrap_err().0.contains("nearest valid one is `sha256`"));
    }

    #[test]
    fn a_wrong_type_names_the_key() {
        assert_eq!(
            parse("[server]\nport = 'high'").unwrap_err().0,
            "opencoti.toml: `server.port`: found \"high\", expected a whole number"
        );
    }

    #[test]
    fn a_table_in_a_table_holds_keys_too() {
        assert_eq!(parse("[kv.stage]\ntokens = 256").unwrap().kv_stage_tokens, 256);
        assert_eq!(parse("[kv]\nstage.sink = 128").unwrap().kv_stage_sink, 128);
        let unknown = parse("[kv.stage]\ntokns = 1").unwrap_err().0;
        assert_eq!(unknown, "opencoti.toml: unknown key `kv.stage.tokns`; the nearest valid one is `kv.stage.tokens`");
    }

    #[test]
    fn broken_toml_is_one_line() {
        let message = parse("[server\nport").unwrap_err().0;
        assert!(message.starts_with("opencoti.toml is not valid TOML:") && !message.contains('\n'), "{message}");
    }

    #[test]
    fn the_command_line_beats_the_environment_and_that_beats_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("opencoti.toml");
        std::fs::write(&file, "[server]\nport = 1\nhost = 'a'\napi_prefix = '/x'").unwrap();
        let environment = |name: &str| match name {
            "OPENCOTI_PORT" => Some("2".to_owned()),
            "OPENCOTI_HOST" => Some("b".to_owned()),
            _ => None,
        };
        let arguments = BTreeMap::from([("port".to_owned(), "3".to_owned())]);
        let s = merge(Some(&file), environment, &arguments).unwrap();
        assert_eq!((s.port, s.host.as_str(), s.api_prefix.as_str(), s.parallel), (3, "b", "/x", 4));
    }

    #[test]
    fn plugin_tables_carry_their_config() {
        let s = parse("[[plugin]]\nname = 'kv-scalar'\nversion = '^1'\n[plugin.config]\ndepth = 3").unwrap();
        assert_eq!(s.plugins[0].config, serde_json::json!({"depth": 3}));
        assert_eq!(s.plugins[0].version.as_deref(), Some("^1"));
    }
}
