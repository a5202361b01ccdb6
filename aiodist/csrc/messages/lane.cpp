#include "messages/lane.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace aiodist {

void damaged_lane(int peer) { throw std::runtime_error("a message of rank " + std::to_string(peer) + " is damaged"); }

Lane& LaneWriter::lane() const noexcept { return communicator_.lane(peer_); }

/// Begins a new sheet: one that the peer has read, or a new one; false where the send buffer has no room for that.
bool LaneWriter::add_sheet() {
    constexpr std::size_t kFree = 2;  // sheets that do not count
    Engine& engine = communicator_.engine();
    // seq_cst: this may be the last look before a sleep, see Process::wake_sleepers
    const std::uint64_t seen = communicator_.lane_from(peer_).seen.load(std::memory_order_seq_cst);
    if (seen > sent_) {
        damaged_lane(peer_);
    }
    const std::uint64_t oldest = written_ + 1 - sheets_.size();
    if (!sheets_.empty() && seen >= (oldest + 1) * kSheetNbytes) {
        sheets_.push_back(sheets_.front());
        sheets_.pop_front();
    } else {
        const std::uint64_t offset = engine.arena().allocate(kSheetNbytes);
        if (sheets_.size() >= kFree && !engine.take_send_buffer(kSheetNbytes)) {
            engine.arena().release(offset);
            return false;
        }
        sheets_.push_back(offset);
    }
    return true;
}

/// Where `nbytes` can be written now; nullptr where the peer has read too little.
std::byte* LaneWriter::room(std::size_t nbytes) {
    if (sheets_.empty()) {
        (void)add_sheet();
        lane().sheet.store(sheets_.front(), std::memory_order_relaxed);  // published by the first store of `sent`
    }
    Arena& arena = communicator_.engine().arena();
    const std::size_t at = sent_ % kSheetNbytes;
    if (at + nbytes + sizeof(Record) > kSheetNbytes) {  // the last record tells where the next sheet is
        std::byte* const end = arena.at(sheets_.back()) + at;
        if (!add_sheet()) {
            return nullptr;
        }
        Record next{};
        next.nbytes = static_cast<std::uint32_t>(kSheetNbytes - at);
        next.kind = static_cast<std::uint8_t>(RecordKind::next);
        next.block = sheets_.back();
        std::memcpy(end, &next, sizeof next);
        sent_ += next.nbytes;
        ++written_;
    }
    return arena.at(sheets_.back()) + sent_ % kSheetNbytes;
}

bool LaneWriter::write(Record record, const Call& call, std::size_t payload_nbytes) {
    const std::size_t shape_nbytes = call.shape.ndim * sizeof(std::uint64_t);
    const std::size_t meta_nbytes = sizeof record + shape_nbytes + call.text.size();
    const std::size_t nbytes = round_up(round_up(meta_nbytes, 16) + payload_nbytes, alignof(Record));
    std::byte* const at = room(nbytes);
    if (at == nullptr) {
        return false;
    }
    record.nbytes = static_cast<std::uint32_t>(nbytes);
    record.dtype = static_cast<std::uint8_t>(call.dtype);
    record.ndim = call.shape.ndim;
    record.itemsize = call.itemsize;
    record.site = call.site;
    record.text_nbytes = static_cast<std::uint16_t>(call.text.size());
    std::memcpy(at, &record, sizeof record);
    std::memcpy(at + sizeof record, call.shape.dims.data(), shape_nbytes);
    std::memcpy(at + sizeof record + shape_nbytes, call.text.data(), call.text.size());
    if (payload_nbytes != 0) {
        copy_cached(at + round_up(meta_nbytes, 16), call.input, payload_nbytes);
    }
    sent_ += nbytes;
    // seq_cst: releases the record; before the load in wake_sleepers()
    lane().sent.store(sent_, std::memory_order_seq_cst);
    communicator_.member(peer_).process->wake_sleepers();
    return true;
}

void LaneWriter::release() {
    for (const std::uint64_t sheet : sheets_) {
        communicator_.engine().arena().release(sheet);
    }
    constexpr std::size_t kFree = 2;
    if (sheets_.size() > kFree) {
        communicator_.engine().give_send_buffer((sheets_.size() - kFree) * kSheetNbytes);
    }
    sheets_.clear();
}

bool LaneReader::peek(RecordCopy& copy) {
    const Lane& lane = communicator_.lane_from(peer_);
    while (true) {
        if (sent_ == seen_) {
            sent_ = lane.sent.load(std::memory_order_seq_cst);  // acquires the records; the last look before a sleep
            if (sent_ == seen_) {
                return false;
            }
        }
        if (seen_ == 0) {
            sheet_ = lane.sheet.load(std::memory_order_relaxed);  // written before `sent`
        }
        const std::byte* const base = communicator_.member(peer_).process->arena->at(sheet_, kSheetNbytes);
        if (base == nullptr || sheet_ % kPage != 0 || sent_ < seen_ ||
            sent_ - seen_ > kSendBufferNbytes + 2 * kSheetNbytes) {  // more than a writer has room for
            damaged_lane(peer_);
        }
        check(base + seen_ % kSheetNbytes, kSheetNbytes - seen_ % kSheetNbytes, copy);
        if (copy.head.kind != static_cast<std::uint8_t>(RecordKind::next)) {
            return true;
        }
        sheet_ = copy.head.block;
        take(copy);
    }
}

/// Copies the record at `at` out of a sheet of which `left` bytes remain.
void LaneReader::check(const std::byte* at, std::size_t left, RecordCopy& copy) const {
    Record& head = copy.head;
    if (left < sizeof head) {
        damaged_lane(peer_);
    }
    std::memcpy(&head, at, sizeof head);
    const std::size_t shape_nbytes = head.ndim * sizeof(std::uint64_t);
    const std::size_t meta_nbytes = sizeof head + shape_nbytes + head.text_nbytes;
    const bool inside =
        head.nbytes % alignof(Record) == 0 && head.nbytes <= std::min<std::uint64_t>(left, sent_ - seen_);
    const bool carries = head.kind == static_cast<std::uint8_t>(RecordKind::message) && head.block == kNoOffset;
    if (!inside || head.ndim > kMaxDims || meta_nbytes > head.nbytes ||
        (carries &&
         (head.message_nbytes > kInlineMessage || round_up(meta_nbytes, 16) + head.message_nbytes > head.nbytes))) {
        damaged_lane(peer_);
    }
    copy.shape.ndim = head.ndim;
    std::memcpy(copy.shape.dims.data(), at + sizeof head, shape_nbytes);
    copy.text.assign(reinterpret_cast<const char*>(at + sizeof head + shape_nbytes), head.text_nbytes);
    copy.payload = at + round_up(meta_nbytes, 16);
}

void LaneReader::take(const RecordCopy& copy) {
    seen_ += copy.head.nbytes;
    // seq_cst: the reads of the record come before; before the load in wake_sleepers()
    communicator_.lane(peer_).seen.store(seen_, std::memory_order_seq_cst);
    communicator_.member(peer_).process->wake_sleepers();
}

}  // namespace aiodist
