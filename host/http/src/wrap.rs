//! What lies around every route: request ids, the `Server` header, logs, metrics, and a net under panics.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Instant;

use axum::Router;
use axum::extract::{MatchedPath, Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use futures::FutureExt;
use uuid::Uuid;

use crate::anthropic::error::AnthropicError;
use crate::cors;
use crate::error::ApiError;
use crate::routes::{self, Family};
use crate::state::{App, HttpId};

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// Where Anthropic's clients look for it.
const ANTHROPIC_REQUEST_ID: HeaderName = HeaderName::from_static("request-id");

/// Puts the layers around the routes, the outermost last.
pub(crate) fn around(routes: Router<App>, app: &App) -> Router<App> {
    routes
        .layer(from_fn_with_state(App::clone(app), cors::apply))
        .layer(from_fn_with_state(App::clone(app), observe))
        .layer(from_fn_with_state(App::clone(app), shape_errors))
}

/// Gives the request its id, and the answer the headers that all answers have.
async fn observe(State(app): State<App>, mut request: Request, next: Next) -> Response {
    let began = Instant::now();
    let id = request_id(request.headers());
    request.extensions_mut().insert(HttpId(Arc::clone(&id)));
    let method = request.method().clone();
    // Labels come from the table of routes, so that clients can't make new series.
    let route = route(&app, &request).unwrap_or_else(|| "none".to_owned());

    let mut response = next.run(request).await;

    let status = response.status().as_u16();
    let elapsed = began.elapsed();
    metrics::counter!("opencoti_http_requests_total", "route" => route.clone(), "status" => status.to_string())
        .increment(1);
    metrics::histogram!("opencoti_http_response_seconds", "route" => route.clone()).record(elapsed.as_secs_f64());
    tracing::debug!(%method, route, status, id = &*id, ms = elapsed.as_millis() as u64, "answered");
    let headers = response.headers_mut();
    headers.insert(header::SERVER, HeaderValue::from_static("opencoti"));
    if let Ok(id) = HeaderValue::from_str(&id) {
        headers.insert(REQUEST_ID, id);
    }
    response
}

/// The client's own id if it is a plain word, else a new one.
fn request_id(headers: &HeaderMap) -> Arc<str> {
    let given = headers.get(REQUEST_ID).and_then(|value| value.to_str().ok());
    let is_plain = |id: &&str| {
        (1..=128).contains(&id.len()) && id.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte))
    };
    match given.filter(is_plain) {
        Some(id) => id.into(),
        None => format!("req_{}", Uuid::new_v4().simple()).into(),
    }
}

/// The path of the request's route, without the server's prefix.
fn route(app: &App, request: &Request) -> Option<String> {
    let path = request.extensions().get::<MatchedPath>()?.as_str();
    Some(path.strip_prefix(app.config.api_prefix.trim_end_matches('/')).unwrap_or(path).to_owned())
}

/// Gives errors the shape of their route's surface, those of handlers that panic too.
async fn shape_errors(State(app): State<App>, request: Request, next: Next) -> Response {
    let family = route(&app, &request).and_then(|route| routes::family(&route));
    let mut response = catch_panics(request, next).await;
    if family != Some(Family::Anthropic) {
        return response;
    }
    let id = response.headers().get(REQUEST_ID).cloned();
    if let Some(error) = response.extensions_mut().remove::<ApiError>() {
        let text = id.as_ref().and_then(|id| id.to_str().ok()).map(str::to_owned);
        let body = serde_json::to_vec(&AnthropicError::new(&error, text)).unwrap_or_default();
        response.headers_mut().remove(header::CONTENT_LENGTH);
        *response.body_mut() = body.into();
    }
    if let Some(id) = id {
        response.headers_mut().insert(ANTHROPIC_REQUEST_ID, id);
    }
    response
}

/// A handler that panics costs its own request only.
async fn catch_panics(request: Request, next: Next) -> Response {
    match AssertUnwindSafe(next.run(request)).catch_unwind().await {
        Ok(response) => response,
        Err(panic) => {
            let reason = panic.downcast_ref::<&str>().copied().map(str::to_owned);
            let reason = reason.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default();
            tracing::error!(reason, "a request handler panicked");
            ApiError::internal("the request failed by a fault of the server").into_response()
        }
    }
}
