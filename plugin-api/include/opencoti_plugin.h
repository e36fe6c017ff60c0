// The plugin ABI of opencoti, for C, C++ and Zig.
//
// Generated from the crate opencoti-plugin-api; do not edit. A plugin is a shared library that exports
// opencoti_plugin_root. Structs that start with their size may get more fields at the end in later versions: set
// size to sizeof of the struct you were compiled with, and read no field beyond the size the other side gives.
//
// Labels: [main-thread] while loading, one call at a time; [engine-thread] by the scheduler's thread, one call at a
// time; [worker, re-entrant] by several threads at once, never on the same tile for writing; [any-thread] by anybody
// at any time. Pointers passed to a function are valid until it returns, unless said otherwise.

#pragma once

#include <stddef.h>
#include <stdint.h>

// Id of the extension with a codec's own CPU kernels.
#define OPENCOTI_CPU_TILES_ID "opencoti.codec.cpu-tiles/1"

// Id of the extension with a codec's source for GPUs.
#define OPENCOTI_DEVICE_SOURCE_ID "opencoti.codec.device-source/1"

// Reserved: id of the host's graph builder.
#define OPENCOTI_GRAPH_BUILDER_ID "opencoti.host.graph-builder/1"

// Reserved: id of the host's GGUF loading.
#define OPENCOTI_GGUF_ID "opencoti.host.gguf/1"

// Name of a kind, for the manifest.
#define OPENCOTI_KIND_KV_CODEC "kv-codec"

// Name of a kind, for the manifest.
#define OPENCOTI_KIND_RESIDENCY_POLICY "residency-policy"

// Name of a kind, for the manifest.
#define OPENCOTI_KIND_ATTENTION_VARIANT "attention-variant"

// Name of a kind, for the manifest.
#define OPENCOTI_KIND_DRAFTER "drafter"

// Name of a kind, for the manifest.
#define OPENCOTI_KIND_ADMISSION_POLICY "admission-policy"

// Name of a kind, for the manifest.
#define OPENCOTI_KIND_PACING_POLICY "pacing-policy"

// Name of a kind, for the manifest.
#define OPENCOTI_KIND_DRAFT_DEPTH_POLICY "draft-depth-policy"

// Name of a kind, for the manifest.
#define OPENCOTI_KIND_MEDIA_ENGINE "media-engine"


// Tokens in a page of the KV cache. A *tile* is one KV head's share of a page: one layer, one side, one head.
#define OPENCOTI_PAGE_TOKENS 128

// Let it in.
#define OPENCOTI_VERDICT_ADMIT 0

// Keep it in the queue.
#define OPENCOTI_VERDICT_QUEUE 1

// Answer 429 with `Retry-After`.
#define OPENCOTI_VERDICT_REJECT 2

// Level of a log line: something failed.
#define OPENCOTI_LOG_ERROR 1

// Level of a log line: something looks wrong.
#define OPENCOTI_LOG_WARN 2

// Level of a log line: worth knowing.
#define OPENCOTI_LOG_INFO 3

// Level of a log line: for debugging.
#define OPENCOTI_LOG_DEBUG 4

// Level of a log line: every step.
#define OPENCOTI_LOG_TRACE 5

// Side code of keys.
#define OPENCOTI_SIDE_K 0

// Side code of values.
#define OPENCOTI_SIDE_V 1

// Decoded rows are what was stored.
#define OPENCOTI_DOMAIN_PLAIN 0

// Decoded rows are in the codec's own orthonormal basis.
#define OPENCOTI_DOMAIN_ROTATED 1

// Why the policy is asked.
#define OPENCOTI_EVENT_START 0

// The cache has grown.
#define OPENCOTI_EVENT_GROWTH 1

// Device memory is short.
#define OPENCOTI_EVENT_PRESSURE 2

// Pages were released.
#define OPENCOTI_EVENT_RELEASE 3

// First field of every root: the bytes `opencoti` in little-endian order. Tells a plugin from a library that happens
// to export the symbol.
#define OPENCOTI_ROOT_MAGIC 7598820944125456495

// A semantic version of the API.
typedef struct {
  // Changes when old plugins no longer load.
  uint32_t major;
  // Changes when fields or extensions are added.
  uint32_t minor;
  // Changes when nothing but code changes.
  uint32_t patch;
} OpencotiApiVersion;

