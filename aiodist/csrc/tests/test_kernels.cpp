// Every kernel of every instruction set against a scalar oracle, bit for bit.

#include <algorithm>
#include <cfenv>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

#include "../kernels/copy.hpp"
#include "../kernels/float_environment.hpp"
#include "../kernels/reduce.hpp"
#include "../types.hpp"
#include "kernel_oracle.hpp"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace {

using aiodist::DType;
using aiodist::Fold;
using aiodist::InstructionSet;
using aiodist::Op;
using aiodist::oracle::Arrays;
using aiodist::oracle::bits;
using aiodist::oracle::Bytes;
using aiodist::oracle::defined;
using aiodist::oracle::kOracles;
using aiodist::oracle::make_source;
using aiodist::oracle::make_sources;
using aiodist::oracle::put;
using aiodist::oracle::Random;

int failures = 0;

void expect(bool holds, const char* what) {
    if (!holds) {
        ++failures;
        std::printf("  FAILED: %s\n", what);
    }
}

// Copies that start `offset` bytes past an aligned address and end exactly where their block ends, so that the address
// sanitizer sees an access to the element after the last.
Arrays misplace(const Arrays& sources, std::size_t offset) {
    Arrays result;
    for (const Bytes& source : sources) {
        Bytes copy(offset);
        copy.insert(copy.end(), source.begin(), source.end());
        copy.shrink_to_fit();
        result.push_back(copy);
    }
    return result;
}

void report(InstructionSet set, DType dtype, Op op, std::size_t sources, std::size_t count, const char* form) {
    if (++failures < 20) {
        std::printf("  FAILED: %s %s %s, %zu sources, %zu elements, %s\n", aiodist::name(set), aiodist::name(dtype),
                    aiodist::name(op), sources, count, form);
    }
}

struct Case {
    DType dtype;
    Op op;
    std::size_t count;
    std::size_t offset;
};

void check_fold(InstructionSet set, Case c, const Arrays& sources, const Bytes& expected) {
    const Fold fold = aiodist::fold_kernel_for(set, c.dtype, c.op);
    Arrays placed = misplace(sources, c.offset);
    std::vector<const void*> pointers;
    for (const Bytes& source : placed) {
        pointers.push_back(source.data() + c.offset);
    }
    Bytes out(c.offset + expected.size(), 0xa5);
    fold(out.data() + c.offset, pointers.data(), sources.size(), c.count, sources.size());
    if (!std::equal(expected.begin(), expected.end(), out.begin() + static_cast<std::ptrdiff_t>(c.offset))) {
        report(set, c.dtype, c.op, sources.size(), c.count, "out of place");
    }
    if (aiodist::itemsize(aiodist::result_dtype(c.dtype, c.op)) != aiodist::itemsize(c.dtype)) {
        return;
    }
    for (std::size_t s = 0; s < sources.size(); ++s) {
        const Bytes kept = placed[s];
        fold(placed[s].data() + c.offset, pointers.data(), sources.size(), c.count, sources.size());
        if (!std::equal(expected.begin(), expected.end(), placed[s].begin() + static_cast<std::ptrdiff_t>(c.offset))) {
            report(set, c.dtype, c.op, sources.size(), c.count, "in place");
        }
        std::copy(kept.begin(), kept.end(), placed[s].begin());
    }
}

void check_all_sets(Case c, std::size_t source_count, Random& random) {
    const Arrays sources = make_sources(c.dtype, source_count, c.count, random);
    Bytes expected(c.count * aiodist::itemsize(aiodist::result_dtype(c.dtype, c.op)));
    kOracles[static_cast<std::size_t>(c.dtype)](c.op, sources, c.count, expected);
    for (const InstructionSet set : aiodist::available_instruction_sets()) {
        check_fold(set, c, sources, expected);
    }
}

template <class Body>
void for_each_kernel(Body body) {
    for (std::size_t dtype = 0; dtype < aiodist::kDTypeCount; ++dtype) {
        for (std::size_t op = 0; op < aiodist::kOpCount; ++op) {
            if (defined(static_cast<DType>(dtype), static_cast<Op>(op))) {
                body(static_cast<DType>(dtype), static_cast<Op>(op));
            }
        }
    }
}

void test_small_folds() {
    Random random;
    for_each_kernel([&](DType dtype, Op op) {
        for (std::size_t count = 0; count <= 70; ++count) {
            for (const std::size_t source_count : {1U, 2U, 3U, 4U, 5U, 7U}) {
                check_all_sets({dtype, op, count, count % 9}, source_count, random);
            }
        }
    });
}

void test_large_folds() {
    Random random;
    for_each_kernel([&](DType dtype, Op op) {
        for (const std::size_t source_count : {2U, 4U, 8U}) {
            check_all_sets({dtype, op, 9001, 1 + source_count}, source_count, random);
        }
    });
}

