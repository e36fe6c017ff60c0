//! What the flags, the environment and the config file amount to: plain values, nothing opened or checked yet.

use std::path::PathBuf;

use opencoti_model::layer_plan::RepeatLayers;

use crate::choice;
use crate::flags::FLAGS;
use crate::flags::value::{Bytes, JsonTable};

choice! {
    /// Where log lines go in which form.
    LogFormat {
        /// For people.
        Text = "text",
        /// One JSON object a line.
        Json = "json",
    }
}

choice! {
    /// Rotation in front of a scalar codec.
    Rotation {
        /// Rotate what is quantised, leave f16 and bf16 alone.
        Auto = "auto",
        /// Never.
        None = "none",
        /// Always.
        Hadamard = "hadamard",
    }
}

choice! {
    /// What admission does with a request that does not fit.
    Admission {
        /// Nothing is priced.
        Off = "off",
        /// Let in, with a warning header.
        Warn = "warn",
        /// 429 with `Retry-After`.
        Enforced = "enforced",
    }
}

choice! {
    /// Which origins a browser may call from.
    CorsOrigins {
        /// Any.
        Any = "*",
        /// Pages from this machine.
        Localhost = "localhost",
    }
}

choice! {
    /// What runs the model.
    DeviceChoice {
        /// A card if there is one that can, else the processor.
        Auto = "auto",
        /// The processor.
        Cpu = "cpu",
        /// A card, or a refusal.
        Cuda = "cuda",
    }
}

choice! {
    /// Pooling of embeddings.
    PoolingChoice {
        /// What the model says, else mean.
        Auto = "auto",
        /// Mean over the tokens.
        Mean = "mean",
        /// The last token.
        Last = "last",
        /// The first token.
        Cls = "cls",
        /// One vector a token.
        None = "none",
        /// The scores of a ranking head.
        Rank = "rank",
    }
}

/// A `[[plugin]]` table.
#[derive(Clone, Debug, PartialEq)]
pub struct PluginTable {
    /// Name in the manifest.
    pub name: String,
    /// Semver requirement.
    pub version: Option<String>,
    /// A file instead of a search.
    pub path: Option<PathBuf>,
    /// Expected SHA-256 of the file, hexadecimal.
    pub sha256: Option<String>,
    /// Kind the plugin must have.
    pub kind: Option<String>,
    /// Config handed to the plugin.
    pub config: serde_json::Value,
}

