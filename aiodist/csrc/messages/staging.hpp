#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "engine.hpp"
#include "shm/layout.hpp"

namespace aiodist {

/// Data bytes of a chunk: short messages take one small chunk, others large ones.
inline constexpr std::uint32_t kSmallChunk = 64 * 1024;
inline constexpr std::uint32_t kLargeChunk = 512 * 1024;
/// Chunks that a message which found no room in the send buffer uses in turn.
inline constexpr std::uint32_t kWindowChunks = 2;

/// A long message up to this size is staged, and copied, by whoever meets it; a longer one, in pieces, by the engine or
/// a thread that waits for it. The bound of what a collective's caller does itself.
inline constexpr std::uint64_t kAtOnce = 256 * 1024;
inline constexpr std::uint64_t kPiece = 64 * 1024;

/// Bytes of short messages from one peer that may wait in the receiver's memory.
inline constexpr std::uint64_t kUnreceived = kSendBufferNbytes;

constexpr std::uint32_t chunk_nbytes_of(std::uint64_t message_nbytes) {
    return message_nbytes <= kSmallChunk ? kSmallChunk : kLargeChunk;
}

/// Chunks of shared memory that messages wait in. Those given back are kept for the next, up to a bound: populating
/// memory takes as long as copying a message into it.
class ChunkPool {
 public:
    explicit ChunkPool(Engine& engine) : engine_(engine) {}
    ChunkPool(const ChunkPool&) = delete;
    ChunkPool& operator=(const ChunkPool&) = delete;

    /// Offset of a chunk in the arena. Throws NoMemory.
    std::uint64_t get(std::uint32_t chunk_nbytes);
    void put(std::uint32_t chunk_nbytes, std::uint64_t offset);
    /// Frees the kept ones.
    void clear();

 private:
    std::vector<std::uint64_t>& kept(std::uint32_t chunk_nbytes) noexcept {
        return chunk_nbytes == kSmallChunk ? small_ : large_;
    }

    Engine& engine_;
    std::vector<std::uint64_t> small_;
    std::vector<std::uint64_t> large_;
};

}  // namespace aiodist
