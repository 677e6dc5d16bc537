// Products of bfloat16 by the processor's tile unit (Intel AMX), 16 rows by 16 outputs at a time.
//
// The weights lie as for the other products: for two inputs that follow each other a word of each of a block's outputs,
// which is the layout of a tile of weights.

#pragma once

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "vectors.h"

constexpr int TILE_ROWS = 16;
constexpr int TILE_WIDTH = 32;  // inputs that one product adds up
constexpr int TILE_BYTES = 64;  // of a row of a tile

// Linux gives a process the tile unit's state (XTILEDATA, feature 18) when it asks for it (ARCH_REQ_XCOMP_PERM, 0x1023).
static inline bool may_use_tiles() {
    static const bool may = syscall(SYS_arch_prctl, 0x1023, 18) == 0;
    return may;
}

// Shapes the tiles for up to 32 rows: sums in 0 to 3, inputs in 4 and 5, weights in 6 and 7.
static inline void set_tiles(int64_t rows) {
    struct alignas(64) {
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t row_bytes[16] = {};
        uint8_t rows[16] = {};
    } shapes;
    const uint8_t upper = uint8_t(rows < TILE_ROWS ? rows : TILE_ROWS);
    const uint8_t lower = uint8_t(rows < TILE_ROWS ? 0 : rows - TILE_ROWS);
    const uint8_t of_tile[] = {upper, upper, lower, lower, upper, lower, TILE_ROWS, TILE_ROWS};
    for (int tile = 0; tile < 8; tile++)
        if ((shapes.rows[tile] = of_tile[tile])) shapes.row_bytes[tile] = TILE_BYTES;
    // To a compiler the tile instructions read less memory than they do.
    __asm__ volatile("" ::"r"(&shapes) : "memory");
    _tile_loadconfig(&shapes);
}

// sums[rows][32] = inputs[rows][width] times one block of 32 outputs, for up to 16 rows, or for more where there is a LOWER
// half. Each sum is added up in the same order whatever the number of rows.
template <bool LOWER>
static inline void multiply_tiles(const uint16_t* inputs, int64_t width, const uint16_t* weights, float* sums) {
    const int64_t pitch = 2 * width;  // in bytes
    _tile_zero(0);
    _tile_zero(1);
    if (LOWER) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t k = 0; k < width; k += TILE_WIDTH) {
        const uint16_t* const pairs = weights + k * 2 * LANES;
        _tile_loadd(4, inputs + k, pitch);
        _tile_loadd(6, pairs, 2 * TILE_BYTES);
        _tile_loadd(7, pairs + 2 * LANES, 2 * TILE_BYTES);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (!LOWER) continue;
        _tile_loadd(5, inputs + TILE_ROWS * width + k, pitch);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums, 2 * TILE_BYTES);
    _tile_stored(1, sums + LANES, 2 * TILE_BYTES);
    if (!LOWER) return;
    _tile_stored(2, sums + TILE_ROWS * 2 * LANES, 2 * TILE_BYTES);
    _tile_stored(3, sums + TILE_ROWS * 2 * LANES + LANES, 2 * TILE_BYTES);
}
