//! Request bodies: reading them within limits, parsing them with errors that name the field.

use axum::body::Bytes;
use axum::extract::{FromRequest, Request};
use futures::StreamExt;
use serde::de::value::MapAccessDeserializer;
use serde::de::{Deserialize, DeserializeOwned, Deserializer, MapAccess, Visitor};
use serde_json::{Map, Value};
use serde_path_to_error::{Path, Segment};

use crate::error::ApiError;
use crate::state::App;

/// Bodies longer than this are parsed, templated and tokenised off the threads that serve connections.
const OFFLOAD_BYTES: usize = 16 << 10;

/// The bytes of a body within the server's limits.
pub(crate) struct Input(pub(crate) Bytes);

impl FromRequest<App> for Input {
    type Rejection = ApiError;

    async fn from_request(request: Request, app: &App) -> Result<Self, ApiError> {
        let limit = app.config.body_limit;
        let wait = app.config.read_timeout;
        match tokio::time::timeout(wait, read(request, limit)).await {
            Ok(bytes) => bytes.map(Input),
            Err(_) => Err(ApiError::timed_out(format!("the body did not arrive within {} s", wait.as_secs()))),
        }
    }
}

async fn read(request: Request, limit: usize) -> Result<Bytes, ApiError> {
    let mut chunks = request.into_body().into_data_stream();
    let mut body = Vec::new();
    while let Some(chunk) = chunks.next().await {
        let chunk = chunk.map_err(|error| ApiError::bad_request(format!("the body could not be read: {error}")))?;
        if chunk.len() > limit - body.len() {
            return Err(ApiError::too_large(limit));
        }
        body.extend_from_slice(&chunk);
    }
    Ok(body.into())
}

impl Input {
    /// Runs a computation over the body where it can't hold up other connections.
    pub(crate) async fn compute<T: Send + 'static>(
        self,
        work: impl FnOnce(&[u8]) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        if self.0.len() < OFFLOAD_BYTES {
            return work(&self.0);
        }
        tokio::task::spawn_blocking(move || work(&self.0)).await.unwrap_or_else(|error| {
            tracing::error!(%error, "the preparation of a request failed");
            Err(ApiError::internal("the request could not be prepared; this is a fault of the server"))
        })
    }
}

/// Parses a body that must be a JSON object.
pub(crate) fn object(bytes: &[u8]) -> Result<Value, ApiError> {
    let value: Value = serde_json::from_slice(bytes)
        .map_err(|error| ApiError::bad_request(format!("the body is not valid JSON: {error}")))?;
    match value {
        Value::Object(_) => Ok(value),
        other => Err(ApiError::bad_request(format!("the body is {}, expected a JSON object", describe(Some(&other))))),
    }
}

/// Reads a body's fields; a field of a wrong type is an error with its path. Unknown fields are ignored.
pub(crate) fn fields<T: DeserializeOwned>(body: &Value) -> Result<T, ApiError> {
    serde_path_to_error::deserialize(body).map_err(|error| wrong_type(body, error.path(), &error.inner().to_string()))
}

/// Parses a body into its fields at once.
pub(crate) fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, ApiError> {
    fields(&object(bytes)?)
}

/// Words serde's error for people who write JSON and not Rust.
fn wrong_type(body: &Value, path: &Path, text: &str) -> ApiError {
    let is_about_type = ["invalid type", "invalid value", "invalid length"].iter().any(|start| text.starts_with(start));
    let problem = match text.rsplit_once(", expected ") {
        Some((_, expected)) if is_about_type => {
            format!("is {}, expected {}", describe(lookup(body, path)), plain(expected))
        }
        _ => text.to_owned(),
    };
    match path.iter().next() {
        Some(_) => ApiError::field(path.to_string(), problem),
        None => ApiError::bad_request(format!("the body {problem}")),
    }
}

fn lookup<'a>(body: &'a Value, path: &Path) -> Option<&'a Value> {
    path.iter().try_fold(body, |value, segment| match segment {
        Segment::Seq { index } => value.get(index),
        Segment::Map { key } => value.get(key),
        Segment::Enum { .. } | Segment::Unknown => None,
    })
}

