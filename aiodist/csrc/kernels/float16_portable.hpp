#pragma once

// Sum, product and mean of float16 where the processor may lack conversion instructions; the other choice is
// float16_f16c.hpp.

#include "loops.hpp"
#include "reduce.hpp"
#include "rules16.hpp"

namespace aiodist::AIODIST_KERNEL_NAMESPACE {

template <class Operator>
inline constexpr Fold kFloat16Fold = fold<HalfRule<Float16, Operator>>;

}  // namespace aiodist::AIODIST_KERNEL_NAMESPACE
