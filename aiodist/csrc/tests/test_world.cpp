// Every collective, small and large, on ranks that are threads; then the ways a group can break.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <random>
#include <utility>

#include "world.hpp"

namespace aiodist::testing {
namespace {

constexpr std::chrono::seconds kTimeout{30};
const Tuning kTuning{8, 1024, 4096, 3};

std::int64_t value(int rank, std::size_t i, int round) {
    return static_cast<std::int64_t>(i) * 7 + rank * 1'000'003 + round * 31;
}

std::vector<std::int64_t> filled(int rank, std::size_t count, int round) {
    std::vector<std::int64_t> data(count);
    for (std::size_t i = 0; i < count; ++i) {
        data[i] = value(rank, i, round);
    }
    return data;
}

void all_reduce(Rank& rank, int size, std::size_t count, int round) {
    const int r = rank.communicator->rank();
    const auto input = filled(r, count, round);
    std::vector<std::int64_t> output(count);
    const RequestRef request =
        rank.communicator->start(call_of(Collective::all_reduce, DType::int64, input, output, Op::sum), kTimeout);
    succeed(rank, *request.get());
    for (std::size_t i = 0; i < count; ++i) {
        std::int64_t sum = 0;
        for (int q = 0; q < size; ++q) {
            sum += value(q, i, round);
        }
        expect(output[i] == sum, "all_reduce of " + std::to_string(count) + " at " + std::to_string(i));
    }
}

void all_gather(Rank& rank, int size, std::size_t count, int round) {
    const auto input = filled(rank.communicator->rank(), count, round);
    std::vector<std::int64_t> output(count * static_cast<std::size_t>(size));
    const RequestRef request =
        rank.communicator->start(call_of(Collective::all_gather, DType::int64, input, output), kTimeout);
    succeed(rank, *request.get());
    for (std::size_t i = 0; i < output.size(); ++i) {
        expect(output[i] == value(static_cast<int>(i / count), i % count, round),
               "all_gather of " + std::to_string(count));
    }
}

void reduce_scatter(Rank& rank, int size, std::size_t count, int round) {
    const int r = rank.communicator->rank();
    const auto input = filled(r, count * static_cast<std::size_t>(size), round);
    std::vector<std::int64_t> output(count);
    const RequestRef request =
        rank.communicator->start(call_of(Collective::reduce_scatter, DType::int64, input, output, Op::sum), kTimeout);
    succeed(rank, *request.get());
    for (std::size_t i = 0; i < count; ++i) {
        std::int64_t sum = 0;
        for (int q = 0; q < size; ++q) {
            sum += value(q, static_cast<std::size_t>(r) * count + i, round);
        }
        expect(output[i] == sum, "reduce_scatter of " + std::to_string(count));
    }
}

void broadcast(Rank& rank, int root, std::size_t count, int round) {
    const int r = rank.communicator->rank();
    std::vector<std::int64_t> data = r == root ? filled(root, count, round) : std::vector<std::int64_t>();
    Call call;
    call.collective = Collective::broadcast;
    call.root = root;
    std::vector<std::int64_t> copy(count);
    if (r == root) {
        call = call_of(Collective::broadcast, DType::int64, data, copy);
        call.root = root;
    } else {
        call.flags = kWildcard;
    }
    const RequestRef request = rank.communicator->start(std::move(call), kTimeout);
    succeed(rank, *request.get());
    const auto* const got =
        r == root ? copy.data() : reinterpret_cast<const std::int64_t*>(request->received.data.get());
    for (std::size_t i = 0; i < count; ++i) {
        expect(got[i] == value(root, i, round), "broadcast of " + std::to_string(count));
    }
}

void every_collective(int size, bool shared) {
    auto ranks = make_world(size, kTuning, shared);
    run(ranks, [size](Rank& rank, int) {
        int round = 0;
        for (const std::size_t count : {0, 1, 3, 127, 128, 129, 500, 513, 1025, 5000}) {
            all_reduce(rank, size, count, ++round);
            all_gather(rank, size, count + 1, ++round);
            reduce_scatter(rank, size, count + 1, ++round);
            ++round;
            broadcast(rank, round % size, count, round);
        }
    });
    close(ranks);
}

/// In place, with one rank late at random: what it sends must not be overwritten by its own result.
void in_place(int size) {
    auto ranks = make_world(size, kTuning);
    run(ranks, [size](Rank& rank, int r) {
        std::mt19937 random(static_cast<unsigned>(r));
        for (int round = 0; round < 200; ++round) {
            auto data = filled(r, 1000, round);
            const RequestRef request =
                rank.communicator->start(call_of(Collective::all_reduce, DType::int64, data, data, Op::sum), kTimeout);
            if (random() % 3 == 0) {
                std::this_thread::sleep_for(std::chrono::microseconds(random() % 200));
            }
            succeed(rank, *request.get());
            for (std::size_t i = 0; i < data.size(); ++i) {
                std::int64_t sum = 0;
                for (int q = 0; q < size; ++q) {
                    sum += value(q, i, round);
                }
                expect(data[i] == sum, "in place, round " + std::to_string(round) + " at " + std::to_string(i));
            }
        }
    });
    close(ranks);
}

/// Inputs and outputs in shared memory are read where they lie: all four mixtures, and in place.
void shared_arrays(int size) {
    auto ranks = make_world(size, kTuning);
    run(ranks, [size](Rank& rank, int r) {
        constexpr std::size_t kCount = 5003;
        Arena& arena = rank.engine->arena();
        const std::uint64_t at = arena.allocate(2 * kCount * sizeof(std::int64_t));
        auto* const block = reinterpret_cast<std::int64_t*>(arena.at(at));
        std::vector<std::int64_t> own(kCount);
        for (int mixture = 0; mixture < 5; ++mixture) {
            const bool in_place = mixture == 4;
            auto input = filled(r, kCount, mixture);
            std::int64_t* const from = (mixture & 1) != 0 || in_place ? block : input.data();
            std::int64_t* const to = in_place ? from : (mixture & 2) != 0 ? block + kCount : own.data();
            std::copy(input.begin(), input.end(), from);
            Call call = call_of(Collective::all_reduce, DType::int64, input, own, Op::sum);
            call.input = reinterpret_cast<const std::byte*>(from);
            call.output = reinterpret_cast<std::byte*>(to);
            const RequestRef request = rank.communicator->start(std::move(call), kTimeout);
            succeed(rank, *request.get());
            for (std::size_t i = 0; i < kCount; ++i) {
                std::int64_t sum = 0;
                for (int q = 0; q < size; ++q) {
                    sum += value(q, i, mixture);
                }
                expect(to[i] == sum, "shared arrays, mixture " + std::to_string(mixture) + " at " + std::to_string(i));
            }
        }
    });
    close(ranks);
}

void many_in_flight(int size) {
    auto ranks = make_world(size, kTuning);
    run(ranks, [](Rank& rank, int r) {
        std::mt19937 random(static_cast<unsigned>(r));
        constexpr std::size_t kCalls = 60;
        std::vector<std::vector<std::int64_t>> inputs(kCalls);
        std::vector<std::vector<std::int64_t>> outputs(kCalls);
        std::vector<RequestRef> requests;
        for (std::size_t i = 0; i < kCalls; ++i) {
            const std::size_t count = i % 5 == 0 ? 3000 + i : i + 1;  // large ones among small ones
            inputs[i] = filled(r, count, static_cast<int>(i));
            outputs[i].resize(count);
            requests.push_back(rank.communicator->start(
                call_of(Collective::all_reduce, DType::int64, inputs[i], outputs[i], Op::max), kTimeout));
            if (i % 5 == 0) {
                rank.communicator->hand_over(*requests.back().get());
            }
            if (random() % 4 == 0) {
                std::this_thread::yield();
            }
        }
        for (std::size_t i = 0; i < kCalls; ++i) {
            succeed(rank, *requests[i].get());
            for (std::size_t k = 0; k < outputs[i].size(); ++k) {
                expect(outputs[i][k] == value(rank.communicator->size() - 1, k, static_cast<int>(i)), "call in flight");
            }
        }
    });
    close(ranks);
}

void disagreement() {
    auto ranks = make_world(3, kTuning);
    run(ranks, [](Rank& rank, int r) {
        const std::vector<std::int64_t> input(static_cast<std::size_t>(r == 1 ? 4 : 5));
        std::vector<std::int64_t> output(5);
        const RequestRef request =
            rank.communicator->start(call_of(Collective::all_reduce, DType::int64, input, output, Op::sum), kTimeout);
        await(rank, *request.get());
        expect(request->failure() && request->failure()->kind == FailureKind::mismatch, "a mismatch is found");
        expect(request->failure()->ranks == std::vector<int>{1}, "the odd one out is named");
        const RequestRef later =
            rank.communicator->start(call_of(Collective::all_reduce, DType::int64, input, output, Op::sum), kTimeout);
        expect(later->done() && later->failure() != nullptr, "a broken group fails at once");
    });
    close(ranks);
}

void refusal() {
    auto ranks = make_world(3, kTuning);
    run(ranks, [](Rank& rank, int r) {
        const std::vector<std::int64_t> input(5, 1);
        std::vector<std::int64_t> output(5);
        Call call = call_of(Collective::all_reduce, DType::int64, input, output, Op::sum);
        call.refused = r == 2;
        call.text = r == 2 ? "no such thing" : "";
        const RequestRef request = rank.communicator->start(std::move(call), kTimeout);
        await(rank, *request.get());
        expect(request->failure() && request->failure()->kind == FailureKind::refused, "a refusal arrives");
        all_reduce(rank, 3, 9, 1);
    });
    close(ranks);
}

void absence() {
    auto ranks = make_world(3, kTuning);
    run(ranks, [](Rank& rank, int r) {
        if (r == 2) {
            return;
        }
        const std::vector<std::int64_t> input(5, 1);
        std::vector<std::int64_t> output(5);
        const RequestRef request = rank.communicator->start(
            call_of(Collective::all_reduce, DType::int64, input, output, Op::sum), std::chrono::milliseconds(300));
        await(rank, *request.get());
        const auto kind = request->failure()->kind;
        expect(kind == FailureKind::timeout || kind == FailureKind::communication, "an absent rank is a timeout");
    });
    // The absent one comes late: it must not succeed on what was posted before the others gave up.
    const std::vector<std::int64_t> input(5, 1);
    std::vector<std::int64_t> output(5);
    const RequestRef late =
        ranks[2].communicator->start(call_of(Collective::all_reduce, DType::int64, input, output, Op::sum), kTimeout);
    await(ranks[2], *late.get());
    expect(late->failure() != nullptr, "no stale success");
    close(ranks);
}

void departure() {
    auto ranks = make_world(2, kTuning);
    ranks[1].communicator->close();
    const std::vector<std::int64_t> input(5, 1);
    std::vector<std::int64_t> output(5);
    const RequestRef request =
        ranks[0].communicator->start(call_of(Collective::all_reduce, DType::int64, input, output, Op::sum), kTimeout);
    await(ranks[0], *request.get());
    expect(request->failure() && request->failure()->kind == FailureKind::peer_lost, "who left is lost");
    close(ranks);
}

/// What rank 1 writes into its own memory in place of an honest header: rank 0 must raise, and touch nothing outside.
void garbage() {
    constexpr std::uint64_t kCount = 5000;
    const auto header = [](Collective collective, std::uint64_t count) {
        Header head{};
        head.kind = static_cast<std::uint8_t>(HeaderKind::call);
        head.collective = static_cast<std::uint8_t>(collective);
        head.op = static_cast<std::uint8_t>(collective == Collective::all_reduce ? Op::sum : Op::none);
        head.dtype = static_cast<std::uint8_t>(DType::int64);
        head.ndim = 1;
        head.root = collective == Collective::broadcast ? 1 : -1;
        head.nbytes = count * 8;
        head.itemsize = 8;
        head.input_offset = head.output_offset = head.staging_offset = kNoOffset;
        return head;
    };
    std::vector<std::pair<Header, std::uint64_t>> lies;                 // and the extent that is written after it
    lies.emplace_back(header(Collective::all_reduce, kCount), kCount);  // large, but nothing to read from
    lies.emplace_back(header(Collective::broadcast, kCount), kCount);
    lies.emplace_back(header(Collective::all_reduce, kCount), kCount + 1);  // extents that do not say nbytes
    lies.emplace_back(header(Collective::all_reduce, kCount), kCount);
    lies.back().first.input_offset = std::uint64_t{1} << 50;  // outside
    lies.emplace_back(header(Collective::all_reduce, kCount), kCount);
    lies.back().first.staging_offset = kNoOffset - 8;
    for (const std::uint64_t offset : {kNoOffset, std::uint64_t{1} << 50, kNoOffset - 8}) {
        for (const Collective collective : {Collective::all_reduce, Collective::broadcast}) {
            lies.emplace_back(header(collective, kCount), kCount);
            lies.back().first.flags = kCopied;  // a payload that is said to lie beside the slot
            lies.back().first.input_offset = offset;
        }
    }
    lies.emplace_back(header(Collective::broadcast, kCount), kCount);
    lies.back().first.flags = kWildcard;  // a receiver that knows nothing and says something
    lies.back().first.root = 0;
    lies.emplace_back(header(Collective::all_reduce, kCount), kCount);
    lies.back().first.ndim = 255;
    lies.emplace_back(header(Collective::all_reduce, kCount), kCount);
    lies.back().first.text_nbytes = 0xffff;
    lies.emplace_back(header(Collective::all_reduce, kCount), kCount);
    lies.back().first.seq = 77;
    lies.emplace_back(header(Collective::all_reduce, kCount), kCount);
    lies.back().first.kind = 9;
    for (const auto& [lie, extent] : lies) {
        auto ranks = make_world(2, kTuning);
        ChannelBlock& block = ranks[1].communicator->mine();
        auto* const slot = reinterpret_cast<std::byte*>(&block) + slots_offset(block.size);
        std::memcpy(slot, &lie, sizeof lie);
        std::memcpy(slot + sizeof lie, &extent, sizeof extent);
        for (Word* const word : {&block.staged, &block.reduced, &block.copied}) {
            word->store((std::uint64_t{1} << 24) + 1000, std::memory_order_seq_cst);
        }
        block.posted.store(1, std::memory_order_seq_cst);
        const std::vector<std::int64_t> input(kCount, 1);
        std::vector<std::int64_t> output(kCount);
        Call call = call_of(Collective::all_reduce, DType::int64, input, output, Op::sum);
        if (lie.collective == static_cast<std::uint8_t>(Collective::broadcast)) {
            call.collective = Collective::broadcast;
            call.op = Op::none;
            call.root = lie.root;
        }
        const RequestRef request = ranks[0].communicator->start(std::move(call), kTimeout);
        await(ranks[0], *request.get());
        const FailureKind kind = request->failure() ? request->failure()->kind : FailureKind::closed;
        expect(kind == FailureKind::transport || kind == FailureKind::mismatch, "a damaged header is found");
        close(ranks);
    }
}

void abortion() {
    auto ranks = make_world(2, kTuning);
    std::thread killer([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
        ranks[1].communicator->abort(FailureKind::communication, "enough");
    });
    const std::vector<std::int64_t> input(5000, 1);
    std::vector<std::int64_t> output(5000);
    const RequestRef request =
        ranks[0].communicator->start(call_of(Collective::all_reduce, DType::int64, input, output, Op::sum), kTimeout);
    await(ranks[0], *request.get());
    expect(request->failure() && request->failure()->text.find("enough") != std::string::npos, "the reason arrives");
    killer.join();
    close(ranks);
}

}  // namespace
}  // namespace aiodist::testing

int main() {
    using namespace aiodist::testing;
    for (const int size : {1, 2, 3, 4, 5}) {
        every_collective(size, false);
        every_collective(size, true);
        std::printf("collectives on %d ranks: right\n", size);
    }
    in_place(2);
    in_place(3);
    shared_arrays(2);
    shared_arrays(3);
    std::puts("in place, shared arrays: right");
    many_in_flight(2);
    many_in_flight(3);
    std::puts("many in flight: right");
    disagreement();
    refusal();
    absence();
    departure();
    abortion();
    garbage();
    std::puts("failures: right");
    return 0;
}
