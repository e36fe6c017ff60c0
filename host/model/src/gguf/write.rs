//! A writer of GGUF files, for tests and for made-up models. The whole file is built in memory.

use opencoti_compute::quant::WeightType;

use super::{Array, DEFAULT_ALIGNMENT, TensorType, Value};

/// Collects keys and tensors; [`GgufWriter::to_bytes`] lays them out.
#[derive(Clone, Debug)]
pub struct GgufWriter {
    version: u32,
    alignment: usize,
    keys: Vec<(String, Value)>,
    tensors: Vec<(String, Vec<usize>, TensorType, Vec<u8>)>,
}

impl Default for GgufWriter {
    fn default() -> Self {
        GgufWriter { version: 3, alignment: DEFAULT_ALIGNMENT, keys: Vec::new(), tensors: Vec::new() }
    }
}

impl GgufWriter {
    /// An empty file of version 3.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the version field.
    pub fn version(mut self, version: u32) -> Self {
        self.version = version;
        self
    }

    /// Sets the alignment, a power of two, and writes its key.
    pub fn alignment(mut self, alignment: u32) -> Self {
        self.alignment = alignment as usize;
        self.key("general.alignment", Value::U32(alignment))
    }

    /// Adds a key, a second time if it is there already.
    pub fn key(mut self, key: &str, value: Value) -> Self {
        self.keys.push((key.to_owned(), value));
        self
    }

    /// Sets a key that may be there already.
    pub fn set_key(mut self, key: &str, value: Value) -> Self {
        self.keys.retain(|(name, _)| name != key);
        self.key(key, value)
    }

    /// Adds a string key.
    pub fn str(self, key: &str, value: &str) -> Self {
        self.key(key, Value::Str(value.to_owned()))
    }

    /// Adds a tensor; `dims` with the fastest first, `bytes` as they shall lie in the file.
    pub fn tensor(mut self, name: &str, dims: &[usize], ty: TensorType, bytes: Vec<u8>) -> Self {
        self.tensors.push((name.to_owned(), dims.to_vec(), ty, bytes));
        self
    }

    /// Adds a tensor of f32 values.
    pub fn f32_tensor(self, name: &str, dims: &[usize], values: &[f32]) -> Self {
        self.tensor(name, dims, WeightType::F32.into(), values.iter().flat_map(|v| v.to_le_bytes()).collect())
    }

    /// The file. Tensor data is laid out in the order of [`GgufWriter::tensor`] calls.
    pub fn to_bytes(&self) -> Vec<u8> {
        let tensors =
            self.tensors.iter().map(|(name, dims, ty, bytes)| (name.as_str(), dims.as_slice(), *ty, bytes.len()));
        let mut out = header(self.version, self.alignment, &self.keys, tensors);
        for (_, _, _, bytes) in &self.tensors {
            out.resize(align(out.len(), self.alignment), 0);
            out.extend(bytes);
        }
        out
    }

    /// Writes the file.
    ///
    /// # Errors
    /// What the system says.
    pub fn write_to(&self, path: &std::path::Path) -> std::io::Result<()> {
        std::fs::write(path, self.to_bytes())
    }
}

/// Everything before the tensors' data, without the padding behind it. Each tensor is its name, dimensions, type and bytes;
/// their data follows in this order, each aligned.
pub(crate) fn header<'a>(
    version: u32,
    alignment: usize,
    keys: &[(String, Value)],
    tensors: impl ExactSizeIterator<Item = (&'a str, &'a [usize], TensorType, usize)>,
) -> Vec<u8> {
    let mut out = b"GGUF".to_vec();
    out.extend(version.to_le_bytes());
    out.extend((tensors.len() as u64).to_le_bytes());
    out.extend((keys.len() as u64).to_le_bytes());
    for (key, value) in keys {
        put_str(&mut out, key);
        put_value(&mut out, value);
    }
    let mut offset = 0;
    for (name, dims, ty, bytes) in tensors {
        put_str(&mut out, name);
        out.extend((dims.len() as u32).to_le_bytes());
        dims.iter().for_each(|&d| out.extend((d as u64).to_le_bytes()));
        out.extend(ty.id().to_le_bytes());
        out.extend((offset as u64).to_le_bytes());
        offset = align(offset + bytes, alignment);
    }
    out
}

/// The next multiple of `alignment`.
pub(crate) fn align(at: usize, alignment: usize) -> usize {
    at.next_multiple_of(alignment)
}

fn put_str(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

fn put_value(out: &mut Vec<u8>, value: &Value) {
    out.extend((value.value_type() as u32).to_le_bytes());
    match value {
        Value::U8(v) => out.push(*v),
        Value::I8(v) => out.extend(v.to_le_bytes()),
        Value::U16(v) => out.extend(v.to_le_bytes()),
        Value::I16(v) => out.extend(v.to_le_bytes()),
        Value::U32(v) => out.extend(v.to_le_bytes()),
        Value::I32(v) => out.extend(v.to_le_bytes()),
        Value::F32(v) => out.extend(v.to_le_bytes()),
        Value::Bool(v) => out.push(u8::from(*v)),
        Value::Str(v) => put_str(out, v),
        Value::Array(v) => put_array(out, v),
        Value::U64(v) => out.extend(v.to_le_bytes()),
        Value::I64(v) => out.extend(v.to_le_bytes()),
        Value::F64(v) => out.extend(v.to_le_bytes()),
    }
}

fn put_array(out: &mut Vec<u8>, array: &Array) {
    out.extend((array.element_type() as u32).to_le_bytes());
    out.extend((array.len() as u64).to_le_bytes());
    match array {
        Array::U8(v) => out.extend(v),
        Array::I8(v) => v.iter().for_each(|v| out.extend(v.to_le_bytes())),
        Array::U16(v) => v.iter().for_each(|v| out.extend(v.to_le_bytes())),
        Array::I16(v) => v.iter().for_each(|v| out.extend(v.to_le_bytes())),
        Array::U32(v) => v.iter().for_each(|v| out.extend(v.to_le_bytes())),
        Array::I32(v) => v.iter().for_each(|v| out.extend(v.to_le_bytes())),
        Array::F32(v) => v.iter().for_each(|v| out.extend(v.to_le_bytes())),
        Array::Bool(v) => v.iter().for_each(|&v| out.push(u8::from(v))),
        Array::Str(v) => v.iter().for_each(|v| put_str(out, v)),
        Array::Array(v) => v.iter().for_each(|v| put_array(out, v)),
        Array::U64(v) => v.iter().for_each(|v| out.extend(v.to_le_bytes())),
        Array::I64(v) => v.iter().for_each(|v| out.extend(v.to_le_bytes())),
        Array::F64(v) => v.iter().for_each(|v| out.extend(v.to_le_bytes())),
    }
}
