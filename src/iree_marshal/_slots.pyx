# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The argument list of a call, kept from one call to the next.

An invocation only reads its argument list, so the list stays: a position is written
when what goes there changed, and a fixed or recognised argument costs no write at all.
"""
from cpython.object cimport PyObject
from libc.stdint cimport int32_t, int64_t, uintptr_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memset

from iree_marshal._importing cimport import_memory, make_view
from iree_marshal._lifetime cimport Batch
from iree_marshal._objects cimport NativeDevice, borrow_list, new_variant_list, ref_types
from iree_marshal._tensors cimport TensorView, read_admitted
from iree_marshal.abi.iree cimport (
    IM_TYPE_LOW_BITS,
    IM_VALUE_TYPE_F32,
    IM_VALUE_TYPE_F64,
    IM_VALUE_TYPE_I64,
    im_hal_buffer_t,
    im_hal_buffer_view_t,
    im_ref_drop,
    im_ref_retain,
    im_ref_type_descriptor_t,
    im_vm_list_t,
    im_vm_variant_t,
)

from iree_marshal import element_types
from iree_marshal.calling import wants_buffer
from iree_marshal.signature import ScalarType, TensorType

# ---- variants -----------------------------------------------------------------------------


cdef inline int32_t* _count_of(const im_vm_variant_t* variant) noexcept nogil:
    """The reference count of what the variant refers to; NULL for numbers and null references."""
    if variant.type & ~IM_TYPE_LOW_BITS == 0 or variant.value.ref == NULL:
        return NULL
    # The low bits of the type say how many words of 4 bytes lie before the count.
    return <int32_t*>variant.value.ref + (variant.ref_type & IM_TYPE_LOW_BITS)


cdef void _drop(im_vm_variant_t* variant) noexcept:
    """Empty the variant, then give back what it held: that may run Python code."""
    cdef im_vm_variant_t held = variant[0]
    cdef int32_t* count = _count_of(&held)
    memset(variant, 0, sizeof(im_vm_variant_t))
    if count != NULL and im_ref_drop(count):
        (<im_ref_type_descriptor_t*>(held.ref_type & ~IM_TYPE_LOW_BITS)).destroy(held.value.ref)


cdef void put_reference(im_vm_variant_t* variant, uintptr_t ref_type, void* reference) noexcept:
    """Hand one reference over to the variant."""
    cdef im_vm_variant_t old = variant[0]
    variant.type = ref_type & ~IM_TYPE_LOW_BITS
    variant.value.ref = reference
    variant.ref_type = ref_type
    _drop(&old)


cdef void put_integer(im_vm_variant_t* variant, int64_t value) noexcept:
    cdef im_vm_variant_t old = variant[0]
    variant.type = IM_VALUE_TYPE_I64
    variant.value.i64 = value
    variant.ref_type = 0
    _drop(&old)


cdef void put_float(im_vm_variant_t* variant, double value, bint single) noexcept:
    """Of the width that the function takes: before 3.10 IREE takes the low bytes of any other for it."""
    cdef im_vm_variant_t old = variant[0]
    if single:
        variant.type = IM_VALUE_TYPE_F32
        variant.value.f32 = <float>value
    else:
        variant.type = IM_VALUE_TYPE_F64
        variant.value.f64 = value
    variant.ref_type = 0
    _drop(&old)


cdef void move_variant(im_vm_variant_t* target, im_vm_variant_t* source) noexcept:
    """Hand what `source` holds over to `target`; a null reference is left behind."""
    cdef im_vm_variant_t old = target[0]
    target[0] = source[0]
    memset(source, 0, sizeof(im_vm_variant_t))
    _drop(&old)


cdef int import_view(
    NativeDevice device, NativeFrame frame, Batch* batch, PyObject* tensor, const TensorView* view, Py_ssize_t position
) except -1:
    """Put a buffer view on the tensor's memory into a position."""
    cdef im_hal_buffer_t* buffer = import_memory(device, batch, tensor, view, (), position)
    cdef im_hal_buffer_view_t* made = make_view(batch, buffer, view, &frame.native_arguments.host_allocator)
    # First: what was there before may run Python code when it goes.
    frame.known[position].tensor = NULL
    frame.known[position].buffer = buffer
    put_reference(&frame.native_arguments.storage[position], ref_types.buffer_view, made)
    return 0


