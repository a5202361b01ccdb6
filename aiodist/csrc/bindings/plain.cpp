// The calls that most programs make, from arguments to a Call without a line of Python. Each mirrors a function of
// aiodist/ops and leaves to it whatever is not plain; the conformance tables run both.

#include "bindings/plain.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <optional>

#include "kernels/reduce.hpp"

namespace aiodist::python {
namespace {

using Slot = PyObject* Arguments::*;

struct Parameter {
    const char* name;
    Slot slot;
};

/// A method's parameters after `self`, as collectives.py declares them.
struct Signature {
    std::array<Parameter, 6> parameters;
    Py_ssize_t positional;
};

constexpr Parameter kX{"x", &Arguments::x}, kOp{"op", &Arguments::op}, kRoot{"root", &Arguments::root},
    kAxis{"axis", &Arguments::axis}, kUneven{"uneven", &Arguments::uneven}, kDst{"dst", &Arguments::root},
    kSrc{"src", &Arguments::root}, kTag{"tag", &Arguments::tag}, kOut{"out", &Arguments::out},
    kTimeout{"timeout", &Arguments::timeout}, kEnd{nullptr, nullptr};

constexpr std::array<Signature, kCollectiveCount> kSignatures{{
    {{kEnd}, 0},
    {{kTimeout, kEnd}, 0},                             // barrier
    {{kX, kOp, kOut, kTimeout, kEnd}, 2},              // all_reduce
    {{kX, kOp, kRoot, kOut, kTimeout, kEnd}, 3},       // reduce
    {{kX, kOp, kAxis, kOut, kTimeout, kEnd}, 3},       // reduce_scatter
    {{kX, kRoot, kOut, kTimeout, kEnd}, 2},            // broadcast
    {{kX, kAxis, kUneven, kOut, kTimeout, kEnd}, 3},   // all_gather
    {{kX, kRoot, kAxis, kUneven, kOut, kTimeout}, 4},  // gather
    {{kX, kRoot, kAxis, kOut, kTimeout, kEnd}, 3},     // scatter
    {{kX, kAxis, kOut, kTimeout, kEnd}, 2},            // all_to_all
    {{kX, kDst, kTag, kTimeout, kEnd}, 3},             // send
    {{kSrc, kTag, kOut, kTimeout, kEnd}, 2},           // recv
}};

std::array<std::array<PyObject*, 6>, kCollectiveCount> parameter_names{};  // interned
std::array<PyObject*, kOpCount> op_names{};                                // interned; nullptr at 0

bool given(PyObject* argument) noexcept { return argument != nullptr && argument != Py_None; }

/// The operator that a name stands for: literals are interned and found by identity; others are compared.
Op op_of(PyObject* name_given) noexcept {
    if (name_given == nullptr) {
        return Op::sum;
    }
    for (std::size_t code = 1; code < kOpCount; ++code) {
        if (op_names[code] == name_given) {
            return static_cast<Op>(code);
        }
    }
    for (std::size_t code = 1; PyUnicode_CheckExact(name_given) && code < kOpCount; ++code) {
        if (PyUnicode_CompareWithASCIIString(name_given, name(static_cast<Op>(code))) == 0) {
            return static_cast<Op>(code);
        }
    }
    return Op::none;
}

/// A whole number in [low, high), or `otherwise` where none was given.
std::optional<long long> number(PyObject* argument, long long otherwise, long long low, long long high) noexcept {
    if (argument == nullptr) {
        return otherwise;
    }
    int overflow = 0;
    const long long value = PyLong_CheckExact(argument) ? PyLong_AsLongLongAndOverflow(argument, &overflow) : low - 1;
    return overflow == 0 && low <= value && value < high ? std::optional(value) : std::nullopt;
}

/// What the fillers below share.
struct Filling {
    const Communicator& communicator;
    const Arguments& arguments;
    Call& call;
    Ref& result;
    ArrayView x;

