#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "collectives/passing.hpp"
#include "engine.hpp"
#include "request.hpp"
#include "shm/arena.hpp"

namespace aiodist {

class Messages;
class Operation;

/// Calls up to this many bytes are short enough (about 30 µs) to be worked on by whoever meets them; longer ones are
/// the engine's, or a thread's that waits for them.
inline constexpr std::uint64_t kAtOnceNbytes = 256 * 1024;

/// A header as it was copied out of a member's slot, checked as far as one can be alone.
struct HeaderCopy {
    Header head;
    Shape shape;
    std::vector<std::uint64_t> table;
    std::string text;
    const std::byte* payload = nullptr;  // in the slot; valid until the call is consumed
};

/// An array's shape as Python writes it.
std::string shape_text(const std::uint64_t* dims, std::size_t ndim);

/// The present thread's number. Unlike the system's ids, no other thread ever has it again.
std::uint64_t this_thread() noexcept;

/// One member of a channel, as its peers see it.
struct Member {
    std::shared_ptr<Process> process;
    const ChannelBlock* block = nullptr;  // in the member's arena: untrusted
    const Lane* lanes = nullptr;
    const std::byte* slots = nullptr;
    std::uint64_t posted = 0;  // last values seen, so that a flag is loaded only while it matters
    std::uint64_t consumed = 0;
};

/// Where a member's block lies: `process` is an index that Engine::attach returned.
struct MemberAddress {
    std::shared_ptr<Process> process;
    std::uint64_t block_offset = 0;
};

/// One member of one group or channel.
///
/// Calls take their place in start(), which any thread may call. Everything after that (posting headers, comparing
/// them, moving data) is done by whoever holds the claim: the caller, a loop that the bell woke, a blocked thread, or
/// the engine thread.
class Communicator : public std::enable_shared_from_this<Communicator> {
 public:
    struct Options {
        std::string name;
        std::uint64_t id = 0;  // the same on all members; tells this channel's block from a later one in the same place
        int rank = 0;
        Tuning tuning{};
        std::uint64_t block_offset = 0;  // from reserve(), in the engine's arena
        std::vector<MemberAddress> members;
    };

    /// Makes this member's block, to be published before the peers are known. Returns its offset. Throws NoMemory.
    static std::uint64_t reserve(Engine& engine, const Tuning& tuning, std::uint64_t id, int rank, int size);
    static std::shared_ptr<Communicator> create(std::shared_ptr<Engine> engine, Options options);
    ~Communicator();

    /// Takes the call's place in the order and starts it. Never blocks on a peer.
    RequestRef start(Call&& call, Clock::duration timeout);
    /// A request that is done once all calls before it are.
    RequestRef drained();
    /// Advances what can be advanced. With `large` false the data of large calls is left to whoever is at it.
    /// `elsewhere`: another thread was at it. It takes one more step for us, but may leave the rest: nobody may go to
    /// sleep on that.
    enum class Progress : std::uint8_t { none, moved, elsewhere };
    Progress progress(bool large = true);
    /// Looks at aborts, deaths, goodbyes and deadlines. Called a few times a second while calls are pending.
    void check(TimePoint now);
    void abort(FailureKind kind, const std::string& reason);
    /// Lets whatever breaks this group break `channel` too.
    void adopt(const std::shared_ptr<Communicator>& channel);
    /// Says goodbye; pending calls fail. The block is freed once no peer reads it.
    void close();

