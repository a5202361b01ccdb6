// TensorFuture: a call in flight, awaitable any number of times from any task, loop or thread.

#include <algorithm>
#include <new>
#include <thread>

#include "bindings/future_object.hpp"
// after Python.h, which it needs and does not include
#include <structmember.h>

namespace aiodist::python {
namespace {

// What result() polls with the GIL before it lets other threads run.
constexpr std::chrono::microseconds kBlockingSpin{5};
PyTypeObject* future_type = nullptr;

/// Makes what the future resolves to; false with an exception set if that fails.
bool resolve(FutureObject& self) {
    if (!self.result) {
        self.result = make_received(*self.request.get());
        if (!self.result) {
            return false;
        }
    }
    if (self.finish) {
        stay_out_at_exit();
        const ComingIn coming;
        Ref finished = Ref::steal(PyObject_CallOneArg(self.finish.get(), self.result.get()));
        if (!finished) {
            return false;
        }
        self.result = std::move(finished);
        self.finish = Ref();
    }
    self.input = Ref();
    return true;
}

/// Keeps the exception that is set, to raise it again at every await.
void keep_error(FutureObject& self) {
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    if (traceback != nullptr) {
        (void)PyException_SetTraceback(value, traceback);
    }
    self.error = Ref::steal(value);
    Py_XDECREF(type);
    Py_XDECREF(traceback);
}

}  // namespace

bool is_small(const Request& request) {
    return request.communicator()->is_short(request.call) && !request.large.load(std::memory_order_relaxed);
}

void let_go(Request& request, bool loop_watches) {
    Communicator& communicator = *request.communicator();
    if (loop_watches && is_small(request)) {
        communicator.engine().watch(request.deadline);
    } else {
        communicator.hand_over(request);
    }
}

void give_up_if_unwanted(Request& request) {
    if (request.call.collective == Collective::recv && !request.done() && !request.has_waiters()) {
        request.give_up();
        (void)request.communicator()->progress();
    }
}

PyObject* value_of(FutureObject& self) {
    const Request& request = *self.request.get();
    if (request.state() == Request::State::failed) {
        raise_failure(request);
        return nullptr;
    }
    while (self.resolving) {  // another thread; it only copies or makes objects, and never waits
        const WithoutGil released;
        std::this_thread::yield();
    }
    if (!self.resolved && !self.error) {
        self.resolving = true;
        self.resolved = resolve(self);
        if (!self.resolved) {
            keep_error(self);
        }
        self.resolving = false;
    }
    if (self.error) {
        PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(self.error.get())), self.error.get());
    }
    return self.resolved ? self.result.get() : nullptr;
}

bool look(FutureObject& future) {
    Request& request = *future.request.get();
    if (!request.done()) {
        (void)request.communicator()->progress();
    }
    if (!request.done()) {
        request.communicator()->engine().watch(
            request.deadline);  // a future that is only polled has deadlines and deaths too
    }
    return request.done();
}

