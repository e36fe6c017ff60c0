//! Behaviour of the reader on sound, damaged and hostile files.

use std::path::PathBuf;

use opencoti_compute::quant::WeightType;
use proptest::prelude::*;

use super::write::GgufWriter;
use super::{Array, Gguf, GgufError, GgufFile, TensorType, Value};

/// A small file with every value type, nested arrays and two tensors.
fn sample() -> GgufWriter {
    GgufWriter::new()
        .str("general.architecture", "llama")
        .key("a.u8", Value::U8(200))
        .key("a.i8", Value::I8(-3))
        .key("a.u16", Value::U16(60000))
        .key("a.i16", Value::I16(-300))
        .key("a.u32", Value::U32(4_000_000_000))
        .key("a.i32", Value::I32(-70_000))
        .key("a.f32", Value::F32(1.5))
        .key("a.bool", Value::Bool(true))
        .key("a.u64", Value::U64(1 << 40))
        .key("a.i64", Value::I64(-(1 << 40)))
        .key("a.f64", Value::F64(0.1))
        .key("a.words", Value::Array(Array::Str(vec!["one".into(), String::new(), "drüi".into()])))
        .key("a.layers", Value::Array(Array::I32(vec![4, 4, 2])))
        .key("a.flags", Value::Array(Array::Bool(vec![true, false])))
        .key(
            "a.nested",
            Value::Array(Array::Array(vec![Array::U16(vec![1, 2]), Array::Array(vec![Array::F64(vec![])])])),
        )
        .f32_tensor("norm.weight", &[3, 1], &[1.0, 2.0, 3.0])
        .tensor("w.weight", &[32, 2], WeightType::Q8_0.into(), vec![7; 68])
}

fn parse(bytes: &[u8]) -> Result<Gguf, GgufError> {
    Gguf::parse(bytes, "m.gguf")
}

fn refusal(bytes: &[u8]) -> String {
    parse(bytes).expect_err("must be refused").to_string()
}

/// A file of one key whose value is given as raw bytes (type first).
fn with_raw_value(value: &[u8]) -> Vec<u8> {
    let mut out = b"GGUF\x03\0\0\0".to_vec();
    out.extend(0u64.to_le_bytes());
    out.extend(1u64.to_le_bytes());
    out.extend(3u64.to_le_bytes());
    out.extend(b"key");
    out.extend(value);
    out
}

/// A file of one tensor `t`, described by raw fields, with `data` bytes behind the header.
fn with_raw_tensor(dims: &[u64], type_id: u32, offset: u64, data: usize) -> Vec<u8> {
    let mut out = b"GGUF\x03\0\0\0".to_vec();
    out.extend(1u64.to_le_bytes());
    out.extend(0u64.to_le_bytes());
    out.extend(1u64.to_le_bytes());
    out.extend(b"t");
    out.extend((dims.len() as u32).to_le_bytes());
    dims.iter().for_each(|d| out.extend(d.to_le_bytes()));
    out.extend(type_id.to_le_bytes());
    out.extend(offset.to_le_bytes());
    out.resize(out.len().next_multiple_of(32) + data, 0);
    out
}

