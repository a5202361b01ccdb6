// The collectives that only move, of arrays that do not fit a header slot.
//
// Every member stages its blocks, segment by segment, in a ring in its own memory (or has its array in shared memory
// already); the readers copy from there. Where all read the same block it is staged once. Round t handles segment t of
// every block:
//
//   stage t   when every reader has copied t − depth
//   copy t    when everyone who has a segment t for me has staged it
//
// What a member brings to an uneven call may fit its slot though another's does not: that is taken from the slot at
// once, and its member stages nothing.

#include <algorithm>

#include "collectives/blocks.hpp"
#include "collectives/operation.hpp"

namespace aiodist {
namespace {

class PullOperation final : public Operation {
 public:
    PullOperation(Communicator& communicator, Request& request)
        : Operation(communicator, request),
          call_(request.call),
          blocks_(communicator, request.call),
          streams_(blocks_.apart() ? static_cast<std::uint64_t>(size_) : 1),
          depth_(communicator.staging_slots() / streams_) {
        blocks_.make_room(request);
        std::uint64_t mine = 0;
        std::uint64_t total = 0;
        std::uint64_t most = 0;
        for (int q = 0; q < size_; ++q) {
            total += blocks_.nbytes(q, rank_);
            to_copy_ = std::max(to_copy_, rounds(q, rank_));
            if (q != rank_) {
                mine = std::max(mine, rounds(rank_, q));
            }
            const bool readable = party(q).input != nullptr || party(q).staging != nullptr;
            for (int r = 0; r < size_; ++r) {
                most = std::max(most, rounds(q, r));
                require(r == q || rounds(q, r) == 0 || readable);
            }
        }
        first_slot_ = communicator.take_slots(most * streams_);
        take_from_slots();
        to_stage_ = party(rank_).input != nullptr ? 0 : mine;
        require(to_stage_ == 0 || communicator.staging() != nullptr);
        streaming_ = total >= kStreamingNbytes;
    }

    bool step() override { return copy() || stage(); }

    bool finished() override {
        return staged_ == to_stage_ && copied_ == to_copy_ &&
               others([this](int q) { return copied(q, rounds(rank_, q)); });
    }

    std::vector<int> waits_for() override {
        std::vector<int> ranks;
        for (int q = 0; q < size_; ++q) {
            const bool feeds = party(q).input != nullptr || staged(q, rounds(q, rank_));
            if (q != rank_ && (!feeds || !copied(q, rounds(rank_, q)))) {
                ranks.push_back(q);
            }
        }
        return ranks;
    }

 private:
    template <typename Predicate>
    bool others(Predicate predicate) {
        for (int step = 1; step < size_; ++step) {
            if (!predicate((rank_ + step) % size_)) {
                return false;
            }
        }
        return true;
    }

    bool in_slot(int q) const noexcept { return party(q).nbytes <= communicator_.tuning().slot_nbytes; }

    /// Segments of q's block for r.
    std::uint64_t rounds(int q, int r) const noexcept {
        return in_slot(q) ? 0 : (blocks_.nbytes(q, r) + segment_ - 1) / segment_;
    }

    void take_from_slots() {
        for (int q = 0; q < size_; ++q) {
            const std::uint64_t count = in_slot(q) ? blocks_.nbytes(q, rank_) : 0;
            if (count != 0 && !(q == rank_ && in_place(blocks_.target(q)))) {
                transfer(blocks_.target(q), blocks_.source(q, rank_, communicator_.header(q).payload), 0, count, false);
            }
        }
    }

    /// Bytes of segment `round` of q's block for r.
    std::size_t nbytes(int q, int r, std::uint64_t round) const noexcept {
        const std::uint64_t all = in_slot(q) ? 0 : blocks_.nbytes(q, r);
        const std::uint64_t first = round * segment_;
        return first < all ? std::min<std::uint64_t>(segment_, all - first) : 0;
    }

    std::size_t slot(int reader, std::uint64_t round) const noexcept {
        const std::uint64_t place = blocks_.apart() ? static_cast<std::uint64_t>(reader) : 0;
        return (first_slot_ + round * streams_ + place) % communicator_.staging_slots() * segment_;
    }

    bool stage() {
        if (staged_ == to_stage_) {
            return false;
        }
        const std::uint64_t round = staged_;
        if (round >= depth_ &&
            !others([&](int q) { return copied(q, std::min(round - depth_ + 1, rounds(rank_, q))); })) {
            return false;
        }
        for (int step = 1; step < size_; ++step) {
            const int q = (rank_ + step) % size_;
            const std::size_t count = nbytes(rank_, q, round);
            if (count != 0) {
                communicator_.passing().copy(communicator_.staging() + slot(q, round), blocks_.own(q), round * segment_,
                                             count);
            }
            if (count != 0 && !blocks_.apart()) {
                break;
            }
        }
        publish(communicator_.mine().staged, ++staged_);
        return true;
    }

    bool copy() {
        if (copied_ == to_copy_) {
            return false;
        }
        const std::uint64_t round = copied_;
        const bool ready = others(
            [&](int q) { return nbytes(q, rank_, round) == 0 || party(q).input != nullptr || staged(q, round + 1); });
        if (!ready) {
            return false;
        }
        const std::size_t offset = round * segment_;
        for (int step = 0; step < size_; ++step) {
            const int q = (rank_ + step) % size_;
            const std::size_t count = nbytes(q, rank_, round);
            const Rows<std::byte> to = blocks_.target(q);
            if (count == 0 || (q == rank_ && in_place(to))) {
                continue;
            }
            if (q == rank_) {
                transfer(to, blocks_.own(q), offset, count, streaming_);
            } else if (party(q).input != nullptr) {
                transfer(to, blocks_.source(q, rank_, party(q).input), offset, count, streaming_);
            } else {
                unpack(to, offset, party(q).staging + slot(rank_, round), count, streaming_);
            }
        }
        publish(communicator_.mine().copied, ++copied_);
        return true;
    }

    /// True where this member's own block lies where it belongs already.
    bool in_place(const Rows<std::byte>& to) const noexcept {
        if (to.pieces != nullptr) {
            return !call_.inputs.empty() && call_.inputs.front().data == call_.outputs.front().data;
        }
        const Rows<const std::byte> from = blocks_.own(rank_);
        return from.pieces == nullptr && to.base == from.base;
    }

    const Call& call_;
    const Blocks blocks_;
    const std::uint64_t streams_;  // slots a round
    const std::uint64_t depth_;    // rounds that the ring holds
    std::uint64_t first_slot_ = 0;
    std::uint64_t to_stage_ = 0;  // rounds
    std::uint64_t to_copy_ = 0;
    bool streaming_ = false;
    std::uint64_t staged_ = 0;
    std::uint64_t copied_ = 0;
};

}  // namespace

std::unique_ptr<Operation> make_pull(Communicator& communicator, Request& request) {
    return std::make_unique<PullOperation>(communicator, request);
}

}  // namespace aiodist
