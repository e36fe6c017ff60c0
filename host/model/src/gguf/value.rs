//! Metadata values: what the file can hold, and how it is read.

use std::fmt::Display;

use super::GgufError;
use super::cursor::Cursor;

/// Nested arrays deeper than this are refused: no real file nests more than twice, and reading recurses.
const MAX_NESTING: usize = 4;

/// Type of a metadata value, by its number in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are the documentation")]
pub enum ValueType {
    U8 = 0,
    I8 = 1,
    U16 = 2,
    I16 = 3,
    U32 = 4,
    I32 = 5,
    F32 = 6,
    Bool = 7,
    Str = 8,
    Array = 9,
    U64 = 10,
    I64 = 11,
    F64 = 12,
}

impl ValueType {
    /// The type with this number.
    pub fn from_id(id: u32) -> Option<ValueType> {
        use ValueType::*;
        [U8, I8, U16, I16, U32, I32, F32, Bool, Str, Array, U64, I64, F64].into_iter().find(|&ty| ty as u32 == id)
    }

    /// Name as error messages write it.
    pub fn name(self) -> &'static str {
        match self {
            ValueType::U8 => "u8",
            ValueType::I8 => "i8",
            ValueType::U16 => "u16",
            ValueType::I16 => "i16",
            ValueType::U32 => "u32",
            ValueType::I32 => "i32",
            ValueType::F32 => "f32",
            ValueType::Bool => "bool",
            ValueType::Str => "string",
            ValueType::Array => "array",
            ValueType::U64 => "u64",
            ValueType::I64 => "i64",
            ValueType::F64 => "f64",
        }
    }
}

/// One metadata value.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs, reason = "the names are the documentation")]
pub enum Value {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(bool),
    Str(String),
    Array(Array),
    U64(u64),
    I64(i64),
    F64(f64),
}

/// An array of values of one type.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs, reason = "the names are the documentation")]
pub enum Array {
    U8(Vec<u8>),
    I8(Vec<i8>),
    U16(Vec<u16>),
    I16(Vec<i16>),
    U32(Vec<u32>),
    I32(Vec<i32>),
    F32(Vec<f32>),
    Bool(Vec<bool>),
    Str(Vec<String>),
    Array(Vec<Array>),
    U64(Vec<u64>),
    I64(Vec<i64>),
    F64(Vec<f64>),
}

impl Value {
    /// Type of the value.
    pub fn value_type(&self) -> ValueType {
        match self {
            Value::U8(_) => ValueType::U8,
            Value::I8(_) => ValueType::I8,
            Value::U16(_) => ValueType::U16,
            Value::I16(_) => ValueType::I16,
            Value::U32(_) => ValueType::U32,
            Value::I32(_) => ValueType::I32,
            Value::F32(_) => ValueType::F32,
            Value::Bool(_) => ValueType::Bool,
            Value::Str(_) => ValueType::Str,
            Value::Array(_) => ValueType::Array,
            Value::U64(_) => ValueType::U64,
            Value::I64(_) => ValueType::I64,
            Value::F64(_) => ValueType::F64,
        }
    }

    /// The value as an integer, if its type is one (bools count as 0 and 1).
    pub(super) fn as_integer(&self) -> Option<i128> {
        Some(match *self {
            Value::U8(v) => v.into(),
            Value::I8(v) => v.into(),
            Value::U16(v) => v.into(),
            Value::I16(v) => v.into(),
            Value::U32(v) => v.into(),
            Value::I32(v) => v.into(),
            Value::U64(v) => v.into(),
            Value::I64(v) => v.into(),
            Value::Bool(v) => v.into(),
            _ => return None,
        })
    }

    /// What the value is, for error messages: its type and, if short, its content.
    pub(super) fn describe(&self) -> String {
        match self {
            Value::Str(s) if s.len() <= 64 => format!("the string {s:?}"),
            Value::Str(s) => format!("a string of {} bytes", s.len()),
            Value::Array(a) => format!("an array of {} {}", a.len(), a.element_type().name()),
            Value::F32(v) => format!("the f32 {v}"),
            Value::F64(v) => format!("the f64 {v}"),
            Value::Bool(v) => format!("the bool {v}"),
            other => format!("the {} {}", other.value_type().name(), other.as_integer().unwrap_or_default()),
        }
    }