#[test]
fn every_value_type_survives_a_round_trip() {
    for version in [2, 3] {
        let writer = sample().version(version);
        let bytes = writer.to_bytes();
        let file = parse(&bytes).expect("valid");
        assert_eq!(file.version, version);
        let meta = &file.metadata;
        assert_eq!(meta.str("general.architecture").unwrap(), Some("llama"));
        assert_eq!(meta.u32("a.u8").unwrap(), Some(200));
        assert_eq!(meta.get("a.i8"), Some(&Value::I8(-3)));
        assert_eq!(meta.u32("a.u16").unwrap(), Some(60000));
        assert_eq!(meta.get("a.i16"), Some(&Value::I16(-300)));
        assert_eq!(meta.u32("a.u32").unwrap(), Some(4_000_000_000));
        assert_eq!(meta.get("a.i32"), Some(&Value::I32(-70_000)));
        assert_eq!(meta.f32("a.f32").unwrap(), Some(1.5));
        assert_eq!(meta.bool("a.bool").unwrap(), Some(true));
        assert_eq!(meta.u64("a.u64").unwrap(), Some(1 << 40));
        assert_eq!(meta.get("a.i64"), Some(&Value::I64(-(1 << 40))));
        assert_eq!(meta.f32("a.f64").unwrap(), Some(0.1));
        assert_eq!(meta.strings("a.words").unwrap().unwrap(), ["one", "", "drüi"]);
        assert_eq!(meta.i32s("a.layers").unwrap(), Some(vec![4, 4, 2]));
        assert_eq!(meta.bools("a.flags").unwrap(), Some(vec![true, false]));
        let nested = Array::Array(vec![Array::U16(vec![1, 2]), Array::Array(vec![Array::F64(vec![])])]);
        assert_eq!(meta.get("a.nested"), Some(&Value::Array(nested)));
        assert_eq!(meta.len(), 16);
    }
}

#[test]
fn tensors_are_found_at_their_bytes() {
    let bytes = sample().alignment(64).to_bytes();
    let file = parse(&bytes).expect("valid");
    assert_eq!(file.alignment, 64);
    let [norm, w] = file.tensors.as_slice() else { panic!("two tensors") };
    assert_eq!(
        (norm.shape(), norm.dims.as_slice(), norm.ty),
        ([3].as_slice(), [3, 1].as_slice(), TensorType::Weight(WeightType::F32))
    );
    assert_eq!(bytes[norm.range.clone()], [1.0f32, 2.0, 3.0].map(f32::to_le_bytes).concat());
    assert_eq!((w.ty, w.elements()), (WeightType::Q8_0.into(), 64));
    assert_eq!(bytes[w.range.clone()], [7; 68]);
    assert_eq!(w.range.start % 64, 0);
}

#[test]
fn getters_take_any_integer_width_and_name_what_they_found() {
    let file = parse(&sample().to_bytes()).expect("valid");
    let meta = &file.metadata;
    assert_eq!(meta.u32("absent").unwrap(), None);
    assert_eq!(meta.f32("a.u8").unwrap(), Some(200.0));
    let wrong = meta.u32("a.i8").unwrap_err().to_string();
    assert_eq!(wrong, "m.gguf: key \"a.i8\" holds the i8 -3; expected an integer from 0 to 4294967295");
    let wrong = meta.strings("a.layers").unwrap_err().to_string();
    assert_eq!(wrong, "m.gguf: key \"a.layers\" holds an array of 3 i32; expected an array of strings");
}

#[test]
fn a_per_layer_field_is_one_value_or_one_for_each_layer() {
    let file = parse(&sample().to_bytes()).expect("valid");
    let meta = &file.metadata;
    assert_eq!(meta.per_layer_u32("a.layers", 3).unwrap(), Some(vec![4, 4, 2]));
    assert_eq!(meta.per_layer_u32("a.layers", 2).unwrap(), Some(vec![4, 4]));
    assert_eq!(meta.per_layer_u32("a.u8", 2).unwrap(), Some(vec![200, 200]));
    assert!(meta.per_layer_u32("a.layers", 4).unwrap_err().to_string().contains("each of the 4 layers"));
}

#[test]
fn foreign_formats_are_named() {
    for (bytes, word) in [
        (b"".as_slice(), "empty"),
        (b"GG", "starts with"),
        (b"tjgg\x01\0\0\0", "GGJT"),
        (b"PK\x03\x04....", "zip archive"),
        (b"version https://git-lfs.github.com/spec/v1", "git lfs pull"),
        (b"\x10\0\0\0\0\0\0\0{\"__metadata__\"", "safetensors"),
        (b"<!DOCTYPE html>", "HTML"),
    ] {
        let message = refusal(bytes);
        assert!(message.starts_with("m.gguf is not a GGUF file") && message.contains(word), "{message}");
    }
}

