// all_reduce, reduce and reduce_scatter of arrays that do not fit a header slot.
//
// The vector is cut into one chunk a rank. Every rank stages the chunks that others own, segment by segment, in rings
// of `depth` slots in its own memory; the owner folds its chunk from all ranks in rank order; in an all_reduce the
// others copy the folded segments out of the owner's memory. Arrays that lie in shared memory are read in place of the
// rings. Round t of each of the three stages handles segment t of every chunk:
//
//   stage t    when every other rank has reduced t − depth     (its slot of my ring is free)
//   reduce t   when every other rank has staged t, and, where my result goes through a ring, has copied t − depth
//   copy t     when every other rank has reduced t
//
// Two ranks whose inputs both lie in shared memory do without owners: each folds the whole vector itself. That moves as
// many lines between their caches and waits once in place of three times. (Not in place: the peer may still have to
// read what would be written. And not past the cache, where the second reading of everything costs more than it saves.)
// So do more ranks with short vectors, of which some lie in shared memory and the others were copied.
//
// In a reduce the root folds the whole vector and nobody else any of it.
//
// tests/model/large.py explores this exhaustively for small bounds.

#include <algorithm>

#include "collectives/operation.hpp"
#include "collectives/reduction.hpp"

namespace aiodist {
namespace {

// A folded block is copied to the caller's array while it is in the first-level cache.
constexpr std::size_t kBlockNbytes = 8192;

class FoldOperation final : public Operation {
 public:
    FoldOperation(Communicator& communicator, Request& request, const Call& call)
        : Operation(communicator, request),
          call_(call),
          reduction_(call, size_),
          fold_(reduction_, size_),
          scatters_(call.collective == Collective::reduce_scatter),
          root_(call.collective == Collective::reduce ? call.root : kEveryone),
          whole_(root_ != kEveryone || (!scatters_ && folds_whole())),
          own_(whole_ ? kWholeVector : rank_),
          slots_a_round_(whole_ ? 1 : static_cast<std::uint64_t>(size_)),
          depth_(communicator.staging_slots() / slots_a_round_),
          elements_(segment_ / std::max(reduction_.in_itemsize(), reduction_.out_itemsize())),
          rounds_(((whole_ ? reduction_.count(kWholeVector) : reduction_.largest()) + elements_ - 1) / elements_),
          result_is_read_(!scatters_ && !whole_ && size_ > 1),
          streaming_(reduction_.count(kWholeVector) * reduction_.out_itemsize() >= kStreamingNbytes) {
        const std::size_t result_nbytes = reduction_.count(kWholeVector) * reduction_.out_itemsize();
        for (int q = 0; q < size_; ++q) {
            // An output is read by its peers only where all of it lies inside the arena.
            if (party(q).output != nullptr && result_is_read_) {
                party(q).output =
                    communicator.member(q).process->arena->at(communicator.header(q).head.output_offset, result_nbytes);
            }
        }
        if (party(rank_).input != nullptr || size_ == 1 || root_ == rank_) {
            staged_ = rounds_;
        }
        if (!folds(rank_)) {
            reduced_ = rounds_;
        }
        if (!result_is_read_) {
            copied_ = rounds_;
        }
        for (int q = 0; q < size_ && size_ > 1; ++q) {
            const bool staged_here = q != rank_ || communicator.staging() != nullptr;
            const bool direct = party(q).input != nullptr && (!result_is_read_ || party(q).output != nullptr);
            require(direct || q == root_ || (party(q).staging != nullptr && staged_here));
        }
        first_slot_ = communicator.take_slots(rounds_ * slots_a_round_);
        block_.resize(result_is_read_ || !call_.outputs.empty() ? kBlockNbytes : 0);
    }

    bool step() override { return copy() || reduce() || stage(); }

