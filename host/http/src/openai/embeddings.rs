//! `POST /v1/embeddings`, and what the native route shares with it.

use axum::Json;
use axum::extract::State;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use futures::stream::{self, StreamExt, TryStreamExt};
use opencoti_engine::api::{EmbedRequest, Embedding, Pooling};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::body::{self, Input};
use crate::error::ApiError;
use crate::fields::Prompts;
use crate::state::{App, Ready};
use crate::text;

/// Inputs of one body that are with the engine at once.
const AT_ONCE: usize = 64;

/// A request of the embeddings routes.
#[derive(Clone, Debug, Default, Deserialize, ToSchema)]
pub(crate) struct EmbeddingsRequest {
    /// What to embed.
    pub(crate) input: Option<Prompts>,
    /// Second name of `input`.
    pub(crate) content: Option<Prompts>,
    /// Name to report.
    pub(crate) model: Option<String>,
    /// `float` or `base64` (little-endian f32).
    pub(crate) encoding_format: Option<String>,
    /// The first so many numbers of each vector, normalised again.
    pub(crate) dimensions: Option<i64>,
    /// −1 none, 0 greatest number to 32760, 1 taxicab, 2 Euclidean, more: that p-norm.
    pub(crate) embd_normalize: Option<i64>,
}

impl EmbeddingsRequest {
    /// Reads the fields of a body.
    pub(crate) fn parse(bytes: &[u8]) -> Result<Self, ApiError> {
        body::parse(bytes)
    }
}

/// Which route asks.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Surface {
    /// One vector an input.
    OpenAi,
    /// One or, without pooling, one a token.
    Native,
}

/// The vectors of all inputs, normalised, and what the request said about them.
pub(crate) struct Embedded {
    pub(crate) vectors: Vec<Vec<Vec<f32>>>,
    n_tokens: u32,
    model: String,
    base64: bool,
}

struct Prepared {
    inputs: Vec<Vec<u32>>,
    model: Option<String>,
    base64: bool,
    dimensions: Option<usize>,
    norm: Norm,
}

fn prepare(request: EmbeddingsRequest, app: &App, ready: &Ready, surface: Surface) -> Result<Prepared, ApiError> {
    let info = ready.engine.info();
    let (field, inputs) = match (request.input, request.content) {
        (Some(input), _) => ("input", input),
        (None, Some(content)) => ("content", content),
        (None, None) => return Err(ApiError::field("input", "is missing; give a text, tokens, or an array of them")),
    };
    let base64 = match request.encoding_format.as_deref() {
        None | Some("float") => false,
        Some("base64") => true,
        Some(other) => {
            return Err(ApiError::field("encoding_format", format!("is {other:?}, expected float or base64")));
        }
    };
    let n_embd = info.n_embd as usize;
    let dimensions = request.dimensions.map(|value| {
        let wanted = usize::try_from(value).ok().filter(|wanted| (1..=n_embd).contains(wanted));
        wanted.ok_or_else(|| ApiError::field("dimensions", format!("is {value}, expected 1 to {n_embd}")))
    });
    if info.pooling == Pooling::Rank {
        let message =
            "this model scores pairs of texts and embeds none; use /v1/rerank, or start it with --pooling cls or mean";
        return Err(ApiError::bad_request(message));
    }
    if surface == Surface::OpenAi && info.pooling == Pooling::None {
        let message = "this server embeds without pooling, which gives a vector a token; use /embedding, or start it with a pooling";
        return Err(ApiError::bad_request(message));
    }
    Ok(Prepared {
        inputs: text::encode_prompts(info, &inputs, app.config.max_prompts, field)?,
        model: request.model,
        base64,
        dimensions: dimensions.transpose()?,
        norm: Norm::new(request.embd_normalize.unwrap_or(2))?,
    })
}

/// Computes the vectors of a body.
pub(crate) async fn compute(app: &App, ready: &Ready, input: Input, surface: Surface) -> Result<Embedded, ApiError> {
    let (shared, own) = (App::clone(app), ready.clone());
    let prepared =
        input.compute(move |bytes| prepare(EmbeddingsRequest::parse(bytes)?, &shared, &own, surface)).await?;
    let n_tokens = prepared.inputs.iter().map(|tokens| tokens.len() as u32).sum();
    let requests = prepared.inputs.into_iter().map(|tokens| EmbedRequest { tokens, pooling: None, second: None });
    let embeddings = embed_all(ready, requests).await?;
    let finish = |mut vector: Vec<f32>| {
        vector.truncate(prepared.dimensions.unwrap_or(vector.len()));
        prepared.norm.apply(&mut vector);
        vector
    };
    Ok(Embedded {
        vectors: embeddings.into_iter().map(|one| one.vectors.into_iter().map(finish).collect()).collect(),
        n_tokens,
        model: prepared.model.unwrap_or_else(|| ready.engine.info().model_alias.clone()),
        base64: prepared.base64,
    })
}

