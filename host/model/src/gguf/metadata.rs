//! The metadata of a model: an ordered map with typed getters.
//!
//! Converters disagree about integer widths and about scalar against array, so the getters take any integer type whose value
//! fits, and the per-layer getters take one value for all layers or one for each.

use std::collections::HashMap;

use super::value::key_error;
use super::{Array, GgufError, Value};

/// The keys of a file, in file order.
#[derive(Clone, Debug, Default)]
pub struct Metadata {
    file: String,
    entries: Vec<(String, Value)>,
    index: HashMap<String, usize>,
}

impl Metadata {
    pub(crate) fn new(file: &str) -> Self {
        Metadata { file: file.to_owned(), ..Metadata::default() }
    }

    /// Adds a key; an error if it is there already.
    pub(crate) fn insert(&mut self, key: String, value: Value) -> Result<(), GgufError> {
        if self.index.insert(key.clone(), self.entries.len()).is_some() {
            return Err(key_error(&self.file, &key, "occurs twice".to_owned()));
        }
        self.entries.push((key, value));
        Ok(())
    }

    /// Name of the file the keys come from, as errors write it.
    pub fn file(&self) -> &str {
        &self.file
    }

    /// All keys and values in file order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&str, &Value)> {
        self.entries.iter().map(|(key, value)| (key.as_str(), value))
    }

    /// Number of keys.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there are no keys.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The value of a key as it is in the file.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.index.get(key).map(|&i| &self.entries[i].1)
    }

    /// The error for a key that must be there and is not.
    pub fn missing(&self, key: &str, expected: &str) -> GgufError {
        key_error(&self.file, key, format!("is missing; expected {expected}"))
    }

    /// The error for a key whose value is not what it must be; `expected` completes "expected …".
    pub fn unexpected(&self, key: &str, expected: &str) -> GgufError {
        let found = self.get(key).map_or_else(|| "nothing".to_owned(), Value::describe);
        key_error(&self.file, key, format!("holds {found}; expected {expected}"))
    }

    /// Applies `convert` to the value of `key`, if there is one; `None` from it is an error.
    fn typed<'a, T>(
        &'a self,
        key: &str,
        expected: &str,
        convert: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, GgufError> {
        let Some(value) = self.get(key) else {
            return Ok(None);
        };
        convert(value).map(Some).ok_or_else(|| self.unexpected(key, expected))
    }

    /// An integer of any stored width that fits 32 bits without sign.
    pub fn u32(&self, key: &str) -> Result<Option<u32>, GgufError> {
        self.typed(key, "an integer from 0 to 4294967295", |v| v.as_integer()?.try_into().ok())
    }

    /// An integer of any stored width that fits 64 bits without sign.
    pub fn u64(&self, key: &str) -> Result<Option<u64>, GgufError> {
        self.typed(key, "an integer that is not negative", |v| v.as_integer()?.try_into().ok())
    }

    /// A finite number.
    pub fn f32(&self, key: &str) -> Result<Option<f32>, GgufError> {
        self.typed(key, "a finite number", |v| {
            let number = match *v {
                Value::F32(x) => x,
                Value::F64(x) => x as f32,
                Value::Bool(_) => return None,
                ref other => other.as_integer()? as f32,
            };
            number.is_finite().then_some(number)
        })
    }

    /// A bool, also if stored as the integer 0 or 1.
    pub fn bool(&self, key: &str) -> Result<Option<bool>, GgufError> {
        self.typed(key, "a bool", |v| integer_as_bool(v.as_integer()?))
    }

    /// A string.
    pub fn str(&self, key: &str) -> Result<Option<&str>, GgufError> {
        self.typed(key, "a string", |v| match v {
            Value::Str(s) => Some(s.as_str()),
            _ => None,
        })
    }

    /// An array of strings.
    pub fn strings(&self, key: &str) -> Result<Option<&[String]>, GgufError> {
        self.typed(key, "an array of strings", |v| match v {
            Value::Array(Array::Str(s)) => Some(s.as_slice()),
            _ => None,
        })
    }

    /// An array of numbers.
    pub fn f32s(&self, key: &str) -> Result<Option<Vec<f32>>, GgufError> {
        self.typed(key, "an array of numbers", |v| match v {
            Value::Array(Array::F32(x)) => Some(x.clone()),
            Value::Array(Array::F64(x)) => Some(x.iter().map(|&x| x as f32).collect()),
            Value::Array(other) => Some(other.integers()?.into_iter().map(|x| x as f32).collect()),
            _ => None,
        })
    }

    /// An array of integers of any stored width that fit 32 bits with sign.
    pub fn i32s(&self, key: &str) -> Result<Option<Vec<i32>>, GgufError> {
        self.typed(key, "an array of 32-bit integers", |v| match v {
            Value::Array(a) => a.integers()?.into_iter().map(|x| x.try_into().ok()).collect(),
            _ => None,
        })
    }

    /// An array of integers of any stored width that fit 32 bits without sign.
    pub fn u32s(&self, key: &str) -> Result<Option<Vec<u32>>, GgufError> {
        self.typed(key, "an array of integers that are not negative", |v| match v {
            Value::Array(a) => a.integers()?.into_iter().map(|x| x.try_into().ok()).collect(),
            _ => None,
        })
    }

    /// An array of bools, also if stored as integers 0 and 1.
    pub fn bools(&self, key: &str) -> Result<Option<Vec<bool>>, GgufError> {
        self.typed(key, "an array of bools", |v| match v {
            Value::Array(a) => a.integers()?.into_iter().map(integer_as_bool).collect(),
            _ => None,
        })
    }

    /// A per-layer integer: one for all `layers`, or an array with one for each. More array elements than layers are allowed
    /// (blocks behind the trunk have entries too); fewer are an error.
    pub fn per_layer_u32(&self, key: &str, layers: usize) -> Result<Option<Vec<u32>>, GgufError> {
        match self.get(key) {
            Some(Value::Array(a)) if a.len() < layers => {
                Err(self.unexpected(key, &format!("one integer, or one for each of the {layers} layers")))
            }
            Some(Value::Array(_)) => Ok(self.u32s(key)?.map(|mut values| {
                values.truncate(layers);
                values
            })),
            _ => Ok(self.u32(key)?.map(|value| vec![value; layers])),
        }
    }
}

fn integer_as_bool(value: i128) -> Option<bool> {
    match value {
        0 => Some(false),
        1 => Some(true),
        _ => None,
    }
}
