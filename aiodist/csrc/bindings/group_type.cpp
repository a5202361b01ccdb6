// The rest of GroupCore: forming, the general start, refusing, aborting, closing.

#include <algorithm>

#include "bindings/group_core.hpp"
#include "bindings/process.hpp"
#include "collectives/varint.hpp"
// after Python.h, which it needs and does not include
#include <structmember.h>

namespace aiodist::python {
namespace {

GroupObject& as_group(PyObject* self) { return *reinterpret_cast<GroupObject*>(self); }

Communicator& communicator_of(PyObject* self) { return **as_group(self).communicator; }

int group_init(PyObject* self, PyObject* arguments, PyObject* keywords) {
    static const char* const kNames[] = {"name", "id", "rank", "tuning", "offset", "members", "timeout", nullptr};
    const char* name = nullptr;
    unsigned long long id = 0;
    unsigned long long offset = 0;
    PyObject* members = nullptr;
    Communicator::Options options;
    GroupObject& group = as_group(self);
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "sKi(IIII)KO!d:GroupCore", const_cast<char**>(kNames), &name,
                                     &id, &options.rank, &options.tuning.slots, &options.tuning.slot_nbytes,
                                     &options.tuning.segment_nbytes, &options.tuning.depth, &offset, &PyList_Type,
                                     &members, &group.timeout)) {
        return -1;
    }
    if (group.communicator != nullptr) {
        PyErr_SetString(PyExc_RuntimeError, "the group is formed already");
        return -1;
    }
    options.name = name;
    options.id = id;
    options.block_offset = offset;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(members); ++i) {
        PyObject* process = nullptr;
        unsigned long long at = 0;
        if (!PyArg_ParseTuple(PyList_GET_ITEM(members, i), "OK", &process, &at)) {
            return -1;
        }
        std::shared_ptr<Process> known = process_of(process);
        if (!known) {
            PyErr_SetString(PyExc_TypeError, "members must be a list of (Process, offset)");
            return -1;
        }
        options.members.push_back({std::move(known), at});
    }
    try {
        group.communicator = new std::shared_ptr<Communicator>(Communicator::create(engine(), std::move(options)));
    } catch (...) {
        translate_exception();
        return -1;
    }
    return 0;
}

void close_group(GroupObject& group) {
    // The parent's objects are left alone in a forked child: what they hold is mapped shared, and their locks may be
    // held.
    if (group.communicator != nullptr && (*group.communicator)->engine().pid() == present_pid()) {
        (*group.communicator)->close();
        delete group.communicator;
    }
    group.communicator = nullptr;
}

/// Before the object goes: the warning may keep it, so this can not be part of its deallocation.
void group_finalize(PyObject* self) {
    GroupObject& group = as_group(self);
    if (group.communicator == nullptr || (*group.communicator)->engine().pid() != present_pid() ||
        (*group.communicator)->closed()) {
        return;
    }
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    if (PyErr_ResourceWarning(self, 1, "group '%s' was dropped without aclose()",
                              (*group.communicator)->name().c_str()) < 0) {
        PyErr_WriteUnraisable(nullptr);
    }
    (*group.communicator)->close();
    PyErr_Restore(type, value, traceback);
}

void group_dealloc(PyObject* self) {
    close_group(as_group(self));
    PyTypeObject* const type = Py_TYPE(self);
    type->tp_free(self);
    Py_DECREF(type);
}

/// Puts an argument of _start() into the call: an array, a list of arrays, or None.
bool take_input(PyObject* input, Call& call) {
    if (input == Py_None) {
        return true;
    }
    ArrayView view;
    if (view_array(input, view)) {
        call.input = static_cast<const std::byte*>(view.data);
        call.nbytes = view.nbytes;
        call.itemsize = view.itemsize;
        call.shape = view.shape;
        return true;
    }
    Pieces<std::byte> pieces;
    if (!view_arrays(input, false, pieces, call.itemsize)) {
        return false;
    }
    for (const auto& piece : pieces) {
        call.inputs.push_back({piece.data, piece.begin});
    }
    call.nbytes = call.inputs.back().begin;
    return true;
}

bool take_output(PyObject* output, Call& call) {
    if (output == Py_None) {
        return true;
    }
    ArrayView view;
    std::uint32_t itemsize = 0;
    if (view_array(output, view)) {
        if (!view.writeable) {
            PyErr_SetString(PyExc_TypeError, "_start() takes writeable outputs");
            return false;
        }
        call.output = static_cast<std::byte*>(view.data);
    } else if (!view_arrays(output, true, call.outputs, itemsize)) {
        return false;
    }
    if (!call.brings()) {  // a receiver: its header says what it expects
        call.nbytes = call.outputs.empty() ? view.nbytes : call.outputs.back().begin;
        call.itemsize = call.outputs.empty() ? view.itemsize : itemsize;
        call.shape = view.shape;
    }
    return true;
}

