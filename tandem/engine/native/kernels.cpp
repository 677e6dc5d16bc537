// The few loops that decide how fast a model decodes on a CPU: products of a few rows with a weight matrix, and
// attention of a few queries per sequence to keys and values that lie in the arena.
//
// Compiled on the machine that runs it, with -march=native; see `build.py`. Nothing of torch is needed: tensors come as
// addresses. Vectors are the compiler's own (GCC and Clang), so that the same text serves AVX-512, AVX2 and NEON.
// Arithmetic is in float whatever the storage; a bfloat16 is the upper half of a float, so reading one is a shift.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>
#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int LANES = 16;
constexpr int MAX_ROWS = 12;  // 2 * 12 accumulators of the 32 registers
#else
constexpr int LANES = 8;
constexpr int MAX_ROWS = 4;  // 2 * 4 of the 16
#endif
constexpr int BLOCK = 2 * LANES;  // outputs that are computed side by side

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef float LooseFloats __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t LooseWords __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

enum Kind : int64_t { FLOAT32 = 0, BFLOAT16 = 1 };

static inline float widened(uint16_t bits) {
    uint32_t word = uint32_t(bits) << 16;
    float value;
    std::memcpy(&value, &word, 4);
    return value;
}

static inline float widened(float value) { return value; }

// To the nearest, ties to even, as torch rounds.
static inline uint16_t narrowed(float value) {
    uint32_t word;
    std::memcpy(&word, &value, 4);
    if (value != value) return 0x7fc0;
    return uint16_t((word + 0x7fff + ((word >> 16) & 1)) >> 16);
}

static inline void put(float value, float* at) { *at = value; }
static inline void put(float value, uint16_t* at) { *at = narrowed(value); }

static inline void put_lanes(Floats values, float* at) { *(LooseFloats*)at = values; }

static inline void put_lanes(Floats values, uint16_t* at) {
    typedef uint16_t Halves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
    const Words words = (Words)values;
    const Words rounded = (words + 0x7fff + ((words >> 16) & 1)) >> 16;
    *(Halves*)at = __builtin_convertvector(values == values ? rounded : rounded * 0 + 0x7fc0, Halves);
}

// A difference and no sum: -0.0 + 0.0 is not -0.0, so a sum would have to be computed.
static inline Floats filled(float value) { return value - Floats{}; }

// ---------------------------------------------------------------------------------------------------- linear layers

// Products that are worth a second thread: waking one that sleeps takes as long as some hundred thousand of them.
constexpr int64_t WORTH_WAKING = 1000000;

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
            for (int half = 0; half < 2; half++) sums[row][half] += input * first[half];
            for (int half = 0; half < 2; half++) sums[row][half] += next * second[half];
        }
    }
    if (k == width) return;
    load_last(weights + k * BLOCK, first);
    for (int row = 0; row < ROWS; row++)
        for (int half = 0; half < 2; half++) sums[row][half] += filled(inputs[row * width + k]) * first[half];
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

template <int ROWS, typename Input, typename Weight, typename Output>
static void linear_block(const Input* inputs, int64_t width, const Weight* weights, const float* bias, Output* outputs,
                         int64_t output_width, int64_t valid) {
    Floats sums[ROWS][2] = {};
    multiply_rows<ROWS>(inputs, width, weights, sums);
    if (valid == BLOCK) {
        for (int half = 0; half < 2; half++) {
            const Floats shift = bias ? *(const LooseFloats*)(bias + half * LANES) : Floats{};
            for (int row = 0; row < ROWS; row++)
                put_lanes(bias ? sums[row][half] + shift : sums[row][half], outputs + row * output_width + half * LANES);
        }
        return;
    }
    for (int row = 0; row < ROWS; row++) {
        float values[BLOCK];
        std::memcpy(values, sums[row], sizeof values);
        if (bias)
            for (int i = 0; i < valid; i++) values[i] += bias[i];
        for (int i = 0; i < valid; i++) put(values[i], outputs + row * output_width + i);
    }
}

template <int ROWS, typename Input, typename Weight, typename Output>
static void linear_rows(int64_t rows, const Input* inputs, int64_t width, const Weight* weights, const float* bias,
                        Output* outputs, int64_t output_width, int64_t valid) {
    if constexpr (ROWS > 0) {
        if (rows != ROWS)
            return linear_rows<ROWS - 1>(rows, inputs, width, weights, bias, outputs, output_width, valid);
        linear_block<ROWS>(inputs, width, weights, bias, outputs, output_width, valid);
    }
}

