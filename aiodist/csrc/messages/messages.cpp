#include "messages/messages.hpp"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

namespace aiodist {

Messages::Messages(Communicator& communicator)
    : communicator_(communicator),
      pool_(communicator.engine()),
      peers_(static_cast<std::size_t>(communicator.size())) {}

Messages::Peer& Messages::peer(int q) {
    auto& entry = peers_[static_cast<std::size_t>(q)];
    if (!entry) {
        entry = std::make_unique<Peer>(communicator_, q);
        active_.push_back(entry.get());
    }
    return *entry;
}

void Messages::add(RequestRef request) {
    Peer& with = peer(request->call.root);
    if (request->call.collective == Collective::send) {
        request->seq = with.sent++;
        with.announcing.push_back(std::move(request));
        return;
    }
    const auto found = std::find_if(with.arrivals.begin(), with.arrivals.end(),
                                    [&](const Arrival& arrival) { return arrival.head.tag == request->call.tag; });
    if (found == with.arrivals.end()) {
        with.receives.push_back(std::move(request));
        return;
    }
    Arrival arrival = std::move(*found);
    with.arrivals.erase(found);
    begin(with, std::move(request), std::move(arrival));
}

bool Messages::step(bool large) {
    bool moved = false;
    moving_ = false;
    for (Peer* const with : active_) {
        withdraw_given_up(*with);
        moved = read(*with) || moved;
        moved = flush(*with) || moved;
        if (!failure_) {
            moving_ = stage_all(*with, large) || moving_;
            moving_ = copy_all(*with, large) || moving_;
            moved = flush(*with) || moving_ || moved;
        }
        if (failure_) {
            return true;
        }
    }
    return moved;
}

// --- Receiving ---

bool Messages::read(Peer& with) {
    RecordCopy copy;
    bool moved = false;
    // Only while something can come of it: what nobody has asked for stays with its sender, whose buffer is bounded.
    while ((!with.receives.empty() || !with.sending.empty()) && !failure_ && with.in.peek(copy)) {
        if (copy.head.kind == static_cast<std::uint8_t>(RecordKind::taken)) {
            taken(with, copy.head);
        } else if (copy.head.kind != static_cast<std::uint8_t>(RecordKind::message) || !arrive(with, copy)) {
            damaged_lane(with.rank);
        }
        with.in.take(copy);
        moved = true;
    }
    return moved;
}

/// False where the record can not be meant.
bool Messages::arrive(Peer& with, const RecordCopy& copy) {
    const Record& head = copy.head;
    std::uint64_t nbytes = head.itemsize;
    for (std::size_t i = 0; i < copy.shape.ndim; ++i) {
        if (__builtin_mul_overflow(nbytes, copy.shape.dims[i], &nbytes)) {
            return false;
        }
    }
    const std::size_t item = itemsize(static_cast<DType>(head.dtype));
    const bool is_short = head.block == kNoOffset;
    const bool is_direct = head.way == static_cast<std::uint8_t>(MessageWay::direct);
    const bool chunked = !is_short && !is_direct;
    if (nbytes != head.message_nbytes || nbytes > kMaxNbytes || (item != 0 && item != head.itemsize) ||
        (chunked &&
         (head.chunks == 0 || head.chunks > kMaxChunks || head.chunk_nbytes == 0 || head.chunk_nbytes > kLargeChunk)) ||
        (is_direct && direct(with, head) == nullptr)) {
        return false;
    }
    const auto receive = std::find_if(with.receives.begin(), with.receives.end(), [&](const RequestRef& request) {
        // an overdue one is expire()'s, whenever that comes
        return request->call.tag == head.tag && request->deadline > Clock::now();
    });
    Arrival arrival{head, copy.shape, copy.text, nullptr};
    if (is_short) {
        arrival.payload.reset(static_cast<std::byte*>(std::malloc(std::max<std::size_t>(nbytes, 1))));
        if (!arrival.payload) {
            throw std::bad_alloc();
        }
        std::memcpy(arrival.payload.get(), copy.payload, nbytes);
    }
    if (receive == with.receives.end()) {
        with.arrivals.push_back(std::move(arrival));
        return true;
    }
    RequestRef request = std::move(*receive);
    with.receives.erase(receive);
    begin(with, std::move(request), std::move(arrival));
    return true;
}

const std::byte* Messages::direct(const Peer& with, const Record& head) const {
    return communicator_.member(with.rank).process->arena->at(head.block, head.message_nbytes);
}

void Messages::begin(Peer& with, RequestRef request, Arrival&& arrival) {
    communicator_.matched(*request.get());
    request->seq = arrival.head.number;
    if (!fits(*request.get(), arrival)) {
        communicator_.settle(std::move(request), failure_);
        return;
    }
    try {
        make_room(*request.get(), arrival);
    } catch (const std::bad_alloc&) {
        failure_ = std::make_shared<Failure>(Failure{
            FailureKind::transport, communicator_.describe(*request.get()) + ": no memory for the message", {}});
        communicator_.settle(std::move(request), failure_);
        return;
    }
    if (arrival.payload) {
        if (arrival.head.message_nbytes != 0) {
            std::memcpy(request->call.output, arrival.payload.get(), arrival.head.message_nbytes);
        }
        with.short_received += arrival.head.message_nbytes + sizeof(Record);
        communicator_.lane(with.rank).received.store(with.short_received, std::memory_order_seq_cst);
        communicator_.member(with.rank).process->wake_sleepers();  // after the store
        communicator_.settle(std::move(request), nullptr);
        return;
    }
    const bool at_once = arrival.head.message_nbytes <= kAtOnceNbytes;
    request->large.store(!at_once, std::memory_order_relaxed);  // a hint for who waits
    with.receiving.push_back({std::move(request), std::move(arrival), 0, 0});
    Receiving& receiving = with.receiving.back();
    if (at_once) {
        (void)copy(with, receiving);
    }
    if (receiving.copied == receiving.arrival.head.message_nbytes) {
        tell(with, receiving);
        communicator_.settle(receiving.request, nullptr);
        with.receiving.pop_back();
    } else {
        if (receiving.arrival.head.way == static_cast<std::uint8_t>(MessageWay::in_turn)) {
            tell(with, receiving);  // that its receive is there
        }
    }
}

bool Messages::fits(const Request& request, const Arrival& arrival) {
    const Call& call = request.call;
    if (!call.has_place()) {
        return true;
    }
    const bool same =
        static_cast<std::uint8_t>(call.dtype) == arrival.head.dtype && call.itemsize == arrival.head.itemsize &&
        call.text == arrival.text && call.shape.ndim == arrival.shape.ndim &&
        std::equal(call.shape.dims.begin(), call.shape.dims.begin() + call.shape.ndim, arrival.shape.dims.begin());
    if (!same) {
        failure_ = communicator_.message_mismatch(request, arrival.head, arrival.shape, arrival.text);
    }
    return same;
}

void Messages::make_room(Request& request, const Arrival& arrival) const {
    if (request.call.has_place()) {
        return;
    }
    constexpr std::size_t kAlign = 64;
    const std::uint64_t nbytes = arrival.head.message_nbytes;
    Received& received = request.received;
    received.data.reset(
        static_cast<std::byte*>(std::aligned_alloc(kAlign, round_up(std::max<std::uint64_t>(nbytes, 1), kAlign))));
    if (!received.data) {
        throw std::bad_alloc();
    }
    received.nbytes = nbytes;
    received.dtype = static_cast<DType>(arrival.head.dtype);
    received.itemsize = arrival.head.itemsize;
    received.text = arrival.text;
    received.arrays.push_back({0, {arrival.shape.dims.begin(), arrival.shape.dims.begin() + arrival.shape.ndim}});
    request.call.output = received.data.get();
}

/// Copies a piece of a long message that its sender has staged, or all that it has where the message is not large;
/// false where there is none.
bool Messages::copy(Peer& with, Receiving& receiving) {
    if (!copy_piece(with, receiving)) {
        return false;
    }
    while (receiving.arrival.head.message_nbytes <= kAtOnceNbytes && copy_piece(with, receiving)) {
    }
    return true;
}

bool Messages::copy_piece(Peer& with, Receiving& receiving) {
    const Record& head = receiving.arrival.head;
    const PeerArena& arena = *communicator_.member(with.rank).process->arena;
    const std::uint64_t left = head.message_nbytes - receiving.copied;
    std::byte* const to = receiving.request->call.output + receiving.copied;
    if (left == 0) {
        return false;
    }
    if (head.way == static_cast<std::uint8_t>(MessageWay::direct)) {
        const std::uint64_t count = std::min(kPiece, left);
        copy_cached(to, direct(with, head) + receiving.copied, count);
        receiving.copied += count;
        return true;
    }
    const auto* const first = reinterpret_cast<const ChunkHead*>(arena.at(head.block, sizeof(ChunkHead)));
    if (first == nullptr || head.block % kPage != 0) {
        damaged_lane(with.rank);
    }
    // seq_cst: acquires the data and their chunk's offset; may be the last look before a sleep
    const std::uint64_t staged = first->staged.load(std::memory_order_seq_cst);
    if (staged <= receiving.copied || staged > head.message_nbytes) {
        return staged > head.message_nbytes ? (damaged_lane(with.rank), false) : false;
    }
    const std::uint64_t within = receiving.copied % head.chunk_nbytes;
    const std::uint64_t count = std::min({kPiece, staged - receiving.copied, head.chunk_nbytes - within});
    const std::uint64_t chunk = first->chunks[receiving.copied / head.chunk_nbytes % head.chunks];
    const std::byte* const from = arena.at(chunk, sizeof(ChunkHead) + head.chunk_nbytes);
    if (from == nullptr) {
        damaged_lane(with.rank);
    }
    (head.message_nbytes >= kStreamingNbytes ? copy_streaming : copy_cached)(to, from + sizeof(ChunkHead) + within,
                                                                             count);
    receiving.copied += count;
    return true;
}

bool Messages::copy_all(Peer& with, bool large) {
    bool moved = false;
    for (auto receiving = with.receiving.begin(); receiving != with.receiving.end();) {
        const Record& head = receiving->arrival.head;
        if (!large && head.message_nbytes > kAtOnceNbytes) {
            ++receiving;
            continue;
        }
        const bool copied = copy(with, *receiving);
        const bool done = receiving->copied == head.message_nbytes;
        // Its chunks are used again.
        if (done || (head.chunks > 1 && receiving->copied - receiving->told >= kTold)) {
            tell(with, *receiving);
            receiving->told = receiving->copied;
        }
        moved = moved || copied;
        if (done) {
            communicator_.settle(receiving->request, nullptr);
            receiving = with.receiving.erase(receiving);
        } else {
            ++receiving;
        }
    }
    return moved;
}

void Messages::tell(Peer& with, const Receiving& receiving) {
    Record record{};
    record.kind = static_cast<std::uint8_t>(RecordKind::taken);
    record.number = receiving.arrival.head.number;
    record.block = receiving.copied;
    with.telling.push_back(record);
}

void Messages::withdraw_given_up(Peer& with) {
    for (auto receive = with.receives.begin(); receive != with.receives.end();) {
        if ((*receive)->given_up()) {
            communicator_.settle(std::move(*receive), communicator_.withdrawn());
            receive = with.receives.erase(receive);
        } else {
            ++receive;
        }
    }
}

void Messages::expire(TimePoint now) {
    for (Peer* const with : active_) {
        withdraw_given_up(*with);
        const bool left = !with->receives.empty() && communicator_.has_left(with->rank);
        if (left) {
            (void)read(*with);  // what was sent before counts
        }
        for (auto receive = with->receives.begin(); receive != with->receives.end();) {
            if (left || (*receive)->deadline <= now) {
                FailurePtr failure = left ? communicator_.lost(*receive->get(), {with->rank})
                                          : communicator_.message_timed_out(*receive->get());
                communicator_.settle(std::move(*receive), std::move(failure));
                receive = with->receives.erase(receive);
            } else {
                ++receive;
            }
        }
    }
}

// --- How it ends otherwise ---

bool Messages::pending() const {
    return std::any_of(active_.begin(), active_.end(), [](const Peer* with) {
        return !with->receives.empty() || !with->receiving.empty() || !with->announcing.empty() ||
               std::any_of(with->sending.begin(), with->sending.end(),
                           [](const Sending& sending) { return static_cast<bool>(sending.request); });
    });
}

bool Messages::has_large() const noexcept {
    return std::any_of(active_.begin(), active_.end(), [](const Peer* with) {
        return std::any_of(with->receiving.begin(), with->receiving.end(),
                           [](const Receiving& one) { return one.arrival.head.message_nbytes > kAtOnceNbytes; }) ||
               std::any_of(with->sending.begin(), with->sending.end(),
                           [](const Sending& one) { return one.nbytes > kAtOnceNbytes; });
    });
}

FailurePtr Messages::trouble(TimePoint now) const {
    for (const Peer* const with : active_) {
        std::vector<const Request*> requests;
        for (const RequestRef& request : with->announcing) {
            requests.push_back(request.get());
        }
        for (const Sending& sending : with->sending) {
            if (sending.request) {
                requests.push_back(sending.request.get());
            }
        }
        for (const Receiving& receiving : with->receiving) {
            requests.push_back(receiving.request.get());
        }
        const Request* const first = !requests.empty()         ? requests.front()
                                     : !with->receives.empty() ? with->receives.front().get()
                                                               : nullptr;
        if (first == nullptr) {
            continue;
        }
        if (FailurePtr failure = communicator_.lost(*first, {with->rank})) {
            return failure;
        }
        for (const Request* const request : requests) {
            if (request->deadline <= now) {
                return communicator_.message_timed_out(*request);
            }
        }
    }
    return nullptr;
}

void Messages::fail_all(const FailurePtr& failure) {
    for (Peer* const with : active_) {
        for (auto* const queue : {&with->announcing, &with->receives}) {
            for (RequestRef& request : *queue) {
                communicator_.settle(std::move(request), failure);
            }
            queue->clear();
        }
        for (Receiving& receiving : with->receiving) {
            communicator_.settle(std::move(receiving.request), failure);
        }
        with->receiving.clear();
        for (Sending& sending : with->sending) {  // their chunks stay: the peer may be reading
            if (sending.request) {
                communicator_.settle(std::exchange(sending.request, RequestRef()), failure);
            }
        }
    }
}

void Messages::release() {
    for (Peer* const with : active_) {
        for (Sending& sending : with->sending) {
            give_back(sending);
        }
        with->sending.clear();
        with->out.release();
    }
    pool_.clear();
}

}  // namespace aiodist