// A borrowed UTF-8 string, not zero-terminated.
//
// Valid as long as the function that received it runs, unless its documentation says otherwise.
typedef struct {
  // First byte; may be null when `len` is 0.
  const uint8_t *ptr;
  // Bytes.
  size_t len;
} OpencotiStr;

// A buffer the caller owns and the callee writes text into. Longer text is cut at a character boundary.
typedef struct {
  // First byte of the buffer; may be null when `capacity` is 0.
  uint8_t *ptr;
  // Bytes that fit.
  size_t capacity;
  // Bytes written.
  size_t len;
} OpencotiTextBuf;

// Result of an ABI call. Text, where there is any, is in the call's OpencotiTextBuf.
typedef uint32_t OpencotiStatus;
// Done.
#define OPENCOTI_OK 0
// The call failed; the plugin stays usable.
#define OPENCOTI_ERROR 1
// The plugin panicked; the host puts it in quarantine.
#define OPENCOTI_PANIC 2
// The request can't be served by this plugin (a head size, a side, an option).
#define OPENCOTI_UNSUPPORTED 3

// What a plugin says of itself. All text is static: valid for as long as the process lives.
typedef struct {
  // Bytes of this struct as the plugin was built.
  size_t size;
  // Name by which a config selects it, for example `kv-scalar`.
  OpencotiStr name;
  // Its own semantic version.
  OpencotiStr version;
  // A kind's name (name).
  OpencotiStr kind;
  // SPDX licence expression.
  OpencotiStr license;
  // One line for people.
  OpencotiStr summary;
  // What it needs beyond the ABI, names separated by spaces (`files`, `network`); empty for nothing.
  OpencotiStr capabilities;
  // JSON schema of its `config` table; empty for none.
  OpencotiStr config_schema;
} OpencotiManifest;

// What the host gives a plugin. Valid for as long as the process lives, so that a plugin's own thread may still log
// after its instance was destroyed.
typedef struct {
  // Bytes of this struct as the host was built.
  size_t size;
  // Passed back to every function.
  void *context;
  // `[any-thread]` Logs one line at one of the `LOG_` levels; the host adds the plugin's name.
  void (*log)(void *context, uint32_t level, OpencotiStr message);
  // `[any-thread]` Sets the gauge `opencoti_plugin_<name>` of this plugin.
  void (*gauge)(void *context, OpencotiStr name, double value);
  // `[any-thread]` Nanoseconds since the host started; monotonic.
  uint64_t (*clock_ns)(void *context);
  // `[any-thread]` Bytes this plugin may allocate for tables of its own; 0 for no stated limit.
  uint64_t (*memory_budget)(void *context);
  // `[any-thread]` A further service by id, a static struct, or null.
  const void *(*service)(void *context, OpencotiStr id);
} OpencotiHostServices;

// The root of a plugin. Static; reached only through a pointer. `magic`, `size` and `api` keep their places in
// every major version, so that any host can say what it found.
typedef struct {
  // OPENCOTI_ROOT_MAGIC.
  uint64_t magic;
  // Bytes of this struct as the plugin was built.
  size_t size;
  // The API it was built with.
  OpencotiApiVersion api;
  // Who it is.
  const OpencotiManifest *manifest;
  // The function table of its kind (OpencotiKvCodecVtbl and so on), static.
  const void *interface;
  // `[main-thread]` Makes an instance from its config (JSON text, valid until it returns). `host` stays
  // valid for as long as the process lives. On success `*out` is set and the instance is given back through `destroy`.
  OpencotiStatus (*create)(const OpencotiHostServices *host,
                           OpencotiStr config,
                           void **out,
                           OpencotiTextBuf *error);
  // `[main-thread]` Ends an instance; nothing made by it is used afterwards. Not called once the plugin is in
  // quarantine.
  OpencotiStatus (*destroy)(void *instance, OpencotiTextBuf *error);
} OpencotiPluginRoot;

// One field of an ABI struct.
typedef struct {
  // Name in the source.
  OpencotiStr name;
  // Type as source text, without names of arguments and without spaces that carry no meaning.
  OpencotiStr ty;
  // Bytes from the start of the struct.
  uint32_t offset;
  // Bytes.
  uint32_t size;
} OpencotiFieldLayout;

// One ABI struct.
typedef struct {
  // Name in the source.
  OpencotiStr name;
  // 1 when later minor versions may add fields at the end, 0 when frozen.
  uint32_t growing;
  // Bytes.
  uint32_t size;
  // Alignment in bytes.
  uint32_t align;
  // Number of `fields`.
  uint32_t n_fields;
  // The fields in order.
  const OpencotiFieldLayout *fields;
} OpencotiStructLayout;

