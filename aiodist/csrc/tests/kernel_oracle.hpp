#pragma once

// The scalar oracle of test_kernels.cpp, and the data to try it on.
//
// It shares no arithmetic with the kernels: one element at a time, conversions of 16-bit floats by scaling in double,
// results kept apart through volatile so that no compiler fuses them.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#include "../types.hpp"

namespace aiodist::oracle {

using Bytes = std::vector<std::uint8_t>;
using Arrays = std::vector<Bytes>;

struct Random {  // xorshift: the same numbers on every run and machine
    std::uint64_t state = 0x9e3779b97f4a7c15U;
    std::uint64_t operator()() {
        state ^= state << 13U;
        state ^= state >> 7U;
        state ^= state << 17U;
        return state;
    }
};

template <class To, class From>
To bits(From value) {
    static_assert(sizeof(To) == sizeof(From));
    To result;
    std::memcpy(&result, &value, sizeof(To));
    return result;
}

struct Format {  // of a 16-bit float
    int mantissa_bits;
    int max_exponent;
    std::uint16_t nan;
};
inline constexpr Format kFloat16 = {10, 15, 0x7e00};
inline constexpr Format kBFloat16 = {7, 127, 0x7fc0};

inline double decode(Format format, std::uint16_t half) {
    const int exponent = (half & 0x7fff) >> format.mantissa_bits;
    const int mantissa = half & ((1 << format.mantissa_bits) - 1);
    const double sign = (half & 0x8000) != 0 ? -1.0 : 1.0;
    const int bias = format.max_exponent;
    if (exponent == 2 * bias + 1) {
        return mantissa != 0 ? std::numeric_limits<double>::quiet_NaN()
                             : std::copysign(std::numeric_limits<double>::infinity(), sign);
    }
    const int whole = exponent == 0 ? mantissa : mantissa + (1 << format.mantissa_bits);
    return std::copysign(std::ldexp(whole, std::max(exponent, 1) - bias - format.mantissa_bits), sign);
}

// nearbyint in the default environment rounds to nearest even. A mantissa that is rounded up to 2^(bits+1) carries into
// the exponent by plain addition, up to infinity.
inline std::uint16_t encode(Format format, double value) {
    if (std::isnan(value)) {
        return format.nan;
    }
    const int sign = std::signbit(value) ? 0x8000 : 0;
    const int infinity = (2 * format.max_exponent + 1) << format.mantissa_bits;
    if (std::fabs(value) >= std::ldexp(1.0, format.max_exponent + 1)) {
        return static_cast<std::uint16_t>(sign | infinity);
    }
    const int smallest = 1 - format.max_exponent;
    const int exponent = std::fabs(value) == 0 ? smallest : std::max(std::ilogb(value), smallest);
    const double scaled = std::ldexp(std::fabs(value), format.mantissa_bits - exponent);
    const int magnitude = static_cast<int>(std::nearbyint(scaled)) + ((exponent - smallest) << format.mantissa_bits);
    return static_cast<std::uint16_t>(sign | magnitude);
}

template <class Float>
Float lesser(Float a, Float b) {
    if (std::isnan(a) || std::isnan(b)) {
        return std::numeric_limits<Float>::quiet_NaN();
    }
    if (a == b) {
        return std::signbit(a) ? a : b;
    }
    return a < b ? a : b;
}

template <class Float>
Float combine(Op op, Float a, Float b) {
    volatile Float result = 0;
    switch (op) {
        case Op::prod:
            result = a * b;
            break;
        case Op::min:
            result = lesser(a, b);
            break;
        case Op::max:
            result = -lesser(-a, -b);
            break;
        default:
            result = a + b;
    }
    return result;
}

template <class Integer>
Integer combine_integers(Op op, Integer a, Integer b) {
    const auto x = static_cast<std::uint64_t>(a);
    const auto y = static_cast<std::uint64_t>(b);
    switch (op) {
        case Op::sum:
            return static_cast<Integer>(x + y);
        case Op::prod:
            return static_cast<Integer>(x * y);
        case Op::min:
            return std::min(a, b);
        case Op::max:
            return std::max(a, b);
        case Op::band:
            return static_cast<Integer>(x & y);
        case Op::bor:
            return static_cast<Integer>(x | y);
        default:
            return static_cast<Integer>(x ^ y);
    }
}

template <class Value>
Value element(const Bytes& source, std::size_t index) {
    Value value;
    std::memcpy(&value, source.data() + index * sizeof(Value), sizeof(Value));
    return value;
}

template <class Value>
void put(Bytes& out, std::size_t index, Value value) {
    if constexpr (std::is_floating_point_v<Value>) {
        if (std::isnan(value)) {
            value = bits<Value>(static_cast<std::conditional_t<sizeof(Value) == 4, std::uint32_t, std::uint64_t>>(
                sizeof(Value) == 4 ? 0x7fc00000U : 0x7ff8000000000000U));
        }
    }
    std::memcpy(out.data() + index * sizeof(Value), &value, sizeof(Value));
}

template <class Float>
Float fold_floats(Op op, const Arrays& sources, std::size_t index, Float (*get)(const Bytes&, std::size_t)) {
    Float result = get(sources[0], index);
    for (std::size_t s = 1; s < sources.size(); ++s) {
        result = combine(op, result, get(sources[s], index));
    }
    return op == Op::mean ? result / static_cast<Float>(sources.size()) : result;
}

template <class Float>
void float_oracle(Op op, const Arrays& sources, std::size_t count, Bytes& out) {
    for (std::size_t i = 0; i < count; ++i) {
        put(out, i, fold_floats<Float>(op, sources, i, element<Float>));
    }
}

template <const Format& kFormat>
void half_oracle(Op op, const Arrays& sources, std::size_t count, Bytes& out) {
    const auto get = [](const Bytes& source, std::size_t index) {
        return static_cast<float>(decode(kFormat, element<std::uint16_t>(source, index)));
    };
    for (std::size_t i = 0; i < count; ++i) {
        put(out, i, encode(kFormat, static_cast<double>(fold_floats<float>(op, sources, i, get))));
    }
}

template <class Float>
void complex_oracle(Op op, const Arrays& sources, std::size_t count, Bytes& out) {
    if (op != Op::prod) {
        return float_oracle<Float>(op, sources, 2 * count, out);
    }
    for (std::size_t i = 0; i < count; ++i) {
        volatile Float real = element<Float>(sources[0], 2 * i);
        volatile Float imaginary = element<Float>(sources[0], 2 * i + 1);
        for (std::size_t s = 1; s < sources.size(); ++s) {
            const Float c = element<Float>(sources[s], 2 * i);
            const Float d = element<Float>(sources[s], 2 * i + 1);
            volatile Float ac = real * c;
            volatile Float bd = imaginary * d;
            volatile Float ad = real * d;
            volatile Float bc = imaginary * c;
            real = ac - bd;
            imaginary = ad + bc;
        }
        put<Float>(out, 2 * i, real);
        put<Float>(out, 2 * i + 1, imaginary);
    }
}

template <class Integer>
void integer_oracle(Op op, const Arrays& sources, std::size_t count, Bytes& out) {
    const auto get = [](const Bytes& source, std::size_t index) {
        return static_cast<double>(element<Integer>(source, index));
    };
    for (std::size_t i = 0; i < count; ++i) {
        if (op == Op::mean) {
            put(out, i, fold_floats<double>(op, sources, i, get));
            continue;
        }
        auto result = element<Integer>(sources[0], i);
        for (std::size_t s = 1; s < sources.size(); ++s) {
            result = combine_integers(op, result, element<Integer>(sources[s], i));
        }
        put(out, i, result);
    }
}

inline void bool_oracle(Op op, const Arrays& sources, std::size_t count, Bytes& out) {
    for (std::size_t i = 0; i < count; ++i) {
        std::size_t set = 0;
        for (const Bytes& source : sources) {
            set += source[i] != 0 ? 1 : 0;
        }
        const bool all = op == Op::prod || op == Op::min || op == Op::band;
        const bool result = op == Op::bxor ? set % 2 == 1 : all ? set == sources.size() : set > 0;
        put<std::uint8_t>(out, i, result ? 1 : 0);
    }
}

using Oracle = void (*)(Op, const Arrays&, std::size_t, Bytes&);
inline constexpr Oracle kOracles[kDTypeCount] = {
    nullptr,
    bool_oracle,
    integer_oracle<std::int8_t>,
    integer_oracle<std::int16_t>,
    integer_oracle<std::int32_t>,
    integer_oracle<std::int64_t>,
    integer_oracle<std::uint8_t>,
    integer_oracle<std::uint16_t>,
    integer_oracle<std::uint32_t>,
    integer_oracle<std::uint64_t>,
    half_oracle<kFloat16>,
    half_oracle<kBFloat16>,
    float_oracle<float>,
    float_oracle<double>,
    complex_oracle<float>,
    complex_oracle<double>,
};

inline bool is_float(DType dtype) { return dtype >= DType::float16 && dtype <= DType::float64; }
inline bool is_complex(DType dtype) { return dtype == DType::complex64 || dtype == DType::complex128; }

inline bool defined(DType dtype, Op op) {
    if (dtype == DType::raw || op == Op::none) {
        return false;
    }
    const bool bitwise = op == Op::band || op == Op::bor || op == Op::bxor;
    const bool order = op == Op::min || op == Op::max;
    return !(bitwise && (is_float(dtype) || is_complex(dtype))) && !(order && is_complex(dtype)) &&
           !(op == Op::mean && dtype == DType::bool_);
}

// ---- data ----

// The bit patterns of one lane of `width` bytes that kernels get wrong: zeros, ones, infinities, NaNs with payloads of
// both signs and both kinds, denormals, the largest finite numbers, ties of rounding, and the integers' ends.
inline std::uint64_t special(DType dtype, std::uint64_t choice) {
    static constexpr std::uint64_t kHalf[] = {0x0000, 0x8000, 0x3c00, 0xbc00, 0x7c00, 0xfc00, 0x7c01, 0xfe5a,
                                              0x7fff, 0xffff, 0x0001, 0x83ff, 0x0400, 0x7bff, 0xfbff, 0x3c01};
    static constexpr std::uint64_t kBrain[] = {0x0000, 0x8000, 0x3f80, 0xbf80, 0x7f80, 0xff80, 0x7f81, 0xffda,
                                               0x7fff, 0xffff, 0x0001, 0x807f, 0x0080, 0x7f7f, 0xff7f, 0x3f81};
    static constexpr std::uint64_t kSingle[] = {0x00000000, 0x80000000, 0x3f800000, 0xbf800000, 0x7f800000, 0xff800000,
                                                0x7f800001, 0xffc12345, 0x7fffffff, 0xffffffff, 0x00000001, 0x807fffff,
                                                0x00800000, 0x7f7fffff, 0xff7fffff, 0x3f800001};
    static constexpr std::uint64_t kDouble[] = {
        0x0000000000000000, 0x8000000000000000, 0x3ff0000000000000, 0xbff0000000000000,
        0x7ff0000000000000, 0xfff0000000000000, 0x7ff0000000000001, 0xfff8123456789abc,
        0x7fffffffffffffff, 0xffffffffffffffff, 0x0000000000000001, 0x800fffffffffffff,
        0x0010000000000000, 0x7fefffffffffffff, 0xffefffffffffffff, 0x3ff0000000000001};
    const std::size_t index = choice % 16;
    switch (dtype) {
        case DType::float16:
            return kHalf[index];
        case DType::bfloat16:
            return kBrain[index];
        case DType::float32:
        case DType::complex64:
            return kSingle[index];
        default:
            return kDouble[index];
    }
}

// A third each: special values, any bits, and numbers near 1, whose sums round but stay finite.
inline Bytes make_source(DType dtype, std::size_t count, Random& random) {
    const std::size_t lane = is_complex(dtype) ? itemsize(dtype) / 2 : itemsize(dtype);
    Bytes source(count * itemsize(dtype));
    for (std::size_t at = 0; at < source.size(); at += lane) {
        const std::uint64_t kind = random() % 3;
        std::uint64_t pattern = kind == 0 ? special(dtype, random() >> 8U) : random();
        if (kind == 2 && (is_float(dtype) || is_complex(dtype))) {
            const std::uint64_t one = special(dtype, 2);
            const std::uint64_t spread = (one & (~one + 1)) * 2 - 1;  // below the exponent's lowest set bit, and it
            pattern = (one & ~spread) | (pattern & spread) | (random() % 2 << (8 * lane - 1));
        }
        std::memcpy(source.data() + at, &pattern, lane);
    }
    return source;
}

inline Arrays make_sources(DType dtype, std::size_t source_count, std::size_t count, Random& random) {
    Arrays sources;
    for (std::size_t s = 0; s < source_count; ++s) {
        sources.push_back(make_source(dtype, count, random));
    }
    return sources;
}

}  // namespace aiodist::oracle
