//! `POST /tokenize`, `/detokenize`.

use axum::Json;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::body::{self, Input};
use crate::error::ApiError;
use crate::fields::Prompts;
use crate::state::Ready;
use crate::text;
use opencoti_model::tokenizer::EncodeOptions;

/// A request of `POST /tokenize`.
#[derive(Clone, Debug, Default, Deserialize, ToSchema)]
pub(crate) struct TokenizeRequest {
    /// A text, or texts and token ids mixed.
    content: Option<Prompts>,
    /// Adds the tokens that the model wants at the beginning and the end.
    add_special: Option<bool>,
    /// Takes the texts of special tokens as these tokens; true where absent.
    parse_special: Option<bool>,
    /// Returns each token with its text.
    with_pieces: Option<bool>,
}

/// The answer of `POST /tokenize`.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct TokenizeAnswer {
    tokens: Vec<TokenAnswer>,
}

/// A token, with its text when asked for.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[serde(untagged)]
pub(crate) enum TokenAnswer {
    /// The id alone.
    Id(u32),
    /// With its text.
    WithPiece {
        /// The id.
        id: u32,
        /// The text, or its bytes where they are no UTF-8.
        piece: PieceAnswer,
    },
}

/// The text of a token.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[serde(untagged)]
pub(crate) enum PieceAnswer {
    /// Valid UTF-8.
    Text(String),
    /// Part of a character.
    Bytes(Vec<u8>),
}

/// Handler of `POST /tokenize`.
pub(crate) async fn tokenize(ready: Ready, input: Input) -> Result<Json<TokenizeAnswer>, ApiError> {
    let engine = ready.engine;
    let answer = input.compute(move |bytes| {
        let info = engine.info();
        let request: TokenizeRequest = body::parse(bytes)?;
        let options = EncodeOptions {
            add_special: request.add_special.unwrap_or(false),
            parse_special: request.parse_special.unwrap_or(true),
        };
        // `["a", "b"]` is one text in two pieces here, so every prompt's tokens are joined.
        let mut tokens = Vec::new();
        for (index, prompt) in request.content.map(|content| content.0).unwrap_or_default().iter().enumerate() {
            let options = EncodeOptions { add_special: options.add_special && index == 0, ..options };
            tokens.extend(text::encode_pieces(info, prompt, options, "content")?);
        }
        let with_pieces = request.with_pieces.unwrap_or(false);
        let answer = |id| match with_pieces {
            true => TokenAnswer::WithPiece { id, piece: piece(info.tokenizer.piece(id, true)) },
            false => TokenAnswer::Id(id),
        };
        Ok(TokenizeAnswer { tokens: tokens.into_iter().map(answer).collect() })
    });
    answer.await.map(Json)
}

fn piece(bytes: &[u8]) -> PieceAnswer {
    match std::str::from_utf8(bytes) {
        Ok(text) => PieceAnswer::Text(text.to_owned()),
        Err(_) => PieceAnswer::Bytes(bytes.to_vec()),
    }
}

/// A request of `POST /detokenize`.
#[derive(Clone, Debug, Default, Deserialize, ToSchema)]
pub(crate) struct DetokenizeRequest {
    /// Token ids.
    tokens: Option<Vec<i64>>,
}

/// The answer of `POST /detokenize`.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct DetokenizeAnswer {
    content: String,
}

/// Handler of `POST /detokenize`.
pub(crate) async fn detokenize(ready: Ready, input: Input) -> Result<Json<DetokenizeAnswer>, ApiError> {
    let engine = ready.engine;
    let answer = input.compute(move |bytes| {
        let info = engine.info();
        let request: DetokenizeRequest = body::parse(bytes)?;
        let ids = request.tokens.unwrap_or_default();
        let checked = ids.iter().enumerate().map(|(index, &id)| text::token(info, id, || format!("tokens[{index}]")));
        let tokens = checked.collect::<Result<Vec<_>, _>>()?;
        Ok(DetokenizeAnswer { content: text::piece(&info.tokenizer.decode(&tokens, true)) })
    });
    answer.await.map(Json)
}
