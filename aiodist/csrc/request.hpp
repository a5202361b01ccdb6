#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "collectives/rows.hpp"
#include "shm/bell.hpp"
#include "shm/layout.hpp"
#include "types.hpp"

namespace aiodist {

class Communicator;

enum class FailureKind : std::uint8_t {
    communication,  // aborted by a member
    timeout,
    peer_lost,
    mismatch,
    transport,
    refused,    // by a peer: the call only; the group goes on
    argument,   // the same on the rank whose argument it is
    withdrawn,  // a receive that nobody waits for any more; likewise
    closed,
};

/// Why a call, or a whole group, failed.
struct Failure {
    FailureKind kind;
    std::string text;
    std::vector<int> ranks;  // group ranks it is about
};
using FailurePtr = std::shared_ptr<const Failure>;

/// Where completions for one event loop, or one blocked thread, are queued. Native threads only queue and ring; whoever
/// owns the port takes the queue with whatever locks its own world needs.
class Port {
 public:
    int fd() const noexcept { return bell_.fd(); }
    void push(std::uint64_t id);
    /// Empties the queue into `ids` (which it clears first) and drains the bell.
    void take(std::vector<std::uint64_t>& ids);

 private:
    Bell bell_;
    std::mutex mutex_;
    std::vector<std::uint64_t> queue_;
};

/// The extents of an array in elements.
struct Shape {
    std::uint8_t ndim = 0;
    std::array<std::uint64_t, kMaxDims> dims;  // the first ndim count; the rest is not even initialised, or copied

    Shape() noexcept {}  // not defaulted: that would zero the extents wherever a Shape is value-initialised
    Shape(const Shape& other) noexcept { *this = other; }
    Shape& operator=(const Shape& other) noexcept {
        ndim = other.ndim;
        std::copy_n(other.dims.begin(), std::min<std::size_t>(ndim, kMaxDims), dims.begin());
        return *this;
    }
    ~Shape() = default;
};

/// One call as its rank asked for it. The caller keeps `input` and `output` alive until the request is done.
struct Call {
    Collective collective = Collective::none;
    Op op = Op::none;
    DType dtype = DType::raw;
    std::int8_t axis = 0;
    std::uint16_t flags = 0;  // kWildcard and its like
    std::int32_t root = -1;   // of a send or recv: the peer
    std::uint64_t tag = 0;    // of a send or recv
    std::uint32_t site = 0;
    std::uint32_t itemsize = 0;
    std::uint64_t nbytes = 0;  // of `input`; of `output` where there is only that
    std::uint64_t rows = 1;    // product of the extents before `axis`
    const std::byte* input = nullptr;
    std::byte* output = nullptr;       // neither this nor `outputs`: allocate once the headers tell how much
    Pieces<const std::byte> inputs{};  // in place of `input`: several arrays as one
    Pieces<std::byte> outputs{};
    bool refused = false;
    std::string table{};           // numbers, see varint.hpp and the flags
    std::vector<Call> sections{};  // of kMany: parts of one dtype each, one after the other
    std::string text;              // the dtype's description where its number does not say it; of a refused call, why
    Shape shape;

    /// What this member brings, from byte `first` on.
    Rows<const std::byte> source(std::size_t first = 0) const noexcept {
        return inputs.empty() ? Rows<const std::byte>::run(input + first, nbytes - first)
                              : Rows<const std::byte>::of(inputs, first);
    }
    /// Where byte `first` of the result and what follows it go.
    Rows<std::byte> target(std::size_t first, std::size_t count) const noexcept {
        return outputs.empty() ? Rows<std::byte>::run(output + first, count) : Rows<std::byte>::of(outputs, first);
    }
    bool brings() const noexcept { return input != nullptr || !inputs.empty(); }
    bool has_place() const noexcept { return output != nullptr || !outputs.empty(); }
};

struct FreeDeleter {
    void operator()(std::byte* at) const noexcept { std::free(at); }
};
using Buffer = std::unique_ptr<std::byte, FreeDeleter>;

/// A result whose extent only the headers told.
struct Received {
    Buffer data;
    std::uint64_t nbytes = 0;
    DType dtype = DType::raw;
    std::uint32_t itemsize = 0;
    std::string text;
    bool list = false;  // several arrays
    struct Array {
        std::uint64_t offset = 0;
        std::vector<std::uint64_t> shape;
    };
    std::vector<Array> arrays;
};

/// A call in flight. Written by whoever holds the communicator's claim until `state` says otherwise, read-only
/// afterwards.
class Request {
 public:
    enum class State : std::uint8_t { pending, done, failed };

