#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace aiodist {

// Byte layout of the memory that processes share. A process owns one arena, which it alone writes; its peers map it
// read-only. Any change here is a change of kLayoutVersion, which peers compare before they attach.

inline constexpr std::uint64_t kArenaMagic = 0x61696f6469737431;    // "aiodist1"
inline constexpr std::uint64_t kChannelMagic = 0x6368616e6e656c31;  // "channel1"
inline constexpr std::uint32_t kLayoutVersion = 7;
inline constexpr std::size_t kPage = 4096;
// Flags of different writers, or read at different times, lie two cache lines apart: the adjacent-line prefetcher pairs
// lines.
inline constexpr std::size_t kLine = 128;
inline constexpr std::uint64_t kNoOffset = ~std::uint64_t{0};
inline constexpr std::uint64_t kNever = ~std::uint64_t{0};
// Of one array or message. Sums over all ranks, and what is rounded up, are numbers then, too.
inline constexpr std::uint64_t kMaxNbytes = std::uint64_t{1} << 48;
inline constexpr std::size_t kMaxDims = 64;       // numpy's own limit
inline constexpr std::size_t kMetaNbytes = 1536;  // header, shape and text of a slot, before its payload
inline constexpr std::size_t kReasonNbytes = 1024;
inline constexpr std::size_t kMaxNamedRanks = 4096;
inline constexpr std::size_t kSiteNbytes = 128;
inline constexpr std::size_t kSiteCount = 480;  // of one table
inline constexpr std::size_t kSiteTables = 17;  // the first lies in the arena's header

static_assert(std::atomic<std::uint64_t>::is_always_lock_free);
static_assert(std::atomic<std::uint32_t>::is_always_lock_free);

using Word = std::atomic<std::uint64_t>;

constexpr std::size_t round_up(std::size_t value, std::size_t unit) { return (value + unit - 1) / unit * unit; }

/// One call site, "file:line", NUL-terminated.
struct Site {
    char text[kSiteNbytes];
};

/// First bytes of an arena.
struct ArenaHeader {
    std::uint64_t magic;
    std::uint32_t layout_version;
    std::int32_t pid;
    std::uint64_t nbytes;
    /// Number of this process's threads and loops that sleep or are about to. Pairs with every flag: see Engine::ring.
    alignas(kLine) Word sleepers;
    /// The core that this process last posted from or waited on: a hint for peers that decide whether waiting awake
    /// makes sense.
    alignas(kLine) std::atomic<std::int32_t> core;
    /// A robust futex held by the engine thread: the kernel sets FUTEX_OWNER_DIED in it when the process dies, before
    /// memory is torn down.
    alignas(kLine) std::uint64_t robust_next;
    std::atomic<std::uint32_t> life;
    /// Append-only; site_count is stored after the text it counts, and after the offset of the table that it is in.
    alignas(kLine) std::atomic<std::uint32_t> site_count;
    std::uint64_t site_tables[kSiteTables - 1];
    alignas(kLine) Site sites[kSiteCount];
};

/// First bytes of what one member writes for one channel; its header slots follow. All words only ever grow, but for
/// `abort_from`.
struct ChannelBlock {
    std::uint64_t magic;
    /// Tells this channel from one that later lies in the same place.
    std::uint64_t id;
    std::int32_t rank;
    std::int32_t size;
    /// Calls whose slots are written.
    alignas(kLine) Word posted;
    /// The lowest call that failed here, kNever while none did. On the line of `posted`, which readers have at hand.
    Word abort_from;
    /// Calls whose slots I have read on all members.
    alignas(kLine) Word consumed;
    /// Progress of the present large call, each (number << 24) + rounds, where number counts large calls.
    alignas(kLine) Word staged;
    alignas(kLine) Word reduced;
    alignas(kLine) Word copied;
    /// 1 once the member closed the channel.
    alignas(kLine) Word left;
    /// Why, for the peers: written before abort_from.
    std::uint32_t abort_kind;                        // FailureKind
    std::uint64_t abort_ranks[kMaxNamedRanks / 64];  // a bit a rank that the failure is about
    char reason[kReasonNbytes];
};

/// What a member writes about its messages with one peer; one for each peer follows the ChannelBlock, in rank order.
struct alignas(64) Lane {
    /// Offset of the first sheet of records for the peer in the writer's arena. Each sheet ends with a record that
    /// tells where the next one is.
    Word sheet;
    /// Bytes of records written so far.
    Word sent;
    /// Bytes of the peer's records read so far.
    Word seen;
    /// Bytes of the peer's short messages that receives have taken so far.
    Word received;
};
static_assert(sizeof(Lane) == 64);

/// One entry of a lane: this, then ndim shape words, text, and the payload of a short message.
struct alignas(64) Record {
    std::uint32_t nbytes;  // of the entry, a multiple of 64
    std::uint8_t kind;     // RecordKind
    std::uint8_t dtype;
    std::uint8_t ndim;
    std::uint8_t way;      // MessageWay
    std::uint64_t number;  // of the message, in the order of this lane
    std::uint64_t tag;
    std::uint64_t message_nbytes;
    std::uint64_t block;  // of its first chunk, kNoOffset where the payload is in the entry; of `next`: the next sheet;
                          // of `taken`: bytes taken
    std::uint32_t itemsize;
    std::uint32_t site;
    std::uint32_t chunks;        // that it is staged in; fewer than it fills: they are used in turn
    std::uint32_t chunk_nbytes;  // data of each
    std::uint16_t text_nbytes;
};
static_assert(sizeof(Record) == 64);

