#include <cstring>

#include "copy.hpp"

namespace aiodist {

void copy_cached(void* destination, const void* source, std::size_t nbytes) noexcept {
    if (nbytes != 0) {  // an empty array's pointers may be null, which memcpy forbids
        std::memcpy(destination, source, nbytes);
    }
}

}  // namespace aiodist
