//! When a pool takes another session.
//!
//! A new session changes the rates by which the next one would be judged. After each there is a *settle window*, in which no
//! other is let in; what the mean rate has lost by then is what a session costs. The times are arguments, so that all of
//! it can be tested without waiting.

use std::time::{Duration, Instant};

use super::{PoolAdmission, Projection};
use crate::api::RequestId;

/// Weight of the newest loss of rate in their average.
const DROP_WEIGHT: f32 = 0.3;

/// So long a mean stands for sessions that are all between turns.
const MEAN_LIVES: Duration = Duration::from_secs(30);

/// The sessions of a pool at one moment.
#[derive(Debug, Default, Clone, Copy, PartialEq)]
pub(crate) struct Load {
    /// Bound to it, running or between turns.
    pub(crate) sessions: u32,
    /// Of those that generate, how many have a rate, and the sum.
    pub(crate) rated: u32,
    pub(crate) tps: f32,
    /// Of those that generate, how many have none yet.
    pub(crate) warming: u32,
}

impl Load {
    /// Mean rate of those that have one.
    pub(crate) fn mean(&self) -> Option<f32> {
        (self.rated > 0).then(|| self.tps / self.rated as f32)
    }
}

/// What is decided about a new session.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Pace {
    /// It may come.
    Free,
    /// It waits until the one before has settled.
    Hold,
    /// It would bring the mean rate to this, below the target.
    Saturated(f32),
}

/// A session whose effect is not known yet.
#[derive(Debug, Clone, Copy)]
struct Settling {
    request: RequestId,
    since: Instant,
    decoded: u32,
    /// Mean rate before it came.
    before: Option<f32>,
    /// Mean rate as it was seen last.
    seen: Option<f32>,
}

/// What a pool has learnt of its sessions.
#[derive(Debug, Default)]
pub(crate) struct Pacing {
    settling: Option<Settling>,
    drop: Option<f32>,
    /// Mean rate as it was last settled, and when.
    settled: Option<(f32, Instant)>,
}

impl Pacing {
    /// A new session was let in.
    pub(crate) fn admitted(&mut self, request: RequestId, load: &Load, now: Instant) {
        let before = load.mean();
        self.settling = Some(Settling { request, since: now, decoded: 0, before, seen: None });
    }

    /// A request of the pool generated a token.
    pub(crate) fn token(&mut self, request: RequestId) {
        if let Some(settling) = self.settling.as_mut().filter(|s| s.request == request) {
            settling.decoded += 1;
        }
    }

    /// Ends the settle window when it is time, or when the request that it is about does not run any more.
    pub(crate) fn settle(
        &mut self,
        settings: &PoolAdmission,
        load: &Load,
        now: Instant,
        runs: impl Fn(RequestId) -> bool,
    ) {
        match &mut self.settling {
            None => self.settled = load.mean().map(|mean| (mean, now)).or(self.settled),
            Some(settling) => settling.seen = load.mean().or(settling.seen),
        }
        let over = |s: &mut Settling| {
            s.decoded >= settings.settle_tokens
                || now.saturating_duration_since(s.since) >= settings.settle_max
                || !runs(s.request)
        };
        let Some(ended) = self.settling.take_if(over) else { return };
        let Some(after) = ended.seen else { return };
        self.settled = Some((after, now));
        if let Some(before) = ended.before {
            let drop = (before - after).max(0.0);
            self.drop = Some(self.drop.map_or(drop, |mean| mean + DROP_WEIGHT * (drop - mean)));
        }
    }

    /// Longest time until the pool is settled; `None` when it is.
    pub(crate) fn remaining(&self, settings: &PoolAdmission, now: Instant) -> Option<Duration> {
        let since = self.settling.as_ref()?.since;
        Some(settings.settle_max.saturating_sub(now.saturating_duration_since(since)))
    }

    /// Mean loss of rate by a new session.
    pub(crate) fn drop_per_admit(&self) -> Option<f32> {
        self.drop
    }

    /// The mean rate with one session more; `None` when nothing was measured.
    pub(crate) fn project(&self, load: &Load, now: Instant) -> Option<Projection> {
        let fresh = self.settled.filter(|(_, at)| now.saturating_duration_since(*at) < MEAN_LIVES);
        let (mean, n, is_idle_estimate) = match load.mean() {
            Some(mean) => (mean, load.rated, false),
            None => (fresh?.0, load.sessions.max(1), true),
        };
        Some(Projection {
            by_model: mean * n as f32 / (n + 1) as f32,
            by_measure: self.drop.map(|drop| (mean - drop).max(0.0)),
            is_idle_estimate,
        })
    }

