//! Repetition, frequency and presence penalties over the last tokens.

use std::collections::HashMap;

use super::candidates::Candidates;

/// Counts of the tokens in a sliding window, and the penalties that go with them.
#[derive(Debug, Clone)]
pub(crate) struct Penalties {
    repeat: f32,
    frequency: f32,
    presence: f32,
    counts: HashMap<u32, u32>,
}

impl Penalties {
    pub(crate) fn new(repeat: f32, frequency: f32, presence: f32) -> Self {
        Self { repeat, frequency, presence, counts: HashMap::new() }
    }

    pub(crate) fn is_active(&self) -> bool {
        self.repeat != 1.0 || self.frequency != 0.0 || self.presence != 0.0
    }

    /// `entering` joins the window and `leaving`, if the window was full, goes.
    pub(crate) fn slide(&mut self, entering: u32, leaving: Option<u32>) {
        *self.counts.entry(entering).or_insert(0) += 1;
        let Some(leaving) = leaving else { return };
        if let Some(count) = self.counts.get_mut(&leaving) {
            *count -= 1;
            if *count == 0 {
                self.counts.remove(&leaving);
            }
        }
    }

    /// A repeated token's logit moves away from "likely" by the factor `repeat` (divided if positive, multiplied if
    /// not) and loses `count · frequency + presence`.
    pub(crate) fn apply(&self, c: &mut Candidates) {
        if !self.is_active() || self.counts.is_empty() {
            return;
        }
        let penalty = |(&id, &count): (&u32, &u32)| {
            let loss = finite(count as f32 * self.frequency + self.presence);
            (id, move |logit: f32| {
                let scaled = if logit > 0.0 { logit / self.repeat } else { logit * self.repeat };
                finite(finite(scaled) - loss)
            })
        };
        c.adjust(self.counts.iter().map(penalty));
    }
}

/// Absurd penalties saturate; they never become infinite or NaN.
fn finite(x: f32) -> f32 {
    x.clamp(f32::MIN, f32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn penalised(repeat: f32, frequency: f32, presence: f32) -> Vec<f32> {
        let mut penalties = Penalties::new(repeat, frequency, presence);
        for id in [0, 1, 1] {
            penalties.slide(id, None);
        }
        let mut c = Candidates::default();
        c.fill(&[2.0, -2.0, 2.0], |_| true);
        penalties.apply(&mut c);
        c.items.iter().map(|c| c.logit).collect()
    }

    #[test]
    fn each_penalty_does_its_arithmetic() {
        assert_eq!(penalised(1.0, 0.0, 0.0), [2.0, -2.0, 2.0]);
        assert_eq!(penalised(2.0, 0.0, 0.0), [1.0, -4.0, 2.0]);
        assert_eq!(penalised(1.0, 0.5, 0.0), [1.5, -3.0, 2.0]);
        assert_eq!(penalised(1.0, 0.0, 0.25), [1.75, -2.25, 2.0]);
    }

    #[test]
    fn a_token_that_left_the_window_is_forgiven() {
        let mut penalties = Penalties::new(1.0, 1.0, 0.0);
        penalties.slide(0, None);
        penalties.slide(1, Some(0));
        let mut c = Candidates::default();
        c.fill(&[0.0, 0.0], |_| true);
        penalties.apply(&mut c);
        assert_eq!(c.items.iter().map(|c| c.logit).collect::<Vec<_>>(), [0.0, -1.0]);
    }
}
