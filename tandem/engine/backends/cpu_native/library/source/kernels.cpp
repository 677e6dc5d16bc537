// The entry points of the CPU kernels, which Python calls.
//
// Compiled for one processor; see `build.py`. The kernels need no torch: tensors come as addresses.

#include "attention.h"
#include "linear.h"
#include "pointwise.h"
#include "sampling.h"

extern "C" {

// Number of outputs that are packed side by side.
int64_t tandem_block() { return BLOCK; }

enum Routine : int64_t { LINEAR = 0, ATTEND = 1, POINTWISE = 2, MEAN = 3, GATHER = 4, ROUTINES };

struct Call {
    int64_t routine;
    const void* arguments;
};

// Numbers that must be equal in Python, in the order of `EXPECTED` of interface.py. The version comes first, and rises
// with every change of a structure, an enumeration, or a function's name or arguments.
constexpr int64_t INTERFACE_VERSION = 5;
constexpr int64_t INTERFACE[] = {
    INTERFACE_VERSION, sizeof(Linear), sizeof(Attention), sizeof(Operand), sizeof(Pointwise), sizeof(Mean),
    sizeof(Gather),    sizeof(Call),   KINDS,             ROUTINES,        OPERATIONS,        DIMENSIONS,
};
constexpr int64_t INTERFACE_COUNT = sizeof INTERFACE / sizeof INTERFACE[0];

// Writes as many of these numbers as fit into `room`; returns how many there are.
int64_t tandem_interface(int64_t* numbers, int64_t room) {
    for (int64_t i = 0; i < room && i < INTERFACE_COUNT; i++) numbers[i] = INTERFACE[i];
    return INTERFACE_COUNT;
}

// Runs calls one after the other; returns how many ran. Fewer than `count` means that the next call is a look-up of an id
// that is not in its table.
int64_t tandem_replay(const Call* calls, int64_t count) {
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

// Samples a column of each row; `ids` are the tokens of the columns, [rows, width], or null for all in order.
void tandem_sample(const double* probs, int64_t rows, int64_t width, const int64_t* keys, const int64_t* ids,
                   int64_t* columns, int64_t threads) {
    threads = sampling_threads(rows, width, threads);
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int64_t row = 0; row < rows; row++)
        columns[row] = sample(probs + row * width, width, uint64_t(keys[row]), ids ? ids + row * width : nullptr);
}

// Finds the largest numbers of each row and their columns, [rows, count].
void tandem_topk(const void* values, int64_t kind, int64_t rows, int64_t width, int64_t count, float* found,
                 int64_t* columns, int64_t threads) {
    threads = sampling_threads(rows, width, threads);
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int64_t row = 0; row < rows; row++) {
        if (kind == BFLOAT16)
            topk((const uint16_t*)values + row * width, width, count, found + row * count, columns + row * count);
        else
            topk((const float*)values + row * width, width, count, found + row * count, columns + row * count);
    }
}
}