bool take_table(PyObject* table, Call& call) {
    if (table == Py_None) {
        return true;
    }
    const Ref numbers = Ref::steal(PySequence_Fast(table, "the table is a tuple of numbers"));
    for (Py_ssize_t i = 0; numbers && i < PySequence_Fast_GET_SIZE(numbers.get()); ++i) {
        append_varint(call.table, PyLong_AsUnsignedLongLong(PySequence_Fast_GET_ITEM(numbers.get(), i)));
    }
    // What else lies before a payload: see Communicator::write_slot.
    const std::size_t most =
        kMetaNbytes - sizeof(Header) - 16 - call.text.size() - call.shape.ndim * sizeof(std::uint64_t);
    if (!PyErr_Occurred() && call.table.size() > most) {
        PyErr_Format(PyExc_ValueError, "the shapes of the list take %zu bytes to describe; at most %zu can travel",
                     call.table.size(), most);
    }
    return PyErr_Occurred() == nullptr;
}

/// Divides many arrays into sections: (dtype, number of arrays) each.
bool take_sections(PyObject* sections, Call& call) {
    if (sections == Py_None) {
        return true;
    }
    const Ref all = Ref::steal(PySequence_Fast(sections, "sections are a tuple of pairs"));
    std::size_t first = 0;
    for (Py_ssize_t i = 0; all && i < PySequence_Fast_GET_SIZE(all.get()); ++i) {
        int dtype = 0;
        Py_ssize_t count = 0;
        if (!PyArg_ParseTuple(PySequence_Fast_GET_ITEM(all.get(), i), "in", &dtype, &count)) {
            return false;
        }
        const std::size_t end = first + static_cast<std::size_t>(count);
        if (end >= call.inputs.size() || end >= call.outputs.size()) {
            PyErr_SetString(PyExc_ValueError, "the sections hold more arrays than there are");
            return false;
        }
        Call section;
        section.collective = call.collective;
        section.op = call.op;
        section.dtype = static_cast<DType>(dtype);
        section.itemsize = static_cast<std::uint32_t>(itemsize(section.dtype));
        section.nbytes = call.inputs[end].begin - call.inputs[first].begin;
        for (std::size_t k = first; k <= end; ++k) {
            section.inputs.push_back({call.inputs[k].data, call.inputs[k].begin - call.inputs[first].begin});
            section.outputs.push_back({call.outputs[k].data, call.outputs[k].begin - call.outputs[first].begin});
        }
        call.sections.push_back(std::move(section));
        first = end;
    }
    return PyErr_Occurred() == nullptr;
}

/// _start(collective, op, dtype, axis, root, rows, flags, tag, text, table, sections, input, output, result, finish,
/// timeout)
PyObject* group_start(PyObject* self, PyObject* arguments) {
    GroupObject& group = as_group(self);
    int collective = 0, op = 0, dtype = 0, axis = 0, flags = 0;
    unsigned long long rows = 1, tag = 0;
    Call call;
    const char* text = nullptr;
    Py_ssize_t text_nbytes = 0;
    PyObject *table = nullptr, *sections = nullptr, *input = nullptr, *output = nullptr, *result = nullptr,
             *finish = nullptr, *timeout = nullptr;
    if (!usable(group) || !PyArg_ParseTuple(arguments, "iiiiiKiKs#OOOOOOO:_start", &collective, &op, &dtype, &axis,
                                            &call.root, &rows, &flags, &tag, &text, &text_nbytes, &table, &sections,
                                            &input, &output, &result, &finish, &timeout)) {
        return nullptr;
    }
    call.collective = static_cast<Collective>(collective);
    call.op = static_cast<Op>(op);
    call.dtype = static_cast<DType>(dtype);
    call.axis = static_cast<std::int8_t>(axis);
    call.flags = static_cast<std::uint16_t>(flags);
    call.rows = rows == 0 ? 1 : rows;
    call.tag = tag;
    call.text.assign(text, static_cast<std::size_t>(text_nbytes));
    if (!take_input(input, call) || !take_output(output, call)) {
        return nullptr;
    }
    if ((call.flags & kMany) != 0 && (call.flags & kWildcard) == 0) {
        call.itemsize = static_cast<std::uint32_t>(std::max<std::size_t>(itemsize(call.dtype), 1));
        call.shape.ndim = 1;
        call.shape.dims[0] = call.nbytes / call.itemsize;
    }
    if (!take_table(table, call) || !take_sections(sections, call)) {
        return nullptr;
    }
    call.site = call_site();
    Ref keep = Ref::steal(PyTuple_Pack(2, input, output));
    return start(group, std::move(call), timeout_of(group, timeout), std::move(keep),
                 result == Py_Ellipsis ? Ref() : Ref::share(result), finish == Py_None ? Ref() : Ref::share(finish));
}

/// _refuse(collective, text): the call takes its number, so that the peers of it hear why.
PyObject* group_refuse(PyObject* self, PyObject* arguments) {
    int collective = 0;
    const char* text = nullptr;
    if (!usable(as_group(self)) || !PyArg_ParseTuple(arguments, "is:_refuse", &collective, &text)) {
        return nullptr;
    }
    if (guarded([&] { return refuse(as_group(self), static_cast<Collective>(collective), text), 0; }, -1) < 0) {
        return nullptr;
    }
    Py_RETURN_NONE;
}

