#include "communicator.hpp"

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include "collectives/operation.hpp"
#include "collectives/rows.hpp"
#include "messages/messages.hpp"
#include "shm/memory.hpp"

namespace aiodist {
namespace {

// Small calls matched in one go before a large one gets its next segment.
constexpr int kMatchesAtOnce = 64;
// Room in a slot between its text and its payload, for alignment.
constexpr std::size_t kMetaSpare = 16;
// A header with a shape and a tiny payload.
constexpr std::size_t kNextNbytes = 2 * sizeof(Header);

}  // namespace

std::uint64_t Communicator::reserve(Engine& engine, const Tuning& tuning, std::uint64_t id, int rank, int size) {
    const std::uint64_t offset = engine.arena().allocate(channel_nbytes(tuning, size));
    auto* const block = new (engine.arena().at(offset)) ChannelBlock{};
    block->magic = kChannelMagic;
    block->id = id;
    block->rank = rank;
    block->size = size;
    block->abort_from.store(kNever, std::memory_order_relaxed);  // published with the offset, over the control plane
    return offset;
}

std::shared_ptr<Communicator> Communicator::create(std::shared_ptr<Engine> engine, Options options) {
    std::shared_ptr<Communicator> communicator(new Communicator(engine, std::move(options)));
    engine->add(communicator);
    return communicator;
}

Communicator::Communicator(std::shared_ptr<Engine> engine, Options options)
    : engine_(std::move(engine)),
      options_(std::move(options)),
      headers_(options_.members.size()),
      pointers_(options_.members.size()) {
    const int members = static_cast<int>(options_.members.size());
    const std::size_t lanes_at = round_up(sizeof(ChannelBlock), kLine);
    const std::size_t slots_at = slots_offset(members);
    for (const MemberAddress& address : options_.members) {
        const std::byte* const at = address.process->arena->at(address.block_offset, channel_nbytes(tuning(), members));
        const auto* const block = reinterpret_cast<const ChannelBlock*>(at);
        const int q = static_cast<int>(members_.size());
        if (at == nullptr || block->magic != kChannelMagic || block->id != options_.id || block->rank != q ||
            block->size != members) {
            throw std::runtime_error("rank " + std::to_string(q) + " of group '" + name() +
                                     "' published a block that is not one");
        }
        members_.push_back({address.process, block, reinterpret_cast<const Lane*>(at + lanes_at), at + slots_at, 0, 0});
        if (std::find(processes_.begin(), processes_.end(), address.process) == processes_.end()) {
            processes_.push_back(address.process);
        }
    }
    std::byte* const own = engine_->arena().at(options_.block_offset);
    block_ = reinterpret_cast<ChannelBlock*>(own);
    lanes_ = reinterpret_cast<Lane*>(own + lanes_at);
    slots_ = own + slots_at;
    home_.store(std::this_thread::get_id(), std::memory_order_relaxed);  // a hint for one error text
}

Communicator::~Communicator() = default;

std::size_t Communicator::staging_nbytes() const noexcept {
    return members_.size() * tuning().depth * std::size_t{tuning().segment_nbytes};
}

/// What is copied stays until all have consumed the call, of which `slots` may be under way. Twice that, so that lines
/// have left the readers' caches when they are written again (see take_slots).
std::size_t Communicator::copies_nbytes() const noexcept {
    return 2 * std::size_t{tuning().slots} * copied_nbytes(tuning(), size());
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

/// Room for a payload. Never that of a call which a peer has yet to consume: see copies_nbytes() and may_post().
std::byte* Communicator::copied(std::uint64_t nbytes) noexcept {
    copies_at_ = copies_at_ + nbytes > copies_nbytes() ? 0 : copies_at_;
    std::byte* const at = engine_->arena().at(copies_offset_) + copies_at_;
    copies_at_ += round_up(nbytes, kLine);
    return at;
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

std::byte* Communicator::slot(std::uint64_t seq) const noexcept {
    return slots_ + seq % tuning().slots * slot_stride(tuning());
}

FailurePtr Communicator::failure() const {
    const std::lock_guard lock(issue_mutex_);
    return failure_;
}

// --- Advancing ---

Communicator::Progress Communicator::progress(bool large) {
    bool moved = false;
    while (true) {
        if (claim_.exchange(true, std::memory_order_acquire)) {  // pairs with the holder's store below
            // Leave a note and look again. Holder: store claim = false, load again. We: store again = true, load claim.
            // All seq_cst, so one of us sees the other and what we came for is not lost.
            again_.store(true, std::memory_order_seq_cst);
            if (claim_.load(std::memory_order_seq_cst)) {
                return moved ? Progress::moved : Progress::elsewhere;
            }
            continue;
        }
        if (again_.load(std::memory_order_relaxed)) {  // a note left from here on stays: only holders clear
            // seq_cst: a clearing that lingered past the loads of advance() could wipe out a later note
            again_.store(false, std::memory_order_seq_cst);
        }
        try {
            moved = advance(large) || moved;
        } catch (const std::exception& error) {  // no memory for bookkeeping, or no descriptor for a thread
            break_group(std::make_shared<Failure>(
                Failure{FailureKind::transport, "group '" + name() + "': " + error.what(), {}}));
        }
        claim_.store(false, std::memory_order_seq_cst);
        if (!again_.load(std::memory_order_seq_cst)) {
            return moved ? Progress::moved : Progress::none;
        }
        large = true;  // whoever left the note may have come for that
    }
}

bool Communicator::advance(bool large) {
    bool moved = post();
    for (int i = 0; i < kMatchesAtOnce && match(); ++i) {
        moved = true;
    }
    moved = (large && move_large()) || moved;
    moved = move_messages(large) || moved;
    long_.store(!large_.empty() || (messages_ && messages_->has_long()), std::memory_order_relaxed);  // a hint
    return post() || moved;
}

bool Communicator::move_messages(bool large) {
    // A hint, which spares the mutex: see post().
    while (new_message_count_.load(std::memory_order_relaxed) != 0) {
        RequestRef request;
        {
            const std::lock_guard lock(issue_mutex_);
            request = new_messages_.pop();
            new_message_count_.fetch_sub(request ? 1 : 0, std::memory_order_relaxed);
        }
        if (!request) {
            break;
        }
        if (!messages_) {
            messages_ = std::make_unique<Messages>(*this);
        }
        messages_->add(std::move(request));
    }
    if (!messages_ || closed()) {  // closed: the peers may have freed what their lanes point to
        return false;
    }
    const bool moved = messages_->step(large);
    if (messages_->moving()) {
        moving_.store(true, std::memory_order_relaxed);  // a hint, see the header
    }
    if (FailurePtr failure = messages_->take_failure()) {
        break_group(std::move(failure));
    }
    return moved;
}

void Communicator::matched(Request& receive) {
    const std::lock_guard lock(issue_mutex_);
    unmatched_ -= receive.unmatched.load(std::memory_order_relaxed) ? 1 : 0;
    receive.unmatched.store(false, std::memory_order_relaxed);
}

bool Communicator::may_post(std::uint64_t seq) {
    const std::uint64_t slots = tuning().slots;
    if (seq < slots) {
        return true;
    }
    const std::uint64_t needed = seq - slots + 1;
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
            if (next == nullptr || !may_post(next->seq) || (pinned_ && copies(next->call))) {
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
    std::byte* const copy = copies(call) ? copied(call.nbytes) : nullptr;
    if (copy != nullptr) {
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

bool Communicator::arrived(std::uint64_t seq) {
    for (Member& one : members_) {
        if (one.posted <= seq) {
            one.posted = one.block->posted.load(
                std::memory_order_seq_cst);  // acquires the slot; may be the last look before a sleep
            if (one.posted <= seq) {
                return false;
            }
        }
    }
    return true;
}

bool Communicator::match() {
    Request* const head = posted_.front();
    if (head == nullptr || !arrived(head->seq)) {
        return false;
    }
    const RequestRef request = RequestRef::share(head);
    const std::uint64_t seq = head->seq;
    FailurePtr failure;
    for (int q = 0; q < size() && !failure; ++q) {
        if (!read_header(q, seq, headers_[static_cast<std::size_t>(q)])) {
            failure = std::make_shared<Failure>(
                Failure{FailureKind::transport,
                        describe(*head) + ": the header of rank " + std::to_string(q) + " is damaged",
                        {q}});
        }
    }
    if (!failure) {
        failure = verdict(*head);
    }
    std::unique_ptr<Operation> operation;
    if (!failure) {
        try {
            if (all_at_hand()) {
                complete_small(*this, *head);
            } else {
                operation = make_operation(*this, *head);
                if (!operation->sound()) {
                    failure = std::make_shared<Failure>(
                        Failure{FailureKind::transport, describe(*head) + ": an address in a header is damaged", {}});
                }
            }
        } catch (const std::bad_alloc&) {
            failure = std::make_shared<Failure>(
                Failure{FailureKind::transport, describe(*head) + ": no memory for the result", {}});
        }
    }
    if (failure && failure->kind != FailureKind::refused && failure->kind != FailureKind::argument) {
        break_group(std::move(failure));
        return true;
    }
    if (aborted_by_peer(seq)) {  // after the last read of peer memory
        break_group(aborts(seq));
        return true;
    }
    (void)posted_.pop();
    consumed_ = seq + 1;
    publish(block_->consumed, consumed_);
    if (operation && !failure) {
        pinned_ = pinned_ || (header(rank()).head.flags & kCopied) != 0;
        large_.push_back({request, std::move(operation)});
        request->large.store(true, std::memory_order_relaxed);  // a hint for who waits
        if ((request->call.flags & kWildcard) != 0 || is_short(request->call)) {
            hand_over(*request.get());  // its rank could not know that it would be large
        }
    } else {
        settle(request, std::move(failure));
    }
    return true;
}

bool Communicator::move_large() {
    if (large_.empty()) {
        return false;
    }
    Moving& moving = large_.front();
    if (moving.operation->step()) {
        moving_.store(true, std::memory_order_relaxed);  // a hint, see the header
        return true;
    }
    moving_.store(false, std::memory_order_relaxed);
    if (!moving.operation->finished()) {
        return false;
    }
    const RequestRef request = moving.request;
    if (aborted_by_peer(request->seq)) {  // what was read from peers since may not be what they meant
        break_group(aborts(request->seq));
        return true;
    }
    large_.pop_front();
    pinned_ = pinned_ && !large_.empty();  // longer than need be where others are under way
    settle(request, nullptr);
    return true;
}

void Communicator::publish_quietly(Word& word, std::uint64_t value) noexcept {
    word.store(
        value,
        std::memory_order_seq_cst);  // releases the data it stands for; before the sleepers load in wake_sleepers()
}

void Communicator::publish(Word& word, std::uint64_t value) noexcept {
    publish_quietly(word, value);
    for (const auto& process : processes_) {
        process->wake_sleepers();
    }
}

void Communicator::settle(RequestRef request, FailurePtr failure) {
    std::vector<RequestRef> drained;
    {
        const std::lock_guard lock(issue_mutex_);
        if (request->engine_serves) {
            engine_requests_.fetch_sub(1, std::memory_order_relaxed);
        }
        unmatched_ -= request->unmatched.load(std::memory_order_relaxed) ? 1 : 0;
        request->unmatched.store(false, std::memory_order_relaxed);
        if (pending_.fetch_sub(1, std::memory_order_relaxed) - 1 == unmatched_) {
            drained.swap(draining_);
        }
        request->finish(std::move(failure));
    }
    for (const RequestRef& waiting : drained) {
        waiting->finish(nullptr);
    }
}

}  // namespace aiodist
