#include <xmmintrin.h>

#include "float_environment.hpp"

namespace aiodist {
namespace {

constexpr std::uint32_t kStatusFlags = 0x3f;  // what earlier arithmetic raised; no setting
constexpr std::uint32_t kDefault = 0x1f80;    // all traps masked, to nearest, no FTZ (bit 15), no DAZ (bit 6)

}  // namespace

FloatEnvironment::FloatEnvironment() noexcept : saved_(_mm_getcsr()), changed_((saved_ & ~kStatusFlags) != kDefault) {
    if (changed_) {
        _mm_setcsr(kDefault);
    }
}

FloatEnvironment::~FloatEnvironment() {
    if (changed_) {
        _mm_setcsr(static_cast<std::uint32_t>(saved_));
    }
}

}  // namespace aiodist
