#include <Python.h>
#include <numpy/arrayobject.h>

#include <algorithm>

#include "bindings/bindings.hpp"

namespace aiodist::python {
namespace {

DType dtype_of(int type_number) noexcept {
    switch (type_number) {
        case NPY_BOOL:
            return DType::bool_;
        case NPY_BYTE:
            return DType::int8;
        case NPY_SHORT:
            return DType::int16;
        case NPY_INT:
            return DType::int32;
        case NPY_LONG:
        case NPY_LONGLONG:
            return DType::int64;
        case NPY_UBYTE:
            return DType::uint8;
        case NPY_USHORT:
            return DType::uint16;
        case NPY_UINT:
            return DType::uint32;
        case NPY_ULONG:
        case NPY_ULONGLONG:
            return DType::uint64;
        case NPY_HALF:
            return DType::float16;
        case NPY_FLOAT:
            return DType::float32;
        case NPY_DOUBLE:
            return DType::float64;
        case NPY_CFLOAT:
            return DType::complex64;
        case NPY_CDOUBLE:
            return DType::complex128;
        default:
            return DType::raw;
    }
}

int type_number(DType dtype) noexcept {
    constexpr int kNumbers[kDTypeCount] = {NPY_UBYTE,   NPY_BOOL,    NPY_INT8,   NPY_INT16,  NPY_INT32, NPY_INT64,
                                           NPY_UINT8,   NPY_UINT16,  NPY_UINT32, NPY_UINT64, NPY_HALF,  NPY_USHORT,
                                           NPY_FLOAT32, NPY_FLOAT64, NPY_CFLOAT, NPY_CDOUBLE};
    return kNumbers[static_cast<std::size_t>(dtype)];
}

}  // namespace

bool import_numpy() { return PyArray_ImportNumPyAPI() >= 0; }

bool view_array(PyObject* object, ArrayView& view) noexcept {
    if (!PyArray_CheckExact(object)) {
        return false;
    }
    auto* const array = reinterpret_cast<PyArrayObject*>(object);
    constexpr int kPlain = NPY_ARRAY_C_CONTIGUOUS | NPY_ARRAY_ALIGNED;
    if ((PyArray_FLAGS(array) & kPlain) != kPlain || !PyArray_ISNOTSWAPPED(array)) {
        return false;
    }
    view.data = PyArray_DATA(array);
    view.nbytes = static_cast<std::uint64_t>(PyArray_NBYTES(array));
    view.itemsize = static_cast<std::uint32_t>(PyArray_ITEMSIZE(array));
    view.dtype = dtype_of(PyArray_TYPE(array));
    view.writeable = (PyArray_FLAGS(array) & NPY_ARRAY_WRITEABLE) != 0;
    view.shape.ndim = static_cast<std::uint8_t>(PyArray_NDIM(array));
    for (std::size_t i = 0; i < view.shape.ndim; ++i) {
        view.shape.dims[i] = static_cast<std::uint64_t>(PyArray_DIM(array, static_cast<int>(i)));
    }
    return true;
}

bool view_arrays(PyObject* list, bool for_writing, Pieces<std::byte>& pieces, std::uint32_t& itemsize) {
    const Ref sequence = Ref::steal(PySequence_Fast(list, "a list of arrays is needed"));
    if (!sequence) {
        return false;
    }
    std::uint64_t nbytes = 0;
    const Py_ssize_t count = PySequence_Fast_GET_SIZE(sequence.get());
    for (Py_ssize_t i = 0; i < count; ++i) {
        ArrayView view;
        if (!view_array(PySequence_Fast_GET_ITEM(sequence.get(), i), view) || (for_writing && !view.writeable)) {
            PyErr_SetString(PyExc_TypeError, "lists hold C-contiguous, aligned arrays");
            return false;
        }
        itemsize = i == 0 ? view.itemsize : itemsize;
        pieces.push_back({static_cast<std::byte*>(view.data), nbytes});
        nbytes += view.nbytes;
    }
    pieces.push_back({nullptr, nbytes});
    return true;
}

PyObject* bounds_list(PyObject* arrays) {
    const Ref sequence = Ref::steal(PySequence_Fast(arrays, "a list of arrays is needed"));
    const Py_ssize_t count = sequence ? PySequence_Fast_GET_SIZE(sequence.get()) : 0;
    Ref list = Ref::steal(sequence ? PyList_New(count) : nullptr);
    for (Py_ssize_t k = 0; list && k < count; ++k) {
        PyObject* const object = PySequence_Fast_GET_ITEM(sequence.get(), k);
        if (!PyArray_Check(object)) {
            PyErr_SetString(PyExc_TypeError, "a list of arrays is needed");
            return nullptr;
        }
        auto* const array = reinterpret_cast<PyArrayObject*>(object);
        auto low = reinterpret_cast<std::intptr_t>(PyArray_DATA(array));
        std::intptr_t high = low + PyArray_ITEMSIZE(array);
        for (int i = 0; i < PyArray_NDIM(array); ++i) {
            const npy_intp reach = (PyArray_DIM(array, i) - 1) * PyArray_STRIDE(array, i);
            (reach < 0 ? low : high) += reach;
        }
        if (PyArray_SIZE(array) == 0) {
            high = low;
        }
        PyObject* const pair = Py_BuildValue("(nn)", static_cast<Py_ssize_t>(low), static_cast<Py_ssize_t>(high));
        if (pair == nullptr) {
            return nullptr;
        }
        PyList_SET_ITEM(list.get(), k, pair);
    }
    return list.leak();
}

namespace {

/// A new array over `data`, which may be null: then over memory of its own.
PyObject* array_of(const std::uint64_t* extents, std::size_t ndim, int type, void* data) {
    npy_intp dims[kMaxDims];
    std::copy_n(extents, ndim, dims);
    const int dimensions = static_cast<int>(ndim);
    return data == nullptr ? PyArray_SimpleNew(dimensions, dims, type)
                           : PyArray_SimpleNewFromData(dimensions, dims, type, data);
}

}  // namespace

PyObject* new_array(const Shape& shape, DType dtype) {
    return array_of(shape.dims.data(), shape.ndim, type_number(dtype), nullptr);
}

PyObject* array_over(void* data, const std::vector<std::uint64_t>& shape, DType dtype, PyObject* owner) {
    Ref keeper = Ref::steal(owner);
    Ref array = Ref::steal(array_of(shape.data(), shape.size(), type_number(dtype), data));
    if (!array || PyArray_SetBaseObject(reinterpret_cast<PyArrayObject*>(array.get()), keeper.leak()) < 0) {
        return nullptr;
    }
    return array.leak();
}

PyObject* bytes_array(void* data, std::uint64_t nbytes, PyObject* owner) {
    return array_over(data, {nbytes}, DType::raw, owner);
}

PyObject* shape_tuple(const std::uint64_t* dims, std::size_t ndim) {
    Ref tuple = Ref::steal(PyTuple_New(static_cast<Py_ssize_t>(ndim)));
    for (std::size_t i = 0; tuple && i < ndim; ++i) {
        PyTuple_SET_ITEM(tuple.get(), static_cast<Py_ssize_t>(i), PyLong_FromUnsignedLongLong(dims[i]));
    }
    return tuple.leak();
}

}  // namespace aiodist::python
