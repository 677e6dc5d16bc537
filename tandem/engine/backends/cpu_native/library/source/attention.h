// Attention of a few queries per sequence to keys and values that lie in the arena.

#pragma once

#include <cmath>
#include <type_traits>
#include <vector>

#include "vectors.h"

struct Attention {
    const void *query, *key, *value;
    int64_t query_head, query_token;  // strides, in elements
    int64_t key_head, key_token;
    int64_t value_head, value_token;
    void *keys, *values;  // the layer's arena: [kv_heads, total_tokens, dim]
    int64_t total_tokens, kv_heads, heads, key_dim, value_dim;
    // How many there are, and then for each: where the sequence lies, tokens it had, tokens of this step. In a step of
    // branches the number is negative, and then for each: where the sequence lies, tokens it has with all earlier steps
    // of its branches, branches of this step, tokens of the trunk, branches of the first step, and for each branch how
    // many tokens of the trunk it sees.
    const int64_t* segments;
    int64_t window;      // positions that a token sees, its own included; 0 for all
    const float* sinks;  // [heads], or none
    float scale, softcap;  // softcap 0 for none
    void* output;  // [step_tokens, heads, value_dim]
    int64_t kind, threads;
};

struct Scratch {
    std::vector<float> queries, scores, block;
    std::vector<uint8_t> seen;
};

template <typename Number>
static void store(const Attention& a, int64_t head, int64_t token, int64_t place, int64_t count) {
    Number* keys = (Number*)a.keys + (head * a.total_tokens + place) * a.key_dim;
    Number* values = (Number*)a.values + (head * a.total_tokens + place) * a.value_dim;
    const Number* key = (const Number*)a.key + head * a.key_head + token * a.key_token;
    const Number* value = (const Number*)a.value + head * a.value_head + token * a.value_token;
    for (int64_t i = 0; i < count; i++) {
        std::memcpy(keys + i * a.key_dim, key + i * a.key_token, a.key_dim * sizeof(Number));
        std::memcpy(values + i * a.value_dim, value + i * a.value_token, a.value_dim * sizeof(Number));
    }
}

// Scores of ROWS queries with LANES keys, which lie transposed in `block`.
template <int ROWS>
static inline void score_rows(const float* queries, int64_t dim, const float* block, float* scores, int64_t pitch) {
    Floats sums[ROWS] = {};
    for (int64_t d = 0; d < dim; d++) {
        Floats keys = *(const LooseFloats*)(block + d * LANES);
        for (int row = 0; row < ROWS; row++) sums[row] += filled(queries[row * dim + d]) * keys;
    }
    for (int row = 0; row < ROWS; row++) *(LooseFloats*)(scores + row * pitch) = sums[row];
}

// LANES rows of LANES words each, turned: word i of row j becomes word j of row i. Each stage swaps blocks twice as large.
static inline void turned(Words (&rows)[LANES]) {
#pragma GCC unroll 4
    for (int size = 1; size < LANES; size *= 2) {
        Words low, high;
        for (int lane = 0; lane < LANES; lane++) {
            const bool is_upper = lane & size;
            low[lane] = is_upper ? LANES + lane - size : lane;
            high[lane] = is_upper ? LANES + lane : lane + size;
        }
#pragma GCC unroll 16
        for (int row = 0; row < LANES; row++) {
            if (row & size) continue;
            const Words first = rows[row], second = rows[row + size];
            rows[row] = __builtin_shuffle(first, second, low);
            rows[row + size] = __builtin_shuffle(first, second, high);
        }
    }
}

// LANES keys, a dimension after the other: block[d * LANES + j] is dimension d of key j. Keys past `count` are zero.
static inline void turn_keys(const float* keys, int64_t count, int64_t dim, float* block) {
    int64_t d = 0;
    for (; d + LANES <= dim; d += LANES) {
        Words rows[LANES] = {};
        for (int64_t j = 0; j < count; j++) rows[j] = *(const LooseWords*)(keys + j * dim + d);
        turned(rows);
        std::memcpy(block + d * LANES, rows, sizeof rows);
    }
    for (; d < dim; d++)
        for (int64_t j = 0; j < LANES; j++) block[d * LANES + j] = j < count ? keys[j * dim + d] : 0.0f;
}

