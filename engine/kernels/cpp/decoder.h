// All layers of a decoder in one call: what model.py does operation by operation, in the same order of sums.

#pragma once

#include <type_traits>
#include <utility>

#include "attention.h"
#include "linear.h"
#include "pool.h"
#include "rows.h"

struct Layer {
    const void* input_norm;  // or null: the layer's input is normalised already
    Weight qkv, o;
    const void* post_norm;
    Weight gate_up, down;
    Unit* cache;
};

struct Model {
    Shape shape;
    int hidden, intermediate, num_layers;
    float eps;
    const float *cos, *sin;
    const Layer* layers;
};

// What threads spent on each kind of work, in ticks of the processor's clock, summed over threads.
struct Spent {
    int64_t linear, attention, row_wise;
};

// Up to this many rows every weight is multiplied by all rows at once, columns shared out among threads: it is read from
// memory once. With more rows threads share these instead, and take a few of them through the whole layer, so
// that what they make of them stays in their cache.
constexpr int NARROW = 63;
constexpr int CHUNK = 64;

// `T` is the type of activations; `In` that of products: T, or bytes, to which T is quantised.
template <class T, class In>
struct Decoder {
    const Model& model;
    const Step& step;
    T *stream, *qkv, *attended;
    char* scratch;  // scratch_bytes of it
    Spent* spent;   // or null
    Pool& pool;

    // What a few rows become on their way through a layer; a thread's own where threads share rows.
    struct Buffers {
        T *normed, *gate_up, *activated;
        uint8_t* bytes;
        float* scales;
    };

    static constexpr bool BYTES = !std::is_same_v<T, In>;

    static int widest(const Model& m) {
        return std::max({m.hidden, m.shape.query_size(), m.intermediate});
    }
    static size_t buffer_bytes(const Model& m) {
        const size_t row = (m.hidden + 3 * static_cast<size_t>(m.intermediate)) * sizeof(T) + widest(m) + sizeof(float);
        return round_up(CHUNK * row, 4096);
    }
    static size_t scratch_bytes(const Model& m, int threads) { return threads * buffer_bytes(m); }

    Buffers buffers(int number) const {
        char* at = scratch + number * buffer_bytes(model);
        const auto take = [&at](size_t bytes) { return std::exchange(at, at + bytes); };
        Buffers b;
        b.normed = reinterpret_cast<T*>(take(CHUNK * model.hidden * sizeof(T)));
        b.gate_up = reinterpret_cast<T*>(take(2 * CHUNK * model.intermediate * sizeof(T)));
        b.activated = reinterpret_cast<T*>(take(CHUNK * model.intermediate * sizeof(T)));
        b.scales = reinterpret_cast<float*>(take(CHUNK * sizeof(float)));
        b.bytes = reinterpret_cast<uint8_t*>(take(CHUNK * widest(model)));
        return b;
    }

    void run() const {
        const Layer* layers = model.layers;
        if (step.tokens <= NARROW) {
            for (int i = 0; i < model.num_layers; ++i) {
                before<true>(layers[i], 0, step.tokens);
                attend(layers[i]);
                after<true>(layers[i], 0, step.tokens);
            }
            return;
        }
        over_chunks([&](int row, int count) { before<false>(layers[0], row, count); });
        for (int i = 0; i < model.num_layers; ++i) {
            attend(layers[i]);
            over_chunks([&](int row, int count) {
                after<false>(layers[i], row, count);
                if (i + 1 < model.num_layers) before<false>(layers[i + 1], row, count);
            });
        }
    }

private:
    // Chunks of equal size, as many for each thread.
    template <class Body>
    void over_chunks(const Body& body) const {
        const int tasks = round_up(ceil_div(step.tokens, CHUNK), pool.size);
        const int chunk = round_up(ceil_div(step.tokens, tasks), TILE_ROWS);
        pool.run(ceil_div(step.tokens, chunk), [&](int task) {
            body(task * chunk, std::min(chunk, step.tokens - task * chunk));
        });
    }

