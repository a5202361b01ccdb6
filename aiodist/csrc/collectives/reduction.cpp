#include "collectives/reduction.hpp"

#include <algorithm>

#include "kernels/float_environment.hpp"

namespace aiodist {
namespace {

// Chunks begin at multiples of this many elements, so that no two ranks write one cache line.
constexpr std::size_t kChunkUnit = 128;
constexpr std::size_t kScratchNbytes = 8192;

std::size_t up(std::size_t value, std::size_t unit) { return (value + unit - 1) / unit * unit; }

}  // namespace

Reduction::Reduction(const Call& call, int size)
    : size_(static_cast<std::size_t>(size)),
      in_itemsize_(itemsize(call.dtype)),
      out_itemsize_(itemsize(result_dtype(call.dtype, call.op))),
      total_(call.nbytes / std::max<std::size_t>(in_itemsize_, 1)),
      chunk_(0),
      kernel_(fold_kernel(call.dtype, call.op)) {
    if (call.collective == Collective::reduce_scatter) {
        chunk_ = total_ / size_;
        row_nbytes_ = call.nbytes / call.rows;
    } else {
        chunk_ = up((total_ + size_ - 1) / size_, kChunkUnit);
    }
}

std::size_t Reduction::begin(int q) const noexcept {
    return q == kWholeVector ? 0 : std::min(total_, static_cast<std::size_t>(q) * chunk_);
}

std::size_t Reduction::count(int q) const noexcept {
    return q == kWholeVector ? total_ : std::min(chunk_, total_ - begin(q));
}

Rows<const std::byte> Reduction::input_of(const std::byte* base, int q) const noexcept {
    if (row_nbytes_ != 0) {
        const std::size_t piece = row_nbytes_ / size_;
        return {base + static_cast<std::size_t>(q) * piece, piece, row_nbytes_};
    }
    const std::size_t nbytes = std::max<std::size_t>(count(q) * in_itemsize_, 1);
    return {base + begin(q) * in_itemsize_, nbytes, nbytes};
}

FoldInto::FoldInto(const Reduction& reduction, int size)
    : reduction_(reduction), sources_(static_cast<std::size_t>(size)), pointers_(static_cast<std::size_t>(size)) {}

void FoldInto::run(std::byte* out, std::size_t first, std::size_t count) {
    const FloatEnvironment environment;
    const std::size_t item = reduction_.in_itemsize();
    const bool straight = std::all_of(sources_.begin(), sources_.end(),
                                      [&](const auto& rows) { return rows.contiguous((first + count) * item); });
    const std::size_t block = straight ? count : kScratchNbytes / item;
    if (!straight) {
        scratch_.resize(sources_.size() * kScratchNbytes);
    }
    for (std::size_t done = 0; done < count; done += block) {
        const std::size_t some = std::min(block, count - done);
        const std::size_t offset = (first + done) * item;
        for (std::size_t q = 0; q < sources_.size(); ++q) {
            const auto& rows = sources_[q];
            if (rows.contiguous(offset + some * item)) {
                pointers_[q] = rows.base + offset;
            } else {
                std::byte* const packed = scratch_.data() + q * kScratchNbytes;
                pack(packed, rows, offset, some * item, false);
                pointers_[q] = packed;
            }
        }
        reduction_.kernel()(out + done * reduction_.out_itemsize(), pointers_.data(), pointers_.size(), some,
                            reduction_.divisor());
    }
}

}  // namespace aiodist
