#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace aiodist {

/// Appends a number in as few bytes as it needs: seven bits a byte, the lowest first (LEB128).
inline void append_varint(std::string& text, std::uint64_t value) {
    while (value >= 0x80) {
        text.push_back(static_cast<char>(value | 0x80));
        value >>= 7;
    }
    text.push_back(static_cast<char>(value));
}

/// Reads numbers until `text` is used up; false where it is no such text.
inline bool read_varints(std::string_view text, std::vector<std::uint64_t>& values) {
    values.clear();
    std::uint64_t value = 0;
    unsigned shift = 0;
    for (const char byte : text) {
        if (shift > 63) {
            return false;
        }
        value |= static_cast<std::uint64_t>(byte & 0x7f) << shift;
        shift += 7;
        if ((byte & 0x80) == 0) {
            values.push_back(value);
            value = 0;
            shift = 0;
        }
    }
    return shift == 0;
}

}  // namespace aiodist
