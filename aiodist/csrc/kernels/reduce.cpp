#include "reduce.hpp"

#include <array>
#include <cstddef>

#include "instruction_sets.hpp"

namespace aiodist {

Fold fold_kernel(DType dtype, Op op) noexcept {
    static const KernelTable best = usable_kernel_tables().back();
    return best.fold_kernel(dtype, op);
}

const char* kernel_instruction_set() noexcept { return name(usable_kernel_tables().back().instruction_set); }

const char* name(InstructionSet instruction_set) noexcept {
    switch (instruction_set) {
        case InstructionSet::baseline:
            return "baseline";
        case InstructionSet::x86_64_v3:
            return "x86-64-v3";
        case InstructionSet::x86_64_v4:
            return "x86-64-v4";
    }
    return "unknown";
}

std::span<const InstructionSet> available_instruction_sets() noexcept {
    static constexpr std::array<InstructionSet, 3> kAll = {InstructionSet::baseline, InstructionSet::x86_64_v3,
                                                           InstructionSet::x86_64_v4};
    return std::span(kAll).first(usable_kernel_tables().size());
}

Fold fold_kernel_for(InstructionSet instruction_set, DType dtype, Op op) noexcept {
    for (const KernelTable& table : usable_kernel_tables()) {
        if (table.instruction_set == instruction_set) {
            return table.fold_kernel(dtype, op);
        }
    }
    return nullptr;
}

}  // namespace aiodist
