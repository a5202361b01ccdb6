#pragma once

#include <cstdint>
#include <deque>
#include <list>
#include <memory>
#include <string>
#include <vector>

#include "communicator.hpp"
#include "messages/lane.hpp"
#include "messages/staging.hpp"

namespace aiodist {

/// What one member sends to and receives from its peers, outside the order of the collectives.
///
/// A record tells the receiver of each message; a short one is inside it. A longer one is staged in chunks of the
/// sender's memory, from where the receiver copies it as it grows; a record of the receiver's says once it has. A send
/// is done when all of it is staged; chunks that the receiver has emptied by then are filled again. Where the process's
/// send buffer is full, a message has two chunks that are used in turn, so that the send waits for its receive; or,
/// where its array is shared memory, none. Short ones that were read but not received lie in the receiver's memory, of
/// which each sender has a bounded part. All under the claim.
class Messages {
 public:
    explicit Messages(Communicator& communicator);

    void add(RequestRef request);
    /// Reads and writes records, and moves a piece of each long message; without `large` of those only that take no
    /// longer than kAtOnceNbytes.
    bool step(bool large);
    /// What a step has found that breaks the group, once.
    FailurePtr take_failure() noexcept { return std::exchange(failure_, nullptr); }
    /// True while the last step moved data of long messages.
    bool moving() const noexcept { return moving_; }
    /// Ends receives that are overdue, that nobody waits for any more, or whose sender has left, where no message was
    /// there for them. The group goes on.
    void expire(TimePoint now);
    /// What stops a send or a matched receive: a lost peer or a deadline.
    FailurePtr trouble(TimePoint now) const;
    bool pending() const;
    /// True while a message of more than kAtOnceNbytes is on its way in or out.
    bool has_large() const noexcept;
    void fail_all(const FailurePtr& failure);
    /// Gives back all memory that peers could read.
    void release();

 private:
    /// A message that a record told of.
    struct Arrival {
        Record head{};
        Shape shape;
        std::string text;
        Buffer payload;  // of a short one
    };
    struct Receiving {
        RequestRef request;
        Arrival arrival;
        std::uint64_t copied = 0;
        std::uint64_t told = 0;  // to the sender
    };
    struct Sending {
        RequestRef request;  // null once it is done; the receiver may still have to copy
        std::uint64_t number = 0;
        std::uint64_t nbytes = 0;
        std::uint64_t staged = 0;
        std::uint64_t taken = 0;
        TimePoint told_at;           // when the receiver last said so
        std::uint64_t buffered = 0;  // of the process's send buffer
        std::uint32_t chunk_nbytes = 0;
        std::uint32_t most_chunks = 0;
        bool awaited = true;             // by a receive, where that matters
        std::uint64_t head = kNoOffset;  // of chunks that are used in turn
        std::vector<std::uint64_t> chunks;
        std::size_t given = 0;  // of these, from the second on, back to the pool
    };
    struct Peer {
        Peer(Communicator& communicator, int q) : rank(q), out(communicator, q), in(communicator, q) {}
        int rank;
        LaneWriter out;
        LaneReader in;
        std::uint64_t sent = 0;             // messages
        std::uint64_t short_sent = 0;       // bytes of short ones
        std::uint64_t short_received = 0;   // bytes of the peer's
        std::deque<RequestRef> announcing;  // sends whose record is not written yet
        std::deque<Record> telling;         // what has been taken of the peer's messages
        std::list<Sending> sending;         // long ones, until they were taken
        std::deque<Arrival> arrivals;       // not received yet, in order
        std::deque<RequestRef> receives;    // without a message yet, in order
        std::list<Receiving> receiving;     // long ones
    };

    Peer& peer(int q);
    const std::byte* direct(const Peer& peer, const Record& head) const;
    bool read(Peer& peer);
    bool arrive(Peer& peer, const RecordCopy& copy);
    void taken(Peer& peer, const Record& head);
    void withdraw_given_up(Peer& peer);
    void begin(Peer& peer, RequestRef request, Arrival&& arrival);
    bool fits(const Request& request, const Arrival& arrival);
    void make_room(Request& request, const Arrival& arrival) const;
    bool flush(Peer& peer);
    bool announce(Peer& peer, const RequestRef& request);
    bool announce_long(Peer& peer, const RequestRef& request, Record record);
    bool stage(Sending& sending);
    bool stage_piece(Sending& sending);
    bool stage_all(Peer& peer, bool large);
    bool copy(Peer& peer, Receiving& receiving);
    bool copy_piece(Peer& peer, Receiving& receiving);
    bool copy_all(Peer& peer, bool large);
    void tell(Peer& peer, const Receiving& receiving);
    void give_back(Sending& sending);
    void give_back(Sending& sending, std::size_t end);

    Communicator& communicator_;
    ChunkPool pool_;
    std::vector<std::unique_ptr<Peer>> peers_;  // by rank; null where there was nothing yet
    std::vector<Peer*> active_;
    FailurePtr failure_;
    bool moving_ = false;
};

}  // namespace aiodist
