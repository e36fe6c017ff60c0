//! Compiles constraints on a thread of its own, so that a large schema does not hold up those who decode.
//!
//! The last few compiled constraints are kept: tools and schemas come again with every turn of a conversation.

use std::collections::VecDeque;
use std::sync::{Arc, mpsc};

use tokio::sync::mpsc::UnboundedSender;

use crate::api::{Constraint, EngineError, RequestId};
use crate::constraint::{ConstraintError, ConstraintFactory, Grammar, Matcher};
use crate::vocab::Vocab;

/// How many compiled constraints are kept.
const KEPT: usize = 32;

/// A request's constraint, compiled or refused.
pub(crate) struct Compiled {
    pub(crate) id: RequestId,
    pub(crate) matcher: Result<Matcher, EngineError>,
}

struct Job {
    id: RequestId,
    constraint: Constraint,
    field: String,
}

/// The engine's end of the compiling thread. The thread ends when this is dropped.
pub(crate) struct Compiler {
    jobs: mpsc::Sender<Job>,
}

impl Compiler {
    /// Starts the thread. The vocabulary's trie is built with the first constraint. `deliver` wraps what is done.
    pub(crate) fn spawn<T: Send + 'static>(
        vocab: Arc<Vocab>,
        done: UnboundedSender<T>,
        deliver: fn(Compiled) -> T,
    ) -> std::io::Result<Self> {
        let (jobs, queue) = mpsc::channel::<Job>();
        std::thread::Builder::new().name("constraints".to_owned()).spawn(move || {
            let mut workshop = Workshop { vocab, factory: None, kept: VecDeque::new() };
            for job in queue {
                let compiled = Compiled { id: job.id, matcher: workshop.compile(job.constraint, &job.field) };
                if done.send(deliver(compiled)).is_err() {
                    return;
                }
            }
        })?;
        Ok(Self { jobs })
    }

    /// Hands a constraint over. `field` is the body field that it came from.
    pub(crate) fn compile(&self, id: RequestId, constraint: Constraint, field: String) -> Result<(), EngineError> {
        let gone = |_| EngineError::Internal("the thread that compiles grammars has stopped".to_owned());
        self.jobs.send(Job { id, constraint, field }).map_err(gone)
    }
}

struct Workshop {
    vocab: Arc<Vocab>,
    factory: Option<ConstraintFactory>,
    /// Newest last.
    kept: VecDeque<(Constraint, Matcher)>,
}

impl Workshop {
    fn compile(&mut self, constraint: Constraint, field: &str) -> Result<Matcher, EngineError> {
        if let Some(i) = self.kept.iter().position(|(known, _)| *known == constraint)
            && let Some(entry) = self.kept.remove(i)
        {
            let matcher = entry.1.clone();
            self.kept.push_back(entry);
            return Ok(matcher);
        }
        let matcher = self.build(&constraint).map_err(|e| e.in_field(field))?;
        if self.kept.len() == KEPT {
            self.kept.pop_front();
        }
        self.kept.push_back((constraint, matcher.clone()));
        Ok(matcher)
    }

    fn build(&mut self, constraint: &Constraint) -> Result<Matcher, ConstraintError> {
        let factory = match &mut self.factory {
            Some(factory) => factory,
            none => none.insert(ConstraintFactory::new(&self.vocab)?),
        };
        factory.compile(match constraint {
            Constraint::Gbnf(text) => Grammar::Gbnf(text),
            Constraint::JsonSchema(schema) => Grammar::JsonSchema(schema),
            Constraint::JsonObject => Grammar::JsonObject,
            Constraint::Lark(text) => Grammar::Lark(text),
        })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn workshop() -> Workshop {
        let tokens = (0..=255u8).map(|b| (vec![b], false)).collect();
        Workshop { vocab: Arc::new(Vocab::new(tokens, &[])), factory: None, kept: VecDeque::new() }
    }

    #[test]
    fn a_refusal_names_the_field_and_the_path_in_it() {
        let schema = Constraint::JsonSchema(json!({"properties": {"a": {"not": {}}}}));
        let error = workshop().compile(schema, "response_format.json_schema.schema").unwrap_err();
        let EngineError::Invalid { field, message } = error else { panic!("{error}") };
        assert_eq!(field.as_deref(), Some("response_format.json_schema.schema.properties.a.not"));
        assert!(message.starts_with("Field 'response_format.json_schema.schema.properties.a.not': "), "{message}");
    }

    #[test]
    fn a_constraint_is_compiled_once_and_each_request_begins_it_anew() {
        let mut workshop = workshop();
        let constraint = Constraint::Gbnf("root ::= \"a\"".to_owned());
        let mut first = workshop.compile(constraint.clone(), "grammar").unwrap();
        first.commit(b'a'.into()).unwrap();
        let second = workshop.compile(constraint, "grammar").unwrap();
        assert!(first.is_finished() && !second.is_finished());
        assert_eq!(workshop.kept.len(), 1);
    }

    #[test]
    fn only_so_many_are_kept() {
        let mut workshop = workshop();
        for i in 0..KEPT + 5 {
            workshop.compile(Constraint::Gbnf(format!("root ::= \"{i}\"")), "grammar").unwrap();
        }
        assert_eq!(workshop.kept.len(), KEPT);
    }
}