/// All settings.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Model file.
    pub model: Option<PathBuf>,
    /// Served name.
    pub alias: Option<String>,
    /// Template in place of the file's.
    pub chat_template_file: Option<PathBuf>,
    /// Blocks that run twice.
    pub repeat_layers: RepeatLayers,
    /// Context of a sequence; 0 for the model's.
    pub ctx_size: u32,
    /// Bound on generated tokens where a request sets none; negative for none.
    pub n_predict: i32,
    /// Slots.
    pub parallel: u32,
    /// Slots that may be opened; 0 for those alone.
    pub max_parallel: u32,
    /// Tokens a second of each sequence with another slot; 0 for no bound.
    pub max_parallel_tps_floor: f32,
    /// Bytes that must be free for another slot.
    pub max_parallel_reserve: Bytes,
    /// Tokens a step.
    pub batch_size: u32,
    /// Waiting requests.
    pub max_queue: u32,
    /// Compute threads; 0 for one a core.
    pub threads: u32,
    /// What runs the model.
    pub device: DeviceChoice,
    /// Pooling of embeddings.
    pub pooling: PoolingChoice,
    /// Codec of keys.
    pub kv_k: String,
    /// Codec of values.
    pub kv_v: String,
    /// Rotation of scalar codecs.
    pub kv_rotation: Rotation,
    /// Further options of the key codec.
    pub kv_k_options: JsonTable,
    /// Further options of the value codec.
    pub kv_v_options: JsonTable,
    /// Tokens the cache holds; 0 for as many as fit.
    pub kv_tokens: u32,
    /// Newest tokens that are kept exact; -1 for as many as the codecs should have.
    pub kv_stage_tokens: i32,
    /// First tokens that are kept exact.
    pub kv_stage_sink: u32,
    /// Their codec.
    pub kv_stage_codec: String,
    /// Whether all sequences share the cells.
    pub kv_unified: bool,
    /// Sequences with a window; 0 for all.
    pub swa_seq_budget: u32,
    /// Bytes the cache may take; 0 for half of the free memory.
    pub kv_budget: Bytes,
    /// Sequences kept for their prefix.
    pub retain: u32,
    /// Snapshots kept.
    pub snapshots: u32,
    /// Pools at a time.
    pub max_pools: u32,
    /// Admission mode.
    pub admission: Admission,
    /// Folders searched for plugins.
    pub plugin_dirs: Vec<String>,
    /// Folder of the loaded copies.
    pub plugin_cache: Option<PathBuf>,
    /// `[[plugin]]` tables; empty for the built-in set.
    pub plugins: Vec<PluginTable>,
    /// Address.
    pub host: String,
    /// Port.
    pub port: u16,
    /// Prefix of every route.
    pub api_prefix: String,
    /// Keys.
    pub api_keys: Vec<String>,
    /// File of keys.
    pub api_key_file: Option<PathBuf>,
    /// CORS.
    pub cors_origins: CorsOrigins,
    /// `GET /slots`.
    pub slots: bool,
    /// `GET /metrics`.
    pub metrics: bool,
    /// `POST /props`.
    pub props: bool,
    /// Folder of saved slots.
    pub slot_save_path: Option<PathBuf>,
    /// Seconds a request may take.
    pub timeout: u32,
    /// Largest body.
    pub max_body: Bytes,
    /// Seconds of silence before an SSE ping.
    pub sse_ping_interval: i32,
    /// Log filter.
    pub log_level: String,
    /// Log form.
    pub log_format: LogFormat,
    /// Sampling defaults.
    pub temperature: f32,
    /// Sampling default.
    pub top_k: u32,
    /// Sampling default.
    pub top_p: f32,
    /// Sampling default.
    pub min_p: f32,
    /// Sampling default.
    pub repeat_penalty: f32,
    /// Sampling default.
    pub seed: i64,
}

impl Settings {
    /// Slots in all, those included that are opened when they are needed.
    pub fn slots(&self) -> u32 {
        self.parallel.max(self.max_parallel)
    }

    /// Every field at its flag's default.
    pub fn with_defaults() -> Self {
        let mut settings = Settings::default();
        for flag in FLAGS.iter().filter(|f| !f.default.is_empty()) {
            // A test holds every default to be valid.
            let _ = (flag.set_text)(&mut settings, flag.default);
        }
        settings
    }
}

/// Blank values, to be filled from the flags' defaults.
impl Default for Settings {
    fn default() -> Self {
        Settings {
            model: None,
            alias: None,
            chat_template_file: None,
            repeat_layers: RepeatLayers::default(),
            ctx_size: 0,
            n_predict: 0,
            parallel: 0,
            max_parallel: 0,
            max_parallel_tps_floor: 0.0,
            max_parallel_reserve: Bytes(0),
            batch_size: 0,
            max_queue: 0,
            threads: 0,
            device: DeviceChoice::Cpu,
            pooling: PoolingChoice::Auto,
            kv_k: String::new(),
            kv_v: String::new(),
            kv_rotation: Rotation::Auto,
            kv_k_options: JsonTable::default(),
            kv_v_options: JsonTable::default(),
            kv_tokens: 0,
            kv_stage_tokens: 0,
            kv_stage_sink: 0,
            kv_stage_codec: String::new(),
            kv_unified: true,
            swa_seq_budget: 0,
            kv_budget: Bytes(0),
            retain: 0,
            snapshots: 0,
            max_pools: 0,
            admission: Admission::Off,
            plugin_dirs: Vec::new(),
            plugin_cache: None,
            plugins: Vec::new(),
            host: String::new(),
            port: 0,
            api_prefix: String::new(),
            api_keys: Vec::new(),
            api_key_file: None,
            cors_origins: CorsOrigins::Any,
            slots: false,
            metrics: false,
            props: false,
            slot_save_path: None,
            timeout: 0,
            max_body: Bytes(0),
            sse_ping_interval: 0,
            log_level: String::new(),
            log_format: LogFormat::Text,
            temperature: 0.0,
            top_k: 0,
            top_p: 0.0,
            min_p: 0.0,
            repeat_penalty: 0.0,
            seed: 0,
        }
    }
}
