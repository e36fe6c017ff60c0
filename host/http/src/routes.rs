//! Every route, once: paths, method, whether it needs a key, what goes in and out, and the handler.
//!
//! The router and the OpenAPI document are both built from [`ROUTES`].

use axum::extract::FromRef;
use axum::handler::Handler;
use axum::http::Method;
use axum::middleware::from_fn_with_state;
use axum::routing::{MethodFilter, MethodRouter, on};
use axum::{Router, response::IntoResponse};
use utoipa::ToSchema;
use utoipa::openapi::schema::{ObjectBuilder, Type};
use utoipa::openapi::{Ref, RefOr, Schema};

use crate::answers::InputTokens;
use crate::anthropic::messages;
use crate::error::ApiError;
use crate::native::{completion, embedding, props, slots, tokens};
use crate::openai::{chat, completions, embeddings, models, rerank, responses};
use crate::state::App;
use crate::{auth, health, metrics, openapi, plugins, polykv, prefixes, requests, shutdown, trace, wrap};

/// Which surface a route belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Family {
    /// OpenAI's shapes.
    OpenAi,
    /// Anthropic's shapes.
    Anthropic,
    /// llama.cpp's shapes.
    Native,
    /// Pools of prefixes.
    PolyKv,
    /// State of the server, for those who run it.
    Operations,
}

impl Family {
    /// Name of the family in the OpenAPI document.
    pub(crate) fn tag(self) -> &'static str {
        match self {
            Family::OpenAi => "openai",
            Family::Anthropic => "anthropic",
            Family::Native => "native",
            Family::PolyKv => "polykv",
            Family::Operations => "operations",
        }
    }
}

/// Named schemas of the document, collected while routes are described.
pub(crate) type Schemas = Vec<(String, RefOr<Schema>)>;

/// One route under all its paths.
pub(crate) struct Route {
    /// Its paths; the first is the one to use.
    pub(crate) paths: &'static [&'static str],
    /// Its method.
    pub(crate) method: Method,
    /// Served without a key.
    pub(crate) public: bool,
    /// Its surface.
    pub(crate) family: Family,
    /// One line about it.
    pub(crate) summary: &'static str,
    /// Schema of the body.
    pub(crate) body: Option<fn(&mut Schemas) -> RefOr<Schema>>,
    /// Schema of the answer.
    pub(crate) answer: fn(&mut Schemas) -> RefOr<Schema>,
    /// Media type of the answer.
    pub(crate) media: &'static str,
    handler: fn() -> MethodRouter<App>,
}

/// Refers to a type's schema and collects it with all that it refers to.
pub(crate) fn schema<T: ToSchema>(schemas: &mut Schemas) -> RefOr<Schema> {
    schemas.push((T::name().into_owned(), T::schema()));
    T::schemas(schemas);
    Ref::from_schema_name(T::name()).into()
}

fn list_of<T: ToSchema>(schemas: &mut Schemas) -> RefOr<Schema> {
    utoipa::openapi::schema::ArrayBuilder::new().items(schema::<T>(schemas)).into()
}

fn text(_: &mut Schemas) -> RefOr<Schema> {
    ObjectBuilder::new().schema_type(Type::String).into()
}

fn any(_: &mut Schemas) -> RefOr<Schema> {
    ObjectBuilder::new().schema_type(utoipa::openapi::schema::SchemaType::AnyValue).into()
}

fn get<H: Handler<T, App>, T: 'static>(handler: H) -> MethodRouter<App> {
    on(MethodFilter::GET, handler)
}

fn post<H: Handler<T, App>, T: 'static>(handler: H) -> MethodRouter<App> {
    on(MethodFilter::POST, handler)
}

const JSON: &str = "application/json";

