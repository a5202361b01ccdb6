#pragma once

#include "bindings/bindings.hpp"

namespace aiodist::python {

struct FutureObject {
    PyObject_HEAD RequestRef request;
    Ref group;
    Ref input;   // kept until the request is done
    Ref result;  // what it resolves to; nullptr: received
    Ref finish;  // called with the above once
    Ref error;   // what that raised
    bool resolved;
    bool resolving;  // some thread is at it, perhaps without the GIL for moments
    PyObject* weak_references;
};

inline FutureObject& as_future(PyObject* self) { return *reinterpret_cast<FutureObject*>(self); }

/// True where the loop that waits gets the request done itself; a receiver that does not know its size yet counts as
/// small.
bool is_small(const Request& request);
/// Makes sure that somebody other than the caller gets the request done: the loop that hears the bell if it is small,
/// else the engine.
void let_go(Request& request, bool loop_watches);
/// Withdraws a receive that nobody waits for any more; call after a waiter has gone.
void give_up_if_unwanted(Request& request);
/// The value of a done request (borrowed), or nullptr with its error raised.
PyObject* value_of(FutureObject& self);

/// Moves the call on and looks whether it is done; sees to it that somebody watches its deadline.
bool look(FutureObject& future);

// callbacks.cpp
PyObject* future_add_done_callback(PyObject* self, PyObject* arguments, PyObject* keywords);
PyObject* future_remove_done_callback(PyObject* self, PyObject* callback);

// awaiting.cpp
PyObject* future_await(PyObject* self);
bool add_awaiter_type();

}  // namespace aiodist::python
