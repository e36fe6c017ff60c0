//! The fields that every generation route takes besides sampling: length, stop texts, slot, output, constraint.

use std::time::Duration;

use opencoti_engine::api::{Constraint, EngineInfo, GenerateRequest, SharedSlot};
use opencoti_engine::pools::PoolId;
use serde::Deserialize;
use serde_json::Value;
use utoipa::ToSchema;

use crate::body::Strict;
use crate::config::ServerConfig;
use crate::error::ApiError;
use crate::fields::Texts;
use crate::run::Delivery;
use crate::sampling::{SamplingFields, at_least, not_negative};

/// Generation, as a request writes it.
#[derive(Clone, Debug, Default, Deserialize, ToSchema)]
pub(crate) struct GenerationFields {
    /// Most tokens to generate; −1 has no bound, 0 only fills the cache. Comes before the two names below.
    pub(crate) n_predict: Option<i64>,
    /// Second name of `n_predict`.
    pub(crate) max_completion_tokens: Option<i64>,
    /// Third name of `n_predict`.
    pub(crate) max_tokens: Option<i64>,
    /// How many answers; at most the number of slots.
    pub(crate) n: Option<i64>,
    /// Second name of `n`.
    pub(crate) n_cmpl: Option<i64>,
    /// Tokens kept by a context shift: 0 or −1 (all), for there is no shift; a full context ends the answer.
    pub(crate) n_keep: Option<i64>,
    /// Tokens dropped by a context shift: 0, for there is none.
    pub(crate) n_discard: Option<i64>,
    /// Smallest chunk reused by shifting keys: 0, for keys are never shifted.
    pub(crate) n_cache_reuse: Option<i64>,
    /// Samples on the device: false, for it is done by the engine.
    pub(crate) backend_sampling: Option<bool>,
    /// Least indentation of generated lines.
    pub(crate) n_indent: Option<i64>,
    /// Ends at the first newline after so many milliseconds of generation; −1 is off.
    pub(crate) t_max_predict_ms: Option<i64>,
    /// Texts that end the answer and are not part of it.
    pub(crate) stop: Option<Texts>,
    /// Sends events as the answer grows.
    pub(crate) stream: Option<bool>,
    /// Options of the stream.
    #[schema(value_type = Option<StreamOptions>)]
    pub(crate) stream_options: Option<Strict<StreamOptions>>,
    /// Seconds of silence after which a stream sends a comment; −1 is never.
    pub(crate) sse_ping_interval: Option<i64>,
    /// Fills `tokens` of the native answer.
    pub(crate) return_tokens: Option<bool>,
    /// Sends `prompt_progress` while a stream's prompt is processed.
    pub(crate) return_progress: Option<bool>,
    /// Sends `timings` with every event of a stream.
    pub(crate) timings_per_token: Option<bool>,
    /// Adds what the server made of the request to the answer (`__verbose`).
    pub(crate) verbose: Option<bool>,
    /// Pins a slot; −1 leaves the choice to the server.
    pub(crate) id_slot: Option<i64>,
    /// Reuses cached prefixes.
    pub(crate) cache_prompt: Option<bool>,
    /// Session whose slot is preferred.
    pub(crate) session_id: Option<String>,
    /// OpenAI's name of `session_id`.
    pub(crate) prompt_cache_key: Option<String>,
    /// Asks the admission gate to let the request in anyway.
    pub(crate) overcommit: Option<bool>,
    /// A pool to attach to: what the prompt has in common with it is shared.
    pub(crate) pool_id: Option<i64>,
    /// A slot whose sequence the prompt begins with; −1 for none.
    pub(crate) shared_pool_slot: Option<i64>,
    /// How many of its tokens.
    pub(crate) shared_prefix_n_tokens: Option<i64>,
    /// Requests of a higher number leave the queue first; 0 by default.
    pub(crate) priority: Option<i64>,
    /// Seconds that the request may take, waiting included; at most what the server allows.
    pub(crate) timeout: Option<f64>,
    /// Adapters with their scales.
    #[schema(value_type = Option<Vec<LoraScale>>)]
    pub(crate) lora: Option<Vec<Strict<LoraScale>>>,
    /// A GBNF grammar.
    pub(crate) grammar: Option<String>,
    /// A JSON schema.
    pub(crate) json_schema: Option<Value>,
    /// Bound of the thinking in tokens; −1 has none, 0 turns thinking off.
    pub(crate) reasoning_budget_tokens: Option<i64>,
    /// Second name of `reasoning_budget_tokens`.
    pub(crate) thinking_budget_tokens: Option<i64>,
}

/// `stream_options`.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, ToSchema)]
pub(crate) struct StreamOptions {
    /// A chunk with the usage before the end, and `usage: null` in the others.
    pub(crate) include_usage: Option<bool>,
}