// All structs of the API version a plugin was built with.
typedef struct {
  // The version of the API crate.
  OpencotiApiVersion api;
  // Number of `structs`.
  uint32_t n_structs;
  // The structs, in no particular order.
  const OpencotiStructLayout *structs;
} OpencotiLayoutTable;

// A codec's name and what it is for. Static text.
typedef struct {
  // Bytes of this struct as its writer was built.
  size_t size;
  // Name by which a config selects it, for example `q8_0`.
  OpencotiStr name;
  // One line for people.
  OpencotiStr summary;
} OpencotiCodecInfo;

// What a codec is opened for. Valid until `open` returns.
typedef struct {
  // Bytes of this struct as its writer was built.
  size_t size;
  // Which of the plugin's codecs.
  OpencotiStr codec;
  // Options as a JSON object, for example `{"rotation":"hadamard"}`.
  OpencotiStr options;
  // OPENCOTI_SIDE_K or OPENCOTI_SIDE_V.
  uint32_t side;
  // Values in a row.
  uint32_t head_dim;
} OpencotiCodecParams;

// What an opened codec needs and gives.
typedef struct {
  // Bytes of this struct as its writer was built.
  size_t size;
  // Bytes of a tile of OPENCOTI_PAGE_TOKENS slots; a multiple of 2. The host aligns tiles to 64 bytes.
  size_t tile_bytes;
  // Stored bits per value, scales included.
  float bits_per_value;
  // OPENCOTI_DOMAIN_PLAIN or OPENCOTI_DOMAIN_ROTATED.
  uint32_t domain;
  // Newest tokens that must be kept exact before a tile can be encoded; 0 for token-wise codecs.
  uint32_t stage_tokens;
} OpencotiCodecLayout;

// Functions of a codec plugin. `plugin` is the instance from the root's `create`, `codec` what `open` gave.
//
// Rows are `n` times `head_dim` f32 values, `stride` values apart. No function allocates in the host's view, and none
// keeps a pointer after it returned.
typedef struct {
  // Bytes of this struct as the plugin was built.
  size_t size;
  // `[main-thread]` Writes the number of codecs to `*out`.
  OpencotiStatus (*count)(void *plugin, uint32_t *out, OpencotiTextBuf *error);
  // `[main-thread]` Describes codec `index`, writing at most `out->size` bytes.
  OpencotiStatus (*info)(void *plugin, uint32_t index, OpencotiCodecInfo *out, OpencotiTextBuf *error);
  // `[main-thread]` Opens a codec; given back through `close`. An unsupported head size, side or option is
  // OPENCOTI_UNSUPPORTED.
  OpencotiStatus (*open)(void *plugin, const OpencotiCodecParams *params, void **out, OpencotiTextBuf *error);
  // `[any-thread]` Closes an opened codec that nobody uses any more. Not called once the plugin is in quarantine.
  OpencotiStatus (*close)(void *codec, OpencotiTextBuf *error);
  // `[any-thread]` Describes an opened codec, writing at most `out->size` bytes.
  OpencotiStatus (*layout)(void *codec, OpencotiCodecLayout *out, OpencotiTextBuf *error);
  // `[worker, re-entrant]` Encodes `n` rows into slots `first_slot ..` of a tile. Slots are written in order; a tile
  // starts with undefined bytes. When tokens are taken back, writing goes on at an earlier slot: from there on the
  // tile's slots are undefined again, those before stay as they are.
  OpencotiStatus (*append)(void *codec,
                           uint8_t *tile,
                           uint32_t first_slot,
                           uint32_t n,
                           const float *rows,
                           size_t stride,
                           OpencotiTextBuf *error);
  // `[worker, re-entrant]` Encodes a whole tile at once from OPENCOTI_PAGE_TOKENS rows (sealing).
  OpencotiStatus (*encode_page)(void *codec,
                                uint8_t *tile,
                                const float *rows,
                                size_t stride,
                                OpencotiTextBuf *error);
  // `[worker, re-entrant]` Decodes slots `first_slot .. first_slot + n` of a tile, in the codec's domain.
  OpencotiStatus (*decode_page)(void *codec,
                                const uint8_t *tile,
                                uint32_t first_slot,
                                uint32_t n,
                                float *rows,
                                size_t stride,
                                OpencotiTextBuf *error);
  // `[worker, re-entrant]` Brings query rows into the codec's domain, in place. Only called for rotated domains;
  // `size` may end before this field.
  OpencotiStatus (*transform_query)(void *codec,
                                    float *rows,
                                    uint32_t n,
                                    size_t stride,
                                    OpencotiTextBuf *error);
  // `[worker, re-entrant]` Brings attention outputs back to the plain basis, in place. Only called for rotated domains.
  OpencotiStatus (*transform_output)(void *codec,
                                     float *rows,
                                     uint32_t n,
                                     size_t stride,
                                     OpencotiTextBuf *error);
  // `[any-thread]` Writes to `*out` the extension of that id for an opened codec, a static struct, or null when
  // it has none.
  OpencotiStatus (*extension)(void *codec, OpencotiStr id, const void **out, OpencotiTextBuf *error);
} OpencotiKvCodecVtbl;

