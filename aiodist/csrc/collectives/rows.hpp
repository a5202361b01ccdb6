#pragma once

#include <algorithm>
#include <cstddef>

#include "kernels/copy.hpp"

namespace aiodist {

/// A block of an array seen along one axis: rows of bytes at equal distances. One row is a contiguous block.
template <typename Byte>
struct Rows {
    Byte* base = nullptr;
    std::size_t row_nbytes = 0;
    std::size_t stride = 0;

    bool contiguous(std::size_t nbytes) const noexcept { return row_nbytes == stride || nbytes <= row_nbytes; }

    /// Calls visit(pointer, done, count) for each contiguous run of the block's bytes [offset, offset + nbytes).
    template <typename Visit>
    void runs(std::size_t offset, std::size_t nbytes, Visit visit) const {
        for (std::size_t done = 0; done < nbytes;) {
            const std::size_t row = (offset + done) / row_nbytes;
            const std::size_t within = (offset + done) % row_nbytes;
            const std::size_t count = std::min(row_nbytes - within, nbytes - done);
            visit(base + row * stride + within, done, count);
            done += count;
        }
    }
};

// Runs shorter than this are not worth going around the cache.
inline constexpr std::size_t kWorthStreaming = 512;

/// One run, around the cache if that is asked for and worth it.
inline void copy_run(std::byte* to, const std::byte* from, std::size_t nbytes, bool streaming) noexcept {
    (streaming && nbytes >= kWorthStreaming ? copy_streaming : copy_cached)(to, from, nbytes);
}

/// Copies bytes [offset, offset + nbytes) of the block into a contiguous place that is read again soon.
inline void pack(std::byte* to, const Rows<const std::byte>& from, std::size_t offset, std::size_t nbytes) {
    from.runs(offset, nbytes,
              [to](const std::byte* at, std::size_t done, std::size_t count) { copy_cached(to + done, at, count); });
}

/// Copies a contiguous piece over bytes [offset, offset + nbytes) of the block; `streaming` where that is past the
/// cache.
inline void unpack(const Rows<std::byte>& to, std::size_t offset, const std::byte* from, std::size_t nbytes,
                   bool streaming) {
    to.runs(offset, nbytes, [from, streaming](std::byte* at, std::size_t done, std::size_t count) {
        copy_run(at, from + done, count, streaming);
    });
}

}  // namespace aiodist
