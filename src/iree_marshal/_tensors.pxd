# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
from cpython.object cimport PyObject
from libc.stdint cimport int32_t, int64_t, uint32_t

from iree_marshal.abi.dlpack cimport im_dl_exchange_api_t


# What an import needs of one tensor; sizes are borrowed from the tensor.
cdef struct TensorView:
    void* data
    int64_t* sizes
    int64_t rank
    int64_t nbytes
    uint32_t element_type  # HAL element type
    int32_t device_type    # as libtorch's shim numbers them
    int32_t device_index   # -1 for devices without an index


cdef enum Reading:
    READ_CLEAN = 0     # the view is filled in and may be imported as it is
    READ_UNCLEAR = 1   # values.admit decides


cdef Reading read_clean(PyObject* tensor, bint grad_mode, TensorView* view) noexcept nogil
cdef bint is_unchanged(
    PyObject* tensor, bint grad_mode, void* data, uint32_t element_type, int64_t rank, const int64_t* sizes
) noexcept nogil
cdef void prefetch(PyObject* tensor) noexcept nogil
cdef bint lies_at(PyObject* tensor, void* data) noexcept nogil
cdef int read_admitted(object tensor, TensorView* view) except -1
cdef bint is_plain_tensor(PyObject* value) noexcept nogil
cdef bint grad_mode_enabled() except -1
cdef int require_reader() except -1
cdef im_dl_exchange_api_t* exchange_api() except NULL
