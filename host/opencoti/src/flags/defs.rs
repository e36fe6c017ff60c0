//! The flags. The doc comment of each is its help: the first line says what it is, the rest what to know.

use std::path::PathBuf;

use opencoti_model::layer_plan::RepeatLayers;

use super::value::{Bytes, JsonTable};
use super::{Entry, Flag};
use crate::settings::{Admission, CorsOrigins, DeviceChoice, LogFormat, PoolingChoice, Rotation, Settings};

macro_rules! flags {
    ($(
        $(#[doc = $doc:literal])+
        $name:ident: $ty:ty = $default:literal, $long:literal $(/ $short:literal)?, $key:literal, |$s:ident, $v:ident| $set:expr;
    )+) => {
        $(
            $(#[doc = $doc])+
            struct $name;

            impl Flag for $name {
                type Value = $ty;
                const LONG: &'static str = $long;
                const SHORT: Option<char> = flags!(@short $($short)?);
                const KEY: &'static str = $key;
                const DEFAULT: &'static str = $default;
                const HELP: &'static str = concat!($($doc, "\n"),+);

                fn set($s: &mut Settings, $v: $ty) {
                    $set
                }
            }
        )+

        /// Every flag, in the order of the reference.
        pub static FLAGS: &[Entry] = &[$(Entry::of::<$name>()),+];
    };
    (@short $short:literal) => { Some($short) };
    (@short) => { None };
}

flags! {
    /// Model file (GGUF), or a folder with a BERT encoder as Hugging Face publishes it.
    ///
    /// The first file of a split model is enough. A folder holds `config.json`, `model.safetensors` and `tokenizer.json`. There is
    /// no default: `serve` needs one.
    Model: PathBuf = "", "model" / 'm', "model.path", |s, v| s.model = Some(v);

    /// Name under which the model is served.
    ///
    /// Without it: the model's own name, else the file's.
    Alias: String = "", "alias", "model.alias", |s, v| s.alias = Some(v);

    /// Jinja chat template in place of the model's.
    ///
    /// Without it: the model's own, else the default of its architecture; the boot summary says which.
    ChatTemplateFile: PathBuf = "", "chat-template-file", "model.chat_template_file",
        |s, v| s.chat_template_file = Some(v);

    /// Blocks of the model that run twice (RYS).
    ///
    /// Ranges `A-B` or `A,B` of blocks from A up to, not including, B, with `;` between them: `26-34`, `8-12;20-24`. A range
    /// repeats as a unit behind itself; weights are shared, each pass has a KV cache of its own. Middle blocks suit; the
    /// boot summary warns about the outer ones. Nothing is repeated by default.
    RepeatLayersFlag: RepeatLayers = "", "repeat-layers", "model.repeat_layers", |s, v| s.repeat_layers = v;

    /// How embeddings are pooled.
    ///
    /// `auto` takes what the model file says, else the mean. `rank` needs a model with a ranking head (a cross-encoder), which
    /// then serves `/v1/rerank` and no embeddings. A model that says how it pools, or is told here, ranks by the cosine of
    /// embeddings.
    Pooling: PoolingChoice = "auto", "pooling", "model.pooling", |s, v| s.pooling = v;

    /// Tokens a sequence may hold.
    ///
    /// 0 takes the model's training context, at most 8192.
    CtxSize: u32 = "0", "ctx-size", "engine.ctx_size", |s, v| s.ctx_size = v;

    /// Requests that run at the same time (slots).
    ParallelFlag: u32 = "4", "parallel" / 'p', "engine.parallel", |s, v| s.parallel = v;

    /// Most requests that run at the same time, once all others are busy and somebody waits.
    ///
    /// Beyond `engine.parallel`, slots are opened one at a time while each sequence would keep its rate and the machine has memory to
    /// spare. 0 opens none.
    MaxParallel: u32 = "0", "max-parallel", "engine.max_parallel", |s, v| s.max_parallel = v;

    /// Tokens a second that each sequence must still have for another slot to be opened; 0 for no bound.
    MaxParallelTpsFloor: f32 = "0", "max-parallel-tps-floor", "engine.max_parallel_tps_floor", |s, v| s.max_parallel_tps_floor = v;

    /// Memory that must be free on the machine for another slot to be opened.
    MaxParallelReserve: Bytes = "512MiB", "max-parallel-reserve", "engine.max_parallel_reserve", |s, v| s.max_parallel_reserve = v;

    /// Tokens computed in one step.
    ///
    /// Running answers get their token in every step; prompts share what is left. Smaller keeps answers smoother while
    /// long prompts come in, larger reads prompts faster.
    BatchSize: u32 = "512", "batch-size" / 'b', "engine.batch_size", |s, v| s.batch_size = v;

    /// Requests that may wait for a slot; one more is answered 429.
    MaxQueue: u32 = "256", "max-queue", "engine.max_queue", |s, v| s.max_queue = v;

    /// What runs the model.
    ///
    /// `cuda` takes an NVIDIA card, with its driver, NVRTC and kernels for the model, and refuses to start without. `auto` then takes
    /// the processor and says why. A card rounds operands to f16.
    Device: DeviceChoice = "cpu", "device", "engine.device", |s, v| s.device = v;

    /// Compute threads.
    ///
    /// 0 takes one for each core.
    Threads: u32 = "0", "threads" / 't', "engine.threads", |s, v| s.threads = v;

    /// Most tokens generated for a request that sets no bound.
    ///
    /// -1 goes on until the text or the context ends. Admission reserves room for a bound.
    NPredict: i32 = "-1", "n-predict" / 'n', "engine.n_predict", |s, v| s.n_predict = v;

    /// Codec of the keys in the KV cache.
    ///
    /// Any codec of a loaded plugin; `opencoti plugins` lists them. The plugin kv-scalar brings f16, bf16, q8_0, q6_0,
    /// q5_1, q5_0 and q4_0; kv-turbo turbo2, turbo3, turbo4 and turbo8; kv-tcq turbo2_tcq and turbo3_tcq; kv-kvarn kvarn2,
    /// kvarn3, kvarn4, kvarn5, kvarn6 and kvarn8.
    KvK: String = "f16", "cache-type-k", "kv.k", |s, v| s.kv_k = v;

    /// Codec of the values in the KV cache.
    KvV: String = "f16", "cache-type-v", "kv.v", |s, v| s.kv_v = v;

    /// Orthonormal rotation in front of scalar codecs.
    ///
    /// `auto` rotates what is quantised (q4_0 … q8_0), which costs little and makes it much more faithful, and leaves
    /// f16 and bf16 alone.
    KvRotation: Rotation = "auto", "cache-rotation", "kv.rotation", |s, v| s.kv_rotation = v;

    /// Further options of the key codec.
    ///
    /// A table in the config file, a JSON object elsewhere; the codec's plugin says which options it knows. Every codec
    /// has `table`, a file of `opencoti lab calibrate`, by which the host prepares the channels of keys before they are
    /// stored, and `prepare`, what it takes of it: `both` (when absent), `mean` or `scale`. None are set by default.
    KvKOptions: JsonTable = "", "cache-options-k", "kv.k_options", |s, v| s.kv_k_options = v;

    /// Further options of the value codec.
    ///
    /// As for the keys; of a `table`, values take the `scale` alone. None are set by default.
    KvVOptions: JsonTable = "", "cache-options-v", "kv.v_options", |s, v| s.kv_v_options = v;

    /// Tokens the KV cache holds, all sequences together.
    ///
    /// 0 takes the context times the slots, or as many as the budget holds.
    KvTokens: u32 = "0", "cache-tokens", "kv.tokens", |s, v| s.kv_tokens = v;

    /// Newest tokens that are kept exact, beside the page that is being filled.
    ///
    /// Works with every codec, and helps all that lose something. Rounded up to pages of 128; which tokens a query meets
    /// exactly depends on its position alone. -1 takes 512 for codecs that encode pages as a whole (kvarn2 … kvarn8),
    /// and none for others.
    KvStageTokens: i32 = "-1", "cache-stage-tokens", "kv.stage.tokens", |s, v| s.kv_stage_tokens = v;

    /// First tokens that are kept exact.
    ///
    /// Rounded up to pages of 128; for layers that see all tokens. Many models attend to their first tokens more than to
    /// any others.
    KvStageSink: u32 = "0", "cache-stage-sink", "kv.stage.sink", |s, v| s.kv_stage_sink = v;

    /// Codec of exact tokens.
    KvStageCodec: String = "f16", "cache-stage-type", "kv.stage.codec", |s, v| s.kv_stage_codec = v;

    /// All sequences share the cells of the cache.
    ///
    /// With false each slot has room for a whole context of its own, which nobody else can take: the context is then at most
    /// `kv.tokens` divided by `engine.parallel`, and every request reserves all of it.
    KvUnified: bool = "true", "kv-unified", "kv.unified", |s, v| s.kv_unified = v;

    /// Sequences for which stores of sliding windows have room; 0 for all slots and pools.
    ///
    /// Fewer take less memory; a request for which there is no window is refused before any work.
    SwaSeqBudget: u32 = "0", "swa-seq-budget", "kv.swa_seq_budget", |s, v| s.swa_seq_budget = v;

    /// Memory the KV cache may take.
    ///
    /// 0 takes half of what is free at the start.
    KvBudget: Bytes = "0", "cache-budget", "kv.budget", |s, v| s.kv_budget = v;

    /// Finished sequences kept so that later prompts can share their prefix.
    ///
    /// They are dropped, oldest first, when their pages are needed.
    Retain: u32 = "64", "cache-retain", "kv.retain", |s, v| s.retain = v;

    /// Snapshots kept at positions of prompts, so that others can go on from there.
    ///
    /// A model with recurrent layers can share a prompt only where a snapshot of its state is, one with sliding windows
    /// only where its windows still reach. The oldest are dropped first; none are kept with 0, or when `kv.retain` is 0,
    /// and fewer when their state takes more than half of the budget.
    Snapshots: u32 = "16", "cache-snapshots", "kv.snapshots", |s, v| s.snapshots = v;

    /// Pools of prefixes at a time; 0 turns `/polykv` off.
    ///
    /// Each takes a place of its own beside the slots in stores of sliding windows and of recurrent state, and its pages
    /// once it is made. See `docs/pools.md`.
    MaxPools: u32 = "0", "polykv-max-pools", "kv.max_pools", |s, v| s.max_pools = v;

    /// What happens to a request whose demand the cache can't hold.
    ///
    /// The demand is the prompt, less what is shared already, plus the declared bound on generated tokens; it is
    /// reserved before any work. `enforced` answers 429 with `Retry-After`, `warn` lets it in and marks the answer,
    /// `off` does not price at all.
    AdmissionFlag: Admission = "enforced", "admission-poolless", "admission.mode", |s, v| s.admission = v;

    /// Folders searched for plugins, in this order.
    ///
    /// Without any: `plugins` beside the program, and the folder of the program itself.
    PluginDirs: Vec<String> = "", "plugin-dirs", "plugins.dirs", |s, v| s.plugin_dirs = v;

    /// Folder for the copies that are loaded.
    ///
    /// A plugin file is copied to a name made of its contents before it is opened, so that replacing the file can't
    /// harm a running server. Without it: `opencoti/plugins` in the user's cache folder.
    PluginCache: PathBuf = "", "plugin-cache", "plugins.cache", |s, v| s.plugin_cache = Some(v);

    /// Address to listen on.
    ///
    /// An address ending in `.sock` is the path of a Unix socket.
    Host: String = "127.0.0.1", "host", "server.host", |s, v| s.host = v;

    /// Port to listen on; 0 takes a free one.
    Port: u16 = "8080", "port", "server.port", |s, v| s.port = v;

    /// Prefix of every route.
    ///
    /// Without it routes are as documented.
    ApiPrefix: String = "", "api-prefix", "server.api_prefix", |s, v| s.api_prefix = v;

    /// Keys of which a client must present one.
    ///
    /// Sent as `Authorization: Bearer KEY` or `X-Api-Key: KEY`. Without any, no key is asked for.
    ApiKey: Vec<String> = "", "api-key", "server.api_keys", |s, v| s.api_keys = v;

    /// File with keys, one a line.
    ///
    /// Without it only `api_keys` count.
    ApiKeyFile: PathBuf = "", "api-key-file", "server.api_key_file", |s, v| s.api_key_file = Some(v);

    /// Origins from which a browser may call.
    Cors: CorsOrigins = "*", "cors-origins", "server.cors_origins", |s, v| s.cors_origins = v;

    /// Serve `GET /slots`.
    Slots: bool = "true", "slots", "server.slots", |s, v| s.slots = v;

    /// Serve `GET /metrics` (Prometheus).
    Metrics: bool = "true", "metrics", "server.metrics", |s, v| s.metrics = v;

    /// Allow `POST /props` to change defaults.
    Props: bool = "false", "props", "server.props", |s, v| s.props = v;

    /// Folder for saved slots.
    ///
    /// Without it saving, restoring and erasing slots is off (501).
    SlotSavePath: PathBuf = "", "slot-save-path", "server.slot_save_path", |s, v| s.slot_save_path = Some(v);

    /// Seconds a request may take, waiting included.
    Timeout: u32 = "3600", "timeout", "server.timeout", |s, v| s.timeout = v;

    /// Largest request body.
    MaxBody: Bytes = "32MiB", "max-body", "server.max_body", |s, v| s.max_body = v;

    /// Seconds of silence in a stream before a ping comment; -1 for never.
    SsePing: i32 = "30", "sse-ping-interval", "server.sse_ping_interval", |s, v| s.sse_ping_interval = v;

    /// What is logged: error, warn, info, debug, trace, or a filter such as `info,opencoti_engine=debug`.
    LogLevel: String = "info", "log-level", "log.level", |s, v| s.log_level = v;

    /// Form of log lines.
    LogFormatFlag: LogFormat = "text", "log-format", "log.format", |s, v| s.log_format = v;

    /// Temperature where a request sets none; 0 is greedy.
    Temperature: f32 = "0.8", "temp", "sampling.temperature", |s, v| s.temperature = v;

    /// Top-k where a request sets none; 0 keeps all.
    TopK: u32 = "40", "top-k", "sampling.top_k", |s, v| s.top_k = v;

    /// Top-p where a request sets none; 1 keeps all.
    TopP: f32 = "0.95", "top-p", "sampling.top_p", |s, v| s.top_p = v;

    /// Min-p where a request sets none; 0 keeps all.
    MinP: f32 = "0.05", "min-p", "sampling.min_p", |s, v| s.min_p = v;

    /// Repetition penalty where a request sets none; 1 is off.
    RepeatPenalty: f32 = "1.0", "repeat-penalty", "sampling.repeat_penalty", |s, v| s.repeat_penalty = v;

    /// Seed where a request sets none; -1 draws one.
    Seed: i64 = "-1", "seed" / 's', "sampling.seed", |s, v| s.seed = v;
}
