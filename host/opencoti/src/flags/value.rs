//! Kinds of flag values: how each is read from text (command line, environment) and from TOML.

use std::path::PathBuf;

use opencoti_model::layer_plan::{RepeatLayers, RepeatLayersError};

/// A value a flag can have.
pub trait FlagValue: Sized {
    /// What help and the reference call it; empty for switches.
    const LABEL: &'static str;

    /// From the command line or the environment.
    fn from_text(text: &str) -> Result<Self, String>;

    /// From the config file.
    fn from_toml(value: &toml::Value) -> Result<Self, String>;
}

fn expected(label: &str, value: &toml::Value) -> String {
    let shown = value.to_string();
    let shown = if shown.len() > 60 { value.type_str().to_owned() } else { shown };
    format!("found {shown}, expected {label}")
}

macro_rules! integer {
    ($($ty:ty),*) => {$(
        impl FlagValue for $ty {
            const LABEL: &'static str = "N";

            fn from_text(text: &str) -> Result<Self, String> {
                text.trim().parse().map_err(|_| {
                    format!("found `{text}`, expected a whole number from {} to {}", <$ty>::MIN, <$ty>::MAX)
                })
            }

            fn from_toml(value: &toml::Value) -> Result<Self, String> {
                let number = value.as_integer().ok_or_else(|| expected("a whole number", value))?;
                <$ty>::try_from(number)
                    .map_err(|_| format!("found {number}, expected a whole number from {} to {}", <$ty>::MIN, <$ty>::MAX))
            }
        }
    )*};
}
integer!(u16, u32, i32, i64);

impl FlagValue for f32 {
    const LABEL: &'static str = "X";

    fn from_text(text: &str) -> Result<Self, String> {
        let number: f32 = text.trim().parse().map_err(|_| format!("found `{text}`, expected a number"))?;
        if number.is_finite() { Ok(number) } else { Err(format!("found `{text}`, expected a finite number")) }
    }

    fn from_toml(value: &toml::Value) -> Result<Self, String> {
        match value {
            toml::Value::Float(x) if x.is_finite() => Ok(*x as f32),
            toml::Value::Integer(i) => Ok(*i as f32),
            other => Err(expected("a number", other)),
        }
    }
}

impl FlagValue for bool {
    const LABEL: &'static str = "";

    fn from_text(text: &str) -> Result<Self, String> {
        match text.trim().to_ascii_lowercase().as_str() {
            "true" | "1" | "on" | "yes" => Ok(true),
            "false" | "0" | "off" | "no" => Ok(false),
            _ => Err(format!("found `{text}`, expected true or false")),
        }
    }

    fn from_toml(value: &toml::Value) -> Result<Self, String> {
        value.as_bool().ok_or_else(|| expected("true or false", value))
    }
}

impl FlagValue for String {
    const LABEL: &'static str = "TEXT";

    fn from_text(text: &str) -> Result<Self, String> {
        Ok(text.to_owned())
    }

    fn from_toml(value: &toml::Value) -> Result<Self, String> {
        value.as_str().map(str::to_owned).ok_or_else(|| expected("a string", value))
    }
}

impl FlagValue for RepeatLayers {
    const LABEL: &'static str = "A-B;C-D";

    fn from_text(text: &str) -> Result<Self, String> {
        text.parse().map_err(|e: RepeatLayersError| e.to_string())
    }

    fn from_toml(value: &toml::Value) -> Result<Self, String> {
        Self::from_text(value.as_str().ok_or_else(|| expected("ranges of blocks such as \"26-34\"", value))?)
    }
}

impl FlagValue for PathBuf {
    const LABEL: &'static str = "PATH";

    fn from_text(text: &str) -> Result<Self, String> {
        if text.is_empty() { Err("found an empty path".to_owned()) } else { Ok(PathBuf::from(text)) }
    }

    fn from_toml(value: &toml::Value) -> Result<Self, String> {
        Self::from_text(value.as_str().ok_or_else(|| expected("a path", value))?)
    }
}

/// A list: comma-separated as text, an array in TOML.
impl FlagValue for Vec<String> {
    const LABEL: &'static str = "A,B,…";

    fn from_text(text: &str) -> Result<Self, String> {
        Ok(text.split(',').map(str::trim).filter(|s| !s.is_empty()).map(str::to_owned).collect())
    }

