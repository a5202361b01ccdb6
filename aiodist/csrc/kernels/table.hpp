#pragma once

// The table of one instruction set. The including file defines AIODIST_KERNEL_NAMESPACE and includes the float16 header
// of its choice first.

#include "loops.hpp"
#include "reduce.hpp"
#include "rules16.hpp"

namespace aiodist::AIODIST_KERNEL_NAMESPACE {

template <class Unsigned>
constexpr Fold integer_kernel(Op op) {
    switch (op) {
        case Op::sum:
            return fold<IntegerSum<Unsigned>>;
        case Op::prod:
            return fold<IntegerProd<Unsigned>>;
        case Op::band:
            return fold<IntegerBand<Unsigned>>;
        case Op::bor:
            return fold<IntegerBor<Unsigned>>;
        case Op::bxor:
            return fold<IntegerBxor<Unsigned>>;
        default:
            return nullptr;
    }
}

template <class Integer, class Unsigned>
constexpr Fold integer_kernel(Op op) {
    switch (op) {
        case Op::min:
            return fold<IntegerMin<Integer>>;
        case Op::max:
            return fold<IntegerMax<Integer>>;
        case Op::mean:
            return fold<IntegerMean<Integer>>;
        default:
            return integer_kernel<Unsigned>(op);
    }
}

constexpr Fold bool_kernel(Op op) {
    switch (op) {
        case Op::sum:
        case Op::max:
        case Op::bor:
            return fold<BoolRule<IntegerBor>>;
        case Op::prod:
        case Op::min:
        case Op::band:
            return fold<BoolRule<IntegerBand>>;
        case Op::bxor:
            return fold<BoolRule<IntegerBxor>>;
        default:
            return nullptr;
    }
}

template <class Float>
constexpr Fold float_kernel(Op op) {
    switch (op) {
        case Op::sum:
            return fold<FloatRule<Float, Sum>>;
        case Op::prod:
            return fold<FloatRule<Float, Prod>>;
        case Op::min:
            return fold<FloatMin<Float>>;
        case Op::max:
            return fold<FloatMax<Float>>;
        case Op::mean:
            return fold<FloatRule<Float, Mean>>;
        default:
            return nullptr;
    }
}

// sum, prod, mean: the kernels of the format's own.
template <class Format>
constexpr Fold half_kernel(Op op, Fold sum, Fold prod, Fold mean) {
    switch (op) {
        case Op::sum:
            return sum;
        case Op::prod:
            return prod;
        case Op::min:
            return fold<HalfMin<Format>>;
        case Op::max:
            return fold<HalfMax<Format>>;
        case Op::mean:
            return mean;
        default:
            return nullptr;
    }
}

template <class Operator>
inline constexpr Fold kBFloat16Fold = fold_groups<BFloat16Pair<Operator>, HalfRule<BFloat16, Operator>>;

template <class Float>
constexpr Fold complex_kernel(Op op) {
    switch (op) {
        case Op::sum:
            return fold<FloatRule<Float, Sum>, 2>;
        case Op::prod:
            return fold<ComplexProd<Float>>;
        case Op::mean:
            return fold<FloatRule<Float, Mean>, 2>;
        default:
            return nullptr;
    }
}

constexpr Fold kernel_of(DType dtype, Op op) {
    switch (dtype) {
        case DType::raw:
            return nullptr;
        case DType::bool_:
            return bool_kernel(op);
        case DType::int8:
            return integer_kernel<std::int8_t, std::uint8_t>(op);
        case DType::int16:
            return integer_kernel<std::int16_t, std::uint16_t>(op);
        case DType::int32:
            return integer_kernel<std::int32_t, std::uint32_t>(op);
        case DType::int64:
            return integer_kernel<std::int64_t, std::uint64_t>(op);
        case DType::uint8:
            return integer_kernel<std::uint8_t, std::uint8_t>(op);
        case DType::uint16:
            return integer_kernel<std::uint16_t, std::uint16_t>(op);
        case DType::uint32:
            return integer_kernel<std::uint32_t, std::uint32_t>(op);
        case DType::uint64:
            return integer_kernel<std::uint64_t, std::uint64_t>(op);
        case DType::float16:
            return half_kernel<Float16>(op, kFloat16Fold<Sum>, kFloat16Fold<Prod>, kFloat16Fold<Mean>);
        case DType::bfloat16:
            return half_kernel<BFloat16>(op, kBFloat16Fold<Sum>, kBFloat16Fold<Prod>, kBFloat16Fold<Mean>);
        case DType::float32:
            return float_kernel<float>(op);
        case DType::float64:
            return float_kernel<double>(op);
        case DType::complex64:
            return complex_kernel<float>(op);
        case DType::complex128:
            return complex_kernel<double>(op);
    }
    return nullptr;
}

Fold fold_kernel(DType dtype, Op op) noexcept { return kernel_of(dtype, op); }

}  // namespace aiodist::AIODIST_KERNEL_NAMESPACE