// Each 16-bit float through the conversions both ways (one source), and through sums that round in every binade.
void test_all_halves() {
    for (const DType dtype : {DType::float16, DType::bfloat16}) {
        Arrays sources(1, Bytes(2 * 65536));
        for (std::size_t i = 0; i < 65536; ++i) {
            put(sources[0], i, static_cast<std::uint16_t>(i));
        }
        Random random;
        for (const std::size_t source_count : {1U, 2U, 3U, 4U}) {
            while (sources.size() < source_count) {
                sources.push_back(make_source(dtype, 65536, random));
            }
            for (const Op op : {Op::sum, Op::prod, Op::mean, Op::min, Op::max}) {
                Bytes expected(2 * 65536);
                kOracles[static_cast<std::size_t>(dtype)](op, sources, 65536, expected);
                for (const InstructionSet set : aiodist::available_instruction_sets()) {
                    check_fold(set, {dtype, op, 65536, 0}, sources, expected);
                }
            }
        }
    }
}

void test_tables() {
    for (std::size_t d = 0; d <= aiodist::kDTypeCount; ++d) {
        for (std::size_t o = 0; o <= aiodist::kOpCount; ++o) {
            const auto dtype = static_cast<DType>(d);
            const auto op = static_cast<Op>(o);
            const bool due = d < aiodist::kDTypeCount && o < aiodist::kOpCount && defined(dtype, op);
            expect((aiodist::fold_kernel(dtype, op) != nullptr) == due, "a kernel exists just where it is defined");
            for (const InstructionSet set : aiodist::available_instruction_sets()) {
                expect((aiodist::fold_kernel_for(set, dtype, op) != nullptr) == due, "in every instruction set");
            }
        }
    }
    const auto sets = aiodist::available_instruction_sets();
    expect(sets.front() == InstructionSet::baseline, "the baseline comes first");
    expect(std::strcmp(aiodist::kernel_instruction_set(), aiodist::name(sets.back())) == 0, "the best is chosen");
    expect(
        aiodist::fold_kernel(DType::float32, Op::sum) == aiodist::fold_kernel_for(sets.back(), DType::float32, Op::sum),
        "fold_kernel is the best set's");
    expect(aiodist::result_dtype(DType::uint8, Op::mean) == DType::float64, "the mean of integers is float64");
    expect(aiodist::result_dtype(DType::float16, Op::mean) == DType::float16, "the mean of floats keeps its type");
    expect(std::strcmp(aiodist::name(static_cast<Op>(200)), "unknown") == 0, "foreign numbers have a name too");
    static_assert(aiodist::itemsize(DType::complex128) == 16 && aiodist::itemsize(DType::raw) == 0);
}

template <class Result, class Value>
Result fold_two(DType dtype, Op op, Value a, Value b) {
    const void* sources[] = {&a, &b};
    Result result;
    aiodist::fold_kernel(dtype, op)(&result, sources, 2, 1, 2);
    return result;
}

// Answers written down by hand, in case the oracle is as wrong as the kernels.
void test_known_answers() {
    expect(fold_two<std::int8_t, std::int8_t>(DType::int8, Op::sum, 120, 100) == -36, "int8 wraps");
    expect(fold_two<std::uint64_t, std::uint64_t>(DType::uint64, Op::max, 1ULL << 63U, 1) == 1ULL << 63U, "uint64 max");
    expect(fold_two<std::int32_t, std::int32_t>(DType::int32, Op::max, INT32_MIN, 1) == 1, "int32 max");
    expect(fold_two<double, std::int32_t>(DType::int32, Op::mean, 7, 8) == 7.5, "mean of integers");
    const double large = 4611686018427387904.0;
    expect(fold_two<double, std::int64_t>(DType::int64, Op::mean, 1LL << 62U, 1LL << 62U) == large, "no wrap in mean");
    expect(fold_two<std::uint8_t, std::uint8_t>(DType::bool_, Op::sum, 2, 4) == 1, "bool sum");
    expect(fold_two<std::uint8_t, std::uint8_t>(DType::bool_, Op::band, 2, 4) == 1, "bool band of odd bytes");
    const float nan = bits<float>(std::uint32_t{0xffc00001});
    expect(bits<std::uint32_t>(fold_two<float>(DType::float32, Op::min, nan, 1.0F)) == 0x7fc00000, "NaN left");
    expect(bits<std::uint32_t>(fold_two<float>(DType::float32, Op::max, 1.0F, nan)) == 0x7fc00000, "NaN right");
    expect(std::signbit(fold_two<double>(DType::float64, Op::min, 0.0, -0.0)), "-0 < +0");
    expect(!std::signbit(fold_two<double>(DType::float64, Op::max, -0.0, 0.0)), "+0 > -0");
    struct Complex {
        float real, imaginary;
    };
    const auto product = fold_two<Complex>(DType::complex64, Op::prod, Complex{1, 2}, Complex{3, -1});
    expect(product.real == 5 && product.imaginary == 5, "complex product");
    const std::uint16_t values[] = {0x4380, 0x3f80, 0x3f80, 0x3f80};  // bfloat16 256, 1, 1, 1
    const void* sources[] = {values, values + 1, values + 2, values + 3};
    std::uint16_t sum = 0;
    aiodist::fold_kernel(DType::bfloat16, Op::sum)(&sum, sources, 4, 1, 4);
    expect(sum == 0x4382, "bfloat16 accumulates in float32: 260 (259 rounded to even), not 256");
}