#[test]
fn unreadable_versions_are_named() {
    let mut bytes = sample().to_bytes();
    bytes[4..8].copy_from_slice(&3u32.to_be_bytes());
    assert!(matches!(parse(&bytes), Err(GgufError::BigEndian { version: 3, .. })));
    for version in [0u32, 1, 4, 77] {
        bytes[4..8].copy_from_slice(&version.to_le_bytes());
        assert!(matches!(parse(&bytes), Err(GgufError::Version { version: found, .. }) if found == version));
    }
}

#[test]
fn every_truncation_of_a_valid_file_is_refused() {
    let bytes = sample().to_bytes();
    for len in 0..bytes.len() {
        assert!(parse(&bytes[..len]).is_err(), "cut to {len} of {}", bytes.len());
    }
}

#[test]
fn counts_beyond_the_file_are_refused_before_memory_is_reserved() {
    for at in [8, 16] {
        for count in [1000u64, u64::MAX / 2, u64::MAX] {
            let mut bytes = sample().to_bytes();
            bytes[at..at + 8].copy_from_slice(&count.to_le_bytes());
            parse(&bytes).expect_err("must be refused");
        }
    }
    for element_type in 0u32..=12 {
        for count in [100u64, u64::MAX / 8, u64::MAX] {
            let mut value = 9u32.to_le_bytes().to_vec();
            value.extend(element_type.to_le_bytes());
            value.extend(count.to_le_bytes());
            let message = refusal(&with_raw_value(&value));
            assert!(message.contains("truncated: the value of key \"key\""), "{message}");
        }
    }
}

#[test]
fn strange_values_are_refused_by_key() {
    let raw = |ty: u32, rest: &[u8]| [ty.to_le_bytes().as_slice(), rest].concat();
    let long_string = [u64::MAX.to_le_bytes().as_slice(), b"abc"].concat();
    let bad_string = [2u64.to_le_bytes().as_slice(), b"\xc3\x28"].concat();
    for (value, word) in [
        (raw(13, b""), "unknown value type 13"),
        (raw(7, &[2]), "bool of value 2"),
        (raw(8, &long_string), "truncated"),
        (raw(8, &bad_string), "not valid UTF-8"),
    ] {
        let message = refusal(&with_raw_value(&value));
        assert!(message.contains("\"key\"") && message.contains(word), "{message}");
    }
}

#[test]
fn bottomless_nesting_is_refused() {
    let level = [9u32.to_le_bytes().as_slice(), &1u64.to_le_bytes()].concat();
    let value = [9u32.to_le_bytes().as_slice(), &level.repeat(100_000)].concat();
    assert!(refusal(&with_raw_value(&value)).contains("nests arrays more than"));
}

#[test]
fn names_that_occur_twice_are_refused() {
    let twice = GgufWriter::new().str("k", "a").str("k", "b").to_bytes();
    assert_eq!(refusal(&twice), "m.gguf: key \"k\" occurs twice");
    let twice = GgufWriter::new().f32_tensor("t", &[1], &[0.0]).f32_tensor("t", &[1], &[0.0]).to_bytes();
    assert_eq!(refusal(&twice), "m.gguf: tensor \"t\" occurs twice");
}

#[test]
fn alignments_that_are_no_power_of_two_or_too_small_are_refused() {
    for alignment in [0, 3, 4, 48] {
        let bytes = GgufWriter::new().key("general.alignment", Value::U32(alignment)).to_bytes();
        assert!(refusal(&bytes).contains("expected a power of two"));
    }
    let bytes = GgufWriter::new().str("general.alignment", "32").to_bytes();
    assert!(refusal(&bytes).contains("expected an integer"));
}