namespace {

void future_dealloc(PyObject* self) {
    FutureObject& future = as_future(self);
    if (future.weak_references != nullptr) {
        PyObject_ClearWeakRefs(self);
    }
    PyObject *type_before, *value_before, *traceback_before;  // this may run while an exception is on its way
    PyErr_Fetch(&type_before, &value_before, &traceback_before);
    Request* const request = future.request.get();
    const bool ours = request != nullptr && request->communicator()->engine().pid() == present_pid();
    if (ours) {
        give_up_if_unwanted(*request);
    }
    if (ours && !request->done()) {
        // Nobody holds the future, but the call goes on: its arrays live until it is done.
        Ref kept = Ref::steal(PyTuple_Pack(3, future.group.get(), future.input ? future.input.get() : Py_None,
                                           future.result ? future.result.get() : Py_None));
        LoopPort* const port = guarded([] { return notifier_port(); }, static_cast<LoopPort*>(nullptr));
        std::uint64_t id = 0;
        if (port == nullptr || !kept) {
            PyErr_WriteUnraisable(nullptr);
            (void)kept.leak();  // rather kept for ever than written after it was freed
        } else if (wait_on(port, *request, {Waiting::Kind::drop, std::move(kept), {}, false}, id)) {
            let_go(*request, false);
        }
    }
    if (request != nullptr && !ours) {
        (void)future.request.leak();  // the parent's: its locks may be held for ever in this child
    }
    future.~FutureObject();
    PyErr_Restore(type_before, value_before, traceback_before);
    PyTypeObject* const type = Py_TYPE(self);
    type->tp_free(self);
    Py_DECREF(type);
}

// --- Methods ---

PyObject* future_done(PyObject* self, PyObject*) {
    if (!check_process(as_future(self).request->communicator()->engine())) {
        return nullptr;
    }
    return PyBool_FromLong(look(as_future(self)) ? 1 : 0);
}

PyObject* future_cancelled(PyObject* self, PyObject*) {
    const Request& request = *as_future(self).request.get();
    return PyBool_FromLong(request.state() == Request::State::failed &&
                           request.failure()->kind == FailureKind::withdrawn);
}

PyObject* raise_not_ready(const char* what) {
    const Ref errors = Ref::steal(PyImport_ImportModule("aiodist.errors"));
    const Ref type = errors ? Ref::steal(PyObject_GetAttrString(errors.get(), "NotReadyError")) : Ref();
    if (type) {
        PyErr_SetString(type.get(), what);
    }
    return nullptr;
}

PyObject* future_exception(PyObject* self, PyObject*) {
    FutureObject& future = as_future(self);
    if (!check_process(future.request->communicator()->engine())) {
        return nullptr;
    }
    if (!look(future)) {
        return raise_not_ready("the call is still in flight");
    }
    if (future.request->state() == Request::State::done) {
        if (value_of(future) == nullptr) {  // what makes the result of it failed
            PyErr_Clear();
        }
        return Py_NewRef(future.error ? future.error.get() : Py_None);
    }
    return make_exception(*future.request.get()).leak();
}

/// Waits without the GIL, letting signals through. False with an exception set if it gives up.
bool block(FutureObject& future, TimePoint until) {
    Request& request = *future.request.get();
    Engine& engine = request.communicator()->engine();
    struct Blocked {
        explicit Blocked(Request& awaited) : request_(awaited) {
            request_.blocked.fetch_add(1, std::memory_order_relaxed);
        }
        ~Blocked() {
            request_.blocked.fetch_sub(1, std::memory_order_relaxed);  // under the GIL, as its reader is
            give_up_if_unwanted(request_);
        }
        Request& request_;
    };
    const Blocked blocked(request);
    while (!request.done()) {
        {
            const WithoutGil released;
            (void)engine.wait(request, std::min(until, Clock::now() + kSlice));
        }
        if (request.done()) {
            break;
        }
        if (PyErr_CheckSignals() < 0) {
            return false;
        }
        if (Clock::now() >= until) {
            PyErr_Format(PyExc_TimeoutError, "gave up waiting for %s; %s",
                         request.communicator()->describe(request).c_str(),
                         request.call.collective == Collective::recv
                             ? "if nobody else waits for it and no message is there, it is withdrawn"
                             : "the call goes on");
            return false;
        }
    }
    return true;
}

PyObject* future_result_body(PyObject* self, PyObject* const* arguments, Py_ssize_t count, PyObject* names) {
    FutureObject& future = as_future(self);
    Request& request = *future.request.get();
    const Ref keep = Ref::share(self);
    if (request.done()) {
        return Py_XNewRef(value_of(future));
    }
    const Py_ssize_t named = names == nullptr ? 0 : PyTuple_GET_SIZE(names);
    if (count + named > 1 ||
        (named == 1 && PyUnicode_CompareWithASCIIString(PyTuple_GET_ITEM(names, 0), "timeout") != 0)) {
        PyErr_SetString(PyExc_TypeError, "result() takes one argument: timeout");
        return nullptr;
    }
    TimePoint until = TimePoint::max();
    if (count + named == 1 && arguments[0] != Py_None) {
        const double seconds = PyFloat_AsDouble(arguments[0]);
        if (PyErr_Occurred()) {
            return nullptr;
        }
        if (!(seconds >= 0.0)) {  // negative, or no number at all
            PyErr_Format(PyExc_ValueError, "timeout must be a number of seconds from 0 on, not %R", arguments[0]);
            return nullptr;
        }
        constexpr double kLongest = 1e8;
        until = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                   std::chrono::duration<double>(std::clamp(seconds, 0.0, kLongest)));
    }
    Communicator& communicator = *request.communicator();
    if (!check_process(communicator.engine())) {
        return nullptr;
    }
    (void)communicator.progress();
    if (const auto rank = request.done() ? std::nullopt : communicator.waits_for_this_thread(request)) {
        PyErr_Format(PyExc_RuntimeError,
                     "%s.result() would wait for ever: rank %d lives in this thread and has not made the call. Use "
                     "`await` in place of .result()",
                     communicator.describe(request).c_str(), *rank);
        return nullptr;
    }
    if (!communicator.engine().spin(request, kBlockingSpin) && !block(future, until)) {
        return nullptr;
    }
    return Py_XNewRef(value_of(future));
}

PyObject* future_result(PyObject* self, PyObject* const* arguments, Py_ssize_t count, PyObject* names) {
    return guarded([&] { return future_result_body(self, arguments, count, names); }, static_cast<PyObject*>(nullptr));
}

PyObject* attribute_of_result(PyObject* self, const char* attribute) {
    FutureObject& future = as_future(self);
    if (!future.resolved && future.request->done()) {
        if (value_of(future) == nullptr) {
            return nullptr;
        }
    }
    if ((!future.resolved && future.finish) || !future.result) {
        return raise_not_ready("not known before the call is done");
    }
    if (future.result.get() == Py_None) {
        return raise_not_ready("this call has no result");
    }
    return PyObject_GetAttrString(future.result.get(), attribute);
}

