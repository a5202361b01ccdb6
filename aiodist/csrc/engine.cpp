#include "engine.hpp"

#include <pthread.h>
#include <sched.h>
#include <sys/epoll.h>
#include <sys/syscall.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "communicator.hpp"

namespace aiodist {
namespace {

// About 5 µs of pauses where everybody may have a core.
constexpr unsigned kPauses = 150;
// Where there are more ranks than cores, about what a switch to another of them and back costs; and none while the core
// is needed by a rank that this one waits for.
constexpr unsigned kCrowdedPauses = 20;
// A thread that found itself on a peer's core moves at most this often.
constexpr std::int64_t kAsideNs = 1'000'000;
// Looks at the flags between two looks at the clock.
constexpr int kLooks = 8;

int usable_cores() {
    cpu_set_t set;
    return ::sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
}

std::atomic<std::int32_t> pid_now{0};

}  // namespace

std::int32_t present_pid() noexcept {
    // A system call less for every collective: the value changes only in a forked child, where the handler below stores
    // it.
    static const int registered =
        ::pthread_atfork(nullptr, nullptr, [] { pid_now.store(::getpid(), std::memory_order_relaxed); });
    (void)registered;
    if (pid_now.load(std::memory_order_relaxed) == 0) {
        pid_now.store(::getpid(), std::memory_order_relaxed);
    }
    return pid_now.load(std::memory_order_relaxed);  // one thread only exists in a fresh child: nothing to order
}

Process::~Process() {
    if (watched_by) {  // closing our descriptor is not enough: the peer holds the same open file
        (void)::epoll_ctl(watched_by->get(), EPOLL_CTL_DEL, pidfd.get(), nullptr);
    }
}

std::shared_ptr<Engine> Engine::create() { return std::shared_ptr<Engine>(new Engine); }

Engine::Engine()
    : arena_(Arena::create()),
      self_(std::make_shared<Process>()),
      deaths_(std::make_shared<const Fd>(::epoll_create1(EPOLL_CLOEXEC))),
      pid_(present_pid()) {
    // An epoll descriptor is readable when one of its members is, so that one entry stands for all in sleep_on().
    alarm_ = Fd(::timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK));
    wakes_ = Fd(::epoll_create1(EPOLL_CLOEXEC));
    if (!*deaths_ || !alarm_ || !wakes_) {
        throw_errno("making the engine's descriptors");
    }
    for (const int fd : {alarm_.get(), wake_.fd()}) {
        epoll_event event{};
        event.events = EPOLLIN;
        if (::epoll_ctl(wakes_.get(), EPOLL_CTL_ADD, fd, &event) != 0) {
            throw_errno("watching the engine's descriptors");
        }
    }
    self_->arena = std::make_shared<PeerArena>(arena_->share_fd());
    self_->pid = pid_;
    self_->self = true;
    self_->pidfd = Fd(static_cast<int>(::syscall(SYS_pidfd_open, pid_, 0)));
    if (!self_->pidfd) {
        throw_errno("pidfd_open");
    }
}

Engine::~Engine() { stop(); }

ProcessFds Engine::fds() const noexcept { return {arena_->share_fd(), self_->bell.fd(), self_->pidfd.get(), pid_}; }

std::shared_ptr<Process> Engine::attach(Fd arena, Fd bell, Fd pidfd, std::int32_t pid) {
    auto process = std::make_shared<Process>();
    process->arena = std::make_shared<PeerArena>(arena.get());
    process->bell = Bell(std::move(bell));
    process->pidfd = std::move(pidfd);
    process->pid = pid;
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.fd = process->pidfd.get();
    if (::epoll_ctl(deaths_->get(), EPOLL_CTL_ADD, process->pidfd.get(), &event) != 0) {
        throw_errno("watching the process of a peer");
    }
    process->watched_by = deaths_;
    {
        const std::lock_guard lock(mutex_);
        processes_.push_back(process);
    }
    ensure_thread();  // holds the life word that the peers watch
    return process;
}

void Engine::add(std::shared_ptr<Communicator> communicator) {
    const std::lock_guard lock(mutex_);
    if (communicator->size() > ranks_here_.load(std::memory_order_relaxed)) {  // a hint for the waiting policy
        ranks_here_.store(communicator->size(), std::memory_order_relaxed);
    }
    communicators_.push_back(std::move(communicator));
}

