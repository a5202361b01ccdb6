// The kernels for processors with AVX2 and F16C.

#define AIODIST_KERNEL_NAMESPACE x86_64_v3

#include "float16_f16c.hpp"
#include "table.hpp"