    // From the residual stream to q, k and v, these two in the cache, of `count` rows from `first` on.
    // SHARED: all threads work on these rows; else this one does, and others on others.
    template <bool SHARED>
    void before(const Layer& layer, int first, int count) const {
        const Shape& shape = model.shape;
        const Buffers b = buffers(SHARED ? 0 : Pool::self());
        const T* x = at(stream, first, model.hidden);
        if (layer.input_norm) x = b.normed;
        each_row<SHARED>(count, 2 * model.hidden, [&](int r) {
            if (layer.input_norm) norm(layer.input_norm, first + r, at(b.normed, r, model.hidden));
            quantise(b, x, r, model.hidden);
        });
        multiply<SHARED>(b, x, layer.qkv, at(qkv, first, shape.qkv_size()), false, count);
        const Cache<T> cache{layer.cache, shape};
        each_row<SHARED>(count, 2 * shape.qkv_size(), [&](int r) {
            const int row = first + r;
            rope_and_store_token(at(qkv, row, shape.qkv_size()), step.positions[row], step.slots[row], model.cos,
                                 model.sin, cache);
        });
    }

    void attend(const Layer& layer) const {
        const Attention<T> all{qkv, attended, {layer.cache, model.shape}, step};
        all.run(pool, spent ? &spent->attention : nullptr);
    }

    // From what attention found to the next layer's residual stream.
    template <bool SHARED>
    void after(const Layer& layer, int first, int count) const {
        const Buffers b = buffers(SHARED ? 0 : Pool::self());
        const int hidden = model.hidden, inner = model.intermediate, query = model.shape.query_size();
        T* out = at(stream, first, hidden);
        const T* found = at(attended, first, query);
        if (BYTES) each_row<SHARED>(count, query, [&](int r) { quantise(b, found, r, query); });
        multiply<SHARED>(b, found, layer.o, out, true, count);
        each_row<SHARED>(count, 2 * hidden, [&](int r) {
            norm(layer.post_norm, first + r, at(b.normed, r, hidden));
            quantise(b, b.normed, r, hidden);
        });
        multiply<SHARED>(b, b.normed, layer.gate_up, b.gate_up, false, count);
        each_row<SHARED>(count, 4 * inner, [&](int r) {
            const T* gate = at(b.gate_up, r, 2 * inner);
            silu_mul_row(gate, gate + inner, at(b.activated, r, inner), inner);
            quantise(b, b.activated, r, inner);
        });
        multiply<SHARED>(b, b.activated, layer.down, out, true, count);
    }

    template <class U>
    static U* at(U* rows, int row, int width) {
        return rows + static_cast<size_t>(row) * width;
    }

    void norm(const void* weight, int row, T* out) const {
        rms_norm_row(at(stream, row, model.hidden), static_cast<const T*>(weight), out, model.hidden, model.eps);
    }

    void quantise(const Buffers& b, const T* x, int row, int width) const {
        if (BYTES) b.scales[row] = quantise_row(at(x, row, width), at(b.bytes, row, width), width);
    }

    template <bool SHARED, class Body>
    void each_row(int count, int work, const Body& body) const {
        int64_t* ticks = spent ? &spent->row_wise : nullptr;
        if (SHARED) return pool.rows(count, static_cast<size_t>(count) * work, body, ticks);
        const Stopwatch watch(ticks);
        for (int r = 0; r < count; ++r) body(r);
    }

    // The rows of x, or what they became as bytes, times a weight.
    template <bool SHARED>
    void multiply(const Buffers& b, const T* x, const Weight& weight, T* out, bool add, int count) const {
        int64_t* ticks = spent ? &spent->linear : nullptr;
        Rows<In> rows{nullptr, b.scales};
        if constexpr (BYTES) rows.x = b.bytes;
        else rows.x = x;
        const Product<In, T> product{rows, weight, out, add};
        if (SHARED) return product.run(pool, count, ticks);
        const Stopwatch watch(ticks);
        product.strips(0, count);
    }
};
