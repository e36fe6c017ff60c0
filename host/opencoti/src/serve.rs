//! `opencoti serve`: listen first, load, then answer.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use opencoti_http::{Cors, CorsOrigins as HttpOrigins, Listen, Server, ServerConfig, ServerControl};

use crate::settings::{CorsOrigins, Settings};
use crate::{boot, plugins};

/// How long running requests may take to end after the server was told to stop.
const GRACE: Duration = Duration::from_secs(10);

/// Runs the server until it is told to stop.
pub fn serve(settings: Settings, print_curl: bool) -> Result<()> {
    if settings.model.is_none() {
        bail!("no model is set; give `--model FILE` or `model.path` in the config");
    }
    runtime()?.block_on(async move {
        let server = bind(&settings).await?;
        let address = address(&settings, &server);
        tracing::info!("listening on {address}");
        let control = server.control();
        let loader = tokio::task::spawn_blocking(move || load(&settings, &control, &address, print_curl));
        let failed = async {
            match loader.await {
                Ok(Ok(())) => std::future::pending().await,
                Ok(Err(e)) => e,
                Err(e) => anyhow::anyhow!("loading broke off: {e}"),
            }
        };
        tokio::select! {
            ended = server.serve(stop_signal()) => ended.context("the server ended"),
            error = failed => Err(error),
        }
    })
}

/// The async side of the program.
pub fn runtime() -> Result<tokio::runtime::Runtime> {
    // Compute has its own threads; the surfaces need few.
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    builder.worker_threads(2).enable_all().build().context("the runtime could not be started")
}

/// Listens as the settings say.
pub async fn bind(settings: &Settings) -> Result<Server> {
    Ok(Server::bind(server_config(settings).await?).await?)
}

/// Loads the model and tells the server; a failure is told to clients, too.
pub fn load(settings: &Settings, control: &ServerControl, address: &str, print_curl: bool) -> Result<()> {
    let loaded = (|| {
        let registry = Arc::new(plugins::load(settings)?);
        let prepared = boot::prepare(settings, &registry, |p| control.set_progress(p))?;
        tracing::info!("ready to start\n{}  {:<14} {address}", prepared.summary, "address");
        let engine = prepared.start(settings, &registry)?;
        control.set_ready(engine, Arc::new(move || serde_json::to_value(registry.describe()).unwrap_or_default()));
        Ok(())
    })();
    if let Err(e) = &loaded {
        control.set_failed(format!("{e:#}"));
    }
    if loaded.is_ok() && print_curl {
        println!(
            "Ready. Try:\n\n  curl {address}/v1/chat/completions -H 'Content-Type: application/json' \\\n    -d \
             '{{\"messages\": [{{\"role\": \"user\", \"content\": \"What is the capital of France?\"}}]}}'\n"
        );
    }
    loaded
}

/// Where clients reach the server.
pub fn address(settings: &Settings, server: &Server) -> String {
    match server.local_addr() {
        Some(address) => format!("http://{address}{}", settings.api_prefix),
        None => settings.host.clone(),
    }
}

/// The first address of a host name.
async fn resolve(host: &str, port: u16) -> Result<SocketAddr> {
    let addresses = tokio::net::lookup_host((host, port)).await;
    let first = addresses.with_context(|| format!("`server.host`: `{host}` can't be resolved"))?.next();
    first.with_context(|| format!("`server.host`: `{host}` has no address"))
}

async fn stop_signal() {
    #[cfg(unix)]
    {
        use tokio::signal::unix::{SignalKind, signal};
        if let Ok(mut terminate) = signal(SignalKind::terminate()) {
            tokio::select! {
                _ = tokio::signal::ctrl_c() => {}
                _ = terminate.recv() => {}
            }
            return;
        }
    }
    if tokio::signal::ctrl_c().await.is_err() {
        std::future::pending::<()>().await;
    }
}

async fn server_config(settings: &Settings) -> Result<ServerConfig> {
    let mut api_keys = settings.api_keys.clone();
    if let Some(file) = &settings.api_key_file {
        let text =
            std::fs::read_to_string(file).with_context(|| format!("the key file {} can't be read", file.display()))?;
        api_keys.extend(text.lines().map(str::trim).filter(|l| !l.is_empty()).map(str::to_owned));
        if api_keys.is_empty() {
            bail!("the key file {} has no keys; without any, every client would be let in", file.display());
        }
    }
    let listen = match settings.host.ends_with(".sock") {
        true => Listen::Unix(PathBuf::from(&settings.host)),
        false => Listen::Tcp(resolve(&settings.host, settings.port).await?),
    };
    let origins = match settings.cors_origins {
        CorsOrigins::Any => HttpOrigins::Any,
        CorsOrigins::Localhost => HttpOrigins::Localhost,
    };
    Ok(ServerConfig {
        listen,
        api_keys,
        cors: Cors { origins, ..Cors::default() },
        api_prefix: settings.api_prefix.clone(),
        slots: settings.slots,
        metrics: settings.metrics.then(opencoti_http::metrics::install).transpose()?,
        props: settings.props,
        slot_save_path: settings.slot_save_path.clone(),
        request_timeout: (settings.timeout > 0).then(|| Duration::from_secs(settings.timeout.into())),
        shutdown_grace: GRACE,
        body_limit: usize::try_from(settings.max_body.0).unwrap_or(usize::MAX),
        ping_interval: u64::try_from(settings.sse_ping_interval).ok().filter(|s| *s > 0).map(Duration::from_secs),
        build: format!("opencoti-{}", env!("CARGO_PKG_VERSION")),
        ..ServerConfig::default()
    })
}
