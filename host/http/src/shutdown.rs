//! `POST /shutdown`, for callers on this machine only.

use std::net::{IpAddr, SocketAddr};

use axum::Json;
use axum::extract::State;
use axum::extract::connect_info::{ConnectInfo, Connected};
use axum::extract::rejection::ExtensionRejection;
use axum::http::{HeaderMap, header};
use axum::serve::IncomingStream;
use serde::Serialize;
use tokio::net::TcpListener;
use utoipa::ToSchema;

use crate::cors;
use crate::error::ApiError;
use crate::state::App;

/// Who is at the other end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Peer {
    /// A process that may open the server's socket file.
    Unix,
    /// An address.
    Tcp(IpAddr),
}

impl Peer {
    fn is_local(self) -> bool {
        match self {
            Peer::Unix => true,
            Peer::Tcp(address) => address.to_canonical().is_loopback(),
        }
    }
}

impl Connected<IncomingStream<'_, TcpListener>> for Peer {
    fn connect_info(stream: IncomingStream<'_, TcpListener>) -> Self {
        let address: &SocketAddr = stream.remote_addr();
        Peer::Tcp(address.ip())
    }
}

#[cfg(unix)]
impl Connected<IncomingStream<'_, tokio::net::UnixListener>> for Peer {
    fn connect_info(_: IncomingStream<'_, tokio::net::UnixListener>) -> Self {
        Peer::Unix
    }
}

/// The answer.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct ShutdownAnswer {
    status: &'static str,
}

/// Handler of the route. Works while the model loads, too.
pub(crate) async fn shutdown(
    State(app): State<App>,
    peer: Result<ConnectInfo<Peer>, ExtensionRejection>,
    headers: HeaderMap,
) -> Result<Json<ShutdownAnswer>, ApiError> {
    // A peer that is not known is not taken for a local one.
    if !peer.is_ok_and(|ConnectInfo(peer)| comes_from_here(peer, &headers)) {
        return Err(ApiError::forbidden("the server can only be shut down from its own machine, without a proxy"));
    }
    tracing::info!("shutting down: asked to by POST /shutdown");
    app.ask_to_stop();
    Ok(Json(ShutdownAnswer { status: "shutting down" }))
}

/// A local peer that does not speak for somebody else: no proxy's client, no foreign web page in a local browser.
fn comes_from_here(peer: Peer, headers: &HeaderMap) -> bool {
    let is_proxied = ["forwarded", "x-forwarded-for", "x-real-ip"].iter().any(|name| headers.contains_key(*name));
    let from_own_page = |origin: &header::HeaderValue| origin.to_str().is_ok_and(cors::is_loopback);
    peer.is_local() && !is_proxied && headers.get(header::ORIGIN).is_none_or(from_own_page)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_local_peers_that_speak_for_themselves_may_stop_the_server() {
        let local = Peer::Tcp("127.0.0.1".parse().expect("an address"));
        let mapped = Peer::Tcp("::ffff:127.0.0.1".parse().expect("an address"));
        let remote = Peer::Tcp("192.0.2.1".parse().expect("an address"));
        let with = |name: &'static str, value: &'static str| {
            HeaderMap::from_iter([(header::HeaderName::from_static(name), header::HeaderValue::from_static(value))])
        };
        for peer in [local, mapped, Peer::Unix] {
            assert!(comes_from_here(peer, &HeaderMap::new()));
        }
        assert!(!comes_from_here(remote, &HeaderMap::new()));
        assert!(!comes_from_here(local, &with("x-forwarded-for", "192.0.2.1")));
        assert!(!comes_from_here(local, &with("origin", "https://evil.example")));
        assert!(comes_from_here(local, &with("origin", "http://localhost:8080")));
    }
}
