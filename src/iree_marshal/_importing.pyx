# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""From values to a variant list: each tensor becomes a buffer view on its own memory.

A plain tensor is read natively, imported through the allocator's own
`import_buffer`, and written into the list's storage; nothing of it runs Python code.
Every other value goes through `values.admit` first.
"""
from cpython.object cimport PyObject
from libc.stdint cimport int64_t, uint64_t
from libc.string cimport memcpy

from iree_marshal.abi.interpreter cimport Py_INCREF
from iree_marshal._lifetime cimport (
    Batch,
    Owner,
    begin_batch,
    carve_view,
    end_batch,
    enter,
    on_input_released,
)
from iree_marshal._objects cimport NativeDevice, borrow_list, native_device, new_variant_list, ref_types
from iree_marshal._status cimport raise_status
from iree_marshal._tensors cimport (
    READ_CLEAN,
    TensorView,
    grad_mode_enabled,
    is_plain_tensor,
    prefetch,
    read_admitted,
    read_clean,
    require_reader,
)
from iree_marshal.abi.iree cimport (
    IM_ALLOCATOR_COMMAND_MALLOC,
    IM_HAL_BUFFER_USAGE_DEFAULT,
    IM_HAL_ENCODING_DENSE_ROW_MAJOR,
    IM_HAL_EXTERNAL_BUFFER_DEVICE_ALLOCATION,
    IM_HAL_MEMORY_ACCESS_ALL,
    IM_HAL_MEMORY_TYPE_DEVICE_LOCAL,
    IM_HAL_QUEUE_AFFINITY_ANY,
    im_hal_buffer_params_t,
    im_hal_buffer_release,
    im_hal_buffer_t,
    im_hal_buffer_view_t,
    im_hal_external_buffer_t,
    im_hal_release_callback_t,
    im_host_allocator_t,
    im_status_t,
    im_vm_list_t,
)

from iree_marshal import devices, values as admission
from iree_marshal.errors import where

cdef extern from "Python.h":
    # Without the reference that Cython's own declarations would add.
    PyObject* borrow_list_item "PyList_GET_ITEM"(object sequence, Py_ssize_t index)
    PyObject* borrow_tuple_item "PyTuple_GET_ITEM"(object sequence, Py_ssize_t index)

cdef enum:
    # Bytes of view slab per tensor: enough for rank 3. Views beyond it are allocated one by one.
    VIEW_BYTES = 80
    # How many elements ahead of the one that is read the next tensor is fetched.
    AHEAD = 4

# Every member is set: the slot is called without the wrapper that would fill in zeros. No
# mapping usage: on CUDA it would ask for host-visible memory.
cdef im_hal_buffer_params_t _params
_params.usage = IM_HAL_BUFFER_USAGE_DEFAULT
_params.access = IM_HAL_MEMORY_ACCESS_ALL
_params.type = IM_HAL_MEMORY_TYPE_DEVICE_LOCAL
_params.queue_affinity = IM_HAL_QUEUE_AFFINITY_ANY
_params.min_alignment = 0

# Stands in for the memory of empty tensors on the host; aligned within.
cdef char[128] _nothing

# For tests: the import that many imports from now asks for a buffer type that no driver
# knows, so that HAL itself refuses it. -1: never.
cdef int64_t _refusal_countdown = -1


def refuse_import_after(int64_t imports):
    """Make HAL refuse one import from now on, after `imports` good ones (for tests; -1 switches it off)."""
    global _refusal_countdown
    _refusal_countdown = imports


# The process-wide devices that tensors were found on, by `device_key`.
cdef dict _defaults = {}


cdef inline Py_ssize_t device_key(int torch_type, int torch_index) noexcept:
    return torch_type * 1024 + torch_index


cdef class Import:
    """One call of `to_variant_list`: what all of its elements share."""

    cdef NativeDevice device   # None until the first tensor says which
    cdef object torch_device   # the device that tensors must be on, or None while it is open
    cdef object copy
    cdef bint upload
    cdef bint grad_mode

    cdef int settle_device(self, object torch_device) except -1:
        """The first tensor decides where the call did not say."""
        self.torch_device = torch_device
        self.device = native_device(devices.hal_device(torch_device))
        _defaults[device_key(self.device.torch_type, self.device.torch_index)] = self.device
        return 0

    cdef bint is_at_home(self, const TensorView* view) except -1:
        """Whether a clean tensor is on the device of this call; the first one decides it."""
        if self.device is None:
            self.device = _defaults.get(device_key(view.device_type, view.device_index))
            if self.device is None:
                return False
            self.torch_device = self.device.torch_device
        return view.device_type == self.device.torch_type and view.device_index == self.device.torch_index

    cdef object convert(self, object sequence, tuple path):
        """A new variant list of `sequence` (a list or tuple); `path` leads to it from the outermost one."""
        cdef Py_ssize_t count = len(sequence)
        cdef object variants = new_variant_list(count)
        cdef im_vm_list_t* native = borrow_list(variants)
        cdef bint is_list = isinstance(sequence, list)
        cdef Batch* batch = NULL
        cdef Py_ssize_t index, length
        cdef PyObject* item
        cdef PyObject* ahead
        cdef TensorView view
        # Nothing to undo on failure: the list is dropped with what it holds, and each
        # import hands its tensor back through the release callback.
        try:
            for index in range(count):
                # Checked again each time: admitting an element may run Python code that changes a list.
                length = len(sequence)
                if index >= length:
                    raise RuntimeError(f"{where(path)}: the list changed its length while it was converted")
                item = borrow_list_item(sequence, index) if is_list else borrow_tuple_item(sequence, index)
                if index + AHEAD < length:
                    ahead = borrow_list_item(sequence, index + AHEAD) if is_list else borrow_tuple_item(
                        sequence, index + AHEAD
                    )
                    if is_plain_tensor(ahead):
                        prefetch(ahead)
                if (
                    self.copy is not True
                    and is_plain_tensor(item)
                    and read_clean(item, self.grad_mode, &view) == READ_CLEAN
                    and self.is_at_home(&view)
                ):
                    if batch == NULL:
                        batch = begin_batch(self.device.account, count, count * VIEW_BYTES)
                    import_tensor(self.device, batch, item, &view, native, path, index)
                else:
                    self.convert_other(<object>item, variants, native, &batch, count, path, index)
        finally:
            if batch != NULL:
                end_batch(batch)
        return variants

    cdef int convert_other(
        self, object value, object variants, im_vm_list_t* native, Batch** batch, Py_ssize_t count, tuple path,
        Py_ssize_t index,
    ) except -1:
        """Whatever is not a plain tensor on the right device: asks `values.admit` what it becomes."""
        cdef TensorView view
        cdef tuple inner = path + (index,)
        kind, payload = admission.admit(value, inner, self.torch_device, self.copy, self.upload)
        if kind == admission.TENSOR:
            if self.device is None:
                self.settle_device(payload.device)
            read_admitted(payload, &view)
            if batch[0] == NULL:
                batch[0] = begin_batch(self.device.account, count, count * VIEW_BYTES)
            import_tensor(self.device, batch[0], <PyObject*>payload, &view, native, path, index)
        elif kind == admission.INT:
            variants.push_int(payload)
        elif kind == admission.FLOAT:
            variants.push_float(payload)
        elif kind == admission.NONE:
            # A null reference is a variant of all zeros, which is what the runtime leaves there.
            push_null(native)
        elif kind == admission.LIST:
            variants.push_list(self.convert(payload, inner))
        elif kind == admission.VARIANTS:
            variants.push_list(payload)
        else:
            variants.push_ref(payload)
        return 0


cdef im_hal_buffer_t* import_memory(
    NativeDevice device, Batch* batch, PyObject* tensor, const TensorView* view, tuple path, Py_ssize_t index
) except NULL:
    """A HAL buffer over the tensor's memory; IREE keeps the tensor alive until the buffer is gone."""
    global _refusal_countdown
    cdef im_hal_external_buffer_t external
    cdef im_hal_release_callback_t callback
    cdef im_hal_buffer_t* buffer = NULL
    cdef im_status_t status
    cdef Owner* owner = &batch.owners[batch.owners_used]
    external.type = IM_HAL_EXTERNAL_BUFFER_DEVICE_ALLOCATION
    if _refusal_countdown >= 0:
        if _refusal_countdown == 0:
            external.type = 0
        _refusal_countdown -= 1
    external.flags = 0
    external.size = <uint64_t>view.nbytes
    external.handle = <uint64_t>view.data
    if view.nbytes == 0 and device.torch_type == 0:
        # IREE's host drivers crash on a dispatch over a buffer of no bytes (iree-base-runtime 3.13.0, also through
        # from_dlpack_capsule): the view has none, the buffer below it this block, which nobody reads or writes.
        external.size = 64
        external.handle = (<uint64_t>&_nothing[0] + 63) & ~<uint64_t>63
    callback.fn = on_input_released
    callback.user_data = owner
    owner.object = tensor
    owner.batch = batch
    owner.nbytes = view.nbytes
    status = device.import_buffer(device.allocator, &_params, &external, callback, &buffer)
    if status != 0:
        # A failed import does not call back, and the owner was not counted yet.
        raise_status(status, f"{where(path + (index,))}: cannot import {view.nbytes} bytes at {<uint64_t>view.data:#x}")
    Py_INCREF(tensor)
    batch.owners_used += 1
    return buffer


