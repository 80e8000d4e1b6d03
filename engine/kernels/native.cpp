// The decoder's operations for x86 with AVX-512, in bf16 (AVX512-BF16) and fp32. Compiled and bound by native.py.
//
// One idea carries the file: data moves in units of 4 bytes, a pair of bf16 or one float. `fma` multiplies
// units and adds to a vector of 16 floats, so every product (linear layers, Q.K, P.V) is the same loop for
// both types. Weights and the KV cache are laid out so that 16 neighbouring units belong to 16 results.
//
// Each result is summed in one fixed order, whatever the number of rows and threads: a sequence gives the same
// bits alone, in a batch, in chunks and after a prefix hit.

#include <immintrin.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <mutex>
#include <thread>
#include <tuple>
#include <utility>

namespace {

using Unit = uint32_t;
using bf16 = uint16_t;

constexpr int LANES = 16;         // units in a vector
constexpr int PANEL_VECTORS = 3;  // vectors of output columns computed together
constexpr int PANEL = PANEL_VECTORS * LANES;
constexpr int TILE_ROWS = 8;       // rows computed together: 8 x 3 sums, and 4 operands, of 32 registers
constexpr int QUERY_ROWS = 4;      // the same for attention: 4 queries x 4 vectors
constexpr int KEY_VECTORS = 4;
constexpr int KEYS = KEY_VECTORS * LANES;  // keys between two updates of the running softmax
constexpr int MAX_HEAD_DIM = 256;
constexpr int TASK_ROWS = 32;              // query rows of one attention task

template <class T>
constexpr int STEP = sizeof(Unit) / sizeof(T);  // elements in a unit

// ---------------------------------------------------------------- types

inline __m512 load16(const float* p) { return _mm512_loadu_ps(p); }
inline __m512 load16(const bf16* p) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
inline __m512 load16(const float* p, __mmask16 mask) { return _mm512_maskz_loadu_ps(mask, p); }
inline __m512 load16(const bf16* p, __mmask16 mask) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

inline void store16(float* p, __m512 x, __mmask16 mask = 0xffff) { _mm512_mask_storeu_ps(p, mask, x); }
inline __m512 fma(__m512 sum, __m512i a, __m512i b, float) {
    return _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), sum);
}

#ifdef __AVX512BF16__
inline void store16(bf16* p, __m512 x, __mmask16 mask = 0xffff) {
    _mm256_mask_storeu_epi16(p, mask, (__m256i)_mm512_cvtneps_pbh(x));
}
inline __m512 fma(__m512 sum, __m512i a, __m512i b, bf16) {
    return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
}
#endif

inline void prefetch(const Unit* p) { _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T1); }

