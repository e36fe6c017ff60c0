// Attention over segments of pages, fused with the codecs that wrote them, and the writing itself.
//
// The host puts in front of this file: the codecs' own source, and
//   KEYS, VALUES       types that implement the codec concept below
//   K_DIM, V_DIM       sizes of a key and of a value head, multiples of 32
// and `common.cuh` before both.
//
// ---- Codec concept, `opencoti.codec.device-source/1`, language `cuda-c++/1` --------------------------------------------
// struct Codec {
//     static constexpr int CHUNK;       // consecutive values that a thread loads at a time: 8, 16 or 32, dividing the head size
//     static constexpr bool TOKEN_SCALE; // whether decoded values still lack a factor that is one for a whole token
//     static constexpr bool ROTATED;    // whether decoded values are in a basis of the codec's own
//     struct Raw;                       // the bytes of a chunk
//     static Raw load(const u8 *tile, int slot, int chunk);         // reads global memory and computes nothing
//     static void decode(const Raw &raw, u32 (&out)[CHUNK / 2]);    // f16 pairs, the first in the low bits
//     static float token_scale(const u8 *tile, int slot);           // that factor: applied to scores and weights, not to values
//     static void encode(u8 *tile, int slot, float *row, int lane); // by a warp, from a row in shared memory, in the plain basis
//     static void rotate(float *row, int lane);                     // by a warp: a row of shared memory to the codec's basis
//     static void rotate_back(float *row, int lane);                // and back
// };
// Functions are `DEV`; they may use what common.cuh has. Slots are read only after they were written.

constexpr int DIM = K_DIM > V_DIM ? K_DIM : V_DIM;

// Where a layer's tiles lie in a store.
struct Tiles {
    u8 *base;
    u64 page_bytes, k_offset, v_offset;
    u32 k_tile_bytes, v_tile_bytes;
};

// A row of the step as a query: where it stands and which row of the angles rotates it.
struct Query { u32 row, position, angle; };
// The first `length` slots of a page, from a position on.
struct Span { u32 page, position, length; };
enum { CAUSAL, EVERY, WINDOW };
// Some queries times some heads over some spans, of one KV head.
struct Item {
    u32 first_query, n_queries, first_span, n_spans;
    u32 kv_head, first_head, n_heads;
    u32 mask, window, store, partial, reserved;
};
struct Append { u32 row, store, page, slot; };

// What a launch of any size shares: how many items and so on there are this step.
struct Counts { u32 first_item, n_items; };

DEV u64 tile_at(const Tiles &t, u32 page, u64 offset, u32 tile_bytes, u32 head) {
    return page * t.page_bytes + offset + (u64)head * tile_bytes;
}

// ---- writing ---------------------------------------------------------------------------------------------------------

// A warp a row, head and side. `layers` has the tiles of this layer, store by store.
extern "C" __global__ void append(const float *k, const float *v, const Append *appends, const u32 *n_appends,
                                  const Tiles *stores, u32 only_store, int kv_heads) {
    constexpr int WARPS = 4;
    __shared__ float rows[WARPS][DIM];
    int lane = threadIdx.x % WARP;
    u32 work = blockIdx.x * WARPS + threadIdx.x / WARP;
    u32 a = work / (2 * kv_heads), head = work / 2 % kv_heads, side = work % 2;
    if (a >= *n_appends || appends[a].store != only_store) return;
    Append to = appends[a];
    const Tiles &t = stores[to.store];
    float *row = rows[threadIdx.x / WARP];
    if (side == 0) {
        for (int i = lane; i < K_DIM; i += WARP) row[i] = k[((u64)to.row * kv_heads + head) * K_DIM + i];
        __syncwarp();
        KEYS::encode(t.base + tile_at(t, to.page, t.k_offset, t.k_tile_bytes, head), to.slot, row, lane);
    } else {
        for (int i = lane; i < V_DIM; i += WARP) row[i] = v[((u64)to.row * kv_heads + head) * V_DIM + i];
        __syncwarp();
        VALUES::encode(t.base + tile_at(t, to.page, t.v_offset, t.v_tile_bytes, head), to.slot, row, lane);
    }
}

