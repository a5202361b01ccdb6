#include <cfenv>

#include "float_environment.hpp"

namespace aiodist {

// The standard knows of rounding only.
FloatEnvironment::FloatEnvironment() noexcept
    : saved_(static_cast<std::uint64_t>(std::fegetround())), changed_(saved_ != FE_TONEAREST) {
    if (changed_) {
        std::fesetround(FE_TONEAREST);
    }
}

FloatEnvironment::~FloatEnvironment() {
    if (changed_) {
        std::fesetround(static_cast<int>(saved_));
    }
}

}  // namespace aiodist
