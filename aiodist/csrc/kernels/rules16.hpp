#pragma once

// The rules of the 16-bit floats; see rules.hpp. All branch-free integer code, so that every instruction set vectorises
// it, and independent of the processor's treatment of denormals up to the float32 arithmetic itself.

#include "rules.hpp"

namespace aiodist::AIODIST_KERNEL_NAMESPACE {

struct BFloat16 {
    static constexpr std::uint16_t kInfinity = 0x7f80;
    static constexpr std::uint16_t kNan = 0x7fc0;

    static float widen(std::uint16_t half) {
        return __builtin_bit_cast(float, static_cast<std::uint32_t>(half) << 16U);
    }

    // The result in the upper half of a word, arbitrary bits below. Adding just under half of the last kept place, and
    // one more if that place is odd, rounds to nearest even; a carry out of the mantissa lands in the exponent, up to
    // infinity, as it should; it does not reach the upper half of the canonical NaN, which has the right bits already.
    static std::uint32_t round(float value) {
        const auto bits = __builtin_bit_cast(std::uint32_t, canonical(value));
        return bits + 0x7fffU + ((bits >> 16U) & 1U);
    }

    static std::uint16_t narrow(float value) { return static_cast<std::uint16_t>(round(value) >> 16U); }
};

struct Float16 {
    static constexpr std::uint16_t kInfinity = 0x7c00;
    static constexpr std::uint16_t kNan = 0x7e00;

    // The biases of the two exponents differ by 127 - 15 = 112; infinity and NaN need the difference twice, to get from
    // 31 to 255. A denormal is an integer multiple of 2^-24; converting that integer avoids denormal float32 operands,
    // which are slow on some processors.
    static float widen(std::uint16_t half) {
        constexpr std::int32_t kRebias = 112 << 23;
        const std::int32_t magnitude = half & 0x7fff;
        const std::uint32_t sign = (half & 0x8000U) << 16U;
        const std::int32_t normal = (magnitude << 13) + kRebias + (magnitude >= kInfinity ? kRebias : 0);
        const float tiny = static_cast<float>(magnitude) * 0x1p-24F;
        const std::int32_t bits = magnitude < 0x400 ? __builtin_bit_cast(std::int32_t, tiny) : normal;
        return __builtin_bit_cast(float, static_cast<std::uint32_t>(bits) | sign);
    }

    // Normal results round as in BFloat16::narrow. For denormal ones, 0.5F + x has its last place at 2^-24, just where
    // float16 denormals have theirs, so the addition itself rounds.
    static std::uint16_t narrow(float value) {
        constexpr std::int32_t kRebias = 112 << 23;
        constexpr std::int32_t kSmallestNormal = 0x38800000;  // 2^-14
        const auto bits = __builtin_bit_cast(std::int32_t, value);
        const std::int32_t magnitude = bits & 0x7fffffff;
        const std::int32_t sign = (bits >> 16) & 0x8000;
        const std::int32_t rounded = (magnitude - kRebias + 0xfff + ((magnitude >> 13) & 1)) >> 13;
        const std::int32_t normal = rounded < kInfinity ? rounded : kInfinity;
        const float shifted = __builtin_bit_cast(float, magnitude) + 0.5F;
        const std::int32_t tiny = __builtin_bit_cast(std::int32_t, shifted) - 0x3f000000;
        const std::int32_t finite = (magnitude < kSmallestNormal ? tiny : normal) | sign;
        return static_cast<std::uint16_t>(value == value ? finite : kNan);
    }
};

template <class Format, class Operator>
struct HalfRule {
    using Accumulator = float;
    using Divisor = float;
    static constexpr std::size_t kSourceBytes = 2;
    static constexpr std::size_t kResultBytes = 2;
    static float load(const Byte* array, std::size_t index) {
        return Format::widen(AIODIST_KERNEL_NAMESPACE::load<std::uint16_t>(array, index));
    }
    static float combine(float a, float b) { return Operator::combine(a, b); }
    static void store(Byte* array, std::size_t index, float value, float divisor) {
        AIODIST_KERNEL_NAMESPACE::store(array, index, Format::narrow(Operator::finish(value, divisor)));
    }
};

// Two neighbours in one 32-bit word, each masked or shifted in place: vectors of halves never get unpacked and packed,
// which costs more than the arithmetic.
template <class Operator>
struct BFloat16Pair {
    struct Accumulator {
        float low;
        float high;
    };
    using Divisor = float;
    static constexpr std::size_t kElements = 2;
    static constexpr std::size_t kSourceBytes = 4;
    static constexpr std::size_t kResultBytes = 4;
    static Accumulator load(const Byte* array, std::size_t index) {
        const auto word = AIODIST_KERNEL_NAMESPACE::load<std::uint32_t>(array, index);
        return {__builtin_bit_cast(float, word << 16U), __builtin_bit_cast(float, word & 0xffff0000U)};
    }
    static Accumulator combine(Accumulator a, Accumulator b) {
        return {Operator::combine(a.low, b.low), Operator::combine(a.high, b.high)};
    }
    static void store(Byte* array, std::size_t index, Accumulator value, float divisor) {
        const std::uint32_t low = BFloat16::round(Operator::finish(value.low, divisor)) >> 16U;
        const std::uint32_t high = BFloat16::round(Operator::finish(value.high, divisor)) & 0xffff0000U;
        AIODIST_KERNEL_NAMESPACE::store(array, index, low | high);
    }
};

// Minimum and maximum need no float32. Flipping the magnitude bits of negative numbers gives 16-bit integers in the
// order of the numbers, -0 below +0; every NaN is moved to the end that wins.
template <class Format, std::int16_t kNanKey>
struct HalfOrder {
    using Accumulator = std::int16_t;
    using Divisor = std::int16_t;
    static constexpr std::size_t kSourceBytes = 2;
    static constexpr std::size_t kResultBytes = 2;

    static std::int16_t flip(std::int16_t value) {
        const auto sign = static_cast<std::uint16_t>(value >> 15);
        return static_cast<std::int16_t>(static_cast<std::uint16_t>(value) ^ static_cast<std::uint16_t>(sign >> 1U));
    }
    static std::int16_t load(const Byte* array, std::size_t index) {
        const auto value = AIODIST_KERNEL_NAMESPACE::load<std::int16_t>(array, index);
        const auto magnitude = static_cast<std::int16_t>(value & 0x7fff);
        return magnitude > static_cast<std::int16_t>(Format::kInfinity) ? kNanKey : flip(value);
    }
    static void store(Byte* array, std::size_t index, std::int16_t key, Divisor) {
        const auto nan = static_cast<std::int16_t>(Format::kNan);
        AIODIST_KERNEL_NAMESPACE::store(array, index, key == kNanKey ? nan : flip(key));
    }
};

template <class Format>
struct HalfMin : HalfOrder<Format, INT16_MIN> {
    static std::int16_t combine(std::int16_t a, std::int16_t b) { return a < b ? a : b; }
};

template <class Format>
struct HalfMax : HalfOrder<Format, INT16_MAX> {
    static std::int16_t combine(std::int16_t a, std::int16_t b) { return a > b ? a : b; }
};

}  // namespace aiodist::AIODIST_KERNEL_NAMESPACE