/// One adapter of `lora`.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, ToSchema)]
pub(crate) struct LoraScale {
    id: Option<i64>,
    scale: Option<f64>,
}

/// A constraint with the field it came from.
#[derive(Clone, Debug)]
pub(crate) struct Constrained {
    pub(crate) constraint: Constraint,
    pub(crate) field: String,
}

impl GenerationFields {
    /// Whether the answer is streamed.
    pub(crate) fn is_streamed(&self) -> bool {
        self.stream.unwrap_or(false)
    }

    /// Whether a stream carries usage.
    pub(crate) fn includes_usage(&self) -> bool {
        self.stream_options.as_ref().and_then(|options| options.0.include_usage).unwrap_or(false)
    }

    /// How the answer is to be delivered.
    pub(crate) fn delivery(&self, config: &ServerConfig) -> Delivery {
        let ping = match self.sse_ping_interval {
            None => config.ping_interval,
            Some(seconds) => u64::try_from(seconds).ok().map(|seconds| Duration::from_secs(seconds.max(1))),
        };
        Delivery { is_streamed: self.is_streamed(), ping }
    }

    /// The bound on generated tokens, `default` where the request says nothing; `None` without one.
    pub(crate) fn n_predict(&self, default: Option<u32>) -> Result<Option<u32>, ApiError> {
        let names = [
            ("n_predict", self.n_predict),
            ("max_completion_tokens", self.max_completion_tokens),
            ("max_tokens", self.max_tokens),
        ];
        let Some((name, value)) = names.into_iter().find_map(|(name, value)| Some((name, value?))) else {
            return Ok(default);
        };
        at_least(name, value, -1)?;
        Ok((value >= 0).then(|| u32::try_from(value).unwrap_or(u32::MAX)))
    }

    /// The budget of thinking: `Some(0)` turns it off.
    pub(crate) fn thinks(&self) -> Result<bool, ApiError> {
        let names = [
            ("reasoning_budget_tokens", self.reasoning_budget_tokens),
            ("thinking_budget_tokens", self.thinking_budget_tokens),
        ];
        let Some((name, value)) = names.into_iter().find_map(|(name, value)| Some((name, value?))) else {
            return Ok(true);
        };
        at_least(name, value, -1)?;
        if value > 0 {
            return Err(ApiError::field(
                name,
                format!("is {value}, but thinking can only be unbounded (-1) or off (0)"),
            ));
        }
        Ok(value != 0)
    }

    fn n_choices(&self, info: &EngineInfo) -> Result<u32, ApiError> {
        let (name, value) = match (self.n, self.n_cmpl) {
            (Some(value), _) => ("n", value),
            (None, Some(value)) => ("n_cmpl", value),
            (None, None) => return Ok(1),
        };
        let most = info.n_slots;
        let n = u32::try_from(value).ok().filter(|n| (1..=most).contains(n));
        n.ok_or_else(|| ApiError::field(name, format!("is {value}, expected 1 to {most} (the number of slots)")))
    }

    fn id_slot(&self, info: &EngineInfo) -> Result<Option<u32>, ApiError> {
        match self.id_slot {
            None | Some(-1) => Ok(None),
            Some(id) => {
                let slot = u32::try_from(id).ok().filter(|&slot| slot < info.n_slots);
                let expected =
                    || format!("is {id}, expected -1 or a slot from 0 to {}", info.n_slots.saturating_sub(1));
                slot.map(Some).ok_or_else(|| ApiError::field("id_slot", expected()))
            }
        }
    }

    fn pool(&self, info: &EngineInfo) -> Result<Option<PoolId>, ApiError> {
        let Some(id) = self.pool_id.filter(|&id| id != -1) else { return Ok(None) };
        if info.max_pools == 0 {
            return Err(ApiError::field(
                "pool_id",
                "names a pool, but this server has none; start it with --polykv-max-pools",
            ));
        }
        u32::try_from(id)
            .map(Some)
            .map_err(|_| ApiError::field("pool_id", format!("is {id}, expected the id of a pool")))
    }

    fn shared_slot(&self, info: &EngineInfo) -> Result<Option<SharedSlot>, ApiError> {
        let tokens = not_negative("shared_prefix_n_tokens", self.shared_prefix_n_tokens, 0)?;
        let Some(slot) = self.shared_pool_slot.filter(|&slot| slot != -1) else { return Ok(None) };
        let most = info.n_slots.saturating_sub(1);
        let slot = u32::try_from(slot).ok().filter(|&slot| slot <= most).ok_or_else(|| {
            ApiError::field("shared_pool_slot", format!("is {slot}, expected -1 or a slot from 0 to {most}"))
        })?;
        Ok((tokens > 0).then_some(SharedSlot { slot, tokens }))
    }

