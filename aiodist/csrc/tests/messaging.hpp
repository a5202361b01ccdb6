#pragma once

// Messages of which every word is known.

#include <chrono>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "world.hpp"

namespace aiodist::testing {

constexpr std::chrono::seconds kTimeout{60};

using Words = std::vector<std::uint64_t>;

inline std::uint64_t value(int from, int to, unsigned number, std::size_t i) {
    return (((std::uint64_t{number} * 8 + static_cast<unsigned>(from)) * 8 + static_cast<unsigned>(to)) << 20) + i;
}

inline Words words(int from, int to, unsigned number, std::size_t count) {
    Words data(count);
    for (std::size_t i = 0; i < count; ++i) {
        data[i] = value(from, to, number, i);
    }
    return data;
}

inline RequestRef send(Rank& rank, const std::uint64_t* data, std::size_t count, int to, std::uint64_t tag) {
    return rank.communicator->start(send_of(data, count, to, tag), kTimeout);
}

inline RequestRef receive(Rank& rank, int from, std::uint64_t tag, Clock::duration timeout = kTimeout) {
    return rank.communicator->start(receive_of(from, tag), timeout);
}

inline RequestRef receive_into(Rank& rank, int from, std::uint64_t tag, Words& place) {
    Call call = send_of(place.data(), place.size(), from, tag);
    call.collective = Collective::recv;
    call.output = reinterpret_cast<std::byte*>(place.data());
    call.input = nullptr;
    return rank.communicator->start(std::move(call), kTimeout);
}

inline void check(Rank& rank, Request& request, int from, unsigned number, std::size_t count) {
    succeed(rank, request);
    const auto* const got = reinterpret_cast<const std::uint64_t*>(request.call.output);
    const bool right = !request.received.data || (request.received.nbytes == count * sizeof(std::uint64_t) &&
                                                  request.received.arrays.at(0).shape.at(0) == count);
    expect(right, "a message of " + std::to_string(count) + " words says so");
    for (std::size_t i = 0; i < count; ++i) {
        expect_same(got[i], value(from, rank.communicator->rank(), number, i), "a message");
    }
}

inline FailureKind kind_of(Rank& rank, Request& request) {
    await(rank, request);
    expect(request.failure() != nullptr, "a request that can not be done fails");
    return request.failure()->kind;
}

}  // namespace aiodist::testing
