//! A model that says what it is told: the last `[say]…[/say]` of the conversation, token by token.
//!
//! Everything around it is real: tokenizer, chat template, grammar, sampler, cache, scheduler, parsers and HTTP surface. So
//! tool calls, thoughts and whole conversations can be tested without a model that is clever enough to make them. The
//! script comes with the request, hence there is no state to agree upon: what is said depends on nothing but the tokens
//! that a row may see.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result};
use opencoti_compute::graph::KvGeometry;
use opencoti_compute::plan::{PageSet, Step};
use opencoti_engine::StepBudget;
use opencoti_engine::api::{EngineHandle, EngineInfo, Pooling, Ranking};
use opencoti_engine::engine::{Elastic, EngineConfig, EngineParts, ModelKind, spawn};
use opencoti_engine::runner::{StepOutputs, StepRunner};
use opencoti_engine::sampling::SamplingParams;
use opencoti_engine::vocab::Vocab;
use opencoti_kv::{Cache, CacheConfig, GroupConfig, ModelFingerprint, StateConfig};
use opencoti_model::Model;
use opencoti_model::chat::ChatTemplate;
use opencoti_model::tokenizer::{EncodeOptions, Tokenizer};
use opencoti_plugin_api::host::{CodecPlugin, Instance, NoSink};
use opencoti_plugin_api::kv_codec::Side;

