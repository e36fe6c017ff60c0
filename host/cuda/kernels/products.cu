// Products with quantised weights on tensor cores: x W^T for few rows at memory bandwidth, for many rows in tiles, and what
// goes with them: packing of weights, preparation of inputs, embedding.
//
// Inputs are f16, scaled by a power of two a row so that nothing overflows, in the order in which lanes need them as operand
// `b`: of every 32 columns, lane 4g + t has eight halves at 8t: columns 2t, 2t + 1, 2t + 8, 2t + 9 and the same 16 further on.
#include "weights.cuh"

#ifndef FORMAT
#define FORMAT Q4_K
#endif
typedef FORMAT W;

constexpr int CELLS = W::UNIT / 64;

// ---- packing ---------------------------------------------------------------------------------------------------------

struct Unpacked {
    const u8 *rows;
    u64 row_bytes;
    int first_row, n_rows, first_column, n_columns;

    __device__ const u8 *row(int row) const { return rows + (u64)(first_row + row) * row_bytes; }
    __device__ u32 code(int step, int lane, int element) const {
        int r = element_row(lane, element), k = first_column + step * 16 + element_column(lane, element);
        return first_row + r < n_rows && k < n_columns ? W::code(row(r), k) : 0;
    }
    __device__ const u8 *block(int r, int block) const {
        int k = first_column + block * W::BLOCK;
        return first_row + r < n_rows && k < n_columns ? row(r) + k / W::BLOCK * W::BLOCK_BYTES : nullptr;
    }
    __device__ u16 half(int r, int b, int at) const {
        const u8 *p = block(r, b);
        return p ? half_at(p + at) : 0;
    }
};

// Packs rows of the file, of which the first is the first of a row tile. A thread a word.
extern "C" __global__ void pack(const u8 *rows, u64 row_bytes, int n_rows, int n_columns, u32 *packed, u64 words) {
    constexpr int UNIT_WORDS = W::BYTES / 4;
    int units = (n_columns + W::UNIT - 1) / W::UNIT;
    for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < words; i += (u64)gridDim.x * blockDim.x) {
        u64 unit = i / UNIT_WORDS;
        Unpacked source = {rows, row_bytes, (int)(unit / units) * 16, n_rows, (int)(unit % units) * W::UNIT, n_columns};
        packed[i] = W::word((int)(i % UNIT_WORDS), source);
    }
}

// ---- embedding -------------------------------------------------------------------------------------------------------

// out[row] = scale * table[tokens[row]]; a warp a cell.
extern "C" __global__ void embed(const u8 *table, int n_columns, const u32 *tokens, float scale, float *out) {
    int lane = threadIdx.x % WARP, units = (n_columns + W::UNIT - 1) / W::UNIT;
    u32 token = tokens[blockIdx.x];
    for (int cell = threadIdx.x / WARP; cell < units * CELLS; cell += blockDim.x / WARP) {
        W::Raw raw = W::load(table + ((u64)(token / 16) * units + cell / CELLS) * W::BYTES, cell % CELLS, lane);
#pragma unroll
        for (int step = 0; step < 4; step++) {
            u32 a[4];
            W::fragment(raw, step, a);
#pragma unroll
            for (int e = 0; e < 8; e++) {
                int k = cell * 64 + step * 16 + element_column(lane, e);
                if (element_row(lane, e) == token % 16 && k < n_columns)
                    out[(u64)blockIdx.x * n_columns + k] = scale * half_to_float((u16)(a[e / 2] >> e % 2 * 16));
            }
        }
    }
}

// ---- few rows --------------------------------------------------------------------------------------------------------

struct Product {
    const u8 *weights;
    const u16 *x;         // prepared, `x_stride` halves a row
    const float *x_scale; // a factor a row, to be multiplied with
    float *out;           // n x rows
    const float *bias;    // or null
    const float *residual; // like `out`, is added; or null
    int rows, units, n, x_stride;
};

DEV uint4 input_chunk(const Product &p, int row, int chunk, int t) {
    if (row >= p.n) return make_uint4(0, 0, 0, 0);
    return *(const uint4 *)(p.x + (u64)row * p.x_stride + chunk * 32 + t * 8);
}

