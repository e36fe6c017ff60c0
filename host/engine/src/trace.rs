//! What the last steps did, for looking at a bad minute.

use std::collections::VecDeque;
use std::time::Instant;

/// Steps that are remembered.
const STEPS: usize = 2048;

/// One step. Times are microseconds since the engine began.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StepTrace {
    /// When it began to be composed,
    pub began: u64,
    /// to run,
    pub planned: u64,
    /// to deliver,
    pub ran: u64,
    /// and when it ended.
    pub ended: u64,
    /// Requests that waited for a slot.
    pub waiting: u32,
    /// Who took part.
    pub rows: Vec<TracedRows>,
}

/// The rows of one sequence in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TracedRows {
    /// Its slot; none for embeddings.
    pub slot: Option<u32>,
    /// The request; 0 for embeddings.
    pub request: u64,
    /// Tokens.
    pub tokens: u32,
    /// Whether it was generating.
    pub decodes: bool,
}

/// The last steps, oldest first.
pub(crate) struct Trace {
    zero: Instant,
    steps: VecDeque<StepTrace>,
}

impl Trace {
    pub(crate) fn new() -> Self {
        Trace { zero: Instant::now(), steps: VecDeque::with_capacity(STEPS) }
    }

    /// Remembers a step in place of the oldest one.
    pub(crate) fn push(&mut self, times: [Instant; 4], waiting: usize, rows: impl Iterator<Item = TracedRows>) {
        let mut step = match self.steps.len() {
            STEPS => self.steps.pop_front().unwrap_or_default(),
            _ => StepTrace::default(),
        };
        let since =
            |at: Instant| u64::try_from(at.saturating_duration_since(self.zero).as_micros()).unwrap_or(u64::MAX);
        [step.began, step.planned, step.ran, step.ended] = times.map(since);
        step.waiting = waiting as u32;
        step.rows.clear();
        step.rows.extend(rows);
        self.steps.push_back(step);
    }

    /// A copy of all.
    pub(crate) fn steps(&self) -> Vec<StepTrace> {
        self.steps.iter().cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_steps_are_forgotten() {
        let mut trace = Trace::new();
        let now = Instant::now();
        for i in 0..STEPS + 10 {
            trace.push([now; 4], i, std::iter::empty());
        }
        let steps = trace.steps();
        assert_eq!((steps.len(), steps[0].waiting, steps[STEPS - 1].waiting), (STEPS, 10, STEPS as u32 + 9));
    }
}