template <typename Input, typename Weight, typename Output>
static void linear(const Input* inputs, int64_t rows, int64_t width, const Weight* weights, const float* bias,
                   Output* outputs, int64_t output_width, int64_t threads) {
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
                                  bias ? bias + first : nullptr, outputs + start * output_width + first, output_width,
                                  valid);
        }
    }
}

static const float* as_floats(const void* values, Kind kind, int64_t count) {
    if (kind == FLOAT32) return (const float*)values;
    static thread_local std::vector<float> buffer;
    if (int64_t(buffer.size()) < count) buffer.resize(count);
    const uint16_t* narrow = (const uint16_t*)values;
    float* wide = buffer.data();
    for (int64_t i = 0; i < count; i++) wide[i] = widened(narrow[i]);
    return wide;
}

// -------------------------------------------------------------------------------------------------------- attention

struct Attention {
    const void *query, *key, *value;
    int64_t query_head, query_token;  // strides, in elements
    int64_t key_head, key_token;
    int64_t value_head, value_token;
    void *keys, *values;  // the layer's arena: [kv_heads, total_tokens, dim]
    int64_t total_tokens, kv_heads, heads, key_dim, value_dim;
    // How many there are, and then for each: where the sequence lies, tokens it had, tokens of this step.
    const int64_t* segments;
    int64_t window;      // positions that a token sees, its own included; 0 for all
    const float* sinks;  // [heads], or none
    float scale, softcap;  // softcap 0 for none
    void* output;  // [step_tokens, heads, value_dim]
    int64_t kind, threads;
};