    int size() const noexcept { return communicator.size(); }
    bool at_root() const noexcept { return call.root == communicator.rank(); }

    bool take_x() {
        if (!given(arguments.x) || !view_array(arguments.x, x) || x.dtype == DType::raw) {
            return false;
        }
        call.dtype = x.dtype;
        call.itemsize = x.itemsize;
        call.nbytes = x.nbytes;
        call.shape.ndim = x.shape.ndim;
        std::copy_n(x.shape.dims.begin(), x.shape.ndim, call.shape.dims.begin());
        call.input = static_cast<const std::byte*>(x.data);
        return true;
    }

    bool take_op() {
        call.op = op_of(arguments.op);
        return call.op != Op::none && fold_kernel(x.dtype, call.op) != nullptr;
    }

    bool take_root(long long otherwise) {
        const auto root = number(arguments.root, otherwise, 0, size());
        call.root = static_cast<std::int32_t>(root.value_or(-1));
        return root.has_value();
    }

    /// An axis of an array of `ndim` dimensions, which may have none.
    bool take_axis(std::size_t ndim) {
        const auto extent = static_cast<long long>(ndim);
        const auto axis = number(arguments.axis, 0, -extent, extent);
        call.axis = static_cast<std::int8_t>(axis && *axis < 0 ? *axis + extent : axis.value_or(0));
        return axis.has_value() && ndim != 0;
    }

    /// The shape of x with its extent along the axis made `times` as long, or divided by `parts`.
    std::optional<Shape> resized(std::uint64_t times, std::uint64_t parts) const {
        Shape shape;
        shape.ndim = std::max<std::uint8_t>(x.shape.ndim, 1);
        shape.dims[0] = 1;
        std::copy_n(x.shape.dims.begin(), x.shape.ndim, shape.dims.begin());
        std::uint64_t& extent = shape.dims[static_cast<std::size_t>(call.axis)];
        if (extent % parts != 0 || __builtin_mul_overflow(extent, times, &extent)) {
            return std::nullopt;
        }
        extent /= parts;
        return shape;
    }

    bool in_one_row() const noexcept { return rows() == 1; }
    std::uint64_t rows() const noexcept {
        return std::accumulate(x.shape.dims.begin(), x.shape.dims.begin() + call.axis, std::uint64_t{1},
                               std::multiplies<>());
    }

    static bool overlap(const ArrayView& a, const ArrayView& b) noexcept {
        const auto* const first = static_cast<const std::byte*>(a.data);
        const auto* const second = static_cast<const std::byte*>(b.data);
        return first < second + b.nbytes && second < first + a.nbytes;
    }

    /// Where the result goes. An `out` that shares memory with x is plain only where x begins at its byte `own_place`.
    bool place(const Shape& shape, DType dtype, std::optional<std::uint64_t> own_place) {
        ArrayView out;
        if (!given(arguments.out)) {
            result = Ref::steal(new_array(shape, dtype));
            if (!result) {
                PyErr_Clear();
                return false;
            }
            (void)view_array(result.get(), out);
        } else {
            if (!view_array(arguments.out, out) || !out.writeable || out.dtype != dtype ||
                out.shape.ndim != shape.ndim ||
                !std::equal(shape.dims.begin(), shape.dims.begin() + shape.ndim, out.shape.dims.begin())) {
                return false;
            }
            const bool in_place =
                own_place && static_cast<const std::byte*>(x.data) == static_cast<std::byte*>(out.data) + *own_place;
            if (call.input != nullptr && overlap(x, out) && !in_place) {
                return false;
            }
            result = Ref::share(arguments.out);
        }
        call.output = static_cast<std::byte*>(out.data);
        return true;
    }

    /// The result of a reduction of x in x's shape; in place where that keeps the element type.
    bool place_reduced() {
        const DType dtype = result_dtype(x.dtype, call.op);
        return place(x.shape, dtype, dtype == x.dtype ? std::optional<std::uint64_t>(0) : std::nullopt);
    }

