// The kernels for processors with AVX-512.

#define AIODIST_KERNEL_NAMESPACE x86_64_v4

#include "float16_f16c.hpp"
#include "table.hpp"
