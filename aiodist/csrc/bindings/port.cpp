// Completions on their way into Python: a port an event loop, and one for the notifier thread.

#include <poll.h>

#include <atomic>
#include <unordered_map>
#include <vector>

#include "bindings/bindings.hpp"

namespace aiodist::python {

/// What one loop (or the notifier) waits for. A native thread sees only the Port inside; the table is under the GIL.
class LoopPort {
 public:
    std::shared_ptr<Port> port = std::make_shared<Port>();
    Ref loop;  // a weak reference; empty for the notifier
    PyObject* self = nullptr;
    std::unordered_map<std::uint64_t, Waiting> table;
    std::uint64_t next_id = 1;
    SpinBudget budget;
    std::vector<std::uint64_t> ids;
    std::vector<std::pair<std::uint64_t, RequestRef>>
        undecided;                   // receivers that hear the bell while they do not know their size
    std::shared_ptr<Engine> engine;  // whose bell the loop watches
    std::atomic<bool> stopping{false};
};

namespace {

struct PortObject {
    PyObject_HEAD LoopPort* port;
};

PyTypeObject* port_type = nullptr;
PyObject* ports = nullptr;             // WeakKeyDictionary: loop -> port object
PyObject* get_running_loop = nullptr;  // asyncio._get_running_loop
PyObject* notifier_object = nullptr;
PyObject* notifier_thread = nullptr;
LoopPort* last_port = nullptr;  // of the last loop that asked; checked before it is trusted

bool ends_the_program() {
    return PyErr_ExceptionMatches(PyExc_SystemExit) != 0 || PyErr_ExceptionMatches(PyExc_KeyboardInterrupt) != 0;
}

/// Tells the loop of what a callback raised, as asyncio does; the notifier thread has only the interpreter to tell.
void report(const LoopPort& port, PyObject* context) {
    PyObject* const loop = port.loop ? PyWeakref_GetObject(port.loop.get()) : Py_None;
    if (loop == Py_None) {
        PyErr_WriteUnraisable(context);
        return;
    }
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    if (traceback != nullptr) {
        PyException_SetTraceback(value, traceback);
    }
    const Ref told = Ref::steal(PyObject_CallMethod(loop, "call_exception_handler", "({s:s,s:O})", "message",
                                                    "exception in a callback of a TensorFuture", "exception", value));
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(traceback);
    if (!told) {
        PyErr_WriteUnraisable(context);
    }
}

void wake_future(const LoopPort& port, PyObject* future) {
    const Ref done = Ref::steal(PyObject_CallMethod(future, "done", nullptr));
    if (done && PyObject_IsTrue(done.get()) == 0) {
        const Ref set = Ref::steal(PyObject_CallMethod(future, "set_result", "O", Py_None));
    }
    if (PyErr_Occurred()) {
        report(port, future);
    }
}

/// A waiter that is over is no sleeper any more.
void hush(const LoopPort& port, const Waiting& waiting) {
    if (waiting.hears_bell) {
        port.engine->sleepers_add(-1);
    }
}

/// Wakes and calls back whoever waited for what is done; false with an exception set where a callback ends the program.
bool drain(LoopPort& port) {
    std::vector<std::uint64_t> ids;
    ids.swap(port.ids);
    port.port->take(ids);
    if (stays_out_at_exit()) {
        ids.clear();  // a daemon thread's loop: what it would print meets the locks of a finalizing interpreter
    }
    PyObject *type = nullptr, *value = nullptr, *traceback = nullptr;
    for (const std::uint64_t id : ids) {
        const auto found = port.table.find(id);
        if (found == port.table.end()) {
            continue;  // given up meanwhile
        }
        const Waiting waiting = std::move(found->second);
        port.table.erase(found);
        hush(port, waiting);
        if (waiting.kind == Waiting::Kind::wake) {
            wake_future(port, waiting.target.get());
        } else if (waiting.kind == Waiting::Kind::call) {
            const Ref outcome =
                Ref::steal(PyObject_CallFunctionObjArgs(waiting.target.get(), waiting.future.get(), nullptr));
            if (!outcome && ends_the_program() && type == nullptr) {
                PyErr_Fetch(&type, &value, &traceback);  // after the others have been told
            } else if (!outcome) {
                report(port, waiting.target.get());
            }
        }
    }
    port.ids.swap(ids);
    PyErr_Restore(type, value, traceback);
    return type == nullptr;
}

/// A receiver that has turned out to be large is the engine's: the bell of every segment is nothing to its loop.
void decide(LoopPort& port) {
    std::erase_if(port.undecided, [&port](const auto& entry) {
        const auto& [id, request] = entry;
        const bool large = request->large.load(std::memory_order_relaxed);  // a hint
        const auto found = port.table.find(id);
        if (large && found != port.table.end() && found->second.hears_bell) {
            found->second.hears_bell = false;
            port.engine->sleepers_add(-1);
        }
        return large || request->done() || found == port.table.end();
    });
}

PyObject* on_completion(PyObject* self, PyObject*) {
    return drain(*reinterpret_cast<PortObject*>(self)->port) ? Py_NewRef(Py_None) : nullptr;
}

PyObject* on_bell(PyObject* self, PyObject*) {
    LoopPort& port = *reinterpret_cast<PortObject*>(self)->port;
    if (port.engine->pid() == present_pid()) {
        port.engine->on_bell();
        decide(port);
        if (!drain(port)) {
            return nullptr;
        }
    }
    Py_RETURN_NONE;
}

/// The notifier thread's body: waits without the GIL, runs callbacks with it.
PyObject* serve(PyObject* self, PyObject*) {
    LoopPort& port = *reinterpret_cast<PortObject*>(self)->port;
    come_in_at_exit();
    while (!port.stopping.load(std::memory_order_acquire)) {  // pairs with stop_notifier()
        {
            const WithoutGil released;
            pollfd entry{port.port->fd(), POLLIN, 0};
            (void)::poll(&entry, 1, 1000);
        }
        if (!drain(port)) {
            PyErr_WriteUnraisable(self);  // there is no loop here that it could end
        }
    }
    Py_RETURN_NONE;
}

void port_dealloc(PyObject* self) {
    auto* const object = reinterpret_cast<PortObject*>(self);
    if (object->port != nullptr) {
        if (object->port == last_port) {
            last_port = nullptr;
        }
        if (object->port->engine && object->port->engine->pid() == present_pid()) {
            for (const auto& [id, waiting] : object->port->table) {
                hush(*object->port, waiting);
            }
        }
        delete object->port;
    }
    PyTypeObject* const type = Py_TYPE(self);
    type->tp_free(self);
    Py_DECREF(type);
}

PyMethodDef port_methods[] = {{"on_completion", on_completion, METH_NOARGS, nullptr},
                              {"on_bell", on_bell, METH_NOARGS, nullptr},
                              {"serve", serve, METH_NOARGS, nullptr},
                              {nullptr, nullptr, 0, nullptr}};
PyType_Slot port_slots[] = {
    {Py_tp_dealloc, reinterpret_cast<void*>(port_dealloc)}, {Py_tp_methods, port_methods}, {0, nullptr}};
PyType_Spec port_spec = {"aiodist._core.Port", sizeof(PortObject), 0,
                         Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, port_slots};

Ref make_port() {
    Ref object = Ref::steal(port_type->tp_alloc(port_type, 0));
    if (object) {
        auto* const port = new LoopPort;
        port->self = object.get();
        port->engine = engine();
        reinterpret_cast<PortObject*>(object.get())->port = port;
    }
    return object;
}

bool watch(PyObject* loop, int fd, PyObject* port, const char* method) {
    const Ref callback = Ref::steal(PyObject_GetAttrString(port, method));
    const Ref done = callback ? Ref::steal(PyObject_CallMethod(loop, "add_reader", "iO", fd, callback.get())) : Ref();
    return static_cast<bool>(done);
}

LoopPort* port_of(PyObject* loop) {
    const Ref known = Ref::steal(PyObject_CallMethod(ports, "get", "O", loop));
    if (!known) {
        return nullptr;
    }
    if (known.get() != Py_None) {
        LoopPort* const port = reinterpret_cast<PortObject*>(known.get())->port;
        if (port->engine == engine()) {
            return port;
        }
    }
    Ref made = make_port();
    if (!made) {
        return nullptr;
    }
    LoopPort* const port = reinterpret_cast<PortObject*>(made.get())->port;
    port->loop = Ref::steal(PyWeakref_NewRef(loop, nullptr));
    if (!port->loop || PyObject_SetItem(ports, loop, made.get()) < 0 ||
        !watch(loop, port->port->fd(), made.get(), "on_completion") ||
        !watch(loop, port->engine->bell_fd(), made.get(), "on_bell")) {
        return nullptr;
    }
    return port;
}

/// The notifier's port if there is one of this process.
LoopPort* present_notifier() noexcept {
    LoopPort* const port = notifier_object == nullptr ? nullptr : reinterpret_cast<PortObject*>(notifier_object)->port;
    return port != nullptr && port->engine->pid() == present_pid() ? port : nullptr;
}

}  // namespace

LoopPort* running_port() {
    const Ref loop = Ref::steal(PyObject_CallNoArgs(get_running_loop));
    if (!loop || loop.get() == Py_None) {
        return nullptr;
    }
    if (last_port != nullptr && last_port->engine == engine() &&
        PyWeakref_GetObject(last_port->loop.get()) == loop.get()) {
        return last_port;
    }
    return last_port = port_of(loop.get());
}

LoopPort* notifier_port() {
    if (LoopPort* const port = present_notifier()) {
        return port;
    }
    // A forked child has no notifier thread: it gets a port and a thread of its own.
    const Ref threading = Ref::steal(PyImport_ImportModule("threading"));
    Ref made = make_port();
    const Ref body = made ? Ref::steal(PyObject_GetAttrString(made.get(), "serve")) : Ref();
    const Ref type = threading ? Ref::steal(PyObject_GetAttrString(threading.get(), "Thread")) : Ref();
    const Ref arguments = Ref::steal(PyTuple_New(0));
    const Ref keywords = body ? Ref::steal(Py_BuildValue("{s:O,s:s,s:O}", "target", body.get(), "name",
                                                         "aiodist-notifier", "daemon", Py_True))
                              : Ref();
    Ref thread = type && keywords ? Ref::steal(PyObject_Call(type.get(), arguments.get(), keywords.get())) : Ref();
    if (!thread) {
        return nullptr;
    }
    // What ran above may have let another thread in, and start() does: there must be one notifier, known before it
    // runs.
    if (LoopPort* const port = present_notifier()) {
        return port;
    }
    LoopPort* const port = reinterpret_cast<PortObject*>(made.get())->port;
    notifier_object = made.leak();
    notifier_thread = Py_NewRef(thread.get());
    const Ref started = Ref::steal(PyObject_CallMethod(thread.get(), "start", nullptr));
    if (!started) {
        Py_CLEAR(notifier_object);
        Py_CLEAR(notifier_thread);
        return nullptr;
    }
    return port;
}

void stop_notifier() {
    if (notifier_object == nullptr) {
        return;
    }
    LoopPort* const port = reinterpret_cast<PortObject*>(notifier_object)->port;
    if (port->engine->pid() != present_pid()) {
        return;
    }
    port->stopping.store(true, std::memory_order_release);  // pairs with serve()
    port->port->push(0);
    const Ref joined = Ref::steal(PyObject_CallMethod(notifier_thread, "join", "d", 2.0));
    if (!joined) {
        PyErr_WriteUnraisable(notifier_thread);
    }
    Py_CLEAR(notifier_object);
    Py_CLEAR(notifier_thread);
}

bool wait_on(LoopPort* port, Request& request, Waiting waiting, std::uint64_t& id) {
    id = port->next_id++;
    const bool hears_bell = waiting.hears_bell;
    port->table.emplace(id, std::move(waiting));
    if (hears_bell) {
        port->engine->sleepers_add(1);  // before the last look, which the caller takes
    }
    if (request.add_waiter(port->port, id)) {
        if (hears_bell && (request.call.flags & kWildcard) != 0) {
            port->undecided.emplace_back(id, RequestRef::share(&request));
        }
        return true;
    }
    hush(*port, port->table.at(id));
    port->table.erase(id);
    return false;
}

void stop_waiting(LoopPort* port, Request& request, std::uint64_t id) {
    request.remove_waiter(*port->port, id);
    const auto found = port->table.find(id);
    if (found != port->table.end()) {
        const Waiting waiting = std::move(found->second);  // released after the table is whole again
        port->table.erase(found);
        hush(*port, waiting);
    }
}

std::size_t remove_callbacks(LoopPort* port, Request& request, PyObject* future, PyObject* callback) {
    std::vector<std::uint64_t> ids;
    for (const auto& [id, waiting] : port->table) {
        if (waiting.kind == Waiting::Kind::call && waiting.future.get() == future &&
            PyObject_RichCompareBool(waiting.target.get(), callback, Py_EQ) == 1) {
            ids.push_back(id);
        }
    }
    for (const std::uint64_t id : ids) {
        stop_waiting(port, request, id);
    }
    return ids.size();
}

PyObject* new_loop_future(LoopPort* port) {
    return PyObject_CallMethod(PyWeakref_GetObject(port->loop.get()), "create_future", nullptr);
}

PyObject* port_object(LoopPort* port) noexcept { return port->self; }

SpinBudget& spin_budget(LoopPort* port) noexcept { return port->budget; }

bool add_port_type(PyObject*) {
    port_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&port_spec));
    const Ref asyncio_module = Ref::steal(PyImport_ImportModule("asyncio"));
    const Ref weakref = Ref::steal(PyImport_ImportModule("weakref"));
    if (port_type == nullptr || !asyncio_module || !weakref) {
        return false;
    }
    get_running_loop = PyObject_GetAttrString(asyncio_module.get(), "_get_running_loop");
    ports = PyObject_CallMethod(weakref.get(), "WeakKeyDictionary", nullptr);
    return get_running_loop != nullptr && ports != nullptr;
}

}  // namespace aiodist::python