void Engine::remove(const Communicator& communicator) {
    std::shared_ptr<Communicator> closed;
    {
        const std::lock_guard lock(mutex_);
        const auto found = std::find_if(communicators_.begin(), communicators_.end(),
                                        [&](const auto& one) { return one.get() == &communicator; });
        if (found == communicators_.end()) {
            return;
        }
        closed = *found;
        communicators_.erase(found);
        graveyard_.push_back(closed);
        std::erase_if(graveyard_, [](const auto& one) { return one->try_free(); });
    }
}

std::vector<std::shared_ptr<Communicator>> Engine::communicators() const {
    const std::lock_guard lock(mutex_);
    return communicators_;
}

std::shared_ptr<Communicator> Engine::local(const Communicator& channel, int q) const {
    for (auto& one : communicators()) {
        if (one->id() == channel.id() && one->rank() == q) {
            return one;
        }
    }
    return nullptr;
}

// --- Call sites ---

std::uint32_t Engine::site(const std::string& text) {
    const std::lock_guard lock(mutex_);
    const auto known = sites_.find(text);
    if (known != sites_.end()) {
        return known->second;
    }
    ArenaHeader& header = arena_->header();
    const std::uint32_t index = header.site_count.load(std::memory_order_relaxed);
    const std::size_t table = index / kSiteCount;
    if (table == kSiteTables) {
        return 0;
    }
    if (table > 0 && index % kSiteCount == 0) {
        header.site_tables[table - 1] = arena_->allocate(sizeof(Site) * kSiteCount);
    }
    Site* const sites = table == 0 ? header.sites : reinterpret_cast<Site*>(arena_->at(header.site_tables[table - 1]));
    // The end of a long path says more than its beginning.
    const std::size_t skipped = text.size() < kSiteNbytes ? 0 : text.size() - (kSiteNbytes - 1);
    std::memcpy(sites[index % kSiteCount].text, text.c_str() + skipped, text.size() - skipped + 1);
    header.site_count.store(index + 1, std::memory_order_release);  // pairs with the acquire in site_text()
    sites_.emplace(text, index + 1);
    return index + 1;
}

std::string Engine::site_text(const Process& process, std::uint32_t index) const {
    const ArenaHeader& header = process.arena->header();
    const std::size_t table = (index - std::size_t{1}) / kSiteCount;
    if (index == 0 || index > header.site_count.load(std::memory_order_acquire) || table >= kSiteTables) {
        return {};
    }
    const Site* const sites = table == 0 ? header.sites
                                         : reinterpret_cast<const Site*>(process.arena->at(
                                               header.site_tables[table - 1], sizeof(Site) * kSiteCount));
    if (sites == nullptr) {
        return {};
    }
    char text[kSiteNbytes];
    std::memcpy(text, sites[(index - 1) % kSiteCount].text, sizeof text);
    text[kSiteNbytes - 1] = '\0';
    return std::string(" at ") + text;
}

// --- Progress by callers ---

bool Engine::poll() {
    bool moved = false;
    for (const auto& communicator : communicators()) {
        moved = communicator->progress() != Communicator::Progress::none || moved;
    }
    return moved;
}

void Engine::on_bell() {
    self_->bell.drain();
    bool served = false;
    bool more = false;
    for (const auto& communicator : communicators()) {
        // Large calls that the engine serves are left to it: a loop has better things to do than to copy segments.
        const bool engine = communicator->serves_engine();
        const bool moved = communicator->progress(!engine) != Communicator::Progress::none;
        served = served || (engine && communicator->has_long());
        more = more || (moved && communicator->moving() && !engine);
    }
    // Who sleeps for a large call would miss what we have drained.
    if (served) {
        wake();
    }
    if (more) {
        self_->bell.ring();
    }
}

void Engine::sleepers_add(std::int64_t delta) noexcept {
    // seq_cst: before the last look at the flags, see Process::wake_sleepers
    arena_->header().sleepers.fetch_add(static_cast<std::uint64_t>(delta), std::memory_order_seq_cst);
}

int Engine::note_core() noexcept {
    const int core = ::sched_getcpu();
    std::atomic<std::int32_t>& noted = arena_->header().core;
    if (noted.load(std::memory_order_relaxed) != core) {  // a hint; the line stays clean while nothing changes
        noted.store(core, std::memory_order_relaxed);
    }
    return core;
}