// e^x for x <= 88; 0 below -138. Within 2 units in the last place: 2^n times a polynomial on [-0.5, 0.5].
inline __m512 exp16(__m512 x) {
    x = _mm512_max_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), _mm512_set1_ps(-200.f));
    const __m512 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 r = _mm512_sub_ps(x, n);
    __m512 p = _mm512_set1_ps(1.5403530e-4f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3333558e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(9.6181291e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.5504109e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(2.4022651e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(6.9314718e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.f));
    return _mm512_scalef_ps(p, n);
}

// ---------------------------------------------------------------- threads

// Workers that spin for a moment between operations and sleep between steps. A job's tasks are taken one by one,
// so a worker that is slow to wake, or loses its core to another process, holds nobody up by more than a task.
class Pool {
public:
    explicit Pool(int threads) : size_(threads) {
        for (int i = 1; i < threads; ++i) std::thread([this] { work(); }).detach();
    }

    template <class Body>
    void run(int tasks, const Body& body) {
        if (size_ == 1 || tasks == 1) {
            for (int i = 0; i < tasks; ++i) body(i);
            return;
        }
        const std::lock_guard lock(mutex_);  // one job at a time, whoever asks
        call_ = [](const void* context, int task) { (*static_cast<const Body*>(context))(task); };
        context_ = &body;
        tasks_ = tasks;
        next_.store(0, std::memory_order_relaxed);
        epoch_.fetch_add(1);  // odd: open
        epoch_.notify_all();
        drain();
        epoch_.fetch_add(1);  // even: closed. Whoever joined before has raised active_, and is waited for.
        for (int spins = 0; active_.load() != 0; ++spins) {
            if (spins < 4096) _mm_pause();
            else std::this_thread::yield();
        }
    }

private:
    void drain() {
        for (int i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < tasks_;) call_(context_, i);
    }

    void work() {
        for (unsigned seen = 0;;) {
            const unsigned now = await(seen);
            active_.fetch_add(1);
            if (epoch_.load() == now && now % 2 == 1) drain();
            active_.fetch_sub(1);
            seen = now;
        }
    }

    unsigned await(unsigned seen) {
        const auto deadline = std::chrono::steady_clock::now() + std::chrono::microseconds(100);
        for (int spins = 1;; ++spins) {
            const unsigned now = epoch_.load(std::memory_order_acquire);
            if (now != seen) return now;
            _mm_pause();
            if (spins % 64 == 0 && std::chrono::steady_clock::now() > deadline) epoch_.wait(seen);
        }
    }

    const int size_;
    std::mutex mutex_;
    std::atomic<unsigned> epoch_{0};
    std::atomic<int> active_{0};
    alignas(64) std::atomic<int> next_{0};
    void (*call_)(const void*, int) = nullptr;
    const void* context_ = nullptr;
    int tasks_ = 0;
};

inline int ceil_div(int a, int b) { return (a + b - 1) / b; }

// ---------------------------------------------------------------- linear layers

// Weight [n, k] -> panels of 48 columns: [panel][unit of k][48], the last one padded with zeros.
template <class T>
void pack(const T* weight, Unit* packed, int n, int k) {
    const int units = k / STEP<T>;
    for (int column = 0; column < ceil_div(n, PANEL) * PANEL; ++column) {
        Unit* out = packed + static_cast<size_t>(column / PANEL) * units * PANEL + column % PANEL;
        const Unit* row = reinterpret_cast<const Unit*>(weight + static_cast<size_t>(column) * k);
        for (int u = 0; u < units; ++u) out[static_cast<size_t>(u) * PANEL] = column < n ? row[u] : 0;
    }
}

template <class T>
struct Product {
    const T* x;
    const Unit* packed;
    const float* bias;  // or null
    void* out;
    int m, n, k;
    bool add;    // out += instead of out =
    bool float_;  // out is float, whatever T

    void finish(__m512 sum, int row, int column) const {
        const int left = n - column;
        if (left <= 0) return;
        const __mmask16 mask = left >= LANES ? 0xffff : (1u << left) - 1;
        if (bias) sum = _mm512_add_ps(sum, load16(bias + column, mask));
        const size_t at = static_cast<size_t>(row) * n + column;
        if (float_) return store16(static_cast<float*>(out) + at, sum, mask);
        T* to = static_cast<T*>(out) + at;
        if (add) sum = _mm512_add_ps(sum, load16(to, mask));
        store16(to, sum, mask);
    }

    // ROWS rows times PANELS panels. Enough sums must be under way to hide the latency of an addition, so a
    // single row is multiplied with two panels at a time.
    // AHEAD: fetch the next panel into the second-level cache meanwhile.
    template <int ROWS, int PANELS = 1, bool AHEAD = false>
    void tile(int row, int panel) const {
        const int units = k / STEP<T>;
        const size_t stride = static_cast<size_t>(units) * PANEL;
        const Unit* a = reinterpret_cast<const Unit*>(x + static_cast<size_t>(row) * k);
        const Unit* b = packed + panel * stride;
        __m512 sums[ROWS][PANELS][PANEL_VECTORS];
        for (int r = 0; r < ROWS; ++r)
            for (int p = 0; p < PANELS; ++p)
                for (int v = 0; v < PANEL_VECTORS; ++v) sums[r][p][v] = _mm512_setzero_ps();
        for (int u = 0; u < units; ++u, b += PANEL) {
            __m512i columns[PANELS][PANEL_VECTORS];
            for (int p = 0; p < PANELS; ++p)
                for (int v = 0; v < PANEL_VECTORS; ++v) {
                    columns[p][v] = _mm512_loadu_si512(b + p * stride + v * LANES);
                    if (AHEAD) prefetch(b + stride + v * LANES);
                }
            for (int r = 0; r < ROWS; ++r) {
                const __m512i value = _mm512_set1_epi32(a[static_cast<size_t>(r) * units + u]);
                for (int p = 0; p < PANELS; ++p)
                    for (int v = 0; v < PANEL_VECTORS; ++v)
                        sums[r][p][v] = fma(sums[r][p][v], value, columns[p][v], T{});
            }
        }
        for (int r = 0; r < ROWS; ++r)
            for (int p = 0; p < PANELS; ++p)
                for (int v = 0; v < PANEL_VECTORS; ++v)
                    finish(sums[r][p][v], row + r, (panel + p) * PANEL + v * LANES);
    }

    // `count` rows times panels [panel, end).
    void block(int row, int count, int panel, int end) const {
        if (count == 1)
            for (; panel + 2 <= end; panel += 2) tile<1, 2>(row, panel);
        for (; panel < end; ++panel) rows(row, count, panel);
    }

    void rows(int row, int count, int panel) const {
        // The first tile brings the panel from memory; the last one finds it in the cache, and fetches the next.
        for (int first = row; count >= TILE_ROWS; row += TILE_ROWS, count -= TILE_ROWS)
            if (row > first && count < 2 * TILE_ROWS) tile<TILE_ROWS, 1, true>(row, panel);
            else tile<TILE_ROWS>(row, panel);
        switch (count) {
            case 1: return tile<1>(row, panel);
            case 2: return tile<2>(row, panel);
            case 3: return tile<3>(row, panel);
            case 4: return tile<4>(row, panel);
            case 5: return tile<5>(row, panel);
            case 6: return tile<6>(row, panel);
            case 7: return tile<7>(row, panel);
        }
    }

    // Few rows: a task is some panels, read from memory once. Many rows: a task is one panel times as many rows
    // as stay in the second-level cache while the panels pass by.
    void run(Pool& pool, int threads) const {
        const int panels = ceil_div(n, PANEL);
        const int fit = (256 << 10) / static_cast<int>(k * sizeof(T)) / TILE_ROWS * TILE_ROWS;
        const int chunk = std::max(fit, 4 * TILE_ROWS);
        const int chunks = ceil_div(m, chunk);
        const int group = chunks > 1 ? 1 : std::max(2, panels / (threads * 8));
        const int groups = ceil_div(panels, group);
        pool.run(chunks * groups, [&](int task) {
            const int row = task / groups * chunk;
            const int first = task % groups * group;
            block(row, std::min(chunk, m - row), first, std::min(first + group, panels));
        });
    }
};

// ---------------------------------------------------------------- row-wise operations

template <class T>
void rms_norm_row(const T* x, const T* weight, T* out, int n, float eps) {
    __m512 squares = _mm512_setzero_ps();
    for (int i = 0; i < n; i += LANES) {
        const __mmask16 mask = n - i >= LANES ? 0xffff : (1u << (n - i)) - 1;
        const __m512 v = load16(x + i, mask);
        squares = _mm512_fmadd_ps(v, v, squares);
    }
    const __m512 scale = _mm512_set1_ps(1.f / std::sqrt(_mm512_reduce_add_ps(squares) / n + eps));
    for (int i = 0; i < n; i += LANES) {
        const __mmask16 mask = n - i >= LANES ? 0xffff : (1u << (n - i)) - 1;
        const __m512 v = _mm512_mul_ps(load16(x + i, mask), scale);
        store16(out + i, _mm512_mul_ps(v, load16(weight + i, mask)), mask);
    }
}

template <class T>
void silu_mul_row(const T* gate, const T* up, T* out, int n) {
    const __m512 one = _mm512_set1_ps(1.f);
    for (int i = 0; i < n; i += LANES) {
        const __mmask16 mask = n - i >= LANES ? 0xffff : (1u << (n - i)) - 1;
        const __m512 g = load16(gate + i, mask);
        // Beyond -80 the sigmoid is 0 in every type; the bound keeps e^-g finite.
        const __m512 e = exp16(_mm512_min_ps(_mm512_sub_ps(_mm512_setzero_ps(), g), _mm512_set1_ps(80.f)));
        const __m512 silu = _mm512_div_ps(g, _mm512_add_ps(one, e));
        store16(out + i, _mm512_mul_ps(silu, load16(up + i, mask)), mask);
    }
}

// ---------------------------------------------------------------- attention

// Of each block and KV head the keys are [unit of head_dim][block_size] and the values
// [unit of block_size][head_dim]: a vector holds 16 keys, or 16 dimensions of a value.
struct Shape {
    int heads, kv_heads, head_dim, block_size;
    float scale;
};

struct Step {  // one step's sequences; see Batch in base.py
    int tokens, sequences;
    const int32_t *positions, *slots, *query_start, *context_lens, *tables, *table_start, *task_start;
};

template <class T>
struct Cache {
    Unit *keys, *values;
    const Shape& shape;

    size_t base(int block, int head) const {
        const size_t units = static_cast<size_t>(shape.block_size) * shape.head_dim / STEP<T>;
        return (static_cast<size_t>(block) * shape.kv_heads + head) * units;
    }
};

template <class T>
void rotate(const T* in, T* out, const float* cos, const float* sin, int half) {
    for (int i = 0; i < half; i += LANES) {
        const __mmask16 mask = half - i >= LANES ? 0xffff : (1u << (half - i)) - 1;
        const __m512 low = load16(in + i, mask), high = load16(in + half + i, mask);
        const __m512 c = load16(cos + i, mask), s = load16(sin + i, mask);
        store16(out + i, _mm512_fmsub_ps(low, c, _mm512_mul_ps(high, s)), mask);
        store16(out + half + i, _mm512_fmadd_ps(high, c, _mm512_mul_ps(low, s)), mask);
    }
}

template <class T>
void rope_and_store_token(T* qkv, int position, int slot, const float* cos, const float* sin,
                          const Cache<T>& cache) {
    const Shape& shape = cache.shape;
    const int dim = shape.head_dim, half = dim / 2;
    const int block = slot / shape.block_size, offset = slot % shape.block_size;
    cos += static_cast<size_t>(position) * half;
    sin += static_cast<size_t>(position) * half;
    for (int h = 0; h < shape.heads; ++h) rotate(qkv + h * dim, qkv + h * dim, cos, sin, half);
    T* k = qkv + shape.heads * dim;
    T* v = k + shape.kv_heads * dim;
    for (int h = 0; h < shape.kv_heads; ++h, k += dim, v += dim) {
        rotate(k, k, cos, sin, half);
        Unit* keys = cache.keys + cache.base(block, h) + offset;
        const Unit* units = reinterpret_cast<const Unit*>(k);
        for (int u = 0; u < dim / STEP<T>; ++u) keys[u * shape.block_size] = units[u];
        T* values = reinterpret_cast<T*>(cache.values + cache.base(block, h) + offset / STEP<T> * dim);
        for (int i = 0; i < dim; ++i) values[i * STEP<T> + offset % STEP<T>] = v[i];
    }
}

// ROWS rows (a row: one query of one head, all of the same KV head) over a sequence's keys.
template <class T, int ROWS>
struct Attend {
    const Cache<T>& cache;
    const int32_t* table;
    const int head;  // KV head
    int end = 0;     // keys that some row sees
    int last[ROWS];  // the last key that each row sees
    T* outs[ROWS];
    float peak[ROWS], total[ROWS];
    alignas(64) Unit queries[ROWS][MAX_HEAD_DIM / STEP<T>];
    alignas(64) float sums[ROWS][MAX_HEAD_DIM];

    Attend(const Cache<T>& cache, const int32_t* table, int head) : cache(cache), table(table), head(head) {}

    void set(int r, const T* query, T* out, int position) {
        const int dim = cache.shape.head_dim;
        std::memcpy(queries[r], query, dim * sizeof(T));
        std::memset(sums[r], 0, dim * sizeof(float));
        outs[r] = out;
        last[r] = position;
        peak[r] = -std::numeric_limits<float>::infinity();
        total[r] = 0.f;
        end = std::max(end, position + 1);
    }

    void run() {
        for (int key = 0; key < end; key += KEYS) keys(key);
        for (int r = 0; r < ROWS; ++r) {
            const __m512 scale = _mm512_set1_ps(1.f / total[r]);
            for (int i = 0; i < cache.shape.head_dim; i += LANES)
                store16(outs[r] + i, _mm512_mul_ps(_mm512_load_ps(sums[r] + i), scale));
        }
    }

    // The 16 keys from `key` on, and their values. Past the end the last ones stand in, and are masked.
    std::pair<const Unit*, const Unit*> locate(int key) const {
        const int size = cache.shape.block_size;
        if (key >= end) key = (end - 1) / LANES * LANES;
        const size_t base = cache.base(table[key / size], head);
        const size_t values = static_cast<size_t>(key % size) / STEP<T> * cache.shape.head_dim;
        return {cache.keys + base + key % size, cache.values + base + values};
    }

    // Blocks lie anywhere in memory, so the processor cannot guess where the next chunk's are: they are fetched
    // ahead, spread over this chunk's work.
    void keys(int key) {
        const int size = cache.shape.block_size, dim = cache.shape.head_dim;
        const Unit *k[KEY_VECTORS], *v[KEY_VECTORS], *next_k[KEY_VECTORS], *next_v[KEY_VECTORS];
        for (int j = 0; j < KEY_VECTORS; ++j) {
            std::tie(k[j], v[j]) = locate(key + j * LANES);
            std::tie(next_k[j], next_v[j]) = locate(key + KEYS + j * LANES);
        }
        __m512 scores[ROWS][KEY_VECTORS];
        for (auto& row : scores)
            for (auto& score : row) score = _mm512_setzero_ps();
        for (int u = 0; u < dim / STEP<T>; ++u) {
            __m512i columns[KEY_VECTORS];
            for (int j = 0; j < KEY_VECTORS; ++j) {
                columns[j] = _mm512_loadu_si512(k[j] + u * size);
                prefetch(next_k[j] + u * size);
            }
            for (int r = 0; r < ROWS; ++r) {
                const __m512i q = _mm512_set1_epi32(queries[r][u]);
                for (int j = 0; j < KEY_VECTORS; ++j) scores[r][j] = fma(scores[r][j], q, columns[j], T{});
            }
        }
        alignas(64) T weights[ROWS][KEYS];
        float shrink[ROWS];
        for (int r = 0; r < ROWS; ++r) shrink[r] = soften(scores[r], weights[r], r, key);
        for (int i = 0; i < dim; i += KEY_VECTORS * LANES) add_values(v, next_v, weights, shrink, i);
    }

    // Scores to weights e^(score - peak); returns what sums and total before are to be multiplied by.
    float soften(__m512* scores, T* weights, int r, int key) {
        const __m512 scale = _mm512_set1_ps(cache.shape.scale);
        const __m512 none = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
        const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        __m512 high = none;
        for (int j = 0; j < KEY_VECTORS; ++j) {
            const __m512i index = _mm512_add_epi32(lane, _mm512_set1_epi32(key + j * LANES));
            const __mmask16 seen = _mm512_cmple_epi32_mask(index, _mm512_set1_epi32(last[r]));
            scores[j] = _mm512_mask_mul_ps(none, seen, scores[j], scale);
            high = _mm512_max_ps(high, scores[j]);
        }
        const float now = std::max(peak[r], _mm512_reduce_max_ps(high));
        const float shrink = peak[r] == now ? 1.f : _mm512_cvtss_f32(exp16(_mm512_set1_ps(peak[r] - now)));
        __m512 sum = _mm512_setzero_ps();
        for (int j = 0; j < KEY_VECTORS; ++j) {
            const __m512 weight = exp16(_mm512_sub_ps(scores[j], _mm512_set1_ps(now)));
            sum = _mm512_add_ps(sum, weight);
            store16(weights + j * LANES, weight);
        }
        total[r] = total[r] * shrink + _mm512_reduce_add_ps(sum);
        peak[r] = now;
        return shrink;
    }

    // sums = sums * shrink + weights . values, for KEY_VECTORS vectors of dimensions from i.
    void add_values(const Unit* const* v, const Unit* const* next_v, const T (*weights)[KEYS],
                    const float* shrink, int i) {
        const int dim = cache.shape.head_dim;
        const int vectors = std::min(KEY_VECTORS, (dim - i) / LANES);
        __m512 acc[ROWS][KEY_VECTORS];
        for (int r = 0; r < ROWS; ++r)
            for (int d = 0; d < KEY_VECTORS; ++d)
                acc[r][d] = d < vectors ? _mm512_mul_ps(_mm512_load_ps(sums[r] + i + d * LANES),
                                                        _mm512_set1_ps(shrink[r]))
                                        : _mm512_setzero_ps();
        for (int j = 0; j < KEY_VECTORS; ++j)
            for (int u = 0; u < LANES / STEP<T>; ++u) {
                const Unit* from = v[j] + static_cast<size_t>(u) * dim + i;
                __m512i columns[KEY_VECTORS];
                for (int d = 0; d < KEY_VECTORS; ++d) {
                    const int place = (d < vectors ? d : 0) * LANES;
                    columns[d] = _mm512_loadu_si512(from + place);
                    prefetch(next_v[j] + static_cast<size_t>(u) * dim + i + place);
                }
                for (int r = 0; r < ROWS; ++r) {
                    const Unit* row = reinterpret_cast<const Unit*>(weights[r]);
                    const __m512i w = _mm512_set1_epi32(row[j * LANES / STEP<T> + u]);
                    for (int d = 0; d < KEY_VECTORS; ++d) acc[r][d] = fma(acc[r][d], w, columns[d], T{});
                }
            }
        for (int r = 0; r < ROWS; ++r)
            for (int d = 0; d < vectors; ++d) _mm512_store_ps(sums[r] + i + d * LANES, acc[r][d]);
    }
};

template <class T>
struct Attention {
    const T* qkv;
    T* out;
    Cache<T> cache;
    const Step& step;

    // Rows [first, first + ROWS) of a sequence's queries x heads of one group.
    template <int ROWS>
    void rows(int sequence, int head, int first) const {
        const Shape& shape = cache.shape;
        const int group = shape.heads / shape.kv_heads, begin = step.query_start[sequence];
        const int width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim;
        Attend<T, ROWS> attend(cache, step.tables + step.table_start[sequence], head);
        for (int r = 0; r < ROWS; ++r) {
            const size_t token = begin + (first + r) / group;
            const size_t at = static_cast<size_t>(head * group + (first + r) % group) * shape.head_dim;
            T* to = out + token * shape.heads * shape.head_dim + at;
            attend.set(r, qkv + token * width + at, to, step.positions[token]);
        }
        attend.run();
    }

    void task(int index) const {
        const Shape& shape = cache.shape;
        const int32_t* starts = step.task_start;
        const int sequence = std::upper_bound(starts, starts + step.sequences + 1, index) - starts - 1;
        const int head = (index - starts[sequence]) % shape.kv_heads;
        const int piece = (index - starts[sequence]) / shape.kv_heads;
        const int queries = step.query_start[sequence + 1] - step.query_start[sequence];
        const int end = std::min((piece + 1) * TASK_ROWS, queries * (shape.heads / shape.kv_heads));
        int row = piece * TASK_ROWS;
        for (; row + QUERY_ROWS <= end; row += QUERY_ROWS) rows<QUERY_ROWS>(sequence, head, row);
        switch (end - row) {
            case 1: return rows<1>(sequence, head, row);
            case 2: return rows<2>(sequence, head, row);
            case 3: return rows<3>(sequence, head, row);
        }
    }
};

// ---------------------------------------------------------------- the pool that all calls share

int num_threads = 1;

Pool& pool() {
    static Pool* instance = new Pool(num_threads);  // never destroyed: its threads outlive static teardown
    return *instance;
}

// Runs `body(row)` over rows; small work stays on the calling thread.
template <class Body>
void over_rows(int rows, size_t work, const Body& body) {
    const int tasks = work < 16384 ? 1 : std::min(rows, num_threads * 4);
    const int each = ceil_div(rows, tasks);
    pool().run(tasks, [&](int task) {
        for (int row = task * each; row < std::min((task + 1) * each, rows); ++row) body(row);
    });
}

template <class T>
void rms_norm(const T* x, const T* weight, T* out, int m, int n, float eps) {
    over_rows(m, static_cast<size_t>(m) * n, [&](int row) {
        const size_t at = static_cast<size_t>(row) * n;
        rms_norm_row(x + at, weight, out + at, n, eps);
    });
}

template <class T>
void silu_mul(const T* gate_up, T* out, int m, int n) {
    over_rows(m, static_cast<size_t>(m) * n * 4, [&](int row) {
        const T* gate = gate_up + static_cast<size_t>(row) * 2 * n;
        silu_mul_row(gate, gate + n, out + static_cast<size_t>(row) * n, n);
    });
}

template <class T>
void rope_and_store(T* qkv, Unit* keys, Unit* values, const float* cos, const float* sin, const Shape& shape,
                    const Step& step) {
    const int width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim;
    const Cache<T> cache{keys, values, shape};
    over_rows(step.tokens, static_cast<size_t>(step.tokens) * width * 2, [&](int row) {
        rope_and_store_token(qkv + static_cast<size_t>(row) * width, step.positions[row], step.slots[row], cos,
                             sin, cache);
    });
}

template <class T>
void attention(const T* qkv, T* out, Unit* keys, Unit* values, const Shape& shape, const Step& step) {
    const Attention<T> all{qkv, out, {keys, values, shape}, step};
    pool().run(step.task_start[step.sequences], [&](int task) { all.task(task); });
}

}  // namespace

