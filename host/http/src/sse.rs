//! Server-sent events: framing, comments against silence, and the response's headers.

use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::{HeaderValue, header};
use axum::response::Response;
use futures::{Stream, StreamExt, stream};
use serde::Serialize;

/// The event that ends OpenAI's streams.
pub(crate) const DONE: &[u8] = b"data: [DONE]\n\n";

/// A comment, so that proxies and clients see life.
pub(crate) const COMMENT: &[u8] = b":\n\n";

/// One `data:` event. JSON text has no raw newline, so one line carries it.
pub(crate) fn data(value: &impl Serialize) -> Bytes {
    framed(b"data: ".to_vec(), value)
}

/// One event with a name.
pub(crate) fn event(name: &str, value: &impl Serialize) -> Bytes {
    framed(format!("event: {name}\ndata: ").into_bytes(), value)
}

fn framed(mut frame: Vec<u8>, value: &impl Serialize) -> Bytes {
    if let Err(error) = serde_json::to_writer(&mut frame, value) {
        // Our own types fail only where a map has keys that are no strings, and none has.
        tracing::error!(%error, "an event could not be written");
    }
    frame.extend_from_slice(b"\n\n");
    Bytes::from(frame)
}

/// A response that sends the frames as they come and a `sign` of life after each `ping` of silence.
///
/// When the client goes away the body is dropped and `frames` with it.
pub(crate) fn response(
    frames: impl Stream<Item = Bytes> + Send + 'static,
    ping: Option<Duration>,
    sign: &'static [u8],
) -> Response {
    let body = Body::from_stream(with_pings(frames.boxed(), ping, sign).map(Ok::<_, std::convert::Infallible>));
    let mut response = Response::new(body);
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

fn with_pings(
    frames: stream::BoxStream<'static, Bytes>,
    ping: Option<Duration>,
    sign: &'static [u8],
) -> impl Stream<Item = Bytes> + Send + 'static {
    stream::unfold(frames, move |mut frames| async move {
        let next = match ping {
            Some(silence) => match tokio::time::timeout(silence, frames.next()).await {
                Ok(next) => next,
                Err(_) => Some(Bytes::from_static(sign)),
            },
            None => frames.next().await,
        };
        next.map(|frame| (frame, frames))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_is_one_line_whatever_the_text() {
        let frame = data(&serde_json::json!({"text": "a\nb\r\nc"}));
        assert_eq!(frame.as_ref(), b"data: {\"text\":\"a\\nb\\r\\nc\"}\n\n");
    }

    #[tokio::test(start_paused = true)]
    async fn silence_is_broken_by_comments_and_the_frames_keep_their_order() {
        let frames = stream::iter([1u64, 70, 0]).then(|seconds| async move {
            tokio::time::sleep(Duration::from_secs(seconds)).await;
            Bytes::from(format!("{seconds};"))
        });
        let all: Vec<Bytes> = with_pings(frames.boxed(), Some(Duration::from_secs(30)), COMMENT).collect().await;
        let text: String = all.iter().map(|frame| String::from_utf8_lossy(frame).into_owned()).collect();
        assert_eq!(text, "1;:\n\n:\n\n70;0;");
    }
}
