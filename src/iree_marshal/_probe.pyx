# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What the self-check cannot do in Python: the table of layouts, and the native calls.

Every call takes the address of the function and blocks of bytes that its caller laid
out, so that the self-check can be run on wrong tables. It calls only what reading has shown
to be code of the runtime, and on an unproven table only in a child process. Does not
import torch.
"""
from libc.stdint cimport int64_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy

from iree_marshal.abi.iree cimport (
    IM_ALLOCATOR_COMMAND_FREE,
    IM_ALLOCATOR_COMMAND_MALLOC,
    IM_HAL_ALLOCATOR_SLOT_EXPORT_BUFFER,
    IM_HAL_ALLOCATOR_SLOT_HOST_ALLOCATOR,
    IM_HAL_ALLOCATOR_SLOT_IMPORT_BUFFER,
    IM_HAL_ALLOCATOR_SLOT_QUERY_COMPATIBILITY,
    IM_HAL_ALLOCATOR_SLOTS_USED,
    IM_HAL_BUFFER_3_0_ALLOWED_ACCESS_AT,
    IM_HAL_BUFFER_3_0_ALLOWED_USAGE_AT,
    IM_HAL_BUFFER_3_0_MEMORY_TYPE_AT,
    IM_HAL_BUFFER_3_1_ALLOWED_ACCESS_AT,
    IM_HAL_BUFFER_3_1_ALLOWED_USAGE_AT,
    IM_HAL_BUFFER_3_1_MEMORY_TYPE_AT,
    IM_HAL_BUFFER_ALLOWED_ACCESS_AT,
    IM_HAL_BUFFER_ALLOWED_USAGE_AT,
    IM_HAL_BUFFER_MEMORY_TYPE_AT,
    IM_HAL_BUFFER_SLOT_RECYCLE,
    IM_HAL_BUFFER_SLOTS_USED,
    IM_HAL_BUFFER_USAGE_DEFAULT,
    IM_HAL_DEVICE_SLOT_DESTROY,
    IM_HAL_DEVICE_SLOT_DEVICE_ALLOCATOR,
    IM_HAL_ENCODING_DENSE_ROW_MAJOR,
    IM_HAL_EXTERNAL_BUFFER_DEVICE_ALLOCATION,
    IM_HAL_EXTERNAL_BUFFER_HOST_ALLOCATION,
    IM_HAL_MEMORY_ACCESS_ALL,
    IM_HAL_MEMORY_TYPE_DEVICE_LOCAL,
    IM_HAL_QUEUE_AFFINITY_ANY,
    IM_PY_INSTANCE_STATE_MASK,
    IM_PY_INSTANCE_STATE_READY,
    IM_STATUS_CODE_MASK,
    IM_VALUE_TYPE_F32,
    IM_VALUE_TYPE_F64,
    IM_VALUE_TYPE_I8,
    IM_VALUE_TYPE_I16,
    IM_VALUE_TYPE_I32,
    IM_VALUE_TYPE_I64,
    IM_VALUE_TYPE_NONE,
    IM_VM_LIST_STORAGE_MODE_VARIANT,
    im_allocator_ctl_fn_t,
    im_hal_buffer_params_t,
    im_hal_buffer_t,
    im_hal_buffer_view_t,
    im_hal_device_allocator_fn_t,
    im_hal_export_buffer_fn_t,
    im_hal_external_buffer_t,
    im_hal_host_allocator_fn_t,
    im_hal_import_buffer_fn_t,
    im_hal_query_compatibility_fn_t,
    im_hal_release_callback_t,
    im_hal_resource_destroy_fn_t,
    im_hal_resource_t,
    im_host_allocator_t,
    im_py_instance_t,
    im_ref_drop,
    im_ref_retain,
    im_ref_type_descriptor_t,
    im_status_storage_t,
    im_status_t,
    im_vm_list_t,
    im_vm_variant_t,
)


def layout_table():
    """Every offset, constant and slot of abi/iree.h that the native path relies on, by name."""
    # Only addresses are taken, nothing of these is read.
    cdef im_py_instance_t instance
    cdef im_vm_list_t list_
    cdef im_vm_variant_t variant
    cdef im_host_allocator_t host
    cdef im_ref_type_descriptor_t descriptor
    cdef im_hal_buffer_view_t view
    cdef im_hal_buffer_t buffer
    cdef im_hal_buffer_params_t params
    cdef im_hal_external_buffer_t external
    cdef im_hal_release_callback_t callback
    cdef im_status_storage_t status
    return {
        "py_instance.offset": <char*>&instance.offset - <char*>&instance,
        "py_instance.state": <char*>&instance.state - <char*>&instance,
        "py_instance.state_mask": IM_PY_INSTANCE_STATE_MASK,
        "py_instance.state_ready": IM_PY_INSTANCE_STATE_READY,
        "list.ref_count": <char*>&list_.ref_count - <char*>&list_,
        "list.host_allocator": <char*>&list_.host_allocator - <char*>&list_,
        "list.capacity": <char*>&list_.capacity - <char*>&list_,
        "list.count": <char*>&list_.count - <char*>&list_,
        "list.element_type": <char*>&list_.element_type - <char*>&list_,
        "list.element_size": <char*>&list_.element_size - <char*>&list_,
        "list.storage_mode": <char*>&list_.storage_mode - <char*>&list_,
        "list.storage": <char*>&list_.storage - <char*>&list_,
        "list.storage_mode_variant": IM_VM_LIST_STORAGE_MODE_VARIANT,
        "host_allocator.self": <char*>&host.self - <char*>&host,
        "host_allocator.ctl": <char*>&host.ctl - <char*>&host,
        "host_allocator.malloc": IM_ALLOCATOR_COMMAND_MALLOC,
        "host_allocator.free": IM_ALLOCATOR_COMMAND_FREE,
        "variant.type": <char*>&variant.type - <char*>&variant,
        "variant.value": <char*>&variant.value - <char*>&variant,
        "variant.ref_type": <char*>&variant.ref_type - <char*>&variant,
        "variant.size": sizeof(im_vm_variant_t),
        "value_type.none": IM_VALUE_TYPE_NONE,
        "value_type.i8": IM_VALUE_TYPE_I8,
        "value_type.i16": IM_VALUE_TYPE_I16,
        "value_type.i32": IM_VALUE_TYPE_I32,
        "value_type.i64": IM_VALUE_TYPE_I64,
        "value_type.f32": IM_VALUE_TYPE_F32,
        "value_type.f64": IM_VALUE_TYPE_F64,
        "descriptor.destroy": <char*>&descriptor.destroy - <char*>&descriptor,
        "descriptor.name": <char*>&descriptor.name - <char*>&descriptor,
        "descriptor.name_length": <char*>&descriptor.name_length - <char*>&descriptor,
        "view.ref_count": <char*>&view.ref_count - <char*>&view,
        "view.host_allocator": <char*>&view.host_allocator - <char*>&view,
        "view.buffer": <char*>&view.buffer - <char*>&view,
        "view.element_type": <char*>&view.element_type - <char*>&view,
        "view.encoding_type": <char*>&view.encoding_type - <char*>&view,
        "view.byte_length": <char*>&view.byte_length - <char*>&view,
        "view.rank": <char*>&view.rank - <char*>&view,
        "view.dims": <char*>&view.dims[0] - <char*>&view,
        "view.encoding_dense": IM_HAL_ENCODING_DENSE_ROW_MAJOR,
        "resource.ref_count": <char*>&buffer.resource.ref_count - <char*>&buffer,
        "resource.vtable": <char*>&buffer.resource.vtable - <char*>&buffer,
        "buffer.allocated_buffer": <char*>&buffer.allocated_buffer - <char*>&buffer,
        "buffer.allocation_size": <char*>&buffer.allocation_size - <char*>&buffer,
        "buffer.byte_offset": <char*>&buffer.byte_offset - <char*>&buffer,
        "buffer.byte_length": <char*>&buffer.byte_length - <char*>&buffer,
        "buffer.placement_device": <char*>&buffer.placement_device - <char*>&buffer,
        "buffer.memory_type": IM_HAL_BUFFER_MEMORY_TYPE_AT,
        "buffer.allowed_usage": IM_HAL_BUFFER_ALLOWED_USAGE_AT,
        "buffer.allowed_access": IM_HAL_BUFFER_ALLOWED_ACCESS_AT,
        "buffer.slot.recycle": IM_HAL_BUFFER_SLOT_RECYCLE,
        "device.slot.destroy": IM_HAL_DEVICE_SLOT_DESTROY,
        "device.slot.device_allocator": IM_HAL_DEVICE_SLOT_DEVICE_ALLOCATOR,
        "allocator.slot.host_allocator": IM_HAL_ALLOCATOR_SLOT_HOST_ALLOCATOR,
        "allocator.slot.query_compatibility": IM_HAL_ALLOCATOR_SLOT_QUERY_COMPATIBILITY,
        "allocator.slot.import_buffer": IM_HAL_ALLOCATOR_SLOT_IMPORT_BUFFER,
        "allocator.slot.export_buffer": IM_HAL_ALLOCATOR_SLOT_EXPORT_BUFFER,
        "params.usage": <char*>&params.usage - <char*>&params,
        "params.access": <char*>&params.access - <char*>&params,
        "params.type": <char*>&params.type - <char*>&params,
        "params.queue_affinity": <char*>&params.queue_affinity - <char*>&params,
        "params.usage_default": IM_HAL_BUFFER_USAGE_DEFAULT,
        "params.access_all": IM_HAL_MEMORY_ACCESS_ALL,
        "params.type_device_local": IM_HAL_MEMORY_TYPE_DEVICE_LOCAL,
        "params.queue_affinity_any": IM_HAL_QUEUE_AFFINITY_ANY,
        "external.type": <char*>&external.type - <char*>&external,
        "external.flags": <char*>&external.flags - <char*>&external,
        "external.size": <char*>&external.size - <char*>&external,
        "external.handle": <char*>&external.handle - <char*>&external,
        "external.host_allocation": IM_HAL_EXTERNAL_BUFFER_HOST_ALLOCATION,
        "external.device_allocation": IM_HAL_EXTERNAL_BUFFER_DEVICE_ALLOCATION,
        "callback.fn": <char*>&callback.fn - <char*>&callback,
        "callback.user_data": <char*>&callback.user_data - <char*>&callback,
        "status.code_mask": IM_STATUS_CODE_MASK,
        "status.payload_head": <char*>&status.payload_head - <char*>&status,
        "status.message": <char*>&status.message - <char*>&status,
        "status.message_length": <char*>&status.message_length - <char*>&status,
    }


def older_tails():
    """Where memory type, allowed usage and access of a buffer lie in releases that are refused: 3.0, 3.1 to 3.3."""
    return (
        (IM_HAL_BUFFER_3_0_MEMORY_TYPE_AT, IM_HAL_BUFFER_3_0_ALLOWED_USAGE_AT, IM_HAL_BUFFER_3_0_ALLOWED_ACCESS_AT),
        (IM_HAL_BUFFER_3_1_MEMORY_TYPE_AT, IM_HAL_BUFFER_3_1_ALLOWED_USAGE_AT, IM_HAL_BUFFER_3_1_ALLOWED_ACCESS_AT),
    )


def slots_used():
    """How many slots at the head of an allocator's and of a buffer's vtable must hold code."""
    return IM_HAL_ALLOCATOR_SLOTS_USED, IM_HAL_BUFFER_SLOTS_USED


# ---- what the runtime calls, counted ------------------------------------------------------

cdef int64_t _callbacks = 0
cdef int64_t _frees = 0
cdef int64_t _destroys = 0


cdef void _count_callback(void* user_data, im_hal_buffer_t* buffer) noexcept nogil:
    global _callbacks
    if user_data == <void*>&_callbacks:
        _callbacks += 1


cdef im_status_t _count_free(void* self, int command, const void* params, void** inout) noexcept nogil:
    """Host allocator of the view that the self-check makes; FREE is all the runtime may ask of it."""
    global _frees
    if command == IM_ALLOCATOR_COMMAND_FREE and self == <void*>&_frees:
        _frees += 1
        free(inout[0])
        return 0
    return 12  # UNIMPLEMENTED, as a code without storage


cdef void _count_destroy(im_hal_resource_t* resource) noexcept nogil:
    global _destroys
    _destroys += 1


def counts():
    """How often the runtime has called the release callback, FREE, and the destroy function below."""
    return _callbacks, _frees, _destroys


def release_callback():
    """The words (fn, user data) of a callback that `counts` counts."""
    return <uintptr_t>&_count_callback, <uintptr_t>&_callbacks


def view_allocator():
    """The words (self, ctl) that a view must carry for `counts` to see it freed."""
    return <uintptr_t>&_frees, <uintptr_t>&_count_free


def destroy_function():
    """A function for a vtable, whose calls `counts` counts."""
    return <uintptr_t>&_count_destroy


def allocate(bytes content):
    """A copy of `content` in fresh memory; its address. `_count_free` gives it back."""
    cdef char* block = <char*>malloc(len(content))
    if block == NULL:
        raise MemoryError
    memcpy(block, <char*>content, len(content))
    return <uintptr_t>block


def write(uintptr_t address, bytes content):
    """Overwrite memory of an object that the self-check made and has read."""
    memcpy(<void*>address, <char*>content, len(content))


def release(uintptr_t block):
    """Free what `allocate` made, or the storage of a failed status without payloads."""
    free(<void*>block)


# ---- calls ----------------------------------------------------------------------------------


def host_allocator(uintptr_t function, uintptr_t allocator):
    """An allocator's `host_allocator`: the words (self, ctl)."""
    cdef im_host_allocator_t words = (<im_hal_host_allocator_fn_t>function)(<im_hal_resource_t*>allocator)
    return <uintptr_t>words.self, <uintptr_t>words.ctl


