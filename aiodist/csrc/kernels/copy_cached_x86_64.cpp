#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "copy.hpp"

namespace aiodist {
namespace {

constexpr std::size_t kVector = sizeof(__m256i);
constexpr std::size_t kStride = 4 * kVector;
// Up to here the C library's copy, which is branch-free code of a few loads and stores.
constexpr std::size_t kSmall = 512;

// Beyond, the C library chooses `rep movsb`, which on AMD's Zen cores is several times slower into a destination that
// is not aligned to a line, and into lines that another core has just read: exactly what rings in shared memory are.
__attribute__((target("avx2"))) void copy_avx2(unsigned char* to, const unsigned char* from,
                                               std::size_t nbytes) noexcept {
    const std::size_t head = kVector - reinterpret_cast<std::uintptr_t>(to) % kVector;
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
    std::size_t at = head;  // stores are aligned from here
    for (; at + kStride <= nbytes; at += kStride) {
        const auto* source = reinterpret_cast<const __m256i*>(from + at);
        auto* target = reinterpret_cast<__m256i*>(to + at);
        const __m256i a = _mm256_loadu_si256(source);
        const __m256i b = _mm256_loadu_si256(source + 1);
        const __m256i c = _mm256_loadu_si256(source + 2);
        const __m256i d = _mm256_loadu_si256(source + 3);
        _mm256_store_si256(target, a);
        _mm256_store_si256(target + 1, b);
        _mm256_store_si256(target + 2, c);
        _mm256_store_si256(target + 3, d);
    }
    for (; at + kVector <= nbytes; at += kVector) {
        _mm256_store_si256(reinterpret_cast<__m256i*>(to + at),
                           _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + at)));
    }
    const std::size_t last = nbytes - kVector;  // overlaps what is written; nbytes > kSmall
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + last),
                        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + last)));
}

}  // namespace

void copy_cached(void* destination, const void* source, std::size_t nbytes) noexcept {
    static const bool wide = __builtin_cpu_supports("avx2") != 0;
    if (nbytes > kSmall && wide) {
        copy_avx2(static_cast<unsigned char*>(destination), static_cast<const unsigned char*>(source), nbytes);
    } else if (nbytes != 0) {  // an empty array's pointers may be null, which memcpy forbids
        std::memcpy(destination, source, nbytes);
    }
}

}  // namespace aiodist
