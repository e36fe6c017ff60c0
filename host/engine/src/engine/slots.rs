//! Slots: who runs where, and which slot a request gets.

use opencoti_kv::SeqId;

use super::choice::Choice;
use crate::pools::PoolId;
use crate::pools::rate::Rate;

/// A place for one running sequence.
#[derive(Default)]
pub(crate) struct Slot {
    pub(crate) choice: Option<Choice>,
    /// The sequence that ran here last, while the cache keeps it.
    pub(crate) last: Option<SeqId>,
    /// The session that ran here last.
    pub(crate) session: Option<String>,
    /// The pool to which its requests are attached.
    pub(crate) pool: Option<PoolId>,
    /// How fast it generates.
    pub(crate) rate: Rate,
    /// When it was used last, as a count of uses.
    pub(crate) last_used: u64,
}

/// Why there is no slot.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum NoSlot {
    /// The pinned slot is busy: others may go first.
    PinnedBusy,
    /// Too few are idle.
    Busy,
}

/// What a request wants of its slot.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Wish<'a> {
    pub(crate) pinned: Option<u32>,
    pub(crate) session: Option<&'a str>,
    /// The sequence whose prefix it will share.
    pub(crate) donor: Option<SeqId>,
    /// Choices, each with a slot of its own.
    pub(crate) n: usize,
}

/// Picks idle slots, the first choice's first: the pinned one, else that of its session, else that whose last sequence
/// it goes on with, else the least recently used of those that no session has, else of all.
pub(crate) fn pick(slots: &[Slot], wish: Wish<'_>) -> Result<Vec<usize>, NoSlot> {
    let mut idle: Vec<usize> = (0..slots.len()).filter(|&i| slots[i].choice.is_none()).collect();
    if let Some(pinned) = wish.pinned
        && !idle.contains(&(pinned as usize))
    {
        return Err(NoSlot::PinnedBusy);
    }
    if idle.len() < wish.n {
        return Err(NoSlot::Busy);
    }
    idle.sort_by_key(|&i| {
        let slot = &slots[i];
        let preferred = wish.pinned == Some(i as u32);
        let of_session = wish.session.is_some() && slot.session.as_deref() == wish.session;
        // Whose session comes back wants to find its own.
        let of_another = slot.session.is_some() && !of_session;
        let of_prefix = wish.donor.is_some() && slot.last == wish.donor && !(of_another && wish.session.is_some());
        (!preferred, !of_session, !of_prefix, of_another, slot.last_used)
    });
    idle.truncate(wish.n);
    Ok(idle)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slots(sessions: &[Option<&str>]) -> Vec<Slot> {
        let slot = |(i, s): (usize, &Option<&str>)| Slot {
            session: s.map(str::to_owned),
            last_used: 10 - i as u64,
            ..Slot::default()
        };
        sessions.iter().enumerate().map(slot).collect()
    }

    #[test]
    fn the_pin_beats_the_session_and_the_session_beats_the_least_recent() {
        let slots = slots(&[None, Some("a"), None]);
        let first = |wish| pick(&slots, wish).unwrap()[0];
        assert_eq!(first(Wish { n: 1, ..Wish::default() }), 2);
        assert_eq!(first(Wish { n: 1, session: Some("a"), ..Wish::default() }), 1);
        assert_eq!(first(Wish { n: 1, session: Some("b"), ..Wish::default() }), 2);
        assert_eq!(pick(&slots, Wish { n: 3, ..Wish::default() }), Ok(vec![2, 0, 1]), "a session's slot last");
        assert_eq!(first(Wish { n: 1, session: Some("a"), pinned: Some(0), ..Wish::default() }), 0);
    }

    #[test]
    fn several_choices_need_as_many_slots() {
        let slots = slots(&[None, None]);
        assert_eq!(pick(&slots, Wish { n: 2, ..Wish::default() }), Ok(vec![1, 0]));
        assert_eq!(pick(&slots, Wish { n: 3, ..Wish::default() }), Err(NoSlot::Busy));
        assert_eq!(pick(&slots, Wish { n: 1, pinned: Some(5), ..Wish::default() }), Err(NoSlot::PinnedBusy));
    }
}
