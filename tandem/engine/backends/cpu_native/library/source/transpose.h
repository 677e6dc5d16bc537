// Blocks of keys, transposed: scores are computed for as many keys at a time as a vector holds.

#pragma once

#include "vectors.h"

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
