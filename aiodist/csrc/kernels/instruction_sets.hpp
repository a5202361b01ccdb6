#pragma once

// What the files that choose at run time know of the files compiled per instruction set.

#include <span>

#include "reduce.hpp"

namespace aiodist {

namespace baseline {
Fold fold_kernel(DType dtype, Op op) noexcept;
}
namespace x86_64_v3 {
Fold fold_kernel(DType dtype, Op op) noexcept;
}
namespace x86_64_v4 {
Fold fold_kernel(DType dtype, Op op) noexcept;
}

// One instruction set of this build.
struct KernelTable {
    InstructionSet instruction_set;
    Fold (*fold_kernel)(DType, Op) noexcept;
};

// Those that this machine runs, from the slowest to the fastest; never empty. Defined per architecture.
std::span<const KernelTable> usable_kernel_tables() noexcept;

}  // namespace aiodist
