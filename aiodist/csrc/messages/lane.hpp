#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>

#include "communicator.hpp"

namespace aiodist {

/// Messages up to this many bytes travel inside their record.
inline constexpr std::size_t kInlineMessage = 8192;
inline constexpr std::size_t kSheetNbytes = 64 * 1024;

/// Why a lane can not be used any more: what the peer wrote can not be meant.
[[noreturn]] void damaged_lane(int peer);

/// The records that this member writes for one peer: a chain of sheets. A sheet that the peer has read is used again;
/// more of them than two count in the process's send buffer.
class LaneWriter {
 public:
    LaneWriter(Communicator& communicator, int peer) : communicator_(communicator), peer_(peer) {}

    /// Writes a record if there is room for it. `record` needs neither its `nbytes` nor what tells the lengths that
    /// follow from the other arguments.
    bool write(Record record, const Call& call, std::size_t payload_nbytes);
    /// Gives the sheets back; the peer must not read it any more.
    void release();

 private:
    std::byte* room(std::size_t nbytes);
    bool add_sheet();
    Lane& lane() const noexcept;

    Communicator& communicator_;
    int peer_;
    std::deque<std::uint64_t> sheets_;  // offsets; the last one is written to
    std::uint64_t written_ = 0;         // sheets before the last one
    std::uint64_t sent_ = 0;
};

/// A record as it was copied out of a lane, checked as far as one can be alone.
struct RecordCopy {
    Record head;
    Shape shape;
    std::string text;
    const std::byte* payload = nullptr;  // in the sheet: valid until take()
};

/// The records that one peer writes for this member.
class LaneReader {
 public:
    LaneReader(Communicator& communicator, int peer) : communicator_(communicator), peer_(peer) {}

    /// Looks for the next record; it stays in the sheet until take().
    bool peek(RecordCopy& copy);
    void take(const RecordCopy& copy);

 private:
    void check(const std::byte* at, std::size_t left, RecordCopy& copy) const;

    Communicator& communicator_;
    int peer_;
    std::uint64_t sheet_ = kNoOffset;
    std::uint64_t sent_ = 0;
    std::uint64_t seen_ = 0;
};

}  // namespace aiodist
