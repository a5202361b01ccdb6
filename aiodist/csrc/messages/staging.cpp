#include "messages/staging.hpp"

namespace aiodist {
namespace {

constexpr std::size_t kKept = 64;  // of each size: 36 MiB in all

}  // namespace

std::uint64_t ChunkPool::get(std::uint32_t chunk_nbytes) {
    auto& free = kept(chunk_nbytes);
    if (free.empty()) {
        return engine_.arena().allocate(sizeof(ChunkHead) + chunk_nbytes);
    }
    const std::uint64_t offset = free.back();
    free.pop_back();
    return offset;
}

void ChunkPool::put(std::uint32_t chunk_nbytes, std::uint64_t offset) {
    auto& free = kept(chunk_nbytes);
    if (free.size() < kKept) {
        free.push_back(offset);
    } else {
        engine_.arena().release(offset);
    }
}

void ChunkPool::clear() {
    for (auto* const free : {&small_, &large_}) {
        for (const std::uint64_t offset : *free) {
            engine_.arena().release(offset);
        }
        free->clear();
    }
}

}  // namespace aiodist
