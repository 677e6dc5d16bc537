// Vectors and numbers, as all kernels read and write them.
//
// Vectors are the compiler's own (GCC and Clang), so that the same text serves AVX-512, AVX2 and NEON. Arithmetic is in
// float whatever the storage; a bfloat16 is the upper half of a float, so reading one is a shift.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__FMA__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int LANES = 16;
#else
constexpr int LANES = 8;
#endif

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef int32_t SignedWords __attribute__((vector_size(4 * LANES)));
typedef float LooseFloats __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t LooseWords __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

enum Kind : int64_t { FLOAT32 = 0, BFLOAT16 = 1, INT64 = 2, KINDS };

static inline float widened(uint16_t bits) {
    uint32_t word = uint32_t(bits) << 16;
    float value;
    std::memcpy(&value, &word, 4);
    return value;
}

static inline float widened(float value) { return value; }
static inline float widened(int64_t value) { return float(value); }

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

static inline Floats widened_lanes(const float* at) { return *(const LooseFloats*)at; }

static inline Floats widened_lanes(const uint16_t* at) {
    typedef uint16_t Halves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
    return (Floats)(__builtin_convertvector(*(const Halves*)at, Words) << 16);
}

static inline Floats widened_lanes(const int64_t* at) {
    Floats values;
    for (int lane = 0; lane < LANES; lane++) values[lane] = float(at[lane]);
    return values;
}

// A difference and no sum: -0.0 + 0.0 is not -0.0, so a sum would have to be computed.
static inline Floats filled(float value) { return value - Floats{}; }

// a * b + c, rounded once. Left to itself, GCC rounds twice in loops with few sums (it avoids chains of such operations on many
// processors), so that a product would depend on how many rows are computed side by side.
static inline Floats fused(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

// e to the x as Sleef computes it for torch (expf, within one unit of the last place): 2 to the whole part by its
// exponent, the rest by a polynomial.
static inline Floats exponential(Floats x) {
    const Floats rounder = filled(12582912.0f);  // 1.5 * 2**23: what is added to it is rounded to a whole number
    const Floats bounded = x < -104.0f ? filled(-104.0f) : x > 100.0f ? filled(100.0f) : x;
    const Floats scaled = bounded * 1.442695040888963407f;
    const Floats whole = (scaled + rounder) - rounder;
    Floats rest = bounded - whole * 0.693145751953125f;
    rest = rest - whole * 1.428606765330187045e-06f;
    Floats y = filled(0.000198527617612853646278381f);
    y = y * rest + 0.00139304355252534151077271f;
    y = y * rest + 0.00833336077630519866943359f;
    y = y * rest + 0.0416664853692054748535156f;
    y = y * rest + 0.166666671633720397949219f;
    y = y * rest + 0.5f;
    y = 1.0f + (rest * rest * y + rest);
    // Two halves of the power, since the whole may be more than an exponent holds.
    const SignedWords power = __builtin_convertvector(whole, SignedWords), half = power >> 1;
    y = y * (Floats)((half + 127) << 23) * (Floats)((power - half + 127) << 23);
    y = x < -104.0f ? Floats{} : y;
    y = x > 100.0f ? filled(__builtin_inff()) : y;
    return x == x ? y : x;
}

// Products that are worth a second thread: waking one that sleeps takes as long as some hundred thousand of them.
constexpr int64_t WORTH_WAKING = 1000000;
