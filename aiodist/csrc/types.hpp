#pragma once

// The words that both halves of aiodist share by number: element types, reduction operators and collectives.
// aiodist/types.py holds the same numbers; they also travel in call headers, so a change is a layout change.

#include <cstddef>
#include <cstdint>

namespace aiodist {

enum class DType : std::uint8_t {
    raw = 0,  // bytes that move but are never reduced
    bool_ = 1,
    int8 = 2,
    int16 = 3,
    int32 = 4,
    int64 = 5,
    uint8 = 6,
    uint16 = 7,
    uint32 = 8,
    uint64 = 9,
    float16 = 10,
    bfloat16 = 11,
    float32 = 12,
    float64 = 13,
    complex64 = 14,
    complex128 = 15,
};
inline constexpr std::size_t kDTypeCount = 16;

enum class Op : std::uint8_t {
    none = 0,
    sum = 1,
    prod = 2,
    min = 3,
    max = 4,
    mean = 5,
    band = 6,
    bor = 7,
    bxor = 8,
};
inline constexpr std::size_t kOpCount = 9;

enum class Collective : std::uint8_t {
    none = 0,
    barrier = 1,
    all_reduce = 2,
    reduce = 3,
    reduce_scatter = 4,
    broadcast = 5,
    all_gather = 6,
    gather = 7,
    scatter = 8,
    all_to_all = 9,
    send = 10,
    recv = 11,
};
inline constexpr std::size_t kCollectiveCount = 12;

/// True for what stands outside the order of the collectives.
constexpr bool is_message(Collective collective) noexcept {
    return collective == Collective::send || collective == Collective::recv;
}

// The three name() functions answer "unknown" outside their enumeration: the number may come from shared memory.

constexpr const char* name(DType dtype) noexcept {
    constexpr const char* kNames[kDTypeCount] = {"raw",     "bool",    "int8",      "int16",     "int32",   "int64",
                                                 "uint8",   "uint16",  "uint32",    "uint64",    "float16", "bfloat16",
                                                 "float32", "float64", "complex64", "complex128"};
    const auto code = static_cast<std::size_t>(dtype);
    return code < kDTypeCount ? kNames[code] : "unknown";
}

constexpr const char* name(Op op) noexcept {
    constexpr const char* kNames[kOpCount] = {"none", "sum", "prod", "min", "max", "mean", "band", "bor", "bxor"};
    const auto code = static_cast<std::size_t>(op);
    return code < kOpCount ? kNames[code] : "unknown";
}

constexpr const char* name(Collective collective) noexcept {
    constexpr const char* kNames[kCollectiveCount] = {"none",           "barrier",    "all_reduce", "reduce",
                                                      "reduce_scatter", "broadcast",  "all_gather", "gather",
                                                      "scatter",        "all_to_all", "send",       "recv"};
    const auto code = static_cast<std::size_t>(collective);
    return code < kCollectiveCount ? kNames[code] : "unknown";
}

// Bytes of one element; 0 for raw (the header's nbytes counts there) and for numbers outside the enumeration.
constexpr std::size_t itemsize(DType dtype) noexcept {
    constexpr std::uint8_t kSizes[kDTypeCount] = {0, 1, 1, 2, 4, 8, 1, 2, 4, 8, 2, 2, 4, 8, 8, 16};
    const auto code = static_cast<std::size_t>(dtype);
    return code < kDTypeCount ? kSizes[code] : 0;
}

constexpr bool is_integer(DType dtype) noexcept { return dtype >= DType::int8 && dtype <= DType::uint64; }

// The element type of the result: only the mean of integers changes it.
constexpr DType result_dtype(DType dtype, Op op) noexcept {
    return op == Op::mean && is_integer(dtype) ? DType::float64 : dtype;
}

}  // namespace aiodist
