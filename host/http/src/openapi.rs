//! `GET /openapi.json`: the document, built from the table of routes and the types that requests are read into.

use axum::Json;
use axum::extract::State;
use axum::http::Method;
use utoipa::openapi::path::{OperationBuilder, ParameterBuilder, ParameterIn};
use utoipa::openapi::request_body::RequestBodyBuilder;
use utoipa::openapi::schema::{ObjectBuilder, Type};
use utoipa::openapi::security::{
    ApiKey, ApiKeyValue, HttpAuthScheme, HttpBuilder, SecurityRequirement, SecurityScheme,
};
use utoipa::openapi::{
    ComponentsBuilder, Content, HttpMethod, InfoBuilder, OpenApi, OpenApiBuilder, Paths, RefOr, Required,
    ResponseBuilder, Schema, Server,
};

use crate::anthropic::error::AnthropicError;
use crate::error::ErrorBody;
use crate::routes::{Family, ROUTES, Route, Schemas, schema};
use crate::state::App;

/// Handler of the route.
pub(crate) async fn document(State(app): State<App>) -> Json<OpenApi> {
    Json(build(&app.config.api_prefix))
}

/// The whole document for a server whose routes begin with `prefix`.
pub(crate) fn build(prefix: &str) -> OpenApi {
    let mut schemas = Schemas::new();
    let errors = [schema::<ErrorBody>(&mut schemas), schema::<AnthropicError>(&mut schemas)];
    let mut paths = Paths::new();
    for route in ROUTES {
        for (index, path) in route.paths.iter().enumerate() {
            paths.add_path_operation(
                path,
                vec![method(&route.method)],
                operation(route, path, index, &errors, &mut schemas),
            );
        }
    }
    let components = ComponentsBuilder::new()
        .schemas_from_iter(schemas)
        .security_scheme("bearer", SecurityScheme::Http(HttpBuilder::new().scheme(HttpAuthScheme::Bearer).build()))
        .security_scheme("x_api_key", SecurityScheme::ApiKey(ApiKey::Header(ApiKeyValue::new("X-Api-Key"))));
    let info = InfoBuilder::new().title("opencoti").version(env!("CARGO_PKG_VERSION"));
    let base = if prefix.is_empty() { "/" } else { prefix };
    OpenApiBuilder::new()
        .info(info)
        .servers(Some([Server::new(base)]))
        .paths(paths)
        .components(Some(components.build()))
        .build()
}

fn method(method: &Method) -> HttpMethod {
    if *method == Method::POST { HttpMethod::Post } else { HttpMethod::Get }
}

fn operation(
    route: &Route,
    path: &str,
    index: usize,
    [common, anthropic]: &[RefOr<Schema>; 2],
    schemas: &mut Schemas,
) -> OperationBuilder {
    let answer = ResponseBuilder::new()
        .description("The answer")
        .content(route.media, Content::new(Some((route.answer)(schemas))));
    let error = if route.family == Family::Anthropic { anthropic } else { common };
    let failure =
        ResponseBuilder::new().description("An error").content("application/json", Content::new(Some(error.clone())));
    let mut operation = OperationBuilder::new()
        .summary(Some(route.summary))
        .tag(route.family.tag())
        .operation_id(Some(operation_id(&route.method, path)))
        .response("200", answer)
        .response("default", failure);
    if index > 0 {
        operation = operation.description(Some(format!("Second path of `{}`.", route.paths[0])));
    }
    if let Some(body) = route.body {
        let content = Content::new(Some(body(schemas)));
        let body = RequestBodyBuilder::new().content("application/json", content).required(Some(Required::True));
        operation = operation.request_body(Some(body.build()));
    }
    for name in path.split('/').filter_map(|part| part.strip_prefix('{')?.strip_suffix('}')) {
        let parameter = ParameterBuilder::new()
            .name(name)
            .parameter_in(ParameterIn::Path)
            .required(Required::True)
            .schema(Some(ObjectBuilder::new().schema_type(Type::String)));
        operation = operation.parameter(parameter);
    }
    if !route.public {
        let none: [&str; 0] = [];
        operation = operation
            .security(SecurityRequirement::new("bearer", none))
            .security(SecurityRequirement::new("x_api_key", none));
    }
    operation
}

/// `post_v1_chat_completions`.
fn operation_id(method: &Method, path: &str) -> String {
    let path: String = path.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '_' }).collect();
    format!("{}{path}", method.as_str().to_lowercase())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_route_is_in_the_document_with_its_method() {
        let document = serde_json::to_value(build("")).expect("it is JSON");
        for route in ROUTES {
            for path in route.paths {
                let operation = &document["paths"][path][route.method.as_str().to_lowercase()];
                assert_eq!(operation["summary"], route.summary, "{} {path}", route.method);
                assert_eq!(operation.get("requestBody").is_some(), route.body.is_some(), "{path}");
                assert_eq!(operation.get("security").is_some(), !route.public, "{path}");
            }
        }
    }

    #[test]
    fn every_reference_has_its_schema() {
        let document = serde_json::to_value(build("")).expect("it is JSON");
        let mut references = Vec::new();
        collect(&document, &mut references);
        assert!(references.len() > 20);
        for reference in references {
            let pointer = reference.trim_start_matches('#');
            assert!(document.pointer(pointer).is_some(), "{reference} leads nowhere");
        }
    }

    fn collect(value: &serde_json::Value, references: &mut Vec<String>) {
        match value {
            serde_json::Value::Object(fields) => fields.iter().for_each(|(key, value)| match value.as_str() {
                Some(text) if key == "$ref" => references.push(text.to_owned()),
                _ => collect(value, references),
            }),
            serde_json::Value::Array(items) => items.iter().for_each(|item| collect(item, references)),
            _ => {}
        }
    }
}