/// Every route of the server.
pub(crate) const ROUTES: &[Route] = &[
    Route {
        paths: &["/health", "/v1/health"],
        method: Method::GET,
        public: true,
        family: Family::Operations,
        summary: "Whether the server serves; 503 with the progress while the model loads",
        body: None,
        answer: schema::<health::Health>,
        media: JSON,
        handler: || get(health::health),
    },
    Route {
        paths: &["/v1/models", "/models"],
        method: Method::GET,
        public: true,
        family: Family::OpenAi,
        summary: "The model that is served",
        body: None,
        answer: schema::<models::ModelList>,
        media: JSON,
        handler: || get(models::list),
    },
    Route {
        paths: &["/v1/models/{model}"],
        method: Method::GET,
        public: true,
        family: Family::OpenAi,
        summary: "One model by its name",
        body: None,
        answer: schema::<models::Model>,
        media: JSON,
        handler: || get(models::by_name),
    },
    Route {
        paths: &["/props"],
        method: Method::GET,
        public: false,
        family: Family::Native,
        summary: "Properties of the server and defaults of requests",
        body: None,
        answer: schema::<props::Props>,
        media: JSON,
        handler: || get(props::get),
    },
    Route {
        paths: &["/props"],
        method: Method::POST,
        public: false,
        family: Family::Native,
        summary: "Changes properties; 501 unless the server allows it",
        body: Some(any),
        answer: any,
        media: JSON,
        handler: || post(props::set),
    },
    Route {
        paths: &["/slots"],
        method: Method::GET,
        public: false,
        family: Family::Native,
        summary: "What each slot is doing; with fail_on_no_slot=1, 503 when all are busy",
        body: None,
        answer: list_of::<slots::Slot>,
        media: JSON,
        handler: || get(slots::list),
    },
    Route {
        paths: &["/slots/{id}"],
        method: Method::POST,
        public: false,
        family: Family::Native,
        summary: "Saves, restores or erases a slot's cache (action=save|restore|erase)",
        body: Some(schema::<slots::SlotFileRequest>),
        answer: schema::<slots::SlotAnswer>,
        media: JSON,
        handler: || post(slots::act),
    },
    Route {
        paths: &["/metrics"],
        method: Method::GET,
        public: false,
        family: Family::Operations,
        summary: "Prometheus metrics; 501 unless turned on",
        body: None,
        answer: text,
        media: metrics::CONTENT_TYPE,
        handler: || get(metrics::metrics),
    },
    Route {
        paths: &["/completion", "/completions"],
        method: Method::POST,
        public: false,
        family: Family::Native,
        summary: "Continues a prompt",
        body: Some(schema::<completion::CompletionRequest>),
        answer: schema::<completion::CompletionAnswer>,
        media: JSON,
        handler: || post(completion::completion),
    },
    Route {
        paths: &["/v1/completions"],
        method: Method::POST,
        public: false,
        family: Family::OpenAi,
        summary: "Continues a prompt, in OpenAI's legacy shape",
        body: Some(schema::<completions::CompletionsRequest>),
        answer: schema::<completions::CompletionsAnswer>,
        media: JSON,
        handler: || post(completions::completions),
    },
    Route {
        paths: &["/v1/chat/completions", "/chat/completions"],
        method: Method::POST,
        public: false,
        family: Family::OpenAi,
        summary: "Answers a conversation",
        body: Some(schema::<chat::ChatRequest>),
        answer: schema::<chat::ChatAnswer>,
        media: JSON,
        handler: || post(chat::chat),
    },
    Route {
        paths: &["/v1/embeddings"],
        method: Method::POST,
        public: false,
        family: Family::OpenAi,
        summary: "Embeds texts, one vector each",
        body: Some(schema::<embeddings::EmbeddingsRequest>),
        answer: schema::<embeddings::EmbeddingsAnswer>,
        media: JSON,
        handler: || post(embeddings::embeddings),
    },
    Route {
        paths: &["/embedding", "/embeddings"],
        method: Method::POST,
        public: false,
        family: Family::Native,
        summary: "Embeds texts; without pooling one vector a token",
        body: Some(schema::<embeddings::EmbeddingsRequest>),
        answer: list_of::<embedding::NativeEmbedding>,
        media: JSON,
        handler: || post(embedding::embedding),
    },
    Route {
        paths: &["/v1/rerank", "/rerank", "/v1/reranking", "/reranking"],
        method: Method::POST,
        public: false,
        family: Family::OpenAi,
        summary: "Orders texts by a query: by a ranking head's scores, or by the cosine of embeddings",
        body: Some(schema::<rerank::RerankRequest>),
        answer: schema::<rerank::RerankAnswer>,
        media: JSON,
        handler: || post(rerank::rerank),
    },
    Route {
        paths: &["/tokenize"],
        method: Method::POST,
        public: false,
        family: Family::Native,
        summary: "Text to token ids",
        body: Some(schema::<tokens::TokenizeRequest>),
        answer: schema::<tokens::TokenizeAnswer>,
        media: JSON,
        handler: || post(tokens::tokenize),
    },
    Route {
        paths: &["/detokenize"],
        method: Method::POST,
        public: false,
        family: Family::Native,
        summary: "Token ids to text",
        body: Some(schema::<tokens::DetokenizeRequest>),
        answer: schema::<tokens::DetokenizeAnswer>,
        media: JSON,
        handler: || post(tokens::detokenize),
    },
    Route {
        paths: &["/apply-template"],
        method: Method::POST,
        public: false,
        family: Family::Native,
        summary: "The prompt that a conversation becomes",
        body: Some(schema::<chat::ChatRequest>),
        answer: schema::<chat::TemplateAnswer>,
        media: JSON,
        handler: || post(chat::apply_template),
    },
    Route {
        paths: &["/v1/chat/completions/input_tokens", "/chat/completions/input_tokens"],
        method: Method::POST,
        public: false,
        family: Family::OpenAi,
        summary: "How many tokens the prompt of a conversation has",
        body: Some(schema::<chat::ChatRequest>),
        answer: schema::<InputTokens>,
        media: JSON,
        handler: || post(chat::input_tokens),
    },
    Route {
        paths: &["/v1/responses", "/responses"],
        method: Method::POST,
        public: false,
        family: Family::OpenAi,
        summary: "Answers a conversation of items; nothing is stored",
        body: Some(schema::<responses::ResponsesRequest>),
        answer: schema::<responses::ResponseAnswer>,
        media: JSON,
        handler: || post(responses::responses),
    },
    Route {
        paths: &["/v1/responses/input_tokens", "/responses/input_tokens"],
        method: Method::POST,
        public: false,
        family: Family::OpenAi,
        summary: "How many tokens the prompt of a conversation of items has",
        body: Some(schema::<responses::ResponsesRequest>),
        answer: schema::<InputTokens>,
        media: JSON,
        handler: || post(responses::input_tokens),
    },
    Route {
        paths: &["/v1/messages"],
        method: Method::POST,
        public: false,
        family: Family::Anthropic,
        summary: "Answers a conversation, in Anthropic's shape",
        body: Some(schema::<messages::MessagesRequest>),
        answer: schema::<messages::MessageAnswer>,
        media: JSON,
        handler: || post(messages::messages),
    },
    Route {
        paths: &["/v1/messages/count_tokens"],
        method: Method::POST,
        public: false,
        family: Family::Anthropic,
        summary: "How many tokens the prompt of a conversation has; max_tokens is not needed",
        body: Some(schema::<messages::MessagesRequest>),
        answer: schema::<messages::TokenCount>,
        media: JSON,
        handler: || post(messages::count_tokens),
    },
    Route {
        paths: &["/v1/requests/{id}/cancel"],
        method: Method::POST,
        public: false,
        family: Family::Operations,
        summary: "Ends a running request by its X-Request-Id",
        body: None,
        answer: schema::<requests::CancelAnswer>,
        media: JSON,
        handler: || post(requests::cancel),
    },
    Route {
        paths: &["/polykv/pools"],
        method: Method::POST,
        public: false,
        family: Family::PolyKv,
        summary: "Makes a pool of a prefix, of a session or of a slot",
        body: Some(schema::<polykv::make::PoolRequest>),
        answer: schema::<polykv::Pool>,
        media: JSON,
        handler: || post(polykv::make::create),
    },
    Route {
        paths: &["/polykv/pools"],
        method: Method::GET,
        public: false,
        family: Family::PolyKv,
        summary: "All pools",
        body: None,
        answer: schema::<polykv::PoolList>,
        media: JSON,
        handler: || get(polykv::list),
    },
    Route {
        paths: &["/polykv/pools/{id}"],
        method: Method::GET,
        public: false,
        family: Family::PolyKv,
        summary: "One pool",
        body: None,
        answer: schema::<polykv::Pool>,
        media: JSON,
        handler: || get(polykv::get),
    },
    Route {
        paths: &["/polykv/pools/{id}/fork"],
        method: Method::POST,
        public: false,
        family: Family::PolyKv,
        summary: "A child that begins with the pool, or with its first tokens",
        body: Some(schema::<polykv::make::ForkRequest>),
        answer: schema::<polykv::Pool>,
        media: JSON,
        handler: || post(polykv::make::fork),
    },
    Route {
        paths: &["/polykv/pools/{id}/pin"],
        method: Method::POST,
        public: false,
        family: Family::PolyKv,
        summary: "Keeps a pool with nothing attached to it",
        body: None,
        answer: schema::<polykv::Pool>,
        media: JSON,
        handler: || post(polykv::change::pin),
    },
    Route {
        paths: &["/polykv/pools/{id}/unpin"],
        method: Method::POST,
        public: false,
        family: Family::PolyKv,
        summary: "Takes the pin back",
        body: None,
        answer: schema::<polykv::Pool>,
        media: JSON,
        handler: || post(polykv::change::unpin),
    },
    Route {
        paths: &["/polykv/pools/{id}/release"],
        method: Method::POST,
        public: false,
        family: Family::PolyKv,
        summary: "Lets a pool go once nothing refers to it",
        body: None,
        answer: schema::<polykv::Pool>,
        media: JSON,
        handler: || post(polykv::change::release),
    },
    Route {
        paths: &["/polykv/pools/{id}/sampling"],
        method: Method::POST,
        public: false,
        family: Family::PolyKv,
        summary: "Where the sessions of a pool are sampled",
        body: Some(schema::<polykv::change::SamplingRequest>),
        answer: schema::<polykv::Pool>,
        media: JSON,
        handler: || post(polykv::change::sampling),
    },
    Route {
        paths: &["/polykv/pools/{id}/admission"],
        method: Method::POST,
        public: false,
        family: Family::PolyKv,
        summary: "How a pool admits sessions",
        body: Some(schema::<polykv::change::AdmissionRequest>),
        answer: schema::<polykv::Pool>,
        media: JSON,
        handler: || post(polykv::change::admission),
    },
    Route {
        paths: &["/polykv/pools/{id}/capacity"],
        method: Method::GET,
        public: false,
        family: Family::PolyKv,
        summary: "Whether a pool takes another session, of expected_tokens tokens",
        body: None,
        answer: schema::<polykv::capacity::CapacityAnswer>,
        media: JSON,
        handler: || get(polykv::capacity::capacity),
    },
    Route {
        paths: &["/polykv/tps"],
        method: Method::GET,
        public: false,
        family: Family::PolyKv,
        summary: "Rates of all sessions: a stream, or one answer with once=1",
        body: None,
        answer: schema::<polykv::tps::RatesAnswer>,
        media: JSON,
        handler: || get(polykv::tps::tps),
    },
    Route {
        paths: &["/debug/prefixes"],
        method: Method::GET,
        public: false,
        family: Family::Operations,
        summary: "The tree of prefixes that the cache holds, with who has them and how often they were shared",
        body: None,
        answer: list_of::<prefixes::Node>,
        media: JSON,
        handler: || get(prefixes::get),
    },
    Route {
        paths: &["/debug/trace"],
        method: Method::GET,
        public: false,
        family: Family::Operations,
        summary: "What the last steps did, as Chrome's trace events",
        body: None,
        answer: schema::<trace::Trace>,
        media: JSON,
        handler: || get(trace::get),
    },
    Route {
        paths: &["/plugins"],
        method: Method::GET,
        public: false,
        family: Family::Operations,
        summary: "The loaded plugins",
        body: None,
        answer: any,
        media: JSON,
        handler: || get(plugins::list),
    },
    Route {
        paths: &["/plugins/{name}"],
        method: Method::GET,
        public: false,
        family: Family::Operations,
        summary: "One plugin",
        body: None,
        answer: any,
        media: JSON,
        handler: || get(plugins::by_name),
    },
    Route {
        paths: &["/shutdown"],
        method: Method::POST,
        public: false,
        family: Family::Operations,
        summary: "Ends the server; for callers on its own machine",
        body: None,
        answer: schema::<shutdown::ShutdownAnswer>,
        media: JSON,
        handler: || post(shutdown::shutdown),
    },
    Route {
        paths: &["/openapi.json"],
        method: Method::GET,
        public: false,
        family: Family::Operations,
        summary: "This document",
        body: None,
        answer: any,
        media: JSON,
        handler: || get(openapi::document),
    },
];

/// The surface of a route's path; `None` for a path that is no route.
pub(crate) fn family(path: &str) -> Option<Family> {
    ROUTES.iter().find(|route| route.paths.contains(&path)).map(|route| route.family)
}

/// The router with everything around it.
pub(crate) fn router(app: &App) -> Router {
    let with_key = || from_fn_with_state(App::from_ref(app), auth::require_key);
    let mut routes = Router::new();
    for route in ROUTES {
        let handler = (route.handler)();
        let handler = if route.public { handler } else { handler.route_layer(with_key()) };
        for path in route.paths {
            routes = routes.route(path, handler.clone());
        }
    }
    let routes = routes.method_not_allowed_fallback(async || ApiError::wrong_method().into_response());
    let no_route = Router::new().fallback(async || ApiError::no_route()).layer(with_key());
    let prefix = app.config.api_prefix.trim_end_matches('/');
    let placed = if prefix.is_empty() { routes } else { Router::new().nest(prefix, routes) };
    wrap::around(placed.fallback_service(no_route.with_state(App::clone(app))), app).with_state(App::clone(app))
}
