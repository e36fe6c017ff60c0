//! The header of a safetensors file: eight bytes of length (little-endian), that many bytes of JSON, then the data. The JSON maps
//! names to `{"dtype", "shape", "data_offsets": [begin, end]}`, offsets counted from the end of the header.

use std::ops::Range;

use opencoti_compute::quant::WeightType;
use serde_json::Value;

/// Bytes of the length in front of the header.
const LENGTH_BYTES: usize = 8;
/// Longest header that is read; the format's own limit.
const MAX_HEADER: usize = 100_000_000;
/// Tensors have at most so many dimensions.
const MAX_DIMS: usize = 8;

/// What a file holds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Header {
    /// Tensors of types that weights have, in the order of the header.
    pub tensors: Vec<Tensor>,
}

/// One tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// Its name.
    pub name: String,
    /// Type of its elements.
    pub ty: WeightType,
    /// Elements a dimension, the slowest first; none zero.
    pub shape: Vec<usize>,
    /// Bytes in the file; exactly those of the elements.
    pub range: Range<usize>,
}

/// Why a header was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HeaderError {
    /// The file is shorter than its header.
    #[error("is no safetensors file, or truncated: its header has {header} bytes, but the file has {file}")]
    Truncated {
        /// Bytes of the header.
        header: u64,
        /// Bytes of the file.
        file: usize,
    },
    /// The header is no JSON object.
    #[error("is no safetensors file: its header is not a JSON object ({0})")]
    Json(String),
    /// A tensor's entry is damaged.
    #[error("tensor {tensor:?} {detail}")]
    Tensor {
        /// The tensor.
        tensor: String,
        /// What is wrong with it.
        detail: String,
    },
}

/// Reads the header of a file that is there as a whole. Tensors of types that no weight has (integers) are left out.
///
/// # Errors
/// See [`HeaderError`]. What was accepted lies inside of `file`.
pub fn parse_header(file: &[u8]) -> Result<Header, HeaderError> {
    let truncated = |header| HeaderError::Truncated { header, file: file.len() };
    let length = file.first_chunk::<LENGTH_BYTES>().map(|bytes| u64::from_le_bytes(*bytes)).ok_or(truncated(0))?;
    let header_bytes = usize::try_from(length).ok().filter(|&n| n <= MAX_HEADER).ok_or(truncated(length))?;
    let json = file.get(LENGTH_BYTES..LENGTH_BYTES + header_bytes).ok_or(truncated(length))?;
    let json: Value = serde_json::from_slice(json).map_err(|e| HeaderError::Json(e.to_string()))?;
    let Value::Object(entries) = json else { return Err(HeaderError::Json("it is of another kind".to_owned())) };
    let data = LENGTH_BYTES + header_bytes..file.len();
    let mut header = Header::default();
    for (name, entry) in entries.iter().filter(|(name, _)| *name != "__metadata__") {
        let placed = place(entry, &data).map_err(|detail| HeaderError::Tensor { tensor: name.clone(), detail })?;
        header.tensors.extend(placed.map(|(ty, shape, range)| Tensor { name: name.clone(), ty, shape, range }));
    }
    Ok(header)
}

/// Type, shape and bytes of an entry.
type Place = (WeightType, Vec<usize>, Range<usize>);

/// Where an entry's weights are; `None` for a type that no weight has.
fn place(entry: &Value, data: &Range<usize>) -> Result<Option<Place>, String> {
    let ty = match entry["dtype"].as_str() {
        Some("F32") => WeightType::F32,
        Some("F16") => WeightType::F16,
        Some("BF16") => WeightType::BF16,
        Some(_) => return Ok(None),
        None => return Err("has no dtype".to_owned()),
    };
    let shape = sizes(&entry["shape"]).filter(|shape| shape.len() <= MAX_DIMS && !shape.contains(&0));
    let shape =
        shape.ok_or_else(|| format!("has shape {}, expected up to {MAX_DIMS} sizes above 0", entry["shape"]))?;
    let offsets = sizes(&entry["data_offsets"]).unwrap_or_default();
    let &[begin, end] = offsets.as_slice() else {
        return Err(format!("has data_offsets {}, expected two", entry["data_offsets"]));
    };
    let needed = shape.iter().try_fold(ty.block_bytes(), |bytes: usize, &n| bytes.checked_mul(n));
    if needed.is_none() || end.checked_sub(begin) != needed {
        return Err(format!(
            "of shape {shape:?} has data_offsets {begin} to {end}, which are not those of its elements"
        ));
    }
    match data.start.checked_add(end).filter(|&end| end <= data.end) {
        Some(end) => Ok(Some((ty, shape, data.start + begin..end))),
        None => Err(format!("ends at {end} of {} bytes of data; the file is truncated", data.len())),
    }
}

