# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
from libc.stdint cimport uintptr_t

from iree_marshal._lifetime cimport Account
from iree_marshal.abi.iree cimport (
    im_hal_buffer_t,
    im_hal_buffer_view_t,
    im_hal_export_buffer_fn_t,
    im_hal_import_buffer_fn_t,
    im_hal_resource_t,
    im_vm_list_t,
)


# Type words of the refs that the crossing reads and writes; 0 until `arm`.
cdef struct RefTypes:
    uintptr_t buffer_view
    uintptr_t buffer
    uintptr_t list


cdef RefTypes ref_types
cdef void** heap_buffer_vtable


# Finds the base address of an allocation of a device; 1 when only a copy can hand it out.
ctypedef int (*Locate)(NativeDevice device, im_hal_buffer_t* allocation, char** base) except -1

# Makes the device's work wait for what torch's current stream was given so far.
ctypedef int (*Order)(NativeDevice device) except -1

# Makes the device's context current on this thread, in which IREE loads, allocates and records; whether it was not.
ctypedef bint (*Enter)(NativeDevice device) noexcept

# Undoes it; to be called on the same thread, and only then.
ctypedef void (*Leave)() noexcept


# A HAL device with what the crossing needs of it. Never destroyed: the native device
# and its allocator get one reference each that is not given back.
cdef class NativeDevice:
    cdef readonly object hal_device    # the iree.runtime.HalDevice
    cdef readonly object torch_device  # the torch.device whose memory it uses
    cdef im_hal_resource_t* device
    cdef im_hal_resource_t* allocator
    cdef Account* account
    cdef im_hal_import_buffer_fn_t import_buffer
    cdef im_hal_export_buffer_fn_t export_buffer
    cdef int torch_type                # as libtorch's shim numbers them: 0 cpu, 1 cuda
    cdef int torch_index
    cdef int dlpack_type
    cdef Locate locate
    cdef Order order                   # NULL on a host device, which needs none
    cdef Enter enter_context           # NULL on a host device, and where the driver's functions were not found
    cdef Leave leave_context


cdef im_vm_list_t* borrow_list(object variants) except NULL
cdef im_hal_buffer_view_t* borrow_buffer_view(object view) except NULL
cdef im_hal_buffer_t* borrow_buffer(object buffer) except NULL
cdef im_hal_resource_t* borrow_device(object hal_device) except NULL
cdef bint is_host_device(im_hal_resource_t* device) noexcept nogil
cdef NativeDevice native_device_at(im_hal_resource_t* device)
cpdef NativeDevice native_device(object hal_device)
cpdef object new_variant_list(Py_ssize_t capacity)
cdef int locate_exported(NativeDevice device, im_hal_buffer_t* allocation, char** base) except -1
