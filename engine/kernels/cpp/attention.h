// Rotary embedding, the paged cache, and attention over it.
//
// Of each block and KV head the cache holds the keys as [unit of head_dim][block_size], then the values as
// [unit of block_size][head_dim]: a vector holds 16 keys, or 16 dimensions of a value.

#pragma once

#include <algorithm>
#include <cstring>
#include <limits>

#include "pool.h"
#include "vectors.h"

constexpr int QUERY_ROWS = 4;  // 4 queries x 4 vectors of sums
constexpr int KEY_VECTORS = 4;
constexpr int KEYS = KEY_VECTORS * LANES;  // keys between two updates of the running softmax
constexpr int MAX_HEAD_DIM = 256;
constexpr int TASK_ROWS = 32;  // query rows of an attention task

struct Shape {
    int heads, kv_heads, head_dim, block_size;
    float scale;

    int query_size() const { return heads * head_dim; }
    int qkv_size() const { return (heads + 2 * kv_heads) * head_dim; }
};

struct Step {  // one step's sequences; see Batch in base.py
    int tokens, sequences;
    const int32_t *positions, *slots, *query_start, *context_lens, *tables, *table_start, *task_start;
};

template <class T>
struct Cache {
    Unit* units;
    const Shape& shape;

    size_t half() const { return static_cast<size_t>(shape.block_size) * shape.head_dim / STEP<T>; }
    Unit* keys(int block, int head) const {
        return units + (static_cast<size_t>(block) * shape.kv_heads + head) * 2 * half();
    }
    Unit* values(int block, int head) const { return keys(block, head) + half(); }
};

// ---------------------------------------------------------------- rotary embedding

template <class T>
void rotate(T* x, const float* cos, const float* sin, int half) {
    for (int i = 0; i < half; i += LANES) {
        const __mmask16 mask = lanes(i, half);
        const __m512 low = load16(x + i, mask), high = load16(x + half + i, mask);
        const __m512 c = load16(cos + i, mask), s = load16(sin + i, mask);
        store16(x + i, _mm512_fmsub_ps(low, c, _mm512_mul_ps(high, s)), mask);
        store16(x + half + i, _mm512_fmadd_ps(high, c, _mm512_mul_ps(low, s)), mask);
    }
}

// A value into its place among those of the token beside it, which another thread may be storing at this moment:
// no byte of that one may be written, not even with what was there.
inline void interleave(const float* v, Unit* units, int, int dim) { std::memcpy(units, v, dim * sizeof(float)); }
inline void interleave(const bf16* v, Unit* units, int odd, int dim) {
    const __mmask32 own = odd ? 0xaaaaaaaa : 0x55555555;
    for (int i = 0; i < dim; i += LANES) {
        __m512i value = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(v + i)));
        if (odd) value = _mm512_slli_epi32(value, 16);
        _mm512_mask_storeu_epi16(units + i, own, value);
    }
}

template <class T>
void store_token(const T* k, const T* v, Unit* keys, Unit* values, int offset, const Shape& shape) {
    const int dim = shape.head_dim;
    const Unit* units = reinterpret_cast<const Unit*>(k);
    for (int u = 0; u < dim / STEP<T>; ++u) keys[u * shape.block_size + offset] = units[u];
    interleave(v, values + static_cast<size_t>(offset / STEP<T>) * dim, offset % STEP<T>, dim);
}

template <class T>
void rope_and_store_token(T* qkv, int position, int slot, const float* cos, const float* sin,
                          const Cache<T>& cache) {
    const Shape& shape = cache.shape;
    const int dim = shape.head_dim, half = dim / 2;
    const int block = slot / shape.block_size, offset = slot % shape.block_size;
    cos += static_cast<size_t>(position) * half;
    sin += static_cast<size_t>(position) * half;
    for (int h = 0; h < shape.heads + shape.kv_heads; ++h) rotate(qkv + h * dim, cos, sin, half);
    const T* k = qkv + shape.heads * dim;
    const T* v = k + shape.kv_heads * dim;
    for (int h = 0; h < shape.kv_heads; ++h)
        store_token(k + h * dim, v + h * dim, cache.keys(block, h), cache.values(block, h), offset, shape);
}

// ---------------------------------------------------------------- attention

// Where the keys of a sequence, and of one KV head, are.
struct Keys {
    const int32_t* table;
    int head;
    int end;  // how many
};

// COUNT rows (a row: one query of one head, all of the same KV head) over a sequence's keys. FETCH: they are not in
// the cache yet. `next` is what this thread attends to afterwards.
template <class T, int COUNT, bool FETCH>
struct Attend {
    const Cache<T>& cache;
    const Keys own, next;
    int last[COUNT];  // the last key that each row sees
    T* outs[COUNT];
    float peak[COUNT], total[COUNT];
    const Unit* queries[COUNT];
    alignas(64) float sums[COUNT][MAX_HEAD_DIM];

