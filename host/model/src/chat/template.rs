//! Rendering a conversation by a model's own chat template, and finding out by trial what the template can do.
//!
//! Templates differ in what they support and say so nowhere. [`ChatTemplate::new`] renders a few small conversations and
//! looks for what they said; what a template leaves out is then written into the text of the messages.

use minijinja::value::Serde;
use minijinja::{Environment, Value as Jinja};
use serde_json::{Map, Value, json};
use time::OffsetDateTime;

use super::jinja;
use super::messages::{Message, MessageError, Role};
use super::output::{CallSyntax, OutputEvent, OutputFormat, OutputParser, ThoughtSyntax};
use super::tools::{self, Tool, parse_tools};

/// Why a template can't be used or a conversation not be rendered.
#[derive(Debug, thiserror::Error)]
pub enum ChatError {
    #[error("the chat template is not valid Jinja: {0}")]
    Syntax(String),
    #[error("the chat template refuses this conversation: {0}")]
    Refused(String),
    #[error("the chat template can render no conversation at all, not even one user message: {0}")]
    Useless(String),
    #[error(transparent)]
    Request(#[from] MessageError),
}

/// What a template was found to do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Capabilities {
    /// System messages appear in the prompt.
    pub system: bool,
    /// Tool definitions appear in the prompt.
    pub tools: bool,
    /// The tool calls of assistant messages appear in the prompt.
    pub tool_calls: bool,
    /// Tool messages appear in the prompt.
    pub tool_results: bool,
    /// How the model writes calls, if that was found out; the template's own form of calls is read back by its parser.
    pub call_syntax: Option<CallSyntax>,
    /// Content must be an array of parts, not a string.
    pub typed_content: bool,
    /// Arguments of calls are passed as objects, not as JSON strings.
    pub object_arguments: bool,
    /// How the model marks thoughts, if the template knows any.
    pub thought_syntax: Option<ThoughtSyntax>,
    /// Thoughts of the history go by the name `thinking`, not `reasoning_content`.
    pub thinking_field: bool,
}

impl Capabilities {
    /// Whether the model's own way of calling tools is used: the template shows tools and results, and it is known how
    /// calls look. Otherwise tools, calls and results are written into the messages.
    pub fn native_tools(&self) -> bool {
        self.tools && self.tool_results && self.call_syntax.is_some()
    }
}

/// How the prompt ends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Ending {
    /// With the beginning of an assistant turn.
    #[default]
    Generate,
    /// Inside the last assistant message, which the model continues.
    Continue,
    /// After the last message.
    Closed,
}

impl Ending {
    /// The ending that a request's `add_generation_prompt` and `continue_final_message` ask for. A trailing assistant
    /// message is continued unless the request says otherwise.
    ///
    /// # Errors
    /// If both are true, or if the last message isn't the assistant's and is to be continued.
    pub fn choose(
        messages: &[Message],
        add_generation_prompt: Option<bool>,
        continue_final_message: Option<bool>,
    ) -> Result<Self, MessageError> {
        let ends_with_assistant = messages.last().is_some_and(|last| last.role == Role::Assistant);
        let path = "continue_final_message";
        match (add_generation_prompt, continue_final_message) {
            (Some(true), Some(true)) => {
                Err(MessageError::new(path, "and add_generation_prompt are both true; they exclude each other"))
            }
            (_, Some(true)) if !ends_with_assistant => {
                Err(MessageError::new(path, "is true, but the last message is not the assistant's"))
            }
            (_, Some(true)) => Ok(Self::Continue),
            (Some(false), _) => Ok(Self::Closed),
            (None, None) if ends_with_assistant => Ok(Self::Continue),
            _ => Ok(Self::Generate),
        }
    }
}

/// A conversation to render.
#[derive(Clone, Copy, Debug)]
pub struct ChatRequest<'a> {
    pub messages: &'a [Message],
    pub tools: &'a [Tool],
    pub ending: Ending,
    /// `chat_template_kwargs`: more variables for the template.
    pub kwargs: &'a Map<String, Value>,
    /// What the template takes for the present.
    pub now: OffsetDateTime,
}

/// A rendered conversation.
#[derive(Clone, Debug, PartialEq)]
pub struct Rendered {
    /// The prompt; encode it with `parse_special`. It begins with the beginning token's text if the template prints it.
    pub prompt: String,
    /// What to look for in the output.
    pub output: OutputFormat,
}

