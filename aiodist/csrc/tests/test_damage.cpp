// What a peer can write into its own memory in place of honest messages and lists: this rank must say that they are
// damaged, end whatever waits, and touch nothing outside. (Headers of plain arrays: test_world.cpp.)

#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "collectives/varint.hpp"
#include "messages/lane.hpp"
#include "messages/staging.hpp"
#include "world.hpp"

// Lengths that nobody can mean ask for memory that is not there: the answer is to be null, as without a sanitizer.
extern "C" __attribute__((visibility("default"))) const char* __asan_default_options();
extern "C" __attribute__((visibility("default"))) const char* __tsan_default_options();
const char* __asan_default_options() { return "allocator_may_return_null=1"; }
const char* __tsan_default_options() { return "allocator_may_return_null=1"; }

namespace aiodist::testing {
namespace {

constexpr std::chrono::seconds kTimeout{20};
const Tuning kTuning{8, 1024, 4096, 3};
constexpr std::uint64_t kOutside = std::uint64_t{1} << 60;
constexpr std::uint64_t kAlmostAll = ~std::uint64_t{0} - 7;
constexpr std::uint64_t kCount = 20'000;  // words of the honest message

/// Two ranks, of which the second writes one message into its lane by hand: a long one in one chunk, unless told
/// otherwise.
class Liar {
 public:
    Liar() : ranks_(make_world(2, kTuning)) {
        Arena& arena = ranks_[1].engine->arena();
        sheet = arena.allocate(kSheetNbytes);
        chunk = arena.allocate(sizeof(ChunkHead) + kLargeChunk);
        head = new (arena.at(chunk)) ChunkHead;
        head->staged.store(kCount * 8, std::memory_order_relaxed);
        head->chunks[0] = chunk;
        auto* const data = reinterpret_cast<std::uint64_t*>(arena.at(chunk) + sizeof(ChunkHead));
        for (std::size_t i = 0; i < kCount; ++i) {
            data[i] = i + 1;
        }
        record.nbytes = 128;
        record.kind = static_cast<std::uint8_t>(RecordKind::message);
        record.dtype = static_cast<std::uint8_t>(DType::uint64);
        record.ndim = 1;
        record.message_nbytes = kCount * 8;
        record.block = chunk;
        record.itemsize = 8;
        record.chunks = 1;
        record.chunk_nbytes = kLargeChunk;
    }
    ~Liar() { close(ranks_); }
    Liar(const Liar&) = delete;
    Liar& operator=(const Liar&) = delete;

    Rank& honest() { return ranks_[0]; }
    Lane& lane() { return ranks_[1].communicator->lane(0); }
    ChannelBlock& block() { return ranks_[1].communicator->mine(); }
    Arena& arena() { return ranks_[1].engine->arena(); }
    /// Writes a record, and `extents` after it, behind those before.
    void write(const Record& what) {
        std::byte* const at = arena().at(sheet) + sent;
        std::memcpy(at, &what, sizeof what);
        std::memcpy(at + sizeof what, extents, sizeof extents);
        sent += what.nbytes;
    }
    void publish() {
        lane().sheet.store(sheet_told == kNoOffset ? sheet : sheet_told, std::memory_order_relaxed);
        lane().sent.store(sent + more, std::memory_order_seq_cst);
    }

    Record record{};
    ChunkHead* head = nullptr;
    std::uint64_t sheet = 0;
    std::uint64_t sheet_told = kNoOffset;
    std::uint64_t chunk = 0;
    std::uint64_t sent = 0;
    std::uint64_t more = 0;  // said to be written, too
    std::uint64_t extents[4] = {kCount, 1, 1, 1};

