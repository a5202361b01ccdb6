// The collectives that move whole arrays and lists, and reduce: drawn at random, many in flight, small ones among large
// ones, out of private and shared memory.
//
// All ranks draw the same calls from one seed; where their arrays lie, who gives an output and when they come is
// each one's own. An input goes back to the arena as soon as its call is done: who still read it would read zeros.

#include <cstdint>
#include <cstring>
#include <deque>
#include <random>
#include <utility>

#include "collectives/varint.hpp"
#include "drawing.hpp"

namespace aiodist::testing {
namespace {

/// One rank's part in the calls.
class Player : private Drawing {
 public:
    using Drawing::Drawing;

    void play(int calls) {
        for (int i = 0; i < calls; ++i) {
            one_call();
            ++call_;
            if (own(6) == 0) {
                std::this_thread::sleep_for(std::chrono::microseconds(own(300)));
            }
            while (flights_.size() > 30 || (own(8) == 0 && !flights_.empty())) {
                land();
            }
        }
        while (!flights_.empty()) {
            land();
        }
    }

 private:
    void one_call() {
        flights_.emplace_back();
        const int root = static_cast<int>(drawn(static_cast<std::size_t>(size_)));
        switch (drawn(9)) {
            case 0:
                return reduce(root);
            case 1:
                return join(Collective::all_gather, -1);
            case 2:
                return join(Collective::gather, root);
            case 3:
                return scatter(root);
            case 4:
                return exchange();
            case 5:
                return deal(root);
            case 6:
                return exchange_lists();
            case 7:
                return reduce_many();
            default:
                return broadcast_many(root);
        }
    }

    void reduce(int root) {
        const std::size_t count = extent();
        Array& input = array(count);
        for (std::size_t i = 0; i < count; ++i) {
            input.words()[i] = value(call_, r_, root, i);
        }
        Call call = plain(Collective::reduce, {count}, root);
        call.op = Op::sum;
        call.input = input.bytes();
        if (r_ != root) {
            return start(std::move(call), [input = input.words(), count, n = call_, r = r_, root](const Request&) {
                for (std::size_t i = 0; i < count; ++i) {
                    expect_same(input[i], value(n, r, root, i), "a reduce leaves its input alone");
                }
            });
        }
        Array& output = own(2) == 0 ? input : array(count);
        call.output = output.bytes();
        start(std::move(call), [got = output.words(), count, n = call_, root, size = size_](const Request&) {
            for (std::size_t i = 0; i < count; ++i) {
                std::uint64_t sum = 0;
                for (int q = 0; q < size; ++q) {
                    sum += value(n, q, root, i);
                }
                expect_same(got[i], sum, "reduce");
            }
        });
    }

    /// all_gather and gather along the middle one of three axes, with equal extents or not.
    void join(Collective collective, int root) {
        const std::size_t rows = 1 + drawn(3);
        const std::size_t inner = 1 + drawn(2);
        const bool uneven = drawn(3) != 0;
        std::vector<std::size_t> extents(static_cast<std::size_t>(size_), extent());
        std::size_t joined = 0;
        for (std::size_t& one : extents) {
            one = uneven ? extent() : one;
            joined += one;
        }
        const std::size_t mine = extents[static_cast<std::size_t>(r_)];
        Call call = plain(collective, {rows, mine, inner}, root);
        Array& input = array(rows * mine * inner);
        for (std::size_t i = 0; i < rows * mine * inner; ++i) {
            input.words()[i] = value(call_, r_, 0, i);
        }
        call.input = input.bytes();
        call.flags = uneven ? kUneven : std::uint16_t{0};
        const bool reads = root < 0 || root == r_;
        if (reads && (!uneven || own(2) == 0)) {
            call.output = array(rows * joined * inner).bytes();
            append_varint(call.table, joined + 1);
        }
        call.table = uneven ? call.table : "";
        start(std::move(call), [=, n = call_](const Request& request) {
            const auto* const got = reinterpret_cast<const std::uint64_t*>(request.call.output);
            expect(!reads || got != nullptr, "a joined array has come");
            expect(!request.received.data || request.received.nbytes == rows * joined * inner * 8, "its bytes");
            for (std::size_t row = 0, at = 0; reads && row < rows; ++row) {
                for (std::size_t q = 0; q < extents.size(); ++q) {
                    for (std::size_t i = 0; i < extents[q] * inner; ++i, ++at) {
                        expect_same(got[at], value(n, static_cast<int>(q), 0, row * extents[q] * inner + i), "joined");
                    }
                }
            }
        });
    }

    /// An array that is divided along its middle axis among all ranks.
    Array& divided(std::size_t rows, std::size_t share, std::size_t inner) {
        Array& input = array(rows * share * inner * static_cast<std::size_t>(size_));
        std::uint64_t* next = input.words();
        for (std::size_t row = 0; row < rows; ++row) {
            for (int to = 0; to < size_; ++to) {
                for (std::size_t i = 0; i < share * inner; ++i) {
                    *next++ = value(call_, r_, to, row * share * inner + i);
                }
            }
        }
        return input;
    }

