// Reading the members' headers and deciding whether they agree. What a header says is untrusted: it is checked here
// before anything computes an address from it.

#include <algorithm>
#include <cstring>
#include <map>

#include "collectives/blocks.hpp"
#include "collectives/varint.hpp"
#include "communicator.hpp"

namespace aiodist {
namespace {

Collective collective_of(const HeaderCopy& copy) { return static_cast<Collective>(copy.head.collective); }

bool has(const HeaderCopy& copy, std::uint16_t flag) { return (copy.head.flags & flag) != 0; }

bool refused(const HeaderCopy& copy) { return copy.head.kind == static_cast<std::uint8_t>(HeaderKind::refused); }

bool same_elements(const HeaderCopy& a, const HeaderCopy& b) {
    return a.head.dtype == b.head.dtype && a.head.itemsize == b.head.itemsize && a.text == b.text;
}

/// True where the arrays that two members bring are alike, but for their extents along `axis`.
bool same_array(const HeaderCopy& a, const HeaderCopy& b, std::size_t axis = kMaxDims) {
    if (!same_elements(a, b) || a.shape.ndim != b.shape.ndim) {
        return false;
    }
    for (std::size_t i = 0; i < a.shape.ndim; ++i) {
        if (i != axis && a.shape.dims[i] != b.shape.dims[i]) {
            return false;
        }
    }
    return true;
}

/// True where `other` expects what the root of a scatter has for it.
bool fits_share(const HeaderCopy& root, const HeaderCopy& other, int size) {
    if (!has(other, kShare) || !same_elements(root, other)) {
        return false;
    }
    if (has(root, kList)) {
        return true;  // whether it has the shape of its array is a matter of its `out`: see misfits()
    }
    bool fits = root.shape.ndim == other.shape.ndim;
    for (std::size_t i = 0; fits && i < root.shape.ndim; ++i) {
        const bool divided = i == static_cast<std::size_t>(root.head.axis);
        fits = other.shape.dims[i] == root.shape.dims[i] / static_cast<std::uint64_t>(divided ? size : 1);
    }
    return fits;
}

/// True where `other` means the axis along which the root of a scatter divides. A receiver that does not know how many
/// dimensions there are may count from the end; one that expects an array of a list has kNoAxis.
bool same_axis(const HeaderCopy& root, const HeaderCopy& other) {
    const int from_end = other.head.axis < 0 ? root.shape.ndim : 0;
    return has(root, kList) || root.head.axis == other.head.axis + from_end;
}

/// True where both ask the same question, whatever arrays they bring.
bool same_call(const HeaderCopy& a, const HeaderCopy& b) {
    const auto form = static_cast<std::uint16_t>(kMany | kUneven | kObject | kPickled);
    const bool same_list = collective_of(a) == Collective::scatter || has(a, kList) == has(b, kList);
    return a.head.collective == b.head.collective && a.head.op == b.head.op && a.head.root == b.head.root &&
           (a.head.flags & form) == (b.head.flags & form) && same_list;
}

/// True where `other` brings, or expects, what goes with `first`: the root's header where a root gives, else any.
bool same_arrays(const HeaderCopy& first, const HeaderCopy& other, int size) {
    switch (collective_of(first)) {
        case Collective::barrier:
            return true;
        case Collective::broadcast:
            return has(other, kWildcard) || (same_array(first, other) && first.table == other.table);
        case Collective::scatter:
            return &first == &other ||
                   (same_axis(first, other) && (has(other, kWildcard) || fits_share(first, other, size)));
        case Collective::all_gather:
        case Collective::gather:
            return first.head.axis == other.head.axis &&
                   same_array(first, other, has(first, kUneven) ? static_cast<std::size_t>(first.head.axis) : kMaxDims);
        case Collective::reduce_scatter:
            return first.head.axis == other.head.axis && same_array(first, other);
        case Collective::all_to_all:
            if (has(first, kList)) {
                return same_elements(first, other);
            }
            return first.head.axis == other.head.axis && same_array(first, other);
        default:
            return same_array(first, other) && first.table == other.table;
    }
}

bool counts_agree(const HeaderCopy& copy, int size) {
    std::uint64_t nbytes = copy.head.itemsize;
    if (has(copy, kList)) {
        std::uint64_t elements = 0;
        std::size_t at = 0;
        for (int r = 0; r < size; ++r) {
            const auto array = next_listed(copy.table, at);
            if (!array || __builtin_add_overflow(elements, array->elements, &elements)) {
                return false;
            }
        }
        return !__builtin_mul_overflow(nbytes, elements, &nbytes) && nbytes == copy.head.nbytes;
    }
    for (std::size_t i = 0; i < copy.shape.ndim; ++i) {
        if (__builtin_mul_overflow(nbytes, copy.shape.dims[i], &nbytes)) {
            return false;
        }
    }
    return nbytes == copy.head.nbytes;
}

/// True where the axis is one of the array, and divides where the collective divides.
bool axis_is_good(const HeaderCopy& copy, int size) {
    const Collective collective = collective_of(copy);
    const bool divides = collective == Collective::scatter || collective == Collective::all_to_all ||
                         collective == Collective::reduce_scatter;
    const bool joins = collective == Collective::all_gather || collective == Collective::gather;
    if (has(copy, kList) || has(copy, kShare) || (!divides && !joins)) {
        return true;
    }
    const std::size_t ndim = std::max<std::size_t>(copy.shape.ndim, joins ? 1 : 0);
    if (copy.head.axis < 0 || static_cast<std::size_t>(copy.head.axis) >= ndim) {
        return false;
    }
    return joins || copy.shape.dims[static_cast<std::size_t>(copy.head.axis)] % static_cast<std::uint64_t>(size) == 0;
}

}  // namespace

bool Communicator::read_header(int q, std::uint64_t seq, HeaderCopy& copy) {
    const std::byte* const at = member(q).slots + seq % tuning().slots * slot_stride(tuning());
    Header& head = copy.head;
    std::memcpy(&head, at, sizeof head);
    const std::size_t shape_nbytes = head.ndim * sizeof(std::uint64_t);
    const std::size_t meta_nbytes = sizeof head + shape_nbytes + head.table_nbytes + head.text_nbytes;
    if (head.seq != seq || head.ndim > kMaxDims || head.nbytes > kMaxNbytes || meta_nbytes > kMetaNbytes ||
        (head.kind != static_cast<std::uint8_t>(HeaderKind::call) &&
         head.kind != static_cast<std::uint8_t>(HeaderKind::refused))) {
        return false;
    }
    copy.shape.ndim = head.ndim;
    std::memcpy(copy.shape.dims.data(), at + sizeof head, shape_nbytes);
    const char* const rest = reinterpret_cast<const char*>(at + sizeof head + shape_nbytes);
    if (head.text_nbytes != 0 || !copy.text.empty()) {
        copy.text.assign(rest + head.table_nbytes, head.text_nbytes);
    }
    copy.payload = at + payload_at(meta_nbytes, head.nbytes);
    if (has(copy, kCopied)) {
        copy.payload = member(q).process->arena->at(head.input_offset, head.nbytes);
        if (copy.payload == nullptr) {
            return false;
        }
    }
    if (refused(copy)) {
        return true;  // nothing of it is used but its text
    }
    if (head.table_nbytes != 0 || !copy.table.empty()) {
        // a copy first: it must not change between the check and the use
        const std::string table(rest, head.table_nbytes);
        if (!read_varints(table, copy.table)) {
            return false;
        }
    }
    if (has(copy, kWildcard)) {
        const Collective collective = collective_of(copy);
        return head.nbytes == 0 && head.ndim == 0 &&
               (collective == Collective::broadcast || collective == Collective::scatter);
    }
    const std::size_t item = itemsize(static_cast<DType>(head.dtype));
    return collective_of(copy) == Collective::barrier ||
           (counts_agree(copy, size()) && axis_is_good(copy, size()) && (item == 0 || item == head.itemsize));
}

bool Communicator::all_at_hand() const noexcept {
    for (int q = 0; q < size(); ++q) {
        if (!at_hand(q)) {
            return false;
        }
    }
    return true;
}

FailurePtr Communicator::verdict(const Request& request) const {
    const HeaderCopy& mine = header(rank());
    bool good = true;
    for (const HeaderCopy& copy : headers_) {
        if (refused(copy)) {
            return refusals(request);
        }
        good = good && same_call(mine, copy);
    }
    const Collective collective = collective_of(mine);
    const bool root_gives = collective == Collective::broadcast || collective == Collective::scatter;
    const bool rooted = root_gives || collective == Collective::reduce || collective == Collective::gather;
    good = good && (!rooted || (mine.head.root >= 0 && mine.head.root < size()));
    if (good) {
        const HeaderCopy& first = root_gives ? header(mine.head.root) : mine;
        good = !root_gives || !(has(first, kWildcard) || has(first, kShare));
        for (int q = 0; q < size() && good; ++q) {
            good = same_arrays(first, header(q), size());
        }
    }
    if (!good) {
        return mismatch(request);
    }
    const bool uneven = std::any_of(headers_.begin(), headers_.end(),
                                    [](const HeaderCopy& copy) { return has(copy, kUneven) || has(copy, kList); });
    return uneven ? misfits(request) : nullptr;
}

/// Of an uneven call only all headers together tell how large an output must be: refuses it where one is not.
FailurePtr Communicator::misfits(const Request& request) const {
    std::map<int, std::string> found;
    for (int r = 0; r < size(); ++r) {
        std::string what = has(header(r), kUneven)  ? misfit_of_joined(r)
                           : has(header(r), kShare) ? misfit_of_share(r)
                                                    : misfit_of_list(r);
        if (!what.empty()) {
            found[r] = std::move(what);
        }
    }
    if (found.empty()) {
        return nullptr;
    }
    const auto mine = found.find(rank());
    auto failure =
        std::make_shared<Failure>(Failure{mine == found.end() ? FailureKind::refused : FailureKind::argument, {}, {}});
    std::string reasons;
    for (const auto& [r, what] : found) {
        failure->ranks.push_back(r);
        reasons +=
            "\n  rank " + std::to_string(r) + ": " + what + engine_->site_text(*member(r).process, header(r).head.site);
    }
    failure->text =
        describe(request) + (mine == found.end() ? ": the call was refused" + reasons : ": " + mine->second);
    return failure;
}

std::string Communicator::misfit_of_joined(int r) const {
    const HeaderCopy& copy = header(r);
    if (copy.table.empty() || copy.table[0] == 0 ||
        (copy.head.collective == static_cast<std::uint8_t>(Collective::gather) && copy.head.root != r)) {
        return {};
    }
    std::uint64_t joined = 0;
    for (const HeaderCopy& part : headers_) {
        joined += part.shape.ndim == 0 ? 1 : part.shape.dims[static_cast<std::size_t>(part.head.axis)];
    }
    const std::uint64_t given = copy.table[0] - 1;
    return given == joined ? std::string()
                           : "out has " + std::to_string(given) + " elements along axis " +
                                 std::to_string(copy.head.axis) + ", the result " + std::to_string(joined);
}

std::string Communicator::misfit_of_share(int r) const {
    const Shape& given = header(r).shape;
    std::size_t at = 0;
    std::optional<ListedArray> share;
    for (int q = 0; q <= r; ++q) {
        share = next_listed(header(header(r).head.root).table, at);
    }
    const bool fits = share && std::equal(share->dims, share->dims + share->ndim, given.dims.begin(),
                                          given.dims.begin() + given.ndim);
    return fits ? std::string()
                : "out has shape " + shape_text(given.dims.data(), given.ndim) + ", the result " +
                      (share ? shape_text(share->dims, share->ndim) : std::string("none"));
}

std::string Communicator::misfit_of_list(int r) const {
    const HeaderCopy& copy = header(r);
    if (copy.head.collective != static_cast<std::uint8_t>(Collective::all_to_all)) {
        return {};
    }
    std::size_t at = 0;
    for (int q = 0; q < size(); ++q) {  // what it brings
        (void)next_listed(copy.table, at);
    }
    if (at == copy.table.size()) {
        return {};
    }
    for (int q = 0; q < size(); ++q) {
        std::size_t theirs = 0;
        std::optional<ListedArray> sent;
        for (int k = 0; k <= r; ++k) {
            sent = next_listed(header(q).table, theirs);
        }
        const auto place = next_listed(copy.table, at);
        if (!place || !sent ||
            !std::equal(place->dims, place->dims + place->ndim, sent->dims, sent->dims + sent->ndim)) {
            const auto text = [](const auto& array) {
                return array ? shape_text(array->dims, array->ndim) : std::string("none");
            };
            return "out[" + std::to_string(q) + "] has shape " + text(place) + ", what rank " + std::to_string(q) +
                   " sends " + text(sent);
        }
    }
    return {};
}

}  // namespace aiodist
