#pragma once

// Ranks as threads, each with an engine of its own: what real processes do, where a sanitizer sees all of it.

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "communicator.hpp"
#include "engine.hpp"

namespace aiodist::testing {

inline void expect(bool good, const std::string& what) {
    if (!good) {
        (void)std::fprintf(stderr, "FAILED: %s\n", what.c_str());
        std::exit(1);
    }
}

/// For every element of an array: builds no text unless it has to.
inline void expect_same(std::uint64_t got, std::uint64_t due, const char* what) {
    if (got != due) {
        expect(false, std::string(what) + ": " + std::to_string(got) + " in place of " + std::to_string(due));
    }
}

inline Fd copy_of(int fd) { return Fd(::dup(fd)); }

struct Rank {
    std::shared_ptr<Engine> engine;
    std::shared_ptr<Communicator> communicator;
};

/// Forms a world of `size` ranks, attached to each other as processes would be. `shared`: one engine for all, as in
/// local_world().
inline std::vector<Rank> make_world(int size, Tuning tuning, bool shared = false) {
    std::vector<Rank> ranks(static_cast<std::size_t>(size));
    std::vector<std::uint64_t> offsets;
    constexpr std::uint64_t kId = 7;
    for (int r = 0; r < size; ++r) {
        Rank& rank = ranks[static_cast<std::size_t>(r)];
        rank.engine = shared && r > 0 ? ranks[0].engine : Engine::create();
        offsets.push_back(Communicator::reserve(*rank.engine, tuning, kId, r, size));
    }
    for (int r = 0; r < size; ++r) {
        Rank& rank = ranks[static_cast<std::size_t>(r)];
        Communicator::Options options;
        options.name = "world";
        options.id = kId;
        options.rank = r;
        options.tuning = tuning;
        options.block_offset = offsets[static_cast<std::size_t>(r)];
        for (int q = 0; q < size; ++q) {
            Engine& peer = *ranks[static_cast<std::size_t>(q)].engine;
            std::shared_ptr<Process> process = rank.engine->self();
            if (&peer != rank.engine.get()) {
                const ProcessFds fds = peer.fds();
                process = rank.engine->attach(copy_of(fds.arena), copy_of(fds.bell), copy_of(fds.pidfd), fds.pid);
            }
            options.members.push_back({process, offsets[static_cast<std::size_t>(q)]});
        }
        rank.communicator = Communicator::create(rank.engine, std::move(options));
    }
    return ranks;
}

/// Runs `body` once a rank, each on its own thread, then closes the world.
inline void run(std::vector<Rank>& ranks, const std::function<void(Rank&, int)>& body) {
    std::vector<std::thread> threads;
    for (std::size_t r = 0; r < ranks.size(); ++r) {
        threads.emplace_back([&, r] { body(ranks[r], static_cast<int>(r)); });
    }
    for (auto& thread : threads) {
        thread.join();
    }
}

inline void close(std::vector<Rank>& ranks) {
    for (Rank& rank : ranks) {
        rank.communicator->close();
    }
    for (Rank& rank : ranks) {
        rank.engine->stop();
    }
}

/// Closes the world; all that messages took of the send buffers must be back then.
inline void close_even(std::vector<Rank>& ranks) {
    for (Rank& rank : ranks) {
        rank.communicator->close();
    }
    for (Rank& rank : ranks) {
        rank.engine->rest();
    }
    for (Rank& rank : ranks) {
        expect(rank.engine->take_send_buffer(kSendBufferNbytes), "the send buffer is whole again");
        rank.engine->give_send_buffer(kSendBufferNbytes);  // ranks may share an engine
        rank.engine->stop();
    }
}

/// Takes what an engine's messages may take, so that those which come find nothing left.
struct UsedUp {
    explicit UsedUp(Engine& which) : engine(which) {
        expect(engine.take_send_buffer(kSendBufferNbytes), "an unused send buffer");
    }
    ~UsedUp() { engine.give_send_buffer(kSendBufferNbytes); }
    UsedUp(const UsedUp&) = delete;
    UsedUp& operator=(const UsedUp&) = delete;
    Engine& engine;
};

template <typename T>
Call call_of(Collective collective, DType dtype, const std::vector<T>& input, std::vector<T>& output,
             Op op = Op::none) {
    Call call;
    call.collective = collective;
    call.op = op;
    call.dtype = dtype;
    call.itemsize = sizeof(T);
    call.nbytes = input.size() * sizeof(T);
    call.shape.ndim = 1;
    call.shape.dims[0] = input.size();
    call.input = reinterpret_cast<const std::byte*>(input.data());
    call.output = reinterpret_cast<std::byte*>(output.data());
    return call;
}

inline Call receive_of(int from, std::uint64_t tag) {
    Call call;
    call.collective = Collective::recv;
    call.root = from;
    call.tag = tag;
    return call;
}

inline Call send_of(const std::uint64_t* data, std::size_t count, int to, std::uint64_t tag) {
    Call call = receive_of(to, tag);
    call.collective = Collective::send;
    call.dtype = DType::uint64;
    call.itemsize = sizeof(std::uint64_t);
    call.nbytes = count * sizeof(std::uint64_t);
    call.shape.ndim = 1;
    call.shape.dims[0] = count;
    call.input = reinterpret_cast<const std::byte*>(data);
    return call;
}

inline void await(Rank& rank, Request& request) {
    const auto outcome = rank.engine->wait(request, Clock::now() + std::chrono::seconds(60));
    expect(outcome == Engine::Wait::done, "a request ended within its deadline");
}

inline void succeed(Rank& rank, Request& request) {
    await(rank, request);
    expect(request.state() == Request::State::done,
           request.failure() ? request.failure()->text : "a request succeeded");
}

}  // namespace aiodist::testing
