#pragma once

// What the ranks of test_moves.cpp draw their calls with.

#include <chrono>
#include <cstdint>
#include <deque>
#include <random>
#include <utility>

#include "world.hpp"

namespace aiodist::testing {

inline constexpr std::chrono::seconds kTimeout{60};
inline constexpr Tuning kTuning{8, 1024, 4096, 3};

/// Another one for every element that every rank brings for every other to every call.
inline std::uint64_t value(unsigned call, int from, int to, std::size_t i) {
    return (((std::uint64_t{call} * 8 + static_cast<unsigned>(from)) * 16 + static_cast<unsigned>(to)) << 20) + i;
}

/// Memory of an array: the rank's own, or shared.
class Array {
 public:
    Array(Engine& engine, std::size_t nbytes, bool shared) : engine_(engine), shared_(shared) {
        if (shared_) {
            offset_ = engine_.arena().allocate(nbytes);
            bytes_ = engine_.arena().at(offset_);
        } else {
            own_.resize(nbytes / sizeof(std::uint64_t) + 1);
            bytes_ = reinterpret_cast<std::byte*>(own_.data());
        }
    }
    ~Array() {
        if (shared_) {
            engine_.arena().release(offset_);
        }
    }
    Array(const Array&) = delete;
    Array& operator=(const Array&) = delete;
    std::byte* bytes() const noexcept { return bytes_; }
    std::uint64_t* words() const noexcept { return reinterpret_cast<std::uint64_t*>(bytes_); }

 private:
    Engine& engine_;
    bool shared_;
    std::uint64_t offset_ = 0;
    std::byte* bytes_ = nullptr;
    std::vector<std::uint64_t> own_;
};

struct Flight {
    RequestRef request;
    std::vector<std::unique_ptr<Array>> arrays{};
    std::function<void(const Request&)> check{};
};

/// One rank's calls in flight, and what they are drawn from.
class Drawing {
 public:
    Drawing(Rank& rank, unsigned seed)
        : rank_(rank),
          r_(rank.communicator->rank()),
          size_(rank.communicator->size()),
          common_(seed),
          own_(seed * 64 + static_cast<unsigned>(r_)) {}

 protected:
    std::size_t drawn(std::size_t below) { return common_() % below; }
    std::size_t own(std::size_t below) { return own_() % below; }
    /// Elements of an array: empty, in a slot, just beyond it, in a few segments or in more than the ring holds.
    std::size_t extent() {
        constexpr std::size_t kExtents[] = {0, 1, 5, 42, 128, 129, 300, 600, 2100, 5000};
        return kExtents[drawn(std::size(kExtents))];
    }

    Array& array(std::size_t count) {
        auto& arrays = flights_.back().arrays;
        arrays.push_back(std::make_unique<Array>(*rank_.engine, count * sizeof(std::uint64_t), own(3) == 0));
        return *arrays.back();
    }

    void start(Call&& call, std::function<void(const Request&)> check) {
        const bool large = call.nbytes > kTuning.slot_nbytes || call.nbytes == 0;
        Flight& flight = flights_.back();
        flight.request = rank_.communicator->start(std::move(call), kTimeout);
        flight.check = std::move(check);
        if (large && own(2) == 0) {  // otherwise nobody is at it until it is awaited
            rank_.communicator->hand_over(*flight.request.get(), own(2) == 0);
        }
    }

    void land() {
        Flight& flight = flights_.front();
        succeed(rank_, *flight.request.get());
        if (flight.check) {
            flight.check(*flight.request.get());
        }
        flights_.pop_front();
    }

    static Call plain(Collective collective, std::initializer_list<std::size_t> shape, int root = -1) {
        Call call;
        call.collective = collective;
        call.root = root;
        call.dtype = DType::uint64;
        call.itemsize = sizeof(std::uint64_t);
        call.nbytes = call.itemsize;
        for (const std::size_t extent : shape) {
            call.shape.dims[call.shape.ndim++] = extent;
            call.nbytes *= extent;
        }
        call.axis = shape.size() > 1 ? 1 : 0;
        return call;
    }

    /// A receiver that takes what comes.
    static Call wildcard(Collective collective, int root, std::uint16_t flags = 0) {
        Call call;
        call.collective = collective;
        call.root = root;
        call.flags = kWildcard | flags;
        return call;
    }

    /// That the call's output is what `from` had for this rank.
    std::function<void(const Request&)> expecting(int from, std::size_t count) const {
        return [=, n = call_, r = r_](const Request& request) {
            const auto* const got = reinterpret_cast<const std::uint64_t*>(request.call.output);
            expect(!request.received.data || request.received.nbytes == count * 8, "bytes of a share");
            for (std::size_t i = 0; i < count; ++i) {
                expect_same(got[i], value(n, from, r, i), "a share");
            }
        };
    }

    Rank& rank_;
    const int r_;
    const int size_;
    std::mt19937 common_;  // the same on all ranks
    std::mt19937 own_;
    unsigned call_ = 0;
    std::deque<Flight> flights_;
};

}  // namespace aiodist::testing
