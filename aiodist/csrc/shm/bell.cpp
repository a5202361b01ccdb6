#include "shm/bell.hpp"

#include <poll.h>
#include <sched.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <ctime>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace aiodist {

Bell::Bell() : fd_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    if (!fd_) {
        throw_errno("eventfd");
    }
}

void Bell::ring() const noexcept {
    const std::uint64_t one = 1;
    // EAGAIN means the counter is full, which is as loud as a bell can ring.
    (void)!::write(fd_.get(), &one, sizeof one);
}

void Bell::drain() const noexcept {
    std::uint64_t count = 0;
    (void)!::read(fd_.get(), &count, sizeof count);
}

bool sleep_on(int first, int second, int third, Clock::duration at_most) noexcept {
    pollfd entries[] = {{first, POLLIN, 0}, {second, POLLIN, 0}, {third, POLLIN, 0}};
    const auto ns = std::max<std::int64_t>(0, std::chrono::duration_cast<std::chrono::nanoseconds>(at_most).count());
    const timespec limit{static_cast<time_t>(ns / 1'000'000'000), static_cast<long>(ns % 1'000'000'000)};
    return ::ppoll(entries, 3, &limit, nullptr) >= 0 || errno != EINTR;
}

void pause() noexcept {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield" ::: "memory");
#endif
}

#if defined(__x86_64__)
__attribute__((target("prfchw")))
#endif
void expect_to_write(const void* at, std::size_t nbytes) noexcept {
    constexpr std::size_t kLineNbytes = 64;
    for (std::size_t done = 0; done < nbytes; done += kLineNbytes) {
        __builtin_prefetch(static_cast<const std::byte*>(at) + done, 1);
    }
}

bool Backoff::wait(bool give_way) noexcept {
    turn_ = give_way ? std::max(turn_, pauses_) : turn_;
    if (turn_ < pauses_) {
        pause();
    } else if (turn_ < pauses_ + kYields) {
        ::sched_yield();
    } else {
        return false;
    }
    ++turn_;
    return true;
}

}  // namespace aiodist
