// What torch does number by number, and the means and look-ups between: small work, for which calling torch takes longer
// than computing. Results are torch's own, bit for bit, wherever torch's own vectors are as wide as ours;
// `plans.py` keeps torch's operation where they are not. SILU alone differs in the last place of some numbers: torch takes
// what fills no two of its vectors by the C library's exponential, which would make a token depend on its neighbours.

#pragma once

#include <cmath>

#include "vectors.h"

enum Operation : int64_t { COPY = 0, NEGATE = 1, SQUARE = 2, RECIPROCAL_ROOT = 3, SILU = 4, ADD = 5, MULTIPLY = 6, OPERATIONS };

constexpr int DIMENSIONS = 4;

struct Operand {
    void* at;
    int64_t kind;
    int64_t strides[DIMENSIONS];  // in numbers; of the last dimension 1, or 0 for one number that meets all
};

struct Pointwise {
    int64_t operation;
    int64_t sizes[DIMENSIONS];
    Operand output, first, second;  // operations of one number have no second
    float number;                   // what a second that is no tensor points to
};

static inline Floats reciprocal_roots(Floats x) {
    Floats roots;
    for (int lane = 0; lane < LANES; lane++) roots[lane] = 1.0f / std::sqrt(x[lane]);
    return roots;
}

// Some numbers in a row, and after them whatever fills a vector up.
template <typename Number>
static inline Floats some_lanes(const Number* at, int64_t count) {
    Floats values = {};
    for (int64_t lane = 0; lane < count; lane++) values[lane] = widened(at[lane]);
    return values;
}

template <bool IS_REPEATED, typename Output, typename First, typename Second, typename Function>
static inline void run_row(Output* outputs, const First* first, const Second* second, int64_t count, Function function) {
    const Floats repeated = filled(widened(*second));
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES)
        put_lanes(function(widened_lanes(first + i), IS_REPEATED ? repeated : widened_lanes(second + i)), outputs + i);
    if (i == count) return;
    const Floats values =
        function(some_lanes(first + i, count - i), IS_REPEATED ? repeated : some_lanes(second + i, count - i));
    for (int64_t lane = 0; i + lane < count; lane++) put(values[lane], outputs + i + lane);
}

// Calls with where a row of each operand starts.
template <typename Row>
static inline void for_rows(const Pointwise& p, const Operand& second, Row row) {
    for (int64_t i = 0; i < p.sizes[0]; i++)
        for (int64_t j = 0; j < p.sizes[1]; j++)
            for (int64_t k = 0; k < p.sizes[2]; k++) {
                const auto start = [&](const Operand& o) { return i * o.strides[0] + j * o.strides[1] + k * o.strides[2]; };
                row(start(p.output), start(p.first), start(second));
            }
}

template <typename Output, typename First, typename Second, typename Function>
static void run_rows(const Pointwise& p, const Operand& second, Function function) {
    for_rows(p, second, [&](int64_t output, int64_t first, int64_t other) {
        Output* outputs = (Output*)p.output.at + output;
        const First* firsts = (const First*)p.first.at + first;
        const Second* seconds = (const Second*)second.at + other;
        if (second.strides[DIMENSIONS - 1])
            run_row<false>(outputs, firsts, seconds, p.sizes[DIMENSIONS - 1], function);
        else
            run_row<true>(outputs, firsts, seconds, p.sizes[DIMENSIONS - 1], function);
    });
}

// Calls with a number of the output's type and one of the first operand's.
template <typename Run>
static void with_types(const Pointwise& p, Run run) {
    const bool is_narrow = p.first.kind == BFLOAT16;
    if (p.output.kind == BFLOAT16)
        is_narrow ? run(uint16_t(), uint16_t()) : run(uint16_t(), float());
    else
        is_narrow ? run(float(), uint16_t()) : run(float(), float());
}

template <typename Output, typename First, typename Function>
static void run_unary(const Pointwise& p, Function function) {
    run_rows<Output, First, First>(p, p.first, [=](Floats first, Floats) { return function(first); });
}

template <typename Function>
static void unary(const Pointwise& p, Function function) {
    with_types(p, [&](auto output, auto first) { run_unary<decltype(output), decltype(first)>(p, function); });
}

template <typename Function>
static void binary(const Pointwise& p, Function function) {
    with_types(p, [&](auto output, auto first) {
        if (p.second.kind == BFLOAT16)
            run_rows<decltype(output), decltype(first), uint16_t>(p, p.second, function);
        else
            run_rows<decltype(output), decltype(first), float>(p, p.second, function);
    });
}

