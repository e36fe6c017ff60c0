//! Requests that wait for a slot, by priority, first come first served.

use std::collections::VecDeque;

use crate::api::RequestId;
use crate::constraint::Matcher;

use super::choice::Task;

/// A waiting request.
pub(crate) struct Waiting {
    pub(crate) task: Task,
    pub(crate) constraint: Constraint,
}

/// State of its constraint.
pub(crate) enum Constraint {
    None,
    Compiling,
    Ready(Box<Matcher>),
}

pub(crate) struct Queue {
    waiting: VecDeque<Waiting>,
    most: usize,
}

impl Queue {
    pub(crate) fn new(most: usize) -> Self {
        Self { waiting: VecDeque::new(), most }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    pub(crate) fn len(&self) -> usize {
        self.waiting.len()
    }

    pub(crate) fn is_full(&self) -> bool {
        self.waiting.len() >= self.most
    }

    /// Puts a request behind those of its priority.
    pub(crate) fn push(&mut self, waiting: Waiting) {
        let priority = waiting.task.request.priority;
        let at = self.waiting.partition_point(|w| w.task.request.priority >= priority);
        self.waiting.insert(at, waiting);
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Waiting> {
        self.waiting.iter()
    }

    pub(crate) fn get(&self, at: usize) -> Option<&Waiting> {
        self.waiting.get(at)
    }

    pub(crate) fn remove(&mut self, at: usize) -> Option<Waiting> {
        self.waiting.remove(at)
    }

    pub(crate) fn find(&self, id: RequestId) -> Option<usize> {
        self.waiting.iter().position(|w| w.task.id == id)
    }

    pub(crate) fn get_mut(&mut self, at: usize) -> Option<&mut Waiting> {
        self.waiting.get_mut(at)
    }

    /// Takes out those of which `gone` holds.
    pub(crate) fn take_if(&mut self, gone: impl Fn(&Waiting) -> bool) -> VecDeque<Waiting> {
        let (out, left) = std::mem::take(&mut self.waiting).into_iter().partition(gone);
        self.waiting = left;
        out
    }
}
