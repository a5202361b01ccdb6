#include <array>

#include "instruction_sets.hpp"

namespace aiodist {

std::span<const KernelTable> usable_kernel_tables() noexcept {
    static constexpr std::array<KernelTable, 1> kTables = {{{InstructionSet::baseline, baseline::fold_kernel}}};
    return kTables;
}

}  // namespace aiodist
