#include <emmintrin.h>

#include <cstdint>

#include "copy.hpp"

namespace aiodist {
namespace {

constexpr std::size_t kLine = 64;
constexpr std::size_t kVector = sizeof(__m128i);
// Below this the final drain of the write-combining buffers costs more than the cache lines saved.
constexpr std::size_t kSmall = 256;

// Whole lines, so that each write-combining buffer leaves full; wider vectors were no faster. `destination` is aligned
// to a line.
void stream_lines(unsigned char* destination, const unsigned char* source, std::size_t nbytes) noexcept {
    for (std::size_t line = 0; line < nbytes; line += kLine) {
        const auto* from = reinterpret_cast<const __m128i*>(source + line);
        auto* to = reinterpret_cast<__m128i*>(destination + line);
        __m128i values[kLine / kVector];
        for (std::size_t i = 0; i < kLine / kVector; ++i) {
            values[i] = _mm_loadu_si128(from + i);
        }
        for (std::size_t i = 0; i < kLine / kVector; ++i) {
            _mm_stream_si128(to + i, values[i]);
        }
    }
}

}  // namespace

void copy_streaming(void* destination, const void* source, std::size_t nbytes) noexcept {
    auto* to = static_cast<unsigned char*>(destination);
    const auto* from = static_cast<const unsigned char*>(source);
    if (nbytes >= kSmall) {
        const std::size_t head = (kLine - reinterpret_cast<std::uintptr_t>(to) % kLine) % kLine;
        const std::size_t body = (nbytes - head) / kLine * kLine;
        copy_cached(to, from, head);
        stream_lines(to + head, from + head, body);
        to += head + body;
        from += head + body;
        nbytes -= head + body;
    }
    copy_cached(to, from, nbytes);
    _mm_sfence();  // for the small ones too: what callers rely on must not depend on a threshold
}

}  // namespace aiodist