#if defined(__x86_64__)
// Towards zero, denormals flushed on both sides, and every trap armed.
constexpr std::uint32_t kHostile = 0xe040;
void set_hostile_environment() { _mm_setcsr(kHostile); }
bool is_hostile_environment() { return (_mm_getcsr() & ~0x3fU) == kHostile; }
void set_default_environment() { _mm_setcsr(0x1f80); }
#else
void set_hostile_environment() { std::fesetround(FE_TOWARDZERO); }
bool is_hostile_environment() { return std::fegetround() == FE_TOWARDZERO; }
void set_default_environment() { std::fesetround(FE_TONEAREST); }
#endif

void fold_in_hostile_environment(Fold fold, const Arrays& sources, std::size_t count, Bytes& out) {
    const void* pointers[] = {sources[0].data(), sources[1].data(), sources[2].data()};
    set_hostile_environment();
    {
        const aiodist::FloatEnvironment environment;
        fold(out.data(), pointers, 3, count, 3);
    }
    const bool restored = is_hostile_environment();
    set_default_environment();
    expect(restored, "the thread's floating-point control word is restored");
}

void test_float_environment() {
    Random random;
    for_each_kernel([&](DType dtype, Op op) {
        const std::size_t count = 333;
        const Arrays sources = make_sources(dtype, 3, count, random);
        Bytes expected(count * aiodist::itemsize(aiodist::result_dtype(dtype, op)));
        kOracles[static_cast<std::size_t>(dtype)](op, sources, count, expected);
        for (const InstructionSet set : aiodist::available_instruction_sets()) {
            Bytes out(expected.size());
            fold_in_hostile_environment(aiodist::fold_kernel_for(set, dtype, op), sources, count, out);
            if (out != expected) {
                report(set, dtype, op, 3, count, "hostile floating-point environment");
            }
        }
    });
}

void check_copy(void (*copy)(void*, const void*, std::size_t), std::size_t nbytes, std::size_t to, std::size_t from) {
    Random random;
    Bytes source(from + nbytes);
    std::generate(source.begin(), source.end(), [&] { return static_cast<std::uint8_t>(random()); });
    Bytes destination(to + nbytes + 64, 0x5a);
    copy(destination.data() + to, source.data() + from, nbytes);
    Bytes expected(to, 0x5a);
    expected.insert(expected.end(), source.begin() + static_cast<std::ptrdiff_t>(from), source.end());
    expected.resize(to + nbytes + 64, 0x5a);
    expect(destination == expected, "a copy is exact and touches nothing else");
}

void test_copies() {
    for (const auto copy : {aiodist::copy_cached, aiodist::copy_streaming}) {
        for (std::size_t nbytes = 0; nbytes <= 600; ++nbytes) {
            check_copy(copy, nbytes, nbytes % 67, nbytes % 13);
        }
        for (std::size_t offset = 0; offset < 64; ++offset) {
            check_copy(copy, 4096 + 3 * offset, offset, 63 - offset);
            check_copy(copy, 65536 - offset, 64 - offset, 0);
        }
        copy(nullptr, nullptr, 0);
    }
}

void section(const char* title, void (*test)()) {
    const int before = failures;
    test();
    std::printf("%-28s %s\n", title, failures == before ? "ok" : "FAILED");
    std::fflush(stdout);
}

}  // namespace

int main() {
    std::printf("instruction sets:");
    for (const InstructionSet set : aiodist::available_instruction_sets()) {
        std::printf(" %s", aiodist::name(set));
    }
    std::printf("\n");
    section("tables", test_tables);
    section("known answers", test_known_answers);
    section("all 16-bit floats", test_all_halves);
    section("small folds", test_small_folds);
    section("large folds", test_large_folds);
    section("floating-point environment", test_float_environment);
    section("copies", test_copies);
    if (failures != 0) {
        std::printf("%d failures\n", failures);
    }
    return failures == 0 ? 0 : 1;
}
