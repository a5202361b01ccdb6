// What starts calls: the caller's part of the work, refusing, the group's type.

#include <algorithm>
#include <new>

#include "bindings/bindings.hpp"
#include "bindings/group_core.hpp"

namespace aiodist::python {
namespace {

PyTypeObject* group_type = nullptr;

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
    const bool large = nbytes > kAtOnceNbytes || request.large.load(std::memory_order_relaxed);
    if ((is_message(request.call.collective) || (request.call.flags & kWildcard) != 0) && !large) {
        // What is received may be long, and a send have found no room, while the thread that asked for it is busy with
        // other things. Most are over before that matters.
        communicator.hand_over(request, false);
        return;
    }
    if (!large && communicator.is_short(request.call)) {
        if (communicator.mine().posted.load(std::memory_order_relaxed) <= request.seq) {  // queued behind a full ring
            communicator.hand_over(request);
        }
        return;
    }
    if (large || communicator.waits_for_this_thread(request) || !communicator.engine().spin(request, kInlineSpin)) {
        // A thread without a loop most likely blocks in the call next, and is better not disturbed; nor is a loop that
        // awaits one call after the other.
        const bool loop_moves = nbytes > 0 && nbytes <= kLoopNbytes;  // 0: a receiver that takes what comes
        const bool at_once = !loop_moves || communicator.has_handed_over();
        communicator.hand_over(request, at_once && running_port() != nullptr);
        PyErr_Clear();
    }
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

Clock::duration timeout_of(const GroupObject& group, PyObject* timeout) {
    return seconds_to_duration(timeout == Py_None ? group.timeout : PyFloat_AsDouble(timeout));
}

bool is_group(PyObject* object) noexcept { return PyObject_TypeCheck(object, group_type) != 0; }

bool add_group_type(PyObject* module) {
    group_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&group_spec()));
    return group_type != nullptr &&
           PyModule_AddObjectRef(module, "GroupCore", reinterpret_cast<PyObject*>(group_type)) == 0;
}

}  // namespace aiodist::python
