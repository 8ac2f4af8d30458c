# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
from cpython.object cimport PyObject
from libc.stdint cimport int32_t, int64_t, uint32_t, uintptr_t

from iree_marshal._lifetime cimport Batch
from iree_marshal._objects cimport NativeDevice
from iree_marshal._tensors cimport TensorView
from iree_marshal.abi.iree cimport im_hal_buffer_t, im_vm_list_t, im_vm_variant_t


cdef enum:
    # Dimensions up to which an argument is recognised; one of a higher rank is imported anew each time.
    KNOWN_RANK = 6
    MOST_DTYPES_OF_A_TYPE = 2
    VIEW_BYTES = 80  # of a buffer view up to rank 3


cdef enum SlotKind:
    SLOT_ANY = 0        # no signature: whatever the value is
    SLOT_TENSOR = 1
    SLOT_INTEGER = 2
    SLOT_FLOAT = 3
    SLOT_OTHER = 4      # a scalar or reference that Python looks at
    SLOT_FIXED = 5      # bound
    SLOT_VIEW = 6       # storage for a result, passed as a buffer view
    SLOT_BUFFER = 7     # storage for a result, passed as a buffer


# What one position of the argument list takes.
cdef struct Slot:
    SlotKind kind
    int32_t result          # of storage: the result that is written there
    int64_t rank            # -1: any
    int64_t* dims           # -1: any size
    uint32_t[MOST_DTYPES_OF_A_TYPE] element_types
    int64_t low             # of an integer
    int64_t high
    double largest          # of a float: beyond it only infinities
    bint single             # a float that the function takes as f32


# The tensor that one position of a frame's argument list holds.
cdef struct Known:
    # Borrowed: the owner behind the buffer keeps it alive. NULL where no tensor may be recognised.
    PyObject* tensor
    void* data
    uint32_t element_type
    int32_t rank
    int64_t[KNOWN_RANK] dims
    int64_t nbytes          # with `data`: the memory that the call uses there; 0 where there is none
    im_hal_buffer_t* buffer  # borrowed from the list


# What every position takes and which are fixed; never changed once made.
cdef class Binding:
    cdef Py_ssize_t count              # positions of the list, without fences
    cdef Slot* slots
    cdef int64_t* dims                 # what the slots point into
    cdef Py_ssize_t input_count
    cdef Py_ssize_t* inputs            # positions that a call's arguments go to, in order
    cdef Py_ssize_t storage_count
    cdef Py_ssize_t* storage           # positions of storage arguments, in the order of their results
    cdef object bound                  # VmVariantList of the fixed values
    cdef tuple bound_positions
    cdef readonly dict bound_tensors   # position -> alias of the tensor

    cdef int64_t* describe(self, Slot* slot, object value, int64_t* dims) except NULL


# The lists of one call, and what is known of the arguments in them.
cdef class NativeFrame:
    cdef readonly object arguments     # VmVariantList
    cdef readonly object results       # VmVariantList
    cdef im_vm_list_t* native_arguments
    cdef im_vm_list_t* native_results
    cdef Known* known
    cdef Py_ssize_t* missed            # scratch: which inputs are to be imported
    cdef Binding binding
    cdef list outputs                  # tensors of the storage arguments, in the order of their results
    cdef bint transient                # the storage positions hold memory that is the caller's after the call
    cdef object kept_outputs           # the static outputs whose imports the storage positions hold, or None
    cdef readonly list times

    cdef int adopt(self, Binding binding, Py_ssize_t fences) except -1
    cdef void forget(self, bint storage_only) noexcept
    cdef void drop_results(self) noexcept


cdef void put_reference(im_vm_variant_t* variant, uintptr_t ref_type, void* reference) noexcept
cdef void put_integer(im_vm_variant_t* variant, int64_t value) noexcept
cdef void put_float(im_vm_variant_t* variant, double value, bint single) noexcept
cdef void move_variant(im_vm_variant_t* target, im_vm_variant_t* source) noexcept
cdef int import_view(
    NativeDevice device, NativeFrame frame, Batch* batch, PyObject* tensor, const TensorView* view, Py_ssize_t position
) except -1
cdef bint fits(const Slot* slot, const TensorView* view) noexcept nogil
cdef bint is_known(const Known* known, const TensorView* view) noexcept nogil
cdef void learn(
    Known* known, PyObject* tensor, const TensorView* view, im_hal_buffer_t* buffer
) noexcept nogil