// Two dimensions of bfloat16 are a word, and travel together.
static inline void turn_keys(const uint16_t* keys, int64_t count, int64_t dim, float* block) {
    int64_t d = 0;
    for (; d + 2 * LANES <= dim; d += 2 * LANES) {
        Words rows[LANES] = {};
        for (int64_t j = 0; j < count; j++) rows[j] = *(const LooseWords*)(keys + j * dim + d);
        turned(rows);
        for (int i = 0; i < LANES; i++) {
            *(LooseWords*)(block + (d + 2 * i) * LANES) = rows[i] << 16;
            *(LooseWords*)(block + (d + 2 * i + 1) * LANES) = rows[i] & 0xffff0000u;
        }
    }
    for (; d < dim; d++)
        for (int64_t j = 0; j < LANES; j++) block[d * LANES + j] = j < count ? widened(keys[j * dim + d]) : 0.0f;
}

// Calls `step` with a compile-time number of rows: 8, 5, 2 or 1, as many as are left. Eight independent sums hide the four
// cycles of latency of each; 5 rows are a proposal of four and its next token.
template <typename Step>
static inline int64_t at_once(int64_t left, Step step) {
    if (left >= 8) return step(std::integral_constant<int, 8>()), 8;
    if (left >= 5) return step(std::integral_constant<int, 5>()), 5;
    if (left >= 2) return step(std::integral_constant<int, 2>()), 2;
    return step(std::integral_constant<int, 1>()), 1;
}

template <typename Number>
static void score(const Attention& a, const Number* keys, int64_t length, int64_t rows, int64_t pitch, Scratch& s) {
    for (int64_t first = 0; first < length; first += LANES) {
        const int64_t count = length - first < LANES ? length - first : LANES;
        float* block = s.block.data();
        turn_keys(keys + first * a.key_dim, count, a.key_dim, block);
        int64_t row = 0;
        const float* queries = s.queries.data();
        float* scores = s.scores.data() + first;
        while (row < rows)
            row += at_once(rows - row, [&](auto count) {
                score_rows<count()>(queries + row * a.key_dim, a.key_dim, block, scores + row * pitch, pitch);
            });
    }
}

// Marks the keys up to `length` that a branch attends to: the trunk up to where it leaves it, and its own tokens.
static void see(const Attention& a, const int64_t* step, int64_t branch, int64_t length, int64_t pitch, Scratch& s) {
    const int64_t trunk = step[3], width = step[4], left = step[5 + branch];
    s.seen.assign(pitch, 0);
    const int64_t position = left + (step[1] - trunk) / width;  // of the branch's token
    const int64_t first = a.window && position + 1 > a.window ? position + 1 - a.window : 0;
    for (int64_t j = first; j < left; j++) s.seen[j] = 1;
    for (int64_t j = trunk + branch, own = left; j < length; j += width, own++) s.seen[j] = own >= first;
}

// Turns the scores from `first` up to `last`, or those of them that are `seen`, into weights that sum to one, and all others
// into zero.
static void softmax(const Attention& a, float* scores, int64_t first, int64_t last, int64_t length, const float* sink,
                    const uint8_t* seen = nullptr) {
    if (a.softcap > 0)
        for (int64_t j = first; j < last; j++) scores[j] = std::tanh(scores[j] / a.softcap) * a.softcap;
    for (int64_t j = 0; j < first; j++) scores[j] = -INFINITY;
    for (int64_t j = last; j < length; j++) scores[j] = -INFINITY;
    if (seen)
        for (int64_t j = first; j < last; j++)
            if (!seen[j]) scores[j] = -INFINITY;
    Floats maxima = filled(sink ? *sink : -INFINITY);
    for (int64_t j = 0; j < length; j += LANES) {
        Floats x = *(const LooseFloats*)(scores + j);
        maxima = x > maxima ? x : maxima;
    }
    float maximum = maxima[0];
    for (int i = 1; i < LANES; i++) maximum = maxima[i] > maximum ? maxima[i] : maximum;
    Floats totals = {};
    for (int64_t j = 0; j < length; j += LANES) {  // the row is padded to whole vectors
        Floats x = *(const LooseFloats*)(scores + j) - maximum;
        Floats weights = exponential(x);
        *(LooseFloats*)(scores + j) = weights;
        totals += weights;
    }
    float total = sink ? std::exp(*sink - maximum) : 0.0f;
    for (int i = 0; i < LANES; i++) total += totals[i];
    const float factor = 1.0f / total;
    for (int64_t j = 0; j < length; j += LANES) *(LooseFloats*)(scores + j) *= factor;
}