#define EXPORT(T, NAME)                                                                                     \
    void pack_##NAME(const T* weight, Unit* packed, int n, int k) { pack<T>(weight, packed, n, k); }        \
    void linear_##NAME(const T* x, const Unit* packed, const float* bias, void* out, int m, int n, int k,   \
                       int add, int wide) {                                                                 \
        Product<T>{x, packed, bias, out, m, n, k, add != 0, wide != 0}.run(pool(), num_threads);            \
    }                                                                                                       \
    void rms_norm_##NAME(const T* x, const T* weight, T* out, int m, int n, float eps) {                    \
        rms_norm<T>(x, weight, out, m, n, eps);                                                             \
    }                                                                                                       \
    void silu_mul_##NAME(const T* gate_up, T* out, int m, int n) { silu_mul<T>(gate_up, out, m, n); }       \
    void rope_and_store_##NAME(T* qkv, Unit* keys, Unit* values, const float* cos, const float* sin,        \
                               const Shape* shape, const Step* step) {                                      \
        rope_and_store<T>(qkv, keys, values, cos, sin, *shape, *step);                                      \
    }                                                                                                       \
    void attention_##NAME(const T* qkv, T* out, Unit* keys, Unit* values, const Shape* shape,               \
                          const Step* step) {                                                               \
        attention<T>(qkv, out, keys, values, *shape, *step);                                                \
    }

extern "C" {
// Before the first other call; later ones change nothing.
void set_threads(int threads) { num_threads = std::max(1, threads); }
EXPORT(float, float32)
#ifdef __AVX512BF16__
EXPORT(bf16, bfloat16)
#endif
}