PyObject* group_abort(PyObject* self, PyObject* reason) {
    const char* const text = PyUnicode_AsUTF8(reason);
    if (text == nullptr || !usable(as_group(self))) {
        return nullptr;
    }
    communicator_of(self).abort(FailureKind::communication, text);
    Py_RETURN_NONE;
}

/// _adopt(channel): what breaks this group breaks the channel too.
PyObject* group_adopt(PyObject* self, PyObject* channel) {
    if (!PyObject_TypeCheck(channel, Py_TYPE(self))) {
        PyErr_SetString(PyExc_TypeError, "_adopt() takes a group");
        return nullptr;
    }
    if (!usable(as_group(self)) || !usable(as_group(channel))) {
        return nullptr;
    }
    communicator_of(self).adopt(*as_group(channel).communicator);
    Py_RETURN_NONE;
}

/// _latest(): (seq, collective, "file:line") of the latest call in the order, or None.
PyObject* group_latest(PyObject* self, PyObject*) {
    if (!usable(as_group(self))) {
        return nullptr;
    }
    const Communicator& communicator = communicator_of(self);
    const auto latest = communicator.latest();
    if (!latest) {
        Py_RETURN_NONE;
    }
    constexpr std::string_view kAt = " at ";
    const std::string site = communicator.engine().site_text(*communicator.engine().self(), latest->site);
    return Py_BuildValue("(Kss)", static_cast<unsigned long long>(latest->seq), name(latest->collective),
                         site.empty() ? "" : site.c_str() + kAt.size());
}

/// _drained(): a future of the moment at which all calls made so far are over.
PyObject* group_drained(PyObject* self, PyObject*) {
    if (!usable(as_group(self))) {
        return nullptr;
    }
    return new_future(communicator_of(self).drained(), Ref::share(self), Ref(), Ref::share(Py_None), Ref());
}

PyObject* group_close(PyObject* self, PyObject*) {
    if (usable(as_group(self))) {
        communicator_of(self).close();
        Py_RETURN_NONE;
    }
    return nullptr;
}

// These stay readable in a forked child: they are constants.
bool formed(PyObject* self) {
    if (as_group(self).communicator == nullptr) {
        PyErr_SetString(PyExc_RuntimeError, "this group was never formed");
    }
    return as_group(self).communicator != nullptr;
}

PyObject* get_rank(PyObject* self, void*) {
    return formed(self) ? PyLong_FromLong(communicator_of(self).rank()) : nullptr;
}
PyObject* get_size(PyObject* self, void*) {
    return formed(self) ? PyLong_FromLong(communicator_of(self).size()) : nullptr;
}
PyObject* get_name(PyObject* self, void*) {
    return formed(self) ? PyUnicode_FromString(communicator_of(self).name().c_str()) : nullptr;
}
PyObject* get_closed(PyObject* self, void*) {
    // To a forked child the parent's group is closed: leaving its block there must neither fail nor do anything.
    return formed(self) ? PyBool_FromLong(communicator_of(self).closed() ||
                                          communicator_of(self).engine().pid() != present_pid())
                        : nullptr;
}

PyMethodDef methods[] = {
    {"_start", group_start, METH_VARARGS, nullptr},  {"_refuse", group_refuse, METH_VARARGS, nullptr},
    {"_abort", group_abort, METH_O, nullptr},        {"_adopt", group_adopt, METH_O, nullptr},
    {"_latest", group_latest, METH_NOARGS, nullptr}, {"_drained", group_drained, METH_NOARGS, nullptr},
    {"_close", group_close, METH_NOARGS, nullptr},   {nullptr, nullptr, 0, nullptr}};
PyGetSetDef properties[] = {{"rank", get_rank, nullptr, "This process's rank in the group.", nullptr},
                            {"size", get_size, nullptr, "Number of members.", nullptr},
                            {"name", get_name, nullptr, "Name of the group.", nullptr},
                            {"closed", get_closed, nullptr, "True once the group was closed here.", nullptr},
                            {nullptr, nullptr, nullptr, nullptr, nullptr}};
PyMemberDef members[] = {
    {"timeout", T_DOUBLE, offsetof(GroupObject, timeout), READONLY, "Seconds a call waits for its peers by default."},
    {nullptr, 0, 0, 0, nullptr}};
PyType_Slot slots[] = {{Py_tp_doc, const_cast<char*>("One member of a group: the native half of `Group`.")},
                       {Py_tp_new, reinterpret_cast<void*>(PyType_GenericNew)},
                       {Py_tp_init, reinterpret_cast<void*>(group_init)},
                       {Py_tp_dealloc, reinterpret_cast<void*>(group_dealloc)},
                       {Py_tp_finalize, reinterpret_cast<void*>(group_finalize)},
                       {Py_tp_methods, methods},
                       {Py_tp_getset, properties},
                       {Py_tp_members, members},
                       {0, nullptr}};
PyType_Spec spec = {"aiodist._core.GroupCore", sizeof(GroupObject), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, slots};

}  // namespace

PyType_Spec& group_spec() { return spec; }

}  // namespace aiodist::python
