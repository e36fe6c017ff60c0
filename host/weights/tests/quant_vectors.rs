//! Every weight type against the values that the `gguf` Python package gives for the same bytes
//! (`fixtures/make_quant_vectors.py`), bit for bit.

use std::path::Path;

use opencoti_weights::quant::{WeightType, dequantize_row};

#[test]
fn every_type_dequantises_as_the_gguf_package_does() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/quant");
    for ty in WeightType::all() {
        let read = |ext| std::fs::read(dir.join(format!("{ty}.{ext}"))).unwrap();
        let (bytes, expected) = (read("bytes"), read("f32"));
        let expected: Vec<u32> = expected.as_chunks().0.iter().map(|b| u32::from_le_bytes(*b)).collect();
        let mut values = vec![f32::NAN; expected.len()];
        dequantize_row(ty, &bytes, &mut values).unwrap();
        let wrong = values.iter().zip(&expected).position(|(v, e)| v.to_bits() != *e);
        assert_eq!(wrong, None, "{ty}: first differing value");
        assert!(values.iter().any(|v| *v != 0.0), "{ty}: the fixture holds only zeros");
    }
}
