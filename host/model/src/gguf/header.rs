//! The header of one file: keys and tensor infos, checked against the bytes that are there.

use std::collections::HashSet;
use std::ops::Range;

use super::cursor::Cursor;
use super::{DEFAULT_ALIGNMENT, GgufError, Metadata, TensorType, Value};

/// Tensors have at most four dimensions.
const MAX_DIMS: u32 = 4;
/// Smallest alignment of tensor data, that of the widest element.
const MIN_ALIGNMENT: u32 = 8;
/// Smallest bytes of a key: length of the name, type, one byte of value.
const MIN_KEY_BYTES: usize = 8 + 4 + 1;
/// Smallest bytes of a tensor info: length of the name, dimension count, one dimension, type, offset.
const MIN_TENSOR_BYTES: usize = 8 + 4 + 8 + 4 + 8;

/// The header of one GGUF file.
#[derive(Clone, Debug)]
pub struct Gguf {
    /// Format version, 2 or 3.
    pub version: u32,
    /// Alignment of tensor data, a power of two.
    pub alignment: usize,
    /// The keys.
    pub metadata: Metadata,
    /// The tensors in file order.
    pub tensors: Vec<TensorInfo>,
}

/// Where a tensor lies and what it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// Name, for example `blk.0.attn_q.weight`.
    pub name: String,
    /// Elements a dimension, the fastest (ne0) first; one to four of them, none zero.
    pub dims: Vec<usize>,
    /// Element type.
    pub ty: TensorType,
    /// Byte range in the file; its length is exactly that of the elements.
    pub range: Range<usize>,
}

impl TensorInfo {
    /// The dimensions without trailing ones (`{n, 1}` is `{n}`), the form in which shapes are compared.
    pub fn shape(&self) -> &[usize] {
        strip_trailing_ones(&self.dims)
    }

    /// Number of elements.
    pub fn elements(&self) -> usize {
        self.dims.iter().product()
    }
}

/// `dims` without trailing ones; one dimension always stays.
pub(crate) fn strip_trailing_ones(dims: &[usize]) -> &[usize] {
    let kept = dims.iter().rposition(|&d| d != 1).map_or(1, |last| last + 1);
    &dims[..kept.min(dims.len())]
}

impl Gguf {
    /// Reads the header of a file. `name` is the file's name for error messages.
    ///
    /// # Errors
    /// Anything inconsistent, see [`GgufError`]. A header that was accepted has tensors inside of `bytes`, that do not overlap.
    pub fn parse(bytes: &[u8], name: &str) -> Result<Gguf, GgufError> {
        let mut cursor = Cursor::new(bytes, name);
        let version = read_preamble(&mut cursor, bytes)?;
        let tensor_count = cursor.u64(&"the tensor count")?;
        let key_count = cursor.u64(&"the key count")?;
        let metadata = read_metadata(&mut cursor, key_count)?;
        let alignment = read_alignment(&metadata)?;
        let raw = read_tensor_infos(&mut cursor, tensor_count)?;
        let data_start = cursor
            .pos()
            .checked_next_multiple_of(alignment)
            .ok_or_else(|| header_error(name, "its data start overflows"))?;
        let tensors: Vec<TensorInfo> =
            raw.into_iter().map(|t| t.place(data_start, alignment, bytes.len(), name)).collect::<Result<_, _>>()?;
        refuse_overlaps(&tensors, name)?;
        Ok(Gguf { version, alignment, metadata, tensors })
    }
}

/// Checks magic and version.
fn read_preamble(cursor: &mut Cursor<'_>, bytes: &[u8]) -> Result<u32, GgufError> {
    let file = cursor.file();
    if !bytes.starts_with(b"GGUF") {
        return Err(GgufError::NotGguf { file: file.to_owned(), found: foreign_format(bytes) });
    }
    cursor.take(4, &"the magic")?;
    let version = cursor.u32(&"the version")?;
    match version {
        2 | 3 => Ok(version),
        // Small versions have their low half empty when the bytes are swapped.
        v if v & 0xffff == 0 && v != 0 => Err(GgufError::BigEndian { file: file.to_owned(), version: v.swap_bytes() }),
        version => Err(GgufError::Version { file: file.to_owned(), version }),
    }
}

