// Awaiting a TensorFuture: a few looks, some polling while that is likely to pay, then a suspension.

#include <algorithm>

#include "bindings/future_object.hpp"

namespace aiodist::python {
namespace {

// What one loop turn may spend on polling in place of suspending, over all its tasks; and how many awaits may be over
// at once before the loop gets a turn: a task that only awaits can not starve the others.
constexpr std::int64_t kTurnNs = 50'000;
constexpr int kPromptAwaits = 64;
// One await's polling: grows while it pays, up to the whole turn; shrinks to this where peers are late.
constexpr std::int64_t kColdNs = 5'000;
// How long a peer may be away for a turn of its loop before the data are left to the engine.
constexpr std::int64_t kPeersTurnNs = 25'000;
// Looks before the first at the clock, which costs as much as a few of them; kPromptAwaits bounds how often.
constexpr int kUntimedLooks = 8;

struct AwaiterObject {
    PyObject_HEAD Ref future;
    Ref port_keeper;
    LoopPort* port;
    std::uint64_t id;  // of the registration while suspended, else 0
    bool yielded;
};

PyTypeObject* awaiter_type = nullptr;
PyObject* blocking_name = nullptr;
int prompt_awaits = 0;  // in a row that did not suspend, over all loops

/// A few looks, for calls whose peers are about to arrive.
bool look_closely(Request& request) {
    Communicator& communicator = *request.communicator();
    for (int i = 0; i < kUntimedLooks && !request.done(); ++i) {
        (void)communicator.progress();
        pause();
    }
    return request.done();
}

/// Polls in place of suspending while that is likely to pay.
bool poll(Request& request, SpinBudget& budget) {
    Communicator& communicator = *request.communicator();
    if (budget.spent_ns >= kTurnNs || communicator.waits_for_this_thread(request)) {
        return false;
    }
    const TimePoint from = Clock::now();
    const bool done = communicator.engine().spin(
        request, std::chrono::nanoseconds(std::min(budget.patience_ns, kTurnNs - budget.spent_ns)));
    budget.spent_ns += std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - from).count();
    budget.patience_ns = done ? std::min(budget.patience_ns * 2, kTurnNs) : kColdNs;
    return done;
}

bool moved_by_loop(const Request& request) {
    return request.call.nbytes <= kLoopNbytes && request.call.nbytes > 0 && !is_small(request);
}

/// Moves the call's data for the rest of the loop's turn. `more`: it is to go on in the next one; then no other await
/// of this loop moves any, since each would take a whole turn's time.
Engine::Move move(AwaiterObject& awaiter, Request& request, SpinBudget& budget) {
    if ((budget.mover != nullptr && budget.mover != &awaiter) || budget.spent_ns >= kTurnNs ||
        request.communicator()->waits_for_this_thread(request)) {
        return Engine::Move::idle;
    }
    const TimePoint from = Clock::now();
    const Engine::Move moved = request.communicator()->engine().move(
        request, std::chrono::nanoseconds(kTurnNs - budget.spent_ns),
        std::chrono::nanoseconds(budget.mover == nullptr ? kColdNs : kPeersTurnNs),
        std::chrono::nanoseconds(kPeersTurnNs));
    budget.spent_ns += std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - from).count();
    budget.mover = moved == Engine::Move::more ? &awaiter : nullptr;
    return moved;
}

/// Suspends: the loop's future to wait for, or nullptr if that is not needed (or an exception is set).
PyObject* suspend(AwaiterObject& awaiter, Request& request) {
    Ref waiter = Ref::steal(new_loop_future(awaiter.port));
    if (!waiter || PyObject_SetAttr(waiter.get(), blocking_name, Py_True) < 0) {
        return nullptr;
    }
    if (!wait_on(awaiter.port, request, {Waiting::Kind::wake, waiter, {}, is_small(request)}, awaiter.id)) {
        awaiter.id = 0;
        return nullptr;
    }
    (void)request.communicator()->progress();  // the last look: from here on a flag rings the bell
    if (request.done()) {
        stop_waiting(awaiter.port, request, std::exchange(awaiter.id, 0));
        return nullptr;
    }
    let_go(request, true);
    return waiter.leak();
}

PySendResult returned(FutureObject& future, PyObject** out) {
    *out = Py_XNewRef(value_of(future));
    return *out != nullptr ? PYGEN_RETURN : PYGEN_ERROR;
}

/// False with an exception set where no loop runs.
bool find_port(AwaiterObject& awaiter) {
    if (awaiter.port == nullptr) {
        awaiter.port = running_port();
        if (awaiter.port == nullptr) {
            if (!PyErr_Occurred()) {
                PyErr_SetString(PyExc_RuntimeError, "no running event loop: await needs one, result() blocks without");
            }
            return false;
        }
        awaiter.port_keeper = Ref::share(port_object(awaiter.port));
    }
    return true;
}

