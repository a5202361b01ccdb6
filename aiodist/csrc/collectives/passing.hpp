#pragma once

#include <cstddef>
#include <cstdint>

#include "collectives/rows.hpp"

namespace aiodist {

/// Copies into memory that another core reads next, and has read before.
///
/// A store to a line that another core holds waits until that one has let go of it, one line after the other: 2.6 GB/s
/// on a Zen 4 where the two cores share no cache, 10 to 30 where they share the last level, 50 where they are two
/// threads of one core. Stores around the cache wait for nobody (50 GB/s), but what they wrote comes out of memory (9
/// to 20 GB/s, in place of 25 to 45). Which is better depends on where the system, or the one below a virtual machine,
/// runs the two threads at the moment. So the cost of going through the cache is measured over and over, a pair of
/// clock readings a segment. What a peer sees is the same either way: this is no part of the protocol.
class Passing {
 public:
    /// Copies bytes [offset, offset + nbytes) of the block to a contiguous place.
    void copy(std::byte* to, const Rows<const std::byte>& from, std::size_t offset, std::size_t nbytes);
    void copy(std::byte* to, const std::byte* from, std::size_t nbytes) {
        copy(to, Rows<const std::byte>::run(from, nbytes), 0, nbytes);
    }
    /// True while stores around the cache are the better way.
    bool around() const noexcept { return around_; }

 private:
    void judge(double slowness) noexcept;

    bool around_ = false;
    std::uint32_t slow_ = 0;     // measurements in a row that spoke against the cache
    std::uint32_t untried_ = 0;  // copies around the cache since the last measurement
};

}  // namespace aiodist