def control(uintptr_t ctl, uintptr_t self, int command, size_t nbytes, uintptr_t block):
    """One command of a host allocator, with a byte count (0: none) and a block: the status and the block."""
    cdef void* inout = <void*>block
    cdef im_status_t status = (<im_allocator_ctl_fn_t>ctl)(
        <void*>self, command, &nbytes if nbytes != 0 else NULL, &inout
    )
    return <uintptr_t>status, <uintptr_t>inout


def device_allocator(uintptr_t function, uintptr_t device):
    """A device's `device_allocator`: the address of the allocator."""
    return <uintptr_t>(<im_hal_device_allocator_fn_t>function)(<im_hal_resource_t*>device)


def query_compatibility(uintptr_t function, uintptr_t allocator, bytearray params, uint64_t nbytes):
    """An allocator's `query_buffer_compatibility`: the bits."""
    return (<im_hal_query_compatibility_fn_t>function)(
        <im_hal_resource_t*>allocator, <im_hal_buffer_params_t*><char*>params, &nbytes
    )


def import_buffer(uintptr_t function, uintptr_t allocator, bytearray params, bytearray external, bytes callback):
    """An allocator's `import_buffer`: the status and the address of the buffer."""
    cdef im_hal_release_callback_t words
    cdef im_hal_buffer_t* buffer = NULL
    cdef im_status_t status
    if len(callback) != sizeof(words):
        raise ValueError(f"callback: expected {sizeof(words)} bytes, got {len(callback)}")
    memcpy(&words, <char*>callback, sizeof(words))
    status = (<im_hal_import_buffer_fn_t>function)(
        <im_hal_resource_t*>allocator, <im_hal_buffer_params_t*><char*>params,
        <im_hal_external_buffer_t*><char*>external, words, &buffer,
    )
    return <uintptr_t>status, <uintptr_t>buffer


def export_buffer(
    uintptr_t function, uintptr_t allocator, uintptr_t buffer, int requested_type, uint32_t flags, bytearray external
):
    """An allocator's `export_buffer`, which fills in `external`: the status."""
    return <uintptr_t>(<im_hal_export_buffer_fn_t>function)(
        <im_hal_resource_t*>allocator, <im_hal_buffer_t*>buffer, requested_type, flags,
        <im_hal_external_buffer_t*><char*>external,
    )


def retain(uintptr_t resource):
    """Add a reference."""
    im_ref_retain(<void*>resource)


def drop(uintptr_t resource, uintptr_t last):
    """Drop a reference; calls `last` (a buffer's recycle, a device's destroy) when it was the last one."""
    if im_ref_drop(<void*>resource):
        (<im_hal_resource_destroy_fn_t>last)(<im_hal_resource_t*>resource)
        return True
    return False
