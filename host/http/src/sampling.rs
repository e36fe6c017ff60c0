//! The sampling fields that every generation route takes (`temperature` … `samplers`, `logit_bias`).

use opencoti_engine::api::EngineInfo;
use opencoti_engine::sampling::{SampleError, SamplerKind, SamplingParams};
use opencoti_model::tokenizer::EncodeOptions;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

use crate::body::describe;
use crate::error::ApiError;
use crate::fields::Texts;
use crate::text;

/// Sampling, as a request writes it. Absent fields take the server's defaults.
#[derive(Clone, Debug, Default, Deserialize, ToSchema)]
pub(crate) struct SamplingFields {
    /// 0 or less takes the most probable token.
    pub(crate) temperature: Option<f64>,
    /// Half width of the dynamic temperature; 0 is off.
    pub(crate) dynatemp_range: Option<f64>,
    /// Exponent of the dynamic temperature.
    pub(crate) dynatemp_exponent: Option<f64>,
    /// Keeps the k most probable; 0 keeps all.
    pub(crate) top_k: Option<i64>,
    /// Nucleus; 1 keeps all.
    pub(crate) top_p: Option<f64>,
    /// Least probability relative to the best token's; 0 keeps all.
    pub(crate) min_p: Option<f64>,
    /// Cut by standard deviations of the logits; −1 is off.
    pub(crate) top_n_sigma: Option<f64>,
    /// Locally typical sampling; 1 is off.
    pub(crate) typical_p: Option<f64>,
    /// How often top choices are excluded; 0 is off.
    pub(crate) xtc_probability: Option<f64>,
    /// From which probability a token is a top choice.
    pub(crate) xtc_threshold: Option<f64>,
    /// Window of the penalties; 0 is off, −1 the whole context.
    pub(crate) repeat_last_n: Option<i64>,
    /// Factor of repeated tokens; 1 is off.
    pub(crate) repeat_penalty: Option<f64>,
    /// Per occurrence in the window.
    pub(crate) frequency_penalty: Option<f64>,
    /// Once for every token in the window.
    pub(crate) presence_penalty: Option<f64>,
    /// Strength of DRY; 0 is off.
    pub(crate) dry_multiplier: Option<f64>,
    /// Growth of DRY with the length of a repeat.
    pub(crate) dry_base: Option<f64>,
    /// Repeats up to this length are free.
    pub(crate) dry_allowed_length: Option<i64>,
    /// Window of DRY; 0 is off, −1 the whole context.
    pub(crate) dry_penalty_last_n: Option<i64>,
    /// Texts across which repeats do not count.
    pub(crate) dry_sequence_breakers: Option<Vec<String>>,
    /// 0 is off; 1 and 2 replace truncation by Mirostat.
    pub(crate) mirostat: Option<i64>,
    /// Mirostat's target surprise in bits.
    pub(crate) mirostat_tau: Option<f64>,
    /// Mirostat's learning rate.
    pub(crate) mirostat_eta: Option<f64>,
    /// Target probability of adaptive-p; negative is off.
    pub(crate) adaptive_target: Option<f64>,
    /// Decay of adaptive-p, 0 … 0.99.
    pub(crate) adaptive_decay: Option<f64>,
    /// Truncating samplers keep at least so many.
    pub(crate) min_keep: Option<i64>,
    /// Negative draws a random seed.
    pub(crate) seed: Option<i64>,
    /// Names of the chain's samplers in order, or a string of their letters.
    pub(crate) samplers: Option<Texts>,
    /// `[[token or text, bias or false], …]` or `{"token or text": bias or false}`.
    pub(crate) logit_bias: Option<Value>,
    /// Never ends by an end-of-generation token.
    pub(crate) ignore_eos: Option<bool>,
    /// Probabilities after the chain in place of those of the raw logits.
    pub(crate) post_sampling_probs: Option<bool>,
}

