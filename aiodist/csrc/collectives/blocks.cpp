#include "collectives/blocks.hpp"

#include <algorithm>
#include <cstdlib>
#include <new>
#include <numeric>

namespace aiodist {
namespace {

// Arrays of a received list begin at multiples of this, and a received block as a whole.
constexpr std::size_t kAlign = 64;

std::uint64_t product(const Shape& shape, std::size_t from, std::size_t to) noexcept {
    return std::accumulate(shape.dims.begin() + static_cast<std::ptrdiff_t>(from),
                           shape.dims.begin() + static_cast<std::ptrdiff_t>(to), std::uint64_t{1}, std::multiplies<>());
}

std::vector<std::uint64_t> dims_of(const Shape& shape) { return {shape.dims.begin(), shape.dims.begin() + shape.ndim}; }

}  // namespace

std::optional<ListedArray> next_listed(const std::vector<std::uint64_t>& table, std::size_t& at) {
    if (at >= table.size() || table[at] > kMaxDims || table[at] >= table.size() - at) {
        return std::nullopt;
    }
    ListedArray array{table.data() + at + 1, static_cast<std::size_t>(table[at]), 1};
    for (std::size_t i = 0; i < array.ndim; ++i) {
        if (__builtin_mul_overflow(array.elements, array.dims[i], &array.elements)) {
            return std::nullopt;
        }
    }
    at += 1 + array.ndim;
    return array;
}

Blocks::Blocks(const Communicator& communicator, const Call& call)
    : communicator_(communicator),
      call_(call),
      collective_(call.collective),
      root_(call.root),
      rank_(communicator.rank()),
      size_(communicator.size()),
      apart_(collective_ == Collective::scatter || collective_ == Collective::all_to_all),
      wholes_(static_cast<std::size_t>(size_)) {
    for (int q = 0; q < size_; ++q) {
        wholes_[static_cast<std::size_t>(q)] = communicator.header(q).head.nbytes;
    }
    const HeaderCopy& described =
        communicator.header(apart_ || collective_ == Collective::broadcast ? std::max(root_, 0) : 0);
    list_ = (described.head.flags & kList) != 0;
    if (list_) {
        lists_.resize(static_cast<std::size_t>(size_) * static_cast<std::size_t>(size_));
        for (int q = 0; q < size_; ++q) {
            const HeaderCopy& from = communicator.header(q);
            std::size_t at = 0;
            for (int r = 0; r < size_ && is_source(q); ++r) {
                const auto array = next_listed(from.table, at);  // read_header() has seen them all
                lists_[static_cast<std::size_t>(q * size_ + r)] = array ? array->elements * from.head.itemsize : 0;
            }
        }
    } else if (collective_ != Collective::broadcast && collective_ != Collective::barrier) {
        rows_ = std::max<std::uint64_t>(product(described.shape, 0, static_cast<std::size_t>(described.head.axis)), 1);
    }
    if ((described.head.flags & kUneven) != 0) {
        begin_.resize(static_cast<std::size_t>(size_) + 1);
        for (int q = 0; q < size_; ++q) {
            begin_[static_cast<std::size_t>(q) + 1] = begin_[static_cast<std::size_t>(q)] + row_nbytes(q);
        }
    }
}

bool Blocks::is_source(int q) const noexcept {
    return (collective_ != Collective::broadcast && collective_ != Collective::scatter) || q == root_;
}

bool Blocks::is_reader(int r) const noexcept { return collective_ != Collective::gather || r == root_; }

std::uint64_t Blocks::nbytes(int q, int r) const noexcept {
    if (!is_source(q) || !is_reader(r)) {
        return 0;
    }
    if (list_) {
        return cell(q, r);
    }
    return apart_ ? whole(q) / static_cast<std::uint64_t>(size_) : whole(q);
}

Rows<const std::byte> Blocks::source(int q, int r, const std::byte* base) const noexcept {
    const std::uint64_t n = nbytes(q, r);
    if (list_) {
        const auto* const cells = lists_.data() + static_cast<std::size_t>(q) * static_cast<std::size_t>(size_);
        return Rows<const std::byte>::run(base + std::accumulate(cells, cells + r, std::uint64_t{0}), n);
    }
    if (!apart_) {
        return Rows<const std::byte>::run(base, n);
    }
    const std::size_t row = row_nbytes(q) / static_cast<std::uint64_t>(size_);
    return {base + static_cast<std::size_t>(r) * row, row, row_nbytes(q)};
}

Rows<const std::byte> Blocks::own(int r) const noexcept {
    if (list_ && !call_.inputs.empty()) {
        return Rows<const std::byte>::run(call_.inputs[static_cast<std::size_t>(r)].data, cell(rank_, r));
    }
    return call_.inputs.empty() ? source(rank_, r, call_.input) : call_.source();
}

std::uint64_t Blocks::before(int q) const noexcept {
    return begin_.empty() ? static_cast<std::uint64_t>(q) * row_nbytes(q) : begin_[static_cast<std::size_t>(q)];
}

Rows<std::byte> Blocks::target(int q) const noexcept {
    const std::uint64_t n = nbytes(q, rank_);
    switch (collective_) {
        case Collective::all_gather:
        case Collective::gather: {
            const std::uint64_t joined =
                begin_.empty() ? static_cast<std::uint64_t>(size_) * row_nbytes(q) : begin_.back();
            return {call_.output + before(q), row_nbytes(q), joined};
        }
        case Collective::all_to_all:
            if (list_) {
                return Rows<std::byte>::run(call_.outputs[static_cast<std::size_t>(q)].data, n);
            } else {
                const std::size_t row = row_nbytes(q) / static_cast<std::uint64_t>(size_);
                return {call_.output + static_cast<std::size_t>(q) * row, row, row_nbytes(q)};
            }
        default:
            return call_.target(0, n);
    }
}

void Blocks::make_room(Request& request) const {
    Call& call = request.call;
    if (call.has_place() || !is_reader(rank_)) {
        return;
    }
    const HeaderCopy& from = communicator_.header(std::max(root_, 0));
    Received& received = request.received;
    received.dtype = static_cast<DType>(from.head.dtype);
    received.itemsize = from.head.itemsize;
    received.text = from.text;
    Received::Array array{0, dims_of(from.shape)};
    const auto axis = static_cast<std::size_t>(std::max<std::int8_t>(from.head.axis, 0));
    if (list_) {
        received.list = collective_ == Collective::all_to_all;
        for (int q = received.list ? 0 : root_; q < (received.list ? size_ : root_ + 1); ++q) {
            std::size_t at = 0;
            std::optional<ListedArray> mine;
            for (int r = 0; r <= rank_; ++r) {
                mine = next_listed(communicator_.header(q).table, at);
            }
            received.arrays.push_back({received.nbytes, {mine->dims, mine->dims + mine->ndim}});
            received.nbytes = round_up(received.nbytes + cell(q, rank_), kAlign);
        }
        received.nbytes = received.list ? received.nbytes : cell(root_, rank_);
    } else {
        received.nbytes = nbytes(std::max(root_, 0), rank_);
        if (collective_ == Collective::scatter) {
            array.shape[axis] /= static_cast<std::uint64_t>(size_);
        } else if (!begin_.empty()) {  // joined: only uneven calls come without a place
            array.shape.resize(std::max<std::size_t>(array.shape.size(), 1));
            array.shape[axis] = 0;
            received.nbytes = rows_ * begin_.back();
            for (int q = 0; q < size_; ++q) {
                const HeaderCopy& part = communicator_.header(q);
                array.shape[axis] += part.shape.ndim == 0 ? 1 : part.shape.dims[axis];
            }
        }
        received.arrays.push_back(std::move(array));
    }
    received.data.reset(static_cast<std::byte*>(
        std::aligned_alloc(kAlign, round_up(std::max<std::uint64_t>(received.nbytes, 1), kAlign))));
    if (!received.data) {
        throw std::bad_alloc();
    }
    call.output = received.data.get();
    if (received.list) {
        for (const Received::Array& one : received.arrays) {
            call.outputs.push_back({received.data.get() + one.offset, one.offset});
        }
        call.outputs.push_back({nullptr, received.nbytes});
    }
}

}  // namespace aiodist