    bool finished() override {
        if (staged_ < rounds_ || reduced_ < rounds_ || copied_ < rounds_) {
            return false;
        }
        return others(
            [this](int q) { return !folds(q) || (reduced(q, rounds_) && (!result_is_read_ || copied(q, rounds_))); });
    }

    std::vector<int> waits_for() override {
        std::vector<int> ranks;
        for (int q = 0; q < size_; ++q) {
            const bool folded = !folds(q) || (reduced(q, rounds_) && (!result_is_read_ || copied(q, rounds_)));
            const bool brought =
                !folds(rank_) || reduced_ == rounds_ || party(q).input != nullptr || staged(q, rounds_);
            if (q != rank_ && !(folded && brought)) {
                ranks.push_back(q);
            }
        }
        return ranks;
    }

 private:
    static constexpr int kEveryone = -1;

    /// True where rank q folds anything.
    bool folds(int q) const noexcept { return root_ == kEveryone || q == root_; }

    template <typename Predicate>
    bool others(Predicate predicate) {
        for (int step = 1; step < size_; ++step) {
            if (!predicate((rank_ + step) % size_)) {
                return false;
            }
        }
        return true;
    }

    std::size_t count(int q, std::uint64_t round) const noexcept {
        const std::size_t all = reduction_.count(q);
        const std::size_t first = round * elements_;
        return first < all ? std::min(elements_, all - first) : 0;
    }

    /// A pure function of all headers: every rank must come to the same answer.
    bool folds_whole() const noexcept {
        const std::size_t most = size_ == 2 ? kStreamingNbytes - 1 : copied_nbytes(communicator_.tuning(), size_);
        if (call_.nbytes > most) {
            return false;
        }
        for (int q = 0; q < size_; ++q) {
            const Header& head = communicator_.header(q).head;
            const std::uint64_t apart =
                std::max(head.input_offset, head.output_offset) - std::min(head.input_offset, head.output_offset);
            if (party(q).input == nullptr || apart < head.nbytes) {
                return false;
            }
        }
        return true;
    }

    std::size_t ring(int owner, std::uint64_t round) const noexcept {
        const std::uint64_t place = whole_ ? 0 : static_cast<std::uint64_t>(owner);
        return (first_slot_ + round * slots_a_round_ + place) % communicator_.staging_slots() * segment_;
    }

    bool stage() {
        if (staged_ == rounds_) {
            return false;
        }
        const std::uint64_t round = staged_;
        if (round >= depth_ && !others([&](int q) { return !folds(q) || reduced(q, round - depth_ + 1); })) {
            return false;
        }
        for (int step = 1; step < size_; ++step) {
            const int q = (rank_ + step) % size_;
            const int chunk = whole_ ? kWholeVector : q;
            if (!folds(q)) {
                continue;
            }
            communicator_.passing().copy(communicator_.staging() + ring(q, round), own_input(chunk),
                                         round * elements_ * reduction_.in_itemsize(),
                                         count(chunk, round) * reduction_.in_itemsize());
        }
        publish(communicator_.mine().staged, ++staged_);
        return true;
    }

    bool reduce() {
        if (reduced_ == rounds_) {
            return false;
        }
        const std::uint64_t round = reduced_;
        if (whole_ && staged_ <= round) {
            return false;  // in place, the result would overwrite what the peer still needs; chunk by chunk the two
                           // never meet
        }
        const bool through_ring = result_is_read_ && party(rank_).output == nullptr;
        const bool ready = others([&](int q) {
            return (party(q).input != nullptr || staged(q, round + 1)) &&
                   (!through_ring || round < depth_ || copied(q, round - depth_ + 1));
        });
        if (!ready) {
            return false;
        }
        aim(round);
        const std::size_t all = count(own_, round);
        const std::size_t first = round * elements_;
        const std::size_t at = ((scatters_ ? 0 : reduction_.begin(own_)) + first) * reduction_.out_itemsize();
        if (!result_is_read_ && call_.outputs.empty()) {
            fold_.run(call_.output + at, first, all);
        } else {
            std::byte* const slot = through_ring ? communicator_.staging() + ring(rank_, round) : nullptr;
            fold_block_wise(at, slot, first, all);
        }
        publish(communicator_.mine().reduced, ++reduced_);
        return true;
    }