    // Not an aggregate, of which all sums would be set to zero.
    Attend(const Cache<T>& cache, const Keys& own, const Keys& next) : cache(cache), own(own), next(next) {}

    void set(int r, const T* query, T* out, int position) {
        queries[r] = reinterpret_cast<const Unit*>(query);
        for (int i = 0; i < cache.shape.head_dim; i += LANES) _mm512_store_ps(sums[r] + i, _mm512_setzero_ps());
        outs[r] = out;
        last[r] = position;
        peak[r] = -std::numeric_limits<float>::infinity();
        total[r] = 0.f;
    }

    void run() {
        const int end = *std::max_element(last, last + COUNT) + 1;
        for (int key = 0; key < end; key += KEYS) keys(key, end);
        for (int r = 0; r < COUNT; ++r) {
            const __m512 scale = _mm512_set1_ps(1.f / total[r]);
            for (int i = 0; i < cache.shape.head_dim; i += LANES)
                store16(outs[r] + i, _mm512_mul_ps(_mm512_load_ps(sums[r] + i), scale));
        }
    }

    struct Place {
        const Unit *k, *v;
    };

    // The 16 keys from `key` on, and their values. Past the end the last ones stand in, and are masked.
    Place locate(const Keys& of, int key) const {
        const int size = cache.shape.block_size;
        if (key >= of.end) key = (of.end - 1) / LANES * LANES;
        const int block = of.table[key / size];
        const size_t row = static_cast<size_t>(key % size) / STEP<T>;
        return {cache.keys(block, of.head) + key % size, cache.values(block, of.head) + row * cache.shape.head_dim};
    }

    // Blocks lie anywhere in memory, so the processor cannot guess where the next chunk's are: they are fetched
    // ahead, spread over this chunk's work.
    void keys(int key, int end) {
        const int size = cache.shape.block_size, dim = cache.shape.head_dim;
        const bool more = key + KEYS < end;
        Place at[KEY_VECTORS], ahead[KEY_VECTORS];
        for (int j = 0; j < KEY_VECTORS; ++j) {
            at[j] = locate(own, key + j * LANES);
            if (FETCH) ahead[j] = more ? locate(own, key + KEYS + j * LANES) : locate(next, j * LANES);
        }
        __m512 scores[COUNT][KEY_VECTORS];
        for (auto& row : scores)
            for (auto& score : row) score = _mm512_setzero_ps();
        for (int u = 0; u < dim / STEP<T>; ++u) {
            __m512i columns[KEY_VECTORS];
            for (int j = 0; j < KEY_VECTORS; ++j) {
                columns[j] = _mm512_loadu_si512(at[j].k + u * size);
                if (FETCH) prefetch(ahead[j].k + u * size);
            }
            for (int r = 0; r < COUNT; ++r) {
                const __m512i q = _mm512_set1_epi32(queries[r][u]);
                for (int j = 0; j < KEY_VECTORS; ++j) scores[r][j] = fma(scores[r][j], q, columns[j], T{});
            }
        }
        alignas(64) T weights[COUNT][KEYS];
        float shrink[COUNT];
        for (int r = 0; r < COUNT; ++r) shrink[r] = soften(scores[r], weights[r], r, key);
        const int used = FETCH ? KEY_VECTORS : std::min(KEY_VECTORS, ceil_div(end - key, LANES));
        for (int i = 0; i < dim; i += KEY_VECTORS * LANES) add_values(at, ahead, weights, shrink, i, used);
    }

    // Scores, as powers of 2, to weights 2^(score - peak); returns what sums and total before are to be multiplied by.
    float soften(__m512* scores, T* weights, int r, int key) {
        const __m512 scale = _mm512_set1_ps(cache.shape.scale * LOG2_E);
        const __m512 none = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
        const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        __m512 high = none;
        for (int j = 0; j < KEY_VECTORS; ++j) {
            const __m512i left = _mm512_set1_epi32(last[r] - key - j * LANES);
            scores[j] = _mm512_mask_mul_ps(none, _mm512_cmple_epi32_mask(lane, left), scores[j], scale);
            high = _mm512_max_ps(high, scores[j]);
        }
        const float now = std::max(peak[r], _mm512_reduce_max_ps(high));
        const float shrink = peak[r] == now ? 1.f : _mm512_cvtss_f32(exp2_16<T>(_mm512_set1_ps(peak[r] - now)));
        __m512 sum = _mm512_setzero_ps();
        for (int j = 0; j < KEY_VECTORS; ++j) {
            const __m512 weight = exp2_16<T>(_mm512_sub_ps(scores[j], _mm512_set1_ps(now)));
            sum = _mm512_add_ps(sum, weight);
            store16(weights + j * LANES, weight);
        }
        total[r] = total[r] * shrink + _mm512_reduce_add_ps(sum);
        peak[r] = now;
        return shrink;
    }

