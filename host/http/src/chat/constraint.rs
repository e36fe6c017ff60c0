//! What holds a chat's output to a form: the format that the surface's own field asks for, `json_schema`, `grammar`, or
//! the tools.

use opencoti_engine::api::{Constraint, EngineInfo};
use opencoti_engine::constraint;
use opencoti_model::chat::{ConstraintOptions, OutputFormat, Tool, ToolChoice, ToolConstraint, tool_constraint};
use serde::Deserialize;
use serde_json::{Value, json};
use utoipa::ToSchema;

use crate::body::{Strict, describe};
use crate::error::ApiError;
use crate::generation::{Constrained, GenerationFields};

/// `response_format`.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, ToSchema)]
pub(crate) struct ResponseFormat {
    /// `text`, `json_object` or `json_schema`.
    #[serde(rename = "type")]
    kind: Option<String>,
    /// The schema of `json_schema`.
    #[schema(value_type = Option<NamedSchema>)]
    json_schema: Option<Strict<NamedSchema>>,
    /// A schema for `json_object`.
    schema: Option<Value>,
}

/// `response_format.json_schema`.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, ToSchema)]
pub(crate) struct NamedSchema {
    /// Name of the schema; means nothing here.
    name: Option<String>,
    /// The schema.
    schema: Option<Value>,
    /// Always enforced, whatever is said here.
    strict: Option<bool>,
}

impl ResponseFormat {
    /// The constraint it asks for; `None` for free text.
    pub(crate) fn constraint(&self) -> Result<Option<Constrained>, ApiError> {
        match self.kind.as_deref() {
            Some("text") => Ok(None),
            Some("json_object") => match &self.schema {
                Some(schema) => json_schema(schema, "response_format.schema").map(Some),
                None => Ok(Some(json_object("response_format"))),
            },
            Some("json_schema") => {
                let schema = self.json_schema.as_ref().and_then(|named| named.0.schema.as_ref());
                let path = "response_format.json_schema.schema";
                let schema = schema.ok_or_else(|| ApiError::field(path, "is missing; give a JSON schema"))?;
                json_schema(schema, path).map(Some)
            }
            Some(other) => {
                let problem = format!("is {other:?}, expected text, json_object or json_schema");
                Err(ApiError::field("response_format.type", problem))
            }
            None => {
                Err(ApiError::field("response_format.type", "is missing, expected text, json_object or json_schema"))
            }
        }
    }
}

/// The constraint to any JSON object, which `field` asks for.
pub(crate) fn json_object(field: &str) -> Constrained {
    Constrained { constraint: Constraint::JsonObject, field: field.to_owned() }
}

/// The constraint of a schema that `path` holds.
pub(crate) fn json_schema(schema: &Value, path: &str) -> Result<Constrained, ApiError> {
    if !matches!(schema, Value::Object(_) | Value::Bool(_)) {
        return Err(ApiError::field(path, format!("is {}, expected a JSON schema object", describe(Some(schema)))));
    }
    Ok(Constrained { constraint: Constraint::JsonSchema(schema.clone()), field: path.to_owned() })
}

/// Where chat requests have the schema of a tool.
pub(crate) const CHAT_SCHEMA: &str = "function.parameters";

/// The tools of a request and how they may be called.
pub(crate) struct Tools {
    pub(crate) list: Vec<Tool>,
    pub(crate) choice: ToolChoice,
    pub(crate) parallel: bool,
    /// Where in an element of the body's `tools` its schema is, for errors.
    pub(crate) schema_field: &'static str,
}

impl Tools {
    /// Whether any may be called.
    pub(crate) fn are_usable(&self) -> bool {
        !self.list.is_empty() && self.choice != ToolChoice::None
    }

    /// The tools that the prompt shows.
    pub(crate) fn shown(&self) -> &[Tool] {
        if self.are_usable() { &self.list } else { &[] }
    }

    /// What holds the output to calls, or to an `answer` of that schema.
    fn constraint(
        &self,
        info: &EngineInfo,
        output: &OutputFormat,
        answer: Option<&Value>,
    ) -> Result<Option<Constrained>, ApiError> {
        let options = ConstraintOptions {
            parallel: self.parallel,
            answer,
            output,
            special: &|marker| special_token(info, marker),
        };
        let constraint = tool_constraint(&self.enforceable()?, &self.choice, options)
            .map_err(|error| ApiError::field(error.path.replacen(CHAT_SCHEMA, self.schema_field, 1), error.problem))?;
        Ok(match constraint {
            ToolConstraint::None => None,
            ToolConstraint::Lark(grammar) => {
                Some(Constrained { constraint: Constraint::Lark(grammar), field: "tools".to_owned() })
            }
        })
    }

    /// The tools with schemas that are known to be enforceable: inside the grammar of calls nobody could tell whose a
    /// keyword is.
    fn enforceable(&self) -> Result<Vec<Tool>, ApiError> {
        let tools = self.list.iter().enumerate().map(|(i, tool)| {
            if !self.choice.allows(&tool.name) {
                return Ok(tool.clone());
            }
            let field = format!("tools[{i}].{}", self.schema_field);
            let parameters = constraint::json_schema(&tool.parameters).map_err(|error| error.in_field(&field))?;
            Ok(Tool { parameters, ..tool.clone() })
        });
        tools.collect()
    }
}

/// The special token that a marker is in the vocabulary.
pub(crate) fn special_token(info: &EngineInfo, marker: &str) -> Option<u32> {
    info.tokenizer.token_id(marker).filter(|&id| info.tokenizer.is_special(id))
}

/// A request's form constraint; at most one of the fields may ask for one. A schema may come with tools: it then binds the
/// answer of a model that calls none.
pub(crate) fn form(
    generation: &GenerationFields,
    format: Option<Constrained>,
    tools: &Tools,
) -> Result<Option<Constrained>, ApiError> {
    let schema = generation.json_schema.as_ref().map(|schema| json_schema(schema, "json_schema")).transpose()?;
    let mut given = [format, schema, generation.grammar()].into_iter().flatten();
    let Some(first) = given.next() else { return Ok(None) };
    if let Some(second) = given.next() {
        let problem = format!("can't be combined with `{}`; send one of them", first.field);
        return Err(ApiError::field(second.field, problem));
    }
    if tools.are_usable() && matches!(first.constraint, Constraint::Gbnf(_)) {
        let problem = "can't be combined with tools; send one of them, or tool_choice \"none\"";
        return Err(ApiError::field(first.field, problem));
    }
    Ok(Some(first))
}

/// The constraint of the whole output: its form, or that of tool calls, or either of them.
pub(crate) fn constraint(
    form: Option<Constrained>,
    tools: &Tools,
    info: &EngineInfo,
    output: &OutputFormat,
) -> Result<Option<Constrained>, ApiError> {
    if !tools.are_usable() {
        return Ok(form);
    }
    let answer = form.as_ref().map(answer_schema).transpose()?;
    tools.constraint(info, output, answer.as_ref())
}

/// The schema that a form asks for, known to be enforceable: inside the grammar of calls nobody could tell whose it is.
fn answer_schema(form: &Constrained) -> Result<Value, ApiError> {
    let schema = match &form.constraint {
        Constraint::JsonSchema(schema) => schema,
        Constraint::JsonObject => &json!({"type": "object"}),
        Constraint::Gbnf(_) | Constraint::Lark(_) => return Err(ApiError::field(&form.field, "is no JSON schema")),
    };
    Ok(constraint::json_schema(schema).map_err(|error| error.in_field(&form.field))?)
}