 private:
    std::vector<Rank> ranks_;
};

void expect_transport(Liar& liar, Request& request, const std::string& what) {
    const auto outcome = liar.honest().engine->wait(request, Clock::now() + std::chrono::seconds(10));
    expect(outcome == Engine::Wait::done, what + ": it ends");
    expect(request.failure() && request.failure()->kind == FailureKind::transport, what + ": it is found");
}

RequestRef receive(Liar& liar) { return liar.honest().communicator->start(receive_of(1, 0), kTimeout); }

/// One record that `lie` has a hand in.
void record(const char* what, const std::function<void(Liar&)>& lie) {
    Liar liar;
    lie(liar);
    liar.write(liar.record);
    liar.publish();
    expect_transport(liar, *receive(liar).get(), what);
}

/// The tests' own record is honest where nobody lies.
void honesty() {
    Liar liar;
    liar.write(liar.record);
    liar.publish();
    const RequestRef request = receive(liar);
    succeed(liar.honest(), *request.get());
    for (std::size_t i = 0; i < kCount; ++i) {
        expect_same(reinterpret_cast<const std::uint64_t*>(request->received.data.get())[i], i + 1,
                    "a message by hand");
    }
}

void records() {
    record("a sheet outside", [](Liar& liar) { liar.sheet_told = kOutside; });
    record("a sheet at the end", [](Liar& liar) { liar.sheet_told = liar.arena().nbytes() - kPage; });
    record("a sheet that begins within a page", [](Liar& liar) { liar.sheet_told = liar.sheet + 8; });
    record("a record of no bytes", [](Liar& liar) {
        liar.record.nbytes = 0;
        liar.more = 128;
    });
    record("a record of more bytes than there are", [](Liar& liar) { liar.record.nbytes = 0xffffffc0; });
    record("a record larger than its sheet", [](Liar& liar) { liar.record.nbytes = kSheetNbytes + 64; });
    record("a record at an odd place", [](Liar& liar) { liar.record.nbytes = 120; });
    record("a record of no kind", [](Liar& liar) { liar.record.kind = 0; });
    record("a record of another kind", [](Liar& liar) { liar.record.kind = 9; });
    record("too many dimensions", [](Liar& liar) { liar.record.ndim = 255; });
    record("extents beyond the record", [](Liar& liar) { liar.record.ndim = 64; });
    record("text beyond the record", [](Liar& liar) { liar.record.text_nbytes = 0xffff; });
    record("bytes that the extents do not say", [](Liar& liar) { liar.record.message_nbytes += 8; });
    record("an itemsize that is not the dtype's", [](Liar& liar) {
        liar.record.itemsize = 4;
        liar.record.message_nbytes /= 2;
    });
    record("extents whose product is too large", [](Liar& liar) {
        liar.record.ndim = 2;
        liar.extents[0] = liar.extents[1] = std::uint64_t{1} << 40;
    });
    record("a short message that is long", [](Liar& liar) { liar.record.block = kNoOffset; });
    record("a short message that is not in its record", [](Liar& liar) {
        liar.record.block = kNoOffset;
        liar.extents[0] = 9;
        liar.record.message_nbytes = 72;
    });
    record("a next sheet outside", [](Liar& liar) {
        liar.record.kind = static_cast<std::uint8_t>(RecordKind::next);
        liar.record.block = kOutside;
        liar.more = 64;
    });
    record("sheets that lead to themselves", [](Liar& liar) {
        liar.record.kind = static_cast<std::uint8_t>(RecordKind::next);
        liar.record.nbytes = kSheetNbytes;
        liar.record.block = liar.sheet;
        liar.more = std::uint64_t{1} << 62;
    });
    record("news of a message that was never sent",
           [](Liar& liar) { liar.record.kind = static_cast<std::uint8_t>(RecordKind::taken); });
}

void long_messages() {
    record("a chunk outside", [](Liar& liar) { liar.record.block = kOutside; });
    record("a chunk within a page", [](Liar& liar) { liar.record.block += 128; });
    record("a chunk at the end", [](Liar& liar) { liar.record.block = liar.arena().nbytes() - kPage; });
    record("no chunks", [](Liar& liar) { liar.record.chunks = 0; });
    record("too many chunks", [](Liar& liar) { liar.record.chunks = kMaxChunks + 1; });
    record("chunks of no bytes", [](Liar& liar) { liar.record.chunk_nbytes = 0; });
    record("chunks that are too large", [](Liar& liar) { liar.record.chunk_nbytes = kLargeChunk + 1; });
    record("data in a chunk outside", [](Liar& liar) { liar.head->chunks[0] = kOutside; });
    record("data in a chunk at the end", [](Liar& liar) { liar.head->chunks[0] = liar.arena().nbytes() - 4096; });
    record("a second chunk nowhere", [](Liar& liar) {
        liar.record.chunks = 2;
        liar.record.chunk_nbytes = kSmallChunk;
        liar.head->chunks[1] = kNoOffset;
    });
    record("more than all of it staged", [](Liar& liar) { liar.head->staged = kCount * 8 + 1; });
    record("a shared array outside", [](Liar& liar) {
        liar.record.way = 1;  // direct
        liar.record.block = kOutside;
    });
    record("a shared array that ends outside", [](Liar& liar) {
        liar.record.way = 1;  // direct
        liar.record.block = liar.arena().nbytes() - 4096;
    });
    record("more bytes than there is memory for", [](Liar& liar) {
        liar.extents[0] = std::uint64_t{1} << 57;
        liar.record.message_nbytes = std::uint64_t{1} << 60;
    });
    record("more bytes than can be rounded up", [](Liar& liar) {
        liar.extents[0] = kAlmostAll / 8;
        liar.record.message_nbytes = kAlmostAll;
    });
}

/// What only several words together give away.
void lanes() {
    {
        Liar liar;  // the count of bytes goes back
        liar.write(liar.record);
        liar.publish();
        succeed(liar.honest(), *receive(liar).get());
        liar.lane().sent.store(64, std::memory_order_seq_cst);
        expect_transport(liar, *receive(liar).get(), "records that are taken back");
    }
    {
        Liar liar;  // it has read more than was sent
        liar.lane().seen.store(std::uint64_t{1} << 40, std::memory_order_seq_cst);
        const std::uint64_t word = 1;
        const RequestRef request = liar.honest().communicator->start(send_of(&word, 1, 1, 0), kTimeout);
        expect_transport(liar, *request.get(), "a reader ahead of its writer");
    }
    const std::vector<std::uint64_t> data(kCount);
    const std::pair<std::uint64_t, std::uint64_t> lies[] = {{kCount * 8 + 1, 0}, {kAlmostAll, 0}, {5000, 4000}};
    for (const auto& [first, second] : lies) {
        Liar liar;  // it has taken more than there is, or less than before
        const RequestRef sent = liar.honest().communicator->start(send_of(data.data(), kCount, 1, 0), kTimeout);
        succeed(liar.honest(), *sent.get());
        liar.record.kind = static_cast<std::uint8_t>(RecordKind::taken);
        for (const std::uint64_t taken : {first, second}) {
            liar.record.block = taken;
            liar.write(liar.record);
        }
        liar.publish();
        expect_transport(liar, *receive(liar).get(), "news that are not true");
    }
}

/// Any bytes changed: whatever comes of it, it is an answer, and what is left open fails with the group.
void anything(unsigned seed) {
    std::mt19937 random(seed);
    Liar liar;
    const auto spoil = [&random](void* at, std::size_t nbytes) {
        constexpr std::uint8_t kBytes[] = {0, 1, 0x7f, 0x80, 0xff};
        static_cast<std::uint8_t*>(at)[random() % nbytes] = kBytes[random() % std::size(kBytes)];
    };
    for (std::size_t changes = 1 + random() % 3; changes > 0; --changes) {
        spoil(&liar.record, sizeof liar.record);
        if (random() % 3 == 0) {
            spoil(liar.extents, 8);
        }
        if (random() % 3 == 0) {
            spoil(liar.head->chunks, 8);
        }
    }
    liar.record.kind = random() % 4 == 0 ? liar.record.kind : static_cast<std::uint8_t>(RecordKind::message);
    liar.write(liar.record);
    liar.sent = random() % 4 == 0 ? random() % 4096 : liar.sent;
    liar.publish();
    const RequestRef request = receive(liar);
    for (int i = 0; i < 10; ++i) {
        liar.honest().communicator->progress();
    }
    const FailurePtr failure = request->done() ? request->failure() : nullptr;
    expect(!failure || failure->kind == FailureKind::transport, "a spoilt message, seed " + std::to_string(seed));
    liar.honest().communicator->close();
    expect(request->done(), "a request of a closed group is over");
}

/// The other side of a large call out of a header by hand, which is `lie`'s to change: all its data are said to be
/// there.
void header(const char* what, Call&& call, const std::function<void(Header&, std::uint64_t&, std::string&)>& lie) {
    Liar liar;
    ChannelBlock& block = liar.block();
    Header head{};
    head.kind = static_cast<std::uint8_t>(HeaderKind::call);
    head.collective = static_cast<std::uint8_t>(call.collective);
    head.dtype = static_cast<std::uint8_t>(DType::uint64);
    head.ndim = 1;
    head.flags = call.flags & static_cast<std::uint16_t>(~kWildcard);
    head.root = call.root;
    head.itemsize = 8;
    head.input_offset = head.output_offset = kNoOffset;
    head.staging_offset = liar.arena().allocate(2 * kTuning.depth * std::size_t{kTuning.segment_nbytes});
    std::uint64_t extent = kCount;
    std::string table;
    lie(head, extent, table);
    head.nbytes = head.nbytes == 0 ? extent * 8 : head.nbytes;
    head.table_nbytes = static_cast<std::uint16_t>(table.size());
    auto* const slot = reinterpret_cast<std::byte*>(&block) + slots_offset(block.size);
    std::memcpy(slot, &head, sizeof head);
    std::memcpy(slot + sizeof head, &extent, sizeof extent);
    std::memcpy(slot + sizeof head + head.ndim * sizeof extent, table.data(), table.size());
    for (Word* const word : {&block.staged, &block.reduced, &block.copied}) {
        word->store((std::uint64_t{1} << 24) + 1000, std::memory_order_seq_cst);
    }
    block.posted.store(1, std::memory_order_seq_cst);
    expect_transport(liar, *liar.honest().communicator->start(std::move(call), kTimeout).get(), what);
}

/// Extents that are good alone, but not together with ours, and lists that are none.
void headers() {
    static const std::vector<std::uint64_t> input(kCount, 1);
    const auto call = [](Collective collective, std::uint16_t flags) {
        Call made = send_of(input.data(), kCount, -1, 0);
        made.collective = collective;
        made.flags = flags;
        return made;
    };
    Call wildcard;
    wildcard.collective = Collective::broadcast;
    wildcard.flags = kWildcard;
    wildcard.root = 1;
    header("a broadcast of more bytes than can be rounded up", Call(wildcard),
           [](Header&, std::uint64_t& extent, std::string&) { extent = kAlmostAll / 8; });
    header("a broadcast of more bytes than there is memory for", Call(wildcard),
           [](Header&, std::uint64_t& extent, std::string&) { extent = std::uint64_t{1} << 57; });
    header("parts that are longer together than anything", call(Collective::all_gather, kUneven),
           [](Header&, std::uint64_t& extent, std::string&) { extent = (std::uint64_t{1} << 61) - kCount + 1; });
    Call listed = call(Collective::all_to_all, kList);
    listed.input = nullptr;
    listed.inputs = {{reinterpret_cast<const std::byte*>(input.data()), 0},
                     {reinterpret_cast<const std::byte*>(input.data()), kCount * 4},
                     {nullptr, kCount * 8}};
    for (int part = 0; part < 2; ++part) {
        append_varint(listed.table, 1);
        append_varint(listed.table, kCount / 2);
    }
    const auto list = [&listed](const char* what, std::vector<std::uint64_t> numbers, std::uint64_t nbytes) {
        header(what, Call(listed), [&](Header& head, std::uint64_t&, std::string& table) {
            head.nbytes = nbytes;
            for (const std::uint64_t number : numbers) {
                append_varint(table, number);
            }
        });
    };
    list("an array of more bytes than can be rounded up", {1, kAlmostAll / 8, 1, 0}, kAlmostAll);
    list("arrays whose sum is too large", {1, kAlmostAll / 8, 1, kAlmostAll / 8}, kCount * 8);
    list("a list that ends within an array", {1, kCount, 1}, kCount * 8);
    list("a list of too few arrays", {1, kCount}, kCount * 8);
    list("an array of too many dimensions", {65, kCount, 1, 0}, kCount * 8);
    list("a list of other arrays than its bytes", {1, kCount, 1, 1}, kCount * 8);
    header("a number without an end", Call(listed), [](Header& head, std::uint64_t& extent, std::string& table) {
        head.nbytes = extent * 8;
        table.assign(20, '\xff');
    });
}

}  // namespace
}  // namespace aiodist::testing

int main() {
    using namespace aiodist::testing;
    honesty();
    records();
    long_messages();
    lanes();
    std::puts("damaged messages: found");
    for (unsigned seed = 0; seed < 150; ++seed) {
        anything(seed);
    }
    std::puts("spoilt messages: answered");
    headers();
    std::puts("damaged headers: found");
    return 0;
}
