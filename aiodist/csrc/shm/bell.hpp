#pragma once

#include <chrono>
#include <cstdint>

#include "shm/fd.hpp"

namespace aiodist {

using Clock = std::chrono::steady_clock;
using TimePoint = Clock::time_point;
/// Nanoseconds of the steady clock, for atomics.
inline std::int64_t ns(TimePoint at) {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(at.time_since_epoch()).count();
}
/// Longest sleep before flags, deaths and deadlines are looked at again.
inline constexpr std::chrono::milliseconds kSlice{250};

/// An eventfd: rings are kept until drained, so one that comes between a sleeper's last look and its sleep still wakes
/// it.
class Bell {
 public:
    Bell();
    explicit Bell(Fd fd) noexcept : fd_(std::move(fd)) {}
    int fd() const noexcept { return fd_.get(); }
    void ring() const noexcept;
    void drain() const noexcept;

 private:
    Fd fd_;
};

/// Sleeps until one of up to three descriptors (−1: none) is readable, a signal comes (then false), or the time is up.
bool sleep_on(int first, int second, int third, Clock::duration at_most) noexcept;

/// Tells the processor that this is a waiting loop.
void pause() noexcept;

/// Tells the processor that this thread is about to write `nbytes` from `at` on, which another core may hold.
void expect_to_write(const void* at, std::size_t nbytes) noexcept;

/// Waiting between looks at a flag: a few pauses, then yields; afterwards it is time to sleep. The pauses only pay when
/// whoever is waited for runs on another core at the same time; the yields are what lets more ranks than cores make
/// progress.
class Backoff {
 public:
    explicit Backoff(unsigned pauses) noexcept : pauses_(pauses) {}
    /// False once the budget is spent. `give_way` skips the pauses.
    bool wait(bool give_way = false) noexcept;
    void reset() noexcept { turn_ = 0; }

 private:
    static constexpr unsigned kYields = 40;
    unsigned pauses_;
    unsigned turn_ = 0;
};

}  // namespace aiodist
