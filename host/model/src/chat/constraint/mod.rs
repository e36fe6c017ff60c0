//! The grammar that makes a model call tools in its family's form, in llguidance's Lark dialect.
//!
//! What is around the calls is the same for every family: a thought, free text, several calls. What a call looks like is
//! a rule `call`. Families that write arguments as JSON get it from the tools' schemas as they are; of the others, a
//! schema is written out as rules by [`gemma4`] and [`xml`].

mod gemma4;
mod json;
mod xml;

use serde_json::Value;

use super::messages::MessageError;
use super::output::{CallSyntax, OutputFormat};
use super::tools::{Tool, ToolChoice};

/// What holds a generation to the form of tool calls.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ToolConstraint {
    /// Nothing.
    None,
    /// A grammar in llguidance's Lark dialect, for the whole output from its first token.
    Lark(String),
}

/// What the grammar has to fit.
#[derive(Clone, Copy)]
pub struct ConstraintOptions<'a> {
    /// Allow several calls. A choice that names one function is one call all the same.
    pub parallel: bool,
    /// A JSON schema for the answer of a model that calls nothing; free text without one.
    pub answer: Option<&'a Value>,
    /// How the output is read: whether thoughts come first, and how calls look.
    pub output: &'a OutputFormat,
    /// The special token that a marker such as `<tool_call>` is in the vocabulary, if it is one; it is then matched as
    /// that token and not by its bytes.
    pub special: &'a dyn Fn(&str) -> Option<u32>,
}

/// The constraint for a choice among tools.
///
/// A model that may but need not call is not held to schemas that its syntax can't express, unless a tool is `strict`.
///
/// # Errors
/// If the syntax can't express a schema that must be enforced, with the path of its keyword.
pub fn tool_constraint(
    tools: &[Tool],
    choice: &ToolChoice,
    options: ConstraintOptions,
) -> Result<ToolConstraint, MessageError> {
    let allowed: Vec<(usize, &Tool)> = tools.iter().enumerate().filter(|(_, tool)| choice.allows(&tool.name)).collect();
    if allowed.is_empty() {
        return Ok(ToolConstraint::None);
    }
    let required =
        matches!(choice, ToolChoice::Required | ToolChoice::Named(_) | ToolChoice::Allowed { required: true, .. });
    let must_hold = required || options.answer.is_some() || allowed.iter().any(|(_, tool)| tool.is_strict());
    let parallel = options.parallel && !matches!(choice, ToolChoice::Named(_));
    let grammar = Grammar { tools: &allowed, required, options: ConstraintOptions { parallel, ..options } };
    match grammar.text() {
        Ok(text) => Ok(text.map_or(ToolConstraint::None, ToolConstraint::Lark)),
        Err(_) if !must_hold => Ok(ToolConstraint::None),
        Err(error) => Err(error),
    }
}

/// What a grammar is made of.
struct Grammar<'a> {
    /// The tools that may be called, with their places in the request.
    tools: &'a [(usize, &'a Tool)],
    required: bool,
    options: ConstraintOptions<'a>,
}

