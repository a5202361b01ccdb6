#pragma once

#include <memory>

#include "bindings/bindings.hpp"

namespace aiodist::python {

/// The process behind an `aiodist._core.Process` object, nullptr if it is not one.
std::shared_ptr<Process> process_of(PyObject* object);

}  // namespace aiodist::python
