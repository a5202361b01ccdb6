// The kernels for whatever the compiler's baseline is; every other instruction set gives the same bits.

#define AIODIST_KERNEL_NAMESPACE baseline

#include "float16_portable.hpp"
#include "table.hpp"
