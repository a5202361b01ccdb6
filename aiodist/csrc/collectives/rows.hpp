#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/copy.hpp"

namespace aiodist {

/// One of several arrays that move as one: `begin` is where it lies in the whole. A list of pieces ends with one that
/// has no data and begins where the whole ends.
template <typename Byte>
struct Piece {
    Byte* data = nullptr;
    std::uint64_t begin = 0;
};
template <typename Byte>
using Pieces = std::vector<Piece<Byte>>;

/// A block of bytes in order: rows at equal distances (of an array seen along one axis; one row is a contiguous block),
/// or a part of pieces, from `first` on.
template <typename Byte>
struct Rows {
    Byte* base = nullptr;
    std::size_t row_nbytes = 0;
    std::size_t stride = 0;
    const Pieces<Byte>* pieces = nullptr;
    std::size_t first = 0;

    static Rows run(Byte* at, std::size_t nbytes) noexcept {
        const std::size_t row = std::max<std::size_t>(nbytes, 1);
        return {at, row, row};
    }
    static Rows of(const Pieces<Byte>& pieces, std::size_t first) noexcept { return {nullptr, 0, 0, &pieces, first}; }

    bool contiguous(std::size_t nbytes) const noexcept {
        return pieces == nullptr && (row_nbytes == stride || nbytes <= row_nbytes);
    }

    /// Calls visit(pointer, done, count) for each contiguous run of the block's bytes [offset, offset + nbytes).
    template <typename Visit>
    void runs(std::size_t offset, std::size_t nbytes, Visit visit) const {
        if (pieces != nullptr) {
            piece_runs(first + offset, nbytes, visit);
            return;
        }
        for (std::size_t done = 0; done < nbytes;) {
            const std::size_t row = (offset + done) / row_nbytes;
            const std::size_t within = (offset + done) % row_nbytes;
            const std::size_t count = std::min(row_nbytes - within, nbytes - done);
            visit(base + row * stride + within, done, count);
            done += count;
        }
    }

 private:
    template <typename Visit>
    void piece_runs(std::size_t from, std::size_t nbytes, Visit visit) const {
        const auto begins_after = [](std::size_t at, const Piece<Byte>& piece) { return at < piece.begin; };
        auto next = std::upper_bound(pieces->begin(), pieces->end(), from, begins_after);
        for (std::size_t done = 0; done < nbytes; ++next) {
            const Piece<Byte>& piece = *std::prev(next);
            const std::size_t within = from + done - piece.begin;
            const std::size_t count = std::min<std::size_t>(next->begin - piece.begin - within, nbytes - done);
            if (count != 0) {
                visit(piece.data + within, done, count);
            }
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

/// Copies bytes [offset, offset + nbytes) of the block into a contiguous place.
inline void pack(std::byte* to, const Rows<const std::byte>& from, std::size_t offset, std::size_t nbytes,
                 bool streaming) {
    from.runs(offset, nbytes, [to, streaming](const std::byte* at, std::size_t done, std::size_t count) {
        copy_run(to + done, at, count, streaming);
    });
}

/// Copies a contiguous piece over bytes [offset, offset + nbytes) of the block; `streaming` where that is past the
/// cache.
inline void unpack(const Rows<std::byte>& to, std::size_t offset, const std::byte* from, std::size_t nbytes,
                   bool streaming) {
    to.runs(offset, nbytes, [from, streaming](std::byte* at, std::size_t done, std::size_t count) {
        copy_run(at, from + done, count, streaming);
    });
}

/// Copies bytes [offset, offset + nbytes) of one block over the same bytes of another.
inline void transfer(const Rows<std::byte>& to, const Rows<const std::byte>& from, std::size_t offset,
                     std::size_t nbytes, bool streaming) {
    from.runs(offset, nbytes, [&](const std::byte* at, std::size_t done, std::size_t count) {
        unpack(to, offset + done, at, count, streaming);
    });
}

}  // namespace aiodist
