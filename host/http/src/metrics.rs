//! `GET /metrics`: Prometheus text.
//!
//! Counters and histograms come from the `metrics` facade. The engine counts under llama.cpp's names (`llamacpp:…`), so
//! that dashboards made for it go on working; this crate counts under `opencoti_…`. Gauges of the moment are asked from
//! the engine and the plugins when the text is made.

use std::fmt::Write;
use std::time::UNIX_EPOCH;

use axum::extract::State;
use axum::http::{HeaderName, HeaderValue, header};
use axum::response::{IntoResponse, Response};
use metrics_exporter_prometheus::{BuildError, Matcher, PrometheusBuilder, PrometheusHandle};
use opencoti_engine::api::{StateStats, Stats, StoreStats};
use serde_json::Value;

use crate::error::ApiError;
use crate::plugins;
use crate::state::{App, Ready};

/// Media type of the answer.
pub(crate) const CONTENT_TYPE: &str = "text/plain; version=0.0.4";

/// Buckets for times to the first token and whole answers, in seconds.
const LONG: [f64; 12] = [0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0];

/// Buckets for times between tokens, in seconds.
const SHORT: [f64; 11] = [0.001, 0.0025, 0.005, 0.01, 0.02, 0.035, 0.05, 0.1, 0.25, 0.5, 1.0];

/// Installs the process's recorder. Call once, before the engine starts, or its first counts are lost.
///
/// # Errors
/// If a recorder is installed already.
pub fn install() -> Result<PrometheusHandle, BuildError> {
    PrometheusBuilder::new()
        .set_buckets(&LONG)?
        .set_buckets_for_metric(Matcher::Full("llamacpp:inter_token_seconds".to_owned()), &SHORT)?
        .install_recorder()
}

/// Handler of the route.
pub(crate) async fn metrics(State(app): State<App>, ready: Ready) -> Result<Response, ApiError> {
    let Some(recorder) = &app.config.metrics else {
        return Err(ApiError::unsupported("this server does not keep metrics; start it with --metrics"));
    };
    let stats = ready.engine.stats().await?;
    let mut text = recorder.render();
    text.push_str(&gauges(&stats, &(ready.plugins)(), app.requests.len()));
    let began = app.started.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let headers = [
        (header::CONTENT_TYPE, HeaderValue::from_static(CONTENT_TYPE)),
        (HeaderName::from_static("process-start-time-unix"), HeaderValue::from(began)),
    ];
    Ok((headers, text).into_response())
}

/// One metric with its help and samples.
fn family(out: &mut String, name: &str, kind: &str, help: &str, samples: &[(String, f64)]) {
    if samples.is_empty() {
        return;
    }
    // Writing to a String can't fail.
    let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} {kind}");
    for (labels, value) in samples {
        let _ = writeln!(out, "{name}{labels} {value}");
    }
}

/// `{name="value",…}`.
fn labels<const N: usize>(pairs: [(&str, &str); N]) -> String {
    let escape = |value: &str| value.replace('\\', r"\\").replace('"', "\\\"").replace('\n', r"\n");
    let pairs = pairs.map(|(name, value)| format!("{name}=\"{}\"", escape(value)));
    format!("{{{}}}", pairs.join(","))
}

fn gauges(stats: &Stats, described: &Value, http_running: usize) -> String {
    let mut out = String::new();
    stores(&mut out, stats);
    codecs(&mut out, stats);
    if let Some(state) = &stats.state {
        states(&mut out, state);
    }
    for (name, help, value) in [
        ("opencoti_sequences_retained", "Sequences kept for their prefix.", stats.retained as usize),
        ("opencoti_snapshots", "Snapshots kept at positions of prompts.", stats.snapshots as usize),
        ("opencoti_requests_processing", "Requests in slots.", stats.processing as usize),
        ("opencoti_requests_deferred", "Requests that wait.", stats.deferred as usize),
        ("opencoti_http_requests_running", "HTTP requests with a generation.", http_running),
    ] {
        family(&mut out, name, "gauge", help, &[(String::new(), value as f64)]);
    }
    let plugins = plugins::entries(described);
    family(
        &mut out,
        "opencoti_plugin_healthy",
        "gauge",
        "0 while the plugin is in quarantine.",
        &samples(plugins, healthy),
    );
    let (calls, failures) =
        (samples(plugins, |plugin| plugin["calls"].as_f64()), samples(plugins, |plugin| plugin["failures"].as_f64()));
    family(&mut out, "opencoti_plugin_calls_total", "counter", "Control calls of the plugin.", &calls);
    family(&mut out, "opencoti_plugin_failures_total", "counter", "Calls that failed.", &failures);
    out
}