    pub(super) fn read(cursor: &mut Cursor<'_>, key: &str) -> Result<Value, GgufError> {
        let what = format!("the value of key {key:?}");
        let ty = read_type(cursor, key, &what)?;
        Ok(match ty {
            ValueType::U8 => Value::U8(scalar(cursor, &what)?),
            ValueType::I8 => Value::I8(scalar(cursor, &what)?),
            ValueType::U16 => Value::U16(scalar(cursor, &what)?),
            ValueType::I16 => Value::I16(scalar(cursor, &what)?),
            ValueType::U32 => Value::U32(scalar(cursor, &what)?),
            ValueType::I32 => Value::I32(scalar(cursor, &what)?),
            ValueType::F32 => Value::F32(scalar(cursor, &what)?),
            ValueType::U64 => Value::U64(scalar(cursor, &what)?),
            ValueType::I64 => Value::I64(scalar(cursor, &what)?),
            ValueType::F64 => Value::F64(scalar(cursor, &what)?),
            ValueType::Bool => Value::Bool(as_bool(scalar(cursor, &what)?, cursor.file(), key)?),
            ValueType::Str => {
                let bytes = cursor.string_bytes(&what)?;
                Value::Str(utf8(bytes, cursor.file(), key, None)?)
            }
            ValueType::Array => Value::Array(Array::read(cursor, key, &what, 1)?),
        })
    }
}

