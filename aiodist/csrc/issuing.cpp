// What callers do: giving calls their place, waiting beside those who advance them, handing over to the engine.

#include <sched.h>

#include <algorithm>
#include <ctime>

#include "communicator.hpp"

namespace aiodist {
namespace {

/// The coarse clock, which is cheaper, is behind by up to a tick of the system, 10 ms at most: long timeouts may as
/// well end that much later.
TimePoint deadline_after(Clock::duration timeout) {
    constexpr Clock::duration kLong = std::chrono::seconds(1);
    constexpr Clock::duration kTick = std::chrono::milliseconds(10);
    timespec now{};
    if (timeout < kLong || ::clock_gettime(CLOCK_MONOTONIC_COARSE, &now) != 0) {
        return Clock::now() + timeout;
    }
    return TimePoint(std::chrono::seconds(now.tv_sec) + std::chrono::nanoseconds(now.tv_nsec)) + kTick + timeout;
}

}  // namespace

std::uint64_t this_thread() noexcept {
    static std::atomic<std::uint64_t> latest{0};
    thread_local const std::uint64_t number = latest.fetch_add(1, std::memory_order_relaxed) + 1;
    return number;
}

RequestRef Communicator::start(Call&& call, Clock::duration timeout) {
    ensure_staging(call);
    RequestRef request = RequestRef::adopt(new Request(shared_from_this(), std::move(call)));
    request->timeout = timeout;
    request->deadline = deadline_after(timeout);
    home_.store(this_thread(), std::memory_order_relaxed);
    {
        const std::lock_guard lock(issue_mutex_);
        if (failure_) {
            request->finish(failure_);
            return request;
        }
        pending_.fetch_add(1, std::memory_order_seq_cst);  // before the load in Engine::watch
        if (is_message(request->call.collective)) {
            request->unmatched.store(request->call.collective == Collective::recv, std::memory_order_relaxed);
            unmatched_ += request->unmatched.load(std::memory_order_relaxed) ? 1 : 0;
            new_messages_.push(request);
            new_message_count_.fetch_add(1, std::memory_order_relaxed);  // under the mutex; see move_messages()
        } else {
            request->seq = next_seq_++;
            latest_ = {request->seq, request->call.collective, request->call.site};
            unposted_.push(request);
            unposted_count_.fetch_add(1, std::memory_order_relaxed);  // under the mutex; see post()
        }
    }
    (void)progress();
    return request;
}

std::optional<Communicator::Latest> Communicator::latest() const {
    const std::lock_guard lock(issue_mutex_);
    return next_seq_ == 0 ? std::nullopt : std::optional(latest_);
}

RequestRef Communicator::drained() {
    RequestRef request = RequestRef::adopt(new Request(shared_from_this(), Call{}));
    const std::lock_guard lock(issue_mutex_);
    if (pending_.load(std::memory_order_relaxed) == unmatched_) {  // both change under the same mutex
        request->finish(nullptr);
    } else {
        draining_.push_back(request);
    }
    return request;
}

void Communicator::ensure_staging(const Call& call) {
    const bool stages = call.brings() && call.nbytes > tuning().slot_nbytes && !call.refused;
    if (!stages || size() == 1 || is_message(call.collective)) {
        return;
    }
    const std::lock_guard lock(issue_mutex_);
    if (copies(call)) {
        if (copies_offset_ == kNoOffset) {
            copies_offset_ = engine_->arena().allocate(copies_nbytes(tuning(), size()));
        }
    } else if (staging_ == nullptr) {
        staging_offset_ = engine_->arena().allocate(staging_nbytes());
        staging_ = engine_->arena().at(staging_offset_);
    }
}

void Communicator::hand_over(Request& request, bool at_once) {
    bool others = false;
    {
        const std::lock_guard lock(issue_mutex_);
        if (request.done() || (request.engine_serves && !at_once)) {
            return;
        }
        if (!request.engine_serves) {  // otherwise it may still wait for its alarm
            request.engine_serves = true;
            // before the load of asleep_ in wake(), and of helpers_ below
            others = engine_requests_.fetch_add(1, std::memory_order_seq_cst) > 0;
        }
    }
    if (helpers_.load(std::memory_order_seq_cst) > 0) {  // pairs with unhelp(), which wakes the engine for what is left
        engine_->self()->wake_sleepers();                // a helper may sleep
        return;
    }
    at_once ? engine_->wake() : engine_->wake_soon(others);
}

void Communicator::unhelp() noexcept {
    // seq_cst: the engine that saw a helper and went to sleep is woken here, or it sees that there is none
    if (helpers_.fetch_sub(1, std::memory_order_seq_cst) == 1 && serves_engine()) {
        engine_->wake();
    }
}

std::optional<int> Communicator::waits_for_this_thread(const Request& request) const {
    const std::uint64_t here = this_thread();
    const bool message = is_message(request.call.collective);
    for (int q = 0; q < size(); ++q) {
        const Member& one = member(q);
        const bool waited_for = message
                                    ? q == request.call.root && request.unmatched.load(std::memory_order_relaxed)
                                    : q != rank() && one.block->posted.load(std::memory_order_relaxed) <= request.seq;
        if (!one.process->self || !waited_for) {
            continue;
        }
        const auto local = engine_->local(*this, q);
        if (local && local->home_.load(std::memory_order_relaxed) == here) {
            return q;
        }
    }
    return std::nullopt;
}

bool Communicator::waits_for_this_core(const Request& request) const noexcept {
    const bool message = is_message(request.call.collective);
    const int core = engine_->note_core();
    bool missing = false;
    bool neighbour = false;
    for (int q = 0; q < size(); ++q) {
        if (q == rank() || (message && q != request.call.root)) {
            continue;
        }
        const Process& process = *member(q).process;
        const bool here =
            process.self || process.arena->header().core.load(std::memory_order_relaxed) == core;  // a hint
        const bool late =
            message || member(q).block->posted.load(std::memory_order_relaxed) <= request.seq;  // likewise
        if (here && late) {
            return true;
        }
        missing = missing || late;
        neighbour = neighbour || here;
    }
    return !missing && neighbour;  // whoever has posted a large call still moves its part
}

bool Communicator::has_core() const {
    const int core = engine_->note_core();
    bool shared = false;
    bool highest = true;
    for (int q = 0; q < size(); ++q) {
        const Process& process = *member(q).process;
        if (!process.self && process.arena->header().core.load(std::memory_order_relaxed) == core) {  // a hint
            shared = true;
            highest = highest && q < rank();
        }
    }
    if (!shared || !highest || engine_->crowded()) {
        return !shared;
    }
    std::vector<int> taken{core};
    for (const Member& one : members_) {
        if (!one.process->self) {
            taken.push_back(one.process->arena->header().core.load(std::memory_order_relaxed) &
                            (CPU_SETSIZE - 1));  // untrusted
        }
    }
    const bool moved = engine_->step_aside(taken);
    (void)engine_->note_core();
    return moved;
}

}  // namespace aiodist