    /// Decides about a new session.
    pub(crate) fn judge(&self, settings: &PoolAdmission, load: &Load, now: Instant) -> Pace {
        if load.sessions < settings.guarantee_min_sessions {
            return Pace::Free;
        }
        if self.settling.is_some() {
            return Pace::Hold;
        }
        match self.project(load, now) {
            Some(projection) if projection.tps() < settings.target_tps_per_session => Pace::Saturated(projection.tps()),
            _ => Pace::Free,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TARGET: PoolAdmission = PoolAdmission {
        mode: super::super::PoolMode::Enforced,
        target_tps_per_session: 20.0,
        on_saturation: super::super::OnSaturation::Reject,
        guarantee_min_sessions: 1,
        settle_tokens: 48,
        settle_max: Duration::from_millis(5000),
    };

    fn load(rates: &[f32]) -> Load {
        Load { sessions: rates.len() as u32, rated: rates.len() as u32, tps: rates.iter().sum(), warming: 0 }
    }

    #[test]
    fn the_guaranteed_sessions_pass_and_the_next_one_waits_until_they_have_settled() {
        let (mut pacing, start) = (Pacing::default(), Instant::now());
        assert_eq!(pacing.judge(&TARGET, &load(&[]), start), Pace::Free);
        pacing.admitted(RequestId(1), &load(&[]), start);
        let warming = Load { sessions: 1, warming: 1, ..Load::default() };
        assert_eq!(pacing.judge(&TARGET, &warming, start), Pace::Hold);
        assert_eq!(pacing.remaining(&TARGET, start + Duration::from_secs(2)), Some(Duration::from_secs(3)));
        (0..48).for_each(|_| pacing.token(RequestId(1)));
        pacing.settle(&TARGET, &load(&[60.0]), start, |_| true);
        assert_eq!(pacing.remaining(&TARGET, start), None);
        assert_eq!(pacing.judge(&TARGET, &load(&[60.0]), start), Pace::Free);
    }

    #[test]
    fn tokens_of_others_do_not_settle_a_session_but_time_and_its_end_do() {
        let start = Instant::now();
        let settles = |at: Instant, runs: bool| {
            let mut pacing = Pacing::default();
            pacing.admitted(RequestId(1), &load(&[]), start);
            (0..99).for_each(|_| pacing.token(RequestId(2)));
            pacing.settle(&TARGET, &load(&[60.0]), at, |_| runs);
            pacing.remaining(&TARGET, at).is_none()
        };
        assert!(!settles(start + Duration::from_secs(4), true));
        assert!(settles(start + Duration::from_secs(5), true));
        assert!(settles(start, false));
    }

    #[test]
    fn a_projection_goes_by_the_model_until_a_loss_was_measured() {
        let (mut pacing, start) = (Pacing::default(), Instant::now());
        assert_eq!(pacing.judge(&TARGET, &load(&[30.0, 30.0]), start), Pace::Free);
        assert_eq!(pacing.judge(&TARGET, &load(&[27.0, 27.0]), start), Pace::Saturated(18.0));
        pacing.admitted(RequestId(3), &load(&[30.0, 30.0]), start);
        pacing.settle(&TARGET, &load(&[28.0, 28.0, 28.0]), start + Duration::from_secs(5), |_| true);
        assert_eq!(pacing.drop_per_admit(), Some(2.0));
        let projection = pacing.project(&load(&[28.0, 28.0, 28.0]), start).unwrap();
        assert_eq!((projection.by_model, projection.tps()), (21.0, 26.0));
        // Later losses are averaged.
        pacing.admitted(RequestId(4), &load(&[28.0; 3]), start);
        pacing.settle(&TARGET, &load(&[16.0; 4]), start + Duration::from_secs(5), |_| true);
        assert_eq!(pacing.drop_per_admit(), Some(2.0 + 0.3 * 10.0));
        assert_eq!(pacing.judge(&TARGET, &load(&[16.0; 4]), start), Pace::Saturated(11.0));
    }

    #[test]
    fn between_turns_the_last_settled_mean_stands_for_half_a_minute() {
        let (mut pacing, start) = (Pacing::default(), Instant::now());
        pacing.settle(&TARGET, &load(&[30.0, 20.0]), start, |_| true);
        let idle = Load { sessions: 2, ..Load::default() };
        let soon = pacing.project(&idle, start + Duration::from_secs(29)).unwrap();
        assert!(soon.is_idle_estimate && (soon.by_model - 50.0 / 3.0).abs() < 1e-4, "{soon:?}");
        assert_eq!(pacing.project(&idle, start + Duration::from_secs(30)), None);
        assert_eq!(pacing.judge(&TARGET, &idle, start + Duration::from_secs(30)), Pace::Free);
    }
}