impl SamplingFields {
    /// The engine's parameters, with every range checked; `n_probs` comes from the route.
    pub(crate) fn resolve(&self, info: &EngineInfo, n_probs: usize) -> Result<SamplingParams, ApiError> {
        let mut params = info.default_sampling.clone();
        self.set_numbers(&mut params);
        params.top_k = clamped(self.top_k, params.top_k);
        params.mirostat = self.mirostat.map_or(params.mirostat, |value| value.clamp(0, 2) as u8);
        params.repeat_last_n = window("repeat_last_n", self.repeat_last_n, params.repeat_last_n)?;
        params.dry_penalty_last_n = window("dry_penalty_last_n", self.dry_penalty_last_n, params.dry_penalty_last_n)?;
        params.dry_allowed_length =
            not_negative("dry_allowed_length", self.dry_allowed_length, params.dry_allowed_length)?;
        params.min_keep = not_negative("min_keep", self.min_keep, params.min_keep)?;
        params.seed = self.seed.unwrap_or(params.seed);
        params.ignore_eos = self.ignore_eos.unwrap_or(params.ignore_eos);
        params.post_sampling_probs = self.post_sampling_probs.unwrap_or(false);
        params.n_probs = n_probs;
        if let Some(breakers) = &self.dry_sequence_breakers {
            params.dry_sequence_breakers.clone_from(breakers);
        }
        if let Some(samplers) = &self.samplers {
            params.samplers = chain(samplers)?;
        }
        if let Some(bias) = &self.logit_bias {
            params.logit_bias = biases(info, bias)?;
        }
        params.checked(info.tokenizer.n_vocab()).map_err(out_of_range)
    }

    fn set_numbers(&self, params: &mut SamplingParams) {
        let fields = [
            (&mut params.temperature, self.temperature),
            (&mut params.dynatemp_range, self.dynatemp_range),
            (&mut params.dynatemp_exponent, self.dynatemp_exponent),
            (&mut params.top_p, self.top_p),
            (&mut params.min_p, self.min_p),
            (&mut params.top_n_sigma, self.top_n_sigma),
            (&mut params.typical_p, self.typical_p),
            (&mut params.xtc_probability, self.xtc_probability),
            (&mut params.xtc_threshold, self.xtc_threshold),
            (&mut params.repeat_penalty, self.repeat_penalty),
            (&mut params.frequency_penalty, self.frequency_penalty),
            (&mut params.presence_penalty, self.presence_penalty),
            (&mut params.dry_multiplier, self.dry_multiplier),
            (&mut params.dry_base, self.dry_base),
            (&mut params.mirostat_tau, self.mirostat_tau),
            (&mut params.mirostat_eta, self.mirostat_eta),
            (&mut params.adaptive_target, self.adaptive_target),
            (&mut params.adaptive_decay, self.adaptive_decay),
        ];
        for (param, field) in fields {
            if let Some(value) = field {
                // Beyond f32 it becomes infinite, which the check of the ranges refuses.
                *param = value as f32;
            }
        }
    }
}

fn out_of_range(error: SampleError) -> ApiError {
    match error {
        SampleError::OutOfRange { field, found, expected } => {
            ApiError::field(field, format!("is {found}, expected {expected}"))
        }
        SampleError::UnknownToken { field, id, n_vocab } => {
            ApiError::field(field, format!("names token {id}, but the vocabulary has {n_vocab} tokens"))
        }
        other => ApiError::bad_request(other.to_string()),
    }
}

fn clamped(field: Option<i64>, default: u32) -> u32 {
    field.map_or(default, |value| u32::try_from(value.max(0)).unwrap_or(u32::MAX))
}

fn window(name: &str, field: Option<i64>, default: i32) -> Result<i32, ApiError> {
    let Some(value) = field else { return Ok(default) };
    at_least(name, value, -1)?;
    Ok(i32::try_from(value).unwrap_or(i32::MAX))
}

/// A count that must not be negative; larger than the type holds means as much as it holds.
pub(crate) fn not_negative<T: TryFrom<i64> + Bounded>(
    name: &str,
    field: Option<i64>,
    default: T,
) -> Result<T, ApiError> {
    let Some(value) = field else { return Ok(default) };
    at_least(name, value, 0)?;
    Ok(T::try_from(value).unwrap_or(T::MAX))
}

