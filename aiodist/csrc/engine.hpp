#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "request.hpp"
#include "shm/arena.hpp"
#include "shm/bell.hpp"

namespace aiodist {

class Communicator;

/// What messages of one process may take together while they wait to be received (DESIGN section 2).
inline constexpr std::uint64_t kSendBufferNbytes = std::uint64_t{256} << 20;

/// A process whose memory we read: a peer, or this one.
struct Process {
    Process() = default;
    Process(const Process&) = delete;
    Process& operator=(const Process&) = delete;
    ~Process();

    std::shared_ptr<PeerArena> arena;
    Bell bell;
    Fd pidfd;
    std::shared_ptr<const Fd> watched_by;  // the engine's epoll that holds pidfd
    std::int32_t pid = 0;
    bool self = false;
    std::atomic<bool> dead{false};

    /// Rings if anybody there sleeps. Call after a seq_cst store of a flag: either that thread sees the flag in its
    /// last look, or we see its sleepers word (both sides store first and load second, all seq_cst, so at least one
    /// load sees the other's store).
    void wake_sleepers() const noexcept {
        if (arena->header().sleepers.load(std::memory_order_seq_cst) != 0) {
            bell.ring();
        }
    }
};

/// What a process gives to its peers; they get duplicates.
struct ProcessFds {
    int arena = -1;
    int bell = -1;
    int pidfd = -1;
    std::int32_t pid = 0;
};

/// Drives all communicators of a process: an ordinary object (tests make one a rank), of which Python makes one.
class Engine : public std::enable_shared_from_this<Engine> {
 public:
    static std::shared_ptr<Engine> create();
    ~Engine();

    Arena& arena() noexcept { return *arena_; }
    const std::shared_ptr<Process>& self() const noexcept { return self_; }
    /// Duplicates of this process's descriptors, to be passed to a peer; owned by the engine.
    ProcessFds fds() const noexcept;
    /// Takes a peer's descriptors (and closes what is not kept). Throws where they are no arena of ours.
    std::shared_ptr<Process> attach(Fd arena, Fd bell, Fd pidfd, std::int32_t pid);

    void add(std::shared_ptr<Communicator> communicator);
    void remove(const Communicator& communicator);

    /// Advances every communicator; true if anything moved.
    bool poll();
    /// What a loop does when the bell rang.
    void on_bell();
    int bell_fd() const noexcept { return self_->bell.fd(); }
    /// Blocks until the request is done, `until`, or a signal came (then false at once, so that the caller can look at
    /// it).
    enum class Wait : std::uint8_t { done, interrupted, expired };
    Wait wait(Request& request, TimePoint until);
    /// Polls for at most `at_most`; true if the request is done.
    bool spin(Request& request, Clock::duration at_most);
    /// Moves data for at most `at_most`: for as long as there were some in the last `patience`, or the first ones come
    /// within `first`.
    enum class Move : std::uint8_t { done, idle, more };
    Move move(Request& request, Clock::duration at_most, Clock::duration first, Clock::duration patience);
    /// Marks a sleeper of this process: a loop that suspends or a thread about to sleep. Flags must be looked at again
    /// afterwards.
    void sleepers_add(std::int64_t delta) noexcept;

    /// Tells the peers which core this thread runs on; returns it.
    int note_core() noexcept;
    /// Moves this thread to one of its allowed cores outside `taken`, once; false if there is none, or it has just
    /// moved.
    bool step_aside(const std::vector<int>& taken) noexcept;
    /// True if there are more ranks than cores.
    bool crowded() const noexcept;

    /// Makes the engine thread look at its work now.
    void wake();
    /// The same a little later: for calls whose thread will most likely block in them at once and do the work itself.
    /// `others`: some that it did not block in are still waiting, and not longer than that.
    void wake_soon(bool others);
    /// Makes sure that somebody looks at deaths and at `deadline` while a request is pending.
    void watch(TimePoint deadline);
    /// Index of "file:line" in the arena's table of call sites, 0 where there is no room or nothing is known.
    std::uint32_t site(const std::string& text);
    /// " at file:line" for a process's call site, or nothing where that is not known.
    std::string site_text(const Process& process, std::uint32_t index) const;
    /// The communicator of member `q` of the same channel, where that rank lives in this process.
    std::shared_ptr<Communicator> local(const Communicator& channel, int q) const;
    /// Ends the thread if no communicator is open.
    void rest();
    /// Closes every communicator: what a process does that ends without closing its groups.
    void leave_all();
    /// Ends the thread and lets go of everything. Bounded: the thread never waits for a peer.
    void stop();
    std::int32_t pid() const noexcept { return pid_; }
    /// Takes room for a message that waits to be received; false where there is none. The counter guards nothing else.
    bool take_send_buffer(std::uint64_t nbytes) noexcept {
        std::uint64_t left = send_buffer_.load(std::memory_order_relaxed);
        while (left >= nbytes && !send_buffer_.compare_exchange_weak(left, left - nbytes, std::memory_order_relaxed)) {
        }
        return left >= nbytes;
    }
    void give_send_buffer(std::uint64_t nbytes) noexcept { send_buffer_.fetch_add(nbytes, std::memory_order_relaxed); }

 private:
    Engine();
    void run() noexcept;
    void ensure_thread();
    void join();
    void hold_life_word() noexcept;
    bool look_for_deaths();
    void tick(TimePoint now);
    bool serve(bool& busy);
    void sleep(bool busy, TimePoint last_pending);
    bool anything_pending() const;
    bool has_left();
    void hush() noexcept;
    unsigned pauses() const noexcept;
    std::vector<std::shared_ptr<Communicator>> communicators() const;

    std::shared_ptr<Arena> arena_;
    std::shared_ptr<Process> self_;
    Bell wake_;
    Fd alarm_;                                       // timerfd of wake_soon()
    Fd wakes_;                                       // epoll of wake_ and alarm_
    std::shared_ptr<const Fd> deaths_;               // epoll of the peers' pidfds
    std::mutex rest_mutex_;                          // one rest() at a time
    mutable std::mutex mutex_;                       // processes_, communicators_, graveyard_, sites_, thread_, ended_
    std::vector<std::weak_ptr<Process>> processes_;  // alive while a communicator reads them
    std::vector<std::shared_ptr<Communicator>> communicators_;
    std::vector<std::shared_ptr<Communicator>> graveyard_;  // closed, block still readable by a peer
    std::unordered_map<std::string, std::uint32_t> sites_;
    std::thread thread_;
    bool ended_ = false;                // the thread did, by itself
    std::atomic<bool> leaving_{false};  // it does once its peers have left
    std::atomic<bool> stopping_{false};
    std::atomic<bool> asleep_{false};  // the thread sleeps or is about to: wake() must ring
    std::atomic<std::int64_t> next_look_{
        0};  // steady-clock ns of the engine's next tick; kAsleep while it sleeps without limit
    std::atomic<std::int64_t> last_aside_{0};  // steady-clock ns
    std::atomic<std::int64_t> alarm_set_{0};   // when wake_soon() last set the alarm; steady-clock ns
    std::atomic<int> ranks_here_{1};           // the most members of a communicator: who may want a core at once
    std::atomic<std::uint64_t> send_buffer_{kSendBufferNbytes};
    std::int32_t pid_ = 0;
};

/// True in a child of the process that made the engines: nothing of theirs may be touched.
std::int32_t present_pid() noexcept;

}  // namespace aiodist
