#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "communicator.hpp"

namespace aiodist {

/// A large call whose headers agree: data moves in segments, a bounded piece a step.
class Operation {
 public:
    virtual ~Operation() = default;
    /// Does at most one piece of work; false if nothing could be done.
    virtual bool step() = 0;
    /// True once the result is whole and no peer reads this rank's memory any more.
    virtual bool finished() = 0;
    /// The ranks that this one waits for, by their flags as they are now.
    virtual std::vector<int> waits_for() = 0;
    /// False where a member's header pointed outside its memory.
    bool sound() const noexcept { return sound_; }

 protected:
    /// What a member brings, out of its header. Null pointers: nothing there to read directly.
    struct Party {
        std::uint64_t nbytes = 0;
        const std::byte* input = nullptr;    // its whole input, readable from the start
        const std::byte* output = nullptr;   // its whole output
        const std::byte* staging = nullptr;  // its rings
        std::uint64_t staged = 0;            // rounds, last seen
        std::uint64_t reduced = 0;
        std::uint64_t copied = 0;
    };

    Operation(Communicator& communicator, Request& request);
    Party& party(int q) noexcept { return parties_[static_cast<std::size_t>(q)]; }
    const Party& party(int q) const noexcept { return parties_[static_cast<std::size_t>(q)]; }

    // Each loads the member's flag only while the value last seen does not suffice.
    bool staged(int q, std::uint64_t rounds) noexcept;
    bool reduced(int q, std::uint64_t rounds) noexcept;
    bool copied(int q, std::uint64_t rounds) noexcept;
    void publish(Word& word, std::uint64_t rounds) noexcept;
    /// Notes that the members' headers can not be meant like this.
    void require(bool condition) noexcept { sound_ = sound_ && condition; }

    Communicator& communicator_;
    Request& request_;
    const std::uint64_t number_;  // among the large calls of the channel
    const int rank_;
    const int size_;
    const std::size_t segment_;

 private:
    std::uint64_t rounds_in(const Word& word) const noexcept;

    std::vector<Party> parties_;
    bool sound_ = true;
};

/// The large form of the request's collective.
std::unique_ptr<Operation> make_operation(Communicator& communicator, Request& request);
/// `call` is the request's, or a section of it.
std::unique_ptr<Operation> make_fold(Communicator& communicator, Request& request, const Call& call);
std::unique_ptr<Operation> make_pull(Communicator& communicator, Request& request);

/// The small form, whole: every payload lies in its member's header slot.
void complete_small(Communicator& communicator, Request& request);

}  // namespace aiodist