struct Scratch {
    std::vector<float> queries, scores, block;
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

// Calls with a number that the compiler knows: 8, 5, 2 or 1, the most that are left. Eight sums of their own keep a
// processor busy that takes four cycles for each; 5 are a proposal of four and its next token.
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

// e to the x, for x at most 0, to the last bits of a float: 2 to the whole part by its exponent, the rest by a
// polynomial (Cephes' expf).
static inline Floats exponential(Floats x) {
    x = x > -87.0f ? x : filled(-87.0f);
    Floats rounder = filled(12582912.0f);  // 1.5 * 2**23: what is added to it is rounded to a whole number
    Floats shifted = x * 1.44269504088896341f + rounder;
    Floats whole = shifted - rounder;
    Floats rest = x - whole * 0.693359375f + whole * 2.12194440e-4f;
    Floats y = filled(1.9875691500e-4f);
    y = y * rest + 1.3981999507e-3f;
    y = y * rest + 8.3334519073e-3f;
    y = y * rest + 4.1665795894e-2f;
    y = y * rest + 1.6666665459e-1f;
    y = y * rest + 5.0000001201e-1f;
    y = y * rest * rest + rest + 1.0f;
    return (Floats)((Words)y + ((Words)shifted << 23));
}

// The scores from `first` up to `last` become weights that sum to one; all others become zero.
static void softmax(const Attention& a, float* scores, int64_t first, int64_t last, int64_t length, const float* sink) {
    if (a.softcap > 0)
        for (int64_t j = first; j < last; j++) scores[j] = std::tanh(scores[j] / a.softcap) * a.softcap;
    for (int64_t j = 0; j < first; j++) scores[j] = -INFINITY;
    for (int64_t j = last; j < length; j++) scores[j] = -INFINITY;
    Floats most = filled(sink ? *sink : -INFINITY);
    for (int64_t j = 0; j < length; j += LANES) {
        Floats x = *(const LooseFloats*)(scores + j);
        most = x > most ? x : most;
    }
    float highest = most[0];
    for (int i = 1; i < LANES; i++) highest = most[i] > highest ? most[i] : highest;
    Floats totals = {};
    for (int64_t j = 0; j < length; j += LANES) {  // the row is padded to whole vectors
        Floats x = *(const LooseFloats*)(scores + j) - highest;
        Floats weights = x > -87.0f ? exponential(x) : Floats{};
        *(LooseFloats*)(scores + j) = weights;
        totals += weights;
    }
    float total = sink ? std::exp(*sink - highest) : 0.0f;
    for (int i = 0; i < LANES; i++) total += totals[i];
    const float factor = 1.0f / total;
    for (int64_t j = 0; j < length; j += LANES) *(LooseFloats*)(scores + j) *= factor;
}

static inline Floats widened_lanes(const float* at) { return *(const LooseFloats*)at; }

static inline Floats widened_lanes(const uint16_t* at) {
    typedef uint16_t Halves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
    return (Floats)(__builtin_convertvector(*(const Halves*)at, Words) << 16);
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
static void attend(const Attention& a, int64_t head, int64_t token, const int64_t* segment, Scratch& s) {
    const int64_t extent = segment[0], start = segment[1], count = segment[2];
    const int64_t repeats = a.heads / a.kv_heads, rows = repeats * count;
    const int64_t begin = a.window && start + 1 > a.window ? start + 1 - a.window : 0;
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
        const int64_t last = start + row % count + 1 - begin;
        const int64_t first = a.window && last > a.window ? last - a.window : 0;
        const float* sink = a.sinks ? a.sinks + head * repeats + row / count : nullptr;
        for (int64_t j = length; j < pitch; j++) s.scores[row * pitch + j] = -INFINITY;
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

// Of all queries with the keys and values that they may see.
static int64_t products(const Attention& a, const int64_t* segments, int64_t count) {
    int64_t pairs = 0;
    for (int64_t i = 0; i < count; i++) pairs += segments[3 * i + 2] * (segments[3 * i + 1] + segments[3 * i + 2]);
    return pairs * a.heads * (a.key_dim + a.value_dim);
}

template <typename Number>
static void attend_all(const Attention& a) {
    const int64_t count = a.segments[0];
    const int64_t* segments = a.segments + 1;
    static thread_local std::vector<int64_t> firsts;
    firsts.resize(count);
    int64_t token = 0;
    for (int64_t i = 0; i < count; i++) {
        firsts[i] = token;
        token += segments[3 * i + 2];
    }
    const int64_t* first_tokens = firsts.data();  // each thread has a `firsts` of its own
    const int64_t tasks = count * a.kv_heads;
    const int64_t threads = products(a, segments, count) < WORTH_WAKING ? 1 : a.threads;
#pragma omp parallel for num_threads(threads) schedule(dynamic) if (threads > 1)
    for (int64_t task = 0; task < tasks; task++) {
        static thread_local Scratch scratch;
        const int64_t index = task / a.kv_heads;
        attend<Number>(a, task % a.kv_heads, first_tokens[index], segments + 3 * index, scratch);
    }
}

// --------------------------------------------------------------------------------------------------------- sampling

constexpr int HALF = LANES / 2;
constexpr int64_t PRODUCTS_PER_PROBABILITY = 4;  // what an exponential or a draw takes, in products of a linear layer

typedef double Doubles __attribute__((vector_size(8 * HALF)));
typedef uint64_t Longs __attribute__((vector_size(8 * HALF)));
typedef int64_t SignedLongs __attribute__((vector_size(8 * HALF)));
typedef int32_t SignedWords __attribute__((vector_size(4 * LANES)));
typedef double LooseDoubles __attribute__((vector_size(8 * HALF), aligned(8), may_alias));
typedef uint64_t LooseLongs __attribute__((vector_size(8 * HALF), aligned(8), may_alias));

static inline Doubles filled(double value) { return value - Doubles{}; }

// Whether a comparison holds anywhere: halves are laid on each other until one number is left.
static inline bool any_of(SignedLongs found) {
#if defined(__AVX512F__)
    typedef int64_t Four __attribute__((vector_size(32)));
    Four halves[2];
    std::memcpy(halves, &found, sizeof found);
    const Four either = halves[0] | halves[1];
    return (either[0] | either[1] | either[2] | either[3]) != 0;
#else
    int64_t any = 0;
    for (int lane = 0; lane < HALF; lane++) any |= found[lane];
    return any != 0;
#endif
}

// e to the x, for x at most 0: 2 to the whole part by its exponent, the rest by its series, which ends below the last
// bit of a double.
static inline Doubles exponential(Doubles x) {
    const Doubles least = filled(-700.0);
    const auto vanishes = x < least;
    x = vanishes ? least : x;
    const Doubles rounder = filled(6755399441055744.0);  // 1.5 * 2**52: what is added to it is rounded to a whole number
    const Doubles shifted = x * 1.4426950408889634 + rounder;
    const Doubles whole = shifted - rounder;
    const Doubles rest = (x - whole * 0.693147180369123816490) - whole * 1.90821492927058770002e-10;
    Doubles y = filled(1.0 / 6227020800.0);
    for (double factorial : {479001600.0, 39916800.0, 3628800.0, 362880.0, 40320.0, 5040.0, 720.0, 120.0, 24.0, 6.0, 2.0,
                             1.0, 1.0})
        y = y * rest + 1.0 / factorial;
    const Doubles power = (Doubles)((Longs)y + ((Longs)shifted << 52));
    return vanishes ? Doubles{} : power;
}

// softmax(logits / temperature) of one row.
template <typename Number>
static void probabilities(const Number* logits, int64_t width, double temperature, double* probs) {
    for (int64_t i = 0; i < width; i++) probs[i] = double(widened(logits[i])) / temperature;
    double highest = -INFINITY;
    Doubles most = filled(highest);
    int64_t i = 0;
    for (; i + HALF <= width; i += HALF) {
        const Doubles scores = *(const LooseDoubles*)(probs + i);
        most = scores > most ? scores : most;
    }
    for (int lane = 0; lane < HALF; lane++) highest = most[lane] > highest ? most[lane] : highest;
    for (; i < width; i++) highest = probs[i] > highest ? probs[i] : highest;
    Doubles totals = {};
    for (i = 0; i + HALF <= width; i += HALF) {
        const Doubles weights = exponential(*(const LooseDoubles*)(probs + i) - highest);
        *(LooseDoubles*)(probs + i) = weights;
        totals += weights;
    }
    double total = 0;
    for (int lane = 0; lane < HALF; lane++) total += totals[lane];
    for (; i < width; i++) {
        probs[i] = exponential(filled(probs[i] - highest))[0];
        total += probs[i];
    }
    for (i = 0; i < width; i++) probs[i] /= total;
}

// The bits of `tandem/noise.py`: SplitMix64's finaliser.
template <typename Bits>
static inline Bits mixed(Bits bits) {
    bits ^= bits >> 30;
    bits *= 0xBF58476D1CE4E5B9u;
    bits ^= bits >> 27;
    bits *= 0x94D049BB133111EBu;
    return bits ^ (bits >> 31);
}

// Which column wins: the highest prob / -log(u), u being the uniform that the key gives to the column's id. As -log(u) is
// never less than 1 - u, a column whose prob / (1 - u) is not above the best so far needs no logarithm.
static int64_t raced(const double* probs, int64_t width, uint64_t key, const int64_t* ids) {
    constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15u;
    constexpr double UNIT = 1.0 / 9007199254740992.0;  // 2**-53
    constexpr double SLACK = 1.0 + 1e-9;
    double best = 0.0;
    int64_t winner = 0;
    const auto try_one = [&](int64_t column, uint64_t odd) {
        const double value = probs[column] / -std::log(double(odd) * UNIT);
        if (value > best) best = value, winner = column;
    };
    const auto odd_bits = [&](auto id) { return (mixed(key + (id + 1) * GOLDEN) >> 11) | 1; };
    Longs in_order;
    for (int lane = 0; lane < HALF; lane++) in_order[lane] = lane;
    int64_t i = 0;
    for (; i + HALF <= width; i += HALF, in_order += HALF) {
        const Longs odd = odd_bits(ids ? *(const LooseLongs*)(ids + i) : in_order);
        // Of odd multiples of 2**-53 as of these: their signed conversion is exact, and the one that processors have.
        const Doubles missing = 1.0 - __builtin_convertvector((SignedLongs)odd, Doubles) * UNIT;
        const SignedLongs may_win = *(const LooseDoubles*)(probs + i) * SLACK > best * missing;
        if (any_of(may_win))
            for (int lane = 0; lane < HALF; lane++)
                if (may_win[lane]) try_one(i + lane, odd[lane]);
    }
    for (; i < width; i++) try_one(i, odd_bits(uint64_t(ids ? ids[i] : i)));
    return winner;
}

// A number and its column in one word that sorts as they do: the higher number first, of equal ones the lower column.
static inline uint64_t ranked(float value, int64_t column) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    bits = bits & 0x80000000u ? bits : ~bits & 0x7fffffffu;  // ascending words for descending numbers
    return uint64_t(bits) << 32 | uint64_t(column);
}

static inline float number_of(uint64_t rank) {
    uint32_t bits = uint32_t(rank >> 32);
    bits = bits & 0x80000000u ? bits : ~bits & 0x7fffffffu;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

// The `count` highest numbers of a row and where they are, highest first; of equal ones those that come first.
template <typename Number>
static void highest(const Number* values, int64_t width, int64_t count, float* found, int64_t* columns) {
    static thread_local std::vector<uint64_t> buffer;
    const int64_t most = 2 * count;
    buffer.resize(most);
    uint64_t* kept = buffer.data();
    const auto number = [&](int64_t i) {
        const float value = widened(values[i]);
        return value == value ? value + 0.0f : -INFINITY;  // -0.0 equals 0.0
    };
    for (int64_t i = 0; i < count; i++) kept[i] = ranked(number(i), i);
    float least = number_of(*std::max_element(kept, kept + count));
    int64_t end = count;
    const auto keep = [&](int64_t i) {
        const float value = number(i);
        if (!(value > least)) return;
        kept[end++] = ranked(value, i);
        if (end < most) return;
        std::nth_element(kept, kept + (count - 1), kept + end);
        end = count;
        least = number_of(kept[count - 1]);
    };
    int64_t i = count;
    for (; i + LANES <= width; i += LANES) {
        const SignedWords above = widened_lanes(values + i) > least;
        if (any_of((SignedLongs)above))
            for (int lane = 0; lane < LANES; lane++) keep(i + lane);
    }
    for (; i < width; i++) keep(i);
    std::nth_element(kept, kept + (count - 1), kept + end);
    std::sort(kept, kept + count);
    for (int64_t j = 0; j < count; j++) found[j] = number_of(kept[j]), columns[j] = int64_t(uint32_t(kept[j]));
}

static int64_t sampling_threads(int64_t rows, int64_t width, int64_t threads) {
    return rows * width * PRODUCTS_PER_PROBABILITY < WORTH_WAKING ? 1 : threads;
}

// --------------------------------------------------------------------------------------------- what Python calls

extern "C" {

// Outputs that are packed side by side.
int64_t tandem_block() { return BLOCK; }

// outputs[rows, output_width] = inputs[rows, width] times the packed weights, plus bias.
void tandem_linear(const void* inputs, int64_t kind, int64_t rows, int64_t width, const void* weights,
                   int64_t weight_kind, const float* bias, void* outputs, int64_t output_width, int64_t threads) {
#if defined(__AVX512BF16__)
    if (weight_kind == BFLOAT16 && kind == BFLOAT16)
        return linear((const uint16_t*)inputs, rows, width, (const uint16_t*)weights, bias, (uint16_t*)outputs,
                      output_width, threads);
#endif
    const float* floats = as_floats(inputs, Kind(kind), rows * width);
    auto run = [&](auto* packed, auto* results) {
        linear(floats, rows, width, packed, bias, results, output_width, threads);
    };
    if (weight_kind == BFLOAT16 && kind == BFLOAT16)
        run((const uint16_t*)weights, (uint16_t*)outputs);
    else if (weight_kind == BFLOAT16)
        run((const uint16_t*)weights, (float*)outputs);
    else
        run((const float*)weights, (float*)outputs);
}

// Stores this step's keys and values and attends.
void tandem_attend(const Attention* attention) {
    if (attention->kind == BFLOAT16)
        attend_all<uint16_t>(*attention);
    else
        attend_all<float>(*attention);
}

// probs[rows, width] = softmax(logits[rows, width] / temperatures[rows]).
void tandem_probabilities(const void* logits, int64_t kind, int64_t rows, int64_t width, const double* temperatures,
                          double* probs, int64_t threads) {
    threads = sampling_threads(rows, width, threads);
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int64_t row = 0; row < rows; row++) {
        if (kind == BFLOAT16)
            probabilities((const uint16_t*)logits + row * width, width, temperatures[row], probs + row * width);
        else
            probabilities((const float*)logits + row * width, width, temperatures[row], probs + row * width);
    }
}

// The winning column of each row; `ids` says which tokens the columns are, [rows, width], or none for all in order.
void tandem_race(const double* probs, int64_t rows, int64_t width, const int64_t* keys, const int64_t* ids,
                 int64_t* winners, int64_t threads) {
    threads = sampling_threads(rows, width, threads);
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int64_t row = 0; row < rows; row++)
        winners[row] = raced(probs + row * width, width, uint64_t(keys[row]), ids ? ids + row * width : nullptr);
}

// The highest numbers of each row and their columns, [rows, count].
void tandem_highest(const void* values, int64_t kind, int64_t rows, int64_t width, int64_t count, float* found,
                    int64_t* columns, int64_t threads) {
    threads = sampling_threads(rows, width, threads);
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int64_t row = 0; row < rows; row++) {
        if (kind == BFLOAT16)
            highest((const uint16_t*)values + row * width, width, count, found + row * count, columns + row * count);
        else
            highest((const float*)values + row * width, width, count, found + row * count, columns + row * count);
    }
}
}