cdef im_hal_buffer_view_t* make_view(
    Batch* batch, im_hal_buffer_t* buffer, const TensorView* view, const im_host_allocator_t* host_allocator
) except NULL:
    """A buffer view of the tensor's shape and dtype; takes over the reference to `buffer`, also on failure."""
    cdef im_hal_buffer_view_t* made = carve_view(batch, <size_t>view.rank)
    cdef size_t nbytes
    if made == NULL:
        # The slab is used up: one allocation through the list's own host allocator.
        nbytes = sizeof(im_hal_buffer_view_t) + <size_t>view.rank * sizeof(int64_t)
        if host_allocator.ctl(host_allocator.self, IM_ALLOCATOR_COMMAND_MALLOC, &nbytes, <void**>&made) != 0:
            im_hal_buffer_release(buffer)
            raise MemoryError(f"cannot allocate {nbytes} bytes for a buffer view")
        made.host_allocator = host_allocator[0]
    made.ref_count = 1
    made.buffer = buffer
    made.element_type = view.element_type
    made.encoding_type = IM_HAL_ENCODING_DENSE_ROW_MAJOR
    made.byte_length = <uint64_t>view.nbytes
    made.rank = <size_t>view.rank
    memcpy(made.dims, view.sizes, <size_t>view.rank * sizeof(int64_t))
    return made


