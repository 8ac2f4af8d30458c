# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""From the Python objects of iree.runtime to the native objects inside them.

Trusts the nanobind instance layout and the reference type words, both of which
`iree_marshal.selfcheck` has proven in this process before `arm` is called; until
then every function here raises.
"""
import atexit
import threading

import iree.runtime as rt

from cpython.object cimport PyObject
from libc.stdint cimport uintptr_t

from iree_marshal._lifetime cimport new_account
from iree_marshal._status cimport raise_status
from iree_marshal.abi.dlpack cimport IM_DL_CPU, IM_DL_CUDA, IM_DL_ROCM
from iree_marshal.abi.iree cimport (
    IM_HAL_ALLOCATOR_SLOT_EXPORT_BUFFER,
    IM_HAL_ALLOCATOR_SLOT_IMPORT_BUFFER,
    IM_HAL_EXTERNAL_BUFFER_DEVICE_ALLOCATION,
    IM_PY_INSTANCE_STATE_MASK,
    IM_PY_INSTANCE_STATE_READY,
    IM_VM_LIST_STORAGE_MODE_VARIANT,
    im_hal_buffer_t,
    im_hal_buffer_view_t,
    im_hal_external_buffer_t,
    im_hal_resource_t,
    im_py_instance_t,
    im_ref_retain,
    im_status_t,
    im_vm_list_t,
    im_vm_variant_t,
)

from iree_marshal import _lifetime

cdef RefTypes ref_types = RefTypes(0, 0, 0)
cdef void** heap_buffer_vtable = NULL

cdef object VmVariantList = rt.VmVariantList
cdef object HalBufferView = rt.HalBufferView
cdef object HalBuffer = rt.HalBuffer
cdef object HalDevice = rt.HalDevice
cdef object HalAllocator = rt.HalAllocator

cdef bint _armed = False
cdef dict _native_devices = {}   # native address -> NativeDevice, proven and ready
cdef dict _attaching = {}        # likewise, while it is being proven by the thread that holds the lock
cdef object _attach_lock = threading.RLock()
# Vtables of the host drivers (local-sync, local-task), learned from devices of those
# drivers: a device with one of them lives in host memory.
cdef void** _host_vtables[8]
cdef int _host_vtable_count = 0


cdef void* _borrow(object instance, object cls) except NULL:
    """The native pointer inside a nanobind instance; borrowed, valid while the instance lives."""
    cdef im_py_instance_t* head = <im_py_instance_t*><PyObject*>instance
    if not _armed:
        raise RuntimeError("the native path is not open: it was not proven yet, or the interpreter is shutting down")
    # By the real class: what only claims to be one (a mock, a proxy) has another layout.
    if not issubclass(type(instance), cls):
        raise TypeError(f"expected {cls.__name__}, got {type(instance).__name__}")
    # Bits other than these say who owns the memory; an instance made by __new__ alone is not ready.
    if head.state & IM_PY_INSTANCE_STATE_MASK != IM_PY_INSTANCE_STATE_READY:
        raise ValueError(f"this {cls.__name__} was not initialised")
    cdef void* native = (<void**>(<char*>head + head.offset))[0]
    if native == NULL:
        raise ValueError(f"this {cls.__name__} is empty")
    return native


cdef im_vm_list_t* borrow_list(object variants) except NULL:
    cdef im_vm_list_t* native = <im_vm_list_t*>_borrow(variants, VmVariantList)
    if (
        native.storage_mode != IM_VM_LIST_STORAGE_MODE_VARIANT
        or native.element_size != sizeof(im_vm_variant_t)
        or native.count > native.capacity
    ):
        raise ValueError("this VmVariantList does not hold variants")
    return native


cdef im_hal_buffer_view_t* borrow_buffer_view(object view) except NULL:
    return <im_hal_buffer_view_t*>_borrow(view, HalBufferView)


cdef im_hal_buffer_t* borrow_buffer(object buffer) except NULL:
    return <im_hal_buffer_t*>_borrow(buffer, HalBuffer)


cdef im_hal_resource_t* borrow_device(object hal_device) except NULL:
    return <im_hal_resource_t*>_borrow(hal_device, HalDevice)


cpdef object new_variant_list(Py_ssize_t capacity):
    """An empty list with room for `capacity` variants."""
    return VmVariantList(capacity if capacity > 0 else 1)


# ---- devices ------------------------------------------------------------------------------


cdef bint is_host_device(im_hal_resource_t* device) noexcept nogil:
    cdef int index
    for index in range(_host_vtable_count):
        if device.vtable == _host_vtables[index]:
            return True
    return False


cdef int _learn_host_vtable(im_hal_resource_t* device) except -1:
    global _host_vtable_count
    if not is_host_device(device):
        if _host_vtable_count == sizeof(_host_vtables) // sizeof(_host_vtables[0]):
            raise RuntimeError("more host drivers than iree_marshal has room for")
        _host_vtables[_host_vtable_count] = device.vtable
        _host_vtable_count += 1
    return 0


cdef class NativeDevice:
    """A HAL device bound to the torch device whose memory it uses; see the declaration."""

    def __cinit__(self, object hal_device, object torch_device):
        import torch

        self.hal_device = hal_device
        self.torch_device = torch_device
        self.device = borrow_device(hal_device)
        allocator = hal_device.allocator
        self.allocator = <im_hal_resource_t*>_borrow(allocator, HalAllocator)
        self.import_buffer = <im_hal_import_buffer_fn_t>self.allocator.vtable[IM_HAL_ALLOCATOR_SLOT_IMPORT_BUFFER]
        self.export_buffer = <im_hal_export_buffer_fn_t>self.allocator.vtable[IM_HAL_ALLOCATOR_SLOT_EXPORT_BUFFER]
        self.account = new_account()
        self.locate = locate_exported
        self.order = NULL
        self.enter_context = NULL
        self.leave_context = NULL
        self.torch_index = -1 if torch_device.index is None else torch_device.index
        if torch_device.type == "cpu":
            self.torch_type = 0
            self.dlpack_type = IM_DL_CPU
            _learn_host_vtable(self.device)
        elif torch_device.type == "cuda":
            self.torch_type = 1
            self.dlpack_type = IM_DL_CUDA if torch.version.hip is None else IM_DL_ROCM
        else:
            raise ValueError(f"torch device {torch_device} has no IREE device; supported: cpu, cuda")
        # Not given back: a device destructor may hang in a forked child, and crashes at
        # exit (iree-base-runtime 3.12, 3.13) while results are alive.
        im_ref_retain(self.device)
        im_ref_retain(self.allocator)

    def __repr__(self):
        return f"NativeDevice({self.hal_device!r} for {self.torch_device})"


cdef int locate_exported(NativeDevice device, im_hal_buffer_t* allocation, char** base) except -1:
    """Base address of an allocation through the device's own `export_buffer`."""
    cdef im_hal_external_buffer_t external
    cdef im_status_t status
    external.handle = 0
    status = device.export_buffer(device.allocator, allocation, IM_HAL_EXTERNAL_BUFFER_DEVICE_ALLOCATION, 0, &external)
    if status != 0:
        raise_status(status, "cannot export the buffer")
    base[0] = <char*>external.handle
    return 0


