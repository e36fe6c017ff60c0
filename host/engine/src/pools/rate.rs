//! How fast a session generates: a moving average of the time between its tokens.

use std::time::Instant;

/// Seconds over which it is averaged.
const HORIZON: f32 = 2.0;

/// Fewer intervals say nothing yet.
const LEAST_INTERVALS: u32 = 4;

/// The rate of one session. What passes between two answers does not count.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Rate {
    /// Mean seconds between tokens.
    interval: f32,
    intervals: u32,
    /// When the last token came, while it generates.
    last: Option<Instant>,
}

impl Rate {
    /// A token came.
    pub(crate) fn token(&mut self, now: Instant) {
        let Some(last) = self.last.replace(now) else { return };
        let dt = now.saturating_duration_since(last).as_secs_f32();
        self.intervals = self.intervals.saturating_add(1);
        // A plain mean at first.
        let weight = (1.0 - (-dt / HORIZON).exp()).max(1.0 / self.intervals as f32);
        self.interval += weight * (dt - self.interval);
    }

    /// The answer ended.
    pub(crate) fn pause(&mut self) {
        self.last = None;
    }

    /// Tokens a second; 0 until it is known.
    pub(crate) fn tps(&self) -> f32 {
        match self.intervals >= LEAST_INTERVALS && self.interval > 0.0 {
            true => 1.0 / self.interval,
            false => 0.0,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn after(rate: &mut Rate, start: Instant, n: u32, ms: u64) -> Instant {
        (1..=n).fold(start, |_, i| {
            let now = start + Duration::from_millis(ms) * i;
            rate.token(now);
            now
        })
    }

    #[test]
    fn a_rate_is_known_after_a_few_tokens_and_follows_a_change() {
        let (mut rate, start) = (Rate::default(), Instant::now());
        let now = after(&mut rate, start, 4, 20);
        assert_eq!(rate.tps(), 0.0);
        let now = after(&mut rate, now, 200, 20);
        assert!((rate.tps() - 50.0).abs() < 0.1, "{}", rate.tps());
        let now = after(&mut rate, now, 80, 100);
        assert!((rate.tps() - 10.0).abs() < 1.0, "{}", rate.tps());
        // The pause between two answers is no interval.
        rate.pause();
        rate.token(now + Duration::from_secs(60));
        assert!((rate.tps() - 10.0).abs() < 1.0, "{}", rate.tps());
    }
}
