//! What all handlers share: the configuration, the engine once it is there, and the requests that are running.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::SystemTime;

use axum::extract::FromRequestParts;
use axum::http::request::Parts;
use opencoti_engine::api::{EngineHandle, RequestId};
use tokio::sync::watch;

use crate::config::ServerConfig;
use crate::error::ApiError;

/// Handed to every handler.
pub(crate) type App = Arc<Shared>;

/// Describes the loaded plugins, as `GET /plugins` shows them: an array of objects with at least `name`.
pub type DescribePlugins = Arc<dyn Fn() -> serde_json::Value + Send + Sync>;

/// Where the server stands.
#[derive(Clone)]
pub(crate) enum Phase {
    /// The model loads; 0 … 1 of it is there.
    Loading(f32),
    /// Requests are served.
    Ready(Ready),
    /// The model could not be loaded.
    Failed(String),
    /// No new work is taken.
    Stopping,
}

/// What a ready server has.
#[derive(Clone)]
pub(crate) struct Ready {
    pub(crate) engine: EngineHandle,
    pub(crate) plugins: DescribePlugins,
}

/// State of the server.
pub(crate) struct Shared {
    pub(crate) config: ServerConfig,
    pub(crate) requests: Requests,
    pub(crate) started: SystemTime,
    phase: RwLock<Phase>,
    stop: watch::Sender<bool>,
}

impl Shared {
    pub(crate) fn new(config: ServerConfig) -> Self {
        Shared {
            config,
            requests: Requests::default(),
            started: SystemTime::now(),
            phase: RwLock::new(Phase::Loading(0.0)),
            stop: watch::Sender::new(false),
        }
    }

    pub(crate) fn phase(&self) -> Phase {
        self.phase.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Goes to the next phase and returns the one before. A stopping server stays one.
    pub(crate) fn set_phase(&self, phase: Phase) -> Phase {
        let mut now = self.phase.write().unwrap_or_else(PoisonError::into_inner);
        if matches!(*now, Phase::Stopping) { Phase::Stopping } else { std::mem::replace(&mut now, phase) }
    }

    /// The engine and its company, or the error that a request gets without them.
    pub(crate) fn ready(&self) -> Result<Ready, ApiError> {
        match self.phase() {
            Phase::Ready(ready) if ready.engine.is_alive() => Ok(ready),
            Phase::Ready(_) => Err(ApiError::unavailable("the engine has stopped; restart the server")),
            Phase::Loading(progress) => Err(ApiError::loading(progress)),
            Phase::Failed(reason) => Err(ApiError::unavailable(format!("the model could not be loaded: {reason}"))),
            Phase::Stopping => Err(ApiError::unavailable("the server is shutting down")),
        }
    }

    /// Asks the server to stop.
    pub(crate) fn ask_to_stop(&self) {
        self.stop.send_replace(true);
    }

    /// Ends once the server was asked to stop.
    pub(crate) async fn stop_asked(&self) {
        // The sender lives in `self`, so waiting can't fail.
        let _ = self.stop.subscribe().wait_for(|&asked| asked).await;
    }
}

impl FromRequestParts<App> for Ready {
    type Rejection = ApiError;

    async fn from_request_parts(_: &mut Parts, app: &App) -> Result<Self, ApiError> {
        app.ready()
    }
}

/// The id of an HTTP request, as `X-Request-Id` shows it.
#[derive(Clone, Debug)]
pub(crate) struct HttpId(pub(crate) Arc<str>);

impl FromRequestParts<App> for HttpId {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &App) -> Result<Self, ApiError> {
        parts.extensions.get::<HttpId>().cloned().ok_or_else(|| ApiError::internal("the request has no id"))
    }
}

/// The generations that run for each HTTP request.
#[derive(Default)]
pub(crate) struct Requests(Mutex<HashMap<Arc<str>, Vec<Arc<Entry>>>>);

struct Entry {
    generations: Vec<RequestId>,
    cancelled: AtomicBool,
}

/// Keeps a request in the list until dropped.
pub(crate) struct Registered {
    app: App,
    id: Arc<str>,
    entry: Arc<Entry>,
}

impl Requests {
    /// Lists the generations of a request.
    pub(crate) fn register(app: &App, id: &HttpId, generations: Vec<RequestId>) -> Registered {
        let entry = Arc::new(Entry { generations, cancelled: AtomicBool::new(false) });
        app.requests.lock().entry(Arc::clone(&id.0)).or_default().push(Arc::clone(&entry));
        Registered { app: Arc::clone(app), id: Arc::clone(&id.0), entry }
    }

    /// Marks a request as cancelled and returns its generations; empty when it is not there.
    pub(crate) fn mark_cancelled(&self, id: &str) -> Vec<RequestId> {
        let requests = self.lock();
        let entries = requests.get(id).map_or(&[][..], Vec::as_slice);
        entries
            .iter()
            .flat_map(|entry| {
                entry.cancelled.store(true, Ordering::Relaxed);
                entry.generations.iter().copied()
            })
            .collect()
    }

    /// How many requests run.
    pub(crate) fn len(&self) -> usize {
        self.lock().values().map(Vec::len).sum()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<Arc<str>, Vec<Arc<Entry>>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Registered {
    /// Whether somebody cancelled the request by its id.
    pub(crate) fn is_cancelled(&self) -> bool {
        self.entry.cancelled.load(Ordering::Relaxed)
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        let mut requests = self.app.requests.lock();
        if let Some(entries) = requests.get_mut(&self.id) {
            entries.retain(|entry| !Arc::ptr_eq(entry, &self.entry));
            if entries.is_empty() {
                requests.remove(&self.id);
            }
        }
    }
}