/// The object that must be at `path`.
pub(crate) fn object_at<'a>(value: &'a Value, path: &str) -> Result<&'a Map<String, Value>, ApiError> {
    let problem = || format!("is {}, expected an object", describe(Some(value)));
    value.as_object().ok_or_else(|| ApiError::field(path, problem()))
}

/// The string that an object at `path` must have under `key`.
pub(crate) fn string_at<'a>(object: &'a Map<String, Value>, key: &str, path: &str) -> Result<&'a str, ApiError> {
    let found = object.get(key);
    let problem = || format!("is {}, expected a string", describe(found));
    found.and_then(Value::as_str).ok_or_else(|| ApiError::field(format!("{path}.{key}"), problem()))
}

/// The JSON kind of a value, with its text where that is short.
pub(crate) fn describe(value: Option<&Value>) -> String {
    match value {
        None => "missing".to_owned(),
        Some(Value::Null) => "null".to_owned(),
        Some(Value::Bool(value)) => value.to_string(),
        Some(Value::Number(value)) => format!("the number {value}"),
        Some(Value::String(_)) => "a string".to_owned(),
        Some(Value::Array(_)) => "an array".to_owned(),
        Some(Value::Object(_)) => "an object".to_owned(),
    }
}

fn plain(expected: &str) -> &str {
    match expected {
        "i8" | "i16" | "i32" | "i64" | "isize" => "an integer",
        "u8" | "u16" | "u32" | "u64" | "usize" => "an integer that is not negative",
        "f32" | "f64" => "a number",
        "a boolean" | "bool" => "true or false",
        "a sequence" => "an array",
        "a map" => "an object",
        other if other.starts_with("struct ") => "an object",
        other => other,
    }
}

/// A structure that only an object makes. Serde's own derive also takes an array of the fields in their order.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Strict<T>(pub(crate) T);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Strict<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Fields<T>(std::marker::PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for Fields<T> {
            type Value = Strict<T>;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Strict<T>, A::Error> {
                T::deserialize(MapAccessDeserializer::new(map)).map(Strict)
            }
        }
        deserializer.deserialize_map(Fields(std::marker::PhantomData))
    }
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::*;

    #[derive(Deserialize, Debug, Default)]
    #[serde(default)]
    struct Probe {
        count: Option<i64>,
        ratio: Option<f64>,
        inner: Option<Strict<Inner>>,
        list: Option<Vec<Strict<Inner>>>,
    }

    #[derive(Deserialize, Debug, Default)]
    #[serde(default)]
    struct Inner {
        #[allow(dead_code, reason = "only its type matters")]
        name: Option<String>,
    }

    fn message(body: &str) -> (String, Option<String>) {
        let error = parse::<Probe>(body.as_bytes()).expect_err("the body is wrong");
        (error.message().to_owned(), error.param().map(str::to_owned))
    }

    #[test]
    fn a_wrong_type_names_the_path_what_was_found_and_what_was_expected() {
        for (body, text, path) in [
            (r#"{"count": "x"}"#, "`count` is a string, expected an integer", "count"),
            (r#"{"count": 1.5}"#, "`count` is the number 1.5, expected an integer", "count"),
            (r#"{"ratio": []}"#, "`ratio` is an array, expected a number", "ratio"),
            (r#"{"inner": []}"#, "`inner` is an array, expected an object", "inner"),
            (r#"{"list": [{}, {"name": 7}]}"#, "`list[1].name` is the number 7, expected a string", "list[1].name"),
            (r#"{"list": [{}, null]}"#, "`list[1]` is null, expected an object", "list[1]"),
        ] {
            assert_eq!(message(body), (text.to_owned(), Some(path.to_owned())));
        }
    }

    #[test]
    fn null_is_absent_and_unknown_fields_are_ignored() {
        let probe: Probe = parse(br#"{"count": null, "ratio": 1, "other": [1]}"#).expect("valid");
        assert_eq!((probe.count, probe.ratio), (None, Some(1.0)));
        assert!(probe.inner.is_none() && probe.list.is_none());
    }

    #[test]
    fn a_body_that_is_no_object_is_refused() {
        assert_eq!(message("[1]").0, "the body is an array, expected a JSON object");
        assert!(message("{").0.starts_with("the body is not valid JSON: EOF"));
        assert!(message("").0.starts_with("the body is not valid JSON: EOF"));
    }
}