    void scatter(int root) {
        const std::size_t rows = 1 + drawn(3);
        const std::size_t share = extent();
        const std::size_t inner = 1 + drawn(2);
        const std::size_t count = rows * share * inner;
        Call call = wildcard(Collective::scatter, root);
        call.axis = static_cast<std::int8_t>(own(2) == 0 ? 1 : -2);
        if (r_ == root) {
            call = plain(Collective::scatter, {rows, share * static_cast<std::size_t>(size_), inner}, root);
            call.input = divided(rows, share, inner).bytes();
            call.output = array(count).bytes();
        } else if (own(2) == 0) {
            call = plain(Collective::scatter, {rows, share, inner}, root);
            call.flags = kShare;
            call.output = array(count).bytes();
        }
        start(std::move(call), expecting(root, count));
    }

    void exchange() {
        const std::size_t rows = 1 + drawn(3);
        const std::size_t share = extent();
        const std::size_t inner = 1 + drawn(2);
        Call call = plain(Collective::all_to_all, {rows, share * static_cast<std::size_t>(size_), inner});
        call.input = divided(rows, share, inner).bytes();
        call.output = array(rows * share * inner * static_cast<std::size_t>(size_)).bytes();
        start(std::move(call), [=, n = call_, r = r_, size = size_](const Request& request) {
            const auto* got = reinterpret_cast<const std::uint64_t*>(request.call.output);
            for (std::size_t row = 0; row < rows; ++row) {
                for (int from = 0; from < size; ++from) {
                    for (std::size_t i = 0; i < share * inner; ++i) {
                        expect_same(*got++, value(n, from, r, row * share * inner + i), "all_to_all of arrays");
                    }
                }
            }
        });
    }

    /// What each rank gives to each.
    std::vector<std::vector<std::size_t>> counts() {
        std::vector<std::vector<std::size_t>> all(static_cast<std::size_t>(size_));
        for (auto& one : all) {
            const std::size_t short_list = drawn(2);  // some bring so little that it fits their slots
            for (int to = 0; to < size_; ++to) {
                one.push_back(short_list != 0 ? drawn(8) : extent());
            }
        }
        return all;
    }

    void list_inputs(Call& call, const std::vector<std::size_t>& lengths) {
        call = plain(call.collective, {}, call.root);
        call.nbytes = 0;
        call.axis = 0;
        call.flags = kList;
        for (std::size_t to = 0; to < lengths.size(); ++to) {
            Array& part = array(lengths[to]);
            for (std::size_t i = 0; i < lengths[to]; ++i) {
                part.words()[i] = value(call_, r_, static_cast<int>(to), i);
            }
            call.inputs.push_back({part.bytes(), call.nbytes});
            call.nbytes += lengths[to] * sizeof(std::uint64_t);
            append_varint(call.table, 1);
            append_varint(call.table, lengths[to]);
        }
        call.inputs.push_back({nullptr, call.nbytes});
    }

    void deal(int root) {
        const auto lengths = counts()[0];
        const std::size_t count = lengths[static_cast<std::size_t>(r_)];
        Call call = wildcard(Collective::scatter, root);
        if (r_ == root) {
            list_inputs(call, lengths);
            call.output = array(count).bytes();
        } else if (own(2) == 0) {
            call = plain(Collective::scatter, {count}, root);
            call.flags = kShare;
            call.axis = kNoAxis;
            call.output = array(count).bytes();
        }
        start(std::move(call), expecting(root, count));
    }

    void exchange_lists() {
        const auto lengths = counts();
        const auto r = static_cast<std::size_t>(r_);
        Call call = plain(Collective::all_to_all, {});
        list_inputs(call, lengths[r]);
        if (own(2) == 0) {
            std::uint64_t begin = 0;
            for (const auto& list : lengths) {
                call.outputs.push_back({array(list[r]).bytes(), begin});
                begin += list[r] * sizeof(std::uint64_t);
                append_varint(call.table, 1);
                append_varint(call.table, list[r]);
            }
            call.outputs.push_back({nullptr, begin});
        }
        start(std::move(call), [=, n = call_](const Request& request) {
            expect(request.received.arrays.size() == (request.received.data ? lengths.size() : 0), "arrays of a list");
            for (std::size_t from = 0; from < lengths.size(); ++from) {
                const auto* const got = reinterpret_cast<const std::uint64_t*>(request.call.outputs[from].data);
                for (std::size_t i = 0; i < lengths[from][r]; ++i) {
                    expect_same(got[i], value(n, static_cast<int>(from), static_cast<int>(r), i),
                                "all_to_all of lists");
                }
            }
        });
    }