# ---- recognising ----------------------------------------------------------------------------


cdef bint fits(const Slot* slot, const TensorView* view) noexcept nogil:
    """Whether the position takes a tensor of this dtype and shape."""
    cdef int64_t dim
    if slot.kind == SLOT_ANY:
        return True
    if view.element_type != slot.element_types[0] and view.element_type != slot.element_types[1]:
        return False
    if view.rank != slot.rank:
        return False
    for dim in range(view.rank):
        if slot.dims[dim] != view.sizes[dim] and slot.dims[dim] >= 0:
            return False
    return True


cdef bint is_known(const Known* known, const TensorView* view) noexcept nogil:
    """Whether the tensor that was read into `view` lies where the known one lay, with its dtype and shape."""
    cdef int64_t dim
    if known.data != view.data or known.element_type != view.element_type or known.rank != view.rank:
        return False
    for dim in range(view.rank):
        if known.dims[dim] != view.sizes[dim]:
            return False
    return True


cdef void learn(Known* known, PyObject* tensor, const TensorView* view, im_hal_buffer_t* buffer) noexcept nogil:
    """Note what a position holds now; NULL for `tensor` where it must not be recognised by it."""
    cdef int64_t dim
    known.data = view.data
    known.nbytes = view.nbytes
    known.element_type = view.element_type
    known.buffer = buffer
    if view.rank > KNOWN_RANK:
        known.tensor = NULL
        known.rank = -1
        return
    known.tensor = tensor
    known.rank = <int32_t>view.rank
    for dim in range(view.rank):
        known.dims[dim] = view.sizes[dim]


# ---- what a call takes ------------------------------------------------------------------------


cdef class Binding:
    """What every position of the argument list takes; see the declaration.

    Parameters
    ----------
    values : sequence of iree_marshal.signature.Value or None
        Per position; None where nothing is known.
    storage : dict of int to int
        Result -> position that it is written into.
    bound : iree.runtime.VmVariantList
        The fixed values, in the order of `positions`.
    positions : tuple of int
        Where they go.
    tensors : dict
        The fixed tensors by position.
    """

    def __cinit__(self, list values, dict storage, object bound, tuple positions, dict tensors):
        cdef Py_ssize_t place = 0, ranks = 0
        cdef int64_t* dims
        self.count = len(values)
        self.bound = bound
        self.bound_positions = positions
        self.bound_tensors = tensors
        for value in values:
            if value is not None and isinstance(value.abi_type, TensorType):
                ranks += len(value.abi_type.shape)
        self.slots = <Slot*>calloc(self.count + 1, sizeof(Slot))
        self.dims = <int64_t*>malloc((ranks + 1) * sizeof(int64_t))
        self.inputs = <Py_ssize_t*>malloc((self.count + 1) * sizeof(Py_ssize_t))
        self.storage = <Py_ssize_t*>malloc((self.count + 1) * sizeof(Py_ssize_t))
        if self.slots == NULL or self.dims == NULL or self.inputs == NULL or self.storage == NULL:
            raise MemoryError
        dims = self.dims
        by_position = {position: result for result, position in storage.items()}
        for place in range(self.count):
            dims = self.describe(&self.slots[place], values[place], dims)
            if place in by_position:
                self.slots[place].kind = SLOT_BUFFER if wants_buffer(values[place]) else SLOT_VIEW
                self.slots[place].result = by_position[place]
            elif place in positions:
                self.slots[place].kind = SLOT_FIXED
            else:
                self.inputs[self.input_count] = place
                self.input_count += 1
        for result in sorted(storage):
            self.storage[self.storage_count] = storage[result]
            self.storage_count += 1

    cdef int64_t* describe(self, Slot* slot, object value, int64_t* dims) except NULL:
        """Fill in the slot; returns where the next slot's sizes go."""
        slot.rank = -1
        slot.dims = dims
        if value is None:
            slot.kind = SLOT_ANY
            return dims
        slot.kind = SLOT_OTHER
        kind = value.abi_type
        if isinstance(kind, TensorType):
            accepted = [element_types.HAL_OF[dtype] for dtype in kind.accepts]
            slot.rank = len(kind.shape)
            for size in kind.shape:
                dims[0] = -1 if size is None else size
                dims += 1
            # Without a dtype of torch's, only references of iree.runtime are taken, which Python looks at.
            if 0 < len(accepted) <= MOST_DTYPES_OF_A_TYPE:
                slot.kind = SLOT_TENSOR
                slot.element_types[0] = accepted[0]
                slot.element_types[1] = accepted[len(accepted) - 1]
        elif isinstance(kind, ScalarType):
            if kind.integers is not None:
                slot.kind = SLOT_INTEGER
                slot.low, slot.high = kind.integers
            elif kind.floating:
                slot.kind = SLOT_FLOAT
                slot.largest = kind.largest
                slot.single = kind.kind == "f32"
        return dims

    def __dealloc__(self):
        free(self.slots)
        free(self.dims)
        free(self.inputs)
        free(self.storage)