#[test]
fn impossible_tensors_are_refused_by_name() {
    for (dims, type_id, offset, word) in [
        (&[][..], 0, 0, "0 dimensions"),
        (&[1, 1, 1, 1, 1], 0, 0, "5 dimensions"),
        (&[4, 0], 0, 0, "one of them zero"),
        (&[u64::MAX, 2], 0, 0, "overflows"),
        (&[1 << 32, 1 << 32], 0, 0, "overflows"),
        (&[1 << 62], 0, 0, "overflows"),
        (&[48], 8, 0, "not a multiple of the 32 in a block of Q8_0"),
        (&[100], 12, 0, "not a multiple of the 256 in a block of Q4_K"),
        (&[4], 4, 0, "removed type"),
        (&[4], 9, 0, "intermediate results"),
        (&[4], 31, 0, "repacked"),
        (&[4], 4000, 0, "unknown to this version"),
        (&[4], 0, 3, "not a multiple of the alignment"),
        (&[4], 0, 64, "truncated or damaged"),
        (&[4], 0, u64::MAX - 31, "truncated or damaged"),
        (&[1000], 0, 0, "truncated or damaged"),
    ] {
        let message = refusal(&with_raw_tensor(dims, type_id, offset, 64));
        assert!(message.contains("tensor \"t\"") && message.contains(word), "{message}");
    }
    parse(&with_raw_tensor(&[4], 0, 32, 64)).expect("a sound one passes");
}

#[test]
fn overlapping_tensors_are_refused() {
    let mut bytes = GgufWriter::new().f32_tensor("a", &[16], &[0.0; 16]).f32_tensor("b", &[16], &[0.0; 16]).to_bytes();
    // The offset of "b" is the last field before the padding; header: 24, two infos of 33 bytes.
    let at = 24 + 2 * 33 - 8;
    assert_eq!(bytes[at], 64);
    bytes[at] = 32;
    assert_eq!(refusal(&bytes), "m.gguf: tensor \"b\" overlaps with tensor \"a\"");
}

/// The parts of a model of two tensors, as they would lie in a folder.
fn two_parts() -> [GgufWriter; 2] {
    [0u16, 1].map(|no| {
        GgufWriter::new()
            .key("split.no", Value::U16(no))
            .key("split.count", Value::U16(2))
            .key("split.tensors.count", Value::I32(2))
            .str("which", if no == 0 { "first" } else { "second" })
            .f32_tensor(&format!("t{no}"), &[2], &[f32::from(no), 5.0])
    })
}

fn part_path(dir: &tempfile::TempDir, number: u32) -> PathBuf {
    dir.path().join(format!("m-0000{number}-of-00002.gguf"))
}

fn write_parts(parts: &[GgufWriter]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for (writer, number) in parts.iter().zip(1..) {
        writer.write_to(&part_path(&dir, number)).unwrap();
    }
    dir
}

#[test]
fn a_split_model_opens_from_any_of_its_parts() {
    let dir = write_parts(&two_parts());
    for number in [1, 2] {
        let file = GgufFile::open(&part_path(&dir, number)).expect("opens");
        assert_eq!(file.metadata().str("which").unwrap(), Some("first"));
        assert_eq!(file.tensors().map(|t| t.name.as_str()).collect::<Vec<_>>(), ["t0", "t1"]);
        let t1 = file.tensor("t1").expect("in the second part");
        drop(file);
        assert_eq!(t1.bytes(), [1.0f32, 5.0].map(f32::to_le_bytes).concat());
    }
}

#[test]
fn a_missing_part_is_named() {
    let dir = write_parts(&two_parts());
    std::fs::remove_file(part_path(&dir, 2)).unwrap();
    let message = GgufFile::open(&part_path(&dir, 1)).unwrap_err().to_string();
    assert!(message.contains("m-00002-of-00002.gguf: part 2 of 2 is missing"), "{message}");
}