// The weighted values of ROWS queries, [ROWS, value_dim].
template <int ROWS, typename Number>
static inline void mix_rows(const float* weights, int64_t pitch, const Number* values, int64_t length, int64_t dim,
                            Number* const* outputs) {
    int64_t d = 0;
    for (; d + LANES <= dim; d += LANES) {
        Floats sums[ROWS] = {};
        for (int64_t j = 0; j < length; j++) {
            Floats value = widened_lanes(values + j * dim + d);
            for (int row = 0; row < ROWS; row++) sums[row] += filled(weights[row * pitch + j]) * value;
        }
        for (int row = 0; row < ROWS; row++) put_lanes(sums[row], outputs[row] + d);
    }
    for (; d < dim; d++)
        for (int row = 0; row < ROWS; row++) {
            float sum = 0;
            for (int64_t j = 0; j < length; j++) sum += weights[row * pitch + j] * widened(values[j * dim + d]);
            put(sum, outputs[row] + d);
        }
}

// One sequence's queries to the keys of one head.
template <typename Number>
static void attend(const Attention& a, int64_t head, int64_t token, const int64_t* segment, Scratch& s,
                   bool branches) {
    const int64_t extent = segment[0], start = segment[1], count = segment[2];
    const int64_t repeats = a.heads / a.kv_heads, rows = repeats * count;
    const int64_t begin = a.window && !branches && start + 1 > a.window ? start + 1 - a.window : 0;
    const int64_t length = start + count - begin;
    const int64_t pitch = (length + LANES - 1) / LANES * LANES;
    s.queries.resize(rows * a.key_dim);
    s.scores.resize(rows * pitch);
    s.block.resize(a.key_dim * LANES);
    store<Number>(a, head, token, extent + start, count);
    for (int64_t row = 0; row < rows; row++) {
        const int64_t own_head = head * repeats + row / count, own_token = token + row % count;
        const Number* query = (const Number*)a.query + own_head * a.query_head + own_token * a.query_token;
        for (int64_t d = 0; d < a.key_dim; d++) s.queries[row * a.key_dim + d] = widened(query[d]) * a.scale;
    }
    const int64_t first_key = head * a.total_tokens + extent + begin;
    score<Number>(a, (const Number*)a.keys + first_key * a.key_dim, length, rows, pitch, s);
    for (int64_t row = 0; row < rows; row++) {
        const float* sink = a.sinks ? a.sinks + head * repeats + row / count : nullptr;
        for (int64_t j = length; j < pitch; j++) s.scores[row * pitch + j] = -INFINITY;
        if (branches) {
            see(a, segment, row % count, length, pitch, s);
            softmax(a, s.scores.data() + row * pitch, 0, length, pitch, sink, s.seen.data());
            continue;
        }
        const int64_t last = start + row % count + 1 - begin;
        const int64_t first = a.window && last > a.window ? last - a.window : 0;
        softmax(a, s.scores.data() + row * pitch, first, last, pitch, sink);
    }
    const Number* values = (const Number*)a.values + first_key * a.value_dim;
    Number* outputs[8];
    int64_t row = 0;
    while (row < rows)
        row += at_once(rows - row, [&](auto taken) {
            for (int64_t i = 0; i < taken(); i++) {
                const int64_t own_head = head * repeats + (row + i) / count, own_token = token + (row + i) % count;
                outputs[i] = (Number*)a.output + (own_token * a.heads + own_head) * a.value_dim;
            }
            mix_rows<taken()>(s.scores.data() + row * pitch, pitch, values, length, a.value_dim, outputs);
        });
}

template <typename Number>
static void attend_with(const Attention& a) {
    const bool branches = a.segments[0] < 0;
    const int64_t count = branches ? -a.segments[0] : a.segments[0];
    struct Part {
        const int64_t* segment;
        int64_t first_token;
    };
    static thread_local std::vector<Part> kept;
    kept.resize(count);
    const int64_t* segment = a.segments + 1;
    int64_t token = 0, pairs = 0;  // of queries with keys that they may see
    for (int64_t i = 0; i < count; i++) {
        kept[i] = {segment, token};
        token += segment[2];
        pairs += segment[2] * (segment[1] + segment[2]);
        segment += branches ? 5 + segment[2] : 3;
    }
    const Part* parts = kept.data();  // each thread has a `kept` of its own
    const int64_t tasks = count * a.kv_heads;
    const int64_t products = pairs * a.heads * (a.key_dim + a.value_dim);
    const int64_t threads = products < WORTH_WAKING ? 1 : a.threads;
#pragma omp parallel for num_threads(threads) schedule(dynamic) if (threads > 1)
    for (int64_t task = 0; task < tasks; task++) {
        static thread_local Scratch scratch;
        const Part& part = parts[task / a.kv_heads];
        attend<Number>(a, task % a.kv_heads, part.first_token, part.segment, scratch, branches);
    }
}

// Stores this step's keys and values and attends.
static void attend_all(const Attention& a) {
    if (a.kind == BFLOAT16)
        attend_with<uint16_t>(a);
    else
        attend_with<float>(a);
}