impl Grammar<'_> {
    fn text(&self) -> Result<Option<String>, MessageError> {
        if self.syntax() == CallSyntax::Llama3 && !self.required && self.options.answer.is_none() {
            // Such a call has no marker, so free text can't be told from it.
            return Ok(None);
        }
        Ok(Some(
            [self.start(), self.thought(), self.body()?, "SPACE: /[ \\n]*/\nTEXT: /(.|\\n)*/\n".to_owned()].concat(),
        ))
    }

    fn syntax(&self) -> CallSyntax {
        self.options.output.call_syntax
    }

    /// The rules that say how many calls there are, and what text is around them.
    fn start(&self) -> String {
        let thought = match (self.options.output.in_thought, self.options.output.thoughts) {
            (true, _) => "thought_end ",
            (_, true) => "thought? ",
            _ => "",
        };
        let one_after_another = self.options.parallel && !self.is_list() && self.syntax() != CallSyntax::Llama3;
        let calls = if one_after_another { "call (SPACE call)*" } else { "call" };
        let open = match self.syntax() {
            CallSyntax::Llama3 => String::new(),
            syntax => self.literal(syntax.openings()[0]) + " ",
        };
        match self.options.answer {
            _ if self.required => return format!("start: {thought}SPACE {calls}\ncall: {open}body\n"),
            Some(schema) => {
                return format!("start: {thought}SPACE ({calls} | answer)\ncall: {open}body\nanswer: %json {schema}\n");
            }
            None => {}
        }
        let free = match one_after_another {
            true => format!("start: {thought}call* rest\n"),
            false => format!("start: {thought}(call | rest)\n"),
        };
        let head = self.text_and("head", self.syntax().openings()[0]);
        format!("{free}rest: TEXT\ncall: head body\n{head}")
    }

    /// Whether one marker leads to a list of calls.
    fn is_list(&self) -> bool {
        matches!(self.syntax(), CallSyntax::Granite | CallSyntax::Lfm2 | CallSyntax::Mistral)
    }

    fn thought(&self) -> String {
        let output = self.options.output;
        if !output.thoughts && !output.in_thought {
            return String::new();
        }
        let (open, close) = output.thought_syntax.markers();
        let begin = match output.in_thought {
            true => String::new(),
            false => format!("thought: {} thought_end\n", self.opening_thought(open)),
        };
        format!("{begin}thought_end: thought_text SPACE\n{}", self.text_and("thought_text", close))
    }

    /// Gemma 4's marker is a token and a word.
    fn opening_thought(&self, open: &str) -> String {
        let token_end = open.find('>').map_or(open.len(), |end| end + 1);
        let (token, word) = open.split_at(token_end);
        let word = if word.is_empty() { String::new() } else { format!(" {}", quoted(word)) };
        self.literal(token) + &word
    }

    /// A rule for free text up to a marker, and the marker. The lazy lexeme ends as soon as the marker is complete.
    fn text_and(&self, rule: &str, marker: &str) -> String {
        match (self.options.special)(marker) {
            Some(id) => format!("{rule}: TEXT? <[{id}]>\n"),
            None => format!("{rule}[lazy]: TEXT {}\n", quoted(marker)),
        }
    }

    /// A marker as a Lark string, or as the special token that it is.
    fn literal(&self, marker: &str) -> String {
        (self.options.special)(marker).map_or_else(|| quoted(marker), |id| format!("<[{id}]>"))
    }

    /// The rules of what stands behind the opening marker.
    fn body(&self) -> Result<String, MessageError> {
        let parallel = self.options.parallel;
        let close = self.syntax().closings().first().map_or_else(String::new, |close| self.literal(close));
        Ok(match self.syntax() {
            CallSyntax::Hermes => {
                format!(
                    "body: SPACE json SPACE {close}\njson: %json {}\n",
                    json::object_schema(self.tools, "arguments")
                )
            }
            CallSyntax::Llama3 => format!("body: %json {}\n", json::object_schema(self.tools, "parameters")),
            CallSyntax::Granite => {
                format!("body: SPACE json\njson: %json {}\n", json::array_schema(self.tools, parallel))
            }
            CallSyntax::Mistral => {
                let named =
                    json::named_arguments(self.tools, |name| format!("{} {}", quoted(name), self.literal("[ARGS]")));
                format!("body: array | named\narray: %json {}\n{named}", json::array_schema(self.tools, parallel))
            }
            CallSyntax::Lfm2 => {
                let more = if parallel { " (\", \" named)*" } else { "" };
                format!("body: \"[\" named{more} \"]\" {close}\n{}", json::python_calls(self.tools))
            }
            CallSyntax::QwenXml => format!("body: \"\\n\" function \"\\n\" {close}\n{}", xml::rules(self.tools)?),
            CallSyntax::Gemma4 => {
                let quote = "<|\"|>";
                let text = self.text_and("text", quote);
                let open = self.literal(quote);
                format!("body: function {close}\n{}", gemma4::rules(self.tools, &open)?) + &text
            }
        })
    }
}

/// A text as a Lark string.
fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}

/// An error of a tool's schema: `path` is the keyword's within the schema.
fn refuse(tool: usize, path: &str, problem: &str) -> MessageError {
    let dot = if path.is_empty() || path.starts_with('[') { "" } else { "." };
    MessageError::new(format!("tools[{tool}].function.parameters{dot}{path}"), problem)
}

/// Rules for the fields of an object, some of which may be left out, with something between those that are there.
///
/// `field(i)` is the rule of the i-th field with its key; the rules made are `{name}_first_{i}` and `{name}_rest_{i}`, and
/// the returned rule stands for all of them.
fn fields(name: &str, required: &[bool], between: &str, field: impl Fn(usize) -> String, rules: &mut String) -> String {
    for (i, &is_required) in required.iter().enumerate() {
        let (this, next) = (field(i), i + 1);
        let rest = format!("{name}_rest_{next}");
        let (first, more) = match is_required {
            true => (format!("{this} {rest}"), format!("{between} {this} {rest}")),
            false => (format!("{this} {rest} | {name}_first_{next}"), format!("({between} {this})? {rest}")),
        };
        rules.push_str(&format!("{name}_first_{i}: {first}\n{name}_rest_{i}: {more}\n"));
    }
    let n = required.len();
    rules.push_str(&format!("{name}_first_{n}: \"\"\n{name}_rest_{n}: \"\"\n"));
    format!("{name}_first_0")
}