enum class RecordKind : std::uint8_t { next = 1, message = 2, taken = 3 };

/// How a message reaches its receiver.
enum class MessageWay : std::uint8_t {
    buffered = 0,  // in the record, or in chunks that hold all of it
    direct = 1,    // from its sender's own shared array, at `block`
    in_turn = 2,   // through chunks that are used in turn, from the first `taken` on
};

inline constexpr std::size_t kMaxChunks = 1008;
/// First bytes of a message's first chunk; every chunk's data begin behind as many.
struct alignas(kLine) ChunkHead {
    Word staged;                                      // bytes of the message
    alignas(kLine) std::uint64_t chunks[kMaxChunks];  // offsets; each is written before `staged` reaches it
};
static_assert(sizeof(ChunkHead) == 2 * kPage);

/// What a call is, in one slot: this, then ndim shape words, then `table_nbytes` of numbers (see varint.hpp) and
/// `text_nbytes` of text, then (at payload_at) a small payload.
struct Header {
    std::uint64_t seq;
    std::uint8_t kind;  // HeaderKind
    std::uint8_t collective;
    std::uint8_t op;
    std::uint8_t dtype;
    std::int8_t axis;
    std::uint8_t ndim;
    std::uint16_t flags;
    std::int32_t root;
    std::uint32_t site;
    std::uint64_t nbytes;
    std::uint32_t itemsize;
    std::uint16_t table_nbytes;
    std::uint16_t text_nbytes;
    std::uint64_t input_offset;    // in the writer's arena, or kNoOffset
    std::uint64_t output_offset;   // likewise
    std::uint64_t staging_offset;  // likewise
};
static_assert(sizeof(Header) == 64);

enum class HeaderKind : std::uint8_t { call = 1, refused = 2 };
// Flags of a header.
/// The shape, dtype and nbytes say nothing: a receiver that takes what comes.
inline constexpr std::uint16_t kWildcard = 1;
/// Extents along the axis may differ between the members of an all_gather or gather; the table holds 1 + the extent of
/// the member's output where it gave one.
inline constexpr std::uint16_t kUneven = 2;
/// An array for each reader, of any shapes: the table holds ndim and extents of each, then the same of the outputs
/// where they are given. The header's own shape says nothing.
inline constexpr std::uint16_t kList = 4;
/// The shape is that of the member's own share of what the root scatters.
inline constexpr std::uint16_t kShare = 8;
/// The axis of such a member where the root is to have a list.
inline constexpr std::int8_t kNoAxis = -128;
/// Many arrays as one vector; the table tells lists apart.
inline constexpr std::uint16_t kMany = 16;
/// The bytes express an object of Python's; kPickled: by pickle.
inline constexpr std::uint16_t kObject = 32;
inline constexpr std::uint16_t kPickled = 64;
/// The payload does not fit the slot, but is short: it was copied when the call was posted, to where `input_offset`
/// says, and stays there until all members have consumed the call.
inline constexpr std::uint16_t kCopied = 128;

/// How a group's rings and stages are cut: resolved by its lowest rank and handed to all with the group's creation,
/// since the protocol may depend on nothing that ranks could see differently.
struct Tuning {
    std::uint32_t slots;           // header slots a member and channel
    std::uint32_t slot_nbytes;     // payload of a slot: the largest small call
    std::uint32_t segment_nbytes;  // a piece in flight
    std::uint32_t depth;           // segments of a chunk staged at once
};

/// Where a small payload lies in its slot, after `meta_nbytes` of header, shape and text: close by if it is tiny, so
/// that one fetch brings both; else at a cache line, for the copy.
constexpr std::size_t payload_at(std::size_t meta_nbytes, std::uint64_t payload_nbytes) {
    return round_up(meta_nbytes, payload_nbytes <= 64 ? 16 : 64);
}

/// The longest payload that is copied at once (see kCopied). Its members each read all of it, where in segments each
/// would fold a share: so that fewer bytes may come from each of more members. Up to here that is cheaper than the
/// flags of a call in segments: with two members there are no more bytes to read this way, and with eight twice as
/// many.
constexpr std::size_t copied_nbytes(const Tuning& tuning, int size) {
    constexpr std::size_t kReadByEach = 256 * 1024;
    constexpr std::size_t kReadByFew = 2 * 1024 * 1024;
    const auto members = static_cast<std::size_t>(size);
    const std::size_t most = std::max(kReadByEach / members, kReadByFew / members / members) / kLine * kLine;
    return std::max<std::size_t>(tuning.slot_nbytes,
                                 std::min<std::size_t>(std::size_t{8} * tuning.segment_nbytes, most));
}

/// Where they are copied to. More than all that may be under way as a rule, so that lines have left the readers' caches
/// when they are written again (see Communicator::take_slots); long ones may have to wait for others to be read.
constexpr std::size_t copies_nbytes(const Tuning& tuning, int size) {
    constexpr std::size_t kEnough = 2 * 1024 * 1024;
    return std::min(std::size_t{2} * tuning.slots * copied_nbytes(tuning, size),
                    std::max(kEnough, copied_nbytes(tuning, size)));
}

constexpr std::size_t slot_stride(const Tuning& tuning) { return round_up(kMetaNbytes + tuning.slot_nbytes, kLine); }

constexpr std::size_t slots_offset(int size) {
    return round_up(sizeof(ChannelBlock), kLine) + round_up(static_cast<std::size_t>(size) * sizeof(Lane), kLine);
}

constexpr std::size_t channel_nbytes(const Tuning& tuning, int size) {
    return slots_offset(size) + tuning.slots * slot_stride(tuning);
}

}  // namespace aiodist
