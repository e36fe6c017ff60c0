// Everything between products that works on rows of activations: norms, rotary embedding, activation functions, selection, and
// the preparation of inputs for products (see products.cu), fused with what comes before it.
#include "common.cuh"

// ---- activation functions --------------------------------------------------------------------------------------------

enum { SILU, GELU_TANH, GELU_ERF, TANH, SIGMOID };

DEV float activate(int act, float x) {
    switch (act) {
    case SILU: return x / (1.f + __expf(-x));
    case GELU_TANH: return .5f * x * (1.f + tanhf(.7978845608028654f * (x + .044715f * x * x * x)));
    case GELU_ERF: return .5f * x * (1.f + erff(x * .7071067811865476f));
    case TANH: return tanhf(x);
    default: return 1.f / (1.f + __expf(-x));
    }
}

// ---- inputs of products ----------------------------------------------------------------------------------------------

// Where column `k` of a row lies among the prepared halves.
DEV int prepared_place(int k) { return k / 32 * 32 + k % 8 / 2 * 8 + k % 32 / 16 * 4 + k % 16 / 8 * 2 + k % 2; }

// The power of two that brings `most` below 2^15, and its inverse.
DEV float2 input_scale(float most) {
    int exponent = (__float_as_int(most) >> 23) - 127;
    exponent = min(max(14 - exponent, -100), 100);
    return make_float2(__int_as_float((127 + exponent) << 23), __int_as_float((127 - exponent) << 23));
}

struct Prepared {
    u16 *halves; // `stride` a row
    float *scale;
    int stride;
};

// Writes a row of which `value(k)` gives the columns, twice asked for each. `most` is the largest magnitude of a thread's.
template <class F> DEV void prepare_row(const Prepared &p, int row, int columns, float most, float *shared, F value) {
    float2 scale = input_scale(block_max(most, shared));
    u16 *halves = p.halves + (u64)row * p.stride;
    for (int k = threadIdx.x; k < p.stride; k += blockDim.x)
        halves[prepared_place(k)] = k < columns ? float_to_half(value(k) * scale.x) : 0;
    if (threadIdx.x == 0) p.scale[row] = scale.y;
}

extern "C" __global__ void prepare(const float *x, int columns, Prepared p) {
    __shared__ float shared[WARP];
    x += (u64)blockIdx.x * columns;
    float most = 0;
    for (int k = threadIdx.x; k < columns; k += blockDim.x) most = fmaxf(most, fabsf(x[k]));
    prepare_row(p, blockIdx.x, columns, most, shared, [&](int k) { return x[k]; });
}

// act(gate) * up, prepared; a block a row.
extern "C" __global__ void gated_prepare(const float *gate, const float *up, int act, int columns, Prepared p) {
    __shared__ float shared[WARP];
    gate += (u64)blockIdx.x * columns;
    up += (u64)blockIdx.x * columns;
    float most = 0;
    for (int k = threadIdx.x; k < columns; k += blockDim.x) most = fmaxf(most, fabsf(activate(act, gate[k]) * up[k]));
    prepare_row(p, blockIdx.x, columns, most, shared, [&](int k) { return activate(act, gate[k]) * up[k]; });
}

// ---- norms -----------------------------------------------------------------------------------------------------------

// Root-mean-square norm of whole rows, a block a row. `out`, `weight` and `p.halves` may be null.
extern "C" __global__ void norm_rows(const float *x, const float *weight, float eps, int columns, float *out, Prepared p) {
    __shared__ float shared[WARP];
    x += (u64)blockIdx.x * columns;
    float squares = 0, most = 0;
    for (int k = threadIdx.x; k < columns; k += blockDim.x) {
        squares += x[k] * x[k];
        most = fmaxf(most, fabsf(weight ? x[k] * weight[k] : x[k]));
    }
    float factor = rsqrtf(block_sum(squares, shared) / columns + eps);
    auto value = [&](int k) { return x[k] * factor * (weight ? weight[k] : 1.f); };
    if (out)
        for (int k = threadIdx.x; k < columns; k += blockDim.x) out[(u64)blockIdx.x * columns + k] = value(k);
    if (p.halves) prepare_row(p, blockIdx.x, columns, most * factor, shared, value);
}

