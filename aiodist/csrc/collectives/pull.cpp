// broadcast and all_gather of arrays that do not fit a header slot.
//
// Every source stages its array, segment by segment, in one ring in its own memory (or has it in shared memory
// already); every rank copies from each source. Round t handles segment t of every source:
//
//   stage t   when every reader has copied t − slots
//   copy t    when every source that has a segment t has staged it

#include <algorithm>

#include "collectives/operation.hpp"
#include "collectives/rows.hpp"

namespace aiodist {
namespace {

constexpr std::size_t kStreamingNbytes = std::size_t{4} << 20;

class PullOperation final : public Operation {
 public:
    PullOperation(Communicator& communicator, Request& request)
        : Operation(communicator, request), call_(request.call), slots_(communicator.staging_slots()) {
        if (call_.collective == Collective::broadcast) {
            receive_into(request, communicator.header(call_.root));
        }
        std::size_t total = 0;
        for (int q = 0; q < size_; ++q) {
            rounds_ = std::max(rounds_, rounds(q));
            total += is_source(q) ? party(q).nbytes : 0;
        }
        for (int q = 0; q < size_ && size_ > 1; ++q) {
            const bool staged_here = q != rank_ || communicator.staging() != nullptr;
            require(!is_source(q) || party(q).input != nullptr || (party(q).staging != nullptr && staged_here));
        }
        first_slot_ = communicator.take_slots(rounds_);
        streaming_ = total >= kStreamingNbytes;
        if (party(rank_).input != nullptr || size_ == 1) {
            staged_ = rounds(rank_);
        }
    }

    bool step() override { return copy() || stage(); }

    bool finished() override {
        if (staged_ < rounds(rank_) || copied_ < rounds_) {
            return false;
        }
        return !is_source(rank_) || others([this](int q) { return copied(q, rounds_); });
    }

    std::vector<int> waits_for() override {
        std::vector<int> ranks;
        for (int q = 0; q < size_; ++q) {
            const bool feeds = is_source(q) && party(q).input == nullptr && copied_ < rounds_ && !staged(q, rounds(q));
            const bool reads = is_source(rank_) && !copied(q, rounds_);
            if (q != rank_ && (feeds || reads)) {
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

    bool is_source(int q) const noexcept { return call_.collective == Collective::all_gather || q == call_.root; }

    std::uint64_t rounds(int q) const noexcept {
        return is_source(q) ? (party(q).nbytes + segment_ - 1) / segment_ : 0;
    }

    std::size_t nbytes(int q, std::uint64_t round) const noexcept {
        const std::size_t first = round * segment_;
        return is_source(q) && first < party(q).nbytes ? std::min(segment_, party(q).nbytes - first) : 0;
    }

    Rows<std::byte> place(int q) const noexcept {
        if (call_.collective != Collective::all_gather) {
            return {call_.output, std::max<std::size_t>(party(q).nbytes, 1), std::max<std::size_t>(party(q).nbytes, 1)};
        }
        const std::size_t row = call_.nbytes / call_.rows;
        return {call_.output + static_cast<std::size_t>(q) * row, row, static_cast<std::size_t>(size_) * row};
    }

    std::size_t slot(std::uint64_t round) const noexcept { return (first_slot_ + round) % slots_ * segment_; }

    bool stage() {
        if (staged_ == rounds(rank_)) {
            return false;
        }
        const std::uint64_t round = staged_;
        if (round >= slots_ && !others([&](int q) { return copied(q, round - slots_ + 1); })) {
            return false;
        }
        copy_cached(communicator_.staging() + slot(round), call_.input + round * segment_, nbytes(rank_, round));
        publish(communicator_.mine().staged, ++staged_);
        return true;
    }

    bool copy() {
        if (copied_ == rounds_) {
            return false;
        }
        const std::uint64_t round = copied_;
        const bool ready =
            others([&](int q) { return nbytes(q, round) == 0 || party(q).input != nullptr || staged(q, round + 1); });
        if (!ready) {
            return false;
        }
        const std::size_t offset = round * segment_;
        for (int step = 0; step < size_; ++step) {
            const int q = (rank_ + step) % size_;
            const Rows<std::byte> to = place(q);
            const bool in_place = q == rank_ && to.base == call_.input;
            if (in_place || nbytes(q, round) == 0) {
                continue;
            }
            const std::byte* from = party(q).staging + slot(round);
            if (q == rank_) {
                from = call_.input + offset;
            } else if (party(q).input != nullptr) {
                from = party(q).input + offset;
            }
            unpack(to, offset, from, nbytes(q, round), streaming_);
        }
        publish(communicator_.mine().copied, ++copied_);
        return true;
    }

    const Call& call_;
    const std::uint64_t slots_;
    std::uint64_t rounds_ = 0;
    std::uint64_t first_slot_ = 0;
    bool streaming_ = false;
    std::uint64_t staged_ = 0;
    std::uint64_t copied_ = 0;
};

}  // namespace

std::unique_ptr<Operation> make_pull(Communicator& communicator, Request& request) {
    return std::make_unique<PullOperation>(communicator, request);
}

}  // namespace aiodist
