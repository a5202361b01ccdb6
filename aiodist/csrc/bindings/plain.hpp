#pragma once

#include "bindings/group_core.hpp"

namespace aiodist::python {

/// What a collective's method was called with, by parameter; null where it was not given.
struct Arguments {
    PyObject* x = nullptr;
    PyObject* op = nullptr;
    PyObject* root = nullptr;  // or the peer: dst, src
    PyObject* axis = nullptr;
    PyObject* uneven = nullptr;
    PyObject* tag = nullptr;
    PyObject* out = nullptr;
    PyObject* timeout = nullptr;
};

/// Sorts the arguments after `self`; false, and no exception, where the general path must look at them.
bool sort_arguments(Collective collective, PyObject* const* given, Py_ssize_t count, PyObject* names,
                    Arguments& arguments);
/// The call and what its future resolves to (none: what is received), where everything about it is plain: exact arrays
/// of numbered dtypes, exact ints, an `out` that fits and is apart. False, and no exception, where the general path
/// must look at it; that one says what is wrong with an argument.
bool plain_call(Collective collective, const Communicator& communicator, const Arguments& arguments, Call& call,
                Ref& result);
bool prepare_plain_calls();

}  // namespace aiodist::python