    Request(std::shared_ptr<Communicator> owner, Call&& what);
    ~Request();
    Request(const Request&) = delete;
    Request& operator=(const Request&) = delete;

    State state() const noexcept {
        return state_.load(
            std::memory_order_acquire);  // pairs with the release in finish(): result and failure are visible
    }
    bool done() const noexcept { return state() != State::pending; }

    /// Ends the request and tells every waiter. A null failure is success.
    void finish(FailurePtr failure);
    /// Says that nobody wants the outcome any more. Only a receive that has no message yet heeds it.
    void give_up() noexcept { given_up_.store(true, std::memory_order_relaxed); }  // progress() follows
    bool given_up() const noexcept { return given_up_.load(std::memory_order_relaxed); }
    bool has_waiters();
    /// False if the request is done already: then nothing will be pushed.
    bool add_waiter(std::shared_ptr<Port> port, std::uint64_t id);
    void remove_waiter(const Port& port, std::uint64_t id);

    const FailurePtr& failure() const noexcept { return failure_; }
    const std::shared_ptr<Communicator>& communicator() const noexcept { return communicator_; }

    Call call;
    std::uint64_t seq = 0;
    TimePoint deadline = TimePoint::max();
    Clock::duration timeout{};
    bool engine_serves = false;            // counted in the communicator's engine_requests
    std::atomic<bool> unmatched{false};    // a receive without a message; changes under the communicator's issue mutex
    std::atomic<std::int32_t> blocked{0};  // threads that block for it
    std::atomic<bool> large{false};        // its data moves in segments, which the engine sees to
    Received received;
    Request* next = nullptr;  // in the communicator's queue that holds it

    void retain() noexcept { references_.fetch_add(1, std::memory_order_relaxed); }  // a new reference needs an old one
    void release() noexcept {
        // acq_rel: the last one to go sees what the others did with the request
        if (references_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
            delete this;
        }
    }

 private:
    std::atomic<std::uint32_t> references_{1};
    std::atomic<State> state_{State::pending};
    std::atomic<bool> given_up_{false};
    std::shared_ptr<Communicator> communicator_;
    FailurePtr failure_;
    std::mutex waiters_mutex_;
    std::vector<std::pair<std::shared_ptr<Port>, std::uint64_t>> waiters_;
};

/// An owning pointer to a Request.
class RequestRef {
 public:
    RequestRef() = default;
    static RequestRef adopt(Request* request) noexcept {
        RequestRef ref;
        ref.request_ = request;
        return ref;
    }
    static RequestRef share(Request* request) noexcept {
        request->retain();
        return adopt(request);
    }
    RequestRef(const RequestRef& other) noexcept : request_(other.request_) {
        if (request_ != nullptr) {
            request_->retain();
        }
    }
    RequestRef(RequestRef&& other) noexcept : request_(std::exchange(other.request_, nullptr)) {}
    RequestRef& operator=(RequestRef other) noexcept {
        std::swap(request_, other.request_);
        return *this;
    }
    ~RequestRef() {
        if (request_ != nullptr) {
            request_->release();
        }
    }
    Request* get() const noexcept { return request_; }
    Request* operator->() const noexcept { return request_; }
    explicit operator bool() const noexcept { return request_ != nullptr; }
    Request* leak() noexcept { return std::exchange(request_, nullptr); }

 private:
    Request* request_ = nullptr;
};

/// Requests in order, linked through themselves; holds a reference to each.
class RequestQueue {
 public:
    RequestQueue() = default;
    RequestQueue(const RequestQueue&) = delete;
    RequestQueue& operator=(const RequestQueue&) = delete;
    ~RequestQueue() {
        while (pop()) {
        }
    }
    bool empty() const noexcept { return head_ == nullptr; }
    Request* front() const noexcept { return head_; }
    void push(RequestRef ref) noexcept {
        Request* const request = ref.leak();
        request->next = nullptr;
        (tail_ == nullptr ? head_ : tail_->next) = request;
        tail_ = request;
    }
    RequestRef pop() noexcept {
        Request* const request = head_;
        if (request == nullptr) {
            return {};
        }
        head_ = request->next;
        if (head_ == nullptr) {
            tail_ = nullptr;
        }
        return RequestRef::adopt(request);
    }

 private:
    Request* head_ = nullptr;
    Request* tail_ = nullptr;
};

}  // namespace aiodist
