#pragma once

// How single elements are loaded, combined and stored: one rule a (dtype, op).
//
// A rule has the types Accumulator and Divisor, kSourceBytes and kResultBytes (of one element), and load, combine,
// store. Only this file decides bits; loops.hpp decides speed.
//
// Like loops.hpp and table.hpp it is compiled once per instruction set into a namespace of its own and calls no inline
// function from outside it, the standard library's included: the linker keeps one copy of such a function, possibly
// the one with instructions that this machine lacks. Hence the __builtin_ functions.

#include <cstddef>
#include <cstdint>

namespace aiodist::AIODIST_KERNEL_NAMESPACE {

using Byte = unsigned char;

// Through memcpy: arrays may be misaligned, and their static types are unknown here.
template <class Value>
inline Value load(const Byte* array, std::size_t index) {
    Value value;
    __builtin_memcpy(&value, array + index * sizeof(Value), sizeof(Value));
    return value;
}

template <class Value>
inline void store(Byte* array, std::size_t index, Value value) {
    __builtin_memcpy(array + index * sizeof(Value), &value, sizeof(Value));
}

// A rule whose elements lie in memory as they are computed with.
template <class Value>
struct PlainRule {
    using Accumulator = Value;
    using Divisor = Value;
    static constexpr std::size_t kSourceBytes = sizeof(Value);
    static constexpr std::size_t kResultBytes = sizeof(Value);
    static Value load(const Byte* array, std::size_t index) {
        return AIODIST_KERNEL_NAMESPACE::load<Value>(array, index);
    }
    static void store(Byte* array, std::size_t index, Value value, Divisor) {
        AIODIST_KERNEL_NAMESPACE::store(array, index, value);
    }
};

// ---- integers and bool ----

// Sum, product and bit operations have the same bits for both signs, so they exist for the unsigned types alone. The
// arithmetic is done in at least `unsigned`: uint16 would be promoted to int, whose overflow is undefined.
template <class Unsigned>
struct IntegerSum : PlainRule<Unsigned> {
    static Unsigned combine(Unsigned a, Unsigned b) { return static_cast<Unsigned>(a + 0U + b); }
};

template <class Unsigned>
struct IntegerProd : PlainRule<Unsigned> {
    static Unsigned combine(Unsigned a, Unsigned b) { return static_cast<Unsigned>((a + 0U) * b); }
};

template <class Unsigned>
struct IntegerBand : PlainRule<Unsigned> {
    static Unsigned combine(Unsigned a, Unsigned b) { return static_cast<Unsigned>(a & b); }
};

template <class Unsigned>
struct IntegerBor : PlainRule<Unsigned> {
    static Unsigned combine(Unsigned a, Unsigned b) { return static_cast<Unsigned>(a | b); }
};

template <class Unsigned>
struct IntegerBxor : PlainRule<Unsigned> {
    static Unsigned combine(Unsigned a, Unsigned b) { return static_cast<Unsigned>(a ^ b); }
};

template <class Integer>
struct IntegerMin : PlainRule<Integer> {
    static Integer combine(Integer a, Integer b) { return a < b ? a : b; }
};

template <class Integer>
struct IntegerMax : PlainRule<Integer> {
    static Integer combine(Integer a, Integer b) { return a > b ? a : b; }
};

// Each element becomes a double first, so that the sum does not wrap.
template <class Integer>
struct IntegerMean {
    using Accumulator = double;
    using Divisor = double;
    static constexpr std::size_t kSourceBytes = sizeof(Integer);
    static constexpr std::size_t kResultBytes = sizeof(double);
    static double load(const Byte* array, std::size_t index) {
        return static_cast<double>(AIODIST_KERNEL_NAMESPACE::load<Integer>(array, index));
    }
    static double combine(double a, double b) { return a + b; }
    static void store(Byte* array, std::size_t index, double value, double divisor) {
        AIODIST_KERNEL_NAMESPACE::store(array, index, value / divisor);
    }
};

// Foreign memory may hold any byte for true; results are 0 and 1 only.
template <template <class> class BitRule>
struct BoolRule : BitRule<std::uint8_t> {
    static std::uint8_t load(const Byte* array, std::size_t index) { return array[index] != 0; }
};

// ---- floats ----

// Which NaN an operation gives depends on the order of its operands, which the compiler chooses per loop and per tail.
// One NaN for all results makes the bits independent of that. Intermediate values need no care: NaN stays NaN.
template <class Value>
inline Value canonical(Value value) {
    return value == value ? value : static_cast<Value>(__builtin_nan(""));
}

// The arithmetic of sum, prod and mean, for scalars and for vectors of float.
struct Sum {
    template <class Value>
    static Value combine(Value a, Value b) {
        return a + b;
    }
    template <class Value, class Divisor>
    static Value finish(Value value, Divisor) {
        return value;
    }
};

struct Prod : Sum {
    template <class Value>
    static Value combine(Value a, Value b) {
        return a * b;
    }
};

struct Mean : Sum {
    template <class Value, class Divisor>
    static Value finish(Value value, Divisor divisor) {
        return value / divisor;
    }
};

template <class Float, class Operator>
struct FloatRule : PlainRule<Float> {
    static Float combine(Float a, Float b) { return Operator::combine(a, b); }
    static void store(Byte* array, std::size_t index, Float value, Float divisor) {
        AIODIST_KERNEL_NAMESPACE::store(array, index, canonical(Operator::finish(value, divisor)));
    }
};

template <class Float>
struct BitsOf;
template <>
struct BitsOf<float> {
    using Type = std::uint32_t;
};
template <>
struct BitsOf<double> {
    using Type = std::uint64_t;
};

// Each half is one SSE minimum, which gives its second operand when the two are equal or unordered. So both halves
// agree where a and b differ as numbers; equal operands differ at most in the sign of zero, and the or of -0 and +0 is
// -0; and the or of a NaN with anything is a NaN.
template <class Float>
struct FloatMin : FloatRule<Float, Sum> {
    static Float combine(Float a, Float b) {
        using Bits = typename BitsOf<Float>::Type;
        const Float first = a < b ? a : b;
        const Float second = b < a ? b : a;
        return __builtin_bit_cast(Float, __builtin_bit_cast(Bits, first) | __builtin_bit_cast(Bits, second));
    }
};

// The negated minimum of the negated elements: with `and` in FloatMin's place a NaN could get lost.
template <class Float>
struct FloatMax : FloatMin<Float> {
    static Float load(const Byte* array, std::size_t index) { return -PlainRule<Float>::load(array, index); }
    static void store(Byte* array, std::size_t index, Float value, Float divisor) {
        FloatRule<Float, Sum>::store(array, index, -value, divisor);
    }
};

// Negation on the bits, which compilers do not fold into a following addition.
template <class Float>
inline Float negated(Float value) {
    using Bits = typename BitsOf<Float>::Type;
    constexpr Bits kSign = Bits{1} << (8 * sizeof(Float) - 1);
    return __builtin_bit_cast(Float, __builtin_bit_cast(Bits, value) ^ kSign);
}

// The textbook formula, each operation rounded, no rescue of infinities. The other operators work on the parts and are
// float rules over twice the count. Written with a minus, GCC 12 finds its pattern of alternating subtraction and
// addition and fuses it with the products (vfmaddsub), whatever -ffp-contract says.
template <class Float>
struct ComplexProd {
    struct Accumulator {
        Float real;
        Float imaginary;
    };
    using Divisor = Float;
    static constexpr std::size_t kSourceBytes = 2 * sizeof(Float);
    static constexpr std::size_t kResultBytes = 2 * sizeof(Float);
    static Accumulator load(const Byte* array, std::size_t index) {
        return {AIODIST_KERNEL_NAMESPACE::load<Float>(array, 2 * index),
                AIODIST_KERNEL_NAMESPACE::load<Float>(array, 2 * index + 1)};
    }
    static Accumulator combine(Accumulator a, Accumulator b) {
        return {a.real * b.real + negated(a.imaginary * b.imaginary), a.real * b.imaginary + a.imaginary * b.real};
    }
    static void store(Byte* array, std::size_t index, Accumulator value, Divisor) {
        AIODIST_KERNEL_NAMESPACE::store(array, 2 * index, canonical(value.real));
        AIODIST_KERNEL_NAMESPACE::store(array, 2 * index + 1, canonical(value.imaginary));
    }
};

}  // namespace aiodist::AIODIST_KERNEL_NAMESPACE
