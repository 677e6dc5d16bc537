// Softmax, sampling and top-k of rows of logits.

#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "vectors.h"

constexpr int HALF = LANES / 2;
constexpr int64_t PRODUCTS_PER_PROBABILITY = 4;  // cost of an exponential or a sample, in products of a linear layer

typedef double Doubles __attribute__((vector_size(8 * HALF)));
typedef uint64_t Longs __attribute__((vector_size(8 * HALF)));
typedef int64_t SignedLongs __attribute__((vector_size(8 * HALF)));
typedef double LooseDoubles __attribute__((vector_size(8 * HALF), aligned(8), may_alias));
typedef uint64_t LooseLongs __attribute__((vector_size(8 * HALF), aligned(8), may_alias));

static inline Doubles filled(double value) { return value - Doubles{}; }

// True if a comparison holds in any lane: combines halves until one number is left.
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

// exp(x) for x <= 0: 2 to the integer part through the exponent bits, times a Taylor series of the remainder that is exact
// to the last bit of a double.
static inline Doubles exponential(Doubles x) {
    const Doubles smallest = filled(-700.0);
    const auto vanishes = x < smallest;
    x = vanishes ? smallest : x;
    const Doubles rounder = filled(6755399441055744.0);  // 1.5 * 2**52: adding it rounds to an integer
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
    double maximum = -INFINITY;
    Doubles maxima = filled(maximum);
    int64_t i = 0;
    for (; i + HALF <= width; i += HALF) {
        const Doubles scores = *(const LooseDoubles*)(probs + i);
        maxima = scores > maxima ? scores : maxima;
    }
    for (int lane = 0; lane < HALF; lane++) maximum = maxima[lane] > maximum ? maxima[lane] : maximum;
    for (; i < width; i++) maximum = probs[i] > maximum ? probs[i] : maximum;
    Doubles totals = {};
    for (i = 0; i + HALF <= width; i += HALF) {
        const Doubles weights = exponential(*(const LooseDoubles*)(probs + i) - maximum);
        *(LooseDoubles*)(probs + i) = weights;
        totals += weights;
    }
    double total = 0;
    for (int lane = 0; lane < HALF; lane++) total += totals[lane];
    for (; i < width; i++) {
        probs[i] = exponential(filled(probs[i] - maximum))[0];
        total += probs[i];
    }
    for (i = 0; i < width; i++) probs[i] /= total;
}

// The same bits as `tandem/sampling/noise.py`: SplitMix64's finaliser.
template <typename Bits>
static inline Bits mixed(Bits bits) {
    bits ^= bits >> 30;
    bits *= 0xBF58476D1CE4E5B9u;
    bits ^= bits >> 27;
    bits *= 0x94D049BB133111EBu;
    return bits ^ (bits >> 31);
}

// Samples a column: the argmax of prob / -log(u), where u is the uniform that the key gives to the column's id. Since
// -log(u) >= 1 - u, a column whose prob / (1 - u) does not exceed the maximum so far needs no logarithm.
static int64_t sample(const double* probs, int64_t width, uint64_t key, const int64_t* ids) {
    constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15u;
    constexpr double UNIT = 1.0 / 9007199254740992.0;  // 2**-53
    constexpr double SLACK = 1.0 + 1e-9;
    double maximum = 0.0;
    int64_t argmax = 0;
    const auto try_one = [&](int64_t column, uint64_t odd) {
        const double value = probs[column] / -std::log(double(odd) * UNIT);
        if (value > maximum) maximum = value, argmax = column;
    };
    const auto odd_bits = [&](auto id) { return (mixed(key + (id + 1) * GOLDEN) >> 11) | 1; };
    Longs in_order;
    for (int lane = 0; lane < HALF; lane++) in_order[lane] = lane;
    int64_t i = 0;
    for (; i + HALF <= width; i += HALF, in_order += HALF) {
        const Longs odd = odd_bits(ids ? *(const LooseLongs*)(ids + i) : in_order);
        // The signed conversion is exact for these numbers, and processors have an instruction for it.
        const Doubles missing = 1.0 - __builtin_convertvector((SignedLongs)odd, Doubles) * UNIT;
        const SignedLongs may_win = *(const LooseDoubles*)(probs + i) * SLACK > maximum * missing;
        if (any_of(may_win))
            for (int lane = 0; lane < HALF; lane++)
                if (may_win[lane]) try_one(i + lane, odd[lane]);
    }
    for (; i < width; i++) try_one(i, odd_bits(uint64_t(ids ? ids[i] : i)));
    return argmax;
}