/// Types with a largest value.
pub(crate) trait Bounded {
    /// The largest value.
    const MAX: Self;
}

impl Bounded for u32 {
    const MAX: Self = u32::MAX;
}

impl Bounded for usize {
    const MAX: Self = usize::MAX;
}

/// A hard lower bound.
pub(crate) fn at_least(name: &str, value: i64, least: i64) -> Result<(), ApiError> {
    if value < least { Err(ApiError::field(name, format!("is {value}, expected {least} or more"))) } else { Ok(()) }
}

/// The chain by names, by names joined with `;`, or by letters.
fn chain(samplers: &Texts) -> Result<Vec<SamplerKind>, ApiError> {
    let by_name = |name: &str, field: String| {
        SamplerKind::from_name(name.trim()).ok_or_else(|| {
            let known = SamplerKind::DEFAULT_ORDER.map(SamplerKind::name).join(", ");
            ApiError::field(field, format!("is {name:?}, which is no sampler; known are {known}, adaptive_p"))
        })
    };
    match samplers {
        Texts::Many(names) => {
            names.iter().enumerate().map(|(index, name)| by_name(name, format!("samplers[{index}]"))).collect()
        }
        Texts::One(names) if names.contains(';') => names
            .split(';')
            .filter(|name| !name.trim().is_empty())
            .map(|name| by_name(name, "samplers".to_owned()))
            .collect(),
        Texts::One(name) if SamplerKind::from_name(name).is_some() => Ok(vec![by_name(name, "samplers".to_owned())?]),
        Texts::One(letters) => letters
            .chars()
            .map(|letter| {
                SamplerKind::from_letter(letter).ok_or_else(|| {
                    ApiError::field("samplers", format!("has the letter {letter:?}, which stands for no sampler"))
                })
            })
            .collect(),
    }
}

/// Reads `logit_bias` in either form. A text biases every token it consists of.
fn biases(info: &EngineInfo, field: &Value) -> Result<Vec<(u32, f32)>, ApiError> {
    let mut biases = Vec::new();
    match field {
        Value::Array(entries) => {
            for (index, entry) in entries.iter().enumerate() {
                let path = format!("logit_bias[{index}]");
                let Some([target, bias]) = entry.as_array().map(Vec::as_slice) else {
                    return Err(ApiError::field(
                        path,
                        format!("is {}, expected [token or text, bias]", describe(Some(entry))),
                    ));
                };
                let tokens = biased_tokens(info, target, &format!("{path}[0]"))?;
                let bias = bias_value(bias, &format!("{path}[1]"))?;
                biases.extend(tokens.into_iter().map(|token| (token, bias)));
            }
        }
        Value::Object(entries) => {
            for (key, bias) in entries {
                let path = format!("logit_bias.{key}");
                let target = key.parse::<i64>().map_or_else(|_| Value::from(key.as_str()), Value::from);
                let tokens = biased_tokens(info, &target, &path)?;
                let bias = bias_value(bias, &path)?;
                biases.extend(tokens.into_iter().map(|token| (token, bias)));
            }
        }
        other => {
            let problem = format!("is {}, expected an array of pairs or an object", describe(Some(other)));
            return Err(ApiError::field("logit_bias", problem));
        }
    }
    Ok(biases)
}

fn biased_tokens(info: &EngineInfo, target: &Value, path: &str) -> Result<Vec<u32>, ApiError> {
    match target {
        Value::String(text) => {
            text::encode(info, text, EncodeOptions { add_special: false, parse_special: true }, path)
        }
        Value::Number(id) if id.is_i64() => Ok(vec![text::token(info, id.as_i64().unwrap_or(-1), || path.to_owned())?]),
        other => Err(ApiError::field(path, format!("is {}, expected a token id or a text", describe(Some(other))))),
    }
}