    /// Folds into the first-level cache, and from there stores where others read and in the caller's array. A shared
    /// array of the caller's is written around the cache: unlike the ring it is the same memory at every call (see
    /// Communicator::take_slots).
    void fold_block_wise(std::size_t at, std::byte* slot, std::size_t first, std::size_t all) {
        const std::size_t item = reduction_.out_itemsize();
        const Rows<std::byte> result = call_.target(at, all * item);
        const std::size_t block = kBlockNbytes / std::max(reduction_.in_itemsize(), item);
        for (std::size_t done = 0; done < all; done += block) {
            const std::size_t some = std::min(block, all - done);
            fold_.run(block_.data(), first + done, some);
            if (slot != nullptr) {
                copy_run(slot + done * item, block_.data(), some * item, communicator_.passing().around());
            }
            unpack(result, done * item, block_.data(), some * item, streaming_ || (slot == nullptr && result_is_read_));
        }
    }

    Rows<const std::byte> own_input(int chunk) const noexcept {
        return call_.inputs.empty() ? reduction_.input_of(call_.input, chunk)
                                    : call_.source(reduction_.begin(chunk) * reduction_.in_itemsize());
    }

    /// Points the fold at this round's segments. Staged ones begin at the round's first element, so their base is moved
    /// back by it.
    void aim(std::uint64_t round) {
        const std::size_t skipped = round * elements_ * reduction_.in_itemsize();
        for (int q = 0; q < size_; ++q) {
            const Party& one = party(q);
            if (q == rank_) {
                fold_.source(q, own_input(own_));
            } else if (one.input != nullptr) {
                fold_.source(q, reduction_.input_of(one.input, own_));
            } else {
                const std::size_t nbytes = skipped + segment_;
                fold_.source(q, {one.staging + ring(rank_, round) - skipped, nbytes, nbytes});
            }
        }
    }

    bool copy() {
        if (copied_ == rounds_) {
            return false;
        }
        const std::uint64_t round = copied_;
        if (!others([&](int q) { return reduced(q, round + 1); })) {
            return false;
        }
        for (int step = 1; step < size_; ++step) {
            const int q = (rank_ + step) % size_;
            const std::size_t offset = (reduction_.begin(q) + round * elements_) * reduction_.out_itemsize();
            const std::byte* const from =
                party(q).output != nullptr ? party(q).output + offset : party(q).staging + ring(q, round);
            const std::size_t nbytes = count(q, round) * reduction_.out_itemsize();
            unpack(call_.target(offset, nbytes), 0, from, nbytes, streaming_);
        }
        publish(communicator_.mine().copied, ++copied_);
        return true;
    }

    const Call& call_;
    const Reduction reduction_;
    FoldInto fold_;
    const bool scatters_;
    const int root_;    // of a reduce
    const bool whole_;  // who folds folds the whole vector
    const int own_;     // the chunk that this rank folds
    const std::uint64_t slots_a_round_;
    const std::uint64_t depth_;   // rounds that the ring holds
    const std::size_t elements_;  // of a segment
    const std::uint64_t rounds_;
    const bool result_is_read_;  // by the other ranks
    const bool streaming_;
    std::vector<std::byte> block_;
    std::uint64_t first_slot_ = 0;
    std::uint64_t staged_ = 0;
    std::uint64_t reduced_ = 0;
    std::uint64_t copied_ = 0;
};

}  // namespace

std::unique_ptr<Operation> make_fold(Communicator& communicator, Request& request, const Call& call) {
    return std::make_unique<FoldOperation>(communicator, request, call);
}

}  // namespace aiodist
