// What is done to each row of a step by itself: norms, activations, and quantisation to bytes.

#pragma once

#include <cmath>

#include "vectors.h"

// out = x / sqrt(mean(x^2) + eps) * weight; `out` may be `x`.
template <class T>
void rms_norm_row(const T* x, const T* weight, T* out, int n, float eps) {
    __m512 squares = _mm512_setzero_ps();
    for (int i = 0; i < n; i += LANES) {
        const __m512 v = load16(x + i, lanes(i, n));
        squares = _mm512_fmadd_ps(v, v, squares);
    }
    const __m512 scale = _mm512_set1_ps(1.f / std::sqrt(_mm512_reduce_add_ps(squares) / n + eps));
    for (int i = 0; i < n; i += LANES) {
        const __mmask16 mask = lanes(i, n);
        const __m512 v = _mm512_mul_ps(load16(x + i, mask), scale);
        store16(out + i, _mm512_mul_ps(v, load16(weight + i, mask)), mask);
    }
}

// a / b; for bf16 by an approximation of 14 bits, which is quicker.
template <class T>
__m512 divide(__m512 a, __m512 b) {
    if constexpr (sizeof(T) == sizeof(float)) return _mm512_div_ps(a, b);
    else return _mm512_mul_ps(a, _mm512_rcp14_ps(b));
}

// out = silu(gate) * up
template <class T>
void silu_mul_row(const T* gate, const T* up, T* out, int n) {
    const __m512 one = _mm512_set1_ps(1.f);
    for (int i = 0; i < n; i += LANES) {
        const __mmask16 mask = lanes(i, n);
        const __m512 g = load16(gate + i, mask);
        // Beyond -80 the sigmoid is 0 in every type; the bound keeps e^-g finite.
        const __m512 e = exp16<T>(_mm512_min_ps(_mm512_sub_ps(_mm512_setzero_ps(), g), _mm512_set1_ps(80.f)));
        const __m512 silu = divide<T>(g, _mm512_add_ps(one, e));
        store16(out + i, _mm512_mul_ps(silu, load16(up + i, mask)), mask);
    }
}

// x as bytes: out = round(x / scale) + 128, in [1, 255]. Returns the scale, max |x| / 127.
template <class T>
float quantise_row(const T* x, uint8_t* out, int n) {
    __m512 high = _mm512_setzero_ps();
    for (int i = 0; i < n; i += LANES)
        high = _mm512_max_ps(high, _mm512_abs_ps(load16(x + i, lanes(i, n))));
    const float scale = std::max(_mm512_reduce_max_ps(high) / 127.f, 1e-30f);
    const __m512 inverse = _mm512_set1_ps(1.f / scale);
    const __m512i zero = _mm512_set1_epi32(128);
    for (int i = 0; i < n; i += LANES) {
        const __mmask16 mask = lanes(i, n);
        const __m512i value = _mm512_cvtps_epi32(_mm512_mul_ps(load16(x + i, mask), inverse));
        _mm512_mask_cvtusepi32_storeu_epi8(out + i, mask, _mm512_add_epi32(value, zero));
    }
    return scale;
}

// The place of the largest of n numbers, the first of several. NaNs are never larger.
inline int argmax_row(const float* x, int n) {
    __m512 high = _mm512_set1_ps(-INFINITY);
    for (int i = 0; i < n; i += LANES)
        high = _mm512_max_ps(_mm512_mask_loadu_ps(high, lanes(i, n), x + i), high);
    const __m512 peak = _mm512_set1_ps(_mm512_reduce_max_ps(high));
    for (int i = 0; i < n; i += LANES)
        if (const __mmask16 equal = _mm512_mask_cmpeq_ps_mask(lanes(i, n), _mm512_maskz_loadu_ps(lanes(i, n), x + i), peak))
            return i + __builtin_ctz(equal);
    return 0;
}
