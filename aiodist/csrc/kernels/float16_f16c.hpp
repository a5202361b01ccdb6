#pragma once

// Sum, product and mean of float16 with the conversion instructions of x86-64-v3 and later. They round to nearest even
// and keep denormals like Float16 in rules16.hpp; NaN payloads, the one difference, never reach a result.

#include <immintrin.h>

#include "loops.hpp"
#include "reduce.hpp"
#include "rules16.hpp"

namespace aiodist::AIODIST_KERNEL_NAMESPACE {

// Eight elements as one: the rules of HalfRule with vector types.
template <class Operator>
struct WideHalfRule {
    using Accumulator = float __attribute__((vector_size(32)));
    using Divisor = float;
    static constexpr std::size_t kElements = 8;
    static constexpr std::size_t kSourceBytes = 2 * kElements;
    static constexpr std::size_t kResultBytes = 2 * kElements;
    static Accumulator load(const Byte* array, std::size_t index) {
        return _mm256_cvtph_ps(AIODIST_KERNEL_NAMESPACE::load<HalfVector>(array, index).halves);
    }
    static Accumulator combine(Accumulator a, Accumulator b) { return Operator::combine(a, b); }
    static void store(Byte* array, std::size_t index, Accumulator value, Divisor divisor) {
        const Accumulator result = Operator::finish(value, divisor);
        const Accumulator nan = Accumulator{} + __builtin_nanf("");
        const Accumulator clean = result == result ? result : nan;
        AIODIST_KERNEL_NAMESPACE::store(array, index, HalfVector{_mm256_cvtps_ph(clean, _MM_FROUND_TO_NEAREST_INT)});
    }

 private:
    struct HalfVector {  // not the bare vector: a template argument would lose its attributes
        __m128i halves;
    };
};

template <class Operator>
inline constexpr Fold kFloat16Fold = fold_groups<WideHalfRule<Operator>, HalfRule<Float16, Operator>>;

}  // namespace aiodist::AIODIST_KERNEL_NAMESPACE
