//! What the server is told before it listens. Plain values: the command line and the config file live elsewhere.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use metrics_exporter_prometheus::PrometheusHandle;

/// Where the server listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Listen {
    /// A TCP address; port 0 takes a free one.
    Tcp(SocketAddr),
    /// A Unix socket; a stale socket file at the path is replaced.
    Unix(PathBuf),
}

/// Which origins a browser may call from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CorsOrigins {
    /// Every origin.
    Any,
    /// `localhost`, `127.0.0.1` and `[::1]` with any scheme and port.
    Localhost,
    /// These origins, written as a browser sends them (`https://example.org`).
    List(Vec<String>),
}

/// Cross-origin rules.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cors {
    /// Origins that may call.
    pub origins: CorsOrigins,
    /// Value of `Access-Control-Allow-Methods`.
    pub methods: String,
    /// Value of `Access-Control-Allow-Headers`; `*` also allows what a preflight asks for by name, because browsers
    /// do not count `Authorization` as part of `*`.
    pub headers: String,
    /// Whether cookies and HTTP authentication may be sent along.
    pub credentials: bool,
}

impl Default for Cors {
    fn default() -> Self {
        Cors {
            origins: CorsOrigins::Any,
            methods: "GET, POST, DELETE, OPTIONS".to_owned(),
            headers: "*".to_owned(),
            credentials: false,
        }
    }
}

/// Everything the server is told.
#[derive(Clone)]
pub struct ServerConfig {
    /// Where to listen.
    pub listen: Listen,
    /// Accepted keys; empty lets everybody in.
    pub api_keys: Vec<String>,
    /// Cross-origin rules.
    pub cors: Cors,
    /// Prefix of every route, such as `/llm`; empty for none.
    pub api_prefix: String,
    /// Serves `GET /slots` and the slot actions.
    pub slots: bool,
    /// Serves `GET /metrics` from this recorder; `None` turns the route off. See [`crate::metrics::install`].
    pub metrics: Option<PrometheusHandle>,
    /// Allows `POST /props`.
    pub props: bool,
    /// Folder of saved slots; `None` turns saving and restoring off.
    pub slot_save_path: Option<PathBuf>,
    /// Longest wait for a request's body.
    pub read_timeout: Duration,
    /// Longest life of a request, queue included; `None` for no bound.
    pub request_timeout: Option<Duration>,
    /// How long running requests may take to end once the server was told to stop.
    pub shutdown_grace: Duration,
    /// Most bytes of a request's body.
    pub body_limit: usize,
    /// Most prompts in one request.
    pub max_prompts: usize,
    /// Names under which the model is served besides its own.
    pub aliases: Vec<String>,
    /// Silence on a stream after which a comment line is sent; `None` for never.
    pub ping_interval: Option<Duration>,
    /// Value of `system_fingerprint` and `build_info`.
    pub build: String,
}

impl Default for ServerConfig {
    fn default() -> Self {
        ServerConfig {
            listen: Listen::Tcp(SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 8080)),
            api_keys: Vec::new(),
            cors: Cors::default(),
            api_prefix: String::new(),
            slots: true,
            metrics: None,
            props: false,
            slot_save_path: None,
            read_timeout: Duration::from_secs(3600),
            request_timeout: None,
            shutdown_grace: Duration::from_secs(10),
            body_limit: 64 << 20,
            max_prompts: 2048,
            aliases: Vec::new(),
            ping_interval: Some(Duration::from_secs(30)),
            build: concat!("opencoti-", env!("CARGO_PKG_VERSION")).to_owned(),
        }
    }
}