    /// An `out` whose shape and dtype say what is to come.
    bool place_what_comes() {
        ArrayView out;
        if (!view_array(arguments.out, out) || !out.writeable || out.dtype == DType::raw) {
            return false;
        }
        result = Ref::share(arguments.out);
        call.output = static_cast<std::byte*>(out.data);
        describe(out);
        return true;
    }

    void describe(const ArrayView& view) {
        call.dtype = view.dtype;
        call.itemsize = view.itemsize;
        call.nbytes = view.nbytes;
        call.shape = view.shape;
    }

    void resolve_to_none() { result = Ref::share(Py_None); }
};

bool barrier(Filling& filling) {
    filling.resolve_to_none();
    return true;
}

bool all_reduce(Filling& filling) { return filling.take_x() && filling.take_op() && filling.place_reduced(); }

bool reduce(Filling& filling) {
    if (!filling.take_x() || !filling.take_op() || !filling.take_root(0)) {
        return false;
    }
    if (filling.at_root()) {
        return filling.place_reduced();
    }
    filling.resolve_to_none();
    return true;
}

bool reduce_scatter(Filling& filling) {
    if (!filling.take_x() || !filling.take_op() || !filling.take_axis(filling.x.shape.ndim)) {
        return false;
    }
    filling.call.rows = std::max<std::uint64_t>(filling.rows(), 1);
    const auto share = filling.resized(1, static_cast<std::uint64_t>(filling.size()));
    return share && filling.place(*share, result_dtype(filling.x.dtype, filling.call.op), std::nullopt);
}

bool broadcast(Filling& filling) {
    if (filling.arguments.x == nullptr || !filling.take_root(0)) {  // None must be said
        return false;
    }
    const Arguments& arguments = filling.arguments;
    if (filling.at_root() || given(arguments.x)) {
        if (!filling.take_x()) {
            return false;
        }
        if (!filling.at_root()) {
            filling.call.input = nullptr;  // it only says what to expect
        }
        return filling.place(filling.x.shape, filling.x.dtype, 0);
    }
    if (given(arguments.out)) {
        return filling.place_what_comes();
    }
    filling.call.flags = kWildcard;
    return true;
}

bool join(Filling& filling, bool reads) {
    if (!filling.take_x() || (filling.arguments.uneven != nullptr && filling.arguments.uneven != Py_False) ||
        !filling.take_axis(std::max<std::size_t>(filling.x.shape.ndim, 1))) {
        return false;
    }
    if (!reads) {
        filling.resolve_to_none();
        return true;
    }
    const auto joined = filling.resized(static_cast<std::uint64_t>(filling.size()), 1);
    const std::uint64_t own = static_cast<std::uint64_t>(filling.communicator.rank()) * filling.x.nbytes;
    return joined && filling.place(*joined, filling.x.dtype, filling.in_one_row() ? std::optional(own) : std::nullopt);
}

bool all_gather(Filling& filling) { return join(filling, true); }

bool gather(Filling& filling) { return filling.take_root(0) && join(filling, filling.at_root()); }

bool scatter(Filling& filling) {
    const Arguments& arguments = filling.arguments;
    Call& call = filling.call;
    if (arguments.x == nullptr || !filling.take_root(0)) {
        return false;
    }
    if (filling.at_root() || given(arguments.x)) {
        if (!filling.take_x() || !filling.take_axis(filling.x.shape.ndim)) {
            return false;
        }
        const auto share = filling.resized(1, static_cast<std::uint64_t>(filling.size()));
        if (filling.at_root()) {  // in place: left to the general path
            return share && filling.place(*share, filling.x.dtype, std::nullopt);
        }
        call.input = nullptr;
        call.flags = kShare;
        if (!share || !filling.place(*share, filling.x.dtype, std::nullopt)) {
            return false;
        }
        call.shape = *share;  // a receiver's header describes its place
        call.nbytes = filling.x.nbytes / static_cast<std::uint64_t>(filling.size());
        return true;
    }
    const auto axis = number(arguments.axis, 0, -static_cast<long long>(kMaxDims), static_cast<long long>(kMaxDims));
    if (!axis) {
        return false;
    }
    call.axis = static_cast<std::int8_t>(*axis);
    call.flags = given(arguments.out) ? kShare : kWildcard;
    return call.flags == kWildcard || filling.place_what_comes();
}

bool all_to_all(Filling& filling) {
    return filling.take_x() && filling.take_axis(filling.x.shape.ndim) &&
           filling.resized(1, static_cast<std::uint64_t>(filling.size())) &&
           filling.place(filling.x.shape, filling.x.dtype, std::nullopt);
}

bool take_peer(Filling& filling) {
    constexpr long long kMostTags = INT64_MAX;
    const auto tag = number(filling.arguments.tag, 0, 0, kMostTags);
    filling.call.tag = static_cast<std::uint64_t>(tag.value_or(0));
    return tag && filling.arguments.root != nullptr && filling.take_root(0);
}

bool send(Filling& filling) {
    filling.resolve_to_none();
    return filling.take_x() && take_peer(filling);
}

bool recv(Filling& filling) {
    return take_peer(filling) && (!given(filling.arguments.out) || filling.place_what_comes());
}

using Filler = bool (*)(Filling&);
constexpr std::array<Filler, kCollectiveCount> kFillers{nullptr,        barrier,    all_reduce, reduce,
                                                        reduce_scatter, broadcast,  all_gather, gather,
                                                        scatter,        all_to_all, send,       recv};

}  // namespace

bool sort_arguments(Collective collective, PyObject* const* given_arguments, Py_ssize_t count, PyObject* names,
                    Arguments& arguments) {
    const auto code = static_cast<std::size_t>(collective);
    const Signature& signature = kSignatures[code];
    if (count > signature.positional) {
        return false;
    }
    for (Py_ssize_t i = 0; i < count; ++i) {
        arguments.*signature.parameters[static_cast<std::size_t>(i)].slot = given_arguments[i];
    }
    const Py_ssize_t named = names == nullptr ? 0 : PyTuple_GET_SIZE(names);
    for (Py_ssize_t i = 0; i < named; ++i) {
        // Names in calls are interned; one that is not goes the general way.
        const auto& known = parameter_names[code];
        const auto found = std::find(known.begin(), known.end(), PyTuple_GET_ITEM(names, i));
        if (found == known.end() || found - known.begin() < count) {
            return false;
        }
        arguments.*signature.parameters[static_cast<std::size_t>(found - known.begin())].slot =
            given_arguments[count + i];
    }
    return true;
}

bool plain_call(Collective collective, const Communicator& communicator, const Arguments& arguments, Call& call,
                Ref& result) {
    call.collective = collective;
    Filling filling{communicator, arguments, call, result, {}};
    if (given(arguments.timeout)) {
        const double seconds = PyFloat_CheckExact(arguments.timeout) ? PyFloat_AS_DOUBLE(arguments.timeout) : 0.0;
        if (!(seconds > 0.0) || !std::isfinite(seconds)) {
            return false;
        }
    }
    return kFillers[static_cast<std::size_t>(collective)](filling);
}

bool prepare_plain_calls() {
    for (std::size_t code = 1; code < kOpCount; ++code) {
        op_names[code] = PyUnicode_InternFromString(name(static_cast<Op>(code)));
    }
    for (std::size_t code = 0; code < kCollectiveCount; ++code) {
        const auto& parameters = kSignatures[code].parameters;
        for (std::size_t i = 0; i < parameters.size() && parameters[i].name != nullptr; ++i) {
            parameter_names[code][i] = PyUnicode_InternFromString(parameters[i].name);
        }
    }
    return PyErr_Occurred() == nullptr;
}

}  // namespace aiodist::python
