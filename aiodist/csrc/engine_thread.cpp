// The thread that serves large and queued calls, looks at deadlines and deaths, and sleeps while nothing is pending.

#include <linux/futex.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/syscall.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstddef>
#include <limits>

#include "communicator.hpp"
#include "engine.hpp"

namespace aiodist {
namespace {

constexpr std::int64_t kAsleep = std::numeric_limits<std::int64_t>::max();
// After the last pending call the engine still looks around this long before it sleeps without limit: a loop of calls
// does not have to wake it for each.
constexpr std::chrono::seconds kLinger{2};
// How long a thread that has issued a large call may take to come back and block in it before the engine takes over.
// Longer than a call of 1 MiB takes: the alarm of a call that its own thread is at costs it more than 25 µs.
constexpr long kSoonNs = 1'000'000;

}  // namespace

void Engine::ensure_thread() {
    const std::lock_guard lock(mutex_);
    if (ended_) {
        thread_.join();  // it takes no lock any more
        ended_ = false;
    }
    if (thread_.joinable() || stopping_.load(std::memory_order_relaxed)) {
        return;
    }
    sigset_t all;
    sigset_t before;
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are for Python's threads
    thread_ = std::thread([this] { run(); });
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void Engine::wake() {
    ensure_thread();
    // The work was stored before (seq_cst); the thread stores asleep_ and looks at its work again, so it sees the work
    // or we see asleep_.
    if (asleep_.load(std::memory_order_seq_cst)) {
        wake_.ring();
    }
}

void Engine::wake_soon(bool others) {
    // Set again only once it is a tenth old: a loop of short calls moves it on without a system call for each. What is
    // skipped here relies on an alarm that is still to come, since it was set less than kSoonNs ago. Calls that are
    // made faster than that and not waited for do not move it on.
    const std::int64_t now = ns(Clock::now());
    const std::int64_t set = alarm_set_.load(std::memory_order_seq_cst);
    if (set <= now && now - set < (others ? kSoonNs : kSoonNs / 10)) {
        return;
    }
    ensure_thread();
    alarm_set_.store(now, std::memory_order_seq_cst);
    itimerspec when{};
    when.it_value.tv_nsec = kSoonNs;
    (void)::timerfd_settime(alarm_.get(), 0, &when, nullptr);
}

void Engine::watch(TimePoint deadline) {
    const std::int64_t latest = std::min(ns(deadline), ns(Clock::now() + 2 * kSlice));
    if (next_look_.load(std::memory_order_seq_cst) > latest || next_look_.load(std::memory_order_relaxed) == 0) {
        wake();
    }
}

void Engine::join() {
    std::thread thread;
    {
        const std::lock_guard lock(mutex_);
        stopping_.store(true, std::memory_order_seq_cst);  // read by the thread after the ring below
        thread.swap(thread_);
        ended_ = false;
    }
    if (thread.joinable()) {
        wake_.ring();
        thread.join();
    }
}

void Engine::rest() {
    const std::lock_guard resting(rest_mutex_);
    bool unread = false;
    {
        const std::lock_guard lock(mutex_);
        std::erase_if(graveyard_, [](const auto& one) { return one->try_free(); });
        if (!communicators_.empty()) {
            return;
        }
        unread = !graveyard_.empty();
        leaving_.store(unread, std::memory_order_seq_cst);  // before the load of asleep_ in wake()
    }
    if (unread) {  // a peer has yet to leave: the thread sees to the rest, and ends by itself
        wake();
        return;
    }
    join();
    bool needed = false;
    {
        const std::lock_guard lock(mutex_);
        stopping_.store(false, std::memory_order_relaxed);  // no thread reads it now
        asleep_.store(false, std::memory_order_relaxed);
        next_look_.store(0, std::memory_order_relaxed);
        alarm_set_.store(0, std::memory_order_relaxed);  // what was to come may have rung for the thread that is gone
        needed = !communicators_.empty();
    }
    if (needed) {
        wake();  // a world that opened meanwhile was not let start a thread
    }
}

void Engine::leave_all() {
    for (const auto& communicator : communicators()) {
        communicator->close();
    }
}

void Engine::stop() {
    join();
    const std::lock_guard lock(mutex_);
    graveyard_.clear();
    communicators_.clear();
}

void Engine::hold_life_word() noexcept {
    // The kernel walks this list when the thread dies, before the process's memory is torn down (man 2
    // set_robust_list).
    thread_local robust_list_head head;
    ArenaHeader& header = arena_->header();
    auto* const node = reinterpret_cast<robust_list*>(&header.robust_next);
    head.list.next = node;
    node->next = &head.list;
    head.futex_offset =
        static_cast<long>(offsetof(ArenaHeader, life)) - static_cast<long>(offsetof(ArenaHeader, robust_next));
    head.list_op_pending = nullptr;
    header.life.store(static_cast<std::uint32_t>(::syscall(SYS_gettid)),
                      std::memory_order_release);  // read by peers' engines
    (void)::syscall(SYS_set_robust_list, &head, sizeof head);
}

void Engine::run() noexcept {
    hold_life_word();
    Backoff backoff(pauses());
    TimePoint last_pending = Clock::now();
    TimePoint next_tick = last_pending;
    while (!stopping_.load(std::memory_order_seq_cst)) {
        bool busy = false;
        bool rested = false;
        if (serve(busy)) {
            backoff.reset();
        } else if (!busy || !backoff.wait(crowded())) {
            sleep(busy, last_pending);
            backoff = Backoff(pauses());
            rested = true;
        }
        const TimePoint now = Clock::now();
        if (now >= next_tick || (rested && look_for_deaths())) {
            tick(now);
            next_tick = now + kSlice;
        }
        if (rested || busy) {
            last_pending = anything_pending() ? now : last_pending;
        }
        if (leaving_.load(std::memory_order_relaxed) && has_left()) {
            break;
        }
    }
    arena_->header().life.store(0, std::memory_order_release);  // no owner, so no death
    robust_list_head none{{&none.list}, 0, nullptr};
    (void)::syscall(SYS_set_robust_list, &none, sizeof none);
}

/// True, once, when the last block that a peer could read is freed and no communicator is open.
bool Engine::has_left() {
    const std::lock_guard lock(mutex_);
    ended_ = communicators_.empty() && graveyard_.empty() && !stopping_.load(std::memory_order_relaxed);
    if (ended_ || !communicators_.empty()) {
        leaving_.store(false, std::memory_order_relaxed);
    }
    return ended_;
}

bool Engine::serve(bool& busy) {
    bool moved = false;
    for (const auto& communicator : communicators()) {
        if (communicator->serves_engine()) {
            busy = true;
            moved = communicator->progress() != Communicator::Progress::none || moved;
        }
    }
    return moved;
}

void Engine::sleep(bool busy, TimePoint last_pending) {
    const TimePoint now = Clock::now();
    // In this order: who sees that nobody looks (watch()) must also see that somebody sleeps (wake()); and a call that
    // saw neither was counted as pending before, and is seen here.
    asleep_.store(true, std::memory_order_seq_cst);
    bool linger = busy || now - last_pending < kLinger;
    next_look_.store(linger ? ns(now + kSlice) : kAsleep, std::memory_order_seq_cst);
    linger = linger || anything_pending() || leaving_.load(std::memory_order_seq_cst);
    bool work = false;
    if (!busy) {
        if (!serve(work) && !work) {
            sleep_on(wakes_.get(), deaths_->get(), -1, linger ? Clock::duration(kSlice) : std::chrono::hours(1));
        }
        asleep_.store(false, std::memory_order_relaxed);  // at worst somebody rings once too often
        hush();
        return;
    }
    sleepers_add(1);
    if (!serve(work)) {
        sleep_on(wakes_.get(), deaths_->get(), bell_fd(), kSlice);
    }
    sleepers_add(-1);
    asleep_.store(false, std::memory_order_relaxed);  // as above
    hush();
    self_->bell.drain();
    poll();
}

bool Engine::anything_pending() const {
    const auto all = communicators();
    return std::any_of(all.begin(), all.end(), [](const auto& one) { return !one->idle(); });
}

void Engine::hush() noexcept {
    std::uint64_t count = 0;
    wake_.drain();
    (void)!::read(alarm_.get(), &count, sizeof count);
}

bool Engine::look_for_deaths() {
    std::vector<std::shared_ptr<Process>> processes;
    {
        const std::lock_guard lock(mutex_);
        std::erase_if(processes_, [](const auto& one) { return one.expired(); });
        for (const auto& one : processes_) {
            processes.push_back(one.lock());
        }
        std::erase(processes, nullptr);
    }
    bool news = false;
    for (const auto& process : processes) {
        if (process->dead.load(std::memory_order_relaxed)) {
            continue;
        }
        // acquire: what the dead posted before is visible
        const bool died = (process->arena->header().life.load(std::memory_order_acquire) & FUTEX_OWNER_DIED) != 0;
        if (died) {
            process->dead.store(true, std::memory_order_seq_cst);  // flags are looked at once more after this
            news = true;
        }
    }
    epoll_event events[16];
    const int count = ::epoll_wait(deaths_->get(), events, 16, 0);
    for (int i = 0; i < count; ++i) {
        const int fd = events[i].data.fd;
        for (const auto& process : processes) {
            if (process->pidfd.get() == fd && !process->dead.exchange(true, std::memory_order_seq_cst)) {
                news = true;
            }
        }
        (void)::epoll_ctl(deaths_->get(), EPOLL_CTL_DEL, fd, nullptr);
    }
    return news;
}

void Engine::tick(TimePoint now) {
    (void)look_for_deaths();
    for (const auto& communicator : communicators()) {
        if (!communicator->idle()) {
            communicator->check(now);
        }
    }
    const std::lock_guard lock(mutex_);
    std::erase_if(graveyard_, [](const auto& one) { return one->try_free(); });
}

}  // namespace aiodist
