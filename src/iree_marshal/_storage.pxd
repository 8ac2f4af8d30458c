# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
from cpython.object cimport PyObject
from libc.stdint cimport int64_t

from iree_marshal._lifetime cimport Batch
from iree_marshal._objects cimport NativeDevice
from iree_marshal._slots cimport NativeFrame
from iree_marshal._tensors cimport TensorView
from iree_marshal._views cimport Kind


# Where one result lies in the slab.
cdef struct Piece:
    Py_ssize_t position   # of its storage argument
    Py_ssize_t typed      # index of the slab's alias of this dtype
    int64_t offset        # in bytes
    int64_t item_size
    TensorView view       # sizes point into the storage's own memory; data is filled in per call
    int64_t* strides


cdef class ResultStorage:
    cdef object program
    cdef object signature
    cdef object torch_device
    cdef NativeDevice device
    cdef bint reuse_outputs
    cdef object layout
    cdef list order              # results with storage arguments, ascending
    cdef tuple result_places     # result -> index in `order`, or None where IREE allocates
    cdef bint all_stored         # every result has a storage argument
    cdef Piece* pieces
    cdef int64_t* piece_dims     # what the pieces point into
    cdef Py_ssize_t piece_count  # 0 where no slab can be made
    cdef tuple piece_dtypes
    cdef object slab_dtype       # of the allocation: the one of all pieces, or bytes
    cdef int64_t slab_length     # in elements of that
    cdef Kind slab_kind
    cdef bint slab_is_native     # torch is asked for it without Python
    cdef list static_outputs     # the tensors of all calls, with reuse_outputs
    cdef object static_returned  # what every call that fills just them returns

    cdef int lay_out(self) except -1
    cdef int provide(self, NativeFrame frame, object out, bint changed, bint grad_mode) except -1
    cdef list allocate(self, bint lasting)
    cdef list provide_slab(self, NativeFrame frame)
    cdef object allocate_slab(self)
    cdef int import_storage(
        self, NativeFrame frame, Batch* batch, PyObject* tensor, const TensorView* view, Py_ssize_t position
    ) except -1
    cdef int provide_tensors(self, NativeFrame frame, object tensors) except -1
    cdef int provide_given(self, NativeFrame frame, object given, bint changed, bint grad_mode) except -1
    cdef int take_over(self, NativeFrame frame, list outputs, list missed) except -1
    cdef int provide_mixed(self, NativeFrame frame, object given, bint grad_mode) except -1
    cdef int check_overlaps(self, NativeFrame frame) except -1
    cdef int name_overlap(self, NativeFrame frame) except -1
    cdef object hand_out(self, NativeFrame frame)
    cdef bint all_written(self, NativeFrame frame) noexcept
