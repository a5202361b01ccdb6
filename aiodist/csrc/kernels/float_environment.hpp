#pragma once

// The floating-point control word of a polling thread belongs to its user.

#include <cstdint>

namespace aiodist {

// While one lives, this thread rounds to nearest, keeps denormals and does not trap, whatever its user has chosen
// (torch.set_flush_denormal, fesetround, feenableexcept); the destructor gives the user's choice back. Not writing
// the register where nothing differs keeps it cheap enough for every call. Stays on the thread that made it.
class FloatEnvironment {
 public:
    FloatEnvironment() noexcept;
    ~FloatEnvironment();
    FloatEnvironment(const FloatEnvironment&) = delete;
    FloatEnvironment& operator=(const FloatEnvironment&) = delete;

 private:
    std::uint64_t saved_;
    bool changed_;
};

}  // namespace aiodist