/// Computes requests, in their order. Only so many are with the engine at once that one body can't fill its queue.
pub(crate) async fn embed_all(
    ready: &Ready,
    requests: impl Iterator<Item = EmbedRequest>,
) -> Result<Vec<Embedding>, ApiError> {
    let at_once = (ready.engine.info().max_queue as usize / 2).clamp(1, AT_ONCE);
    let requests: Vec<_> = requests.map(|request| ready.engine.embed(request)).collect();
    Ok(stream::iter(requests).buffered(at_once).try_collect().await?)
}

/// The answer of `POST /v1/embeddings`.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct EmbeddingsAnswer {
    object: &'static str,
    model: String,
    data: Vec<EmbeddingData>,
    usage: EmbeddingsUsage,
}

/// One input's vector.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct EmbeddingData {
    object: &'static str,
    index: usize,
    embedding: Vector,
}

/// A vector in the wanted form.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[serde(untagged)]
pub(crate) enum Vector {
    /// Numbers.
    Floats(Vec<f32>),
    /// Little-endian f32 in base64.
    Base64(String),
}

/// What the request used.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct EmbeddingsUsage {
    prompt_tokens: u32,
    total_tokens: u32,
}

/// Handler of the route.
pub(crate) async fn embeddings(
    State(app): State<App>,
    ready: Ready,
    input: Input,
) -> Result<Json<EmbeddingsAnswer>, ApiError> {
    let embedded = compute(&app, &ready, input, Surface::OpenAi).await?;
    let data = embedded.vectors.into_iter().enumerate().map(|(index, vectors)| {
        let vector = vectors.into_iter().next().unwrap_or_default();
        let embedding = if embedded.base64 { Vector::Base64(base64_of(&vector)) } else { Vector::Floats(vector) };
        EmbeddingData { object: "embedding", index, embedding }
    });
    Ok(Json(EmbeddingsAnswer {
        object: "list",
        data: data.collect(),
        model: embedded.model,
        usage: EmbeddingsUsage { prompt_tokens: embedded.n_tokens, total_tokens: embedded.n_tokens },
    }))
}

fn base64_of(vector: &[f32]) -> String {
    let bytes: Vec<u8> = vector.iter().flat_map(|value| value.to_le_bytes()).collect();
    STANDARD.encode(bytes)
}

/// How vectors are scaled.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Norm {
    None,
    /// The greatest magnitude becomes 32760, so that the vector fits 16-bit integers.
    MaxAbs,
    P(i32),
}

impl Norm {
    fn new(code: i64) -> Result<Self, ApiError> {
        match code {
            -1 => Ok(Norm::None),
            0 => Ok(Norm::MaxAbs),
            1.. => Ok(Norm::P(i32::try_from(code).unwrap_or(i32::MAX))),
            _ => Err(ApiError::field("embd_normalize", format!("is {code}, expected -1 or more"))),
        }
    }

    /// Scales in f64. A zero vector stays one.
    pub(crate) fn apply(self, vector: &mut [f32]) {
        let greatest = vector.iter().fold(0f64, |greatest, value| greatest.max(f64::from(value.abs())));
        if greatest == 0.0 {
            return;
        }
        let scale = match self {
            Norm::None => return,
            Norm::MaxAbs => 32760.0 / greatest,
            // Relative to the greatest number, so that no power overflows.
            Norm::P(p) => {
                let sum: f64 = vector.iter().map(|value| (f64::from(value.abs()) / greatest).powi(p)).sum();
                1.0 / (greatest * sum.powf(1.0 / f64::from(p)))
            }
        };
        vector.iter_mut().for_each(|value| *value = (f64::from(*value) * scale) as f32);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scaled(code: i64, vector: &[f32]) -> Vec<f32> {
        let mut vector = vector.to_vec();
        Norm::new(code).expect("a valid code").apply(&mut vector);
        vector
    }

    #[test]
    fn the_norms_are_those_of_their_codes() {
        assert_eq!(scaled(-1, &[3.0, -4.0]), [3.0, -4.0]);
        assert_eq!(scaled(0, &[3.0, -4.0]), [24570.0, -32760.0]);
        assert_eq!(scaled(1, &[3.0, -1.0]), [0.75, -0.25]);
        assert_eq!(scaled(2, &[3.0, -4.0]), [0.6, -0.8]);
        let cubic = scaled(3, &[1.0, 1.0]);
        assert!((cubic[0] - 0.793_700_5).abs() < 1e-6, "{cubic:?}");
        assert_eq!(scaled(2, &[0.0, 0.0]), [0.0, 0.0]);
        assert!(Norm::new(-2).is_err());
    }

    #[test]
    fn base64_holds_little_endian_floats() {
        assert_eq!(base64_of(&[1.0, -2.0]), "AACAPwAAAMA=");
    }
}