DEV void finish(const Product &p, int row, int n, float sum) {
    if (row >= p.rows || n >= p.n) return;
    float v = sum * p.x_scale[n];
    if (p.bias) v += p.bias[row];
    u64 at = (u64)n * p.rows + row;
    if (p.residual) v += p.residual[at];
    p.out[at] = v;
}

// Products of one input with matrices of one format, in one launch: the row tiles of a product end before block `ends`.
struct Products {
    Product p[3];
    int ends[3];
};

// A row tile a block; its warps share the cells. N8 runs of eight input rows.
template <int N8> DEV void few_rows(const Products &all, float *shared) {
    int which = ((int)blockIdx.x >= all.ends[0]) + ((int)blockIdx.x >= all.ends[1]);
    const Product &p = all.p[which];
    int row_tile = blockIdx.x - (which ? all.ends[which - 1] : 0);
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    int g = lane / 4, t = lane % 4;
    const u8 *tile = p.weights + (u64)row_tile * p.units * W::BYTES;
    float sums[N8][4] = {};
    int cells = p.units * CELLS;
    W::Raw next;
    if (warp < cells) next = W::load(tile + (u64)(warp / CELLS) * W::BYTES, warp % CELLS, lane);
    for (int cell = warp; cell < cells; cell += warps) {
        W::Raw raw = next;
        int ahead = cell + warps;
        if (ahead < cells) next = W::load(tile + (u64)(ahead / CELLS) * W::BYTES, ahead % CELLS, lane);
#pragma unroll
        for (int c = 0; c < 2; c++) {
            uint4 x[N8];
#pragma unroll
            for (int j = 0; j < N8; j++) x[j] = input_chunk(p, j * 8 + g, cell * 2 + c, t);
#pragma unroll
            for (int s = 0; s < 2; s++) {
                u32 a[4];
                W::fragment(raw, c * 2 + s, a);
#pragma unroll
                for (int j = 0; j < N8; j++) mma(sums[j], a, s ? x[j].z : x[j].x, s ? x[j].w : x[j].y);
            }
        }
    }
#pragma unroll
    for (int j = 0; j < N8; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) shared[(warp * N8 * 4 + j * 4 + i) * WARP + lane] = sums[j][i];
    __syncthreads();
    for (int i = threadIdx.x; i < N8 * 4 * WARP; i += blockDim.x) {
        float sum = 0;
        for (int w = 0; w < warps; w++) sum += shared[w * N8 * 4 * WARP + i];
        int l = i % WARP, c = i / WARP % 4, j = i / WARP / 4;
        finish(p, row_tile * 16 + l / 4 + c / 2 * 8, j * 8 + l % 4 * 2 + c % 2, sum);
    }
}

constexpr int FEW_WARPS = 8;

extern "C" __global__ void __launch_bounds__(FEW_WARPS * WARP) few8(Products p) {
    __shared__ float shared[FEW_WARPS * 4 * WARP];
    few_rows<1>(p, shared);
}
extern "C" __global__ void __launch_bounds__(FEW_WARPS * WARP) few16(Products p) {
    __shared__ float shared[FEW_WARPS * 8 * WARP];
    few_rows<2>(p, shared);
}

// ---- many rows -------------------------------------------------------------------------------------------------------

