//! Facts about plugins, as `GET /plugins` and `opencoti plugins` show them.

use std::path::PathBuf;

use serde::Serialize;
use serde_json::Value;

/// A plugin, loaded or only looked at.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PluginInfo {
    /// Its name.
    pub name: String,
    /// Its own version.
    pub version: String,
    /// Its kind.
    pub kind: String,
    /// The API version it was built with.
    pub api: String,
    /// Its file; `None` when linked in.
    pub path: Option<PathBuf>,
    /// The file's SHA-256.
    pub sha256: Option<String>,
    /// How the layouts of plugin and host were compared, and the outcome.
    pub layout: String,
    /// SPDX licence expression.
    pub license: String,
    /// One line for people.
    pub summary: String,
    /// What it needs beyond the ABI.
    pub capabilities: Vec<String>,
    /// JSON schema of its config.
    pub config_schema: Option<Value>,
    /// Codecs it offers; empty when it is no codec plugin or was not started.
    pub codecs: Vec<CodecOffer>,
    /// Whether it is in use; as JSON the fields `state` and, in quarantine, `reason`.
    #[serde(flatten)]
    pub state: State,
    /// Control calls so far (calls per tile are not counted).
    pub calls: u64,
    /// Failed calls so far.
    pub failures: u64,
}

/// A codec of a plugin.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CodecOffer {
    /// Name by which a config selects it.
    pub name: String,
    /// One line for people.
    pub summary: String,
}

/// Whether a plugin is in use.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "state", content = "reason", rename_all = "kebab-case")]
pub enum State {
    /// Checked, no instance made.
    Available,
    /// In use.
    Active,
    /// It panicked; the host makes no further call to it. The reason is its panic's text.
    Quarantined(String),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_is_a_word_and_a_quarantine_has_its_reason() {
        #[derive(Serialize)]
        struct Shown {
            #[serde(flatten)]
            state: State,
        }
        let json = |state| serde_json::to_string(&Shown { state }).unwrap();
        assert_eq!(json(State::Active), r#"{"state":"active"}"#);
        assert_eq!(json(State::Quarantined("it panicked".into())), r#"{"state":"quarantined","reason":"it panicked"}"#);
    }
}
