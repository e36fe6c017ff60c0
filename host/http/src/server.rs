//! The server: it listens before the model is loaded, serves, and ends in order.

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::connect_info::Connected;
use axum::serve::{IncomingStream, Listener};
use opencoti_engine::api::EngineHandle;
use tokio::net::TcpListener;
#[cfg(unix)]
use tokio::net::UnixListener;

use crate::config::{Listen, ServerConfig};
use crate::routes;
use crate::shutdown::Peer;
use crate::state::{App, DescribePlugins, Phase, Ready, Shared};

/// Why the server can't listen.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    /// The address is taken or not ours.
    #[error("can't listen on {address}: {source}; choose another address or port")]
    Tcp {
        /// What was asked for.
        address: SocketAddr,
        /// Why not.
        source: io::Error,
    },
    /// The socket file can't be made.
    #[error("can't listen on the socket {path}: {source}", path = path.display())]
    Unix {
        /// The file.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// The prefix can't begin a path.
    #[error("api_prefix is {0:?}, expected a path such as /llm, without braces or '*'")]
    Prefix(String),
}

enum Socket {
    Tcp(TcpListener),
    #[cfg(unix)]
    Unix(UnixListener, PathBuf),
}

/// A server that listens.
pub struct Server {
    app: App,
    socket: Socket,
}

/// Tells a server about its model, from any thread.
#[derive(Clone)]
pub struct ServerControl {
    app: App,
}

impl ServerControl {
    /// The model loads; `progress` of 1 is there.
    pub fn set_progress(&self, progress: f32) {
        self.app.set_phase(Phase::Loading(progress.clamp(0.0, 1.0)));
    }

    /// The model is loaded: requests are served from now on.
    ///
    /// `plugins` describes the loaded plugins whenever `/plugins` or `/metrics` is asked for.
    pub fn set_ready(&self, engine: EngineHandle, plugins: DescribePlugins) {
        self.app.set_phase(Phase::Ready(Ready { engine, plugins }));
    }

    /// The model can't be loaded; requests are told why.
    pub fn set_failed(&self, reason: impl Into<String>) {
        self.app.set_phase(Phase::Failed(reason.into()));
    }

    /// Asks the server to end, as `POST /shutdown` does.
    pub fn shutdown(&self) {
        self.app.ask_to_stop();
    }
}

impl Server {
    /// Listens. Connections are taken from now on and answered once [`Server::serve`] runs.
    ///
    /// # Errors
    /// If the address can't be had or the prefix is no path.
    pub async fn bind(config: ServerConfig) -> Result<Self, BindError> {
        let prefix = config.api_prefix.trim_end_matches('/');
        if !prefix.is_empty() && (!prefix.starts_with('/') || prefix.contains(['{', '}', '*', '?', '#', ' '])) {
            return Err(BindError::Prefix(config.api_prefix));
        }
        let socket = match &config.listen {
            Listen::Tcp(address) => {
                let listener = TcpListener::bind(address).await;
                Socket::Tcp(listener.map_err(|source| BindError::Tcp { address: *address, source })?)
            }
            Listen::Unix(path) => unix(path).await.map_err(|source| BindError::Unix { path: path.clone(), source })?,
        };
        Ok(Server { app: Arc::new(Shared::new(config)), socket })
    }

    /// Tells the server about its model.
    pub fn control(&self) -> ServerControl {
        ServerControl { app: Arc::clone(&self.app) }
    }

    /// The address it listens on; `None` for a Unix socket.
    pub fn local_addr(&self) -> Option<SocketAddr> {
        match &self.socket {
            Socket::Tcp(listener) => listener.local_addr().ok(),
            #[cfg(unix)]
            Socket::Unix(..) => None,
        }
    }

    /// The routes, for tests without a connection.
    pub fn router(&self) -> Router {
        routes::router(&self.app)
    }

    /// Serves until `stop` ends or `POST /shutdown` is called, then drains: no new work is taken, running requests may
    /// end within the configured grace, and the engine is stopped.
    ///
    /// # Errors
    /// If the listening socket fails.
    pub async fn serve(self, stop: impl Future<Output = ()> + Send + 'static) -> io::Result<()> {
        let Server { app, socket } = self;
        let router = routes::router(&app);
        let stopping = stop_signal(Arc::clone(&app), stop);
        match socket {
            Socket::Tcp(listener) => run(listener, router, app, stopping).await,
            #[cfg(unix)]
            Socket::Unix(listener, path) => {
                let served = run(listener, router, app, stopping).await;
                if let Err(error) = std::fs::remove_file(&path) {
                    tracing::debug!(path = %path.display(), %error, "the socket file could not be removed");
                }
                served
            }
        }
    }
}

#[cfg(unix)]
async fn unix(path: &std::path::Path) -> io::Result<Socket> {
    use std::os::unix::fs::FileTypeExt;
    // A file that a server left behind; one that still listens is not taken away.
    if std::fs::symlink_metadata(path).is_ok_and(|file| file.file_type().is_socket()) {
        if tokio::net::UnixStream::connect(path).await.is_ok() {
            return Err(io::Error::new(io::ErrorKind::AddrInUse, "another server listens there"));
        }
        std::fs::remove_file(path)?;
    }
    Ok(Socket::Unix(UnixListener::bind(path)?, path.to_owned()))
}

#[cfg(not(unix))]
async fn unix(_: &std::path::Path) -> io::Result<Socket> {
    Err(io::Error::new(io::ErrorKind::Unsupported, "this system has no Unix sockets; give an address and a port"))
}

/// Ends when the server is to stop, with no new work taken from then on and the engine told.
async fn stop_signal(app: App, stop: impl Future<Output = ()>) {
    tokio::select! {
        () = stop => app.ask_to_stop(),
        () = app.stop_asked() => {}
    }
    if let Phase::Ready(ready) = app.set_phase(Phase::Stopping) {
        let grace = app.config.shutdown_grace;
        tokio::spawn(async move {
            if let Err(error) = ready.engine.shutdown(grace).await {
                tracing::debug!(%error, "the engine was gone before it was told to stop");
            }
        });
    }
}

/// Serves until the signal, then waits for open connections, but not longer than the grace and a moment.
async fn run<L>(
    listener: L,
    router: Router,
    app: App,
    signal: impl Future<Output = ()> + Send + 'static,
) -> io::Result<()>
where
    L: Listener,
    L::Addr: std::fmt::Debug,
    Peer: for<'a> Connected<IncomingStream<'a, L>>,
{
    let service = router.into_make_service_with_connect_info::<Peer>();
    let server = axum::serve(listener, service).with_graceful_shutdown(signal);
    let deadline = async {
        app.stop_asked().await;
        tokio::time::sleep(app.config.shutdown_grace + Duration::from_secs(1)).await;
    };
    tokio::select! {
        served = server => served,
        () = deadline => {
            tracing::warn!(running = app.requests.len(), "connections were still open when the time to stop was over");
            Ok(())
        }
    }
}