/// What a file that is not GGUF seems to be.
fn foreign_format(bytes: &[u8]) -> String {
    let known: [(&[u8], &str); 8] = [
        (b"FUGG", "its magic is byte-swapped, which no version of the format uses"),
        (b"tjgg", "it is of the older GGJT format; convert the model again"),
        (b"fmgg", "it is of the older GGMF format; convert the model again"),
        (b"lmgg", "it is of the older GGML format; convert the model again"),
        (b"PK\x03\x04", "it is a zip archive (a PyTorch checkpoint or a package); convert or unpack it"),
        (b"version https://git-lfs", "it is a Git LFS pointer; fetch the real file with git lfs pull"),
        (b"<!DOCTYPE", "it is an HTML page; the download went wrong"),
        (b"<html", "it is an HTML page; the download went wrong"),
    ];
    if bytes.is_empty() {
        return "it is empty".to_owned();
    }
    if let Some((_, what)) = known.iter().find(|(magic, _)| bytes.starts_with(magic)) {
        return (*what).to_owned();
    }
    if bytes.get(8..10) == Some(b"{\"") {
        return "it looks like a safetensors file; convert it to GGUF".to_owned();
    }
    format!("it starts with {:?}, expected \"GGUF\"", String::from_utf8_lossy(&bytes[..bytes.len().min(4)]))
}

fn read_metadata(cursor: &mut Cursor<'_>, count: u64) -> Result<Metadata, GgufError> {
    let count = cursor.check_count(count, MIN_KEY_BYTES, &format_args!("the list of {count} keys"))?;
    let mut metadata = Metadata::new(cursor.file());
    for index in 0..count {
        let key = name_string(cursor, &format_args!("the name of key {index}"))?;
        let value = Value::read(cursor, &key)?;
        metadata.insert(key, value)?;
    }
    Ok(metadata)
}

fn read_alignment(metadata: &Metadata) -> Result<usize, GgufError> {
    let Some(alignment) = metadata.u32("general.alignment")? else {
        return Ok(DEFAULT_ALIGNMENT);
    };
    // Executors read elements in place, so the widest of them must lie aligned.
    if !alignment.is_power_of_two() || alignment < MIN_ALIGNMENT {
        return Err(metadata.unexpected("general.alignment", "a power of two of at least 8"));
    }
    usize::try_from(alignment).map_err(|_| metadata.unexpected("general.alignment", "a size of this machine"))
}

/// A tensor info as it is in the file, its offset relative to the data.
struct RawTensor {
    name: String,
    dims: Vec<u64>,
    type_id: u32,
    offset: u64,
}

fn read_tensor_infos(cursor: &mut Cursor<'_>, count: u64) -> Result<Vec<RawTensor>, GgufError> {
    let count = cursor.check_count(count, MIN_TENSOR_BYTES, &format_args!("the list of {count} tensors"))?;
    let mut tensors = Vec::with_capacity(count);
    let mut names = HashSet::with_capacity(count);
    for index in 0..count {
        let name = name_string(cursor, &format_args!("the name of tensor {index}"))?;
        let what = format!("the description of tensor {name:?}");
        let n_dims = cursor.u32(&what)?;
        if n_dims == 0 || n_dims > MAX_DIMS {
            return Err(tensor_error(
                cursor.file(),
                &name,
                format!("has {n_dims} dimensions; expected 1 to {MAX_DIMS}"),
            ));
        }
        let dims = (0..n_dims).map(|_| cursor.u64(&what)).collect::<Result<_, _>>()?;
        let type_id = cursor.u32(&what)?;
        let offset = cursor.u64(&what)?;
        if !names.insert(name.clone()) {
            return Err(tensor_error(cursor.file(), &name, "occurs twice".to_owned()));
        }
        tensors.push(RawTensor { name, dims, type_id, offset });
    }
    Ok(tensors)
}

