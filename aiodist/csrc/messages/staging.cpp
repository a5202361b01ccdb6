#include "messages/staging.hpp"

namespace aiodist {

std::uint64_t ChunkPool::get(std::uint32_t chunk_nbytes) {
    Chunks& chunks = of(chunk_nbytes);
    std::uint64_t offset = 0;
    if (chunks.kept.empty() || chunks.kept.size() + chunks.in_use < kAround / chunk_nbytes) {
        offset = engine_.arena().allocate(sizeof(ChunkHead) + chunk_nbytes);
    } else {
        offset = chunks.kept.front();
        chunks.kept.pop_front();
    }
    ++chunks.in_use;
    return offset;
}

void ChunkPool::put(std::uint32_t chunk_nbytes, std::uint64_t offset) {
    Chunks& chunks = of(chunk_nbytes);
    --chunks.in_use;
    if (chunks.kept.size() < kKept / chunk_nbytes) {
        chunks.kept.push_back(offset);
    } else {
        engine_.arena().release(offset);
    }
}

void ChunkPool::clear() {
    for (Chunks* const chunks : {&small_, &large_}) {
        for (const std::uint64_t offset : chunks->kept) {
            engine_.arena().release(offset);
        }
        chunks->kept.clear();
    }
}

}  // namespace aiodist
