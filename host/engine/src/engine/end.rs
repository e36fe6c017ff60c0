//! How requests end: in a finish, an error, a cancellation. Every end gives the slot and what was reserved back.

use crate::api::{EngineError, Event, Finish, RequestId, StopReason};

use super::Core;
use super::choice::Choice;

impl Core {
    /// Ends a choice whose text is complete. Its sequence stays for those who begin like it.
    pub(crate) fn finish(&mut self, slot: usize, reason: StopReason, truncated: bool) {
        let Some(choice) = self.slots[slot].choice.take() else { return };
        if choice.task.request.make_pool.is_some() {
            return self.found_pool(&choice);
        }
        let cached = self.cache.committed(choice.seq).unwrap_or(0);
        self.leave(slot, &choice);
        self.meters.finished(&choice.timings());
        let finish =
            Finish { session_tps: self.slots[slot].rate.tps(), ..choice.finish(slot, reason, truncated, cached) };
        choice.task.send(Event::Done(finish));
    }

    /// Ends a request by an error, wherever its choices are.
    pub(crate) fn fail(&mut self, id: RequestId, error: EngineError) {
        if let Some(waiting) = self.queue.find(id).and_then(|at| self.queue.remove(at)) {
            waiting.task.send(Event::Failed(error));
            return;
        }
        let mut error = Some(error);
        for slot in 0..self.slots.len() {
            if let Some(choice) = self.slots[slot].choice.take_if(|c| c.task.id == id) {
                self.leave(slot, &choice);
                if let Some(error) = error.take() {
                    choice.task.send(Event::Failed(error));
                }
            }
        }
    }

    /// Refuses a request that has not started, and counts why.
    pub(crate) fn refuse(&mut self, task: &super::choice::Task, error: EngineError) {
        self.meters.refused(&error);
        task.send(Event::Failed(error));
    }

    /// Keeps what a choice has computed; in its slot, unless it was to become a pool.
    fn leave(&mut self, slot: usize, choice: &Choice) {
        if choice.task.request.make_pool.is_none() {
            return self.retain(slot, choice.seq);
        }
        if let Err(error) = self.cache.retain(choice.seq) {
            tracing::error!(%error, "a sequence could not be kept");
        }
    }

    /// Gives back what a sequence was promised and keeps its pages until they are needed.
    pub(crate) fn retain(&mut self, slot: usize, seq: opencoti_kv::SeqId) {
        let now = self.tick();
        self.slots[slot].last_used = now;
        self.slots[slot].last = Some(seq);
        self.detached(slot);
        if let Err(error) = self.cache.retain(seq) {
            tracing::error!(%error, "a sequence could not be kept");
        }
    }

    /// Cancels a request; whether it was there.
    pub(crate) fn cancel(&mut self, id: RequestId) -> bool {
        let runs = self.slots.iter().flat_map(|s| &s.choice).any(|c| c.task.id == id);
        let there = runs || self.queue.find(id).is_some();
        if there {
            self.fail(id, EngineError::Unavailable("the request was cancelled".to_owned()));
        }
        there
    }

    /// Frees what belongs to clients that went away, and ends requests whose deadline passed.
    pub(crate) fn drop_departed(&mut self) {
        let gone = self.queue.take_if(|w| w.task.events.is_closed() || w.task.is_late());
        for waiting in gone {
            waiting.task.send(Event::Failed(late()));
        }
        for slot in 0..self.slots.len() {
            let Some(choice) = &self.slots[slot].choice else { continue };
            if choice.task.events.is_closed() || choice.task.is_late() {
                self.fail(choice.task.id, late());
            }
        }
        self.drop_departed_embeds();
    }

    /// Refuses everything that waits.
    pub(crate) fn refuse_queue(&mut self, error: &EngineError) {
        for waiting in self.queue.take_if(|_| true) {
            waiting.task.send(Event::Failed(error.clone()));
        }
    }

    /// Ends everything.
    pub(crate) fn end_all(&mut self, why: &str) {
        self.end_with(&EngineError::Unavailable(why.to_owned()));
    }

    pub(crate) fn end_with(&mut self, error: &EngineError) {
        self.refuse_queue(error);
        self.refuse_embeds(error);
        for slot in 0..self.slots.len() {
            if let Some(id) = self.slots[slot].choice.as_ref().map(|c| c.task.id) {
                self.fail(id, error.clone());
            }
        }
    }
}

fn late() -> EngineError {
    EngineError::TimedOut("the request's deadline passed before it was finished".to_owned())
}
