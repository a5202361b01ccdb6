#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>

#include "engine.hpp"
#include "shm/layout.hpp"

namespace aiodist {

/// Data bytes of a chunk: small ones, as long as a message has no more of them than can be listed.
inline constexpr std::uint32_t kSmallChunk = 64 * 1024;
inline constexpr std::uint32_t kLargeChunk = 512 * 1024;
/// Bytes of the chunks that a message which found no room in the send buffer uses in turn.
inline constexpr std::uint32_t kWindowNbytes = 1024 * 1024;

/// What is staged between two flags, so that the receiver copies one piece while its sender stages the next.
inline constexpr std::uint64_t kPiece = 32 * 1024;
/// The receiver says how far it is at least this often.
inline constexpr std::uint64_t kTold = 128 * 1024;
/// Bytes of chunks that take turns, and how far a sender runs ahead of a receiver that keeps up.
inline constexpr std::uint64_t kAround = 2 * 1024 * 1024;
/// A receiver that has not said for this long how far it is does not keep up.
inline constexpr std::chrono::milliseconds kKeepsUp{1};

/// Bytes of short messages from one peer that may wait in the receiver's memory.
inline constexpr std::uint64_t kUnreceived = kSendBufferNbytes;

constexpr std::uint32_t chunk_nbytes_of(std::uint64_t message_nbytes) {
    return message_nbytes <= std::uint64_t{kSmallChunk} * kMaxChunks ? kSmallChunk : kLargeChunk;
}

/// Chunks of shared memory that messages wait in. Those given back are kept for the next, up to a bound: populating
/// memory takes as long as copying a message into it. There are at least `kAround` bytes of them, which take turns, so
/// that the lines of one have left the cache of the core that read them when it is written again (see
/// Communicator::take_slots).
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
    struct Chunks {
        std::deque<std::uint64_t> kept;  // the one that was given back first in front
        std::size_t in_use = 0;
    };
    static constexpr std::size_t kKept = 16 * 1024 * 1024;  // of each size

    Chunks& of(std::uint32_t chunk_nbytes) noexcept { return chunk_nbytes == kSmallChunk ? small_ : large_; }

    Engine& engine_;
    Chunks small_;
    Chunks large_;
};

}  // namespace aiodist