// Packs a number and its column into a word whose ascending order is that of descending numbers, then ascending columns.
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

// Sorts words by their bytes from bit `shift` on, one pass for each; words that are equal there keep their order. `spare`
// has as much room. std::sort takes several times as long, since its branches cannot be predicted.
static void radix_sort(uint64_t* words, uint64_t* spare, int64_t count, int shift) {
    uint64_t *from = words, *to = spare;
    for (; shift < 64; shift += 8) {
        int64_t starts[256] = {}, sum = 0;
        for (int64_t i = 0; i < count; i++) starts[from[i] >> shift & 255]++;
        if (starts[from[0] >> shift & 255] == count) continue;  // as the lower bytes of bfloat16
        for (int64_t& start : starts) {
            const int64_t own = start;
            start = sum, sum += own;
        }
        for (int64_t i = 0; i < count; i++) to[starts[from[i] >> shift & 255]++] = from[i];
        std::swap(from, to);
    }
    if (from != words) std::copy(from, from + count, words);
}

// Finds the `count` largest numbers of a row and their columns, in descending order; ties go to the lowest columns.
template <typename Number>
static void topk(const Number* values, int64_t width, int64_t count, float* found, int64_t* columns) {
    static thread_local std::vector<uint64_t> buffer;
    const bool takes_much = width <= 8 * count;  // so that it is quicker to sort all of them
    const int64_t capacity = takes_much ? width : 2 * count;
    buffer.resize(2 * capacity);
    uint64_t* kept = buffer.data();
    const auto number = [&](int64_t i) {
        const float value = widened(values[i]);
        return value == value ? value + 0.0f : -INFINITY;  // -0.0 equals 0.0
    };
    const auto give = [&] {
        for (int64_t j = 0; j < count; j++) found[j] = number_of(kept[j]), columns[j] = int64_t(uint32_t(kept[j]));
    };
    if (takes_much) {
        for (int64_t i = 0; i < width; i++) kept[i] = ranked(number(i), i);
        radix_sort(kept, kept + capacity, width, 32);
        return give();
    }
    for (int64_t i = 0; i < count; i++) kept[i] = ranked(number(i), i);
    float smallest_kept = number_of(*std::max_element(kept, kept + count));
    int64_t end = count;
    const auto keep = [&](int64_t i) {
        const float value = number(i);
        if (!(value > smallest_kept)) return;
        kept[end++] = ranked(value, i);
        if (end < capacity) return;
        std::nth_element(kept, kept + (count - 1), kept + end);
        end = count;
        smallest_kept = number_of(kept[count - 1]);
    };
    int64_t i = count;
    for (; i + LANES <= width; i += LANES) {
        const SignedWords above = widened_lanes(values + i) > smallest_kept;
        if (any_of((SignedLongs)above))
            for (int lane = 0; lane < LANES; lane++) keep(i + lane);
    }
    for (; i < width; i++) keep(i);
    std::nth_element(kept, kept + (count - 1), kept + end);
    if (count < 64)
        std::sort(kept, kept + count);
    else
        radix_sort(kept, kept + capacity, count, 0);
    give();
}

static int64_t sampling_threads(int64_t rows, int64_t width, int64_t threads) {
    return rows * width * PRODUCTS_PER_PROBABILITY < WORTH_WAKING ? 1 : threads;
}
