#include "float_environment.hpp"

namespace aiodist {
namespace {

std::uint64_t read_control() noexcept {
    std::uint64_t value;
    asm volatile("mrs %0, fpcr" : "=r"(value));
    return value;
}

void write_control(std::uint64_t value) noexcept { asm volatile("msr fpcr, %0" : : "r"(value) : "memory"); }

}  // namespace

// The default of every field of FPCR is zero; status flags live in another register.
FloatEnvironment::FloatEnvironment() noexcept : saved_(read_control()), changed_(saved_ != 0) {
    if (changed_) {
        write_control(0);
    }
}

FloatEnvironment::~FloatEnvironment() {
    if (changed_) {
        write_control(saved_);
    }
}

}  // namespace aiodist
