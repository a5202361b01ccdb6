#include "communicator.hpp"

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include "collectives/operation.hpp"
#include "messages/messages.hpp"
#include "shm/memory.hpp"

namespace aiodist {
namespace {

// Small calls matched in one go before a large one gets its next segment.
constexpr int kMatchesAtOnce = 64;

}  // namespace

std::uint64_t Communicator::reserve(Engine& engine, const Tuning& tuning, std::uint64_t id, int rank, int size) {
    const std::uint64_t offset = engine.arena().allocate(channel_nbytes(tuning, size));
    auto* const block = new (engine.arena().at(offset)) ChannelBlock{};
    block->magic = kChannelMagic;
    block->id = id;
    block->rank = rank;
    block->size = size;
    block->abort_from.store(kNever, std::memory_order_relaxed);  // published with the offset, over the control plane
    return offset;
}

std::shared_ptr<Communicator> Communicator::create(std::shared_ptr<Engine> engine, Options options) {
    std::shared_ptr<Communicator> communicator(new Communicator(engine, std::move(options)));
    engine->add(communicator);
    return communicator;
}

Communicator::Communicator(std::shared_ptr<Engine> engine, Options options)
    : engine_(std::move(engine)),
      options_(std::move(options)),
      headers_(options_.members.size()),
      pointers_(options_.members.size()),
      copies_from_(options_.tuning.slots, kNever) {
    const int members = static_cast<int>(options_.members.size());
    const std::size_t lanes_at = round_up(sizeof(ChannelBlock), kLine);
    const std::size_t slots_at = slots_offset(members);
    for (const MemberAddress& address : options_.members) {
        const std::byte* const at = address.process->arena->at(address.block_offset, channel_nbytes(tuning(), members));
        const auto* const block = reinterpret_cast<const ChannelBlock*>(at);
        const int q = static_cast<int>(members_.size());
        if (at == nullptr || block->magic != kChannelMagic || block->id != options_.id || block->rank != q ||
            block->size != members) {
            throw std::runtime_error("rank " + std::to_string(q) + " of group '" + name() +
                                     "' published a block that is not one");
        }
        members_.push_back({address.process, block, reinterpret_cast<const Lane*>(at + lanes_at), at + slots_at, 0, 0});
        if (std::find(processes_.begin(), processes_.end(), address.process) == processes_.end()) {
            processes_.push_back(address.process);
        }
    }
    std::byte* const own = engine_->arena().at(options_.block_offset);
    block_ = reinterpret_cast<ChannelBlock*>(own);
    lanes_ = reinterpret_cast<Lane*>(own + lanes_at);
    slots_ = own + slots_at;
    home_.store(this_thread(), std::memory_order_relaxed);  // a hint for one error text
}

Communicator::~Communicator() = default;

std::size_t Communicator::staging_nbytes() const noexcept {
    return members_.size() * tuning().depth * std::size_t{tuning().segment_nbytes};
}

FailurePtr Communicator::failure() const {
    const std::lock_guard lock(issue_mutex_);
    return failure_;
}

// --- Advancing ---

Communicator::Progress Communicator::progress(bool large) {
    bool moved = false;
    while (true) {
        if (claim_.exchange(true, std::memory_order_acquire)) {  // pairs with the holder's store below
            // Leave a note and look again. Holder: store claim = false, load again. We: store again = true, load claim.
            // All seq_cst, so one of us sees the other and what we came for is not lost.
            again_.store(true, std::memory_order_seq_cst);
            if (claim_.load(std::memory_order_seq_cst)) {
                return moved ? Progress::moved : Progress::elsewhere;
            }
            continue;
        }
        if (again_.load(std::memory_order_relaxed)) {  // a note left from here on stays: only holders clear
            // seq_cst: a clearing that lingered past the loads of advance() could wipe out a later note
            again_.store(false, std::memory_order_seq_cst);
        }
        try {
            moved = advance(large) || moved;
        } catch (const std::exception& error) {  // no memory for bookkeeping, or no descriptor for a thread
            break_group(std::make_shared<Failure>(
                Failure{FailureKind::transport, "group '" + name() + "': " + error.what(), {}}));
        }
        claim_.store(false, std::memory_order_seq_cst);
        if (!again_.load(std::memory_order_seq_cst)) {
            return moved ? Progress::moved : Progress::none;
        }
        large = true;  // whoever left the note may have come for that
    }
}

bool Communicator::advance(bool large) {
    bool moved = post();
    moving_.store(match_some(moved), std::memory_order_relaxed);  // a hint, see the header
    moved = (large && move_large()) || moved;
    moved = move_messages(large) || moved;
    long_.store(!large_.empty() || (messages_ && messages_->has_large()), std::memory_order_relaxed);  // a hint
    return post() || moved;
}

/// Matches calls until enough is done in one go; true where there may be more.
bool Communicator::match_some(bool& moved) {
    std::uint64_t nbytes = 0;
    for (int i = 0; i < kMatchesAtOnce && nbytes < kAtOnceNbytes; ++i) {
        const Request* const head = posted_.front();
        const std::uint64_t brought = head != nullptr ? head->call.nbytes : 0;
        if (!match()) {
            return false;
        }
        moved = true;
        nbytes += brought;
    }
    return true;
}

bool Communicator::move_messages(bool large) {
    // A hint, which spares the mutex: see post().
    while (new_message_count_.load(std::memory_order_relaxed) != 0) {
        RequestRef request;
        {
            const std::lock_guard lock(issue_mutex_);
            request = new_messages_.pop();
            new_message_count_.fetch_sub(request ? 1 : 0, std::memory_order_relaxed);
        }
        if (!request) {
            break;
        }
        if (!messages_) {
            messages_ = std::make_unique<Messages>(*this);
        }
        messages_->add(std::move(request));
    }
    if (!messages_ || closed()) {  // closed: the peers may have freed what their lanes point to
        return false;
    }
    const bool moved = messages_->step(large);
    if (messages_->moving()) {
        moving_.store(true, std::memory_order_relaxed);  // a hint, see the header
    }
    if (FailurePtr failure = messages_->take_failure()) {
        break_group(std::move(failure));
    }
    return moved;
}

void Communicator::matched(Request& receive) {
    const std::lock_guard lock(issue_mutex_);
    unmatched_ -= receive.unmatched.load(std::memory_order_relaxed) ? 1 : 0;
    receive.unmatched.store(false, std::memory_order_relaxed);
}

bool Communicator::arrived(std::uint64_t seq) {
    for (Member& one : members_) {
        if (one.posted <= seq) {
            one.posted = one.block->posted.load(
                std::memory_order_seq_cst);  // acquires the slot; may be the last look before a sleep
            if (one.posted <= seq) {
                return false;
            }
        }
    }
    return true;
}

bool Communicator::match() {
    Request* const head = posted_.front();
    if (head == nullptr || !arrived(head->seq)) {
        return false;
    }
    const RequestRef request = RequestRef::share(head);
    const std::uint64_t seq = head->seq;
    FailurePtr failure;
    for (int q = 0; q < size() && !failure; ++q) {
        if (!read_header(q, seq, headers_[static_cast<std::size_t>(q)])) {
            failure = std::make_shared<Failure>(
                Failure{FailureKind::transport,
                        describe(*head) + ": the header of rank " + std::to_string(q) + " is damaged",
                        {q}});
        }
    }
    if (!failure) {
        failure = verdict(*head);
    }
    std::unique_ptr<Operation> operation;
    if (!failure) {
        try {
            if (all_at_hand()) {
                complete_small(*this, *head);
            } else {
                operation = make_operation(*this, *head);
                if (!operation->sound()) {
                    failure = std::make_shared<Failure>(
                        Failure{FailureKind::transport, describe(*head) + ": an address in a header is damaged", {}});
                }
            }
        } catch (const std::bad_alloc&) {
            failure = std::make_shared<Failure>(
                Failure{FailureKind::transport, describe(*head) + ": no memory for the result", {}});
        }
    }
    if (failure && failure->kind != FailureKind::refused && failure->kind != FailureKind::argument) {
        break_group(std::move(failure));
        return true;
    }
    if (aborted_by_peer(seq)) {  // after the last read of peer memory
        break_group(aborts(seq));
        return true;
    }
    (void)posted_.pop();
    consumed_ = seq + 1;
    publish(block_->consumed, consumed_);
    if (operation && !failure) {
        pinned_ = pinned_ || (header(rank()).head.flags & kCopied) != 0;
        large_.push_back({request, std::move(operation)});
        request->large.store(true, std::memory_order_relaxed);  // a hint for who waits
        if ((request->call.flags & kWildcard) == 0 && is_short(request->call)) {
            hand_over(*request.get());  // its rank could not know that it would be large
        }
    } else {
        settle(request, std::move(failure));
    }
    return true;
}

bool Communicator::move_large() {
    if (large_.empty()) {
        return false;
    }
    Moving& moving = large_.front();
    if (moving.operation->step()) {
        moving_.store(true, std::memory_order_relaxed);  // a hint, see the header
        return true;
    }
    if (!moving.operation->finished()) {
        return false;
    }
    const RequestRef request = moving.request;
    if (aborted_by_peer(request->seq)) {  // what was read from peers since may not be what they meant
        break_group(aborts(request->seq));
        return true;
    }
    large_.pop_front();
    pinned_ = pinned_ && !large_.empty();  // longer than need be where others are under way
    settle(request, nullptr);
    return true;
}

void Communicator::publish_quietly(Word& word, std::uint64_t value) noexcept {
    word.store(
        value,
        std::memory_order_seq_cst);  // releases the data it stands for; before the sleepers load in wake_sleepers()
}

void Communicator::publish(Word& word, std::uint64_t value) noexcept {
    publish_quietly(word, value);
    for (const auto& process : processes_) {
        process->wake_sleepers();
    }
}

void Communicator::settle(RequestRef request, FailurePtr failure) {
    std::vector<RequestRef> drained;
    {
        const std::lock_guard lock(issue_mutex_);
        if (request->engine_serves) {
            engine_requests_.fetch_sub(1, std::memory_order_relaxed);
        }
        unmatched_ -= request->unmatched.load(std::memory_order_relaxed) ? 1 : 0;
        request->unmatched.store(false, std::memory_order_relaxed);
        if (pending_.fetch_sub(1, std::memory_order_relaxed) - 1 == unmatched_) {
            drained.swap(draining_);
        }
        request->finish(std::move(failure));
    }
    for (const RequestRef& waiting : drained) {
        waiting->finish(nullptr);
    }
}

}  // namespace aiodist