fn bias_value(bias: &Value, path: &str) -> Result<f32, ApiError> {
    match bias {
        Value::Bool(false) => Ok(f32::NEG_INFINITY),
        Value::Number(number) => {
            let value = number.as_f64().map_or(f32::NAN, |value| value as f32);
            let finite = Some(value).filter(|value| value.is_finite());
            finite
                .ok_or_else(|| ApiError::field(path, format!("is {number}, more than a single-precision number holds")))
        }
        other => Err(ApiError::field(path, format!("is {}, expected a number or false", describe(Some(other))))),
    }
}

/// The sampling part of `generation_settings`, `default_generation_settings` and `/slots`.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct SamplingSettings {
    seed: i64,
    temperature: f32,
    dynatemp_range: f32,
    dynatemp_exponent: f32,
    top_k: u32,
    top_p: f32,
    min_p: f32,
    top_n_sigma: f32,
    xtc_probability: f32,
    xtc_threshold: f32,
    typical_p: f32,
    repeat_last_n: i32,
    repeat_penalty: f32,
    presence_penalty: f32,
    frequency_penalty: f32,
    dry_multiplier: f32,
    dry_base: f32,
    dry_allowed_length: u32,
    dry_penalty_last_n: i32,
    dry_sequence_breakers: Vec<String>,
    mirostat: u8,
    mirostat_tau: f32,
    mirostat_eta: f32,
    adaptive_target: f32,
    adaptive_decay: f32,
    min_keep: usize,
    n_probs: usize,
    post_sampling_probs: bool,
    ignore_eos: bool,
    logit_bias: Vec<BiasSetting>,
    samplers: Vec<&'static str>,
}

/// One entry of `logit_bias` in the settings; JSON has no −∞, so a banned token has `null`.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct BiasSetting {
    token: u32,
    bias: Option<f32>,
}

impl SamplingSettings {
    /// Shows the seed that was drawn.
    pub(crate) fn set_seed(&mut self, seed: u64) {
        self.seed = i64::try_from(seed).unwrap_or(i64::MAX);
    }

    /// What is in effect. `ignore_eos` shows as a ban on each end-of-generation token.
    pub(crate) fn new(info: &EngineInfo, params: &SamplingParams) -> Self {
        let banned = if params.ignore_eos { info.tokenizer.eog_ids() } else { &[] };
        let bias = |token: u32, bias: f32| BiasSetting { token, bias: Some(bias).filter(|bias| bias.is_finite()) };
        SamplingSettings {
            seed: params.seed,
            temperature: params.temperature,
            dynatemp_range: params.dynatemp_range,
            dynatemp_exponent: params.dynatemp_exponent,
            top_k: params.top_k,
            top_p: params.top_p,
            min_p: params.min_p,
            top_n_sigma: params.top_n_sigma,
            xtc_probability: params.xtc_probability,
            xtc_threshold: params.xtc_threshold,
            typical_p: params.typical_p,
            repeat_last_n: params.repeat_last_n,
            repeat_penalty: params.repeat_penalty,
            presence_penalty: params.presence_penalty,
            frequency_penalty: params.frequency_penalty,
            dry_multiplier: params.dry_multiplier,
            dry_base: params.dry_base,
            dry_allowed_length: params.dry_allowed_length,
            dry_penalty_last_n: params.dry_penalty_last_n,
            dry_sequence_breakers: params.dry_sequence_breakers.clone(),
            mirostat: params.mirostat,
            mirostat_tau: params.mirostat_tau,
            mirostat_eta: params.mirostat_eta,
            adaptive_target: params.adaptive_target,
            adaptive_decay: params.adaptive_decay,
            min_keep: params.min_keep,
            n_probs: params.n_probs,
            post_sampling_probs: params.post_sampling_probs,
            ignore_eos: params.ignore_eos,
            logit_bias: banned
                .iter()
                .map(|&token| bias(token, f32::NEG_INFINITY))
                .chain(params.logit_bias.iter().map(|&(token, value)| bias(token, value)))
                .collect(),
            samplers: params.samplers.iter().map(|sampler| sampler.name()).collect(),
        }
    }
}