cdef int import_tensor(
    NativeDevice device, Batch* batch, PyObject* tensor, const TensorView* view, im_vm_list_t* variants, tuple path,
    Py_ssize_t index,
) except -1:
    """Append the tensor to `variants` as a buffer view on its own memory."""
    cdef im_hal_buffer_t* buffer = import_memory(device, batch, tensor, view, path, index)
    cdef im_hal_buffer_view_t* made = make_view(batch, buffer, view, &variants.host_allocator)
    cdef size_t position = variants.count
    variants.storage[position].type = ref_types.buffer_view
    variants.storage[position].value.ref = made
    variants.storage[position].ref_type = ref_types.buffer_view
    variants.count = position + 1
    return 0


cdef void push_null(im_vm_list_t* variants) noexcept nogil:
    """Append a null reference: a variant of all zeros."""
    cdef size_t position = variants.count
    variants.storage[position].type = 0
    variants.storage[position].value.ref = NULL
    variants.storage[position].ref_type = 0
    variants.count = position + 1


def to_variant_list(values, hal_device, torch_device, copy, bint order, bint upload):
    """The native path of `iree_marshal.to_variant_list`; the arguments are resolved there."""
    enter()
    require_reader()
    cdef Import call = Import.__new__(Import)
    call.copy = copy
    call.upload = upload
    call.grad_mode = grad_mode_enabled()
    if hal_device is not None:
        call.device = native_device(hal_device)
        call.torch_device = torch_device
    try:
        variants = call.convert(values, ())
    except BaseException:
        # The list was dropped while the error was pending, so its tensors wait in the release queue.
        enter()
        raise
    # After the copies that some tensors needed: they run on torch's stream as well.
    if order and call.device is not None and call.device.order != NULL:
        call.device.order(call.device)
    return variants
