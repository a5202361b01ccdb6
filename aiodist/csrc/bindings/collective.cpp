// Collective: a method of a group. Plain calls start here without Python; all others, and what is wrong with a call,
// are the business of the function that it wraps.

#include "bindings/plain.hpp"
// after Python.h, which it needs and does not include
#include <structmember.h>

namespace aiodist::python {
namespace {

struct CollectiveObject {
    PyObject_HEAD vectorcallfunc vectorcall;
    Collective collective;
    bool plain;         // there is a native form
    PyObject* general;  // takes the same arguments
    PyObject* dict;     // the function's name, documentation and annotations, which functools.wraps puts here
    PyObject* weak_references;
};

CollectiveObject& as_collective(PyObject* self) { return *reinterpret_cast<CollectiveObject*>(self); }

/// Lets the call that the exception now set has stopped take its place, so that its peers hear of it.
void refuse_for_error(GroupObject& group, Collective collective) {
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    const Ref text = Ref::steal(PyUnicode_FromFormat("%s: %S", Py_TYPE(value)->tp_name, value));
    const char* const reason = text ? PyUnicode_AsUTF8(text.get()) : nullptr;
    (void)guarded([&] { return refuse(group, collective, reason != nullptr ? reason : Py_TYPE(value)->tp_name), 0; },
                  0);
    PyErr_Clear();
    PyErr_Restore(type, value, traceback);
}

/// True where the exception now set comes from calling the function with what it does not take, not from inside it:
/// then no frame has seen it.
bool raised_by_calling() {
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    const bool by_calling = traceback == nullptr && PyErr_GivenExceptionMatches(type, PyExc_TypeError) != 0;
    PyErr_Restore(type, value, traceback);
    return by_calling;
}

/// What the function itself finds wrong it refuses itself.
PyObject* call_general(const CollectiveObject& method, PyObject* const* arguments, std::size_t count, PyObject* names) {
    PyObject* const future = PyObject_Vectorcall(method.general, arguments, count, names);
    const bool has_group = PyVectorcall_NARGS(count) > 0 && is_group(arguments[0]);
    if (future == nullptr && has_group && !is_message(method.collective) && raised_by_calling()) {
        auto& group = *reinterpret_cast<GroupObject*>(arguments[0]);
        if (group.communicator != nullptr && (*group.communicator)->engine().pid() == present_pid()) {
            refuse_for_error(group, method.collective);
        }
    }
    return future;
}

PyObject* call(PyObject* callable, PyObject* const* arguments, std::size_t flagged, PyObject* names) {
    const CollectiveObject& method = as_collective(callable);
    const Py_ssize_t count = PyVectorcall_NARGS(flagged);
    if (!method.plain || count == 0 || !is_group(arguments[0])) {
        return call_general(method, arguments, flagged, names);
    }
    auto& group = *reinterpret_cast<GroupObject*>(arguments[0]);
    if (!usable(group)) {
        return nullptr;
    }
    Arguments sorted;
    Call native;
    Ref result;
    if (!sort_arguments(method.collective, arguments + 1, count - 1, names, sorted) ||
        !plain_call(method.collective, **group.communicator, sorted, native, result)) {
        return call_general(method, arguments, flagged, names);
    }
    native.site = guarded([] { return call_site(); }, 0U);  // no memory for one more: the text says less
    PyErr_Clear();
    PyObject* const timeout = sorted.timeout != nullptr ? sorted.timeout : Py_None;
    PyObject* const future =
        start(group, std::move(native), timeout_of(group, timeout), Ref::share(sorted.x), std::move(result), Ref());
    if (future == nullptr && !is_message(method.collective)) {
        refuse_for_error(group, method.collective);
    }
    return future;
}

int init(PyObject* self, PyObject* arguments, PyObject*) {
    int collective = 0, plain = 0;
    PyObject* general = nullptr;
    if (!PyArg_ParseTuple(arguments, "iOp:Collective", &collective, &general, &plain)) {
        return -1;
    }
    if (collective < 1 || collective >= static_cast<int>(kCollectiveCount) || PyCallable_Check(general) == 0) {
        PyErr_SetString(PyExc_ValueError, "Collective() takes the number of a collective and its general form");
        return -1;
    }
    CollectiveObject& method = as_collective(self);
    method.vectorcall = call;
    method.collective = static_cast<Collective>(collective);
    method.plain = plain != 0;
    Py_XSETREF(method.general, Py_NewRef(general));
    return 0;
}

PyObject* bind(PyObject* self, PyObject* object, PyObject*) {
    return object == nullptr ? Py_NewRef(self) : PyMethod_New(self, object);
}

int traverse(PyObject* self, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(as_collective(self).general);
    Py_VISIT(as_collective(self).dict);
    return 0;
}

int clear(PyObject* self) {
    Py_CLEAR(as_collective(self).general);
    Py_CLEAR(as_collective(self).dict);
    return 0;
}

void dealloc(PyObject* self) {
    PyObject_GC_UnTrack(self);
    if (as_collective(self).weak_references != nullptr) {
        PyObject_ClearWeakRefs(self);
    }
    (void)clear(self);
    PyTypeObject* const type = Py_TYPE(self);
    type->tp_free(self);
    Py_DECREF(type);
}

/// Copied and pickled by its name, as functions are.
PyObject* reduce(PyObject* self, PyObject*) { return PyObject_GetAttrString(self, "__qualname__"); }

PyMethodDef methods[] = {{"__reduce__", reduce, METH_NOARGS, nullptr}, {nullptr, nullptr, 0, nullptr}};
PyMemberDef members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(CollectiveObject, vectorcall), READONLY, nullptr},
    {"__dictoffset__", T_PYSSIZET, offsetof(CollectiveObject, dict), READONLY, nullptr},
    {"__weaklistoffset__", T_PYSSIZET, offsetof(CollectiveObject, weak_references), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr}};
PyGetSetDef properties[] = {{"__dict__", PyObject_GenericGetDict, PyObject_GenericSetDict, nullptr, nullptr},
                            {nullptr, nullptr, nullptr, nullptr, nullptr}};
PyType_Slot slots[] = {
    {Py_tp_doc, const_cast<char*>("A collective as a method of groups: plain calls start natively.")},
    {Py_tp_new, reinterpret_cast<void*>(PyType_GenericNew)},
    {Py_tp_init, reinterpret_cast<void*>(init)},
    {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
    {Py_tp_descr_get, reinterpret_cast<void*>(bind)},
    {Py_tp_traverse, reinterpret_cast<void*>(traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(clear)},
    {Py_tp_dealloc, reinterpret_cast<void*>(dealloc)},
    {Py_tp_methods, methods},
    {Py_tp_members, members},
    {Py_tp_getset, properties},
    {0, nullptr}};
PyType_Spec spec = {"aiodist._core.Collective", sizeof(CollectiveObject), 0,
                    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_METHOD_DESCRIPTOR,
                    slots};

}  // namespace

bool add_collective_type(PyObject* module) {
    const Ref type = Ref::steal(PyType_FromSpec(&spec));
    return type && prepare_plain_calls() && PyModule_AddObjectRef(module, "Collective", type.get()) == 0;
}

}  // namespace aiodist::python
