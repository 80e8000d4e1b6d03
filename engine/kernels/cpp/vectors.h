// Vectors of 16 units, for bf16, fp32 and bytes.
//
// One idea carries these files: data moves in units of 4 bytes, one float, a pair of bf16, or four bytes. `fma`
// multiplies units and adds to a vector of 16 sums, so every product (linear layers, Q.K, P.V) is the same loop
// for all types. Weights and the KV cache are laid out so that 16 neighbouring units belong to 16 results.

#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

using Unit = uint32_t;
using bf16 = uint16_t;

constexpr int LANES = 16;  // units in a vector

template <class T>
constexpr int STEP = sizeof(Unit) / sizeof(T);  // elements in a unit

inline int ceil_div(int a, int b) { return (a + b - 1) / b; }
inline int round_up(int a, int b) { return ceil_div(a, b) * b; }

// The lanes of the vector at i that lie before n.
inline __mmask16 lanes(int i, int n) { return n - i >= LANES ? 0xffff : (1u << (n - i)) - 1; }

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

// The type of 16 sums of products, and adding the products of two vectors of units to it.
template <class T>
struct Sum {
    using type = __m512;
};
typedef int Int16 __attribute__((vector_size(64)));  // not __m512i, of which GCC 12 spills arrays
template <>
struct Sum<uint8_t> {
    using type = Int16;
};

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

#ifdef __AVX512VNNI__
// Unsigned bytes times signed ones: the sums are exact.
inline Int16 fma(Int16 sum, __m512i a, __m512i b, uint8_t) {
    return (Int16)_mm512_dpbusd_epi32((__m512i)sum, a, b);
}
#endif

inline void prefetch(const Unit* p) { _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T1); }

constexpr float LOG2_E = 1.44269504f;

// 2^x for x < 128; 0 below -200. 2^n times a polynomial on [-0.5, 0.5], within 2 units in the last place of a
// float, or 1/16 of one of bf16.
template <class T>
inline __m512 exp2_16(__m512 x) {
    x = _mm512_max_ps(x, _mm512_set1_ps(-200.f));
    const __m512 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 r = _mm512_sub_ps(x, n);
    __m512 p;
    if constexpr (sizeof(T) == sizeof(float)) {
        p = _mm512_set1_ps(1.5403530e-4f);
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3333558e-3f));
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(9.6181291e-3f));
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.5504109e-2f));
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(2.4022651e-1f));
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(6.9314718e-1f));
    } else {
        p = _mm512_set1_ps(0.055007961f);
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.24221062f));
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.69328299f));
    }
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.f));
    return _mm512_scalef_ps(p, n);
}

template <class T>
inline __m512 exp16(__m512 x) {
    return exp2_16<T>(_mm512_mul_ps(x, _mm512_set1_ps(LOG2_E)));
}