#[test]
fn parts_that_do_not_belong_together_are_refused() {
    let [first, second] = two_parts();
    let with = |no: u16, count: u16, tensors: i32, name: &str| {
        GgufWriter::new()
            .key("split.no", Value::U16(no))
            .key("split.count", Value::U16(count))
            .key("split.tensors.count", Value::I32(tensors))
            .f32_tensor(name, &[1], &[0.0])
    };
    for (other, word) in [
        (with(0, 2, 2, "t1"), "\"split.no\" says 0, expected 1"),
        (with(1, 3, 2, "t1"), "\"split.count\" says 3 parts, its name says 2"),
        (with(1, 2, 3, "t1"), "differs from that of the other parts"),
        (with(1, 2, 2, "t0"), "is also in part"),
        (GgufWriter::new().f32_tensor("t1", &[1], &[0.0]), "no key \"split.count\""),
    ] {
        let dir = write_parts(&[first.clone(), other]);
        let message = GgufFile::open(&part_path(&dir, 1)).unwrap_err().to_string();
        assert!(message.contains(word), "{message}");
    }
    let dir = write_parts(&[with(0, 2, 3, "t0"), with(1, 2, 3, "t1")]);
    let message = GgufFile::open(&part_path(&dir, 2)).unwrap_err().to_string();
    assert!(message.contains("hold 2 tensors, but \"split.tensors.count\" says 3"), "{message}");
    let lone = dir.path().join("renamed.gguf");
    second.write_to(&lone).unwrap();
    let message = GgufFile::open(&lone).unwrap_err().to_string();
    assert!(message.contains("not named NAME-00002-of-00002.gguf"), "{message}");
}

#[test]
fn a_folder_and_a_missing_file_are_refused_by_path() {
    let dir = tempfile::tempdir().unwrap();
    assert!(GgufFile::open(dir.path()).unwrap_err().to_string().contains("it is a folder"));
    let missing = dir.path().join("none.gguf");
    assert!(GgufFile::open(&missing).unwrap_err().to_string().contains("none.gguf"));
    let empty = dir.path().join("empty.gguf");
    std::fs::write(&empty, b"").unwrap();
    assert!(GgufFile::open(&empty).unwrap_err().to_string().contains("it is empty"));
}

/// What holds of every accepted file: its tensors are exact, disjoint pieces of it.
fn check_accepted(file: &Gguf, len: usize) {
    let mut ranges: Vec<_> = file.tensors.iter().map(|t| t.range.clone()).collect();
    ranges.sort_by_key(|r| r.start);
    assert!(ranges.windows(2).all(|w| w[0].end <= w[1].start));
    assert!(ranges.iter().all(|r| r.end <= len && r.start % file.alignment == 0));
    for tensor in &file.tensors {
        assert_eq!(tensor.range.len() * tensor.ty.block_elems(), tensor.elements() * tensor.ty.block_bytes());
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4000))]

    #[test]
    fn mutated_files_never_panic(edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6), cut in any::<Option<prop::sample::Index>>()) {
        let mut bytes = sample().to_bytes();
        for (at, byte) in edits {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()) + 1);
        }
        if let Ok(file) = parse(&bytes) {
            check_accepted(&file, bytes.len());
        }
    }

    #[test]
    fn mutated_words_never_panic(edits in prop::collection::vec((any::<prop::sample::Index>(), prop_oneof![0u64..40, Just(u64::MAX), any::<u64>()]), 1..4)) {
        let mut bytes = sample().to_bytes();
        for (at, word) in edits {
            let at = at.index(bytes.len() - 8);
            bytes[at..at + 8].copy_from_slice(&word.to_le_bytes());
        }
        if let Ok(file) = parse(&bytes) {
            check_accepted(&file, bytes.len());
        }
    }

    #[test]
    fn arbitrary_bytes_behind_the_magic_never_panic(tail in prop::collection::vec(any::<u8>(), 0..300)) {
        let bytes = [b"GGUF\x03\0\0\0".as_slice(), &tail].concat();
        if let Ok(file) = parse(&bytes) {
            check_accepted(&file, bytes.len());
        }
    }
}
