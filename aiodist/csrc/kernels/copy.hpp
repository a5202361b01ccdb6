#pragma once

// Copy kernels. Neither form allows overlap; any alignment will do.

#include <cstddef>

namespace aiodist {

/// Results at least this large are written around the cache: they would only push out what the next segment needs.
inline constexpr std::size_t kStreamingNbytes = std::size_t{4} << 20;

// For pieces up to about 64 KiB that somebody reads again soon: leaves the destination in the cache.
void copy_cached(void* destination, const void* source, std::size_t nbytes) noexcept;

// For destinations past the cache: stores around the cache where the machine can, and orders those stores before
// whatever the caller stores next (they are weakly ordered on x86, so a flag could otherwise overtake its data).
void copy_streaming(void* destination, const void* source, std::size_t nbytes) noexcept;

}  // namespace aiodist
