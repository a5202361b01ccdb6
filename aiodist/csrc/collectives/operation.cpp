#include "collectives/operation.hpp"

namespace aiodist {
namespace {

// 2^24 rounds of at least a page each, 2^40 large calls: neither is ever used up.
constexpr unsigned kRoundBits = 24;

}  // namespace

Operation::Operation(Communicator& communicator, Request& request)
    : communicator_(communicator),
      request_(request),
      number_(communicator.next_large()),
      rank_(communicator.rank()),
      size_(communicator.size()),
      segment_(communicator.tuning().segment_nbytes),
      parties_(static_cast<std::size_t>(size_)) {
    const auto reads = [this](const Process& process, std::uint64_t offset, std::uint64_t nbytes) -> const std::byte* {
        if (offset == kNoOffset) {
            return nullptr;
        }
        const std::byte* const at = process.arena->at(offset, nbytes);
        sound_ = sound_ && at != nullptr;
        return at;
    };
    for (int q = 0; q < size_; ++q) {
        const Header& head = communicator.header(q).head;
        const Process& process = *communicator.member(q).process;
        Party& one = party(q);
        one.nbytes = head.nbytes;
        one.input = reads(process, head.input_offset, head.nbytes);
        one.staging = reads(process, head.staging_offset, communicator.staging_nbytes());
        // The extent of an output is the collective's to know; it takes the offset from here once it has checked that.
        one.output = head.output_offset == kNoOffset ? nullptr : process.arena->at(head.output_offset, 0);
    }
}

std::uint64_t Operation::rounds_in(const Word& word) const noexcept {
    // seq_cst: this may be the last look before a sleep, see Process::wake_sleepers. Also acquires the data that the
    // flag stands for.
    const std::uint64_t value = word.load(std::memory_order_seq_cst);
    const std::uint64_t number = value >> kRoundBits;
    if (number < number_) {
        return 0;
    }
    // A member already in a later call has done all of this one.
    return number == number_ ? value & ((std::uint64_t{1} << kRoundBits) - 1) : ~std::uint64_t{0};
}

bool Operation::staged(int q, std::uint64_t rounds) noexcept {
    Party& one = party(q);
    if (one.staged < rounds) {
        one.staged = rounds_in(communicator_.member(q).block->staged);
    }
    return one.staged >= rounds;
}

bool Operation::reduced(int q, std::uint64_t rounds) noexcept {
    Party& one = party(q);
    if (one.reduced < rounds) {
        one.reduced = rounds_in(communicator_.member(q).block->reduced);
    }
    return one.reduced >= rounds;
}

bool Operation::copied(int q, std::uint64_t rounds) noexcept {
    Party& one = party(q);
    if (one.copied < rounds) {
        one.copied = rounds_in(communicator_.member(q).block->copied);
    }
    return one.copied >= rounds;
}

void Operation::publish(Word& word, std::uint64_t rounds) noexcept {
    communicator_.publish(word, (number_ << kRoundBits) + rounds);
}

namespace {

/// Many arrays of several dtypes: a fold for each dtype, one after the other. Each is a large call of its own to the
/// flags.
class Sections final : public Operation {
 public:
    Sections(Communicator& communicator, Request& request) : Operation(communicator, request) {
        for (const Call& section : request.call.sections) {
            folds_.push_back(make_fold(communicator, request, section));
            require(folds_.back()->sound());
        }
    }

    bool step() override {
        while (at_ < folds_.size() && folds_[at_]->finished()) {
            ++at_;
        }
        return at_ < folds_.size() && folds_[at_]->step();
    }

    bool finished() override {
        while (at_ < folds_.size() && folds_[at_]->finished()) {
            ++at_;
        }
        return at_ == folds_.size();
    }

    std::vector<int> waits_for() override {
        return at_ < folds_.size() ? folds_[at_]->waits_for() : std::vector<int>{};
    }

 private:
    std::vector<std::unique_ptr<Operation>> folds_;
    std::size_t at_ = 0;
};

}  // namespace

std::unique_ptr<Operation> make_operation(Communicator& communicator, Request& request) {
    switch (request.call.collective) {
        case Collective::all_reduce:
        case Collective::reduce:
        case Collective::reduce_scatter:
            if (!request.call.sections.empty()) {
                return std::make_unique<Sections>(communicator, request);
            }
            return make_fold(communicator, request, request.call);
        default:
            return make_pull(communicator, request);
    }
}

}  // namespace aiodist