/// A compiled chat template.
pub struct ChatTemplate {
    env: Environment<'static>,
    source: String,
    bos: String,
    eos: String,
    capabilities: Capabilities,
}

/// Marks the place where a continued message ends; no tokenizer's marker and no one's text.
const CUT: &str = "\u{10fffd}cut\u{10fffd}";

impl ChatTemplate {
    /// Compiles a template and finds out what it can do. `bos` and `eos` are the texts of these tokens, or empty.
    ///
    /// # Errors
    /// If it is no valid Jinja, or can't render a conversation of one user message.
    pub fn new(source: &str, bos: &str, eos: &str) -> Result<Self, ChatError> {
        let env = jinja::environment(source).map_err(|e| ChatError::Syntax(describe(&e)))?;
        let (bos, eos) = (bos.to_owned(), eos.to_owned());
        let mut template = Self { env, source: source.to_owned(), bos, eos, capabilities: Capabilities::default() };
        template.probe()?;
        Ok(template)
    }

    /// The template's text.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// What the template was found to do.
    pub fn capabilities(&self) -> Capabilities {
        self.capabilities
    }

    /// Renders a conversation. What the template has no form for is written into the messages: system text goes before
    /// the first user text, tools become a system text, calls and results become text. So do tools whose definitions
    /// the template's own tool syntax can't cope with.
    ///
    /// # Errors
    /// If the template raises an exception, with its message.
    pub fn render(&self, request: ChatRequest) -> Result<Rendered, ChatError> {
        let native = self.capabilities.native_tools();
        let rendered = self.render_with(request, native);
        if rendered.is_err() && native && !request.tools.is_empty() {
            return self.render_with(request, false).or(rendered);
        }
        rendered
    }

    fn render_with(&self, request: ChatRequest, native_tools: bool) -> Result<Rendered, ChatError> {
        let mut messages = self.adapt(request.messages, request.tools, native_tools);
        let definitions: Vec<&Value> =
            request.tools.iter().filter(|_| native_tools).map(|tool| &tool.definition).collect();
        let render = |messages: &[Message], generate: bool| {
            self.render_messages(messages, &definitions, generate, request.kwargs, request.now)
        };
        let continued = match messages.last_mut() {
            Some(last) if request.ending == Ending::Continue => {
                let content = last.content.clone();
                last.content.push_str(CUT);
                Some(content)
            }
            _ => None,
        };
        let mut prompt = render(&messages, request.ending == Ending::Generate)?;
        if let Some(content) = &continued {
            match prompt.rfind(CUT) {
                Some(cut) => prompt.truncate(cut),
                // The template dropped the text or changed it; begin the turn and repeat the text.
                None => {
                    messages.pop();
                    prompt = render(&messages, true)? + content;
                }
            }
        }
        let output = self.output_format(&prompt, continued.as_deref(), request, native_tools);
        Ok(Rendered { prompt, output })
    }

    fn output_format(
        &self,
        prompt: &str,
        continued: Option<&str>,
        request: ChatRequest,
        native_tools: bool,
    ) -> OutputFormat {
        let thought_syntax = self.capabilities.thought_syntax.unwrap_or_default();
        let (open, close) = thought_syntax.markers();
        let in_thought = match (continued, request.ending) {
            (Some(content), _) => content.rfind(open) > content.rfind(close),
            (None, Ending::Generate) => prompt.trim_end().ends_with(open),
            (None, _) => false,
        };
        OutputFormat {
            thoughts: self.capabilities.thought_syntax.is_some(),
            in_thought,
            thought_syntax,
            call_syntax: self.capabilities.call_syntax.filter(|_| native_tools).unwrap_or_default(),
            tools: request.tools.into(),
        }
    }

    /// Brings the messages into a form the template has.
    fn adapt(&self, messages: &[Message], tools: &[Tool], native_tools: bool) -> Vec<Message> {
        let mut messages = messages.to_vec();
        let found = self.capabilities;
        if !native_tools {
            messages = messages.iter().map(|message| tools::calls_as_text(message, CallSyntax::Hermes)).collect();
            messages = tools::results_as_text(&messages);
            if !tools.is_empty() {
                add_system_text(&mut messages, &tools::tools_as_text(tools));
            }
        } else if let Some(syntax) = found.call_syntax.filter(|_| !found.tool_calls) {
            messages = messages.iter().map(|message| tools::calls_as_text(message, syntax)).collect();
        }
        if !found.system {
            fold_system_text(&mut messages);
        }
        messages
    }

