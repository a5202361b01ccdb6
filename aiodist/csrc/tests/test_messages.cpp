// Sends and receives on ranks that are threads: in every order, of every length, with a send buffer that is used up,
// given up, timed out, cut off by who leaves. What a peer can write in place of honest lanes: test_lanes.cpp.

#include <algorithm>
#include <cstdint>
#include <random>
#include <utility>

#include "messaging.hpp"

namespace aiodist::testing {
namespace {

const Tuning kTuning{8, 1024, 4096, 3};
// Words: nothing, inside a record, its longest, one more, one piece, what is copied at once, four chunks.
constexpr std::size_t kLengths[] = {0, 1, 7, 1024, 1025, 9000, 40'000, 200'000};

/// Everybody to everybody, oneself too, before the first receive and after: received in another order by each rank.
void all_ways(int size, bool shared) {
    auto ranks = make_world(size, kTuning, shared);
    run(ranks, [size](Rank& rank, int r) {
        std::mt19937 random(static_cast<unsigned>(r));
        std::vector<Words> sent;
        std::vector<RequestRef> sends;
        struct Due {
            int from;
            unsigned number;
            RequestRef request{};
            Words place{};
        };
        std::vector<Due> dues;
        for (unsigned number = 0; number < std::size(kLengths); ++number) {
            for (int q = 0; q < size; ++q) {
                sent.push_back(words(r, q, number, kLengths[number]));
                dues.push_back({q, number});
            }
        }
        std::shuffle(dues.begin(), dues.end(), random);
        const std::size_t ahead = random() % dues.size();
        for (std::size_t i = 0; i < sent.size() + dues.size(); ++i) {
            if (i % 50 == 0) {
                std::this_thread::sleep_for(std::chrono::microseconds(random() % 500));
            }
            if (i >= ahead && i < ahead + dues.size()) {
                Due& due = dues[i - ahead];
                due.place.resize(random() % 2 == 0 ? kLengths[due.number] : 0);
                due.request = due.place.empty() ? receive(rank, due.from, due.number)
                                                : receive_into(rank, due.from, due.number, due.place);
                rank.communicator->hand_over(*due.request.get(), random() % 2 == 0);
            }
            if (i < sent.size()) {
                sends.push_back(send(rank, sent[i].data(), sent[i].size(), static_cast<int>(i) % size,
                                     i / static_cast<std::size_t>(size)));
                rank.communicator->hand_over(*sends.back().get(), random() % 2 == 0);
            }
        }
        for (std::size_t i = 0; i < sends.size(); ++i) {
            succeed(rank, *sends[i].get());
            std::fill(sent[i].begin(), sent[i].end(), 0);  // the buffer may be used again
        }
        for (Due& due : dues) {
            check(rank, *due.request.get(), due.from, due.number, kLengths[due.number]);
        }
    });
    close_even(ranks);
}

/// Tags backwards, and within one tag in order, whatever the lengths.
void tags() {
    auto ranks = make_world(2, kTuning);
    run(ranks, [](Rank& rank, int r) {
        constexpr unsigned kTags = 20;
        constexpr unsigned kEach = 3;
        const auto length = [](unsigned number) { return number % 7 == 0 ? 30'000 + number : number; };
        std::vector<Words> sent;
        for (unsigned number = 0; number < kTags * kEach; ++number) {
            sent.push_back(words(r, 1 - r, number, length(number)));
            const RequestRef request = send(rank, sent.back().data(), sent.back().size(), 1 - r, number % kTags);
            succeed(rank, *request.get());
        }
        for (unsigned tag = kTags; tag-- > 0;) {
            for (unsigned number = tag; number < kTags * kEach; number += kTags) {
                check(rank, *receive(rank, 1 - r, tag).get(), 1 - r, number, length(number));
            }
        }
    });
    close_even(ranks);
}

/// Many sheets of short messages, sent before anybody receives, in both directions.
void flood() {
    constexpr unsigned kMessages = 4000;
    auto ranks = make_world(2, kTuning);
    std::atomic<int> ready{0};
    run(ranks, [&ready](Rank& rank, int r) {
        for (unsigned number = 0; number < kMessages; ++number) {
            const Words data = words(r, 1 - r, number, number % 200);
            succeed(rank, *send(rank, data.data(), data.size(), 1 - r, 0).get());
        }
        ready.fetch_add(1);
        while (ready.load() < 2) {
            std::this_thread::yield();
        }
        for (unsigned number = 0; number < kMessages; ++number) {
            check(rank, *receive(rank, 1 - r, 0).get(), 1 - r, number, number % 200);
        }
    });
    close_even(ranks);
}

/// Without a send buffer sends wait for their receives: both ways at once, out of private and out of shared memory.
void beyond_the_buffer(std::size_t count) {
    auto ranks = make_world(2, kTuning);
    std::atomic<int> looked{0};
    run(ranks, [count, &looked](Rank& rank, int r) {
        const UsedUp none(*rank.engine);
        const Words own = words(r, 1 - r, 0, count);
        const std::uint64_t at = rank.engine->arena().allocate(count * sizeof(std::uint64_t));
        auto* const shared = reinterpret_cast<std::uint64_t*>(rank.engine->arena().at(at));
        for (std::size_t i = 0; i < count; ++i) {
            shared[i] = value(r, 1 - r, 1, i);
        }
        const RequestRef first = send(rank, own.data(), count, 1 - r, 0);
        const RequestRef second = send(rank, shared, count, 1 - r, 1);
        for (int i = 0; i < 100; ++i) {
            rank.communicator->progress();
        }
        expect(!first->done() && !second->done(),
               "a send of " + std::to_string(count) + " words without a buffer waits");
        looked.fetch_add(1);
        while (looked.load() < 2) {
            std::this_thread::yield();
        }
        Words place(count);
        const RequestRef taken = receive_into(rank, 1 - r, 1, place);
        check(rank, *receive(rank, 1 - r, 0).get(), 1 - r, 0, count);
        check(rank, *taken.get(), 1 - r, 1, count);
        succeed(rank, *first.get());
        succeed(rank, *second.get());
        rank.engine->arena().release(at);
    });
    close_even(ranks);
}

/// Chunks that are used in turn are two, however far the receiver was when the second was needed.
void chunks_in_turn() {
    auto ranks = make_world(2, kTuning);
    {
        const UsedUp none(*ranks[0].engine);
        constexpr std::size_t kWords = 400'000;
        const Words data = words(0, 1, 0, kWords);
        const auto step = [&](std::size_t r) { (void)ranks[r].communicator->progress(); };
        for (Rank& rank : ranks) {
            rank.communicator->help();  // keeps the engines' threads out of it
        }
        const RequestRef sent = send(ranks[0], data.data(), kWords, 1, 0);
        const RequestRef received = receive(ranks[1], 0, 0);
        for (int i = 0; i < 14; ++i) {  // hand in hand into the second chunk
            step(0);
            step(1);
        }
        for (int i = 0; i < 40; ++i) {  // as far ahead as may be
            step(0);
        }
        while (!received->done()) {
            step(1);
            step(0);
        }
        check(ranks[1], *received.get(), 0, 0, kWords);
        succeed(ranks[0], *sent.get());
        for (Rank& rank : ranks) {
            rank.communicator->unhelp();
        }
    }
    close_even(ranks);
}

/// The same for many short ones, which wait in their order.
void short_ones_beyond_the_buffer() {
    constexpr unsigned kMessages = 1000;
    auto ranks = make_world(2, kTuning);
    std::atomic<int> looked{0};
    run(ranks, [&looked](Rank& rank, int r) {
        const UsedUp none(*rank.engine);
        std::vector<Words> sent;
        std::vector<RequestRef> sends;
        for (unsigned number = 0; number < kMessages; ++number) {
            sent.push_back(words(r, 1 - r, number, 1 + number % 100));
            sends.push_back(send(rank, sent.back().data(), sent.back().size(), 1 - r, 0));
        }
        expect(sends.front()->done() && !sends.back()->done(), "short sends wait once two sheets are full");
        looked.fetch_add(1);
        while (looked.load() < 2) {
            std::this_thread::yield();
        }
        for (unsigned number = 0; number < kMessages; ++number) {
            check(rank, *receive(rank, 1 - r, 0).get(), 1 - r, number, 1 + number % 100);
        }
        for (const RequestRef& request : sends) {
            succeed(rank, *request.get());
        }
    });
    close_even(ranks);
}

/// A receive that is given up while its message comes either gets it or leaves it to the next.
void give_up_race() {
    constexpr unsigned kMessages = 300;
    const auto length = [](unsigned number) { return number % 10 == 0 ? std::size_t{40'000} : number; };
    auto ranks = make_world(2, kTuning);
    run(ranks, [length](Rank& rank, int r) {
        std::mt19937 random(static_cast<unsigned>(r));
        const auto dawdle = [&random] { std::this_thread::sleep_for(std::chrono::microseconds(random() % 100)); };
        for (unsigned number = 0; number < kMessages; ++number) {
            if (r == 0) {
                const Words data = words(0, 1, number, length(number));
                dawdle();
                succeed(rank, *send(rank, data.data(), data.size(), 1, 5).get());
                continue;
            }
            RequestRef request = receive(rank, 0, 5);
            while (true) {
                rank.communicator->hand_over(*request.get());  // the engine is at it, too
                (void)rank.communicator->waits_for_this_thread(*request.get());
                dawdle();
                request->give_up();
                rank.communicator->progress();
                await(rank, *request.get());
                if (!request->failure()) {
                    break;
                }
                expect(request->failure()->kind == FailureKind::withdrawn, "a receive that was given up");
                request = receive(rank, 0, 5);
            }
            check(rank, *request.get(), 0, number, length(number));
        }
    });
    close_even(ranks);
}

/// Receives that time out without a message leave the group as it was.
void unmatched() {
    auto ranks = make_world(2, kTuning);
    run(ranks, [](Rank& rank, int r) {
        const RequestRef other = receive(rank, 1 - r, 9, std::chrono::milliseconds(1));
        const RequestRef late = receive(rank, 1 - r, 3, std::chrono::milliseconds(20));
        expect(kind_of(rank, *late.get()) == FailureKind::timeout, "no message came");
        expect(kind_of(rank, *other.get()) == FailureKind::timeout, "nor this one");
        expect(!rank.communicator->failure(), "the group is whole");
        Call barrier;  // the other one's receives are over, too
        barrier.collective = Collective::barrier;
        succeed(rank, *rank.communicator->start(std::move(barrier), kTimeout).get());
        const Words data = words(r, 1 - r, 0, 30'000);
        const RequestRef sent = send(rank, data.data(), data.size(), 1 - r, 3);
        check(rank, *receive(rank, 1 - r, 3).get(), 1 - r, 0, data.size());
        succeed(rank, *sent.get());
    });
    close_even(ranks);
}

/// A message that comes after the deadline, though before anybody has looked at that, is for the next receive.
void overdue() {
    auto ranks = make_world(2, kTuning);
    {
        const UsedUp none(*ranks[0].engine);  // so that it takes a while
        const Words data = words(0, 1, 0, 300'000);
        const RequestRef late = receive(ranks[1], 0, 3, std::chrono::milliseconds(20));
        std::this_thread::sleep_for(std::chrono::milliseconds(40));
        const RequestRef sent = send(ranks[0], data.data(), data.size(), 1, 3);
        ranks[0].communicator->hand_over(*sent.get());
        ranks[1].communicator->progress();
        ranks[1].communicator->check(Clock::now());
        expect(kind_of(ranks[1], *late.get()) == FailureKind::timeout, "an overdue receive");
        expect(!ranks[1].communicator->failure(), "the group outlives it");
        check(ranks[1], *receive(ranks[1], 0, 3).get(), 0, 0, data.size());
        succeed(ranks[0], *sent.get());
    }
    close_even(ranks);
}

/// What was sent by who has left since is there; what was not sent never comes.
void departure() {
    auto ranks = make_world(2, kTuning);
    std::vector<Words> sent;
    for (unsigned number = 0; number < std::size(kLengths); ++number) {
        sent.push_back(words(0, 1, number, kLengths[number]));
        succeed(ranks[0], *send(ranks[0], sent.back().data(), sent.back().size(), 1, number).get());
    }
    ranks[0].communicator->close();
    for (unsigned number = std::size(kLengths); number-- > 0;) {
        check(ranks[1], *receive(ranks[1], 0, number).get(), 0, number, kLengths[number]);
    }
    expect(kind_of(ranks[1], *receive(ranks[1], 0, 0).get()) == FailureKind::peer_lost, "who left sends nothing");
    close_even(ranks);
}

/// A send does not wait for a receiver that stops in the middle of its message.
void stopped_receiver() {
    auto ranks = make_world(2, kTuning);
    const Words data = words(0, 1, 0, 1'000'000);
    const RequestRef sent = send(ranks[0], data.data(), data.size(), 1, 0);
    const RequestRef received = receive(ranks[1], 0, 0);
    for (int turn = 0; turn < 20; ++turn) {  // enough to be told of, too few for all of it
        ranks[0].communicator->progress();
        ranks[1].communicator->progress();
    }
    expect(!sent->done() && !received->done(), "a message on its way");
    succeed(ranks[0], *sent.get());
    expect(!received->done(), "a receiver that nobody advances");
    check(ranks[1], *received.get(), 0, 0, data.size());
    close_even(ranks);
}

/// Who leaves in the middle of a message is lost to its receiver.
void departure_within() {
    auto ranks = make_world(2, kTuning);
    {
        const UsedUp none(*ranks[0].engine);
        const Words data = words(0, 1, 0, 1'000'000);
        const RequestRef sent = send(ranks[0], data.data(), data.size(), 1, 0);
        ranks[0].communicator->progress();
        ranks[0].communicator->close();
        expect(kind_of(ranks[0], *sent.get()) == FailureKind::closed, "an unfinished send of a closed group");
        expect(kind_of(ranks[1], *receive(ranks[1], 0, 0).get()) == FailureKind::peer_lost, "half a message");
    }
    close_even(ranks);
}

/// What breaks the group ends what waits: a receive, a matched one, a send, and shorter ones behind it.
void group_failure() {
    auto ranks = make_world(3, kTuning);
    const Words data = words(0, 1, 0, 1'000'000);
    {
        const UsedUp none(*ranks[0].engine);
        std::vector<std::pair<Rank*, RequestRef>> waiting;
        const RequestRef sent = send(ranks[0], data.data(), data.size(), 1, 0);
        // The receiver first: while nobody waits for it the sender does next to nothing, so that neither can finish.
        waiting.emplace_back(&ranks[1], receive(ranks[1], 0, 0));
        waiting.emplace_back(&ranks[1], receive(ranks[1], 0, 1));
        waiting.emplace_back(&ranks[0], receive(ranks[0], 0, 4));
        waiting.emplace_back(&ranks[0], sent);
        ranks[2].communicator->abort(FailureKind::communication, "enough");
        for (auto& [rank, request] : waiting) {
            expect(kind_of(*rank, *request.get()) == FailureKind::communication, "a message of a broken group");
            expect(request->failure()->text.find("enough") != std::string::npos, "the reason arrives");
        }
        expect(send(ranks[0], data.data(), 1, 1, 0)->done(), "a broken group fails at once");
    }
    close_even(ranks);
}

/// An output that does not fit breaks the group on both sides.
void misfit() {
    auto ranks = make_world(2, kTuning);
    run(ranks, [](Rank& rank, int r) {
        const Words data = words(r, 1 - r, 0, 100);
        Words place(99);
        const RequestRef request =
            r == 0 ? send(rank, data.data(), data.size(), 1, 0) : receive_into(rank, 0, 0, place);
        if (r == 1) {
            expect(kind_of(rank, *request.get()) == FailureKind::mismatch, "an output of another extent");
        } else {
            expect(kind_of(rank, *receive(rank, 1, 0).get()) == FailureKind::mismatch, "the sender hears of it");
        }
    });
    close_even(ranks);
}

}  // namespace
}  // namespace aiodist::testing

int main() {
    using namespace aiodist::testing;
    for (const int size : {1, 2, 3, 5}) {
        all_ways(size, false);
        all_ways(size, true);
    }
    std::puts("all ways: right");
    tags();
    flood();
    std::puts("tags, many short ones: right");
    beyond_the_buffer(400'000);
    beyond_the_buffer(20'000);
    chunks_in_turn();
    short_ones_beyond_the_buffer();
    stopped_receiver();
    std::puts("without a send buffer: right");
    give_up_race();
    unmatched();
    overdue();
    std::puts("given up, timed out: right");
    departure();
    departure_within();
    group_failure();
    misfit();
    std::puts("failures: right");
    return 0;
}