// Functions of the extension; `codec` is an opened codec. Frozen: a change is a new id.
typedef struct {
  // Bytes of this struct.
  size_t size;
  // `[any-thread]` Bytes of one prepared query row; a multiple of 64, the same for the life of the codec. Keys only.
  size_t (*query_bytes)(void *codec);
  // `[worker, re-entrant]` Prepares `n` query rows (scaled and at their rope position, in the plain basis) for
  // `score`. `prepared` is 64-byte aligned and holds `n * query_bytes` bytes. Keys only.
  OpencotiStatus (*prepare_query)(void *codec,
                                  const float *rows,
                                  uint32_t n,
                                  size_t stride,
                                  uint8_t *prepared,
                                  OpencotiTextBuf *error);
  // `[worker, re-entrant]` `scores[r * scores_stride + t] = q_r . k_(first_slot + t)` for `n_tokens` slots. Keys only.
  OpencotiStatus (*score)(void *codec,
                          const uint8_t *prepared,
                          uint32_t n_rows,
                          const uint8_t *tile,
                          uint32_t first_slot,
                          uint32_t n_tokens,
                          float *scores,
                          size_t scores_stride,
                          OpencotiTextBuf *error);
  // `[worker, re-entrant]` `acc_r += sum over t of weights[r * weights_stride + t] * v_(first_slot + t)`, in the
  // codec's domain; the host calls `transform_output` once at the end. Values only.
  OpencotiStatus (*accumulate)(void *codec,
                               const float *weights,
                               size_t weights_stride,
                               uint32_t n_rows,
                               const uint8_t *tile,
                               uint32_t first_slot,
                               uint32_t n_tokens,
                               float *acc,
                               size_t acc_stride,
                               OpencotiTextBuf *error);
} OpencotiCpuTilesVtbl;

// A source and the type in it that an opened codec is. Both texts live as long as the codec; empty texts say that there is
// none in the language asked for.
typedef struct {
  // Source text; the same for all codecs that share it, so that it is compiled in once.
  OpencotiStr text;
  // An expression that names the type, for example `my_codec::Codec<128>`.
  OpencotiStr name;
} OpencotiDeviceSource;

// Functions of the extension; `codec` is an opened codec. Frozen: a change is a new id.
typedef struct {
  // Bytes of this struct.
  size_t size;
  // `[main-thread]` Writes the source in `language`, for example `cuda-c++/1`, to `*out`.
  OpencotiStatus (*source)(void *codec,
                           OpencotiStr language,
                           OpencotiDeviceSource *out,
                           OpencotiTextBuf *error);
} OpencotiDeviceSourceVtbl;

// One cache group. Frozen.
typedef struct {
  // Bytes of a page, all layers of the group together.
  uint64_t page_bytes;
  // Pages the host wants to be able to hold.
  uint64_t pages_total;
  // Pages in use.
  uint64_t pages_used;
  // Layers in the group.
  uint32_t layers;
  // Sliding window in tokens; 0 for full attention.
  uint32_t window;
} OpencotiGroupState;

// What the policy is told. Valid until `plan` returns.
typedef struct {
  // Bytes of this struct as the host was built.
  size_t size;
  // One of the `EVENT_` codes.
  uint32_t event;
  // Number of `groups`.
  uint32_t n_groups;
  // The cache groups.
  const OpencotiGroupState *groups;
  // Bytes that KV may take on the device.
  uint64_t device_budget;
  // Bytes that KV may take in host memory beside it; 0 when the device is the host.
  uint64_t host_budget;
  // Measured bytes per second between them; 0 when there is no link.
  double link_bytes_per_second;
} OpencotiResidencySnapshot;

