//! BERT encoders: names and facts of their folders in the words of GGUF files.

use std::path::Path;

use opencoti_compute::quant::WeightType;

use super::{FolderError, Header, Json};
use crate::gguf::{Array, Gguf, Metadata, TensorInfo, TensorType, Value};

/// Tensors outside of blocks, without the prefix that models with a head put in front.
const TOP: [(&str, &str); 6] = [
    ("embeddings.word_embeddings", "token_embd"),
    ("embeddings.position_embeddings", "position_embd"),
    ("embeddings.token_type_embeddings", "token_types"),
    ("embeddings.LayerNorm", "token_embd_norm"),
    ("pooler.dense", "cls"),
    ("classifier", "cls.output"),
];
/// Tensors of a block.
const BLOCK: [(&str, &str); 8] = [
    ("attention.self.query", "attn_q"),
    ("attention.self.key", "attn_k"),
    ("attention.self.value", "attn_v"),
    ("attention.output.dense", "attn_output"),
    ("attention.output.LayerNorm", "attn_output_norm"),
    ("intermediate.dense", "ffn_up"),
    ("output.dense", "ffn_down"),
    ("output.LayerNorm", "layer_output_norm"),
];
/// `tokenizer.ggml.token_type` of ordinary tokens, of markers and of places that were left free.
const NORMAL: i32 = 1;
const CONTROL: i32 = 3;
const UNUSED: i32 = 5;

/// The header that a GGUF file of the model would have, with the tensors where they lie.
pub(super) fn translate(folder: &Path, config: &Json, header: Header) -> Result<Gguf, FolderError> {
    check(config)?;
    let mut keys = Metadata::new(&folder.display().to_string());
    let mut add = |key: &str, value: Value| keys.insert(key.to_owned(), value);
    let name = folder.file_name().map_or_else(|| "model".to_owned(), |name| name.to_string_lossy().into_owned());
    add("general.architecture", Value::Str("bert".to_owned()))?;
    add("general.name", Value::Str(name))?;
    add("general.file_type", Value::U32(file_type(&header)))?;
    for (key, field) in [
        ("bert.context_length", "max_position_embeddings"),
        ("bert.embedding_length", "hidden_size"),
        ("bert.feed_forward_length", "intermediate_size"),
        ("bert.block_count", "num_hidden_layers"),
        ("bert.attention.head_count", "num_attention_heads"),
    ] {
        add(key, Value::U32(config.size(field)?))?;
    }
    let eps = config.value["layer_norm_eps"].as_f64().unwrap_or(1e-12);
    add("bert.attention.layer_norm_epsilon", Value::F32(eps as f32))?;
    add("bert.attention.causal", Value::Bool(false))?;
    if let Some(pooling) = pooling(folder, config)? {
        add("bert.pooling_type", Value::U32(pooling))?;
    }
    for (key, value) in tokenizer(folder)? {
        add(key, value)?;
    }
    let tensors = header.tensors.into_iter().filter_map(|t| {
        let mut dims: Vec<usize> = t.shape.into_iter().rev().collect();
        if dims.is_empty() {
            dims.push(1);
        }
        Some(TensorInfo { name: rename(&t.name)?, dims, ty: TensorType::Weight(t.ty), range: t.range })
    });
    Ok(Gguf { version: 0, alignment: 1, metadata: keys, tensors: tensors.collect() })
}

/// Refuses what relatives of the family do and the graph does not.
fn check(config: &Json) -> Result<(), FolderError> {
    let expect = |key: &str, wanted: &str, default: &str| match config.text(key).unwrap_or(default) {
        found if found == wanted => Ok(()),
        found => Err(config.error(format!("{key:?} is {found:?}, expected {wanted:?}"))),
    };
    match config.text("model_type") {
        Some("bert") => {}
        other => {
            let found = other.map_or_else(|| "missing".to_owned(), |found| format!("{found:?}"));
            let detail =
                format!("\"model_type\" is {found}; only \"bert\" is read from a folder, convert others to GGUF");
            return Err(config.error(detail));
        }
    }
    expect("hidden_act", "gelu", "gelu")?;
    expect("position_embedding_type", "absolute", "absolute")
}

/// `general.file_type` by the type that most bytes have.
fn file_type(header: &Header) -> u32 {
    let bytes = |ty| header.tensors.iter().filter(|t| t.ty == ty).map(|t| t.range.len()).sum::<usize>();
    let types = [(WeightType::F32, 0), (WeightType::F16, 1), (WeightType::BF16, 32)];
    types.into_iter().max_by_key(|&(ty, _)| bytes(ty)).map_or(0, |(_, number)| number)
}

/// `pooling_type`: a classifier ranks; sentence-transformers' `1_Pooling` says which of the others.
fn pooling(folder: &Path, config: &Json) -> Result<Option<u32>, FolderError> {
    let classifies = |name: &serde_json::Value| name.as_str() == Some("BertForSequenceClassification");
    if config.value["architectures"].as_array().is_some_and(|names| names.iter().any(classifies)) {
        return Ok(Some(4));
    }
    let Some(json) = Json::read_optional(folder, "1_Pooling/config.json")? else { return Ok(None) };
    let modes = [("pooling_mode_mean_tokens", 1), ("pooling_mode_cls_token", 2), ("pooling_mode_lasttoken", 3)];
    match modes.iter().find(|(mode, _)| json.bool(mode) == Some(true)) {
        Some(&(_, number)) => Ok(Some(number)),
        None => Err(json.error("names no pooling that is known: mean tokens, cls token or last token".to_owned())),
    }
}

