//! Conversations of surfaces whose messages are made of typed blocks or items: what belongs to one turn becomes one
//! message, and calls and their results must match.

use opencoti_model::chat::{Message, Role, ToolCall};

use crate::error::ApiError;

/// What differs between the surfaces.
#[derive(Clone, Copy)]
pub(crate) struct Rules {
    /// The thing that answers a call, with its article.
    pub(crate) result: &'static str,
    /// The field that names the call.
    pub(crate) id: &'static str,
    /// Consecutive texts of the user are one turn.
    pub(crate) joins_user: bool,
}

/// Collects messages in their order.
pub(crate) struct Turns {
    rules: Rules,
    messages: Vec<Message>,
    /// Calls without a result so far, each with the path where it was made.
    unanswered: Vec<(String, ToolCall)>,
    answered: Vec<ToolCall>,
}

impl Turns {
    /// No message yet.
    pub(crate) fn new(rules: Rules) -> Self {
        Turns { rules, messages: Vec::new(), unanswered: Vec::new(), answered: Vec::new() }
    }

    /// Adds a text of the system.
    pub(crate) fn system(&mut self, text: &str) {
        self.messages.push(Message::text(Role::System, text));
    }

    /// Adds a text of the user.
    pub(crate) fn user(&mut self, text: &str) {
        let joins = self.rules.joins_user;
        match self.messages.last_mut().filter(|last| joins && last.role == Role::User) {
            Some(last) => join(&mut last.content, text),
            None => self.messages.push(Message::text(Role::User, text)),
        }
    }

    /// Adds a text of the assistant.
    pub(crate) fn assistant(&mut self, text: &str) -> Result<(), ApiError> {
        join(&mut self.turn()?.content, text);
        Ok(())
    }

    /// Adds a thought of the assistant.
    pub(crate) fn thought(&mut self, text: &str) -> Result<(), ApiError> {
        join(self.turn()?.reasoning.get_or_insert_default(), text);
        Ok(())
    }

    /// Adds a call of the assistant, made at `path`.
    pub(crate) fn call(&mut self, path: String, call: ToolCall) -> Result<(), ApiError> {
        self.turn()?.tool_calls.push(call.clone());
        self.unanswered.push((path, call));
        Ok(())
    }

    /// Adds the result of a call; `path` is that of the field with the call's id.
    pub(crate) fn result(&mut self, path: &str, id: &str, text: &str) -> Result<(), ApiError> {
        let Some(place) = self.unanswered.iter().position(|(_, call)| call.id == id) else {
            let problem = match self.answered.iter().any(|call| call.id == id) {
                true => "has a result already",
                false => "is the id of no call before it",
            };
            return Err(ApiError::field(path, format!("is {id:?}, which {problem}")));
        };
        let (_, call) = self.unanswered.remove(place);
        let mut message = Message::text(Role::Tool, text);
        message.tool_call_id = Some(call.id.clone());
        message.name = Some(call.name.clone());
        self.messages.push(message);
        self.answered.push(call);
        Ok(())
    }

    /// The messages.
    pub(crate) fn finish(self) -> Result<Vec<Message>, ApiError> {
        self.check_answered()?;
        Ok(self.messages)
    }

    /// The assistant's message of this turn. A new one can't begin before all calls have their results.
    fn turn(&mut self) -> Result<&mut Message, ApiError> {
        if self.messages.last().is_none_or(|last| last.role != Role::Assistant) {
            self.check_answered()?;
            self.messages.push(Message::text(Role::Assistant, ""));
        }
        let last = self.messages.len() - 1;
        Ok(&mut self.messages[last])
    }

    fn check_answered(&self) -> Result<(), ApiError> {
        let Some((path, call)) = self.unanswered.first() else { return Ok(()) };
        let Rules { result, id, .. } = self.rules;
        let problem = format!("calls {:?} and has no result; add {result} with {id} {:?} after it", call.name, call.id);
        Err(ApiError::field(path, problem))
    }
}

/// Appends a text to one that belongs to the same turn.
fn join(text: &mut String, more: &str) {
    if !text.is_empty() && !more.is_empty() {
        text.push('\n');
    }
    text.push_str(more);
}

#[cfg(test)]
mod tests {
    use serde_json::Map;

    use super::*;

    const RULES: Rules = Rules { result: "a tool_result", id: "tool_use_id", joins_user: true };

    fn call(id: &str) -> ToolCall {
        ToolCall { id: id.to_owned(), name: "weather".to_owned(), arguments: Map::new() }
    }

    #[test]
    fn what_the_assistant_says_in_a_row_is_one_message() {
        let mut turns = Turns::new(RULES);
        turns.user("a");
        turns.user("b");
        turns.thought("hm").unwrap();
        turns.assistant("let me see").unwrap();
        turns.call("p".to_owned(), call("c1")).unwrap();
        turns.result("q", "c1", "sunny").unwrap();
        turns.assistant("It is sunny.").unwrap();
        let messages = turns.finish().unwrap();
        let texts: Vec<_> = messages.iter().map(|m| (m.role, m.content.as_str())).collect();
        let expected = [
            (Role::User, "a\nb"),
            (Role::Assistant, "let me see"),
            (Role::Tool, "sunny"),
            (Role::Assistant, "It is sunny."),
        ];
        assert_eq!(texts, expected);
        assert_eq!(messages[1].reasoning.as_deref(), Some("hm"));
        assert_eq!((messages[1].tool_calls.len(), messages[2].name.as_deref()), (1, Some("weather")));
    }

    #[test]
    fn a_call_needs_its_result_before_the_next_turn_and_a_result_its_call() {
        let mut turns = Turns::new(RULES);
        turns.call("messages[0].content[0]".to_owned(), call("c1")).unwrap();
        turns.user("well?");
        let error = turns.assistant("x").unwrap_err();
        assert_eq!(error.param(), Some("messages[0].content[0]"));
        assert!(error.message().contains("tool_use_id \"c1\""), "{}", error.message());
        assert!(turns.result("p", "c2", "").unwrap_err().message().contains("no call before it"));
        turns.result("p", "c1", "").unwrap();
        assert!(turns.result("p", "c1", "").unwrap_err().message().contains("already"));
    }
}
