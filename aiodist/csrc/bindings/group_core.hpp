#pragma once

#include "bindings/bindings.hpp"

namespace aiodist::python {

struct GroupObject {
    PyObject_HEAD std::shared_ptr<Communicator>* communicator;  // a pointer, so that a forked child can leave it alone
    double timeout;                                             // seconds
};

/// False with an exception set where the group was never formed or belongs to another process.
bool usable(const GroupObject& group);
/// Takes the call's place, does the caller's part of it and returns its TensorFuture.
PyObject* start(GroupObject& group, Call&& call, Clock::duration timeout, Ref input, Ref result, Ref finish);
/// `timeout` as given by the caller: None is the group's. Checked to be a number by the Python half.
Clock::duration timeout_of(const GroupObject& group, PyObject* timeout);
/// Posts a refused call in the caller's place. Throws where even that fails.
void refuse(GroupObject& group, Collective collective, const char* reason);
bool is_group(PyObject* object) noexcept;
PyType_Spec& group_spec();

}  // namespace aiodist::python