cdef NativeDevice native_device_at(im_hal_resource_t* device):
    """The known device at this address, or None."""
    return _native_devices.get(<uintptr_t>device)


cpdef NativeDevice native_device(object hal_device):
    """The process-wide record of a HAL device; made on first sight, which makes the device immortal."""
    from iree_marshal import devices

    cdef uintptr_t address = <uintptr_t>borrow_device(hal_device)
    cdef NativeDevice known = _native_devices.get(address)
    if known is not None:
        return known
    torch_device = devices.torch_device_of(hal_device)
    # Proving a GPU takes milliseconds without the GIL: no other thread may use the device before, nor prove it again.
    with _attach_lock:
        known = _native_devices.get(address) or _attaching.get(address)
        if known is None:
            known = NativeDevice(hal_device, torch_device)
            _attaching[address] = known
            try:
                if known.torch_type != 0:
                    from iree_marshal import _cuda

                    with devices.current(torch_device):
                        _cuda.attach(known)
                _native_devices[address] = known
            finally:
                del _attaching[address]
    return known


def known_devices():
    """All `NativeDevice` records of this process."""
    return list(_native_devices.values())


def keep_native(hal_device):
    """Keep a device alive natively for the rest of the process; False where the native path is not open."""
    if not _armed:
        return False
    im_ref_retain(borrow_device(hal_device))
    return True


def arm(sync_device):
    """Learn the type words and vtables of this process.

    Parameters
    ----------
    sync_device : iree.runtime.HalDevice
        A private `local-sync` device. Called once, after the self-check has passed.
    """
    global _armed, heap_buffer_vtable
    cdef im_vm_list_t* native
    cdef im_hal_buffer_t* buffer
    if _armed:
        return
    _armed = True
    try:
        variants = VmVariantList(4)
        view = sync_device.allocator.allocate_buffer_copy(
            memory_type=rt.MemoryType.DEVICE_LOCAL | rt.MemoryType.HOST_VISIBLE,
            allowed_usage=rt.BufferUsage.DEFAULT | rt.BufferUsage.MAPPING,
            device=sync_device,
            buffer=bytes(64),
            element_type=rt.HalElementType.UINT_8,
        )
        variants.push_ref(view)
        variants.push_ref(view.get_buffer())
        variants.push_list(VmVariantList(1))
        native = borrow_list(variants)
        ref_types.buffer_view = native.storage[0].ref_type
        ref_types.buffer = native.storage[1].ref_type
        ref_types.list = native.storage[2].ref_type
        buffer = (<im_hal_buffer_view_t*>native.storage[0].value.ref).buffer.allocated_buffer
        heap_buffer_vtable = buffer.resource.vtable
        _learn_host_vtable(borrow_device(sync_device))
        im_ref_retain(borrow_device(sync_device))
        _lifetime.watch_process()
        atexit.register(_forget)
    except BaseException:
        _armed = False
        raise


def _forget():
    """At exit: close the native path and drop what C variables hold of iree.runtime, which reports leaks otherwise."""
    global _armed, VmVariantList, HalBufferView, HalBuffer, HalDevice, HalAllocator
    cdef NativeDevice known
    _armed = False
    for known in _native_devices.values():
        known.hal_device = None
    VmVariantList = HalBufferView = HalBuffer = HalDevice = HalAllocator = None