    // sums = sums * shrink + weights . values, for KEY_VECTORS vectors of dimensions from i, of `used` x 16 keys.
    void add_values(const Place* at, const Place* ahead, const T (*weights)[KEYS], const float* shrink, int i,
                    int used) {
        const int dim = cache.shape.head_dim;
        const int vectors = std::min(KEY_VECTORS, (dim - i) / LANES);
        __m512 acc[COUNT][KEY_VECTORS];
        for (int r = 0; r < COUNT; ++r)
            for (int d = 0; d < KEY_VECTORS; ++d)
                acc[r][d] = d < vectors ? _mm512_mul_ps(_mm512_load_ps(sums[r] + i + d * LANES),
                                                        _mm512_set1_ps(shrink[r]))
                                        : _mm512_setzero_ps();
        for (int j = 0; j < used; ++j)
            for (int u = 0; u < LANES / STEP<T>; ++u) {
                const size_t from = static_cast<size_t>(u) * dim + i;
                __m512i columns[KEY_VECTORS];
                for (int d = 0; d < KEY_VECTORS; ++d) {
                    const int place = (d < vectors ? d : 0) * LANES;
                    columns[d] = _mm512_loadu_si512(at[j].v + from + place);
                    if (FETCH) prefetch(ahead[j].v + from + place);
                }
                for (int r = 0; r < COUNT; ++r) {
                    const Unit* row = reinterpret_cast<const Unit*>(weights[r]);
                    const __m512i w = _mm512_set1_epi32(row[j * LANES / STEP<T> + u]);
                    for (int d = 0; d < KEY_VECTORS; ++d) acc[r][d] = fma(acc[r][d], w, columns[d], T{});
                }
            }
        for (int r = 0; r < COUNT; ++r)
            for (int d = 0; d < vectors; ++d) _mm512_store_ps(sums[r] + i + d * LANES, acc[r][d]);
    }
};

template <class T>
struct Attention {
    const T* qkv;
    T* out;
    Cache<T> cache;
    const Step& step;

    // A task: some query rows of one sequence and KV head.
    struct Task {
        int sequence, head, first, end;
    };

    Task task(int index) const {
        const Shape& shape = cache.shape;
        const int32_t* starts = step.task_start;
        const int sequence = std::upper_bound(starts, starts + step.sequences + 1, index) - starts - 1;
        const int first = (index - starts[sequence]) / shape.kv_heads * TASK_ROWS;
        const int queries = step.query_start[sequence + 1] - step.query_start[sequence];
        const int end = std::min(first + TASK_ROWS, queries * (shape.heads / shape.kv_heads));
        return {sequence, (index - starts[sequence]) % shape.kv_heads, first, end};
    }

    Keys keys(const Task& task) const {
        return {step.tables + step.table_start[task.sequence], task.head, step.context_lens[task.sequence]};
    }

    template <int COUNT, bool FETCH>
    void attend(const Task& task, const Task& next, int first) const {
        const Shape& shape = cache.shape;
        const int group = shape.heads / shape.kv_heads;
        Attend<T, COUNT, FETCH> attend(cache, keys(task), keys(next));
        for (int r = 0; r < COUNT; ++r) {
            const size_t token = step.query_start[task.sequence] + (first + r) / group;
            const size_t at = static_cast<size_t>(task.head * group + (first + r) % group) * shape.head_dim;
            T* to = out + token * shape.query_size() + at;
            attend.set(r, qkv + token * shape.qkv_size() + at, to, step.positions[token]);
        }
        attend.run();
    }

    void run(const Task& task, const Task& next) const {
        int row = task.first;
        if (task.end - row >= QUERY_ROWS) attend<QUERY_ROWS, true>(task, next, row), row += QUERY_ROWS;
        for (; row + QUERY_ROWS <= task.end; row += QUERY_ROWS) attend<QUERY_ROWS, false>(task, next, row);
        switch (task.end - row) {
            case 1: return attend<1, true>(task, next, row);
            case 2: return attend<2, true>(task, next, row);
            case 3: return attend<3, true>(task, next, row);
        }
    }

    // Threads take several tasks at a time where there are many: each fetches for the one after it.
    void run(Pool& pool, int64_t* ticks = nullptr) const {
        const int tasks = step.task_start[step.sequences];
        const int each = std::clamp(tasks / (pool.size * 4), 1, 8);
        const auto some = [&](int group) {
            const int end = std::min((group + 1) * each, tasks);
            for (int index = group * each; index < end; ++index)
                run(task(index), task(std::min(index + 1, tasks - 1)));
        };
        pool.run(ceil_div(tasks, each), some, ticks);
    }
};
