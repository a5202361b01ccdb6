// The sender's half of Messages.

#include <algorithm>
#include <cstring>

#include "messages/messages.hpp"

namespace aiodist {

bool Messages::flush(Peer& with) {
    bool moved = false;
    while (!with.telling.empty() && with.out.write(with.telling.front(), Call{}, 0)) {
        with.telling.pop_front();
        moved = true;
    }
    while (with.telling.empty() && !with.announcing.empty() && announce(with, with.announcing.front())) {
        with.announcing.pop_front();
        moved = true;
    }
    return moved;
}

bool Messages::announce(Peer& with, const RequestRef& request) {
    const Call& call = request->call;
    Record record{};
    record.kind = static_cast<std::uint8_t>(RecordKind::message);
    record.number = request->seq;
    record.tag = call.tag;
    record.message_nbytes = call.nbytes;
    record.block = kNoOffset;
    if (call.nbytes > kInlineMessage) {
        return announce_long(with, request, record);
    }
    // An empty message takes room too.
    const std::uint64_t room = call.nbytes + sizeof(Record);
    // seq_cst: this may be the last look before a sleep, see Process::wake_sleepers
    if (with.short_sent + room > kUnreceived &&
        with.short_sent + room - communicator_.lane_from(with.rank).received.load(std::memory_order_seq_cst) >
            kUnreceived) {
        return false;
    }
    if (!with.out.write(record, call, call.nbytes)) {
        return false;
    }
    with.short_sent += room;
    communicator_.settle(request, nullptr);
    return true;
}

bool Messages::announce_long(Peer& with, const RequestRef& request, Record record) {
    const Call& call = request->call;
    Engine& engine = communicator_.engine();
    Sending sending;
    sending.request = request;
    sending.number = request->seq;
    sending.nbytes = call.nbytes;
    sending.chunk_nbytes = chunk_nbytes_of(call.nbytes);
    const std::uint64_t needed = (call.nbytes + sending.chunk_nbytes - 1) / sending.chunk_nbytes;
    const std::uint64_t buffered = needed * sending.chunk_nbytes;
    if (needed <= kMaxChunks && engine.take_send_buffer(buffered)) {
        sending.buffered = buffered;
        sending.most_chunks = static_cast<std::uint32_t>(needed);
    } else if (const auto shared = engine.arena().offset_of(call.input, call.nbytes)) {
        record.way = static_cast<std::uint8_t>(MessageWay::direct);
        record.block = *shared;
        sending.staged = call.nbytes;
    } else {
        record.way = static_cast<std::uint8_t>(MessageWay::in_turn);
        sending.most_chunks = kWindowNbytes / sending.chunk_nbytes;
        sending.awaited = false;
    }
    record.chunks = sending.most_chunks;
    record.chunk_nbytes = sending.chunk_nbytes;
    if (sending.most_chunks != 0) {
        try {
            record.block =
                sending.awaited ? pool_.get(sending.chunk_nbytes) : engine.arena().allocate(sizeof(ChunkHead));
        } catch (...) {  // no memory
            give_back(sending);
            throw;
        }
        auto* const head = new (engine.arena().at(record.block)) ChunkHead;
        head->staged.store(0, std::memory_order_relaxed);  // the record publishes it
        if (sending.awaited) {
            head->chunks[0] = record.block;
            sending.chunks.push_back(record.block);
        } else {  // no chunk before its receive is there: nothing counts these
            sending.head = record.block;
        }
    }
    if (!with.out.write(record, call, 0)) {
        give_back(sending);
        return false;
    }
    with.sending.push_back(std::move(sending));
    Sending& placed = with.sending.back();
    if (call.nbytes <= kAtOnceNbytes) {
        (void)stage(placed);
    }
    return true;
}

/// Stages a piece of a message, or all of it where it is not large; false where there is nothing to stage, or no room.
bool Messages::stage(Sending& sending) {
    if (!stage_piece(sending)) {
        return false;
    }
    while (sending.nbytes <= kAtOnceNbytes && stage_piece(sending)) {
    }
    // Not for each piece, which a bell would cost as much as.
    communicator_.member(sending.request->call.root).process->wake_sleepers();
    if (sending.staged == sending.nbytes && sending.buffered != 0) {
        communicator_.settle(std::exchange(sending.request, RequestRef()), nullptr);
    }
    return true;
}

bool Messages::stage_piece(Sending& sending) {
    const std::uint64_t window = std::uint64_t{sending.chunk_nbytes} * sending.most_chunks;
    const std::uint64_t until = std::min(sending.nbytes, sending.taken + window);
    if (!sending.request || sending.most_chunks == 0 || !sending.awaited || sending.staged >= until) {
        return false;
    }
    if (sending.taken != 0 && sending.staged >= sending.taken + kAround && Clock::now() < sending.told_at + kKeepsUp) {
        return false;  // more chunks would only take the place of these in the caches
    }
    Arena& arena = communicator_.engine().arena();
    auto* const head =
        reinterpret_cast<ChunkHead*>(arena.at(sending.head != kNoOffset ? sending.head : sending.chunks.front()));
    const std::uint64_t within = sending.staged % sending.chunk_nbytes;
    const auto index = static_cast<std::size_t>(sending.staged / sending.chunk_nbytes % sending.most_chunks);
    if (index == sending.chunks.size()) {
        sending.chunks.push_back(pool_.get(sending.chunk_nbytes));
        head->chunks[index] = sending.chunks.back();
    }
    const std::uint64_t count = std::min({kPiece, until - sending.staged, sending.chunk_nbytes - within});
    communicator_.passing().copy(arena.at(sending.chunks[index]) + sizeof(ChunkHead) + within,
                                 sending.request->call.input + sending.staged, count);
    sending.staged += count;
    // seq_cst: releases the data; before the load in wake_sleepers()
    head->staged.store(sending.staged, std::memory_order_seq_cst);
    return true;
}

bool Messages::stage_all(Peer& with, bool large) {
    return std::any_of(with.sending.begin(), with.sending.end(),
                       [&](Sending& sending) { return (large || sending.nbytes <= kAtOnceNbytes) && stage(sending); });
}

/// The receiver says how much of a message it has.
void Messages::taken(Peer& with, const Record& head) {
    const auto found = std::find_if(with.sending.begin(), with.sending.end(),
                                    [&](const Sending& sending) { return sending.number == head.number; });
    if (found == with.sending.end() || head.block > found->staged || head.block < found->taken) {
        damaged_lane(with.rank);
    }
    found->taken = head.block;
    found->told_at = Clock::now();
    found->awaited = true;
    if (found->taken < found->nbytes) {
        if (found->buffered != 0) {  // so that a long message does not populate its own length; others use them in turn
            give_back(*found, static_cast<std::size_t>(found->taken / found->chunk_nbytes));
        }
        return;
    }
    if (found->request) {
        communicator_.settle(std::exchange(found->request, RequestRef()), nullptr);
    }
    give_back(*found);
    with.sending.erase(found);
}

/// Gives the chunks before `end` back, but for the first, whose head the receiver still reads.
void Messages::give_back(Sending& sending, std::size_t end) {
    for (; sending.given + 1 < end; ++sending.given) {
        pool_.put(sending.chunk_nbytes, sending.chunks[sending.given + 1]);
    }
}

void Messages::give_back(Sending& sending) {
    give_back(sending, sending.chunks.size());
    if (!sending.chunks.empty()) {
        pool_.put(sending.chunk_nbytes, sending.chunks.front());
    }
    sending.chunks.clear();
    sending.given = 0;
    if (sending.head != kNoOffset) {
        communicator_.engine().arena().release(std::exchange(sending.head, kNoOffset));
    }
    communicator_.engine().give_send_buffer(sending.buffered);
    sending.buffered = 0;
}

}  // namespace aiodist
