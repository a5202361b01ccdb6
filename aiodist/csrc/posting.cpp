// Calls on their way into their header slots, and payloads that do not fit one but are short.

#include <algorithm>
#include <cstring>

#include "communicator.hpp"

namespace aiodist {
namespace {

// Room in a slot between its text and its payload, for alignment.
constexpr std::size_t kMetaSpare = 16;
// A header with a shape and a tiny payload.
constexpr std::size_t kNextNbytes = 2 * sizeof(Header);

}  // namespace

std::byte* Communicator::slot(std::uint64_t seq) const noexcept {
    return slots_ + seq % tuning().slots * slot_stride(tuning());
}

/// True where the peers can read the call's input in its place, and the result does not overwrite it.
bool Communicator::lies_readable(const Call& call) const noexcept {
    const Arena& arena = engine_->arena();
    return call.input != nullptr && arena.offset_of(call.input, call.nbytes) &&
           (call.output == nullptr || call.output + call.nbytes <= call.input ||
            call.input + call.nbytes <= call.output);
}

/// True where the payload is copied when the call is posted.
bool Communicator::copies(const Call& call) const noexcept {
    return call.brings() && call.nbytes > tuning().slot_nbytes && call.nbytes <= copied_nbytes(tuning(), size()) &&
           !call.refused && size() > 1 && !is_message(call.collective) && !lies_readable(call);
}

/// Where the next payload begins, in one piece.
std::uint64_t Communicator::copied_from(std::uint64_t nbytes) const noexcept {
    const std::size_t ring = copies_nbytes(tuning(), size());
    return copied_until_ % ring + nbytes > ring ? round_up(copied_until_, ring) : copied_until_;
}

bool Communicator::brings(int q) const noexcept {
    const Header& head = header(q).head;
    switch (static_cast<Collective>(head.collective)) {
        case Collective::broadcast:
        case Collective::scatter:
            return q == head.root;
        default:
            return true;
    }
}

bool Communicator::at_hand(int q) const noexcept {
    const Header& head = header(q).head;
    return head.nbytes <= tuning().slot_nbytes || (head.flags & kCopied) != 0 || !brings(q);
}

bool Communicator::may_post(const Request& request) {
    const std::uint64_t slots = tuning().slots;
    const std::uint64_t seq = request.seq;
    const std::uint64_t oldest = seq < slots ? 0 : seq - slots + 1;  // of those that may still be under way
    std::uint64_t needed = oldest;
    if (copies(request.call)) {  // the latest one whose payload would be overwritten must have been read, too
        const std::uint64_t until = copied_from(request.call.nbytes) + request.call.nbytes;
        const std::size_t ring = copies_nbytes(tuning(), size());
        for (std::uint64_t one = oldest; one < seq; ++one) {
            const std::uint64_t from = copies_from_[one % slots];
            needed = from != kNever && from + ring < until ? one + 1 : needed;
        }
    }
    if (needed == 0) {
        return true;
    }
    if (consumed_ < needed) {
        return false;
    }
    for (Member& one : members_) {
        if (one.consumed < needed) {
            one.consumed = one.block->consumed.load(std::memory_order_seq_cst);  // may be the last look before a sleep
            if (one.consumed < needed) {
                return false;
            }
        }
    }
    return true;
}

bool Communicator::post() {
    bool moved = false;
    // Only a hint, which spares the mutex in polls: who adds a request comes here itself or leaves a note for the
    // holder of the claim.
    while (unposted_count_.load(std::memory_order_relaxed) != 0) {
        RequestRef request;
        {
            const std::lock_guard lock(issue_mutex_);
            Request* const next = unposted_.front();
            if (next == nullptr || !may_post(*next) || (pinned_ && copies(next->call))) {
                break;
            }
            request = unposted_.pop();
            unposted_count_.fetch_sub(1, std::memory_order_relaxed);
        }
        write_slot(*request.get());
        publish_quietly(block_->posted, request->seq + 1);
        posted_.push(std::move(request));
        moved = true;
    }
    if (moved) {
        (void)engine_->note_core();
        for (const auto& process : processes_) {
            process->wake_sleepers();
        }
        // The next header goes where the peers have read one that is long past: a tenth of a microsecond to get those
        // lines back, which are on their way now while this thread waits for its peers' headers.
        expect_to_write(slot(block_->posted.load(std::memory_order_relaxed)), kNextNbytes);
    }
    return moved;
}

void Communicator::write_slot(Request& request) {
    const Call& call = request.call;
    std::byte* const at = slot(request.seq);
    Header head{};
    head.seq = request.seq;
    head.kind = static_cast<std::uint8_t>(call.refused ? HeaderKind::refused : HeaderKind::call);
    head.collective = static_cast<std::uint8_t>(call.collective);
    head.op = static_cast<std::uint8_t>(call.op);
    head.dtype = static_cast<std::uint8_t>(call.dtype);
    head.axis = call.axis;
    head.ndim = call.shape.ndim;
    head.flags = call.flags;
    head.root = call.root;
    head.site = call.site;
    head.nbytes = call.nbytes;
    head.itemsize = call.itemsize;
    const std::size_t shape_nbytes = call.shape.ndim * sizeof(std::uint64_t);
    const std::size_t table_nbytes = call.table.size();  // fits: see check_meta()
    const std::size_t text_nbytes =
        std::min(call.text.size(), kMetaNbytes - sizeof(Header) - shape_nbytes - table_nbytes - kMetaSpare);
    head.table_nbytes = static_cast<std::uint16_t>(table_nbytes);
    head.text_nbytes = static_cast<std::uint16_t>(text_nbytes);
    const bool small = call.nbytes <= tuning().slot_nbytes;
    head.input_offset = small ? kNoOffset : engine_->arena().offset_of(call.input, call.nbytes).value_or(kNoOffset);
    head.output_offset = small ? kNoOffset : engine_->arena().offset_of(call.output, 1).value_or(kNoOffset);
    head.staging_offset = staging_offset_;
    std::byte* copy = nullptr;
    copies_from_[request.seq % tuning().slots] = kNever;
    if (copies(call)) {
        const std::uint64_t from = copied_from(call.nbytes);
        copies_from_[request.seq % tuning().slots] = from;
        copied_until_ = from + round_up(call.nbytes, kLine);
        copy = engine_->arena().at(copies_offset_) + from % copies_nbytes(tuning(), size());
        head.flags |= kCopied;
        head.input_offset = engine_->arena().offset_of(copy, call.nbytes).value_or(kNoOffset);
    }
    std::memcpy(at, &head, sizeof head);
    std::memcpy(at + sizeof head, call.shape.dims.data(), shape_nbytes);
    std::byte* const rest = at + sizeof head + shape_nbytes;
    if (table_nbytes + text_nbytes != 0) {
        std::memcpy(rest, call.table.data(), table_nbytes);
        std::memcpy(rest + table_nbytes, call.text.data(), text_nbytes);
    }
    std::byte* const payload =
        small ? at + payload_at(sizeof head + shape_nbytes + table_nbytes + text_nbytes, call.nbytes) : copy;
    if (payload == nullptr) {
        return;
    }
    if (call.input != nullptr) {
        passing_.copy(payload, call.input, call.nbytes);
    } else if (!call.inputs.empty()) {
        passing_.copy(payload, call.source(), 0, call.nbytes);
    }
}

}  // namespace aiodist