// ---- reading ---------------------------------------------------------------------------------------------------------

struct Queries {
    const float *q;      // unrotated, `n_heads * K_DIM` a row
    const float *angles; // `n_rot` a row, null without rope
    int n_heads, n_rot, neox;
    float scale, softcap; // softcap 0 for none
};

struct Results {
    float *out;   // V_DIM a partial
    float2 *sums; // maximum (of scores times log2 e) and sum of a partial
};

// Chunks of a tile of TOKENS keys or values, on their way from memory to shared memory.
template <class C, int D, int TOKENS, int THREADS> struct Stage {
    static constexpr int PER_TOKEN = D / C::CHUNK, N = (TOKENS * PER_TOKEN + THREADS - 1) / THREADS;
    typename C::Raw raw[N];

    __device__ __forceinline__ void load(const u8 *tile, int first, int n) {
#pragma unroll
        for (int i = 0; i < N; i++) {
            int c = threadIdx.x + i * THREADS, token = c / PER_TOKEN;
            if (token < n && c < TOKENS * PER_TOKEN) raw[i] = C::load(tile, first + token, c % PER_TOKEN);
        }
    }
    // Tokens beyond `n` become zeros: their weights are 0, and 0 times anything else need not be.
    __device__ __forceinline__ void keep(u16 *shared, int stride, int n) const {
#pragma unroll
        for (int i = 0; i < N; i++) {
            int c = threadIdx.x + i * THREADS, token = c / PER_TOKEN;
            if (c >= TOKENS * PER_TOKEN) continue;
            u32 out[C::CHUNK / 2] = {};
            if (token < n) C::decode(raw[i], out);
            uint4 *to = (uint4 *)(shared + token * stride + c % PER_TOKEN * C::CHUNK);
#pragma unroll
            for (int j = 0; j < C::CHUNK / 8; j++) to[j] = make_uint4(out[4 * j], out[4 * j + 1], out[4 * j + 2], out[4 * j + 3]);
        }
    }
};

