// The decoder's operations for x86 with AVX-512, in bf16 (AVX512-BF16) and fp32, with weights of the same type or
// of int8 (AVX512-VNNI). Compiled and bound by native.py.
//
// Each result is summed in one fixed order, whatever the number of rows and threads: a sequence gives the same
// bits alone, in a batch, in chunks and after a prefix hit.

#include "attention.h"
#include "decoder.h"
#include "linear.h"
#include "pool.h"
#include "rows.h"

namespace {

int num_threads = 1;

Pool& pool() {
    static Pool* instance = new Pool(num_threads);  // never destroyed: its threads outlive static teardown
    return *instance;
}

template <class In, class T>
void multiply(const Rows<In>& rows, const Weight& weight, void* out, int m, bool add, bool wide) {
    if (wide) Product<In, float>{rows, weight, static_cast<float*>(out), add}.run(pool(), m);
    else Product<In, T>{rows, weight, static_cast<T*>(out), add}.run(pool(), m);
}

template <class T>
void rms_norm(const T* x, const T* weight, T* out, int m, int n, float eps) {
    pool().rows(m, static_cast<size_t>(m) * n, [&](int row) {
        const size_t at = static_cast<size_t>(row) * n;
        rms_norm_row(x + at, weight, out + at, n, eps);
    });
}

template <class T>
void silu_mul(const T* gate_up, T* out, int m, int n) {
    pool().rows(m, static_cast<size_t>(m) * n * 4, [&](int row) {
        const T* gate = gate_up + static_cast<size_t>(row) * 2 * n;
        silu_mul_row(gate, gate + n, out + static_cast<size_t>(row) * n, n);
    });
}

template <class T>
void rope_and_store(T* qkv, Unit* cache, const float* cos, const float* sin, const Shape& shape, const Step& step) {
    const int width = shape.qkv_size();
    const Cache<T> to{cache, shape};
    pool().rows(step.tokens, static_cast<size_t>(step.tokens) * width * 2, [&](int row) {
        rope_and_store_token(qkv + static_cast<size_t>(row) * width, step.positions[row], step.slots[row], cos, sin, to);
    });
}

#ifdef __AVX512VNNI__
template <class T>
void multiply_bytes(const T* x, const Weight& weight, void* out, int m, bool add, bool wide, uint8_t* bytes, float* scales) {
    const int k = weight.k;
    pool().rows(m, static_cast<size_t>(m) * k, [&](int row) {
        const size_t at = static_cast<size_t>(row) * k;
        scales[row] = quantise_row(x + at, bytes + at, k);
    });
    multiply<uint8_t, T>({bytes, scales}, weight, out, m, add, wide);
}
#endif

}  // namespace

#define EXPORT(T, NAME)                                                                                        \
    void pack_##NAME(const T* weight, Unit* packed, int n, int k) { pack(weight, packed, n, k); }              \
    void linear_##NAME(const T* x, const Weight* weight, void* out, int m, int add, int wide) {                \
        multiply<T, T>({x, nullptr}, *weight, out, m, add != 0, wide != 0);                                    \
    }                                                                                                          \
    void rms_norm_##NAME(const T* x, const T* weight, T* out, int m, int n, float eps) {                       \
        rms_norm(x, weight, out, m, n, eps);                                                                   \
    }                                                                                                          \
    void silu_mul_##NAME(const T* gate_up, T* out, int m, int n) { silu_mul(gate_up, out, m, n); }             \
    void rope_and_store_##NAME(T* qkv, Unit* cache, const float* cos, const float* sin, const Shape* shape,    \
                               const Step* step) {                                                             \
        rope_and_store(qkv, cache, cos, sin, *shape, *step);                                                   \
    }                                                                                                          \
    void attention_##NAME(const T* qkv, T* out, Unit* cache, const Shape* shape, const Step* step) {           \
        Attention<T>{qkv, out, {cache, *shape}, *step}.run(pool());                                            \
    }                                                                                                          \
    EXPORT_DECODER(T, T, NAME)

#define EXPORT_DECODER(T, IN, NAME)                                                                            \
    void decoder_##NAME(const Model* model, const Step* step, T* stream, T* qkv, T* attended, char* scratch,   \
                        Spent* spent) {                                                                        \
        Decoder<T, IN>{*model, *step, stream, qkv, attended, scratch, spent, pool()}.run();                    \
    }                                                                                                          \
    size_t scratch_bytes_##NAME(const Model* model) { return Decoder<T, IN>::scratch_bytes(*model, num_threads); }

#define EXPORT_INT8(T, NAME)                                                                                   \
    void linear_int8_##NAME(const T* x, const Weight* weight, void* out, int m, int add, int wide,             \
                            uint8_t* bytes, float* scales) {                                                   \
        multiply_bytes(x, *weight, out, m, add != 0, wide != 0, bytes, scales);                                \
    }                                                                                                          \
    EXPORT_DECODER(T, uint8_t, int8_##NAME)

extern "C" {
// Before the first other call; later ones change nothing.
void set_threads(int threads) { num_threads = std::max(1, threads); }
void pack_int8(const int8_t* weight, Unit* packed, int n, int k) { pack(weight, packed, n, k); }
void argmax(const float* x, int64_t* out, int m, int n) {
    pool().rows(m, static_cast<size_t>(m) * n, [&](int row) { out[row] = argmax_row(x + static_cast<size_t>(row) * n, n); });
}
EXPORT(float, float32)
#ifdef __AVX512BF16__
EXPORT(bf16, bfloat16)
#endif
#ifdef __AVX512VNNI__
EXPORT_INT8(float, float32)
#ifdef __AVX512BF16__
EXPORT_INT8(bf16, bfloat16)
#endif
#endif
}