impl RawTensor {
    /// Checks type, sizes and offset, and turns the offset into a byte range of the file.
    fn place(self, data_start: usize, alignment: usize, file_len: usize, file: &str) -> Result<TensorInfo, GgufError> {
        let fail = |detail: String| tensor_error(file, &self.name, detail);
        let ty = TensorType::from_id(self.type_id)
            .ok_or_else(|| fail(format!("has type number {}: {}", self.type_id, TensorType::why_not(self.type_id))))?;
        let dims: Vec<usize> = self
            .dims
            .iter()
            .map(|&d| usize::try_from(d))
            .collect::<Result<_, _>>()
            .map_err(|_| fail(format!("has dimensions {:?}, more than this machine can address", self.dims)))?;
        if dims.contains(&0) {
            return Err(fail(format!("has dimensions {dims:?}, one of them zero")));
        }
        if !dims[0].is_multiple_of(ty.block_elems()) {
            return Err(fail(format!(
                "has rows of {} elements, not a multiple of the {} in a block of {ty}",
                dims[0],
                ty.block_elems()
            )));
        }
        let bytes =
            byte_len(&dims, ty).ok_or_else(|| fail(format!("has dimensions {dims:?}, whose size overflows")))?;
        if !self.offset.is_multiple_of(alignment as u64) {
            return Err(fail(format!("lies at offset {}, not a multiple of the alignment {alignment}", self.offset)));
        }
        let start = usize::try_from(self.offset).ok().and_then(|offset| data_start.checked_add(offset));
        let range =
            start.and_then(|start| Some(start..start.checked_add(bytes)?)).filter(|range| range.end <= file_len);
        let range = range.ok_or_else(|| {
            fail(format!(
                "needs {bytes} bytes at offset {} of the data, but the file has {}; it is truncated or damaged",
                self.offset,
                file_len.saturating_sub(data_start)
            ))
        })?;
        Ok(TensorInfo { name: self.name, dims, ty, range })
    }
}

/// Bytes of a tensor whose rows are whole blocks; `None` if that overflows.
pub(super) fn byte_len(dims: &[usize], ty: TensorType) -> Option<usize> {
    let elements = dims.iter().try_fold(1usize, |product, &d| product.checked_mul(d))?;
    (elements / ty.block_elems()).checked_mul(ty.block_bytes())
}

fn refuse_overlaps(tensors: &[TensorInfo], file: &str) -> Result<(), GgufError> {
    let mut order: Vec<&TensorInfo> = tensors.iter().collect();
    order.sort_by_key(|t| t.range.start);
    match order.windows(2).find(|pair| pair[0].range.end > pair[1].range.start) {
        Some(pair) => Err(tensor_error(file, &pair[1].name, format!("overlaps with tensor {:?}", pair[0].name))),
        None => Ok(()),
    }
}

/// The name of a key or tensor: UTF-8 and not empty.
fn name_string(cursor: &mut Cursor<'_>, what: &dyn std::fmt::Display) -> Result<String, GgufError> {
    let bytes = cursor.string_bytes(what)?;
    match std::str::from_utf8(bytes) {
        Ok("") => Err(header_error(cursor.file(), &format!("{what} is empty"))),
        Ok(name) => Ok(name.to_owned()),
        Err(_) => Err(header_error(cursor.file(), &format!("{what} is not valid UTF-8"))),
    }
}

fn header_error(file: &str, detail: &str) -> GgufError {
    GgufError::Header { file: file.to_owned(), detail: detail.to_owned() }
}

fn tensor_error(file: &str, tensor: &str, detail: String) -> GgufError {
    GgufError::Tensor { file: file.to_owned(), tensor: tensor.to_owned(), detail }
}