bool Engine::step_aside(const std::vector<int>& taken) noexcept {
    const std::int64_t now = ns(Clock::now());
    if (now - last_aside_.load(std::memory_order_relaxed) <
        kAsideNs) {  // a hint: two threads that move at once do no harm
        return false;
    }
    last_aside_.store(now, std::memory_order_relaxed);
    cpu_set_t allowed;
    if (::sched_getaffinity(0, sizeof allowed, &allowed) != 0) {
        return false;
    }
    cpu_set_t free = allowed;
    for (const int core : taken) {
        CPU_CLR(static_cast<std::size_t>(core), &free);
    }
    // The narrow mask moves the thread at once; the wide one leaves the scheduler its freedom again.
    const bool moved = CPU_COUNT(&free) != 0 && ::sched_setaffinity(0, sizeof free, &free) == 0;
    return moved && ::sched_setaffinity(0, sizeof allowed, &allowed) == 0;
}

bool Engine::crowded() const noexcept {
    static const int cores = usable_cores();
    return ranks_here_.load(std::memory_order_relaxed) > cores;  // a hint
}

unsigned Engine::pauses() const noexcept { return crowded() ? kCrowdedPauses : kPauses; }

bool Engine::spin(Request& request, Clock::duration at_most) {
    Communicator& communicator = *request.communicator();
    const bool crowd = crowded();
    const auto look = [&] {
        for (int i = 0; i < kLooks; ++i) {
            (void)communicator.progress();
            if (request.done()) {
                return true;
            }
            if (crowd && communicator.waits_for_this_core(request)) {
                return false;
            }
            pause();
        }
        return false;
    };
    if (look()) {  // before the first look at the clock: most waits are this short
        return true;
    }
    const TimePoint until = Clock::now() + at_most;
    while (communicator.has_core() && Clock::now() < until) {
        if (look()) {
            return true;
        }
    }
    return false;
}

Engine::Move Engine::move(Request& request, Clock::duration at_most, Clock::duration first, Clock::duration patience) {
    Communicator& communicator = *request.communicator();
    TimePoint now = Clock::now();
    const TimePoint until = now + at_most;
    TimePoint idle_until = now + first;
    while (now < until) {
        const auto moved = communicator.progress();
        if (request.done()) {
            return Move::done;
        }
        now = Clock::now();
        if (moved == Communicator::Progress::moved) {
            idle_until = now + patience;
        } else if (moved == Communicator::Progress::elsewhere || now >= idle_until || !communicator.has_core()) {
            return Move::idle;
        } else {
            pause();
        }
    }
    return Move::more;
}

Engine::Wait Engine::wait(Request& request, TimePoint until) {
    thread_local const auto port = std::make_shared<Port>();
    thread_local std::vector<std::uint64_t> ids;
    struct Help {
        explicit Help(Communicator& communicator) : communicator_(communicator) { communicator_.help(); }
        ~Help() { communicator_.unhelp(); }
        Communicator& communicator_;
    };
    Communicator& communicator = *request.communicator();
    const Help help(communicator);
    Backoff backoff(pauses());
    bool registered = false;
    TimePoint next_check = Clock::now() + kSlice;
    while (true) {
        const auto moved = communicator.progress();
        if (request.done()) {
            return Wait::done;
        }
        // However much there is to move, and for whomever: the caller looks at signals and at its own timeout in
        // between.
        if (moved == Communicator::Progress::moved && Clock::now() < until) {
            backoff.reset();
            continue;
        }
        if (crowded() ? backoff.wait(communicator.waits_for_this_core(request))
                      : communicator.has_core() && backoff.wait()) {
            continue;
        }
        if (moved == Communicator::Progress::elsewhere && Clock::now() < until) {
            std::this_thread::yield();
            continue;
        }
        if (!registered && !request.add_waiter(port, 0)) {
            return Wait::done;
        }
        registered = true;
        sleepers_add(1);
        bool undisturbed = true;
        if (communicator.progress() == Communicator::Progress::none && !request.done()) {
            const TimePoint now = Clock::now();
            undisturbed =
                sleep_on(bell_fd(), port->fd(), -1, std::min<Clock::duration>(kSlice, std::max(until, now) - now));
        }
        sleepers_add(-1);
        port->take(ids);
        on_bell();
        backoff.reset();
        const TimePoint now = Clock::now();
        if (now >= next_check) {
            next_check = now + kSlice;
            communicator.check(now);
        }
        if (request.done()) {
            return Wait::done;
        }
        if (!undisturbed || now >= until) {
            request.remove_waiter(*port, 0);
            return undisturbed ? Wait::expired : Wait::interrupted;
        }
    }
}

}  // namespace aiodist
