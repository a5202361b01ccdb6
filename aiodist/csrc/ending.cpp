// How calls and groups end other than by success: aborts, lost peers, deadlines, closing.

#include <algorithm>
#include <cstring>

#include "collectives/operation.hpp"
#include "communicator.hpp"
#include "messages/messages.hpp"

namespace aiodist {

/// The right to advance, waited for: for the rare callers that must have it. Holders never wait for anything, so the
/// wait is short.
class Communicator::Claim {
 public:
    explicit Claim(Communicator& communicator) : communicator_(communicator) {
        // acquire: pairs with the release of the last holder
        while (communicator_.claim_.exchange(true, std::memory_order_acquire)) {
            std::this_thread::yield();
        }
    }
    ~Claim() {
        communicator_.claim_.store(false, std::memory_order_seq_cst);  // before the load of again_: see progress()
        if (communicator_.again_.load(std::memory_order_seq_cst)) {
            (void)communicator_.progress();
        }
    }
    Claim(const Claim&) = delete;
    Claim& operator=(const Claim&) = delete;

 private:
    Communicator& communicator_;
};

const Request* Communicator::lowest_pending() const {
    const Request* lowest = large_.empty() ? nullptr : large_.front().request.get();
    for (const Request* other :
         {static_cast<const Request*>(posted_.front()), static_cast<const Request*>(unposted_.front())}) {
        if (other != nullptr && (lowest == nullptr || other->seq < lowest->seq)) {
            lowest = other;
        }
    }
    return lowest;
}

void Communicator::break_group(FailurePtr failure) {
    std::uint64_t from = 0;
    {
        const std::lock_guard lock(issue_mutex_);
        if (!failure_) {
            failure_ = failure;
        }
        const Request* const lowest = lowest_pending();
        from = lowest == nullptr ? next_seq_ : lowest->seq;
        broken_.store(true, std::memory_order_release);  // pairs with failure(): only a hint that there is one
    }
    if (block_->abort_from.load(std::memory_order_relaxed) ==
        kNever) {  // only this thread writes it: we hold the claim
        block_->abort_kind = static_cast<std::uint32_t>(failure_->kind);
        for (const int q : failure_->ranks) {
            const auto bit = static_cast<std::size_t>(q);
            if (bit < kMaxNamedRanks) {
                block_->abort_ranks[bit / 64] |= std::uint64_t{1} << bit % 64;
            }
        }
        const std::size_t nbytes = std::min(failure_->text.size(), kReasonNbytes - 1);
        std::memcpy(block_->reason, failure_->text.data(), nbytes);
        block_->reason[nbytes] = '\0';
        publish(block_->abort_from, from);
    }
    fail_all(failure_);
    std::vector<std::weak_ptr<Communicator>> channels;
    {
        const std::lock_guard lock(issue_mutex_);
        channels.swap(channels_);
    }
    for (const auto& weak : channels) {
        if (const auto channel = weak.lock()) {
            channel->break_with(failure_);
        }
    }
}

void Communicator::break_with(const FailurePtr& failure) {
    const Claim claim(*this);  // held by a group whose claim we hold; never the other way round
    if (!broken_.load(std::memory_order_relaxed) && !closed()) {
        break_group(failure);
    }
}

void Communicator::adopt(const std::shared_ptr<Communicator>& channel) {
    FailurePtr failure;
    {
        const std::lock_guard lock(issue_mutex_);
        failure = failure_;
        if (!failure) {
            std::erase_if(channels_, [](const auto& weak) { return weak.expired(); });
            channels_.push_back(channel);
        }
    }
    if (failure && !closed()) {
        channel->break_with(failure);
    }
}

void Communicator::fail_all(const FailurePtr& failure) {
    while (!large_.empty()) {
        const RequestRef request = large_.front().request;
        large_.pop_front();
        pinned_ = false;
        settle(request, failure);
    }
    while (RequestRef request = posted_.pop()) {
        settle(std::move(request), failure);
    }
    if (messages_) {
        messages_->fail_all(failure);
    }
    while (true) {
        RequestRef request;
        {
            const std::lock_guard lock(issue_mutex_);
            request = unposted_.pop();
            unposted_count_.fetch_sub(request ? 1 : 0, std::memory_order_relaxed);
            if (!request) {
                request = new_messages_.pop();
                new_message_count_.fetch_sub(request ? 1 : 0, std::memory_order_relaxed);
            }
        }
        if (!request) {
            return;
        }
        settle(std::move(request), failure);
    }
}

void Communicator::abort(FailureKind kind, const std::string& reason) {
    const Claim claim(*this);
    if (!broken_.load(std::memory_order_relaxed) && !closed()) {
        break_group(std::make_shared<Failure>(Failure{kind, reason, {rank()}}));
    }
}

void Communicator::check(TimePoint now) {
    (void)progress();
    const Claim claim(*this);
    if (broken_.load(std::memory_order_relaxed) || closed()) {
        return;
    }
    FailurePtr trouble;
    if (messages_) {
        messages_->expire(now);
    }
    {
        const std::lock_guard lock(issue_mutex_);
        trouble = look_for_trouble(now);
    }
    if (!trouble) {
        hear_refusals();
        return;
    }
    while (advance(true)) {  // what was posted before counts
    }
    {
        const std::lock_guard lock(issue_mutex_);
        trouble = look_for_trouble(now);
    }
    if (trouble) {
        break_group(std::move(trouble));
    }
}

void Communicator::close() {
    {
        const Claim claim(*this);
        if (closed()) {
            return;
        }
        const auto failure =
            std::make_shared<Failure>(Failure{FailureKind::closed, "group '" + name() + "' is closed", {}});
        {
            const std::lock_guard lock(issue_mutex_);
            failure_ = failure;
        }
        fail_all(failure);
        closed_.store(true, std::memory_order_release);  // pairs with closed()
        publish(block_->left, 1);
    }
    engine_->remove(*this);
}

bool Communicator::try_free() {
    for (const Member& one : members_) {
        if (one.block == block_ || one.process->dead.load(std::memory_order_relaxed)) {
            continue;
        }
        // A block that is another's by now was freed by its owner, who had seen everybody leave.
        const bool same = one.block->magic == kChannelMagic && one.block->id == options_.id;
        if (same && one.block->left.load(std::memory_order_acquire) == 0) {  // acquire: its last reads came before
            return false;
        }
    }
    if (messages_) {
        messages_->release();
    }
    engine_->arena().release(options_.block_offset);
    if (staging_ != nullptr) {
        engine_->arena().release(staging_offset_);
    }
    if (copies_offset_ != kNoOffset) {
        engine_->arena().release(copies_offset_);
    }
    return true;
}

}  // namespace aiodist
