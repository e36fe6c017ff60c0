//! Cross-origin headers, and the answer to preflights.
//!
//! Preflights carry no key, so they are answered here, before the routes and their key check.

use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use crate::config::{Cors, CorsOrigins};
use crate::state::App;

/// Headers of ours that scripts may read.
const EXPOSED: &str = "X-Request-Id, Retry-After, X-KV-Pool-Saturated";

/// Answers `OPTIONS` and adds the headers to everything else.
pub(crate) async fn apply(State(app): State<App>, request: Request, next: Next) -> Response {
    let cors = &app.config.cors;
    let origin = request.headers().get(header::ORIGIN).cloned();
    let mut response = if request.method() == Method::OPTIONS {
        let mut response = StatusCode::OK.into_response();
        preflight(cors, request.headers(), response.headers_mut());
        response
    } else {
        next.run(request).await
    };
    allow_origin(cors, origin.as_ref(), response.headers_mut());
    response
}

fn preflight(cors: &Cors, asked: &HeaderMap, headers: &mut HeaderMap) {
    set(headers, header::ACCESS_CONTROL_ALLOW_METHODS, &cors.methods);
    match asked.get(header::ACCESS_CONTROL_REQUEST_HEADERS) {
        Some(names) if cors.headers == "*" => {
            headers.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, names.clone());
        }
        _ => set(headers, header::ACCESS_CONTROL_ALLOW_HEADERS, &cors.headers),
    }
}

fn allow_origin(cors: &Cors, origin: Option<&HeaderValue>, headers: &mut HeaderMap) {
    if cors.credentials {
        set(headers, header::ACCESS_CONTROL_ALLOW_CREDENTIALS, "true");
    }
    let any = cors.origins == CorsOrigins::Any;
    if any && !cors.credentials {
        set(headers, header::ACCESS_CONTROL_ALLOW_ORIGIN, "*");
    } else {
        headers.append(header::VARY, HeaderValue::from_static("Origin"));
        if let Some(origin) = origin.filter(|origin| any || allows(&cors.origins, origin)) {
            headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin.clone());
        }
    }
    set(headers, header::ACCESS_CONTROL_EXPOSE_HEADERS, EXPOSED);
}

fn allows(origins: &CorsOrigins, origin: &HeaderValue) -> bool {
    let Ok(origin) = origin.to_str() else { return false };
    match origins {
        CorsOrigins::Any => true,
        CorsOrigins::Localhost => is_loopback(origin),
        CorsOrigins::List(list) => list.iter().any(|allowed| allowed.trim_end_matches('/') == origin),
    }
}

/// Whether an origin (`scheme://host[:port]`) is this machine under one of its three usual names.
pub(crate) fn is_loopback(origin: &str) -> bool {
    let host = origin.split_once("://").map_or(origin, |(_, rest)| rest);
    let rest = ["localhost", "127.0.0.1", "[::1]"].iter().find_map(|name| host.strip_prefix(name));
    match rest {
        Some("") => true,
        Some(rest) => rest.strip_prefix(':').is_some_and(|port| port.parse::<u16>().is_ok()),
        None => false,
    }
}

fn set(headers: &mut HeaderMap, name: HeaderName, value: &str) {
    match HeaderValue::from_str(value) {
        Ok(value) => {
            headers.insert(name, value);
        }
        Err(_) => tracing::warn!(header = %name, value, "the configured CORS value is no header value; it is left out"),
    }
}

#[cfg(test)]
mod tests {
    use super::is_loopback;

    #[test]
    fn loopback_origins_are_exact_hosts_with_any_scheme_and_port() {
        for origin in ["http://localhost", "https://localhost:3000", "http://127.0.0.1:8080", "http://[::1]:1"] {
            assert!(is_loopback(origin), "{origin}");
        }
        for origin in
            ["http://localhost.evil.org", "http://127.0.0.1.evil.org", "http://evil.org", "null", "http://localhost:x"]
        {
            assert!(!is_loopback(origin), "{origin}");
        }
    }
}
