//! API keys: `Authorization: Bearer KEY` or `X-Api-Key: KEY`.

use axum::extract::{Request, State};
use axum::http::{HeaderMap, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use crate::error::ApiError;
use crate::state::App;

/// Lets a request through when no key is set or when it carries one.
pub(crate) async fn require_key(State(app): State<App>, request: Request, next: Next) -> Response {
    let keys = &app.config.api_keys;
    if keys.is_empty() || carries_one_of(request.headers(), keys) {
        next.run(request).await
    } else {
        ApiError::wrong_key().into_response()
    }
}

fn carries_one_of(headers: &HeaderMap, keys: &[String]) -> bool {
    let bearer = headers.get(header::AUTHORIZATION).and_then(|value| bearer_token(value.as_bytes()));
    let plain = headers.get("x-api-key").map(|value| value.as_bytes());
    [bearer, plain].into_iter().flatten().any(|given| {
        // No early end: the time must not tell which key was near.
        keys.iter().fold(false, |found, key| found | same_bytes(given, key.as_bytes()))
    })
}

/// The token of a `Bearer` credential; the scheme's name has no case (RFC 9110 §11.1).
fn bearer_token(value: &[u8]) -> Option<&[u8]> {
    let (scheme, token) = value.split_at_checked(6)?;
    if !scheme.eq_ignore_ascii_case(b"bearer") || !token.starts_with(b" ") {
        return None;
    }
    Some(token.trim_ascii())
}

/// Compares in a time that depends on the lengths only.
fn same_bytes(a: &[u8], b: &[u8]) -> bool {
    a.len() == b.len() && a.iter().zip(b).fold(0, |differences, (x, y)| differences | (x ^ y)) == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_scheme_has_no_case_and_needs_a_space() {
        assert_eq!(bearer_token(b"Bearer abc"), Some(&b"abc"[..]));
        assert_eq!(bearer_token(b"bearer  abc "), Some(&b"abc"[..]));
        assert_eq!(bearer_token(b"Bearerabc"), None);
        assert_eq!(bearer_token(b"Basic abc"), None);
        assert_eq!(bearer_token(b"B"), None);
    }

    #[test]
    fn a_prefix_of_a_key_is_not_the_key() {
        assert!(same_bytes(b"secret", b"secret"));
        assert!(!same_bytes(b"secre", b"secret"));
        assert!(!same_bytes(b"", b"secret"));
    }
}
