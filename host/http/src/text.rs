//! Text to tokens and back, for the fields of requests.

use opencoti_engine::api::EngineInfo;
use opencoti_model::tokenizer::EncodeOptions;

use crate::error::ApiError;
use crate::fields::{Piece, Prompt, Prompts};

/// Checks that a token id is one of the model's.
pub(crate) fn token(info: &EngineInfo, id: i64, field: impl FnOnce() -> String) -> Result<u32, ApiError> {
    let n_vocab = info.tokenizer.n_vocab();
    u32::try_from(id).ok().filter(|&id| (id as usize) < n_vocab).ok_or_else(|| {
        ApiError::field(
            field(),
            format!("is token {id}, but the vocabulary has {n_vocab} tokens (0 … {})", n_vocab.saturating_sub(1)),
        )
    })
}

/// Encodes one text.
pub(crate) fn encode(info: &EngineInfo, text: &str, options: EncodeOptions, field: &str) -> Result<Vec<u32>, ApiError> {
    info.tokenizer.encode(text, options).map_err(|error| ApiError::field(field, format!("can't be encoded: {error}")))
}

/// Encodes texts and token ids mixed. The tokens that the model wants at the beginning and the end are added around a
/// text and at most once; a prompt that starts with token ids is taken as it is.
pub(crate) fn encode_pieces(
    info: &EngineInfo,
    prompt: &Prompt,
    options: EncodeOptions,
    field: &str,
) -> Result<Vec<u32>, ApiError> {
    let mut tokens = Vec::new();
    for (index, piece) in prompt.0.iter().enumerate() {
        match piece {
            Piece::Token(id) => tokens.push(token(info, *id, || format!("{field}[{index}]"))?),
            Piece::Text(text) => {
                let options = EncodeOptions { add_special: options.add_special && index == 0, ..options };
                tokens.extend(encode(info, text, options, field)?);
            }
        }
    }
    Ok(tokens)
}

/// Encodes the prompts of a request; each must have a token.
pub(crate) fn encode_prompts(
    info: &EngineInfo,
    prompts: &Prompts,
    max: usize,
    field: &str,
) -> Result<Vec<Vec<u32>>, ApiError> {
    if prompts.0.is_empty() {
        return Err(ApiError::field(field, "is empty; give at least one prompt"));
    }
    if prompts.0.len() > max {
        return Err(ApiError::field(
            field,
            format!("has {} prompts, more than the server takes at once ({max})", prompts.0.len()),
        ));
    }
    let options = EncodeOptions { add_special: true, parse_special: true };
    let encoded = prompts.0.iter().enumerate().map(|(index, prompt)| {
        let field = if prompts.0.len() == 1 { field.to_owned() } else { format!("{field}[{index}]") };
        let tokens = encode_pieces(info, prompt, options, &field)?;
        if tokens.is_empty() { Err(ApiError::field(field, "has no tokens; give at least one")) } else { Ok(tokens) }
    });
    encoded.collect()
}

/// Bytes as text, with replacement characters where they are no UTF-8.
pub(crate) fn piece(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}
