// Attention of a few queries per sequence to keys and values that lie in pages of the arena.

#pragma once

#include <cmath>
#include <type_traits>
#include <vector>

#include "transpose.h"
#include "vectors.h"

struct Attention {
    const void *query, *key, *value;
    int64_t query_head, query_token;  // strides, in elements
    int64_t key_head, key_token;
    int64_t value_head, value_token;
    void *keys, *values;  // the layer's arena: [pages, kv_heads, page_tokens, dim]
    int64_t page_tokens, kv_heads, heads, key_dim, value_dim;  // page_tokens is a multiple of LANES
    // How many there are, and then for each: the address of the sequence's page table (int64 page numbers), tokens it
    // had, tokens of this step. In a step of branches the number is negative, and then for each: the address of the page
    // table, tokens the sequence has with all earlier steps of its branches, branches of this step, tokens of the trunk,
    // branches of the first step, and for each branch how many tokens of the trunk it sees.
    const int64_t* segments;
    int64_t window;      // positions that a token sees, its own included; 0 for all
    const float* sinks;  // [heads], or none
    float scale, softcap;  // softcap 0 for none
    void* output;  // [step_tokens, heads, value_dim]
    int64_t kind, threads;
};

// Consecutive positions of a sequence that lie in one page: rows of one head's matrix there.
struct Run {
    int64_t row;  // of the first position, counted from the beginning of the arena
    int64_t count;
};

// Bytes of keys and values in a step from which they are fetched ahead. The processor itself fetches what follows in memory,
// but not the next page; of fewer bytes most are in its caches, and fetching takes longer than it saves.
constexpr int64_t WORTH_FETCHING = 1 << 20;

struct Scratch {
    std::vector<float> queries, scores, block;
    std::vector<uint8_t> seen;
    std::vector<Run> runs;
};

// The first of the rows that a head has in a page.
static inline int64_t first_row(const Attention& a, int64_t page, int64_t head) {
    return (page * a.kv_heads + head) * a.page_tokens;
}

// Finds where the positions from `begin` up to `end` of a sequence lie. Looked up once for all queries of a head, so that
// the loops over keys and values see no page table.
static inline void find_runs(const Attention& a, const int64_t* table, int64_t head, int64_t begin, int64_t end,
                             std::vector<Run>& runs) {
    runs.clear();
    const int64_t* page = table + begin / a.page_tokens;
    for (int64_t offset = begin % a.page_tokens; begin < end; offset = 0) {
        const int64_t room = a.page_tokens - offset, count = end - begin < room ? end - begin : room;
        runs.push_back({first_row(a, *page++, head) + offset, count});
        begin += count;
    }
}

// Stores this step's keys and values of one head at the positions from `start` on.
template <typename Number>
static void store(const Attention& a, const int64_t* table, int64_t head, int64_t token, int64_t start, int64_t count) {
    const Number* key = (const Number*)a.key + head * a.key_head + token * a.key_token;
    const Number* value = (const Number*)a.value + head * a.value_head + token * a.value_token;
    for (int64_t i = 0; i < count; i++) {
        const int64_t position = start + i;
        const int64_t row = first_row(a, table[position / a.page_tokens], head) + position % a.page_tokens;
        std::memcpy((Number*)a.keys + row * a.key_dim, key + i * a.key_token, a.key_dim * sizeof(Number));
        std::memcpy((Number*)a.values + row * a.value_dim, value + i * a.value_token, a.value_dim * sizeof(Number));
    }
}