fn stores(out: &mut String, stats: &Stats) {
    type Count = fn(&StoreStats) -> u64;
    let families: [(&str, &str, Count); 6] = [
        ("opencoti_kv_cells_total", "Token slots of a store.", |store| store.cells_total),
        ("opencoti_kv_cells_used", "Token slots in use, retained prefixes included.", |store| store.cells_used),
        ("opencoti_kv_cells_resident", "Token slots on the device.", |store| store.cells_total),
        ("opencoti_kv_cells_shared", "Token slots that several sequences use.", |store| store.cells_shared),
        ("opencoti_kv_cells_reclaimable", "Token slots that only retained prefixes use.", |store| {
            store.cells_reclaimable
        }),
        ("opencoti_kv_bytes", "Bytes of a store.", |store| store.bytes),
    ];
    for (name, help, count) in families {
        let samples = stats.stores.iter().map(|store| (labels([("store", &store.name)]), count(store) as f64));
        family(out, name, "gauge", help, &samples.collect::<Vec<_>>());
    }
}

/// Which codecs compute on their tiles.
fn codecs(out: &mut String, stats: &Stats) {
    let mut samples = Vec::new();
    for store in &stats.stores {
        let sides = [("k", &store.codecs.0, store.cpu_tiles.0), ("v", &store.codecs.1, store.cpu_tiles.1)];
        for (side, codec, computes) in sides {
            let labels = labels([("store", &store.name), ("side", side), ("codec", codec)]);
            samples.push((labels, f64::from(u8::from(computes))));
        }
    }
    let help = "0 for a codec without CPU tiles: its tiles are decoded before they are read.";
    family(out, "opencoti_kv_codec_cpu_tiles", "gauge", help, &samples);
}

/// Recurrent state, in planes: each is the state of one sequence.
fn states(out: &mut String, state: &StateStats) {
    for (name, help, value) in [
        ("opencoti_state_planes_total", "Planes of recurrent state.", state.planes_total),
        ("opencoti_state_planes_used", "Planes in use, retained prefixes included.", state.planes_used),
        ("opencoti_state_planes_shared", "Planes that several sequences use.", state.planes_shared),
        ("opencoti_state_planes_reclaimable", "Planes that only retained prefixes use.", state.planes_reclaimable),
        ("opencoti_state_bytes", "Bytes of all planes.", state.plane_bytes.saturating_mul(state.planes_total)),
    ] {
        family(out, name, "gauge", help, &[(String::new(), value as f64)]);
    }
}

/// One sample for each plugin that has the value.
fn samples(plugins: &[Value], value: impl Fn(&Value) -> Option<f64>) -> Vec<(String, f64)> {
    let sample = |plugin: &Value| {
        let text = |field: &str| plugin[field].as_str().unwrap_or_default().to_owned();
        Some((labels([("plugin", &text("name")), ("version", &text("version"))]), value(plugin)?))
    };
    plugins.iter().filter_map(sample).collect()
}

fn healthy(plugin: &Value) -> Option<f64> {
    let state = plugin["state"].as_str()?;
    Some(f64::from(u8::from(state != "quarantined")))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn plugins_show_their_health_and_their_calls() {
        let described = json!([
            {"name": "a\"b", "version": "1.0.0", "state": "quarantined", "reason": "it panicked", "calls": 7, "failures": 1},
            {"name": "c", "version": "2.0.0", "state": "active", "calls": 0, "failures": 0},
            {"name": "d", "state": "available"},
        ]);
        let text = gauges(&Stats::default(), &described, 0);
        for line in [
            "opencoti_plugin_healthy{plugin=\"a\\\"b\",version=\"1.0.0\"} 0",
            "opencoti_plugin_healthy{plugin=\"c\",version=\"2.0.0\"} 1",
            "opencoti_plugin_healthy{plugin=\"d\",version=\"\"} 1",
            "opencoti_plugin_calls_total{plugin=\"a\\\"b\",version=\"1.0.0\"} 7",
            "opencoti_plugin_failures_total{plugin=\"a\\\"b\",version=\"1.0.0\"} 1",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is missing in\n{text}");
        }
    }
}
