//! A plugin's health as the host sees it: calls, failures, quarantine.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Shared by everything made from one plugin. Counting is relaxed: the numbers are for people.
#[derive(Debug, Default)]
pub struct Health {
    quarantined: AtomicBool,
    calls: AtomicU64,
    failures: AtomicU64,
    reason: Mutex<Option<String>>,
}

impl Health {
    /// Counts a control call (calls per tile are not counted: they are too many to be of use).
    pub fn called(&self) {
        self.calls.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a failed call.
    pub fn failed(&self) {
        self.failures.fetch_add(1, Ordering::Relaxed);
    }

    /// Puts the plugin in quarantine: the host makes no further call to it. The first reason is kept.
    pub fn quarantine(&self, reason: &str) {
        if let Ok(mut slot) = self.reason.lock() {
            slot.get_or_insert_with(|| reason.to_owned());
        }
        self.quarantined.store(true, Ordering::Release);
    }

    /// Whether calls are off.
    pub fn is_quarantined(&self) -> bool {
        self.quarantined.load(Ordering::Acquire)
    }

    /// Why.
    pub fn reason(&self) -> Option<String> {
        self.reason.lock().ok().and_then(|r| r.clone())
    }

    /// Control calls so far.
    pub fn calls(&self) -> u64 {
        self.calls.load(Ordering::Relaxed)
    }

    /// Failed calls so far.
    pub fn failures(&self) -> u64 {
        self.failures.load(Ordering::Relaxed)
    }
}