    const std::string& name() const noexcept { return options_.name; }
    int rank() const noexcept { return options_.rank; }
    int size() const noexcept { return static_cast<int>(members_.size()); }
    Engine& engine() const noexcept { return *engine_; }
    const Tuning& tuning() const noexcept { return options_.tuning; }
    FailurePtr failure() const;
    /// The latest call in the order, as this rank made it.
    struct Latest {
        std::uint64_t seq = 0;
        Collective collective = Collective::none;
        std::uint32_t site = 0;
    };
    std::optional<Latest> latest() const;
    bool closed() const noexcept { return closed_.load(std::memory_order_acquire); }  // pairs with close()
    /// The rank of a member of this process that has yet to make call `seq` and whose calls come from the present
    /// thread, if there is one: blocking this thread would block it too.
    std::optional<int> waits_for_this_thread(const Request& request) const;
    bool serves_engine() const noexcept {
        return engine_requests_.load(std::memory_order_seq_cst) > 0 &&  // pairs with hand_over()
               helpers_.load(std::memory_order_seq_cst) == 0;           // pairs with unhelp()
    }
    /// True if no peer process was last seen on the core that this thread runs on, so that waiting awake delays nobody.
    /// Of two that share one although there are cores for all, the higher rank moves (some schedulers pack tasks that
    /// wake each other).
    bool has_core() const;
    /// True if a rank that the request waits for last ran on this thread's core: it needs that now.
    bool waits_for_this_core(const Request& request) const noexcept;
    bool idle() const noexcept { return pending_.load(std::memory_order_seq_cst) == 0; }  // see Engine::sleep
    /// True while a large call has more steps: a hint for whoever drained the bell.
    bool moving() const noexcept { return moving_.load(std::memory_order_relaxed); }
    /// True while there are data to move in segments: a hint likewise.
    bool has_long() const noexcept { return long_.load(std::memory_order_relaxed); }
    std::uint64_t id() const noexcept { return options_.id; }
    /// Hands a pending request to the engine thread, which begins at once, or a little later: see Engine::wake_soon.
    void hand_over(Request& request, bool at_once = true);
    bool has_handed_over() const noexcept { return engine_requests_.load(std::memory_order_relaxed) > 0; }  // a hint
    /// While a thread blocks in a call it does the engine's work for this communicator.
    void help() noexcept { helpers_.fetch_add(1, std::memory_order_seq_cst); }
    void unhelp() noexcept;
    /// True once no peer can read the block any more; then it has been freed.
    bool try_free();

    // For operations, under the claim.
    ChannelBlock& mine() const noexcept { return *block_; }
    const Member& member(int q) const noexcept { return members_[static_cast<std::size_t>(q)]; }
    /// What this member writes about its messages with q, and what q writes about those with this one.
    Lane& lane(int q) const noexcept { return lanes_[q]; }
    const Lane& lane_from(int q) const noexcept { return member(q).lanes[rank()]; }
    const HeaderCopy& header(int q) const noexcept { return headers_[static_cast<std::size_t>(q)]; }
    std::byte* staging() const noexcept { return staging_; }
    /// True where all that `q` brings can be read as soon as its header is there.
    bool at_hand(int q) const noexcept;
    /// True where all that a call brings can be read as soon as its header is there: it moves in one step, as far as
    /// its rank can know.
    bool is_short(const Call& call) const noexcept {
        return call.nbytes <= tuning().slot_nbytes || copies(call) ||
               (is_message(call.collective) && call.nbytes <= kAtOnceNbytes);
    }
    /// Scratch of one pointer a member.
    std::vector<const void*>& pointers() noexcept { return pointers_; }
    Passing& passing() noexcept { return passing_; }
    std::size_t staging_nbytes() const noexcept;
    /// Slots of one segment in a member's staging ring.
    std::uint64_t staging_slots() const noexcept { return members_.size() * std::uint64_t{tuning().depth}; }
    /// Numbers the large calls of the channel, from 1.
    std::uint64_t next_large() noexcept { return ++large_calls_; }
    /// Takes the next `count` slots of the ring, which are the same on all members since all take the same; returns the
    /// first. The ring is larger than a core's own cache and always moves on: a line that is written again has long
    /// left the caches of those who read it. (A store to a line that another core holds took 27 ns on a Zen 4, one
    /// after the other; to one that lies in the shared cache 2 ns.)
    std::uint64_t take_slots(std::uint64_t count) noexcept {
        const std::uint64_t first = cursor_;
        cursor_ = (cursor_ + count) % staging_slots();
        return first;
    }
    /// Stores a flag of mine and wakes who sleeps on it.
    void publish(Word& word, std::uint64_t value) noexcept;
    void publish_quietly(Word& word, std::uint64_t value) noexcept;
    bool aborted_by_peer(std::uint64_t seq) const noexcept;
    /// True once q has closed the group.
    bool has_left(int q) const noexcept {
        return q != rank() && member(q).block->left.load(std::memory_order_seq_cst) != 0;  // before a last look
    }
    std::string describe(const Request& request) const;

 private:
    struct Moving {
        RequestRef request;
        std::unique_ptr<Operation> operation;
    };
    class Claim;
    friend class Messages;  // settles what it moves, in the words of verdict.cpp

