// Products with packed weights.

#pragma once

#include <algorithm>

#include "pool.h"
#include "vectors.h"

constexpr int PANEL_VECTORS = 3;  // vectors of output columns computed together
constexpr int PANEL = PANEL_VECTORS * LANES;
constexpr int TILE_ROWS = 8;            // rows computed together: 8 x 3 sums, and 4 operands, of 32 registers
constexpr int AHEAD = 2048 / sizeof(Unit);  // how far few rows, whose time is that of reading, fetch ahead

// A [n, k] matrix in panels of 48 columns of results: [panel][unit of k][48], the last one padded with zeros.
struct Weight {
    const Unit* packed;
    const float* bias;      // [n], or null
    const float* scales;    // [n], of int8: what one step of the integer weight is worth
    const int32_t* shifts;  // [n], of int8: what sums exceed the true ones by
    int n, k;
};

// The rows of a product's left side. As bytes they are x / scale + 128, of each row its own scale.
template <class In>
struct Rows {
    const In* x;
    const float* scales;
};

template <class T>
void pack(const T* weight, Unit* packed, int n, int k) {
    const int units = k / STEP<T>;
    for (int column = 0; column < round_up(n, PANEL); ++column) {
        Unit* out = packed + static_cast<size_t>(column / PANEL) * units * PANEL + column % PANEL;
        const Unit* row = reinterpret_cast<const Unit*>(weight + static_cast<size_t>(column) * k);
        for (int u = 0; u < units; ++u) out[static_cast<size_t>(u) * PANEL] = column < n ? row[u] : 0;
    }
}

template <class In, class Out>
struct Product {
    Rows<In> rows;
    Weight weight;
    Out* out;
    bool add;  // out += instead of out =

    __m512 scaled(__m512 sum, int, int, __mmask16) const { return sum; }
    __m512 scaled(Int16 sums, int row, int column, __mmask16 mask) const {
        const __m512i sum = _mm512_sub_epi32((__m512i)sums, _mm512_maskz_loadu_epi32(mask, weight.shifts + column));
        const __m512 scale = _mm512_mul_ps(load16(weight.scales + column, mask), _mm512_set1_ps(rows.scales[row]));
        return _mm512_mul_ps(_mm512_cvtepi32_ps(sum), scale);
    }

    void finish(typename Sum<In>::type sums, int row, int column) const {
        if (column >= weight.n) return;
        const __mmask16 mask = lanes(column, weight.n);
        __m512 sum = scaled(sums, row, column, mask);
        if (weight.bias) sum = _mm512_add_ps(sum, load16(weight.bias + column, mask));
        Out* to = out + static_cast<size_t>(row) * weight.n + column;
        if (add) sum = _mm512_add_ps(sum, load16(to, mask));
        store16(to, sum, mask);
    }

    // COUNT rows times PANELS panels. Enough sums must be under way to hide the latency of an addition, so a
    // single row is multiplied with two panels at a time. Each step fetches the unit `ahead` of it into the
    // second-level cache.
    template <int COUNT, int PANELS = 1, bool FETCH = true>
    void tile(int row, int panel, size_t ahead) const {
        using Sums = typename Sum<In>::type;
        const int units = weight.k / STEP<In>;
        const size_t stride = static_cast<size_t>(units) * PANEL;
        const Unit* a = reinterpret_cast<const Unit*>(rows.x + static_cast<size_t>(row) * weight.k);
        const Unit* b = weight.packed + panel * stride;
        Sums sums[COUNT][PANELS][PANEL_VECTORS];
        for (int r = 0; r < COUNT; ++r)
            for (int p = 0; p < PANELS; ++p)
                for (int v = 0; v < PANEL_VECTORS; ++v) sums[r][p][v] = Sums{};
        for (int u = 0; u < units; ++u, b += PANEL) {
            __m512i columns[PANELS][PANEL_VECTORS];
            for (int p = 0; p < PANELS; ++p)
                for (int v = 0; v < PANEL_VECTORS; ++v) {
                    columns[p][v] = _mm512_loadu_si512(b + p * stride + v * LANES);
                    if (FETCH) prefetch(b + p * stride + v * LANES + ahead);
                }
            for (int r = 0; r < COUNT; ++r) {
                const __m512i value = _mm512_set1_epi32(a[static_cast<size_t>(r) * units + u]);
                for (int p = 0; p < PANELS; ++p)
                    for (int v = 0; v < PANEL_VECTORS; ++v)
                        sums[r][p][v] = fma(sums[r][p][v], value, columns[p][v], In{});
            }
        }
        for (int r = 0; r < COUNT; ++r)
            for (int p = 0; p < PANELS; ++p)
                for (int v = 0; v < PANEL_VECTORS; ++v)
                    finish(sums[r][p][v], row + r, (panel + p) * PANEL + v * LANES);
    }

    // `count` rows from `row` on, times panels [panel, end).
    void block(int row, int count, int panel, int end) const {
        if (count == 1)
            for (; panel + 2 <= end; panel += 2) tile<1, 2>(row, panel, AHEAD);
        for (; panel < end; ++panel) strip(row, count, panel);
    }

    // The first tile brings the panel from memory, which the processor foresees; the last one finds it in the
    // cache, and fetches the next.
    void strip(int row, int count, int panel) const {
        const size_t next = static_cast<size_t>(weight.k / STEP<In>) * PANEL;
        const int first = row;
        for (; count >= TILE_ROWS; row += TILE_ROWS, count -= TILE_ROWS)
            if (row > first && count < 2 * TILE_ROWS) tile<TILE_ROWS>(row, panel, next);
            else tile<TILE_ROWS, 1, false>(row, panel, 0);
        const size_t ahead = row == first ? AHEAD : next;
        switch (count) {
            case 1: return tile<1>(row, panel, ahead);
            case 2: return tile<2>(row, panel, ahead);
            case 3: return tile<3>(row, panel, ahead);
            case 4: return tile<4>(row, panel, ahead);
            case 5: return tile<5>(row, panel, ahead);
            case 6: return tile<6>(row, panel, ahead);
            case 7: return tile<7>(row, panel, ahead);
        }
    }

    // All panels for some rows, on this thread.
    void strips(int row, int count) const { block(row, count, 0, ceil_div(weight.n, PANEL)); }

    // m rows on all threads. Few rows: a task is some panels, read from memory once. Many rows: a task is one
    // panel times as many rows as stay in the second-level cache while the panels pass by.
    void run(Pool& pool, int m, int64_t* ticks = nullptr) const {
        const int panels = ceil_div(weight.n, PANEL);
        const int fit = (256 << 10) / static_cast<int>(weight.k * sizeof(In)) / TILE_ROWS * TILE_ROWS;
        const int chunk = std::max(fit, 4 * TILE_ROWS);
        const int chunks = ceil_div(m, chunk);
        const int group = chunks > 1 ? 1 : std::max(2, panels / (pool.size * 8));
        const int groups = ceil_div(panels, group);
        const auto task = [&](int number) {
            const int row = number / groups * chunk;
            const int first = number % groups * group;
            block(row, std::min(chunk, m - row), first, std::min(first + group, panels));
        };
        pool.run(chunks * groups, task, ticks);
    }
};