// A block has 128 rows of the weights and 2 * 8 * N8 input rows: four warps along the weights, two along the inputs, a warp two
// row tiles. Cells are shared among gridDim.z blocks; with more than one each writes sums of its own to `parts`.
template <int N8> DEV void many_rows(const Product &p, float *parts, u16 *shared) {
    constexpr int INPUTS = 16 * N8, THREADS = 256, COLUMNS = 64, STAGE = INPUTS * COLUMNS;
    constexpr int VECTORS = STAGE / 8, PER_THREAD = (VECTORS + THREADS - 1) / THREADS;
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, t = lane % 4;
    int row_tile = blockIdx.x * 8 + warp / 2 * 2, first_input = blockIdx.y * INPUTS, side = warp % 2;
    int cells = p.units * CELLS, per_part = (cells + gridDim.z - 1) / gridDim.z;
    int first = blockIdx.z * per_part, last = min(first + per_part, cells);
    int tiles = (p.rows + 15) / 16;
    float sums[2][N8][4] = {};

    // Inputs of 64 columns pass through registers into one of two stages; 16-byte pieces of odd rows change places with their
    // neighbours 64 bytes on, so that eight lanes read from all banks.
    uint4 next[PER_THREAD];
    auto fetch = [&](int cell) {
#pragma unroll
        for (int i = 0; i < PER_THREAD; i++) {
            int v = threadIdx.x + i * THREADS, row = first_input + v / 8;
            next[i] = make_uint4(0, 0, 0, 0);
            if (v < VECTORS && row < p.n)
                next[i] = *(const uint4 *)(p.x + (u64)row * p.x_stride + (u64)cell * COLUMNS + v % 8 * 8);
        }
    };
    auto keep = [&](int cell) {
#pragma unroll
        for (int i = 0; i < PER_THREAD; i++) {
            int v = threadIdx.x + i * THREADS;
            if (v < VECTORS) *(uint4 *)(shared + cell % 2 * STAGE + v / 8 * COLUMNS + (v % 8 ^ v / 8 % 2 * 4) * 8) = next[i];
        }
    };
    W::Raw coming[2];
    auto weights = [&](int cell) {
#pragma unroll
        for (int m = 0; m < 2; m++) {
            const u8 *tile = p.weights + (u64)min(row_tile + m, tiles - 1) * p.units * W::BYTES;
            coming[m] = W::load(tile + (u64)(cell / CELLS) * W::BYTES, cell % CELLS, lane);
        }
    };
    if (first < last) fetch(first), weights(first);
    for (int cell = first; cell < last; cell++) {
        W::Raw raw[2] = {coming[0], coming[1]};
        keep(cell);
        __syncthreads();
        if (cell + 1 < last) fetch(cell + 1), weights(cell + 1);
        const u16 *inputs = shared + cell % 2 * STAGE + side * N8 * 8 * COLUMNS;
#pragma unroll
        for (int c = 0; c < 2; c++) {
            u32 a[2][2][4];
#pragma unroll
            for (int m = 0; m < 2; m++)
#pragma unroll
                for (int k = 0; k < 2; k++) W::fragment(raw[m], c * 2 + k, a[m][k]);
#pragma unroll
            for (int j = 0; j < N8; j++) {
                uint4 x = *(const uint4 *)(inputs + (j * 8 + g) * COLUMNS + ((c ^ g % 2) * 4 + t) * 8);
#pragma unroll
                for (int m = 0; m < 2; m++) {
                    mma(sums[m][j], a[m][0], x.x, x.y);
                    mma(sums[m][j], a[m][1], x.z, x.w);
                }
            }
        }
    }
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int j = 0; j < N8; j++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int row = (row_tile + m) * 16 + g + i / 2 * 8, n = first_input + (side * N8 + j) * 8 + t * 2 + i % 2;
                if (gridDim.z == 1) finish(p, row, n, sums[m][j][i]);
                else if (row < p.rows && n < p.n) parts[((u64)blockIdx.z * p.n + n) * p.rows + row] = sums[m][j][i];
            }
}

extern "C" __global__ void __launch_bounds__(256) many32(Product p, float *parts) {
    __shared__ __align__(16) u16 shared[2 * 32 * 64];
    many_rows<2>(p, parts, shared);
}
extern "C" __global__ void __launch_bounds__(256) many128(Product p, float *parts) {
    __shared__ __align__(16) u16 shared[2 * 128 * 64];
    many_rows<8>(p, parts, shared);
}

// Adds up what `many` left in parts.
extern "C" __global__ void sum_parts(Product p, const float *parts, int n_parts) {
    u64 size = (u64)p.n * p.rows;
    for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < size; i += (u64)gridDim.x * blockDim.x) {
        float sum = 0;
        for (int z = 0; z < n_parts; z++) sum += parts[z * size + i];
        finish(p, (int)(i % p.rows), (int)(i / p.rows), sum);
    }
}