    fn render_messages(
        &self,
        messages: &[Message],
        tools: &[&Value],
        add_generation_prompt: bool,
        kwargs: &Map<String, Value>,
        now: OffsetDateTime,
    ) -> Result<String, ChatError> {
        let messages = messages.iter().map(|message| message.to_json(&self.capabilities)).collect();
        self.run(Value::Array(messages), tools, add_generation_prompt, kwargs, now)
            .map_err(|e| ChatError::Refused(describe(&e)))
    }

    fn run(
        &self,
        messages: Value,
        tools: &[&Value],
        add_generation_prompt: bool,
        kwargs: &Map<String, Value>,
        now: OffsetDateTime,
    ) -> Result<String, minijinja::Error> {
        let mut variables = kwargs.clone();
        variables.insert("messages".into(), messages);
        variables.insert("add_generation_prompt".into(), add_generation_prompt.into());
        variables.insert("bos_token".into(), self.bos.clone().into());
        variables.insert("eos_token".into(), self.eos.clone().into());
        let tools = if tools.is_empty() { Value::Null } else { json!(tools) };
        variables.insert("tools".into(), tools);
        let globals = minijinja::context! { strftime_now => jinja::strftime(now) };
        let context = minijinja::context! { ..Jinja::from(Serde(variables)), ..globals };
        self.env.get_template("chat")?.render(context)
    }

    /// Renders small conversations and looks for what they said.
    fn probe(&mut self) -> Result<(), ChatError> {
        self.capabilities.thought_syntax =
            ThoughtSyntax::ALL.into_iter().find(|syntax| speaks_of(&self.source, *syntax));
        self.capabilities.thinking_field =
            !self.source.contains("reasoning_content") && self.source.contains("message.thinking");
        let plain = self.try_render(json!([{"role": "user", "content": "needle-user"}]));
        if !plain.as_ref().is_ok_and(|text| text.contains("needle-user")) {
            let typed = json!([{"role": "user", "content": [{"type": "text", "text": "needle-user"}]}]);
            match (self.try_render(typed), plain) {
                (Ok(text), _) if text.contains("needle-user") => self.capabilities.typed_content = true,
                (_, Err(error)) => return Err(ChatError::Useless(describe(&error))),
                (_, Ok(_)) => return Err(ChatError::Useless("the message's text is not in the prompt".into())),
            }
        }
        let system = Message::text(Role::System, "needle-system");
        let user = Message::text(Role::User, "needle-user");
        self.capabilities.system = self.shows("needle-system", &[&system, &user], &[]);
        self.probe_tools(&user);
        Ok(())
    }

    fn probe_tools(&mut self, user: &Message) {
        let tool = json!({"type": "function", "function": {
            "name": "needle_tool", "description": "x",
            "parameters": {"type": "object", "properties": {"needle_arg": {"type": "string", "description": "x"}},
                           "required": ["needle_arg"]},
        }});
        let mut call = Message::text(Role::Assistant, "");
        let arguments = Map::from_iter([("needle_arg".to_owned(), Value::from("needle-value"))]);
        // Nine letters or digits: some templates insist on it.
        call.tool_calls.push(super::ToolCall { id: "call00001".into(), name: "needle_tool".into(), arguments });
        let mut result = Message::text(Role::Tool, "needle-result");
        result.tool_call_id = Some("call00001".into());
        result.name = Some("needle_tool".into());
        self.capabilities.tools = self.shows("needle_tool", &[user], &[&tool]);
        self.capabilities.object_arguments = true;
        let conversation = [user, &call, &result];
        if !self.shows("needle-value", &conversation, &[]) {
            self.capabilities.object_arguments = false;
        }
        self.capabilities.tool_calls = self.shows("needle-value", &conversation, &[]);
        self.capabilities.tool_results = self.shows("needle-result", &conversation, &[]);
        self.capabilities.call_syntax = match self.capabilities.tool_calls {
            true => self.probe_calls(&conversation, &tool),
            false => self.call_syntax_of_words(),
        };
    }