PySendResult awaiter_send_body(PyObject* self, PyObject** out) {
    auto& awaiter = *reinterpret_cast<AwaiterObject*>(self);
    FutureObject& future = as_future(awaiter.future.get());
    Request& request = *future.request.get();
    *out = nullptr;
    if (!check_process(request.communicator()->engine())) {
        return PYGEN_ERROR;
    }
    const bool resumed = awaiter.id != 0 || awaiter.yielded;
    if (awaiter.id != 0) {
        stop_waiting(awaiter.port, request, std::exchange(awaiter.id, 0));
    }
    // Asking for the running loop costs a system call (it compares the pid), so what is over soon does without.
    bool done = look_closely(request);
    bool spent = false;
    if (!done) {
        if (!find_port(awaiter)) {
            return PYGEN_ERROR;
        }
        SpinBudget& budget = spin_budget(awaiter.port);
        budget.spent_ns = resumed ? 0 : budget.spent_ns;
        if (moved_by_loop(request)) {
            const Engine::Move moved = move(awaiter, request, budget);
            if (moved == Engine::Move::more) {
                awaiter.yielded = true;
                *out = Py_NewRef(Py_None);
                return PYGEN_NEXT;
            }
            done = moved == Engine::Move::done;
        } else {
            done = poll(request, budget);
        }
        spent = budget.spent_ns >= kTurnNs;
    }
    prompt_awaits = resumed ? 0 : prompt_awaits + 1;
    if (!resumed && (spent || (done && prompt_awaits > kPromptAwaits))) {
        awaiter.yielded = true;  // the loop's other tasks have waited long enough
        *out = Py_NewRef(Py_None);
        return PYGEN_NEXT;
    }
    if (done) {
        return returned(future, out);
    }
    *out = suspend(awaiter, request);
    if (*out != nullptr) {
        return PYGEN_NEXT;
    }
    return PyErr_Occurred() ? PYGEN_ERROR : returned(future, out);
}

PySendResult awaiter_send(PyObject* self, PyObject*, PyObject** out) {
    return guarded([&] { return awaiter_send_body(self, out); }, PYGEN_ERROR);
}

PyObject* awaiter_next(PyObject* self) {
    PyObject* value = nullptr;
    switch (awaiter_send(self, Py_None, &value)) {
        case PYGEN_NEXT:
            return value;
        case PYGEN_RETURN: {
            const Ref kept = Ref::steal(value);
            const Ref stop = Ref::steal(PyObject_CallOneArg(PyExc_StopIteration, value));
            if (stop) {
                PyErr_SetObject(PyExc_StopIteration, stop.get());
            }
            return nullptr;
        }
        case PYGEN_ERROR:
            break;
    }
    return nullptr;
}

PyObject* awaiter_send_method(PyObject* self, PyObject*) { return awaiter_next(self); }

void awaiter_dealloc(PyObject* self) {
    auto& awaiter = *reinterpret_cast<AwaiterObject*>(self);
    if (awaiter.port != nullptr && spin_budget(awaiter.port).mover == self) {
        spin_budget(awaiter.port).mover = nullptr;
    }
    if (awaiter.id != 0) {
        Request& request = *as_future(awaiter.future.get()).request.get();
        if (request.communicator()->engine().pid() == present_pid()) {
            stop_waiting(awaiter.port, request, awaiter.id);
            give_up_if_unwanted(request);
        }
    }
    awaiter.~AwaiterObject();
    PyTypeObject* const type = Py_TYPE(self);
    type->tp_free(self);
    Py_DECREF(type);
}

PyMethodDef awaiter_methods[] = {{"send", awaiter_send_method, METH_O, nullptr}, {nullptr, nullptr, 0, nullptr}};
PyType_Slot awaiter_slots[] = {{Py_tp_dealloc, reinterpret_cast<void*>(awaiter_dealloc)},
                               {Py_tp_iter, reinterpret_cast<void*>(PyObject_SelfIter)},
                               {Py_tp_iternext, reinterpret_cast<void*>(awaiter_next)},
                               {Py_am_send, reinterpret_cast<void*>(awaiter_send)},
                               {Py_tp_methods, awaiter_methods},
                               {0, nullptr}};
PyType_Spec awaiter_spec = {"aiodist._core.Awaiter", sizeof(AwaiterObject), 0,
                            Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, awaiter_slots};

}  // namespace

PyObject* future_await(PyObject* self) {
    PyObject* const object = awaiter_type->tp_alloc(awaiter_type, 0);
    if (object != nullptr) {
        auto* const awaiter = reinterpret_cast<AwaiterObject*>(object);
        awaiter->future = Ref::share(self);
    }
    return object;
}

bool add_awaiter_type() {
    blocking_name = PyUnicode_InternFromString("_asyncio_future_blocking");
    awaiter_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&awaiter_spec));
    return blocking_name != nullptr && awaiter_type != nullptr;
}

}  // namespace aiodist::python
