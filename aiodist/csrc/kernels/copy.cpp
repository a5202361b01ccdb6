#include "copy.hpp"

#include <cstring>

namespace aiodist {

// The C library's copy is as fast as any of ours in the cache (within 5 % from 1 KiB to 4 MiB, AVX-512 included); only
// past the cache is it worth owning one.
void copy_cached(void* destination, const void* source, std::size_t nbytes) noexcept {
    if (nbytes != 0) {  // an empty array's pointers may be null, which memcpy forbids
        std::memcpy(destination, source, nbytes);
    }
}

}  // namespace aiodist