    /// The syntax whose parser reads back a call that the template has rendered.
    fn probe_calls(&self, conversation: &[&Message; 3], tool: &Value) -> Option<CallSyntax> {
        let prompt = self.try_messages(&conversation[..1], &[tool], true).unwrap_or_default();
        let closed = (2..=3).map(|n| self.try_messages(&conversation[..n], &[tool], false).unwrap_or_default());
        let answers: Vec<String> = closed.map(|closed| answer_behind(&prompt, &closed).to_owned()).collect();
        let reads = |syntax: CallSyntax, answer: &str| {
            let tools = parse_tools(&json!([tool])).unwrap_or_default().into();
            let mut parser =
                OutputParser::new(OutputFormat { call_syntax: syntax, tools, ..OutputFormat::default() }, "");
            let mut arguments = String::new();
            let mut names = Vec::new();
            for event in parser.push(answer).into_iter().chain(parser.finish()) {
                match event {
                    OutputEvent::ToolCallStart { name, .. } => names.push(name),
                    OutputEvent::ToolArguments { delta, .. } => arguments.push_str(&delta),
                    _ => {}
                }
            }
            let arguments: Value = serde_json::from_str(&arguments).unwrap_or_default();
            names == ["needle_tool"] && arguments == json!({"needle_arg": "needle-value"})
        };
        CallSyntax::ALL.into_iter().find(|&syntax| answers.iter().any(|answer| reads(syntax, answer)))
    }

    /// The syntax that a template without a form for calls speaks of, or that goes with how it lists tools.
    fn call_syntax_of_words(&self) -> Option<CallSyntax> {
        const LISTS: [(&str, CallSyntax); 3] = [
            ("<|tool_list_start|>", CallSyntax::Lfm2),
            ("List of tools: [", CallSyntax::Lfm2),
            ("<|/tool|>", CallSyntax::Granite),
        ];
        let has = |words: &str| self.source.contains(words);
        let by_marker = CallSyntax::ALL.into_iter().find(|syntax| has(syntax.openings()[0]));
        by_marker.or_else(|| LISTS.iter().find(|(words, _)| has(words)).map(|&(_, syntax)| syntax))
    }

    fn shows(&self, needle: &str, messages: &[&Message], tools: &[&Value]) -> bool {
        self.try_messages(messages, tools, true).is_ok_and(|text| text.contains(needle))
    }

    fn try_messages(
        &self,
        messages: &[&Message],
        tools: &[&Value],
        add_generation_prompt: bool,
    ) -> Result<String, minijinja::Error> {
        let messages = messages.iter().map(|message| message.to_json(&self.capabilities)).collect();
        self.run(messages, tools, add_generation_prompt, &Map::new(), OffsetDateTime::UNIX_EPOCH)
    }

    fn try_render(&self, messages: Value) -> Result<String, minijinja::Error> {
        self.run(messages, &[], true, &Map::new(), OffsetDateTime::UNIX_EPOCH)
    }
}

/// Whether a template prints thoughts in this form, or takes them out of the history.
fn speaks_of(source: &str, syntax: ThoughtSyntax) -> bool {
    let (open, close) = syntax.markers();
    source.contains(open) || source.contains(close)
}

/// What `closed`, a conversation with an answer, has beyond `prompt`, the same one before it. A marker of which only a
/// part differs is left whole.
fn answer_behind<'t>(prompt: &str, closed: &'t str) -> &'t str {
    let common = prompt.bytes().zip(closed.bytes()).take_while(|(a, b)| a == b).count();
    let mut common = closed.floor_char_boundary(common);
    if let Some(open) = closed[..common].rfind(['<', '[']).filter(|&open| !closed[open..common].contains(['>', ']'])) {
        common = open;
    }
    &closed[common..]
}

/// Appends a text to the system message, or puts one in front.
fn add_system_text(messages: &mut Vec<Message>, text: &str) {
    match messages.first_mut() {
        Some(first) if first.role == Role::System => first.content = format!("{}\n\n{text}", first.content),
        _ => messages.insert(0, Message::text(Role::System, text)),
    }
}

/// Takes out system messages and puts their text before the next user text.
fn fold_system_text(messages: &mut Vec<Message>) {
    let mut system = String::new();
    let mut out = Vec::with_capacity(messages.len());
    for mut message in messages.drain(..) {
        match message.role {
            Role::System => system = system + &message.content + "\n\n",
            Role::User => {
                message.content.insert_str(0, &std::mem::take(&mut system));
                out.push(message);
            }
            _ => out.push(message),
        }
    }
    if !system.is_empty() {
        out.push(Message::text(Role::User, system.trim_end()));
    }
    *messages = out;
}

/// The message of a template error, with the place where it arose.
fn describe(error: &minijinja::Error) -> String {
    let detail = error.detail().map_or_else(|| error.kind().to_string(), str::to_owned);
    match error.line() {
        Some(line) => format!("{detail} (template line {line})"),
        None => detail,
    }
}