static void copy(const Pointwise& p) {
    if (p.first.kind == INT64) return run_unary<float, int64_t>(p, [](Floats x) { return x; });
    if (p.first.kind != p.output.kind) return unary(p, [](Floats x) { return x; });
    const int64_t size = p.output.kind == BFLOAT16 ? 2 : 4;
    for_rows(p, p.first, [&](int64_t output, int64_t first, int64_t) {
        std::memcpy((char*)p.output.at + output * size, (const char*)p.first.at + first * size,
                    p.sizes[DIMENSIONS - 1] * size);
    });
}

static void pointwise(const Pointwise& p) {
    switch (p.operation) {
        case COPY: return copy(p);
        case NEGATE: return unary(p, [](Floats x) { return -x; });
        case SQUARE: return unary(p, [](Floats x) { return x * x; });
        case RECIPROCAL_ROOT: return unary(p, [](Floats x) { return reciprocal_roots(x); });
        case SILU: return unary(p, [](Floats x) { return x / (1.0f + exponential(-x)); });
        case ADD: return binary(p, [](Floats x, Floats y) { return x + y; });
        case MULTIPLY: return binary(p, [](Floats x, Floats y) { return x * y; });
    }
}

// ------------------------------------------------------------------------------------------------------------ means

struct Mean {
    const float* input;  // [rows, width]
    float* output;       // [rows]
    int64_t rows, width;
};

// torch sums in vectors of eight on all processors of the x86 kind.
constexpr int SUMMED = 8;
constexpr int SIDES = 4;   // sums that are kept side by side
constexpr int LEVELS = 4;  // of sums of sums

typedef float Eight __attribute__((vector_size(4 * SUMMED)));
typedef float LooseEight __attribute__((vector_size(4 * SUMMED), aligned(4), may_alias));

// The sum of vectors in torch's order (its "cascade sum"): four sums side by side, each of which is handed up a level
// whenever it has taken in so many vectors, so that no sum is added to too often.
static inline Eight sum_of_vectors(const float* row, int64_t vectors) {
    const int64_t rounds = vectors / SIDES;
    int log = 0;
    while ((int64_t(1) << log) < rounds) log++;
    const int power = log / LEVELS > 4 ? log / LEVELS : 4;
    const int64_t step = int64_t(1) << power;
    Eight sums[LEVELS][SIDES] = {};
    const auto vector = [&](int64_t i) { return *(const LooseEight*)(row + i * SUMMED); };
    const auto take = [&](int64_t round) {
        for (int side = 0; side < SIDES; side++) sums[0][side] += vector(round * SIDES + side);
    };
    int64_t round = 0;
    while (round + step <= rounds) {
        for (int64_t i = 0; i < step; i++) take(round++);
        for (int level = 1; level < LEVELS; level++) {
            for (int side = 0; side < SIDES; side++) {
                sums[level][side] += sums[level - 1][side];
                sums[level - 1][side] = Eight{};
            }
            if (round & ((step - 1) << (level * power))) break;
        }
    }
    while (round < rounds) take(round++);
    for (int level = 1; level < LEVELS; level++)
        for (int side = 0; side < SIDES; side++) sums[0][side] += sums[level][side];
    for (int64_t i = rounds * SIDES; i < vectors; i++) sums[0][0] += vector(i);
    for (int side = 1; side < SIDES; side++) sums[0][0] += sums[0][side];
    return sums[0][0];
}

static void mean(const Mean& m) {
    for (int64_t i = 0; i < m.rows; i++) {
        const float* row = m.input + i * m.width;
        const int64_t vectors = m.width / SUMMED;
        const Eight sums = sum_of_vectors(row, vectors);
        float total = 0;
        for (int64_t j = vectors * SUMMED; j < m.width; j++) total += row[j];
        for (int lane = 0; lane < SUMMED; lane++) total += sums[lane];
        m.output[i] = total / float(m.width);
    }
}

// --------------------------------------------------------------------------------------------------------- look-ups

struct Gather {
    const char* table;  // [rows], each of so many bytes
    const int64_t* ids;
    char* output;
    int64_t count, rows, row_bytes;
};

// False, with nothing read, where an id is none of the table's.
static bool gather(const Gather& g) {
    for (int64_t i = 0; i < g.count; i++)
        if (uint64_t(g.ids[i]) >= uint64_t(g.rows)) return false;
    for (int64_t i = 0; i < g.count; i++)
        std::memcpy(g.output + i * g.row_bytes, g.table + g.ids[i] * g.row_bytes, g.row_bytes);
    return true;
}