fn sizes(value: &Value) -> Option<Vec<usize>> {
    value.as_array()?.iter().map(|v| usize::try_from(v.as_u64()?).ok()).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    fn file(header: &Value, data: usize) -> Vec<u8> {
        let header = header.to_string();
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.as_bytes());
        bytes.resize(bytes.len() + data, 7);
        bytes
    }

    fn one(entry: Value) -> Result<Header, HeaderError> {
        parse_header(&file(&json!({"__metadata__": {"format": "pt"}, "a": entry}), 24))
    }

    #[test]
    fn tensors_are_found_and_integers_left_out() {
        let header = json!({
            "a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
            "ids": {"dtype": "I64", "shape": [1], "data_offsets": [16, 24]},
            "b": {"dtype": "BF16", "shape": [], "data_offsets": [22, 24]},
        });
        let bytes = file(&header, 24);
        let found = parse_header(&bytes).unwrap().tensors;
        let start = bytes.len() - 24;
        let expect =
            |name: &str, ty, shape: &[usize], range| Tensor { name: name.into(), ty, shape: shape.into(), range };
        assert_eq!(
            found,
            [
                expect("a", WeightType::F32, &[2, 2], start..start + 16),
                expect("b", WeightType::BF16, &[], start + 22..start + 24)
            ]
        );
    }

    #[test]
    fn entries_that_cannot_be_are_refused_by_name() {
        for (entry, expected) in [
            (json!({"dtype": "F32", "shape": [7], "data_offsets": [0, 28]}), "ends at 28 of 24 bytes of data"),
            (json!({"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}), "not those of its elements"),
            (json!({"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}), "not those of its elements"),
            (json!({"dtype": "F32", "shape": [1u64 << 40, 1u64 << 40], "data_offsets": [0, 8]}), "not those"),
            (json!({"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}), "sizes above 0"),
            (json!({"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}), "sizes above 0"),
            (json!({"dtype": "F16", "shape": [2], "data_offsets": [0]}), "expected two"),
            (json!({"shape": [2], "data_offsets": [0, 8]}), "has no dtype"),
            (json!(5), "has no dtype"),
        ] {
            let error = one(entry).unwrap_err().to_string();
            assert!(error.starts_with("tensor \"a\"") && error.contains(expected), "{error}");
        }
        for bytes in [&b""[..], &[255; 8], &[9, 0, 0, 0, 0, 0, 0, 0, b'{'], &[2, 0, 0, 0, 0, 0, 0, 0, b'[', b']']] {
            assert!(parse_header(bytes).unwrap_err().to_string().contains("is no safetensors file"));
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        #[test]
        fn whatever_is_accepted_lies_inside_of_the_file(
            mut bytes in (0usize..5, prop::collection::vec(0usize..40, 0..3), 0usize..40, 0usize..40, 0usize..60).prop_map(
                |(ty, shape, begin, end, data)| {
                    let dtype = ["F32", "F16", "BF16", "I8", "x"][ty];
                    file(&json!({"t": {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}}), data)
                },
            ),
            flip in any::<prop::sample::Index>(),
            to: u8,
            cut in any::<prop::sample::Index>(),
            damage in 0u8..3,
        ) {
            let at = flip.index(bytes.len());
            match damage {
                0 => {}
                1 => bytes[at] = to,
                _ => bytes.truncate(cut.index(bytes.len())),
            }
            if let Ok(header) = parse_header(&bytes) {
                for tensor in header.tensors {
                    let elements: usize = tensor.shape.iter().product();
                    prop_assert_eq!(tensor.range.len(), elements * tensor.ty.block_bytes());
                    prop_assert!(bytes.get(tensor.range).is_some());
                }
            }
        }
    }
}
