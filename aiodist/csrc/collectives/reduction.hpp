#pragma once

#include <cstddef>
#include <vector>

#include "collectives/rows.hpp"
#include "kernels/reduce.hpp"
#include "request.hpp"

namespace aiodist {

/// In place of a chunk's number: all of the vector.
inline constexpr int kWholeVector = -1;

/// How one reduction's elements are divided among the ranks. A chunk is the share that one rank reduces.
class Reduction {
 public:
    Reduction(const Call& call, int size);

    std::size_t in_itemsize() const noexcept { return in_itemsize_; }
    std::size_t out_itemsize() const noexcept { return out_itemsize_; }
    Fold kernel() const noexcept { return kernel_; }
    std::size_t divisor() const noexcept { return size_; }
    /// First element of chunk q in the vector; of an all_reduce, where the vector is cut into runs.
    std::size_t begin(int q) const noexcept;
    /// Elements of chunk q.
    std::size_t count(int q) const noexcept;
    /// Elements of the largest chunk.
    std::size_t largest() const noexcept { return chunk_; }
    /// Where chunk q lies in a whole input at `base`.
    Rows<const std::byte> input_of(const std::byte* base, int q) const noexcept;

 private:
    std::size_t size_;
    std::size_t in_itemsize_;
    std::size_t out_itemsize_;
    std::size_t total_;  // elements
    std::size_t chunk_;
    std::size_t row_nbytes_ = 0;  // of a reduce_scatter's input along its axis; 0: chunks are runs
    Fold kernel_;
};

/// Folds pieces of one chunk from all ranks in rank order, block by block so that strided sources can be packed in the
/// cache.
class FoldInto {
 public:
    FoldInto(const Reduction& reduction, int size);
    /// Where rank q's contribution lies; element 0 of the rows is element 0 of what run() counts.
    void source(int q, Rows<const std::byte> rows) noexcept { sources_[static_cast<std::size_t>(q)] = rows; }
    /// out[i] = fold over q of source q [first + i], for i < count.
    void run(std::byte* out, std::size_t first, std::size_t count);

 private:
    const Reduction& reduction_;
    std::vector<Rows<const std::byte>> sources_;
    std::vector<const void*> pointers_;
    std::vector<std::byte> scratch_;
};

}  // namespace aiodist
