// Products of a few rows with a weight matrix.

#pragma once

#include <algorithm>
#include <type_traits>
#include <vector>

#include "vectors.h"
#if defined(__AMX_BF16__)
#include "tiles.h"
#endif

#if defined(__AVX512F__)
constexpr int MAX_ROWS = 12;  // 2 * 12 accumulators of the 32 registers
#else
constexpr int MAX_ROWS = 4;  // 2 * 4 of the 16
#endif
constexpr int BLOCK = 2 * LANES;  // outputs that are computed side by side

// The weights of a block's outputs for two inputs that follow each other. bfloat16 ones lie in pairs: a word holds both of
// an output. float ones lie one input after the other.
static inline void load_weights(const uint16_t* at, Floats (&first)[2], Floats (&second)[2]) {
    for (int half = 0; half < 2; half++) {
        const Words words = *(const LooseWords*)(at + 2 * half * LANES);
        first[half] = (Floats)(words << 16);
        second[half] = (Floats)(words & 0xffff0000u);
    }
}

static inline void load_weights(const float* at, Floats (&first)[2], Floats (&second)[2]) {
    for (int half = 0; half < 2; half++) {
        first[half] = *(const LooseFloats*)(at + half * LANES);
        second[half] = *(const LooseFloats*)(at + BLOCK + half * LANES);
    }
}

// Those for the last of an odd number of inputs; a pair of bfloat16 is filled up with a zero.
static inline void load_last(const uint16_t* at, Floats (&first)[2]) {
    Floats nothing[2];
    load_weights(at, first, nothing);
}

static inline void load_last(const float* at, Floats (&first)[2]) {
    for (int half = 0; half < 2; half++) first[half] = *(const LooseFloats*)(at + half * LANES);
}

// ROWS inputs times one block of outputs. Each sum is added up in the same order whatever ROWS is, so that a sequence's
// numbers do not depend on who shares its step.
template <int ROWS, typename Weight>
static inline void multiply_rows(const float* inputs, int64_t width, const Weight* weights, Floats (&sums)[ROWS][2]) {
    Floats first[2], second[2];
    int64_t k = 0;
    for (; k + 2 <= width; k += 2) {
        load_weights(weights + k * BLOCK, first, second);
        for (int line = 0; line < 2; line++) __builtin_prefetch(weights + (k + 32 + line) * BLOCK);
        for (int row = 0; row < ROWS; row++) {
            const Floats input = filled(inputs[row * width + k]), next = filled(inputs[row * width + k + 1]);
            for (int half = 0; half < 2; half++) sums[row][half] = fused(input, first[half], sums[row][half]);
            for (int half = 0; half < 2; half++) sums[row][half] = fused(next, second[half], sums[row][half]);
        }
    }
    if (k == width) return;
    load_last(weights + k * BLOCK, first);
    for (int row = 0; row < ROWS; row++)
        for (int half = 0; half < 2; half++)
            sums[row][half] = fused(filled(inputs[row * width + k]), first[half], sums[row][half]);
}

#if defined(__AVX512BF16__)
// The same by the processor's own products of pairs of bfloat16, which are summed in float as well.
template <int ROWS>
static inline void multiply_rows(const uint16_t* inputs, int64_t width, const uint16_t* weights,
                                 Floats (&sums)[ROWS][2]) {
    const auto add = [&](int64_t k, auto pair_of) {
        const Words low = *(const LooseWords*)(weights + k * BLOCK);
        const Words high = *(const LooseWords*)(weights + k * BLOCK + 2 * LANES);
        for (int row = 0; row < ROWS; row++) {
            const Words pair = pair_of(inputs + row * width + k) + Words{};
            sums[row][0] = (Floats)_mm512_dpbf16_ps((__m512)sums[row][0], (__m512bh)pair, (__m512bh)low);
            sums[row][1] = (Floats)_mm512_dpbf16_ps((__m512)sums[row][1], (__m512bh)pair, (__m512bh)high);
        }
    };
    int64_t k = 0;
    for (; k + 2 <= width; k += 2) {
        for (int line = 0; line < 2; line++) __builtin_prefetch(weights + (k + 32 + line) * BLOCK);
        add(k, [](const uint16_t* at) {
            uint32_t pair;
            std::memcpy(&pair, at, 4);
            return pair;
        });
    }
    if (k < width) add(k, [](const uint16_t* at) { return uint32_t(*at); });
}
#endif

// Where results go: float, or rounded to bfloat16.
struct Results {
    void* at;
    bool is_narrow;

    Results from(int64_t index) const {
        return {is_narrow ? (void*)((uint16_t*)at + index) : (void*)((float*)at + index), is_narrow};
    }
    void write(float value, int64_t index) const {
        is_narrow ? put(value, (uint16_t*)at + index) : put(value, (float*)at + index);
    }
    void write(Floats values, int64_t index) const {
        is_narrow ? put_lanes(values, (uint16_t*)at + index) : put_lanes(values, (float*)at + index);
    }
};

// Writes sums of rows with one block of outputs, [rows][BLOCK], of which the first `valid` are wanted.
static inline void write_block(const float* sums, int64_t rows, const float* bias, const Results& outputs,
                               int64_t output_width, int64_t valid) {
    for (int64_t row = 0; row < rows; row++, sums += BLOCK) {
        if (valid == BLOCK)
            for (int64_t i = 0; i < BLOCK; i += LANES) {
                const Floats sum = *(const LooseFloats*)(sums + i);
                outputs.write(bias ? sum + *(const LooseFloats*)(bias + i) : sum, row * output_width + i);
            }
        else
            for (int64_t i = 0; i < valid; i++)
                outputs.write(bias ? sums[i] + bias[i] : sums[i], row * output_width + i);
    }
}