    /// Arrays of several widths as one vector: pieces, a section for each width.
    void reduce_many() {
        constexpr std::pair<DType, std::size_t> kWidths[] = {
            {DType::uint64, 8}, {DType::uint32, 4}, {DType::uint16, 2}, {DType::uint8, 1}};
        const bool small = drawn(3) == 0;
        const bool in_place = own(2) == 0;
        Call call = plain(Collective::all_reduce, {});
        call.op = Op::sum;
        call.flags = kMany;
        call.dtype = DType::raw;
        call.itemsize = 1;
        call.nbytes = 0;
        std::vector<std::pair<std::size_t, std::size_t>> arrays;  // width and count
        for (const auto& [dtype, width] : kWidths) {
            Call section = plain(Collective::all_reduce, {});
            section.op = Op::sum;
            section.dtype = dtype;
            section.itemsize = static_cast<std::uint32_t>(width);
            section.nbytes = 0;
            for (std::size_t k = drawn(4); k > 0; --k) {
                const std::size_t count = small ? drawn(20) : extent();
                add_piece(section, arrays.size(), count, width, in_place);
                arrays.emplace_back(width, count);
            }
            section.inputs.push_back({nullptr, section.nbytes});
            section.outputs.push_back({nullptr, section.nbytes});
            call.nbytes += section.nbytes;
            call.sections.push_back(std::move(section));
        }
        join_sections(call, arrays.size());
        start(std::move(call), [arrays = std::move(arrays), n = call_, size = size_](const Request& request) {
            for (std::size_t k = 0; k < arrays.size(); ++k) {
                check_sums(request.call.outputs[k].data, n, k, arrays[k], size);
            }
        });
    }

    void add_piece(Call& section, std::size_t k, std::size_t count, std::size_t width, bool in_place) {
        Array& input = array((count * width + 7) / 8);
        for (std::size_t i = 0; i < count; ++i) {
            const std::uint64_t word = value(call_, r_, static_cast<int>(k), i);
            std::memcpy(input.bytes() + i * width, &word, width);  // the low bytes
        }
        section.inputs.push_back({input.bytes(), section.nbytes});
        Array& output = in_place ? input : array((count * width + 7) / 8);
        section.outputs.push_back({output.bytes(), section.nbytes});
        section.nbytes += count * width;
    }

    static void join_sections(Call& call, std::size_t count) {
        std::uint64_t begin = 0;
        for (const Call& section : call.sections) {
            for (std::size_t k = 0; k + 1 < section.inputs.size(); ++k) {
                call.inputs.push_back({section.inputs[k].data, begin + section.inputs[k].begin});
                call.outputs.push_back({section.outputs[k].data, begin + section.outputs[k].begin});
            }
            begin += section.nbytes;
        }
        call.inputs.push_back({nullptr, begin});
        call.outputs.push_back({nullptr, begin});
        call.shape.ndim = 1;
        call.shape.dims[0] = begin;
        append_varint(call.table, count);
    }

    static void check_sums(const std::byte* got, unsigned call, std::size_t k, std::pair<std::size_t, std::size_t> what,
                           int size) {
        const auto [width, count] = what;
        for (std::size_t i = 0; i < count; ++i) {
            std::uint64_t sum = 0;
            for (int q = 0; q < size; ++q) {
                sum += value(call, q, static_cast<int>(k), i);
            }
            std::uint64_t word = 0;
            std::memcpy(&word, got + i * width, width);
            expect_same(word, sum & (~std::uint64_t{0} >> (64 - 8 * width)), "all_reduce_many");
        }
    }

    void broadcast_many(int root) {
        std::vector<std::size_t> lengths(1 + drawn(5));
        for (std::size_t& one : lengths) {
            one = extent();
        }
        Call call = wildcard(Collective::broadcast, root, kMany);
        if (r_ == root || own(2) == 0) {
            list_inputs(call, lengths);
            call.flags = kMany;
            call.outputs.clear();
            for (std::size_t k = 0; k < lengths.size(); ++k) {
                call.outputs.push_back({array(lengths[k]).bytes(), call.inputs[k].begin});
            }
            call.outputs.push_back({nullptr, call.nbytes});
            call.shape.ndim = 1;
            call.shape.dims[0] = call.nbytes / call.itemsize;
            if (r_ != root) {
                call.inputs.clear();
            }
        }
        start(std::move(call), [=, n = call_](const Request& request) {
            const auto* got = reinterpret_cast<const std::uint64_t*>(request.received.data.get());
            for (std::size_t k = 0; k < lengths.size(); ++k) {
                if (!request.received.data) {
                    got = reinterpret_cast<const std::uint64_t*>(request.call.outputs[k].data);
                }
                for (std::size_t i = 0; i < lengths[k]; ++i, ++got) {
                    expect_same(*got, value(n, root, static_cast<int>(k), i), "broadcast_many");
                }
            }
        });
    }
};

void play(int size, bool shared, unsigned seed, int calls) {
    auto ranks = make_world(size, kTuning, shared);
    run(ranks, [seed, calls](Rank& rank, int) { Player(rank, seed).play(calls); });
    close(ranks);
}

}  // namespace
}  // namespace aiodist::testing

int main() {
    using namespace aiodist::testing;
    unsigned seed = 0;
    for (const int size : {1, 2, 3, 5}) {
        play(size, false, ++seed, 300);
        play(size, true, ++seed, 100);
        std::printf("moves on %d ranks: right\n", size);
        (void)std::fflush(stdout);
    }
    return 0;
}
