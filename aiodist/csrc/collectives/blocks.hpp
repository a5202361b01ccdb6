#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "collectives/rows.hpp"
#include "communicator.hpp"

namespace aiodist {

/// Which bytes of which member go where, for the collectives that move without reducing: member q has a block for
/// member r. A pure function of the members' headers, which agree; what is needed of them later is copied, since the
/// next call's headers take their place while this one still moves.
class Blocks {
 public:
    Blocks(const Communicator& communicator, const Call& call);

    /// True where a member has another block for each reader; otherwise all read the same one, its whole array.
    bool apart() const noexcept { return apart_; }
    /// Bytes of q's block for r.
    std::uint64_t nbytes(int q, int r) const noexcept;
    /// Where q's block for r lies in the whole that q brings, if that whole lies at `base`.
    Rows<const std::byte> source(int q, int r, const std::byte* base) const noexcept;
    /// Where this member's block for r lies.
    Rows<const std::byte> own(int r) const noexcept;
    /// Where q's block goes in this member's result.
    Rows<std::byte> target(int q) const noexcept;
    /// Makes room for a result whose extents only the headers told, and points the call there. Does nothing where there
    /// is room, or no result.
    /// Reads the headers once more: call it at once.
    void make_room(Request& request) const;

 private:
    bool is_source(int q) const noexcept;
    bool is_reader(int r) const noexcept;
    std::uint64_t cell(int q, int r) const noexcept {
        return lists_[static_cast<std::size_t>(q) * static_cast<std::size_t>(size_) + static_cast<std::size_t>(r)];
    }
    std::uint64_t whole(int q) const noexcept { return wholes_[static_cast<std::size_t>(q)]; }
    std::uint64_t row_nbytes(int q) const noexcept { return whole(q) / rows_; }
    std::uint64_t before(int q) const noexcept;

    const Communicator& communicator_;
    const Call& call_;
    const Collective collective_;
    const int root_;
    const int rank_;
    const int size_;
    const bool apart_;
    bool list_ = false;
    std::vector<std::uint64_t> wholes_;  // bytes that each member brings
    std::uint64_t rows_ = 1;             // product of the extents before the axis
    std::vector<std::uint64_t> begin_;   // of each member's part in a joined row; empty where all are alike
    std::vector<std::uint64_t> lists_;   // nbytes of (from, to) where members bring lists
};

/// One array of a list, as a header's table describes it.
struct ListedArray {
    const std::uint64_t* dims = nullptr;
    std::size_t ndim = 0;
    std::uint64_t elements = 0;
};

/// Reads the next array of a table and moves `at` on; nothing where the table is no such list.
std::optional<ListedArray> next_listed(const std::vector<std::uint64_t>& table, std::size_t& at);

}  // namespace aiodist