/// ChatML with Hermes' tool calls and Qwen 3's thoughts.
const TEMPLATE: &str = r#"
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}
    {{- '<tools>' }}
    {%- for tool in tools %}{{- '\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\n</tools><|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' }}
        {%- if message.reasoning_content %}{{- '<think>\n' + message.reasoning_content + '\n</think>\n\n' }}{%- endif %}
        {{- message.content }}
        {%- for call in message.tool_calls %}
            {{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}{{- call.function.arguments | tojson }}{{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif not (tools and loop.first and message.role == 'system') %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}"#;
/// What begins an answer.
const HEADER: &str = "<|im_start|>assistant\n";
/// What may follow it in the prompt.
const NO_THOUGHT: &str = "<think>\n\n</think>\n\n";
/// Said where the conversation has no script.
const SILENCE: &str = "I was told to say nothing.";

const N_SLOTS: usize = 4;
const N_CTX: usize = 4096;
const N_BATCH: usize = 256;
const HEAD_DIM: usize = 32;

/// The model.
struct Scripted {
    tokenizer: Arc<Tokenizer>,
    header: Vec<u32>,
    no_thought: Vec<u32>,
    end: u32,
    /// Which token was written where.
    written: HashMap<(u32, u32, u32), u32>,
    logits: Vec<Vec<f32>>,
    hidden: Vec<f32>,
}

impl Scripted {
    fn new(tokenizer: Arc<Tokenizer>, end: u32) -> Result<Self> {
        let encode = |text| encode(&tokenizer, text).map_err(anyhow::Error::msg);
        let (header, no_thought) = (encode(HEADER)?, encode(NO_THOUGHT)?);
        let hidden = vec![0.0; HEAD_DIM];
        Ok(Scripted { header, no_thought, end, written: HashMap::new(), logits: Vec::new(), hidden, tokenizer })
    }

    fn write(&mut self, step: &Step) {
        for run in &step.groups[0].appends {
            for (i, row) in run.rows.clone().enumerate() {
                self.written.insert((run.store, run.page, run.first_slot + i as u32), step.tokens[row as usize]);
            }
        }
    }

    /// The tokens at positions 0 to the row's own.
    fn seen(&self, step: &Step, row: u32) -> Result<Vec<u32>, String> {
        let own = step.positions[row as usize];
        let mut seen = vec![None; own as usize + 1];
        for segment in step.groups[0].segments.iter().filter(|s| s.queries.iter().any(|q| q.contains(&row))) {
            let PageSet::All(pages) = &segment.pages else { return Err("a selection of pages".to_owned()) };
            for (span, slot) in pages.iter().flat_map(|span| (0..span.len).map(move |slot| (span, slot))) {
                if let Some(place) = seen.get_mut((span.start_pos + slot) as usize) {
                    *place = self.written.get(&(segment.store, span.page, slot)).copied();
                }
            }
        }
        seen.into_iter().collect::<Option<_>>().ok_or_else(|| format!("row {row} does not see all before it"))
    }

    /// The next token of the script; the end once it is said, or once something else was said than it tells.
    fn next(&self, seen: &[u32]) -> Result<u32, String> {
        let Some(at) = seen.windows(self.header.len()).rposition(|tokens| tokens == self.header) else {
            return Ok(self.end);
        };
        let (before, said) = (&seen[..at], &seen[at + self.header.len()..]);
        let said = said.strip_prefix(&self.no_thought[..]).unwrap_or(said);
        let text = String::from_utf8_lossy(&self.tokenizer.decode(before, true)).into_owned();
        let script = encode(&self.tokenizer, script(&text))?;
        Ok(script.strip_prefix(said).and_then(|rest| rest.first().copied()).unwrap_or(self.end))
    }
}

fn encode(tokenizer: &Tokenizer, text: &str) -> Result<Vec<u32>, String> {
    let options = EncodeOptions { add_special: false, parse_special: true };
    tokenizer.encode(text, options).map_err(|error| error.to_string())
}

/// The last script of a conversation.
fn script(text: &str) -> &str {
    let last = text.rsplit_once("[say]").and_then(|(_, rest)| rest.split_once("[/say]"));
    last.map_or(SILENCE, |(script, _)| script)
}

impl StepRunner for Scripted {
    fn run(&mut self, step: &Step) -> Result<StepOutputs<'_>, String> {
        self.write(step);
        self.logits.clear();
        for &row in &step.outputs {
            let next = self.next(&self.seen(step, row)?)?;
            let mut logits = vec![-100.0; self.tokenizer.n_vocab()];
            logits[next as usize] = 100.0;
            self.logits.push(logits);
        }
        Ok(StepOutputs {
            logits: self.logits.iter().map(Vec::as_slice).collect(),
            hidden: step.outputs.iter().map(|_| self.hidden.as_slice()).collect(),
        })
    }
}

/// Starts an engine whose model speaks by script, with the tokenizer of a model file, which must know ChatML's markers.
///
/// # Errors
/// If the file can't be read, or the engine not be started.
pub fn engine(model: &Path) -> Result<EngineHandle> {
    let tokenizer = Model::load(model)?.tokenizer;
    let vocab = Arc::new(Vocab::from(tokenizer.as_ref()));
    let end = *vocab.end_of_generation().first().context("the vocabulary has no end of an answer")?;
    let parts = EngineParts {
        config: EngineConfig {
            n_slots: N_SLOTS,
            open_slots: N_SLOTS,
            elastic: Elastic::default(),
            reserve_context: false,
            n_ctx: N_CTX,
            max_queue: 64,
            max_pools: 0,
            budget: StepBudget { n_batch: N_BATCH, prefill_chunk: 128, max_outputs: 64 },
            pooling: Pooling::Mean,
            model: ModelKind::Generator,
        },
        cache: cache()?,
        runner: Box::new(Scripted::new(Arc::clone(&tokenizer), end)?),
        vocab,
        model: ModelFingerprint { name: "scripted".to_owned(), digest: [0; 32] },
        admission: None,
    };
    Ok(spawn(parts, Arc::new(info(tokenizer)?))?.0)
}

fn cache() -> Result<Cache> {
    let codecs = CodecPlugin::new(Instance::create(opencoti_kv_scalar::root(), "{}", Arc::new(NoSink))?)?;
    let group = GroupConfig {
        name: "kv".to_owned(),
        geometry: KvGeometry { n_kv_heads: 1, k_head_dim: HEAD_DIM, v_head_dim: HEAD_DIM, window: None },
        n_layers: 1,
        k: codecs.open("f16", "{}", Side::K, HEAD_DIM)?,
        v: codecs.open("f16", "{}", Side::V, HEAD_DIM)?,
        stage: None,
    };
    Ok(Cache::new(CacheConfig {
        groups: vec![group],
        capacity_tokens: N_SLOTS * N_CTX,
        slots: N_SLOTS + 1,
        window_sequences: None,
        recent_sequences: 8,
        step_tokens: N_BATCH,
        rollback_tokens: 1,
        whole_texts: false,
        snapshots: 0,
        states: StateConfig::default(),
    })?)
}

fn info(tokenizer: Arc<Tokenizer>) -> Result<EngineInfo> {
    Ok(EngineInfo {
        model_alias: "scripted".to_owned(),
        model_path: String::new(),
        architecture: "scripted".to_owned(),
        file_type: "none".to_owned(),
        n_params: 0,
        model_bytes: 0,
        n_embd: HEAD_DIM as u32,
        n_ctx_train: N_CTX as u32,
        n_ctx: N_CTX as u32,
        n_slots: N_SLOTS as u32,
        kv_codecs: ("f16".to_owned(), "f16".to_owned()),
        residency_policy: None,
        repeat_layers: None,
        tokenizer,
        template: Arc::new(ChatTemplate::new(TEMPLATE, "", "<|im_end|>")?),
        template_source: "script".to_owned(),
        default_sampling: SamplingParams::default(),
        default_n_predict: Some(512),
        max_queue: 64,
        max_pools: 0,
        kv_unified: true,
        pooling: Pooling::Mean,
        generates: true,
        ranking: Ranking::Cosine,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_script_counts() {
        assert_eq!(script("a [say]one[/say] b [say]two[/say] c"), "two");
        assert_eq!(script("a [say]one"), SILENCE);
        assert_eq!(script("a"), SILENCE);
    }
}
