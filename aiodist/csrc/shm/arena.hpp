#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>

#include "shm/fd.hpp"
#include "shm/layout.hpp"

namespace aiodist {

/// One mapped memfd. A process maps a memfd once, however many of its ranks use it: see map_once.
struct Mapping {
    std::byte* base = nullptr;
    std::size_t nbytes = 0;
    Mapping(std::byte* at, std::size_t size) : base(at), nbytes(size) {}
    Mapping(const Mapping&) = delete;
    Mapping& operator=(const Mapping&) = delete;
    ~Mapping();
};

/// The memory of one process that its peers may read. Sparse: pages cost memory only once allocated, so it is as large
/// as the machine's memory and never has to grow (a grown one would have to be mapped again by every peer).
class Arena {
 public:
    static std::shared_ptr<Arena> create();
    ~Arena();

    /// Reserves and populates `nbytes`, page-aligned. Throws NoMemory.
    std::uint64_t allocate(std::size_t nbytes);
    void release(std::uint64_t offset);

    std::byte* at(std::uint64_t offset) const noexcept { return mapping_->base + offset; }
    /// The offset of [data, data + nbytes) where it lies wholly in allocated blocks' range of this arena.
    std::optional<std::uint64_t> offset_of(const void* data, std::size_t nbytes) const noexcept;
    ArenaHeader& header() const noexcept { return *reinterpret_cast<ArenaHeader*>(mapping_->base); }
    /// A descriptor that can only be mapped for reading: what peers get.
    int share_fd() const noexcept { return read_only_.get(); }
    std::size_t nbytes() const noexcept { return mapping_->nbytes; }

 private:
    Arena(Fd fd, Fd read_only, std::shared_ptr<Mapping> mapping);
    void populate(std::uint64_t offset, std::size_t nbytes);

    Fd fd_;
    Fd read_only_;
    std::shared_ptr<Mapping> mapping_;
    std::mutex mutex_;
    std::map<std::uint64_t, std::size_t> free_;  // offset -> nbytes, no two adjacent
    std::map<std::uint64_t, std::size_t> used_;
};

/// A peer's arena, read-only. What lies in it is untrusted: offsets are checked here, values by who reads them.
class PeerArena {
 public:
    /// Maps `fd` (which may be closed afterwards). Throws std::runtime_error where it is no arena of our layout.
    explicit PeerArena(int fd);

    const ArenaHeader& header() const noexcept { return *reinterpret_cast<const ArenaHeader*>(mapping_->base); }
    /// Address of [offset, offset + nbytes), or nullptr where that is not inside.
    const std::byte* at(std::uint64_t offset, std::uint64_t nbytes) const noexcept;

 private:
    std::shared_ptr<Mapping> mapping_;
};

}  // namespace aiodist
