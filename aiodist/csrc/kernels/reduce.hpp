#pragma once

// Reduction kernels: one function a (dtype, op), the instruction set chosen once at run time.

#include <cstddef>
#include <cstdint>
#include <span>

#include "../types.hpp"

namespace aiodist {

// Folds `source_count` >= 1 arrays of `count` elements element by element, from the left in the order of `sources`.
//
// `divisor` (the number of contributions, not of elements) is used by mean only. `out` may equal any of the sources
// exactly where the item sizes of input and result agree; any other overlap is undefined. No pointer needs alignment.
//
// The bits of a result depend on the elements and their order alone: never on the instruction set, on an element's
// place in the array, on alignment, or on NaN payloads (each NaN result is the positive quiet NaN with payload 0).
// The caller holds a FloatEnvironment. 16-bit floats are folded in float32 and rounded once at the end of each call.
using Fold = void (*)(void* out, const void* const* sources, std::size_t source_count, std::size_t count,
                      std::size_t divisor);

// The kernel of the best instruction set of this machine; nullptr where `op` has no meaning for `dtype`.
Fold fold_kernel(DType dtype, Op op) noexcept;

// The name of that instruction set, for logs and bug reports.
const char* kernel_instruction_set() noexcept;

enum class InstructionSet : std::uint8_t { baseline = 0, x86_64_v3 = 1, x86_64_v4 = 2 };

const char* name(InstructionSet instruction_set) noexcept;

// What this build holds and this machine can run, from the slowest (always the baseline) to the fastest.
std::span<const InstructionSet> available_instruction_sets() noexcept;

// For tests: one instruction set's kernel; nullptr also where the build or the machine lacks the set.
Fold fold_kernel_for(InstructionSet instruction_set, DType dtype, Op op) noexcept;

}  // namespace aiodist
