// What this machine's cores can do at most: multiplications in registers, and reading memory. Two threads or more,
// each on its own numbers. Built and bound by roofline.py.

#include <immintrin.h>

#include <chrono>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

namespace {

// 24 sums under way hide the latency of each. In assembly, since a compiler might keep them in memory.
#define EACH(OP) \
    OP(0) OP(1) OP(2) OP(3) OP(4) OP(5) OP(6) OP(7) OP(8) OP(9) OP(10) OP(11) OP(12) OP(13) OP(14) OP(15) OP(16) \
    OP(17) OP(18) OP(19) OP(20) OP(21) OP(22) OP(23)
#define CLEAR(I) "vpxord %%zmm" #I ",%%zmm" #I ",%%zmm" #I "\n"
#define BF16(I) "vdpbf16ps %%zmm30,%%zmm31,%%zmm" #I "\n"
#define INT8(I) "vpdpbusd %%zmm30,%%zmm31,%%zmm" #I "\n"
#define FLOAT(I) "vfmadd231ps %%zmm30,%%zmm31,%%zmm" #I "\n"
#define USED(I) "zmm" #I,
#define LOOP(NAME, OP)                                                                                      \
    __attribute__((noinline)) void NAME(int64_t rounds) {                                                   \
        asm volatile(CLEAR(30) CLEAR(31) EACH(CLEAR) "1:\n" EACH(OP) "dec %0\n jnz 1b\n"                    \
                     : "+r"(rounds)                                                                         \
                     :                                                                                      \
                     : EACH(USED) "zmm30", "zmm31", "memory", "cc");                                        \
    }
LOOP(bf16, BF16)
LOOP(int8, INT8)
LOOP(float32, FLOAT)

double seconds(int threads, const std::function<void(int)>& body) {
    const auto start = std::chrono::steady_clock::now();
    std::vector<std::thread> others;
    for (int i = 1; i < threads; ++i) others.emplace_back(body, i);
    body(0);
    for (auto& other : others) other.join();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

double operations(int threads, int64_t rounds, void (*loop)(int64_t), int each) {
    return 24.0 * each * rounds * threads / seconds(threads, [&](int) { loop(rounds); });
}

}  // namespace

extern "C" {
// Operations (a multiplication and an addition are two) per second.
double peak_bf16(int threads, int64_t rounds) { return operations(threads, rounds, bf16, 64); }
double peak_int8(int threads, int64_t rounds) { return operations(threads, rounds, int8, 128); }
double peak_float32(int threads, int64_t rounds) { return operations(threads, rounds, float32, 32); }

// Bytes per second of reading `megabytes` a thread, which are to be many more than the caches hold.
double read_memory(int threads, int megabytes) {
    const size_t size = static_cast<size_t>(megabytes) << 20;
    std::vector<std::unique_ptr<char[]>> memory(threads);
    for (auto& block : memory) {
        block = std::make_unique<char[]>(size);
        std::memset(block.get(), 1, size);
    }
    std::vector<int64_t> sums(threads);
    const double taken = seconds(threads, [&](int thread) {
        __m512i a = _mm512_setzero_si512(), b = a;
        for (size_t i = 0; i < size; i += 128) {
            const char* at = memory[thread].get() + i;
            _mm_prefetch(at + 2048, _MM_HINT_T1);
            a = _mm512_add_epi32(a, _mm512_loadu_si512(at));
            b = _mm512_add_epi32(b, _mm512_loadu_si512(at + 64));
        }
        sums[thread] = _mm512_reduce_add_epi64(_mm512_add_epi64(a, b));
    });
    volatile int64_t kept = sums[0];  // or the compiler drops the reads
    (void)kept;
    return static_cast<double>(size) * threads / taken;
}
}