// The same of every run of `group` elements, a warp a run.
extern "C" __global__ void norm_groups(const float *x, const float *weight, float eps, int group, u64 groups, float *out) {
    u64 run = (blockIdx.x * (u64)blockDim.x + threadIdx.x) / WARP;
    if (run >= groups) return;
    int lane = threadIdx.x % WARP;
    x += run * group;
    float squares = 0;
    for (int k = lane; k < group; k += WARP) squares += x[k] * x[k];
    float factor = rsqrtf(warp_sum(squares) / group + eps);
    for (int k = lane; k < group; k += WARP) out[run * group + k] = x[k] * factor * (weight ? weight[k] : 1.f);
}

// ---- rotary embedding ------------------------------------------------------------------------------------------------

// Cosines, then sines, of each of `rows` positions; in f64, which far positions need.
extern "C" __global__ void angles(const u32 *positions, const double *frequencies, int pairs, float magnitude, float *table) {
    for (int i = threadIdx.x; i < pairs; i += blockDim.x) {
        double sine, cosine;
        sincos(positions[blockIdx.x] * frequencies[i], &sine, &cosine);
        table[(u64)blockIdx.x * 2 * pairs + i] = (float)cosine * magnitude;
        table[(u64)blockIdx.x * 2 * pairs + pairs + i] = (float)sine * magnitude;
    }
}

// Rotates every head of a row; a thread an element of the result.
extern "C" __global__ void rope(const float *x, const float *table, int width, int head_dim, int n_rot, int neox, u64 size, float *out) {
    u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x;
    if (i >= size) return;
    int k = (int)(i % width) % head_dim, pairs = n_rot / 2;
    float v = x[i];
    if (k < n_rot) {
        const float *angles = table + i / width * n_rot;
        int pair = neox ? k % pairs : k / 2;
        bool second = neox ? k >= pairs : k % 2;
        u64 other = neox ? (second ? i - pairs : i + pairs) : i ^ 1;
        float cosine = angles[pair], sine = angles[pairs + pair];
        v = second ? x[other] * sine + v * cosine : v * cosine - x[other] * sine;
    }
    out[i] = v;
}

// ---- elements and rows -----------------------------------------------------------------------------------------------

enum { ADD, MUL, SCALE, SOFT_CAP, ACT, GATED_ACT };

extern "C" __global__ void elements(int kind, const float *a, const float *b, float f, int act, u64 size, float *out) {
    for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < size; i += (u64)gridDim.x * blockDim.x) {
        float v = a[i];
        switch (kind) {
        case ADD: v += b[i]; break;
        case MUL: v *= b[i]; break;
        case SCALE: v *= f; break;
        case SOFT_CAP: v = f * tanhf(v / f); break;
        case ACT: v = activate(act, v); break;
        case GATED_ACT: v = activate(act, v) * b[i]; break;
        }
        out[i] = v;
    }
}

// x * sigmoid(gate); an element of `gate` serves `share` of x.
extern "C" __global__ void gate(const float *x, const float *gates, int share, u64 size, float *out) {
    u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x;
    if (i < size) out[i] = x[i] * activate(SIGMOID, gates[i / share]);
}

// The rows that `chosen` lists.
extern "C" __global__ void select_rows(const float *x, const u32 *chosen, int width, float *out) {
    const float *from = x + (u64)chosen[blockIdx.x] * width;
    for (int k = threadIdx.x; k < width; k += blockDim.x) out[(u64)blockIdx.x * width + k] = from[k];
}

// Of every `group` elements the `width` from `start` on.
extern "C" __global__ void columns(const float *x, int group, int start, int width, u64 size, float *out) {
    u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x;
    if (i < size) out[i] = x[i / width * group + start + i % width];
}

// Rows of a followed by those of b.
extern "C" __global__ void concat(const float *a, const float *b, int first, int second, u64 size, float *out) {
    u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x;
    if (i >= size) return;
    u64 row = i / (first + second);
    int k = (int)(i % (first + second));
    out[i] = k < first ? a[row * first + k] : b[row * second + k - first];
}
