// Callbacks of a TensorFuture: on the loop that they were added on, or on the notifier thread.

#include "bindings/future_object.hpp"

namespace aiodist::python {
namespace {

PyObject* in_context(PyObject* callback, PyObject* context) {
    if (context == nullptr || context == Py_None) {
        return Py_NewRef(callback);
    }
    const Ref functools = Ref::steal(PyImport_ImportModule("functools"));
    const Ref run = Ref::steal(PyObject_GetAttrString(context, "run"));
    return functools && run ? PyObject_CallMethod(functools.get(), "partial", "OO", run.get(), callback) : nullptr;
}

PyObject* call_now(PyObject* self, PyObject* callback, LoopPort* port) {
    if (port == nullptr) {
        const Ref outcome = Ref::steal(PyObject_CallOneArg(callback, self));
        if (!outcome) {
            PyErr_WriteUnraisable(callback);
        }
        Py_RETURN_NONE;
    }
    const Ref events = Ref::steal(PyImport_ImportModule("asyncio"));
    const Ref loop = events ? Ref::steal(PyObject_CallMethod(events.get(), "get_running_loop", nullptr)) : Ref();
    const Ref handle = loop ? Ref::steal(PyObject_CallMethod(loop.get(), "call_soon", "OO", callback, self)) : Ref();
    if (!handle) {
        return nullptr;
    }
    Py_RETURN_NONE;
}

PyObject* future_add_done_callback_body(PyObject* self, PyObject* arguments, PyObject* keywords) {
    static const char* const kNames[] = {"", "context", nullptr};
    PyObject* given = nullptr;
    PyObject* context = nullptr;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "O|$O:add_done_callback", const_cast<char**>(kNames), &given,
                                     &context)) {
        return nullptr;
    }
    FutureObject& future = as_future(self);
    Request& request = *future.request.get();
    if (!check_process(request.communicator()->engine())) {
        return nullptr;
    }
    Ref callback = Ref::steal(in_context(given, context));
    if (!callback) {
        return nullptr;
    }
    LoopPort* const loop_port = running_port();
    if (PyErr_Occurred()) {
        return nullptr;
    }
    if (look(future)) {
        return call_now(self, callback.get(), loop_port);
    }
    LoopPort* const port = loop_port != nullptr ? loop_port : notifier_port();
    std::uint64_t id = 0;
    if (port == nullptr) {
        return nullptr;
    }
    if (!wait_on(port, request,
                 {Waiting::Kind::call, callback, Ref::share(self), loop_port != nullptr && is_small(request)}, id)) {
        return call_now(self, callback.get(), loop_port);
    }
    (void)request.communicator()->progress();  // the last look
    let_go(request, loop_port != nullptr);
    Py_RETURN_NONE;
}

}  // namespace

PyObject* future_add_done_callback(PyObject* self, PyObject* arguments, PyObject* keywords) {
    return guarded([&] { return future_add_done_callback_body(self, arguments, keywords); },
                   static_cast<PyObject*>(nullptr));
}

PyObject* future_remove_done_callback(PyObject* self, PyObject* callback) {
    Request& request = *as_future(self).request.get();
    std::size_t removed = 0;
    if (LoopPort* const port = running_port()) {
        removed = remove_callbacks(port, request, self, callback);
    }
    return PyErr_Occurred() ? nullptr : PyLong_FromSize_t(removed);
}

}  // namespace aiodist::python