    fn from_toml(value: &toml::Value) -> Result<Self, String> {
        let items = value.as_array().ok_or_else(|| expected("an array of strings", value))?;
        items.iter().map(String::from_toml).collect()
    }
}

/// A number of bytes: `1073741824`, `"1GiB"`, `"512 MiB"`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Bytes(pub u64);

impl FlagValue for Bytes {
    const LABEL: &'static str = "BYTES";

    fn from_text(text: &str) -> Result<Self, String> {
        let bad = || format!("found `{text}`, expected bytes such as 1073741824, 512MiB or 2GiB");
        let text = text.trim();
        let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
        let number: u64 = text[..digits].parse().map_err(|_| bad())?;
        let unit: u64 = match text[digits..].trim().to_ascii_lowercase().as_str() {
            "" | "b" => 1,
            "k" | "kib" => 1 << 10,
            "m" | "mib" => 1 << 20,
            "g" | "gib" => 1 << 30,
            "t" | "tib" => 1 << 40,
            _ => return Err(bad()),
        };
        number.checked_mul(unit).map(Bytes).ok_or_else(bad)
    }

    fn from_toml(value: &toml::Value) -> Result<Self, String> {
        match value {
            toml::Value::Integer(i) => u64::try_from(*i).map(Bytes).map_err(|_| expected("a number of bytes", value)),
            toml::Value::String(text) => Self::from_text(text),
            other => Err(expected("a number of bytes", other)),
        }
    }
}

/// Options of a codec: a JSON object as text, a table in TOML.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct JsonTable(pub serde_json::Map<String, serde_json::Value>);

impl FlagValue for JsonTable {
    const LABEL: &'static str = "JSON";

    fn from_text(text: &str) -> Result<Self, String> {
        match serde_json::from_str(text) {
            Ok(serde_json::Value::Object(map)) => Ok(JsonTable(map)),
            Ok(_) => Err(format!("found `{text}`, expected a JSON object")),
            Err(e) => Err(format!("found `{text}`, expected a JSON object ({e})")),
        }
    }

    fn from_toml(value: &toml::Value) -> Result<Self, String> {
        match serde_json::to_value(value) {
            Ok(serde_json::Value::Object(map)) => Ok(JsonTable(map)),
            _ => Err(expected("a table", value)),
        }
    }
}

/// Declares an enum of names that is a flag value.
#[macro_export]
macro_rules! choice {
    ($(#[$meta:meta])* $name:ident { $($(#[$vmeta:meta])* $variant:ident = $text:literal),+ $(,)? }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum $name { $($(#[$vmeta])* $variant),+ }

        impl $crate::flags::value::FlagValue for $name {
            const LABEL: &'static str = $crate::choice!(@join $($text),+);

            fn from_text(text: &str) -> Result<Self, String> {
                match text {
                    $($text => Ok(Self::$variant),)+
                    _ => Err(format!("found `{text}`, expected one of {}", Self::LABEL)),
                }
            }

            fn from_toml(value: &toml::Value) -> Result<Self, String> {
                match value.as_str() {
                    Some(text) => Self::from_text(text),
                    None => Err(format!("found {value}, expected one of {}", Self::LABEL)),
                }
            }
        }
    };
    (@join $first:literal $(, $rest:literal)*) => { concat!($first $(, "|", $rest)*) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_take_binary_units() {
        assert_eq!(Bytes::from_text("512 MiB"), Ok(Bytes(512 << 20)));
        assert_eq!(Bytes::from_text("2g"), Ok(Bytes(2 << 30)));
        assert_eq!(Bytes::from_text("7"), Ok(Bytes(7)));
        assert!(Bytes::from_text("12 parsecs").unwrap_err().contains("expected bytes"));
        assert!(Bytes::from_text("99999999999T").is_err());
    }

    #[test]
    fn a_port_beyond_16_bits_names_the_range() {
        assert_eq!(
            u16::from_toml(&toml::Value::Integer(70000)).unwrap_err(),
            "found 70000, expected a whole number from 0 to 65535"
        );
    }

    #[test]
    fn lists_come_from_commas_or_arrays() {
        assert_eq!(Vec::<String>::from_text("a, b,,c").unwrap(), ["a", "b", "c"]);
        assert!(Vec::<String>::from_toml(&toml::Value::String("a".into())).is_err());
    }
}
