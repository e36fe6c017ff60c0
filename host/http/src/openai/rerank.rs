//! `POST /v1/rerank`: texts ordered by how well they answer a query, in Jina's shape or in that of Text Embeddings Inference.
//!
//! A model with a ranking head scores query and text together; the score is the sigmoid of what the head says, between 0 and 1,
//! or with `raw_scores` what it says itself. Of a model that embeds texts the score is the cosine of the two embeddings, between
//! −1 and 1.

use std::cmp::Ordering;

use axum::Json;
use axum::extract::State;
use opencoti_engine::api::{EmbedRequest, EngineInfo, Pooling, Ranking};
use opencoti_model::tokenizer::EncodeOptions;
use serde::{Deserialize, Deserializer, Serialize};
use utoipa::ToSchema;

use super::embeddings::{Norm, embed_all};
use crate::body::{self, Input};
use crate::error::ApiError;
use crate::state::{App, Ready};
use crate::text;

/// A request of the ranking routes.
#[derive(Clone, Debug, Default, Deserialize, ToSchema)]
pub(crate) struct RerankRequest {
    /// What the texts shall answer.
    query: Option<String>,
    /// The texts, or objects with a `text`.
    documents: Option<Vec<Document>>,
    /// The texts, for an answer in the shape of Text Embeddings Inference.
    texts: Option<Vec<Document>>,
    /// Most results to give, best first; all without it.
    top_n: Option<i64>,
    /// Whether results repeat their texts.
    return_documents: Option<bool>,
    /// The same for `texts`.
    return_text: Option<bool>,
    /// Whether scores of a ranking head are given as they are.
    raw_scores: Option<bool>,
    /// Name to report.
    model: Option<String>,
}

/// A text to rank.
#[derive(Clone, Debug, PartialEq, ToSchema)]
#[schema(value_type = String)]
pub(crate) struct Document(String);

impl<'de> Deserialize<'de> for Document {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Form;
        impl<'de> serde::de::Visitor<'de> for Form {
            type Value = Document;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a string or an object with a text")
            }

            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Document, E> {
                Ok(Document(text.to_owned()))
            }

            fn visit_map<A: serde::de::MapAccess<'de>>(self, mut map: A) -> Result<Document, A::Error> {
                let mut text = None;
                while let Some(key) = map.next_key::<String>()? {
                    match key.as_str() {
                        "text" => text = Some(map.next_value::<String>()?),
                        _ => drop(map.next_value::<serde::de::IgnoredAny>()?),
                    }
                }
                text.map(Document).ok_or_else(|| serde::de::Error::missing_field("text"))
            }
        }
        deserializer.deserialize_any(Form)
    }
}

/// Which of the two shapes the answer has.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Shape {
    Jina,
    Tei,
}

/// What a body asks for, tokenised.
struct Prepared {
    shape: Shape,
    documents: Vec<Document>,
    requests: Vec<EmbedRequest>,
    n_tokens: u32,
    top_n: usize,
    with_texts: bool,
    raw: bool,
    model: Option<String>,
}

fn prepare(bytes: &[u8], app: &App, info: &EngineInfo) -> Result<Prepared, ApiError> {
    let request: RerankRequest = body::parse(bytes)?;
    let query = request.query.ok_or_else(|| ApiError::field("query", "is missing; give the text to rank by"))?;
    let (shape, field, documents) = match (request.documents, request.texts) {
        (Some(documents), _) => (Shape::Jina, "documents", documents),
        (None, Some(texts)) => (Shape::Tei, "texts", texts),
        (None, None) => return Err(ApiError::field("documents", "is missing; give an array of texts to rank")),
    };
    if documents.is_empty() {
        return Err(ApiError::field(field, "is empty; give at least one text to rank"));
    }
    if documents.len() > app.config.max_prompts {
        let (found, most) = (documents.len(), app.config.max_prompts);
        return Err(ApiError::field(field, format!("has {found} texts, more than the server takes at once ({most})")));
    }
    let top_n = match request.top_n {
        None => documents.len(),
        Some(n) if n > 0 => usize::try_from(n).unwrap_or(usize::MAX),
        Some(n) => return Err(ApiError::field("top_n", format!("is {n}, expected at least 1"))),
    };
    let requests = requests(info, &query, &documents, field)?;
    Ok(Prepared {
        shape,
        n_tokens: requests.iter().map(|r| r.tokens.len() as u32).sum(),
        requests,
        documents,
        top_n,
        with_texts: match shape {
            Shape::Jina => request.return_documents.unwrap_or(false),
            Shape::Tei => request.return_text.unwrap_or(false),
        },
        raw: request.raw_scores.unwrap_or(false),
        model: request.model,
    })
}

/// What the engine computes: a pair for each text, or the query and then each text.
fn requests(
    info: &EngineInfo,
    query: &str,
    documents: &[Document],
    field: &str,
) -> Result<Vec<EmbedRequest>, ApiError> {
    match info.ranking {
        Ranking::Head => {
            let pair = |(index, document): (usize, &Document)| {
                let encoded = info.tokenizer.encode_pair(query, &document.0);
                let error = |e| ApiError::field(format!("{field}[{index}]"), format!("can't be encoded: {e}"));
                let (tokens, second) = encoded.map_err(error)?;
                fits(info, &tokens, || format!("{field}[{index}]"))?;
                Ok(EmbedRequest { tokens, pooling: Some(Pooling::Rank), second: Some(second) })
            };
            documents.iter().enumerate().map(pair).collect()
        }
        Ranking::Cosine => {
            let texts = documents.iter().enumerate().map(|(index, d)| (format!("{field}[{index}]"), d.0.as_str()));
            let one = |(field, text): (String, &str)| {
                let tokens =
                    text::encode(info, text, EncodeOptions { add_special: true, parse_special: false }, &field)?;
                if tokens.is_empty() {
                    return Err(ApiError::field(field, "has no tokens; give a text that is not empty"));
                }
                fits(info, &tokens, || field)?;
                Ok(EmbedRequest { tokens, pooling: None, second: None })
            };
            std::iter::once(("query".to_owned(), query)).chain(texts).map(one).collect()
        }
        Ranking::None => Err(ApiError::bad_request(
            "this server's model is not known to embed or rank texts; start the server with an embedding model or a reranker, \
             or say with --pooling how its embeddings are pooled",
        )),
    }
}