cdef class NativeFrame:
    """The lists of one call; see the declaration."""

    def __cinit__(self):
        self.results = new_variant_list(1)
        self.native_results = borrow_list(self.results)
        self.times = [0, 0, 0, 0]

    cdef int adopt(self, Binding binding, Py_ssize_t fences) except -1:
        """Make the argument list fit: the fixed values in their positions, null references everywhere else."""
        cdef Py_ssize_t total = binding.count + fences
        cdef Py_ssize_t place
        cdef im_vm_list_t* bound
        cdef im_vm_variant_t* variant
        cdef int32_t* count
        cdef TensorView view
        self.forget(False)
        self.binding = None
        free(self.known)
        free(self.missed)
        self.known = <Known*>calloc(binding.count + 1, sizeof(Known))
        self.missed = <Py_ssize_t*>malloc((binding.count + 1) * sizeof(Py_ssize_t))
        # A new list: what the old one held is dropped with it.
        self.arguments = new_variant_list(total)
        self.native_arguments = borrow_list(self.arguments)
        if self.known == NULL or self.missed == NULL or <Py_ssize_t>self.native_arguments.capacity < total:
            raise MemoryError
        memset(self.native_arguments.storage, 0, total * sizeof(im_vm_variant_t))
        self.native_arguments.count = total
        bound = borrow_list(binding.bound)
        for place in range(len(binding.bound_positions)):
            position = binding.bound_positions[place]
            variant = &self.native_arguments.storage[<Py_ssize_t>position]
            if bound.storage[place].type == IM_VALUE_TYPE_F64:
                put_float(variant, bound.storage[place].value.f64, binding.slots[<Py_ssize_t>position].single)
                continue
            variant[0] = bound.storage[place]
            count = _count_of(variant)
            if count != NULL:
                im_ref_retain(count)
        for position, tensor in binding.bound_tensors.items():
            read_admitted(tensor, &view)
            learn(&self.known[<Py_ssize_t>position], NULL, &view, NULL)
        self.binding = binding
        return 0

    cdef void forget(self, bint storage_only) noexcept:
        """Drop what the last call left in the positions that are not fixed."""
        cdef Py_ssize_t place
        cdef Slot* slots
        # Held here: dropping a tensor may run Python code, which must not find this frame half emptied.
        cdef Binding binding = self.binding
        self.outputs = None
        self.kept_outputs = None
        self.transient = False
        if binding is None:
            return
        slots = binding.slots
        for place in range(binding.count):
            if slots[place].kind >= SLOT_VIEW or (not storage_only and slots[place].kind != SLOT_FIXED):
                memset(&self.known[place], 0, sizeof(Known))
                _drop(&self.native_arguments.storage[place])
        if not storage_only:
            # Fences.
            for place in range(binding.count, <Py_ssize_t>self.native_arguments.count):
                _drop(&self.native_arguments.storage[place])

    cdef void drop_results(self) noexcept:
        """Empty the result list: what was handed out holds what it needs."""
        cdef Py_ssize_t place
        cdef Py_ssize_t count = <Py_ssize_t>self.native_results.count
        for place in range(count):
            _drop(&self.native_results.storage[place])
        self.native_results.count = 0

    def __dealloc__(self):
        free(self.known)
        free(self.missed)