// What the policy answers. The host provides the arrays.
typedef struct {
  // Bytes of this struct as the host was built.
  size_t size;
  // Out: pages of each group that stay on the device (`n_groups` entries).
  uint64_t *device_pages;
  // Out: staging slots for streaming the rest.
  uint32_t staging_slots;
} OpencotiResidencyDecision;

// Functions of a residency plugin; `plugin` is the instance from the root's `create`.
typedef struct {
  // Bytes of this struct as the plugin was built.
  size_t size;
  // `[engine-thread]` Decides. An error refuses the configuration (at start) or keeps the last decision (later).
  OpencotiStatus (*plan)(void *plugin,
                         const OpencotiResidencySnapshot *snapshot,
                         OpencotiResidencyDecision *out,
                         OpencotiTextBuf *error);
} OpencotiResidencyPolicyVtbl;

// One store of the cache, in tokens. Frozen.
typedef struct {
  // Name for messages, for example `kv` or `swa`.
  OpencotiStr name;
  // Token slots it has.
  uint64_t total;
  // Slots neither used nor promised to anybody.
  uint64_t free;
  // Used slots that nobody is using now and that can be dropped.
  uint64_t reclaimable;
  // Sliding window in tokens; 0 for full attention.
  uint64_t window;
} OpencotiStoreState;

// The request. Valid until `decide` returns.
typedef struct {
  // Bytes of this struct as the host was built.
  size_t size;
  // Tokens of the prompt.
  uint64_t prompt_tokens;
  // Of these, tokens already in the cache that it will share.
  uint64_t shared_tokens;
  // The declared bound on generated tokens; 0 when it declares none.
  uint64_t declared_tokens;
  // 1 when the client asked to be let in whatever the price.
  uint32_t overcommit;
  // 1 when its session has run before.
  uint32_t known_session;
} OpencotiAdmissionRequest;

// The server. Valid until `decide` returns.
typedef struct {
  // Bytes of this struct as the host was built.
  size_t size;
  // The stores.
  const OpencotiStoreState *stores;
  // Number of `stores`.
  uint32_t n_stores;
  // Slots in all.
  uint32_t slots_total;
  // Slots without a request.
  uint32_t slots_free;
  // Requests waiting before this one.
  uint32_t queued;
  // Seconds until a running request is expected to end; 0 when unknown.
  float seconds_to_next_release;
} OpencotiAdmissionSnapshot;

// The answer.
typedef struct {
  // Bytes of this struct as the host was built.
  size_t size;
  // Out: one of the `VERDICT_` codes.
  uint32_t verdict;
  // Out: seconds for `Retry-After`, at least 1 with a rejection.
  uint32_t retry_after_seconds;
  // Out: tokens to reserve in every store (at most its window), before prefill; when the request is admitted though
  // a store is short, as many of them as the store has.
  uint64_t demand_tokens;
  // Out: 1 to mark the answer as saturated (a warning header) though admitted.
  uint32_t warn;
  // Out: index of the short store, or `u32::MAX`.
  uint32_t short_store;
  // Out: one sentence with a rejection or warning.
  OpencotiTextBuf reason;
} OpencotiAdmissionDecision;

// Functions of an admission plugin; `plugin` is the instance from the root's `create`.
typedef struct {
  // Bytes of this struct as the plugin was built.
  size_t size;
  // `[engine-thread]` Decides, within microseconds. On an error the host's built-in rule answers.
  OpencotiStatus (*decide)(void *plugin,
                           const OpencotiAdmissionRequest *request,
                           const OpencotiAdmissionSnapshot *snapshot,
                           OpencotiAdmissionDecision *out,
                           OpencotiTextBuf *error);
} OpencotiAdmissionPolicyVtbl;

// The version of this crate.
#define OPENCOTI_API_VERSION (OpencotiApiVersion){ .major = 1, .minor = 0, .patch = 0 }



// A string literal as an OpencotiStr. In C only for static data and arguments.
#define OPENCOTI_STR(literal) {(const uint8_t *)(literal), sizeof(literal) - 1}

#ifdef __cplusplus
extern "C" {
#endif

// Every plugin exports this: its root, static. [main-thread]
const OpencotiPluginRoot *opencoti_plugin_root(void);

// A plugin may export this: the layout of the structs it was compiled with. Without it the host checks sizes
// and versions only. [main-thread]
const OpencotiLayoutTable *opencoti_plugin_layout(void);

#ifdef __cplusplus
}
#endif
