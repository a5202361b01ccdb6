#include "copy.hpp"

namespace aiodist {

// No stores around the cache here, hence no weakly ordered ones to fence.
void copy_streaming(void* destination, const void* source, std::size_t nbytes) noexcept {
    copy_cached(destination, source, nbytes);
}

}  // namespace aiodist
