#include "shm/memory.hpp"

#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <limits>
#include <optional>

namespace aiodist {
namespace {

constexpr std::uint64_t kUnlimited = std::numeric_limits<std::uint64_t>::max();

std::uint64_t meminfo_available() {
    std::ifstream file("/proc/meminfo");
    std::string key;
    std::uint64_t kib = 0;
    std::string unit;
    while (file >> key >> kib) {
        std::getline(file, unit);
        if (key == "MemAvailable:") {
            return kib * 1024;
        }
    }
    return kUnlimited;
}

std::optional<std::uint64_t> number_in(const std::string& path) {
    std::ifstream file(path);
    std::uint64_t value = 0;
    if (file >> value) {
        return value;
    }
    return std::nullopt;  // absent, or "max"
}

/// What the cgroup at `folder` and its parents leave, by the names of the given cgroup version.
std::uint64_t left_under(std::string root, std::string folder, const char* limit_name, const char* usage_name) {
    std::uint64_t left = kUnlimited;
    while (true) {
        const auto limit = number_in(root + folder + "/" + limit_name);
        const auto usage = number_in(root + folder + "/" + usage_name);
        if (limit && usage) {
            left = std::min(left, *limit > *usage ? *limit - *usage : 0);
        }
        if (folder.empty() || folder == "/") {
            return left;
        }
        folder.erase(folder.rfind('/'));
    }
}

std::uint64_t cgroup_available() {
    std::ifstream file("/proc/self/cgroup");
    std::string line;
    std::uint64_t left = kUnlimited;
    while (std::getline(file, line)) {  // "hierarchy:controllers:path"
        const auto first = line.find(':');
        const auto second = line.find(':', first + 1);
        if (first == std::string::npos || second == std::string::npos) {
            continue;
        }
        const std::string controllers = line.substr(first + 1, second - first - 1);
        const std::string path = line.substr(second + 1);
        if (controllers.empty()) {
            left = std::min(left, left_under("/sys/fs/cgroup", path, "memory.max", "memory.current"));
        } else if (controllers.find("memory") != std::string::npos) {
            left = std::min(
                left, left_under("/sys/fs/cgroup/memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes"));
        }
    }
    return left;
}

}  // namespace

NoMemory::NoMemory(std::uint64_t need_nbytes, std::uint64_t have_nbytes)
    : std::runtime_error("shared memory needs " + std::to_string(need_nbytes) + " bytes and " +
                         std::to_string(have_nbytes) + " are available"),
      need(need_nbytes),
      have(have_nbytes) {}

std::uint64_t available_memory() { return std::min(meminfo_available(), cgroup_available()); }

std::uint64_t total_memory() {
    return static_cast<std::uint64_t>(::sysconf(_SC_PHYS_PAGES)) * static_cast<std::uint64_t>(::sysconf(_SC_PAGE_SIZE));
}

}  // namespace aiodist
