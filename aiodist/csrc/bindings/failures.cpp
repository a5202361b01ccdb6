#include <exception>
#include <new>
#include <stdexcept>
#include <system_error>

#include "bindings/bindings.hpp"
#include "shm/memory.hpp"

namespace aiodist::python {
namespace {

// Set once at import and kept for the life of the process: requests may end while modules are torn down.
PyObject* make_error_hook = nullptr;
PyObject* make_array_hook = nullptr;
PyObject* make_event_hook = nullptr;

const char* kind_name(FailureKind kind) noexcept {
    switch (kind) {
        case FailureKind::timeout:
            return "timeout";
        case FailureKind::peer_lost:
            return "peer_lost";
        case FailureKind::mismatch:
            return "mismatch";
        case FailureKind::transport:
            return "transport";
        case FailureKind::refused:
            return "refused";
        case FailureKind::closed:
            return "closed";
        case FailureKind::argument:
            return "argument";
        case FailureKind::withdrawn:
            return "withdrawn";
        case FailureKind::communication:
            break;
    }
    return "communication";
}

}  // namespace

void set_hooks(PyObject* make_error, PyObject* make_array, PyObject* make_event) {
    Py_XSETREF(make_error_hook, Py_NewRef(make_error));
    Py_XSETREF(make_array_hook, Py_NewRef(make_array));
    Py_XSETREF(make_event_hook, Py_NewRef(make_event));
}

PyObject* make_event(PyObject* future) { return PyObject_CallOneArg(make_event_hook, future); }

Ref make_exception(const Request& request) {
    stay_out_at_exit();  // what ended the call may be the interpreter's going
    const ComingIn coming;
    const Failure& failure = *request.failure();
    const Call& call = request.call;
    const Communicator& communicator = *request.communicator();
    Ref ranks = Ref::steal(PyTuple_New(static_cast<Py_ssize_t>(failure.ranks.size())));
    for (std::size_t i = 0; ranks && i < failure.ranks.size(); ++i) {
        PyTuple_SET_ITEM(ranks.get(), static_cast<Py_ssize_t>(i), PyLong_FromLong(failure.ranks[i]));
    }
    Ref shape = Ref::steal(shape_tuple(call.shape.dims.data(), call.shape.ndim));
    // The text may hold what another process wrote: bytes that are no UTF-8 are shown, not refused.
    Ref text =
        Ref::steal(PyUnicode_DecodeUTF8(failure.text.data(), static_cast<Py_ssize_t>(failure.text.size()), "replace"));
    if (!ranks || !shape || !text) {
        return {};
    }
    return Ref::steal(PyObject_CallFunction(make_error_hook, "sOsisKsOO", kind_name(failure.kind), text.get(),
                                            communicator.name().c_str(), communicator.rank(), name(call.collective),
                                            static_cast<unsigned long long>(request.seq), name(call.dtype), shape.get(),
                                            ranks.get()));
}

void raise_failure(const Request& request) {
    const Ref error = make_exception(request);
    if (error) {
        PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.get())), error.get());
    }
}

Ref make_received(Request& request) {
    Received& received = request.received;
    Ref owner = Ref::steal(PyCapsule_New(received.data.get(), nullptr,
                                         [](PyObject* capsule) { std::free(PyCapsule_GetPointer(capsule, nullptr)); }));
    if (!owner) {
        return {};
    }
    void* const data = received.data.release();                                                 // the capsule's now
    if (!received.list && received.dtype != DType::raw && received.dtype != DType::bfloat16) {  // numpy knows it
        return Ref::steal(array_over(data, received.arrays.front().shape, received.dtype, owner.leak()));
    }
    Ref bytes = Ref::steal(bytes_array(data, received.nbytes, owner.leak()));
    Ref arrays = Ref::steal(PyList_New(0));
    for (const Received::Array& array : received.arrays) {
        const Ref shape = Ref::steal(shape_tuple(array.shape.data(), array.shape.size()));
        const Ref one = Ref::steal(
            shape ? Py_BuildValue("(KO)", static_cast<unsigned long long>(array.offset), shape.get()) : nullptr);
        if (!one || !arrays || PyList_Append(arrays.get(), one.get()) < 0) {
            return {};
        }
    }
    if (!bytes || !arrays) {
        return {};
    }
    return Ref::steal(PyObject_CallFunction(make_array_hook, "Oiy#OO", bytes.get(), static_cast<int>(received.dtype),
                                            received.text.data(), static_cast<Py_ssize_t>(received.text.size()),
                                            arrays.get(), received.list ? Py_True : Py_False));
}

void translate_exception() noexcept {
    try {
        throw;
    } catch (const NoMemory& error) {
        PyErr_SetString(PyExc_MemoryError, error.what());
    } catch (const std::bad_alloc&) {
        PyErr_NoMemory();
    } catch (const std::system_error& error) {
        Ref arguments = Ref::steal(Py_BuildValue("(is)", error.code().value(), error.what()));
        PyErr_SetObject(PyExc_OSError, arguments.get());
    } catch (const std::exception& error) {
        PyErr_SetString(PyExc_RuntimeError, error.what());
    }
}

bool check_process(const Engine& owner) {
    if (owner.pid() == present_pid()) {
        return true;
    }
    PyErr_Format(PyExc_RuntimeError,
                 "this group belongs to process %d; process %d was forked from it and can not use it (open a world of "
                 "its own with aiodist.init())",
                 static_cast<int>(owner.pid()), static_cast<int>(present_pid()));
    return false;
}

}  // namespace aiodist::python