// Scores of ROWS queries with LANES keys, which lie transposed in `block`.
template <int ROWS>
static inline void score_rows(const float* queries, int64_t dim, const float* block, float* scores, int64_t pitch) {
    Floats sums[ROWS] = {};
    for (int64_t d = 0; d < dim; d++) {
        Floats keys = *(const LooseFloats*)(block + d * LANES);
        for (int row = 0; row < ROWS; row++) sums[row] = fused(filled(queries[row * dim + d]), keys, sums[row]);
    }
    for (int row = 0; row < ROWS; row++) *(LooseFloats*)(scores + row * pitch) = sums[row];
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

// Has the processor load `count` numbers into its second cache.
template <typename Number>
static inline void fetch(const Number* numbers, int64_t count) {
    for (int64_t i = 0; i < count; i += 64 / sizeof(Number)) __builtin_prefetch(numbers + i, 0, 2);
}

// Scores of all queries with the keys of the runs. All runs but the last end with their page, and all but the first begin
// with it, so only the last block of all can have fewer than LANES keys.
template <typename Number>
static void score(const Attention& a, int64_t rows, int64_t pitch, bool fetches, Scratch& s) {
    float *block = s.block.data(), *scores = s.scores.data();
    const float* queries = s.queries.data();
    const Run* const end = s.runs.data() + s.runs.size();
    for (const Run* run = s.runs.data(); run < end; run++) {
        const Number* keys = (const Number*)a.keys + run->row * a.key_dim;
        for (int64_t first = 0; first < run->count; first += LANES, scores += LANES) {
            const int64_t count = run->count - first < LANES ? run->count - first : LANES;
            if (fetches) {
                fetch((const Number*)a.values + (run->row + first) * a.value_dim, LANES * a.value_dim);
                if (run + 1 < end) fetch((const Number*)a.keys + (run[1].row + first) * a.key_dim, LANES * a.key_dim);
            }
            turn_keys(keys + first * a.key_dim, count, a.key_dim, block);
            int64_t row = 0;
            while (row < rows)
                row += at_once(rows - row, [&](auto count) {
                    score_rows<count()>(queries + row * a.key_dim, a.key_dim, block, scores + row * pitch, pitch);
                });
        }
    }
}

// The first position that the token at `position` sees.
static inline int64_t first_seen(const Attention& a, int64_t position) {
    return a.window && position + 1 > a.window ? position + 1 - a.window : 0;
}

// Position of the token of a branch that leaves the trunk after `left` tokens.
static inline int64_t position_of(const int64_t* step, int64_t left) { return left + (step[1] - step[3]) / step[4]; }

// The first of a sequence's keys that any token of a segment, or any branch, sees. Tokens of branches lie behind the trunk,
// whatever their positions.
static int64_t first_key(const Attention& a, const int64_t* segment, bool branches) {
    if (!branches) return first_seen(a, segment[1]);
    int64_t left = segment[5];
    for (int64_t i = 1; i < segment[2]; i++) left = segment[5 + i] < left ? segment[5 + i] : left;
    const int64_t first = first_seen(a, position_of(segment, left)), trunk = segment[3];
    return first < trunk ? first : trunk;
}

// Marks the keys from `begin` up to `end` that a branch attends to: the trunk up to where it leaves it, and its own tokens.
static void see(const Attention& a, const int64_t* step, int64_t branch, int64_t begin, int64_t end, int64_t pitch,
                Scratch& s) {
    const int64_t trunk = step[3], width = step[4], left = step[5 + branch];
    s.seen.assign(pitch, 0);
    const int64_t first = first_seen(a, position_of(step, left));
    for (int64_t j = first; j < left; j++) s.seen[j - begin] = 1;
    for (int64_t j = trunk + branch, own = left; j < end; j += width, own++) s.seen[j - begin] = own >= first;
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

// The weighted values of ROWS queries in BLOCKS * LANES dimensions from `d` on. Each sum goes through all runs before the
// next begins, so that it stays in a register.
template <int ROWS, int BLOCKS, typename Number>
static inline void mix_lanes(const float* weights, int64_t pitch, const Number* values, const std::vector<Run>& runs,
                             int64_t dim, int64_t d, Number* const* outputs) {
    Floats sums[ROWS][BLOCKS] = {};
    for (const Run& run : runs) {
        const Number* at = values + run.row * dim + d;
        for (int64_t j = 0; j < run.count; j++, at += dim)
            for (int block = 0; block < BLOCKS; block++) {
                const Floats value = widened_lanes(at + block * LANES);
                for (int row = 0; row < ROWS; row++)
                    sums[row][block] = fused(filled(weights[row * pitch + j]), value, sums[row][block]);
            }
        weights += run.count;
    }
    for (int row = 0; row < ROWS; row++)
        for (int block = 0; block < BLOCKS; block++) put_lanes(sums[row][block], outputs[row] + d + block * LANES);
}

// The weighted values of ROWS queries, [ROWS, value_dim]. Few rows take two vectors at a time, so that there are enough
// independent sums; all sums of more rows would not fit in AVX2's registers. Not inlined, since its loops need them all.
template <int ROWS, typename Number>
static __attribute__((noinline)) void mix_rows(const float* weights, int64_t pitch, const Number* values,
                                               const std::vector<Run>& runs, int64_t dim, Number* const* outputs) {
    constexpr int BLOCKS = ROWS < 8 ? 2 : 1;
    int64_t d = 0;
    for (; d + BLOCKS * LANES <= dim; d += BLOCKS * LANES)
        mix_lanes<ROWS, BLOCKS>(weights, pitch, values, runs, dim, d, outputs);
    for (; d + LANES <= dim; d += LANES) mix_lanes<ROWS, 1>(weights, pitch, values, runs, dim, d, outputs);
    for (; d < dim; d++)
        for (int row = 0; row < ROWS; row++) {
            float sum = 0;
            const float* weight = weights + row * pitch;
            for (const Run& run : runs) {
                const Number* at = values + run.row * dim + d;
                for (int64_t j = 0; j < run.count; j++) sum = std::fma(weight[j], widened(at[j * dim]), sum);
                weight += run.count;
            }
            put(sum, outputs[row] + d);
        }
}

// One sequence's queries to the keys of one head.
template <typename Number>
static void attend(const Attention& a, int64_t head, int64_t token, const int64_t* segment, Scratch& s,
                   bool branches, bool fetches) {
    const int64_t *table = (const int64_t*)segment[0], start = segment[1], count = segment[2];
    const int64_t repeats = a.heads / a.kv_heads, rows = repeats * count;
    // Down to a whole block, so that none crosses a page. What is before the window is the sequence's own, and hidden;
    // pages from before may be others'.
    const int64_t begin = first_key(a, segment, branches) / LANES * LANES;
    const int64_t length = start + count - begin;
    const int64_t pitch = (length + LANES - 1) / LANES * LANES;
    s.queries.resize(rows * a.key_dim);
    s.scores.resize(rows * pitch);
    s.block.resize(a.key_dim * LANES);
    store<Number>(a, table, head, token, start, count);
    find_runs(a, table, head, begin, start + count, s.runs);
    for (int64_t row = 0; row < rows; row++) {
        const int64_t own_head = head * repeats + row / count, own_token = token + row % count;
        const Number* query = (const Number*)a.query + own_head * a.query_head + own_token * a.query_token;
        for (int64_t d = 0; d < a.key_dim; d++) s.queries[row * a.key_dim + d] = widened(query[d]) * a.scale;
    }
    score<Number>(a, rows, pitch, fetches, s);
    for (int64_t row = 0; row < rows; row++) {
        const float* sink = a.sinks ? a.sinks + head * repeats + row / count : nullptr;
        for (int64_t j = length; j < pitch; j++) s.scores[row * pitch + j] = -INFINITY;
        if (branches) {
            see(a, segment, row % count, begin, start + count, pitch, s);
            softmax(a, s.scores.data() + row * pitch, 0, length, pitch, sink, s.seen.data());
            continue;
        }
        const int64_t last = start + row % count + 1 - begin;
        const int64_t first = a.window && last > a.window ? last - a.window : 0;
        softmax(a, s.scores.data() + row * pitch, first, last, pitch, sink);
    }
    const Number* values = (const Number*)a.values;
    Number* outputs[8];
    int64_t row = 0;
    while (row < rows)
        row += at_once(rows - row, [&](auto taken) {
            for (int64_t i = 0; i < taken(); i++) {
                const int64_t own_head = head * repeats + (row + i) / count, own_token = token + (row + i) % count;
                outputs[i] = (Number*)a.output + (own_token * a.heads + own_head) * a.value_dim;
            }
            mix_rows<taken()>(s.scores.data() + row * pitch, pitch, values, s.runs, a.value_dim, outputs);
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
    int64_t token = 0, keys = 0, pairs = 0;  // of queries with keys that they may see
    for (int64_t i = 0; i < count; i++) {
        kept[i] = {segment, token};
        token += segment[2];
        keys += segment[1] + segment[2];
        pairs += segment[2] * (segment[1] + segment[2]);
        segment += branches ? 5 + segment[2] : 3;
    }
    const Part* parts = kept.data();  // each thread has a `kept` of its own
    const int64_t tasks = count * a.kv_heads;
    const int64_t products = pairs * a.heads * (a.key_dim + a.value_dim);
    const bool fetches = keys * a.kv_heads * (a.key_dim + a.value_dim) * int64_t(sizeof(Number)) > WORTH_FETCHING;
    const int64_t threads = products < WORTH_WAKING ? 1 : a.threads;
#pragma omp parallel for num_threads(threads) schedule(dynamic) if (threads > 1)
    for (int64_t task = 0; task < tasks; task++) {
        static thread_local Scratch scratch;
        const Part& part = parts[task / a.kv_heads];
        attend<Number>(a, task % a.kv_heads, part.first_token, part.segment, scratch, branches, fetches);
    }
}

// Stores this step's keys and values and attends.
static void attend_all(const Attention& a) {
    if (a.kind == BFLOAT16)
        attend_with<uint16_t>(a);
    else
        attend_with<float>(a);
}