/// The keys of the tokenizer, from `tokenizer.json`.
fn tokenizer(folder: &Path) -> Result<Vec<(&'static str, Value)>, FolderError> {
    let json = Json::read(folder, "tokenizer.json")?;
    let model = &json.value["model"];
    // Old files leave the type out.
    let kind = model["type"].as_str().unwrap_or("WordPiece");
    let prefix = model["continuing_subword_prefix"].as_str().unwrap_or("##");
    if kind != "WordPiece" || prefix != "##" {
        let detail = format!("its model is {kind:?} with prefix {prefix:?}, expected \"WordPiece\" with \"##\"");
        return Err(json.error(detail));
    }
    let words = vocabulary(&json)?;
    let id = |text: &str| words.iter().position(|word| word == text).and_then(|id| u32::try_from(id).ok());
    let is_marker = |text: &str| ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"].contains(&text);
    let kind = |word: &String| match word.as_str() {
        word if is_marker(word) => CONTROL,
        word if word.starts_with("[unused") => UNUSED,
        _ => NORMAL,
    };
    let spelled = |word: &String| match word.strip_prefix("##") {
        _ if kind(word) != NORMAL => word.clone(),
        Some(rest) if !rest.is_empty() => rest.to_owned(),
        _ => format!("▁{word}"),
    };
    let normalizer = &json.value["normalizer"];
    let mut keys = vec![
        ("tokenizer.ggml.model", Value::Str("bert".to_owned())),
        ("tokenizer.ggml.token_type", Value::Array(Array::I32(words.iter().map(kind).collect()))),
        ("tokenizer.ggml.tokens", Value::Array(Array::Str(words.iter().map(spelled).collect()))),
    ];
    for (key, text) in [
        ("tokenizer.ggml.unknown_token_id", "[UNK]"),
        ("tokenizer.ggml.bos_token_id", "[CLS]"),
        ("tokenizer.ggml.seperator_token_id", "[SEP]"),
        ("tokenizer.ggml.padding_token_id", "[PAD]"),
        ("tokenizer.ggml.mask_token_id", "[MASK]"),
    ] {
        keys.extend(id(text).map(|id| (key, Value::U32(id))));
    }
    for (key, field) in [
        ("tokenizer.ggml.normalizer.lowercase", "lowercase"),
        ("tokenizer.ggml.normalizer.strip_accents", "strip_accents"),
    ] {
        keys.extend(normalizer[field].as_bool().map(|value| (key, Value::Bool(value))));
    }
    Ok(keys)
}

/// The words in the order of their ids, which must be 0, 1, 2 …
fn vocabulary(json: &Json) -> Result<Vec<String>, FolderError> {
    let entries = json.value["model"]["vocab"].as_object();
    let entries = entries.ok_or_else(|| json.error("has no vocabulary (model.vocab)".to_owned()))?;
    let mut words = vec![None; entries.len()];
    for (word, id) in entries {
        let place = id.as_u64().and_then(|id| words.get_mut(usize::try_from(id).ok()?)).filter(|place| place.is_none());
        match place {
            Some(place) => *place = Some(word.clone()),
            None => {
                let detail = format!("the id of {word:?} is {id}, expected one of its own below {}", entries.len());
                return Err(json.error(detail));
            }
        }
    }
    Ok(words.into_iter().flatten().collect())
}

/// The name in a GGUF file; `None` for what no encoder uses.
fn rename(name: &str) -> Option<String> {
    let name = name.strip_prefix("bert.").unwrap_or(name);
    let (stem, kind) = name.rsplit_once('.')?;
    // TensorFlow's words for the parameters of a norm.
    let kind = match kind {
        "gamma" => "weight",
        "beta" => "bias",
        "weight" | "bias" => kind,
        _ => return None,
    };
    if let Some((_, top)) = TOP.iter().find(|(from, _)| *from == stem) {
        return Some(format!("{top}.{kind}"));
    }
    let (layer, rest) = stem.strip_prefix("encoder.layer.")?.split_once('.')?;
    let layer: u32 = layer.parse().ok()?;
    let (_, to) = BLOCK.iter().find(|(from, _)| *from == rest)?;
    Some(format!("blk.{layer}.{to}.{kind}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_become_those_of_gguf_files() {
        for (from, to) in [
            ("embeddings.word_embeddings.weight", Some("token_embd.weight")),
            ("bert.embeddings.LayerNorm.gamma", Some("token_embd_norm.weight")),
            ("bert.encoder.layer.11.attention.self.query.bias", Some("blk.11.attn_q.bias")),
            ("encoder.layer.0.output.LayerNorm.beta", Some("blk.0.layer_output_norm.bias")),
            ("bert.pooler.dense.weight", Some("cls.weight")),
            ("classifier.bias", Some("cls.output.bias")),
            ("embeddings.position_ids", None),
            ("cls.predictions.bias", None),
            ("encoder.layer.x.output.dense.weight", None),
        ] {
            assert_eq!(rename(from).as_deref(), to, "{from}");
        }
    }
}