// WM warps along 16-row tiles of queries (a row is a query and a head), WN along the tokens and then along the columns of the
// result.
template <int WM, int WN, int TOKENS> struct Attention {
    static constexpr int WARPS = WM * WN, THREADS = WARPS * WARP, ROWS = 16 * WM;
    // Rows of shared memory are 16 bytes longer, so that eight of them lie in different banks.
    static constexpr int Q_STRIDE = K_DIM + 8, KV_STRIDE = DIM + 8, P_STRIDE = TOKENS + 8;
    static constexpr int TOKEN_TILES = TOKENS / 8, SCORE_TILES = TOKEN_TILES / WN > 0 ? TOKEN_TILES / WN : 1;
    static constexpr int COLUMNS = V_DIM / WN, OUT_TILES = (COLUMNS + 7) / 8;
    static_assert(COLUMNS % 16 == 0, "columns of a warp");
    static constexpr int BUFFER_HALVES = TOKENS * KV_STRIDE > 2 * WARPS * DIM ? TOKENS * KV_STRIDE : 2 * WARPS * DIM;

    struct Shared {
        __align__(16) u16 buffer[BUFFER_HALVES];
        __align__(16) u16 q[ROWS * Q_STRIDE];
        __align__(16) u16 p[ROWS * P_STRIDE];
        float most[WN][ROWS], sum[WN][ROWS];
        float k_scale[TOKENS], v_scale[TOKENS];
        u32 position[ROWS];
    };

    // Queries, rotated and scaled, to shared memory; a warp a row.
    DEV void load_queries(const Item &item, const Query *queries, const Queries &in, Shared &s) {
        int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
        float *row = (float *)s.buffer + warp * DIM;
        for (int m = warp; m < ROWS; m += WARPS) {
            u16 *to = s.q + m * Q_STRIDE;
            if (m >= (int)(item.n_queries * item.n_heads)) {
                for (int i = lane; i < K_DIM; i += WARP) to[i] = 0;
                if (lane == 0) s.position[m] = 0;
                continue;
            }
            Query query = queries[item.first_query + m / item.n_heads];
            const float *q = in.q + ((u64)query.row * in.n_heads + item.first_head + m % item.n_heads) * K_DIM;
            const float *angles = in.angles + (u64)query.angle * in.n_rot;
            int pairs = in.n_rot / 2;
            for (int i = lane; i < K_DIM; i += WARP) {
                float v = q[i];
                if (i < in.n_rot) {
                    int pair = in.neox ? i % pairs : i / 2;
                    bool second = in.neox ? i >= pairs : i % 2;
                    float other = q[in.neox ? (second ? i - pairs : i + pairs) : i ^ 1];
                    v = second ? other * angles[pairs + pair] + v * angles[pair] : v * angles[pair] - other * angles[pairs + pair];
                }
                row[i] = v * in.scale;
            }
            __syncwarp();
            if constexpr (KEYS::ROTATED) KEYS::rotate(row, lane);
            for (int i = lane; i < K_DIM; i += WARP) to[i] = float_to_half(row[i]);
            if (lane == 0) s.position[m] = query.position;
            __syncwarp();
        }
    }

    DEV bool visible(const Item &item, u32 query, u32 key) {
        if (item.mask == EVERY) return true;
        return key <= query && (item.mask == CAUSAL || query - key < item.window);
    }

    DEV void run(const Item &item, const Query *queries, const Span *spans, const Tiles &tiles, const Queries &in,
                 const Results &results, Shared &s) {
        int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, wm = warp / WN, wn = warp % WN, g = lane / 4, t = lane % 4;
        __syncthreads();
        load_queries(item, queries, in, s);
        __syncthreads();
        u32 position[2] = {s.position[wm * 16 + g], s.position[wm * 16 + g + 8]};
        float most[2] = {minus_infinity(), minus_infinity()}, sum[2] = {}, out[OUT_TILES][4] = {};
        Stage<KEYS, K_DIM, TOKENS, THREADS> keys;
        Stage<VALUES, V_DIM, TOKENS, THREADS> values;

        u32 at = 0, first = 0;
        Span span = spans[item.first_span];
        auto k_tile = [&](const Span &sp) { return tiles.base + tile_at(tiles, sp.page, tiles.k_offset, tiles.k_tile_bytes, item.kv_head); };
        auto v_tile = [&](const Span &sp) { return tiles.base + tile_at(tiles, sp.page, tiles.v_offset, tiles.v_tile_bytes, item.kv_head); };
        keys.load(k_tile(span), 0, min(TOKENS, (int)span.length));
        while (at < item.n_spans) {
            int n = min(TOKENS, (int)(span.length - first));
            __syncthreads();
            keys.keep(s.buffer, KV_STRIDE, n);
            values.load(v_tile(span), first, n);
            if constexpr (KEYS::TOKEN_SCALE)
                for (int i = threadIdx.x; i < n; i += THREADS) s.k_scale[i] = KEYS::token_scale(k_tile(span), first + i);
            if constexpr (VALUES::TOKEN_SCALE)
                for (int i = threadIdx.x; i < TOKENS; i += THREADS)
                    s.v_scale[i] = i < n ? VALUES::token_scale(v_tile(span), first + i) : 0.f;
            __syncthreads();

            float scores[SCORE_TILES][4];
            bool scoring = wn < TOKEN_TILES;
            if (scoring) score(wm, wn, s, scores);
            float tile_most[2] = {minus_infinity(), minus_infinity()};
#pragma unroll
            for (int j = 0; j < SCORE_TILES; j++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    int token = (wn * SCORE_TILES + j) * 8 + t * 2 + i % 2;
                    float v = scores[j][i];
                    if constexpr (KEYS::TOKEN_SCALE) v *= s.k_scale[token % TOKENS];
                    if (in.softcap != 0.f) v = in.softcap * tanhf(v / in.softcap);
                    v = scoring && token < n && visible(item, position[i / 2], span.position + first + token) ? v * LOG2E : minus_infinity();
                    scores[j][i] = v;
                    tile_most[i / 2] = fmaxf(tile_most[i / 2], v);
                }
#pragma unroll
            for (int h = 0; h < 2; h++) {
                tile_most[h] = fmaxf(tile_most[h], __shfl_xor_sync(FULL, tile_most[h], 1));
                tile_most[h] = fmaxf(tile_most[h], __shfl_xor_sync(FULL, tile_most[h], 2));
                if (t == 0) s.most[wn][wm * 16 + g + h * 8] = tile_most[h];
            }
            __syncthreads();
#pragma unroll
            for (int h = 0; h < 2; h++) {
                float next = most[h];
#pragma unroll
                for (int w = 0; w < WN; w++) next = fmaxf(next, s.most[w][wm * 16 + g + h * 8]);
                float shrink = most[h] == minus_infinity() ? 0.f : exp2f(most[h] - next);
                float base = next == minus_infinity() ? 0.f : next;
                most[h] = next;
                sum[h] *= shrink;
#pragma unroll
                for (int j = 0; j < OUT_TILES; j++) out[j][2 * h] *= shrink, out[j][2 * h + 1] *= shrink;
#pragma unroll
                for (int j = 0; j < SCORE_TILES; j++) {
                    float2 p = make_float2(exp2f(scores[j][2 * h] - base), exp2f(scores[j][2 * h + 1] - base));
                    sum[h] += p.x + p.y;
                    int token = (wn * SCORE_TILES + j) * 8 + t * 2;
                    if (!scoring) continue;
                    if constexpr (VALUES::TOKEN_SCALE) p.x *= s.v_scale[token], p.y *= s.v_scale[token + 1];
                    *(u32 *)(s.p + (wm * 16 + g + h * 8) * P_STRIDE + token) = pack_halves(p.x, p.y);
                }
            }
            values.keep(s.buffer, KV_STRIDE, n);
            first += TOKENS;
            if (first >= span.length) {
                first = 0;
                if (++at < item.n_spans) span = spans[item.first_span + at];
            }
            if (at < item.n_spans) keys.load(k_tile(span), first, min(TOKENS, (int)(span.length - first)));
            __syncthreads();
            accumulate(wm, wn, s, out);
        }
        write(item, most, sum, out, results, s);
    }

    // Scores of a warp's tokens: q k^T.
    DEV void score(int wm, int wn, const Shared &s, float (&scores)[SCORE_TILES][4]) {
        int lane = threadIdx.x % WARP;
        const u16 *q = s.q + (wm * 16 + lane % 16) * Q_STRIDE + lane / 16 * 8;
        const u16 *k = s.buffer + (wn * SCORE_TILES * 8 + lane % 8) * KV_STRIDE + lane / 8 * 8;
#pragma unroll
        for (int j = 0; j < SCORE_TILES; j++)
#pragma unroll
            for (int i = 0; i < 4; i++) scores[j][i] = 0;
#pragma unroll
        for (int d = 0; d < K_DIM; d += 32) {
            u32 a[2][4];
            load_matrices(a[0], q + d);
            load_matrices(a[1], q + d + 16);
#pragma unroll
            for (int j = 0; j < SCORE_TILES; j++) {
                u32 b[4];
                load_matrices(b, k + j * 8 * KV_STRIDE + d);
                mma(scores[j], a[0], b[0], b[1]);
                mma(scores[j], a[1], b[2], b[3]);
            }
        }
    }

    // out += p v for a warp's columns.
    DEV void accumulate(int wm, int wn, const Shared &s, float (&out)[OUT_TILES][4]) {
        int lane = threadIdx.x % WARP;
        const u16 *p = s.p + (wm * 16 + lane % 16) * P_STRIDE + lane / 16 * 8;
        const u16 *v = s.buffer + lane % 16 * KV_STRIDE + wn * COLUMNS + lane / 16 * 8;
#pragma unroll
        for (int token = 0; token < TOKENS; token += 16) {
            u32 a[4];
            load_matrices(a, p + token);
#pragma unroll
            for (int j = 0; j < OUT_TILES; j += 2) {
                u32 b[4];
                load_matrices_transposed(b, v + token * KV_STRIDE + j * 8);
                mma(out[j], a, b[0], b[1]);
                mma(out[j + 1], a, b[2], b[3]);
            }
        }
    }

    // Partial results, in the plain basis.
    DEV void write(const Item &item, const float (&most)[2], float (&sum)[2], const float (&out)[OUT_TILES][4],
                   const Results &results, Shared &s) {
        int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, wm = warp / WN, wn = warp % WN, g = lane / 4, t = lane % 4;
        int rows = item.n_queries * item.n_heads;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            sum[h] += __shfl_xor_sync(FULL, sum[h], 1);
            sum[h] += __shfl_xor_sync(FULL, sum[h], 2);
            int row = wm * 16 + g + h * 8;
            if (t == 0) s.sum[wn][row] = sum[h];
            if (row >= rows) continue;
            float *to = results.out + (u64)(item.partial + row) * V_DIM + wn * COLUMNS + t * 2;
#pragma unroll
            for (int j = 0; j < OUT_TILES; j++) *(float2 *)(to + j * 8) = make_float2(out[j][2 * h], out[j][2 * h + 1]);
        }
        __syncthreads();
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int row = wm * 16 + g + h * 8;
            if (wn != 0 || t != 0 || row >= rows) continue;
            float total = 0;
#pragma unroll
            for (int w = 0; w < WN; w++) total += s.sum[w][row];
            results.sums[item.partial + row] = make_float2(most[h], total);
        }
        if constexpr (VALUES::ROTATED) {
            float *row = (float *)s.buffer + warp * DIM;
            for (int m = warp; m < rows; m += WARPS) {
                float *to = results.out + (u64)(item.partial + m) * V_DIM;
                for (int i = lane; i < V_DIM; i += WARP) row[i] = to[i];
                __syncwarp();
                VALUES::rotate_back(row, lane);
                for (int i = lane; i < V_DIM; i += WARP) to[i] = row[i];
                __syncwarp();
            }
        }
    }
};

