//! Weights as safetensors: the header.

use opencoti_model::safetensors::parse_header;

use super::Target;

/// The target.
pub const TARGET: Target = Target { name: "safetensors", seeds, run };

fn seeds() -> Vec<Vec<u8>> {
    let entries = r#""a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}, "b": {"dtype": "I64", "shape": [1], "data_offsets": [16, 24]}"#;
    let file = |json: String| {
        let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
        bytes.extend(json.as_bytes());
        bytes.extend([7; 24]);
        bytes
    };
    vec![
        file(format!("{{{entries}}}")),
        file(format!(r#"{{"__metadata__": {{"format": "pt"}}, {entries}}}"#)),
        file("{}".to_owned()),
        file("[1]".to_owned()),
    ]
}

fn run(input: &[u8]) -> String {
    match parse_header(input) {
        Err(e) => e.to_string(),
        Ok(header) => {
            let inside = header.tensors.iter().all(|t| input.get(t.range.clone()).is_some());
            assert!(inside, "a tensor outside of the file");
            format!("{} tensors", header.tensors.len())
        }
    }
}
