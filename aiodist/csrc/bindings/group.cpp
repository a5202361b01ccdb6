// GroupCore: the native half of a Group. all_reduce of a plain array is one call into here; everything else comes
// through start().

#include <algorithm>
#include <array>
#include <new>

#include "bindings/bindings.hpp"
#include "bindings/group_core.hpp"
#include "kernels/reduce.hpp"

namespace aiodist::python {
namespace {

PyTypeObject* group_type = nullptr;
PyObject* slow_name = nullptr;
std::array<PyObject*, kOpCount> op_names{};  // interned; nullptr at 0

// Calls up to this many bytes are short enough (about 30 µs) to be worked on by the caller; larger ones start on the
// engine thread at once.
constexpr std::uint64_t kInlineNbytes = 256 * 1024;
constexpr std::chrono::microseconds kInlineSpin{10};

Clock::duration seconds_to_duration(double seconds) {
    constexpr double kLongest = 1e8;
    return std::chrono::duration_cast<Clock::duration>(
        std::chrono::duration<double>(std::clamp(seconds, 0.0, kLongest)));
}

/// What the caller does for a call it has just issued.
void work_on(Request& request) {
    Communicator& communicator = *request.communicator();
    const std::uint64_t nbytes = request.call.nbytes;
    if (request.done()) {
        return;
    }
    if (is_message(request.call.collective) && nbytes <= kInlineNbytes) {
        // A receive may be long, and a send have found no room, while the thread that asked for it is busy with other
        // things. Most are over before that matters.
        communicator.hand_over(request, false);
        return;
    }
    if ((request.call.flags & kWildcard) != 0) {
        // It may be large, and the thread that asked for it busy with other things when it comes.
        communicator.hand_over(request, running_port() != nullptr);
        PyErr_Clear();
        return;
    }
    if (nbytes <= communicator.tuning().slot_nbytes) {
        if (communicator.mine().posted.load(std::memory_order_relaxed) <= request.seq) {  // queued behind a full ring
            communicator.hand_over(request);
        }
        return;
    }
    if (nbytes > kInlineNbytes || communicator.waits_for_this_thread(request) ||
        !communicator.engine().spin(request, kInlineSpin)) {
        // A thread without a loop most likely blocks in the call next, and is better not disturbed.
        communicator.hand_over(request, running_port() != nullptr);
        PyErr_Clear();
    }
}

/// The operator that a name stands for: literals are interned and found by identity; others are compared.
Op op_of(PyObject* given) noexcept {
    for (std::size_t code = 1; code < kOpCount; ++code) {
        if (op_names[code] == given) {
            return static_cast<Op>(code);
        }
    }
    for (std::size_t code = 1; PyUnicode_CheckExact(given) && code < kOpCount; ++code) {
        if (PyUnicode_CompareWithASCIIString(given, name(static_cast<Op>(code))) == 0) {
            return static_cast<Op>(code);
        }
    }
    return Op::none;
}

bool overlap(const ArrayView& a, const ArrayView& b) noexcept {
    const auto* const first = static_cast<const std::byte*>(a.data);
    const auto* const second = static_cast<const std::byte*>(b.data);
    return first < second + b.nbytes && second < first + a.nbytes;
}

struct AllReduceArguments {
    PyObject* x = nullptr;
    PyObject* op = nullptr;
    PyObject* out = Py_None;
    PyObject* timeout = Py_None;
};

bool parse(PyObject* const* arguments, Py_ssize_t count, PyObject* names, AllReduceArguments& parsed) {
    if (count > 2) {
        PyErr_Format(PyExc_TypeError, "all_reduce() takes at most 2 positional arguments (x, op), not %zd", count);
        return false;
    }
    parsed.x = count > 0 ? arguments[0] : nullptr;
    parsed.op = count == 2 ? arguments[1] : op_names[static_cast<std::size_t>(Op::sum)];
    const Py_ssize_t named = names == nullptr ? 0 : PyTuple_GET_SIZE(names);
    for (Py_ssize_t i = 0; i < named; ++i) {
        PyObject* const name = PyTuple_GET_ITEM(names, i);
        PyObject* const value = arguments[count + i];
        if (PyUnicode_CompareWithASCIIString(name, "out") == 0) {
            parsed.out = value;
        } else if (PyUnicode_CompareWithASCIIString(name, "timeout") == 0) {
            parsed.timeout = value;
        } else if (PyUnicode_CompareWithASCIIString(name, "op") == 0 && count < 2) {
            parsed.op = value;
        } else if (PyUnicode_CompareWithASCIIString(name, "x") == 0 && count == 0) {
            parsed.x = value;
        } else {
            PyErr_Format(PyExc_TypeError, "all_reduce() got an unexpected keyword argument %R", name);
            return false;
        }
    }
    if (parsed.x == nullptr) {
        PyErr_SetString(PyExc_TypeError, "all_reduce() needs an array: x");
        return false;
    }
    return true;
}

/// The call, where everything about it is plain; false (and no exception) where the general path must look at it.
bool plain_call(const AllReduceArguments& parsed, Call& call, Ref& result) {
    ArrayView in;
    const Op op = op_of(parsed.op);
    if (op == Op::none || parsed.timeout != Py_None || !view_array(parsed.x, in) ||
        fold_kernel(in.dtype, op) == nullptr) {
        return false;
    }
    const DType result_type = result_dtype(in.dtype, op);
    if (parsed.out == Py_None) {
        result = Ref::steal(new_array(in.shape, result_type));
        if (!result) {
            PyErr_Clear();
            return false;
        }
    } else {
        ArrayView out;
        const bool fits =
            view_array(parsed.out, out) && out.writeable && out.dtype == result_type &&
            out.shape.ndim == in.shape.ndim &&
            std::equal(out.shape.dims.begin(), out.shape.dims.begin() + out.shape.ndim, in.shape.dims.begin());
        const bool in_place = fits && out.data == in.data && out.dtype == in.dtype;
        if (!fits || (!in_place && overlap(in, out))) {
            return false;
        }
        result = Ref::share(parsed.out);
    }
    ArrayView out;
    (void)view_array(result.get(), out);
    call.collective = Collective::all_reduce;
    call.op = op;
    call.dtype = in.dtype;
    call.itemsize = in.itemsize;
    call.nbytes = in.nbytes;
    call.input = static_cast<const std::byte*>(in.data);
    call.output = static_cast<std::byte*>(out.data);
    call.shape.ndim = in.shape.ndim;
    std::copy_n(in.shape.dims.begin(), in.shape.ndim, call.shape.dims.begin());
    return true;
}

}  // namespace

bool usable(const GroupObject& group) {
    if (group.communicator == nullptr) {
        PyErr_SetString(PyExc_RuntimeError, "this group was never formed");
        return false;
    }
    return check_process((*group.communicator)->engine());
}

PyObject* start(GroupObject& group, Call&& call, Clock::duration timeout, Ref input, Ref result, Ref finish) {
    RequestRef request;
    try {
        request = (*group.communicator)->start(std::move(call), timeout);
    } catch (...) {  // before the call took its number: the caller refuses it
        translate_exception();
        return nullptr;
    }
    PyObject* const future = new_future(request, Ref::share(reinterpret_cast<PyObject*>(&group)), std::move(input),
                                        std::move(result), std::move(finish));
    // What fails here (no descriptor, no thread) is met again, and reported, where the future is waited for.
    (void)guarded([&] { return work_on(*request.get()), 0; }, 0);
    PyErr_Clear();
    return future;
}

void refuse(GroupObject& group, Collective collective, const char* reason) {
    Call call;
    call.collective = collective;
    call.refused = true;
    call.text = reason;
    call.site = call_site();
    const RequestRef request = (*group.communicator)->start(std::move(call), timeout_of(group, Py_None));
    if (!request->done()) {
        (*group.communicator)->hand_over(*request.get());  // nobody will await it
    }
}

/// Lets the call that the exception now set has stopped take its number, so that its peers hear of it.
PyObject* refuse_all_reduce(GroupObject& group) {
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    const Ref text = Ref::steal(value == nullptr ? nullptr : PyObject_Str(value));
    const char* const reason = text ? PyUnicode_AsUTF8(text.get()) : nullptr;
    (void)guarded(
        [&] { return refuse(group, Collective::all_reduce, reason != nullptr ? reason : "it raised an exception"), 0; },
        0);
    PyErr_Clear();
    PyErr_Restore(type, value, traceback);
    return nullptr;
}

Clock::duration timeout_of(const GroupObject& group, PyObject* timeout) {
    return seconds_to_duration(timeout == Py_None ? group.timeout : PyFloat_AsDouble(timeout));
}

PyObject* group_all_reduce(PyObject* self, PyObject* const* arguments, Py_ssize_t count, PyObject* names) {
    auto& group = *reinterpret_cast<GroupObject*>(self);
    AllReduceArguments parsed;
    if (!usable(group)) {
        return nullptr;
    }
    if (!parse(arguments, count, names, parsed)) {
        return refuse_all_reduce(group);
    }
    Call call;
    Ref result;
    if (!plain_call(parsed, call, result)) {
        return PyObject_CallMethodObjArgs(self, slow_name, parsed.x, parsed.op, parsed.out, parsed.timeout, nullptr);
    }
    call.site = call_site();
    PyObject* const future = start(group, std::move(call), seconds_to_duration(group.timeout), Ref::share(parsed.x),
                                   std::move(result), Ref());
    return future != nullptr ? future : refuse_all_reduce(group);
}

bool add_group_type(PyObject* module) {
    slow_name = PyUnicode_InternFromString("_all_reduce");
    for (std::size_t code = 1; code < kOpCount; ++code) {
        op_names[code] = PyUnicode_InternFromString(name(static_cast<Op>(code)));
    }
    group_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&group_spec()));
    return group_type != nullptr &&
           PyModule_AddObjectRef(module, "GroupCore", reinterpret_cast<PyObject*>(group_type)) == 0;
}

}  // namespace aiodist::python
