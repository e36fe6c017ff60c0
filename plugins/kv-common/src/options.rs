//! Reading a codec's options: unknown keys and values are refused by name.

use opencoti_plugin_api::Error;
use opencoti_plugin_api::kv_codec::CodecName;
use serde_json::{Map, Value};

/// The options that `open` was given.
#[derive(Clone, Copy)]
pub struct Options<'a> {
    table: &'a Map<String, Value>,
}

impl<'a> Options<'a> {
    /// Checks that `options` is a table whose keys are all among `known`; `family` names the codecs in the refusal, for
    /// example `scalar`.
    ///
    /// # Errors
    /// A sentence with the status "unsupported".
    pub fn new(options: &'a Value, family: &str, known: &[&str]) -> Result<Self, Error> {
        let Some(table) = options.as_object() else {
            return Err(Error::unsupported(format!("the codec's options are `{options}`, expected an object")));
        };
        if let Some(key) = table.keys().find(|k| !known.contains(&k.as_str())) {
            let names: Vec<String> = known.iter().map(|k| format!("`{k}`")).collect();
            let takes = match names.is_empty() {
                true => "none".to_owned(),
                false => names.join(", "),
            };
            return Err(Error::unsupported(format!("option `{key}` is unknown; the {family} codecs take {takes}")));
        }
        Ok(Options { table })
    }

    /// The value that option `key` names among `choices`; the first one when the option is absent.
    ///
    /// # Errors
    /// As [`Options::new`].
    pub fn choice<T: Copy>(&self, key: &str, choices: &[(&str, T)]) -> Result<T, Error> {
        let Some(value) = self.table.get(key) else { return Ok(choices[0].1) };
        match choices.iter().find(|(name, _)| value.as_str() == Some(name)) {
            Some(&(_, choice)) => Ok(choice),
            None => {
                let names: Vec<String> = choices.iter().map(|(name, _)| format!("\"{name}\"")).collect();
                let expected = match names.as_slice() {
                    [one] => one.clone(),
                    [first @ .., last] => format!("{} or {last}", first.join(", ")),
                    [] => "nothing".to_owned(),
                };
                Err(Error::unsupported(format!("option `{key}` is {value}, expected {expected}")))
            }
        }
    }
}

/// Refuses any key in the config of a plugin that takes none.
///
/// # Errors
/// A sentence that names the key.
pub fn no_config(config: &Value, plugin: &str) -> Result<(), Error> {
    match config.as_object() {
        Some(table) => match table.keys().next() {
            None => Ok(()),
            Some(key) => Err(Error::new(format!("{plugin} has no config key `{key}`; it takes none, remove it"))),
        },
        None => Err(Error::new(format!("the config of {plugin} is `{config}`, expected a table"))),
    }
}

/// The refusal of a codec that the plugin does not have.
pub fn no_codec(plugin: &str, asked: &str, codecs: &[CodecName]) -> Error {
    let names: Vec<&str> = codecs.iter().map(|c| c.name).collect();
    Error::unsupported(format!("{plugin} has no codec `{asked}`; it has {}", names.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_choice_is_read_and_the_first_is_the_default() {
        let choices = [("none", 0), ("some", 1), ("all", 2)];
        let read = |value: Value| Options::new(&value, "test", &["how"])?.choice("how", &choices);
        assert_eq!(read(json!({})).unwrap(), 0);
        assert_eq!(read(json!({"how": "all"})).unwrap(), 2);
        let refused = |value| read(value).unwrap_err().message;
        assert_eq!(refused(json!({"how": 3})), r#"option `how` is 3, expected "none", "some" or "all""#);
        assert_eq!(refused(json!({"who": 3})), "option `who` is unknown; the test codecs take `how`");
        assert_eq!(refused(json!([])), "the codec's options are `[]`, expected an object");
    }
}
