//! Slots that are opened one at a time, when all others are busy and somebody waits.

use std::time::{Duration, Instant};

use super::Core;

/// The machine's free memory is looked at so often.
const LOOK_EVERY: Duration = Duration::from_millis(100);

impl Core {
    /// Opens one more slot, if it is needed and what [`super::Elastic`] asks for holds.
    pub(crate) fn open_slot(&mut self) {
        let busy = self.slots[..self.open].iter().all(|s| s.choice.is_some());
        let wanted = busy && !self.queue.is_empty() && self.open < self.slots.len();
        if wanted && self.stays_fast() && self.leaves_memory() {
            self.open += 1;
            tracing::info!(slots = self.open, "another slot is open");
        }
    }

    /// Whether each sequence would still have its rate with one more. While one of them has none yet, it is not known.
    fn stays_fast(&self) -> bool {
        let floor = self.config.elastic.tps_floor;
        if floor <= 0.0 {
            return true;
        }
        let rates: Vec<f32> = self.slots.iter().filter(|s| s.choice.is_some()).map(|s| s.rate.tps()).collect();
        let sum: f32 = rates.iter().sum();
        rates.iter().all(|&tps| tps > 0.0) && sum / (rates.len() + 1) as f32 >= floor
    }

    /// Whether the machine has memory to spare: other programs may have taken it since the start.
    fn leaves_memory(&mut self) -> bool {
        let reserve = self.config.elastic.memory_reserve;
        if reserve == 0 {
            return true;
        }
        if let Some((_, leaves)) = self.memory.filter(|(at, _)| at.elapsed() < LOOK_EVERY) {
            return leaves;
        }
        let leaves = opencoti_kv::available_bytes().is_none_or(|free| free >= reserve);
        self.memory = Some((Instant::now(), leaves));
        leaves
    }
}
