//! Where and when to fail.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use opencoti_plugin_api::Error;
use serde_json::Value;

/// Entries that can fail.
const ENTRIES: [&str; 15] = [
    "create",
    "codecs",
    "open",
    "layout",
    "append",
    "encode_page",
    "decode_page",
    "transform_query",
    "transform_output",
    "query_bytes",
    "prepare_query",
    "score",
    "accumulate",
    "close",
    "destroy",
];

#[derive(Clone, Copy)]
enum Fault {
    Panic,
    Error,
}

/// Counts the calls of one entry and fails when its time has come. Clones share the count.
#[derive(Clone)]
pub(crate) struct Faults {
    plan: Option<(Fault, &'static str)>,
    after: u64,
    calls: Arc<AtomicU64>,
}

impl Faults {
    pub(crate) fn from_config(config: &Value) -> Result<Self, Error> {
        let mut faults = Faults { plan: None, after: 0, calls: Arc::default() };
        for (key, value) in config.as_object().into_iter().flatten() {
            match key.as_str() {
                "panic_in" => faults.plan = Some((Fault::Panic, entry(key, value)?)),
                "error_in" => faults.plan = Some((Fault::Error, entry(key, value)?)),
                "after" => faults.after = value.as_u64().ok_or_else(|| wrong(key, value, "a count"))?,
                _ => return Err(wrong(key, value, "`panic_in`, `error_in` and `after` only")),
            }
        }
        Ok(faults)
    }

    /// Called at the start of each entry.
    pub(crate) fn enter(&self, entry: &str) -> Result<(), Error> {
        match self.plan {
            Some((fault, at)) if at == entry && self.calls.fetch_add(1, Ordering::Relaxed) >= self.after => match fault
            {
                Fault::Panic => panic!("asked to panic in {entry}"),
                Fault::Error => Err(Error::new(format!("asked to fail in {entry}"))),
            },
            _ => Ok(()),
        }
    }

    /// [`Faults::enter`] for entries that return no error: an asked-for error does nothing there.
    pub(crate) fn enter_infallible(&self, entry: &str) {
        let _ = self.enter(entry);
    }
}

fn entry(key: &str, value: &Value) -> Result<&'static str, Error> {
    let found = value.as_str().and_then(|v| ENTRIES.into_iter().find(|e| *e == v));
    found.ok_or_else(|| wrong(key, value, &ENTRIES.join(", ")))
}

fn wrong(key: &str, value: &Value, expected: &str) -> Error {
    Error::new(format!("config key `{key}` of faulty is {value}, expected {expected}"))
}
