// The few loops that decide how fast a model decodes on a CPU, as Python calls them.
//
// Compiled for one processor; see `build.py`. Nothing of torch is needed: tensors come as addresses.

#include "attention.h"
#include "linear.h"
#include "pointwise.h"
#include "sampling.h"

extern "C" {

// Outputs that are packed side by side.
int64_t tandem_block() { return BLOCK; }

enum Routine : int64_t { LINEAR = 0, ATTEND = 1, POINTWISE = 2, MEAN = 3, GATHER = 4, ROUTINES };

struct Call {
    int64_t routine;
    const void* arguments;
};

// What Python must know alike, in the order of `EXPECTED` of interface.py. The version comes first, and rises with every
// change of a structure, an enumeration or a function's arguments.
constexpr int64_t INTERFACE_VERSION = 2;
constexpr int64_t INTERFACE[] = {
    INTERFACE_VERSION, sizeof(Linear), sizeof(Attention), sizeof(Operand), sizeof(Pointwise), sizeof(Mean),
    sizeof(Gather),    sizeof(Call),   KINDS,             ROUTINES,        OPERATIONS,        DIMENSIONS,
};
constexpr int64_t INTERFACE_COUNT = sizeof INTERFACE / sizeof INTERFACE[0];

// Writes as many of these numbers as there is room for; how many there are.
int64_t tandem_interface(int64_t* numbers, int64_t room) {
    for (int64_t i = 0; i < room && i < INTERFACE_COUNT; i++) numbers[i] = INTERFACE[i];
    return INTERFACE_COUNT;
}

// Runs calls one after the other; how many ran. The one after them is a look-up of what is not in its table.
int64_t tandem_play(const Call* calls, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        const void* arguments = calls[i].arguments;
        switch (calls[i].routine) {
            case LINEAR: linear(*(const Linear*)arguments); break;
            case ATTEND: attend_all(*(const Attention*)arguments); break;
            case POINTWISE: pointwise(*(const Pointwise*)arguments); break;
            case MEAN: mean(*(const Mean*)arguments); break;
            case GATHER:
                if (!gather(*(const Gather*)arguments)) return i;
        }
    }
    return count;
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