/// Refuses a text that the model can't take, before any work.
fn fits(info: &EngineInfo, tokens: &[u32], field: impl FnOnce() -> String) -> Result<(), ApiError> {
    match tokens.len() <= info.n_ctx as usize {
        true => Ok(()),
        false => Err(ApiError::too_long(field(), tokens.len() as u32, info.n_ctx)),
    }
}

/// The answer, in the shape that the request's fields ask for.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[serde(untagged)]
pub(crate) enum RerankAnswer {
    /// Jina's.
    Jina(JinaAnswer),
    /// That of Text Embeddings Inference.
    Tei(Vec<TeiResult>),
}

/// The answer to `documents`.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct JinaAnswer {
    object: &'static str,
    model: String,
    results: Vec<JinaResult>,
    usage: RerankUsage,
}

/// One of `documents`.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct JinaResult {
    /// Its place in the request.
    index: usize,
    /// 0 … 1 by a ranking head, −1 … 1 by the cosine of embeddings.
    relevance_score: f32,
    #[serde(skip_serializing_if = "Option::is_none")]
    document: Option<DocumentText>,
}

/// A text as results repeat it.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct DocumentText {
    text: String,
}

/// One of `texts`.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct TeiResult {
    /// Its place in the request.
    index: usize,
    /// 0 … 1 by a ranking head, −1 … 1 by the cosine of embeddings.
    score: f32,
    #[serde(skip_serializing_if = "Option::is_none")]
    text: Option<String>,
}

/// What the request used.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct RerankUsage {
    prompt_tokens: u32,
    total_tokens: u32,
}

/// Handler of the route.
pub(crate) async fn rerank(State(app): State<App>, ready: Ready, input: Input) -> Result<Json<RerankAnswer>, ApiError> {
    let (shared, info) = (App::clone(&app), ready.engine.info().clone());
    let prepared = input.compute(move |bytes| prepare(bytes, &shared, &info)).await?;
    let info = ready.engine.info();
    let embeddings = embed_all(&ready, prepared.requests.into_iter()).await?;
    let vectors = embeddings.into_iter().map(|one| one.vectors.into_iter().next().unwrap_or_default());
    let scores = match info.ranking {
        Ranking::Head => vectors.map(|scores| head_score(&scores, prepared.raw)).collect(),
        Ranking::Cosine | Ranking::None => cosines(vectors.collect()),
    };
    let results = best(&scores, prepared.top_n).into_iter().map(|index| {
        let text = prepared.with_texts.then(|| prepared.documents[index].0.clone());
        (index, scores[index], text)
    });
    Ok(Json(match prepared.shape {
        Shape::Tei => RerankAnswer::Tei(results.map(|(index, score, text)| TeiResult { index, score, text }).collect()),
        Shape::Jina => RerankAnswer::Jina(JinaAnswer {
            object: "list",
            model: prepared.model.unwrap_or_else(|| info.model_alias.clone()),
            results: results
                .map(|(index, relevance_score, text)| JinaResult {
                    index,
                    relevance_score,
                    document: text.map(|text| DocumentText { text }),
                })
                .collect(),
            usage: RerankUsage { prompt_tokens: prepared.n_tokens, total_tokens: prepared.n_tokens },
        }),
    }))
}

fn head_score(scores: &[f32], raw: bool) -> f32 {
    let score = scores.first().copied().unwrap_or(f32::NEG_INFINITY);
    if raw { score } else { 1.0 / (1.0 + (-score).exp()) }
}

/// Cosines of the first vector and each other.
fn cosines(mut vectors: Vec<Vec<f32>>) -> Vec<f32> {
    vectors.iter_mut().for_each(|vector| Norm::P(2).apply(vector));
    let Some((query, texts)) = vectors.split_first() else { return Vec::new() };
    let dot = |text: &Vec<f32>| query.iter().zip(text).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
    texts.iter().map(|text| dot(text) as f32).collect()
}

/// Places of the `n` best scores, best first; equal ones in their order.
fn best(scores: &[f32], n: usize) -> Vec<usize> {
    let mut places: Vec<usize> = (0..scores.len()).collect();
    places.sort_by(|&a, &b| scores[b].partial_cmp(&scores[a]).unwrap_or(Ordering::Equal));
    places.truncate(n);
    places
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_come_first_and_equal_ones_in_their_order() {
        assert_eq!(best(&[0.1, 0.9, 0.1, 0.5], 9), [1, 3, 0, 2]);
        assert_eq!(best(&[0.1, 0.9, 0.1, 0.5], 2), [1, 3]);
    }

    #[test]
    fn a_head_says_a_number_or_a_probability() {
        assert_eq!(head_score(&[0.0], false), 0.5);
        assert_eq!(head_score(&[-3.5], true), -3.5);
        assert!(head_score(&[20.0], false) > 0.999);
    }

    #[test]
    fn cosines_do_not_depend_on_lengths() {
        let found = cosines(vec![vec![1.0, 0.0], vec![5.0, 0.0], vec![0.0, 2.0], vec![-1.0, 0.0], vec![0.0, 0.0]]);
        assert_eq!(found, [1.0, 0.0, -1.0, 0.0]);
    }
}