template <int ROWS, typename Input, typename Weight>
static void linear_block(const Input* inputs, int64_t width, const Weight* weights, const float* bias,
                         const Results& outputs, int64_t output_width, int64_t valid) {
    Floats sums[ROWS][2] = {};
    multiply_rows<ROWS>(inputs, width, weights, sums);
    write_block((const float*)sums, ROWS, bias, outputs, output_width, valid);
}

template <int ROWS, typename Input, typename Weight>
static void linear_rows(int64_t rows, const Input* inputs, int64_t width, const Weight* weights, const float* bias,
                        const Results& outputs, int64_t output_width, int64_t valid) {
    if constexpr (ROWS > 0) {
        if (rows != ROWS)
            return linear_rows<ROWS - 1>(rows, inputs, width, weights, bias, outputs, output_width, valid);
        linear_block<ROWS>(inputs, width, weights, bias, outputs, output_width, valid);
    }
}

template <typename Input, typename Weight>
static void multiply(const Input* inputs, int64_t rows, int64_t width, const Weight* weights, const float* bias,
                     const Results& outputs, int64_t output_width, int64_t threads) {
    const int64_t blocks = (output_width + BLOCK - 1) / BLOCK;
    // As equal as possible: twelve rows and then one would read the weights as often as seven and then six.
    const int64_t parts = (rows + MAX_ROWS - 1) / MAX_ROWS;
    const int64_t stride = (std::is_same_v<Weight, float> ? width : (width + 1) / 2 * 2) * BLOCK;
    if (parts * width * output_width < WORTH_WAKING) threads = 1;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int64_t block = 0; block < blocks; block++) {
        const int64_t first = block * BLOCK;
        const int64_t valid = output_width - first < BLOCK ? output_width - first : BLOCK;
        for (int64_t part = 0; part < parts; part++) {
            const int64_t start = rows * part / parts, end = rows * (part + 1) / parts;
            linear_rows<MAX_ROWS>(end - start, inputs + start * width, width, weights + block * stride,
                                  bias ? bias + first : nullptr, outputs.from(start * output_width + first), output_width,
                                  valid);
        }
    }
}

#if defined(__AMX_BF16__)
// The same by the tile unit; `width` is a multiple of TILE_WIDTH.
static void multiply_by_tiles(const uint16_t* inputs, int64_t rows, int64_t width, const uint16_t* weights,
                              const float* bias, const Results& outputs, int64_t output_width, int64_t threads) {
    const int64_t blocks = (output_width + BLOCK - 1) / BLOCK;
    const int64_t parts = (rows + 2 * TILE_ROWS - 1) / (2 * TILE_ROWS);
    if (parts * width * output_width < WORTH_WAKING) threads = 1;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        alignas(64) float sums[2 * TILE_ROWS * BLOCK];
        for (int64_t part = 0; part < parts; part++) {
            const int64_t start = part * 2 * TILE_ROWS, count = std::min<int64_t>(rows - start, 2 * TILE_ROWS);
            const bool has_lower = count > TILE_ROWS;
            set_tiles(count);
#pragma omp for schedule(static) nowait
            for (int64_t block = 0; block < blocks; block++) {
                const int64_t first = block * BLOCK;
                const uint16_t* of_block = weights + block * width * BLOCK;
                if (has_lower)
                    multiply_tiles<true>(inputs + start * width, width, of_block, sums);
                else
                    multiply_tiles<false>(inputs + start * width, width, of_block, sums);
                write_block(sums, count, bias ? bias + first : nullptr, outputs.from(start * output_width + first),
                            output_width, std::min<int64_t>(output_width - first, BLOCK));
            }
        }
        _tile_release();
    }
}
#endif

static const float* as_floats(const void* values, Kind kind, int64_t count) {
    if (kind == FLOAT32) return (const float*)values;
    static thread_local std::vector<float> buffer;
    if (int64_t(buffer.size()) < count) buffer.resize(count);
    const uint16_t* narrow = (const uint16_t*)values;
    float* wide = buffer.data();
    for (int64_t i = 0; i < count; i++) wide[i] = widened(narrow[i]);
    return wide;
}

struct Linear {
    const void* inputs;  // [rows, width]
    int64_t kind, rows, width;
    const void* weights;  // packed; see `linear.py`
    int64_t weight_kind;
    const float* bias;  // [output_width], or none
    void* outputs;      // [rows, output_width]; of `output_kind`
    int64_t output_kind, output_width, threads;
};

static void linear(const Linear& l) {
    const auto run = [&](auto* values, auto* packed) {
        multiply(values, l.rows, l.width, packed, l.bias, {l.outputs, l.output_kind == BFLOAT16}, l.output_width,
                 l.threads);
    };
#if defined(__AMX_BF16__)
    if (l.weight_kind == BFLOAT16 && l.kind == BFLOAT16 && l.width % TILE_WIDTH == 0 && may_use_tiles())
        return multiply_by_tiles((const uint16_t*)l.inputs, l.rows, l.width, (const uint16_t*)l.weights, l.bias,
                                 {l.outputs, l.output_kind == BFLOAT16}, l.output_width, l.threads);
#endif
#if defined(__AVX512BF16__)
    if (l.weight_kind == BFLOAT16 && l.kind == BFLOAT16)
        return run((const uint16_t*)l.inputs, (const uint16_t*)l.weights);
#endif
    const float* floats = as_floats(l.inputs, Kind(l.kind), l.rows * l.width);
    if (l.weight_kind == BFLOAT16)
        run(floats, (const uint16_t*)l.weights);
    else
        run(floats, (const float*)l.weights);
}