PyObject* future_shape(PyObject* self, void*) { return attribute_of_result(self, "shape"); }
PyObject* future_dtype(PyObject* self, void*) { return attribute_of_result(self, "dtype"); }
PyObject* future_device(PyObject*, void*) { return PyUnicode_FromString("cpu"); }

PyObject* future_event(PyObject* self, void*) { return make_event(self); }

PyObject* future_repr(PyObject* self) {
    const Request& request = *as_future(self).request.get();
    const char* const state = request.state() == Request::State::pending ? "pending"
                              : request.state() == Request::State::done  ? "done"
                                                                         : "failed";
    return PyUnicode_FromFormat("<TensorFuture %s: %s>", state, request.communicator()->describe(request).c_str());
}

// --- Types ---

PyMethodDef future_methods[] = {
    {"__class_getitem__", Py_GenericAlias, METH_O | METH_CLASS,
     PyDoc_STR("TensorFuture[np.ndarray], for annotations.")},
    {"done", future_done, METH_NOARGS,
     PyDoc_STR("done($self, /)\n--\n\nReturn True once the result or the error is there. Never blocks.")},
    {"cancelled", future_cancelled, METH_NOARGS,
     PyDoc_STR(
         "cancelled($self, /)\n--\n\nReturn True for a receive that was withdrawn, since nobody waited for it any "
         "more. A collective is not cancelled, since peers are in it; only waits for it are.")},
    {"exception", future_exception, METH_NOARGS,
     PyDoc_STR("exception($self, /)\n--\n\nReturn the error of a call that failed, None if it succeeded.\n\n"
               "Raises:\n    NotReadyError: the call is still in flight.")},
    {"result", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(future_result)), METH_FASTCALL | METH_KEYWORDS,
     PyDoc_STR(
         "result($self, /, timeout=None)\n--\n\nBlock this thread until the call is done and return its result.\n\n"
         "Args:\n    timeout: Seconds to wait; None waits as long as the call itself may take.\n\n"
         "Raises:\n    TimeoutError: `timeout` is over; the call goes on.\n    RuntimeError: a rank that this call "
         "waits for lives in "
         "this thread.\n    AiodistError: the call failed.")},
    {"add_done_callback", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(future_add_done_callback)),
     METH_VARARGS | METH_KEYWORDS,
     PyDoc_STR("add_done_callback($self, callback, /, *, context=None)\n--\n\nCall `callback(future)` once the call is "
               "done: on the running "
               "loop if there is one, else on a notifier thread.")},
    {"remove_done_callback", future_remove_done_callback, METH_O,
     PyDoc_STR("remove_done_callback($self, callback, /)\n--\n\nForget callbacks equal to `callback` added on this "
               "loop; return how many.")},
    {nullptr, nullptr, 0, nullptr}};
PyGetSetDef future_properties[] = {
    {"shape", future_shape, nullptr, "Shape of the result; raises NotReadyError until it is known.", nullptr},
    {"dtype", future_dtype, nullptr, "Element type of the result; raises NotReadyError until it is known.", nullptr},
    {"device", future_device, nullptr, "Where the result lies.", nullptr},
    {"event", future_event, nullptr,
     "The event of that device which the result is complete with: see aiodist.devices.base.Event.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};
PyMemberDef future_members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(FutureObject, weak_references), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr}};
PyType_Slot future_slots[] = {
    {Py_tp_doc, const_cast<char*>("A collective in flight. `await` it any number of times, from any task or loop; each "
                                  "gets the same result. Giving "
                                  "up an await leaves the collective running: its peers are in it.")},
    {Py_tp_dealloc, reinterpret_cast<void*>(future_dealloc)},
    {Py_tp_repr, reinterpret_cast<void*>(future_repr)},
    {Py_tp_methods, future_methods},
    {Py_tp_getset, future_properties},
    {Py_tp_members, future_members},
    {Py_am_await, reinterpret_cast<void*>(future_await)},
    {0, nullptr}};
PyType_Spec future_spec = {"aiodist._core.TensorFuture", sizeof(FutureObject), 0,
                           Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, future_slots};

}  // namespace

PyObject* new_future(RequestRef request, Ref group, Ref input, Ref result, Ref finish) {
    PyObject* const object =
        future_type->tp_alloc(future_type, 0);  // zeroed, which is what the members' default constructors leave
    if (object != nullptr) {
        FutureObject& future = as_future(object);
        future.request = std::move(request);
        future.group = std::move(group);
        future.input = std::move(input);
        future.result = std::move(result);
        future.finish = std::move(finish);
    }
    return object;
}

bool add_future_type(PyObject* module) {
    future_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&future_spec));
    return future_type != nullptr && add_awaiter_type() &&
           PyModule_AddObjectRef(module, "TensorFuture", reinterpret_cast<PyObject*>(future_type)) == 0;
}

}  // namespace aiodist::python
