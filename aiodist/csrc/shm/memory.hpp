#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace aiodist {

/// Too little memory for what shared memory must hold; found before the kernel would have to kill someone.
class NoMemory : public std::runtime_error {
 public:
    NoMemory(std::uint64_t need, std::uint64_t have);
    std::uint64_t need;
    std::uint64_t have;
};

/// Bytes that this process can still take: the smaller of the machine's available memory and what its cgroup leaves.
std::uint64_t available_memory();

/// Bytes of memory the machine has.
std::uint64_t total_memory();

}  // namespace aiodist
