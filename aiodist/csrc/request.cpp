#include "request.hpp"

#include <algorithm>

namespace aiodist {

void Port::push(std::uint64_t id) {
    bool first = false;
    {
        const std::lock_guard lock(mutex_);
        first = queue_.empty();
        queue_.push_back(id);
    }
    if (first) {  // otherwise the bell has rung for those before and the queue was not taken since
        bell_.ring();
    }
}

void Port::take(std::vector<std::uint64_t>& ids) {
    ids.clear();
    bell_.drain();  // before the queue: a push after the swap rings again
    const std::lock_guard lock(mutex_);
    ids.swap(queue_);
}

Request::Request(std::shared_ptr<Communicator> owner, Call&& what)
    : call(std::move(what)), communicator_(std::move(owner)) {}

Request::~Request() = default;

void Request::finish(FailurePtr failure) {
    std::vector<std::pair<std::shared_ptr<Port>, std::uint64_t>> waiters;
    {
        const std::lock_guard lock(waiters_mutex_);
        if (done()) {
            return;  // a refused call, heard of before all its members came
        }
        failure_ = std::move(failure);
        // release: pairs with state()
        state_.store(failure_ ? State::failed : State::done, std::memory_order_release);
        waiters.swap(waiters_);
    }
    for (const auto& [port, id] : waiters) {
        port->push(id);
    }
}

bool Request::has_waiters() {
    const std::lock_guard lock(waiters_mutex_);
    return !waiters_.empty() || blocked.load(std::memory_order_relaxed) > 0;  // both change under the GIL
}

bool Request::add_waiter(std::shared_ptr<Port> port, std::uint64_t id) {
    const std::lock_guard lock(waiters_mutex_);
    if (done()) {
        return false;
    }
    waiters_.emplace_back(std::move(port), id);
    return true;
}

void Request::remove_waiter(const Port& port, std::uint64_t id) {
    const std::lock_guard lock(waiters_mutex_);
    std::erase_if(waiters_,
                  [&port, id](const auto& waiter) { return waiter.first.get() == &port && waiter.second == id; });
}

}  // namespace aiodist