template <class A>
DEV void attend(const Counts *counts, const Item *items, const Query *queries, const Span *spans, const Tiles *stores,
                const Queries &in, const Results &results) {
    extern __shared__ __align__(16) u8 memory[];
    for (u32 i = blockIdx.x; i < counts->n_items; i += gridDim.x) {
        const Item &item = items[counts->first_item + i];
        A::run(item, queries, spans, stores[item.store], in, results, *(typename A::Shared *)memory);
    }
}

// The most warps up to `most` among which columns can be divided.
__device__ constexpr int warps(int most) { return V_DIM % (16 * most) == 0 ? most : warps(most / 2); }

// Few queries: 16 rows a block, warps side by side along the tokens.
typedef Attention<1, warps(DIM > 256 ? 8 : 4), (DIM > 128 ? 32 : 64)> Few;
// Many: up to 64 rows.
typedef Attention<(DIM > 256 ? 2 : 4), warps(DIM > 256 ? 4 : DIM > 64 ? 2 : 1), (DIM > 128 ? 32 : 64)> Many;

extern "C" __global__ void __launch_bounds__(Few::THREADS)
    attend_few(const Counts *c, const Item *i, const Query *q, const Span *s, const Tiles *t, Queries in, Results out) {
    attend<Few>(c, i, q, s, t, in, out);
}
extern "C" __global__ void __launch_bounds__(Many::THREADS)
    attend_many(const Counts *c, const Item *i, const Query *q, const Span *s, const Tiles *t, Queries in, Results out) {
    attend<Many>(c, i, q, s, t, in, out);
}
// Threads, rows of queries and bytes of shared memory of a block of each, for the host.
extern "C" { __device__ u32 attention_facts[6] = {Few::THREADS, Few::ROWS, sizeof(Few::Shared),
                                                     Many::THREADS, Many::ROWS, sizeof(Many::Shared)}; }