    fn priority(&self) -> Result<i32, ApiError> {
        let value = self.priority.unwrap_or(0);
        i32::try_from(value).map_err(|_| ApiError::field("priority", format!("is {value}, expected a 32-bit integer")))
    }

    fn deadline(&self, most: Option<Duration>) -> Result<Option<Duration>, ApiError> {
        let Some(seconds) = self.timeout else { return Ok(most) };
        let own = Duration::try_from_secs_f64(seconds).ok().filter(|own| !own.is_zero());
        let own = own.ok_or_else(|| ApiError::field("timeout", format!("is {seconds}, expected seconds above 0")))?;
        Ok(Some(most.map_or(own, |most| most.min(own))))
    }

    /// `json_schema` or `grammar`; `None` without either. Which wins when both are there is the route's affair.
    pub(crate) fn grammar(&self) -> Option<Constrained> {
        let text = self.grammar.as_ref().filter(|text| !text.is_empty())?;
        Some(Constrained { constraint: Constraint::Gbnf(text.clone()), field: "grammar".to_owned() })
    }

    /// The constraint of `json_schema`.
    pub(crate) fn schema(&self) -> Option<Constrained> {
        let schema = self.json_schema.clone()?;
        Some(Constrained { constraint: Constraint::JsonSchema(schema), field: "json_schema".to_owned() })
    }

    /// Checks the fields of which only some values, those that ask for nothing, can be honoured.
    fn check(&self) -> Result<(), ApiError> {
        at_least("sse_ping_interval", self.sse_ping_interval.unwrap_or(-1), -1)?;
        for (name, value, least) in
            [("n_keep", self.n_keep, -1), ("n_discard", self.n_discard, 0), ("n_cache_reuse", self.n_cache_reuse, 0)]
        {
            let value = value.unwrap_or(0);
            at_least(name, value, least)?;
            if value > 0 {
                return Err(ApiError::field(name, format!("is {value}, which is not supported yet; leave it out")));
            }
        }
        if self.backend_sampling == Some(true) {
            return Err(ApiError::field("backend_sampling", "is true, which is not supported yet; leave it out"));
        }
        if self.lora.as_ref().is_some_and(|adapters| !adapters.is_empty()) {
            return Err(ApiError::field("lora", "names an adapter, but this server has loaded none; leave it empty"));
        }
        Ok(())
    }

    /// The engine's request for one prompt.
    pub(crate) fn request(
        &self,
        info: &EngineInfo,
        config: &ServerConfig,
        sampling: &SamplingFields,
        n_probs: usize,
        constrained: Option<Constrained>,
    ) -> Result<GenerateRequest, ApiError> {
        self.check()?;
        let t_max_predict = self.t_max_predict_ms.unwrap_or(-1);
        at_least("t_max_predict_ms", t_max_predict, -1)?;
        let (constraint, constraint_field) = constrained.map(|from| (from.constraint, from.field)).unzip();
        Ok(GenerateRequest {
            prompt: Vec::new(),
            sampling: sampling.resolve(info, n_probs)?,
            n_predict: self.n_predict(info.default_n_predict)?,
            n_choices: self.n_choices(info)?,
            stop: self
                .stop
                .as_ref()
                .map(Texts::to_vec)
                .unwrap_or_default()
                .into_iter()
                .filter(|s| !s.is_empty())
                .collect(),
            constraint,
            constraint_field: constraint_field.unwrap_or_default(),
            id_slot: self.id_slot(info)?,
            cache_prompt: self.cache_prompt.unwrap_or(true),
            pool: self.pool(info)?,
            shared_slot: self.shared_slot(info)?,
            make_pool: None,
            priority: self.priority()?,
            session_id: self.session_id.clone().or_else(|| self.prompt_cache_key.clone()).filter(|id| !id.is_empty()),
            overcommit: self.overcommit.unwrap_or(false),
            n_indent: not_negative("n_indent", self.n_indent, 0)?,
            t_max_predict: u64::try_from(t_max_predict).ok().map(Duration::from_millis),
            return_progress: self.return_progress.unwrap_or(false) && self.is_streamed(),
            render_special: false,
            prompt_logprobs: None,
            deadline: self.deadline(config.request_timeout)?,
        })
    }
}

/// The number of alternatives that a field of the name asks for.
pub(crate) fn n_probs(name: &str, value: Option<i64>, most: usize) -> Result<usize, ApiError> {
    let Some(value) = value else { return Ok(0) };
    let count = usize::try_from(value).ok().filter(|&count| count <= most);
    count.ok_or_else(|| ApiError::field(name, format!("is {value}, expected 0 to {most}")))
}
