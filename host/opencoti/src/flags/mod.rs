//! Flags. Each is one type that says its name, its environment twin, its TOML key, its default and its help.
//!
//! The command line, the environment, the config file, the help, the reference page and the example config all come
//! out of [`FLAGS`]; nothing about a flag is written twice.

mod defs;
pub mod value;

use crate::settings::Settings;
use value::FlagValue;

pub use defs::FLAGS;

/// A flag.
pub trait Flag {
    /// Kind of its value.
    type Value: FlagValue;
    /// Long name, without dashes.
    const LONG: &'static str;
    /// Short name.
    const SHORT: Option<char>;
    /// Key in the config file, `table.key`.
    const KEY: &'static str;
    /// Default in text form; empty when there is none and the help says what then happens.
    const DEFAULT: &'static str;
    /// First line: what it is. The rest: what to know.
    const HELP: &'static str;

    /// Puts a value into the settings.
    fn set(settings: &mut Settings, value: Self::Value);
}

/// A [`Flag`] as data.
pub struct Entry {
    /// Long name.
    pub long: &'static str,
    /// Short name.
    pub short: Option<char>,
    /// TOML key.
    pub key: &'static str,
    /// Default in text form.
    pub default: &'static str,
    /// Help.
    pub help: &'static str,
    /// Kind of value; empty for switches.
    pub label: &'static str,
    /// Sets from text.
    pub set_text: fn(&mut Settings, &str) -> Result<(), String>,
    /// Sets from TOML.
    pub set_toml: fn(&mut Settings, &toml::Value) -> Result<(), String>,
}

impl Entry {
    const fn of<F: Flag>() -> Self {
        Entry {
            long: F::LONG,
            short: F::SHORT,
            key: F::KEY,
            default: F::DEFAULT,
            help: F::HELP,
            label: F::Value::LABEL,
            set_text: |settings, text| F::Value::from_text(text).map(|v| F::set(settings, v)),
            set_toml: |settings, value| F::Value::from_toml(value).map(|v| F::set(settings, v)),
        }
    }

    /// Name of the environment twin.
    pub fn env(&self) -> String {
        format!("OPENCOTI_{}", self.long.replace('-', "_").to_uppercase())
    }

    /// The table of its key.
    pub fn table(&self) -> &'static str {
        self.key.split_once('.').map_or("", |(table, _)| table)
    }

    /// Its key within the table.
    pub fn leaf(&self) -> &'static str {
        self.key.split_once('.').map_or(self.key, |(_, leaf)| leaf)
    }

    /// First line of the help.
    pub fn summary(&self) -> &'static str {
        self.help.trim().lines().next().unwrap_or("").trim()
    }

    /// The lines after the first, unwrapped.
    pub fn details(&self) -> String {
        let lines: Vec<&str> = self.help.trim().lines().skip(1).map(str::trim).filter(|l| !l.is_empty()).collect();
        lines.join(" ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn names_keys_and_environment_twins_are_unique() {
        let mut seen = HashSet::new();
        for flag in FLAGS {
            for name in [flag.long.to_owned(), flag.key.to_owned(), flag.env()] {
                assert!(seen.insert(name.clone()), "{name} twice");
            }
            if let Some(short) = flag.short {
                assert!(seen.insert(format!("-{short}")), "-{short} twice");
            }
        }
    }

    #[test]
    fn every_default_is_a_valid_value() {
        for flag in FLAGS.iter().filter(|f| !f.default.is_empty()) {
            (flag.set_text)(&mut Settings::default(), flag.default).unwrap_or_else(|e| panic!("{}: {e}", flag.long));
        }
    }

    #[test]
    fn every_flag_explains_itself() {
        for flag in FLAGS {
            assert!(flag.summary().ends_with('.'), "{}: `{}`", flag.long, flag.summary());
            assert!(matches!(flag.key.matches('.').count(), 1 | 2), "{}: key `{}`", flag.long, flag.key);
            assert!(
                !flag.default.is_empty() || !flag.details().is_empty(),
                "{} has no default and does not say what happens without it",
                flag.long
            );
        }
    }
}