impl Array {
    /// Number of elements.
    pub fn len(&self) -> usize {
        match self {
            Array::U8(v) => v.len(),
            Array::I8(v) => v.len(),
            Array::U16(v) => v.len(),
            Array::I16(v) => v.len(),
            Array::U32(v) => v.len(),
            Array::I32(v) => v.len(),
            Array::F32(v) => v.len(),
            Array::Bool(v) => v.len(),
            Array::Str(v) => v.len(),
            Array::Array(v) => v.len(),
            Array::U64(v) => v.len(),
            Array::I64(v) => v.len(),
            Array::F64(v) => v.len(),
        }
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Type of the elements.
    pub fn element_type(&self) -> ValueType {
        match self {
            Array::U8(_) => ValueType::U8,
            Array::I8(_) => ValueType::I8,
            Array::U16(_) => ValueType::U16,
            Array::I16(_) => ValueType::I16,
            Array::U32(_) => ValueType::U32,
            Array::I32(_) => ValueType::I32,
            Array::F32(_) => ValueType::F32,
            Array::Bool(_) => ValueType::Bool,
            Array::Str(_) => ValueType::Str,
            Array::Array(_) => ValueType::Array,
            Array::U64(_) => ValueType::U64,
            Array::I64(_) => ValueType::I64,
            Array::F64(_) => ValueType::F64,
        }
    }

    /// The elements as integers, if their type is one (bools count as 0 and 1).
    pub(super) fn integers(&self) -> Option<Vec<i128>> {
        fn widen<T: Copy + Into<i128>>(values: &[T]) -> Vec<i128> {
            values.iter().map(|&v| v.into()).collect()
        }
        Some(match self {
            Array::U8(v) => widen(v),
            Array::I8(v) => widen(v),
            Array::U16(v) => widen(v),
            Array::I16(v) => widen(v),
            Array::U32(v) => widen(v),
            Array::I32(v) => widen(v),
            Array::U64(v) => widen(v),
            Array::I64(v) => widen(v),
            Array::Bool(v) => widen(v),
            _ => return None,
        })
    }

    fn read(cursor: &mut Cursor<'_>, key: &str, what: &str, depth: usize) -> Result<Array, GgufError> {
        if depth > MAX_NESTING {
            return Err(key_error(cursor.file(), key, format!("nests arrays more than {MAX_NESTING} deep")));
        }
        let ty = read_type(cursor, key, &what)?;
        let count = cursor.u64(&what)?;
        Ok(match ty {
            ValueType::U8 => Array::U8(scalars(cursor, count, what)?),
            ValueType::I8 => Array::I8(scalars(cursor, count, what)?),
            ValueType::U16 => Array::U16(scalars(cursor, count, what)?),
            ValueType::I16 => Array::I16(scalars(cursor, count, what)?),
            ValueType::U32 => Array::U32(scalars(cursor, count, what)?),
            ValueType::I32 => Array::I32(scalars(cursor, count, what)?),
            ValueType::F32 => Array::F32(scalars(cursor, count, what)?),
            ValueType::U64 => Array::U64(scalars(cursor, count, what)?),
            ValueType::I64 => Array::I64(scalars(cursor, count, what)?),
            ValueType::F64 => Array::F64(scalars(cursor, count, what)?),
            ValueType::Bool => {
                let bytes: Vec<u8> = scalars(cursor, count, what)?;
                Array::Bool(bytes.into_iter().map(|b| as_bool(b, cursor.file(), key)).collect::<Result<_, _>>()?)
            }
            ValueType::Str => Array::Str(strings(cursor, count, key, what)?),
            ValueType::Array => {
                // An element takes at least its type and its count.
                let count = cursor.check_count(count, 12, &what)?;
                (0..count)
                    .map(|_| Array::read(cursor, key, what, depth + 1))
                    .collect::<Result<_, _>>()
                    .map(Array::Array)?
            }
        })
    }
}

fn strings(cursor: &mut Cursor<'_>, count: u64, key: &str, what: &str) -> Result<Vec<String>, GgufError> {
    // A string takes at least its length.
    let count = cursor.check_count(count, 8, &what)?;
    let mut out = Vec::with_capacity(count);
    for index in 0..count {
        let bytes = cursor.string_bytes(&what)?;
        out.push(utf8(bytes, cursor.file(), key, Some(index))?);
    }
    Ok(out)
}

fn read_type(cursor: &mut Cursor<'_>, key: &str, what: &dyn Display) -> Result<ValueType, GgufError> {
    let id = cursor.u32(what)?;
    ValueType::from_id(id).ok_or_else(|| {
        key_error(cursor.file(), key, format!("has the unknown value type {id}; types 0 to 12 are known"))
    })
}

/// A number as it lies in the file.
trait Scalar: Sized {
    const BYTES: usize;
    fn from_le(bytes: &[u8]) -> Self;
}

macro_rules! scalar {
    ($($ty:ty),*) => {$(
        impl Scalar for $ty {
            const BYTES: usize = size_of::<$ty>();
            fn from_le(bytes: &[u8]) -> Self {
                let mut own = [0; size_of::<$ty>()];
                own.copy_from_slice(bytes);
                <$ty>::from_le_bytes(own)
            }
        }
    )*};
}
scalar!(u8, i8, u16, i16, u32, i32, f32, u64, i64, f64);

fn scalar<T: Scalar>(cursor: &mut Cursor<'_>, what: &dyn Display) -> Result<T, GgufError> {
    cursor.take(T::BYTES as u64, what).map(T::from_le)
}

fn scalars<T: Scalar>(cursor: &mut Cursor<'_>, count: u64, what: &str) -> Result<Vec<T>, GgufError> {
    let count = cursor.check_count(count, T::BYTES, &what)?;
    let bytes = cursor.take((count * T::BYTES) as u64, &what)?;
    Ok(bytes.chunks_exact(T::BYTES).map(T::from_le).collect())
}

fn as_bool(byte: u8, file: &str, key: &str) -> Result<bool, GgufError> {
    match byte {
        0 => Ok(false),
        1 => Ok(true),
        other => Err(key_error(file, key, format!("has a bool of value {other}; expected 0 or 1"))),
    }
}

fn utf8(bytes: &[u8], file: &str, key: &str, index: Option<usize>) -> Result<String, GgufError> {
    match std::str::from_utf8(bytes) {
        Ok(text) => Ok(text.to_owned()),
        Err(e) => {
            let whose = index.map(|i| format!(" in element {i}")).unwrap_or_default();
            Err(key_error(file, key, format!("is not valid UTF-8{whose}: bad byte at {}", e.valid_up_to())))
        }
    }
}

pub(super) fn key_error(file: &str, key: &str, detail: String) -> GgufError {
    GgufError::Key { file: file.to_owned(), key: key.to_owned(), detail }
}
