// The exact merge of partial results of attention by log-sum-exp.
#include "common.cuh"

// Of each row and group of heads a list of partials, each the first of as many as the group has heads: `first[i] .. first[i + 1]`
// of `partials`, with i = row * groups + group. A block a row and head.
extern "C" __global__ void merge(const float *parts, const float2 *sums, const u32 *first, const u32 *partials, int n_heads,
                                 int heads_in_group, int width, float *out) {
    int row = blockIdx.x / n_heads, head = blockIdx.x % n_heads;
    int groups = (n_heads + heads_in_group - 1) / heads_in_group, list = row * groups + head / heads_in_group;
    u32 from = first[list], to = first[list + 1], h = head % heads_in_group;
    float most = minus_infinity();
    for (u32 i = from; i < to; i++) most = fmaxf(most, sums[partials[i] + h].x);
    float total = 0;
    for (u32 i = from; i < to; i++) {
        float2 s = sums[partials[i] + h];
        if (s.x != minus_infinity()) total += s.y * exp2f(s.x - most);
    }
    float factor = total > 0 ? 1.f / total : 0.f;
    for (int k = threadIdx.x; k < width; k += blockDim.x) {
        float v = 0;
        for (u32 i = from; i < to; i++) {
            u32 p = partials[i] + h;
            float m = sums[p].x;
            if (m != minus_infinity()) v += parts[(u64)p * width + k] * exp2f(m - most);
        }
        out[(u64)blockIdx.x * width + k] = v * factor;
    }
}
