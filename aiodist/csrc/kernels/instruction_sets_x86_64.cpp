#include <array>
#include <cstddef>

#include "instruction_sets.hpp"

namespace aiodist {
namespace {

constexpr std::array<KernelTable, 3> kTables = {{
    {InstructionSet::baseline, baseline::fold_kernel},
    {InstructionSet::x86_64_v3, x86_64_v3::fold_kernel},
    {InstructionSet::x86_64_v4, x86_64_v4::fold_kernel},
}};

// The builtin asks the operating system too: it must save the wide registers.
std::size_t count_usable() noexcept {
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("x86-64-v3")) {
        return 1;
    }
    return __builtin_cpu_supports("x86-64-v4") ? 3 : 2;
}

}  // namespace

std::span<const KernelTable> usable_kernel_tables() noexcept {
    static const std::size_t count = count_usable();
    return std::span(kTables).first(count);
}

}  // namespace aiodist
