//! Pairs of codecs as they are asked for on the command line: `K:V`, each `CODEC` or `CODEC+OPTION=VALUE+…`.

use anyhow::{Result, bail};
use serde_json::{Map, Value};

use crate::flags::value::JsonTable;
use crate::settings::Settings;

/// How a pair is written, for help and refusals.
pub const SYNTAX: &str = "CODEC or K:V, each with options as in q4_0+rotation=none";

/// Codecs of keys and values that are measured together.
#[derive(Clone, Debug)]
pub struct Pair {
    /// The name by which results show it: as it was asked for.
    pub label: String,
    /// The settings under which its caches are opened.
    pub settings: Settings,
}

impl Pair {
    /// The pair that the settings name.
    pub fn configured(settings: &Settings) -> Pair {
        let label = match (settings.kv_k.as_str(), settings.kv_v.as_str()) {
            (k, v) if k == v => k.to_owned(),
            (k, v) => format!("{k}:{v}"),
        };
        Pair { label, settings: settings.clone() }
    }

    /// The pair that a text names.
    ///
    /// # Errors
    /// The part that is not understood.
    pub fn parse(settings: &Settings, text: &str) -> Result<Pair> {
        let (k, v) = text.split_once(':').unwrap_or((text, text));
        let mut settings = settings.clone();
        (settings.kv_k, settings.kv_k_options) = codec(text, k)?;
        (settings.kv_v, settings.kv_v_options) = codec(text, v)?;
        Ok(Pair { label: text.to_owned(), settings })
    }
}

/// The pairs that are asked for, or that of the settings when there are none.
///
/// # Errors
/// One that is not understood, or is there twice.
pub fn pairs(settings: &Settings, asked: &[String]) -> Result<Vec<Pair>> {
    if asked.is_empty() {
        return Ok(vec![Pair::configured(settings)]);
    }
    let pairs: Vec<Pair> = asked.iter().map(|text| Pair::parse(settings, text)).collect::<Result<_>>()?;
    let twice = pairs.iter().enumerate().find(|(i, pair)| pairs[..*i].iter().any(|other| other.label == pair.label));
    match twice {
        Some((_, pair)) => bail!("`--kv` names `{}` twice, expected each pair of codecs once", pair.label),
        None => Ok(pairs),
    }
}

/// A codec and its options.
fn codec(pair: &str, text: &str) -> Result<(String, JsonTable)> {
    let mut parts = text.split('+');
    let name = parts.next().unwrap_or("").trim();
    if name.is_empty() {
        bail!("`--kv`: `{pair}` names no codec; expected {SYNTAX}");
    }
    let mut options = Map::new();
    for part in parts {
        let Some((key, value)) = part.split_once('=').filter(|(key, _)| !key.is_empty()) else {
            bail!("`--kv`: `{part}` in `{pair}` is no option; expected {SYNTAX}");
        };
        // Numbers and switches are themselves, anything else is text.
        let value = serde_json::from_str(value).unwrap_or_else(|_| Value::String(value.to_owned()));
        options.insert(key.to_owned(), value);
    }
    Ok((name.to_owned(), JsonTable(options)))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_pair_is_a_codec_or_two_each_with_options() {
        let settings = Settings::with_defaults();
        let pair = Pair::parse(&settings, "q4_0+rotation=none+gain=1.5:plug/q8_0+fast=true").unwrap();
        assert_eq!((pair.settings.kv_k.as_str(), pair.settings.kv_v.as_str()), ("q4_0", "plug/q8_0"));
        assert_eq!(Value::Object(pair.settings.kv_k_options.0), json!({"rotation": "none", "gain": 1.5}));
        assert_eq!(Value::Object(pair.settings.kv_v_options.0), json!({"fast": true}));
        let both = Pair::parse(&settings, "q8_0").unwrap().settings;
        assert_eq!((both.kv_k.as_str(), both.kv_v.as_str()), ("q8_0", "q8_0"));
    }

    #[test]
    fn what_is_no_pair_is_refused_by_name() {
        let settings = Settings::with_defaults();
        for (text, part) in
            [("", "names no codec"), ("q8_0:", "names no codec"), ("q8_0+x", "`x`"), ("q8_0+=1", "`=1`")]
        {
            let error = Pair::parse(&settings, text).unwrap_err().to_string();
            assert!(error.contains(part), "{text}: {error}");
        }
        let twice = pairs(&settings, &["f16".to_owned(), "f16".to_owned()]).unwrap_err().to_string();
        assert!(twice.contains("`f16` twice"), "{twice}");
    }

    #[test]
    fn nothing_asked_for_is_what_the_settings_name() {
        let settings = Settings { kv_v: "q4_0".to_owned(), ..Settings::with_defaults() };
        let pairs = pairs(&settings, &[]).unwrap();
        assert_eq!(pairs[0].label, "f16:q4_0");
    }
}
