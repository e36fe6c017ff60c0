//! Reading the `tokenizer.ggml.*` keys of a file.

use crate::error::ModelError;
use crate::gguf::{GgufError, Metadata};
use crate::tokenizer::TokenizerSpec;

/// What some converters write for an id that is not there (-1 as an unsigned number).
const NO_ID: u32 = u32::MAX;

/// The tokenizer that a file describes; `n_vocab` is the size of its embedding table.
///
/// # Errors
/// A key has a wrong type, or there is no `tokenizer.ggml.model`. Whether the parts fit together is checked by
/// [`Tokenizer::new`](crate::tokenizer::Tokenizer::new).
pub(crate) fn spec(meta: &Metadata, n_vocab: usize) -> Result<TokenizerSpec, ModelError> {
    let key = |name: &str| format!("tokenizer.ggml.{name}");
    let id = |name: &str| -> Result<Option<u32>, GgufError> { Ok(meta.u32(&key(name))?.filter(|&id| id != NO_ID)) };
    // The fill-in-the-middle tokens had other keys in older files.
    let id_or = |name: &str, older: &str| match id(name)? {
        Some(found) => Ok::<_, GgufError>(Some(found)),
        None => id(older),
    };
    let strings = |name: &str| Ok::<_, GgufError>(meta.strings(&key(name))?.unwrap_or_default().to_vec());
    let model = meta.str(&key("model"))?.ok_or_else(|| meta.missing(&key("model"), "the kind of the tokenizer"))?;
    Ok(TokenizerSpec {
        model: model.to_owned(),
        pre: meta.str(&key("pre"))?.map(str::to_owned),
        tokens: strings("tokens")?,
        scores: meta.f32s(&key("scores"))?,
        token_types: meta.i32s(&key("token_type"))?,
        merges: strings("merges")?,
        bos: id("bos_token_id")?,
        eos: id("eos_token_id")?,
        eot: id("eot_token_id")?,
        eom: id("eom_token_id")?,
        unk: id("unknown_token_id")?,
        pad: id("padding_token_id")?,
        sep: id("seperator_token_id")?, // the format's own spelling
        mask: id("mask_token_id")?,
        fim_pre: id_or("fim_pre_token_id", "prefix_token_id")?,
        fim_suf: id_or("fim_suf_token_id", "suffix_token_id")?,
        fim_mid: id_or("fim_mid_token_id", "middle_token_id")?,
        fim_pad: id("fim_pad_token_id")?,
        fim_rep: id("fim_rep_token_id")?,
        fim_sep: id("fim_sep_token_id")?,
        add_bos: meta.bool(&key("add_bos_token"))?,
        add_eos: meta.bool(&key("add_eos_token"))?,
        add_space_prefix: meta.bool(&key("add_space_prefix"))?,
        lowercase: meta.bool(&key("normalizer.lowercase"))?,
        strip_accents: meta.bool(&key("normalizer.strip_accents"))?,
        suppress_tokens: meta.u32s(&key("suppress_tokens"))?.unwrap_or_default(),
        n_vocab: Some(n_vocab),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gguf::write::GgufWriter;
    use crate::gguf::{Array, Gguf, Value};

    fn read(writer: &GgufWriter) -> Result<TokenizerSpec, String> {
        let file = Gguf::parse(&writer.to_bytes(), "m.gguf").expect("valid");
        spec(&file.metadata, 7).map_err(|e| e.to_string())
    }

    fn words(words: &[&str]) -> Value {
        Value::Array(Array::Str(words.iter().map(|w| (*w).to_owned()).collect()))
    }

    #[test]
    fn keys_become_fields() {
        let writer = GgufWriter::new()
            .str("tokenizer.ggml.model", "gpt2")
            .str("tokenizer.ggml.pre", "smollm")
            .key("tokenizer.ggml.tokens", words(&["a", "b", "ab"]))
            .key("tokenizer.ggml.merges", words(&["a b"]))
            .key("tokenizer.ggml.scores", Value::Array(Array::F32(vec![0.0, -1.0, -2.0])))
            .key("tokenizer.ggml.token_type", Value::Array(Array::I32(vec![1, 1, 3])))
            .key("tokenizer.ggml.eos_token_id", Value::U32(2))
            .key("tokenizer.ggml.add_bos_token", Value::Bool(false))
            .key("tokenizer.ggml.suppress_tokens", Value::Array(Array::I32(vec![1])));
        let spec = read(&writer).unwrap();
        assert_eq!((spec.model.as_str(), spec.pre.as_deref()), ("gpt2", Some("smollm")));
        assert_eq!((spec.tokens.len(), spec.merges.len(), spec.n_vocab), (3, 1, Some(7)));
        assert_eq!(spec.scores, Some(vec![0.0, -1.0, -2.0]));
        assert_eq!(spec.token_types, Some(vec![1, 1, 3]));
        assert_eq!((spec.eos, spec.bos, spec.add_bos, spec.add_eos), (Some(2), None, Some(false), None));
        assert_eq!(spec.suppress_tokens, [1]);
    }

    #[test]
    fn an_id_of_minus_one_is_no_id_and_older_keys_still_count() {
        let writer = GgufWriter::new()
            .str("tokenizer.ggml.model", "llama")
            .key("tokenizer.ggml.padding_token_id", Value::U32(u32::MAX))
            .key("tokenizer.ggml.prefix_token_id", Value::U32(5))
            .key("tokenizer.ggml.suffix_token_id", Value::U32(6))
            .key("tokenizer.ggml.fim_suf_token_id", Value::U32(4));
        let spec = read(&writer).unwrap();
        assert_eq!((spec.pad, spec.fim_pre, spec.fim_suf, spec.fim_mid), (None, Some(5), Some(4), None));
    }

    #[test]
    fn a_missing_model_and_a_wrong_type_are_refused_by_key() {
        let missing = read(&GgufWriter::new()).unwrap_err();
        assert!(missing.contains("\"tokenizer.ggml.model\" is missing"), "{missing}");
        let wrong = GgufWriter::new().str("tokenizer.ggml.model", "gpt2").str("tokenizer.ggml.tokens", "a");
        let wrong = read(&wrong).unwrap_err();
        assert!(
            wrong.contains("\"tokenizer.ggml.tokens\" holds the string \"a\"; expected an array of strings"),
            "{wrong}"
        );
    }
}