    Communicator(std::shared_ptr<Engine> engine, Options options);
    bool advance(bool large);
    bool move_large();
    bool move_messages(bool large);
    void matched(Request& receive);
    bool post();
    bool may_post(const Request& request);
    void write_slot(Request& request);
    bool match();
    bool match_some(bool& moved);
    bool arrived(std::uint64_t seq);
    bool read_header(int q, std::uint64_t seq, HeaderCopy& copy);
    bool all_at_hand() const noexcept;
    FailurePtr verdict(const Request& request) const;
    FailurePtr refusals(const Request& request) const;
    FailurePtr misfits(const Request& request) const;
    std::string misfit_of_joined(int r) const;
    std::string misfit_of_share(int r) const;
    std::string misfit_of_list(int r) const;
    void hear_refusals();
    FailurePtr mismatch(const Request& request) const;
    std::string describe(int q, const HeaderCopy& copy) const;
    void settle(RequestRef request, FailurePtr failure);
    void break_group(FailurePtr failure);
    void break_with(const FailurePtr& failure);
    void fail_all(const FailurePtr& failure);
    FailurePtr look_for_trouble(TimePoint now) const;
    FailurePtr aborts(std::uint64_t lowest) const;
    FailurePtr losses(const Request& request) const;
    FailurePtr lost(const Request& request, const std::vector<int>& waited_for) const;
    FailurePtr timed_out(const Request& request) const;
    FailurePtr message_timed_out(const Request& request) const;
    FailurePtr message_mismatch(const Request& request, const Record& head, const Shape& shape,
                                const std::string& text) const;
    FailurePtr withdrawn() const;
    FailurePtr look_at_messages(TimePoint now) const;
    const Request* earliest_overdue(TimePoint now) const;
    const Request* lowest_pending() const;
    std::vector<int> waited_for(const Request& request) const;
    void ensure_staging(const Call& call);
    bool lies_readable(const Call& call) const noexcept;
    bool copies(const Call& call) const noexcept;
    std::uint64_t copied_from(std::uint64_t nbytes) const noexcept;
    bool brings(int q) const noexcept;
    std::byte* slot(std::uint64_t seq) const noexcept;

    std::shared_ptr<Engine> engine_;
    Options options_;
    std::vector<Member> members_;
    std::vector<HeaderCopy> headers_;
    std::vector<const void*> pointers_;
    std::vector<std::shared_ptr<Process>> processes_;  // each once, this one included
    ChannelBlock* block_ = nullptr;
    Lane* lanes_ = nullptr;
    std::byte* slots_ = nullptr;
    std::byte* staging_ = nullptr;
    std::uint64_t staging_offset_ = kNoOffset;
    std::uint64_t copies_offset_ = kNoOffset;

    mutable std::mutex issue_mutex_;  // next_seq_, unposted_, new_messages_, unmatched_, draining_, channels_,
                                      // failure_
    std::uint64_t next_seq_ = 0;
    Latest latest_;  // where next_seq_ is not 0
    RequestQueue unposted_;
    std::atomic<std::uint32_t> unposted_count_{0};
    RequestQueue new_messages_;  // sends and receives that messages_ has not seen
    std::atomic<std::uint32_t> new_message_count_{0};
    std::uint32_t unmatched_ = 0;  // receives without a message: closing does not wait for them
    std::vector<RequestRef> draining_;
    std::vector<std::weak_ptr<Communicator>> channels_;
    FailurePtr failure_;
    std::atomic<bool> broken_{false};
    std::atomic<bool> closed_{false};
    std::atomic<std::uint64_t> home_{0};  // the thread that made the latest call

    // One thread at a time advances; the others leave a note. See progress().
    std::atomic<bool> claim_{false};
    std::atomic<bool> again_{false};
    RequestQueue posted_;                 // headers written, not yet matched
    std::deque<Moving> large_;            // matched, data still moving, one after the other
    std::unique_ptr<Messages> messages_;  // made when the first one is sent or received
    std::uint64_t consumed_ = 0;
    std::uint64_t large_calls_ = 0;  // so far; the same on all members when they create the same operation
    std::uint64_t cursor_ = 0;       // in the staging rings
    Passing passing_;
    // See kCopied; counted in bytes of all turns around the copies' ring.
    std::uint64_t copied_until_ = 0;
    std::vector<std::uint64_t> copies_from_;  // by slot: where its call's payload begins, kNever where it has none
    bool pinned_ = false;  // one of them is read by a call in segments: no further ones until that is over

    std::atomic<std::uint32_t> pending_{0};
    std::atomic<std::int32_t> engine_requests_{0};
    std::atomic<std::int32_t> helpers_{0};
    std::atomic<bool> moving_{false};
    std::atomic<bool> long_{false};
};

}  // namespace aiodist
