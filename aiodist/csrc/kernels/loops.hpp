#pragma once

// The loops around the rules of rules.hpp; also compiled once per instruction set.

#include "rules.hpp"

namespace aiodist::AIODIST_KERNEL_NAMESPACE {

// Up to this many sources one pass reads them all, with the partial results in registers.
inline constexpr std::size_t kDirectSources = 4;
// More are folded block by block, the partial results of a block in the first-level cache beside the sources' lines.
inline constexpr std::size_t kBlockBytes = 4096;

// In every loop `#pragma GCC ivdep` tells that iterations are independent: `out` may be one of the sources but never
// overlaps them otherwise. Without it the compiler checks for overlap at run time and takes its scalar loop in place.

template <class Rule, class... Pointers>
inline typename Rule::Accumulator fold_element([[maybe_unused]] std::size_t index, typename Rule::Accumulator partial,
                                               Pointers... sources) {
    ((partial = Rule::combine(partial, Rule::load(sources, index))), ...);
    return partial;
}

template <class Rule, class... Pointers>
inline void fold_direct(Byte* out, std::size_t count, typename Rule::Divisor divisor, const Byte* first,
                        Pointers... others) {
#pragma GCC ivdep
    for (std::size_t i = 0; i < count; ++i) {
        Rule::store(out, i, fold_element<Rule>(i, Rule::load(first, i), others...), divisor);
    }
}

// The three steps of a block stay functions of their own: inlined, GCC jams the loop over the sources into the loop
// over the elements and no longer vectorises it.

template <class Rule, class... Pointers>
[[gnu::noinline]] void begin_block(typename Rule::Accumulator* partials, std::size_t count, const Byte* first,
                                   Pointers... others) {
#pragma GCC ivdep
    for (std::size_t i = 0; i < count; ++i) {
        partials[i] = fold_element<Rule>(i, Rule::load(first, i), others...);
    }
}

template <class Rule>
[[gnu::noinline]] void extend_block(typename Rule::Accumulator* partials, std::size_t count, const Byte* source) {
#pragma GCC ivdep
    for (std::size_t i = 0; i < count; ++i) {
        partials[i] = fold_element<Rule>(i, partials[i], source);
    }
}

template <class Rule>
[[gnu::noinline]] void end_block(Byte* out, std::size_t count, typename Rule::Divisor divisor,
                                 const typename Rule::Accumulator* partials, const Byte* source) {
#pragma GCC ivdep
    for (std::size_t i = 0; i < count; ++i) {
        Rule::store(out, i, fold_element<Rule>(i, partials[i], source), divisor);
    }
}

// The sources of one call, seen from an element onwards.
struct Sources {
    const void* const* arrays;
    std::size_t count;
    std::size_t offset;  // in bytes
    const Byte* operator[](std::size_t index) const { return static_cast<const Byte*>(arrays[index]) + offset; }
};

template <class Rule>
inline void fold_blocks(Byte* out, Sources sources, std::size_t count, typename Rule::Divisor divisor) {
    constexpr std::size_t kBlock = kBlockBytes / sizeof(typename Rule::Accumulator);
    alignas(64) typename Rule::Accumulator partials[kBlock];
    for (std::size_t start = 0; start < count; start += kBlock) {
        const std::size_t length = count - start < kBlock ? count - start : kBlock;
        begin_block<Rule>(partials, length, sources[0], sources[1], sources[2], sources[3]);
        for (std::size_t source = kDirectSources; source + 1 < sources.count; ++source) {
            extend_block<Rule>(partials, length, sources[source]);
        }
        // Only here is the output written, when all sources of the block are read: it may be any of them.
        end_block<Rule>(out, length, divisor, partials, sources[sources.count - 1]);
        out += length * Rule::kResultBytes;
        sources.offset += length * Rule::kSourceBytes;
    }
}

template <class Rule>
inline void fold_array(Byte* out, Sources sources, std::size_t count, typename Rule::Divisor divisor) {
    switch (sources.count) {
        case 1:
            return fold_direct<Rule>(out, count, divisor, sources[0]);
        case 2:
            return fold_direct<Rule>(out, count, divisor, sources[0], sources[1]);
        case 3:
            return fold_direct<Rule>(out, count, divisor, sources[0], sources[1], sources[2]);
        case kDirectSources:
            return fold_direct<Rule>(out, count, divisor, sources[0], sources[1], sources[2], sources[3]);
        default:
            return fold_blocks<Rule>(out, sources, count, divisor);
    }
}

// A Fold (reduce.hpp). kParts is 2 where a float rule works on the parts of complex numbers.
template <class Rule, std::size_t kParts = 1>
void fold(void* out, const void* const* arrays, std::size_t source_count, std::size_t count, std::size_t divisor) {
    fold_array<Rule>(static_cast<Byte*>(out), Sources{arrays, source_count, 0}, count * kParts,
                     static_cast<typename Rule::Divisor>(divisor));
}

// A Fold by a rule whose element is a group of Group::kElements neighbours; Single is the rule for the rest.
template <class Group, class Single>
void fold_groups(void* out, const void* const* arrays, std::size_t source_count, std::size_t count,
                 std::size_t divisor) {
    const std::size_t groups = count / Group::kElements;
    const std::size_t done = groups * Group::kSourceBytes;
    auto* bytes = static_cast<Byte*>(out);
    fold_array<Group>(bytes, Sources{arrays, source_count, 0}, groups, static_cast<typename Group::Divisor>(divisor));
    fold_array<Single>(bytes + groups * Group::kResultBytes, Sources{arrays, source_count, done},
                       count % Group::kElements, static_cast<typename Single::Divisor>(divisor));
}

}  // namespace aiodist::AIODIST_KERNEL_NAMESPACE
