//! What the engine counts, under the names of the HTTP surface.
//!
//! Totals of seconds are gauges that only grow, because the `metrics` crate's counters are whole numbers.

use std::time::Duration;

use metrics::{Counter, Gauge, Histogram, counter, gauge, histogram};
use opencoti_kv::StoreStats;

use crate::api::{EngineError, Timings};

/// Handles of everything that is counted.
pub(crate) struct Meters {
    prompt_tokens: Counter,
    prompt_seconds: Gauge,
    prompt_tokens_cached: Counter,
    predicted_tokens: Counter,
    predicted_seconds: Gauge,
    decodes: Counter,
    most_tokens: Gauge,
    prompt_rate: Gauge,
    predicted_rate: Gauge,
    processing: Gauge,
    deferred: Gauge,
    busy_slots: Gauge,
    ttft: Histogram,
    inter_token: Histogram,
    totals: Totals,
}

#[derive(Default)]
struct Totals {
    prompt: (f64, f64),
    predicted: (f64, f64),
    most_tokens: u32,
    steps: u64,
    busy: u64,
}

impl Meters {
    pub(crate) fn new() -> Self {
        Self {
            prompt_tokens: counter!("llamacpp:prompt_tokens_total"),
            prompt_seconds: gauge!("llamacpp:prompt_seconds_total"),
            prompt_tokens_cached: counter!("llamacpp:prompt_tokens_cached_total"),
            predicted_tokens: counter!("llamacpp:tokens_predicted_total"),
            predicted_seconds: gauge!("llamacpp:tokens_predicted_seconds_total"),
            decodes: counter!("llamacpp:n_decode_total"),
            most_tokens: gauge!("llamacpp:n_tokens_max"),
            prompt_rate: gauge!("llamacpp:prompt_tokens_seconds"),
            predicted_rate: gauge!("llamacpp:predicted_tokens_seconds"),
            processing: gauge!("llamacpp:requests_processing"),
            deferred: gauge!("llamacpp:requests_deferred"),
            busy_slots: gauge!("llamacpp:n_busy_slots_per_decode"),
            ttft: histogram!("llamacpp:ttft_seconds"),
            inter_token: histogram!("llamacpp:inter_token_seconds"),
            totals: Totals::default(),
        }
    }

    /// A prompt was computed.
    pub(crate) fn prompt(&mut self, t: &Timings) {
        self.prompt_tokens.increment(t.prompt_n.into());
        self.prompt_tokens_cached.increment(t.cache_n.into());
        self.prompt_seconds.increment(t.prompt_ms / 1e3);
        self.prompt_rate.set(rate(&mut self.totals.prompt, t.prompt_n, t.prompt_ms));
    }

    /// A choice ended.
    pub(crate) fn finished(&mut self, t: &Timings) {
        self.predicted_tokens.increment(t.predicted_n.into());
        self.predicted_seconds.increment(t.predicted_ms / 1e3);
        self.predicted_rate.set(rate(&mut self.totals.predicted, t.predicted_n, t.predicted_ms));
        self.totals.most_tokens = self.totals.most_tokens.max(t.cache_n + t.prompt_n + t.predicted_n);
        self.most_tokens.set(f64::from(self.totals.most_tokens));
    }

    /// A request was refused before it ran.
    pub(crate) fn refused(&self, error: &EngineError) {
        let reason = match error {
            EngineError::Rejected { reason, .. } => reason,
            EngineError::Invalid { .. } => "invalid",
            EngineError::ExceedsContext { .. } => "context",
            EngineError::Unavailable(_) => "unavailable",
            _ => "other",
        };
        counter!("llamacpp:requests_rejected_total", "reason" => reason).increment(1);
    }

    pub(crate) fn first_token(&self, after: Duration) {
        self.ttft.record(after.as_secs_f64());
    }

    pub(crate) fn inter_token(&self, after: Duration) {
        self.inter_token.record(after.as_secs_f64());
    }

    /// A step ran for `busy` sequences.
    pub(crate) fn step(&mut self, busy: usize) {
        self.decodes.increment(1);
        self.totals.steps += 1;
        self.totals.busy += busy as u64;
        self.busy_slots.set(self.totals.busy as f64 / self.totals.steps as f64);
    }

    pub(crate) fn load(&self, processing: usize, deferred: usize) {
        self.processing.set(processing as f64);
        self.deferred.set(deferred as f64);
    }

    /// Use of each store, in token slots.
    pub(crate) fn cells(&self, stats: &[StoreStats]) {
        for s in stats {
            let set = |name: &'static str, pages: usize| {
                gauge!(name, "store" => s.name.clone()).set(StoreStats::tokens(pages) as f64);
            };
            set("llamacpp:kv_cells_total", s.total);
            set("llamacpp:kv_cells_used", s.total - s.free);
            set("llamacpp:kv_cells_shared", s.shared);
            set("llamacpp:kv_cells_reclaimable", s.reclaimable);
            set("llamacpp:kv_cells_resident", s.total);
        }
    }
}

/// Adds to a pair of tokens and seconds; their quotient.
fn rate(total: &mut (f64, f64), tokens: u32, ms: f64) -> f64 {
    total.0 += f64::from(tokens);
    total.1 += ms / 1e3;
    if total.1 > 0.0 { total.0 / total.1 } else { 0.0 }
}
