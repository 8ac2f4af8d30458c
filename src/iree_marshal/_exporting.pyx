# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""From a variant list to values: each buffer view becomes a tensor on IREE's own memory.

The pointer comes from the allocator's `export_buffer`; the tensor from torch's own
DLPack constructor, called through its C table: no capsule, no Python call per
tensor. Every tensor keeps its buffer alive, and the device with it.
"""
import torch
from iree.runtime import HalBufferView

from cpython.object cimport PyObject
from libc.stdint cimport int64_t, uint32_t, uintptr_t
from libc.string cimport memcpy

from iree_marshal._lifetime cimport (
    Account,
    Holding,
    HoldingBlock,
    begin_holdings,
    carve_holding,
    drop_holding,
    end_holdings,
    enter,
    new_account,
)
from iree_marshal._objects cimport (
    NativeDevice,
    borrow_list,
    heap_buffer_vtable,
    is_host_device,
    native_device,
    native_device_at,
    ref_types,
)
from iree_marshal._status cimport raise_status
from iree_marshal._tensors cimport exchange_api, require_reader
from iree_marshal._views cimport part_of, require_views, views_are_native
from iree_marshal.abi.dlpack cimport (
    IM_DL_CPU,
    IM_DLPACK_MAJOR,
    im_dl_data_type_t,
    im_dl_managed_tensor_t,
    im_dl_tensor_t,
)
from iree_marshal.abi.iree cimport (
    IM_HAL_ALLOCATOR_SLOT_EXPORT_BUFFER,
    IM_HAL_DEVICE_SLOT_DEVICE_ALLOCATOR,
    IM_HAL_ENCODING_DENSE_ROW_MAJOR,
    IM_HAL_EXTERNAL_BUFFER_DEVICE_ALLOCATION,
    IM_VALUE_TYPE_F32,
    IM_VALUE_TYPE_F64,
    IM_VALUE_TYPE_I8,
    IM_VALUE_TYPE_I16,
    IM_VALUE_TYPE_I32,
    IM_VALUE_TYPE_I64,
    IM_VALUE_TYPE_NONE,
    im_hal_buffer_t,
    im_hal_buffer_view_t,
    im_hal_device_allocator_fn_t,
    im_hal_export_buffer_fn_t,
    im_hal_external_buffer_t,
    im_hal_resource_t,
    im_status_t,
    im_vm_list_t,
    im_vm_variant_t,
)

from iree_marshal import devices, element_types
from iree_marshal.arrays import HalArray
from iree_marshal.errors import where
from iree_marshal.portable import as_runtime_object, copy_out, tensor_as_array
from iree_marshal.slab import real_memory, retyped
from iree_marshal.values import check_depth

cdef enum:
    HIGHEST_RANK = 64      # torch's own limit; a view of a higher rank is damaged
    MOST_ELEMENT_TYPES = 64

# The managed tensor that torch adopts, with what it holds, its shape and its strides.
cdef struct Exported:
    Holding holding           # first: heads the description
    im_dl_managed_tensor_t managed
    uint32_t element_type     # of HAL
    int64_t dims[1]           # really 2 * rank


# ---- element types ------------------------------------------------------------------------

# How torch is told the dtype of a result. Built once, from torch's own answers.
cdef struct ResultType:
    uint32_t element_type       # of HAL
    uint32_t item_size          # bytes
    im_dl_data_type_t dlpack
    PyObject* reinterpret_as    # torch.dtype where DLPack cannot name it: handed over as bytes, then viewed

cdef ResultType _result_types[MOST_ELEMENT_TYPES]
cdef int _result_type_count = 0


cdef int _load_result_types() except -1:
    global _result_type_count
    cdef im_dl_tensor_t probe
    cdef ResultType* entry
    cdef PyObject* reinterpret_as
    cdef int count = 0
    if _result_type_count:
        return 0
    with real_memory():
        for element_type, dtype in element_types.TORCH_OF.items():
            if count == MOST_ELEMENT_TYPES:
                raise RuntimeError("more element types than iree_marshal has room for")
            reinterpret_as = NULL
            tensor = torch.empty(1, dtype=dtype, device="cpu")
            try:
                exchange_api().dltensor_from_py_object_no_sync(<void*>tensor, &probe)
            except (BufferError, RuntimeError, TypeError, ValueError):
                tensor = tensor.view(torch.uint8)
                if tensor.numel() != 1:
                    raise
                exchange_api().dltensor_from_py_object_no_sync(<void*>tensor, &probe)
                reinterpret_as = <PyObject*>dtype  # kept alive by torch
            # At once: another thread may be through before, and read the table while this one writes the same again.
            entry = &_result_types[count]
            entry.element_type = element_type
            entry.item_size = dtype.itemsize
            entry.dlpack = probe.dtype
            entry.reinterpret_as = reinterpret_as
            count += 1
    _result_type_count = count
    return 0


cdef ResultType* find_result_type(uint32_t element_type) noexcept nogil:
    cdef int index
    for index in range(_result_type_count):
        if _result_types[index].element_type == element_type:
            return &_result_types[index]
    return NULL


# ---- where a result lives --------------------------------------------------------------------


cdef class Export:
    """One call of `from_variant_list`: what its results share."""

    cdef NativeDevice fallback           # for buffers that do not say their device
    cdef bint as_arrays
    cdef bint shared                     # results of one allocation are handed out as parts of one tensor
    cdef bint shared_on_host             # at least those in host memory
    cdef HoldingBlock* block             # where the descriptions of the current list go
    # Tensors on the whole allocation seen last, by element type; NULL where there is none yet.
    cdef dict wholes
    # The allocation seen last and where it lives: IREE carves many results out of one.
    cdef im_hal_buffer_t* allocation
    cdef NativeDevice known              # its device, where that is one that is never destroyed
    cdef im_hal_resource_t* transient    # its device, where the caller may destroy it
    cdef char* base
    cdef Account* account
    cdef int dlpack_type
    cdef int device_index
    cdef object torch_device

    cdef int locate(self, im_hal_buffer_t* allocation, tuple path, Py_ssize_t index) except -1:
        """Find the device and the base address of an allocation; 1 when only a copy can hand it out."""
        cdef im_hal_resource_t* device = allocation.placement_device
        cdef im_hal_resource_t* allocator
        cdef im_hal_export_buffer_fn_t export_buffer
        cdef im_hal_external_buffer_t external
        cdef im_status_t status
        self.allocation = NULL
        self.wholes = None
        self.transient = NULL
        if device == NULL:
            # Imports, copies and local-sync results on the host say nothing.
            if allocation.resource.vtable != heap_buffer_vtable and self.fallback is None:
                raise ValueError(
                    f"{where(path + (index,))}: the buffer does not say which device it belongs to; "
                    "pass from_variant_list(..., device=...)"
                )
            if self.fallback is None:
                self.fallback = host_device()
            self.known = self.fallback
        elif self.known is None or self.known.device != device:
            self.known = native_device_at(device)
        if self.known is not None:
            self.account = self.known.account
            self.dlpack_type = self.known.dlpack_type
            self.device_index = max(self.known.torch_index, 0)
            self.torch_device = self.known.torch_device
            try:
                if self.known.locate(self.known, allocation, &self.base) != 0:
                    return 1
            except Exception as error:
                raise type(error)(f"{where(path + (index,))}: {error}") from None
        elif is_host_device(device):
            # A device of the caller's own that was never handed to us: it must outlive its results.
            self.transient = device
            self.account = transient_account()
            self.dlpack_type = IM_DL_CPU
            self.device_index = 0
            self.torch_device = torch.device("cpu")
            allocator = (<im_hal_device_allocator_fn_t>device.vtable[IM_HAL_DEVICE_SLOT_DEVICE_ALLOCATOR])(device)
            export_buffer = <im_hal_export_buffer_fn_t>allocator.vtable[IM_HAL_ALLOCATOR_SLOT_EXPORT_BUFFER]
            external.handle = 0
            status = export_buffer(allocator, allocation, IM_HAL_EXTERNAL_BUFFER_DEVICE_ALLOCATION, 0, &external)
            if status != 0:
                raise_status(status, f"{where(path + (index,))}: cannot export the buffer")
            self.base = <char*>external.handle
        else:
            raise ValueError(
                f"{where(path + (index,))}: the buffer belongs to a HAL device that iree_marshal does not know; "
                "name it with iree_marshal.register_device(hal_device, torch_device)"
            )
        self.allocation = allocation
        return 0

    cdef object export_view(
        self, object variants, im_hal_buffer_view_t* view, tuple path, Py_ssize_t index, im_hal_buffer_t* following
    ):
        """The buffer view as a tensor or `HalArray`; `following` is the allocation of the next one in the list."""
        cdef im_hal_buffer_t* buffer = view.buffer
        cdef ResultType* result_type = find_result_type(view.element_type)
        if result_type == NULL:
            raise TypeError(
                f"{where(path + (index,))}: torch has no dtype for the HAL element type {view.element_type:#010x}"
            )
        if view.encoding_type != IM_HAL_ENCODING_DENSE_ROW_MAJOR:
            raise TypeError(f"{where(path + (index,))}: only dense row-major buffer views can be adopted")
        if view.rank > HIGHEST_RANK:
            raise ValueError(f"{where(path + (index,))}: rank {view.rank} is more than torch's {HIGHEST_RANK}")
        if buffer.allocated_buffer != self.allocation:
            if self.locate(buffer.allocated_buffer, path, index) != 0:
                return self.copy_view(variants, index)
        if self.as_arrays:
            return self.make_array(view, result_type)
        if (
            (self.shared or (self.shared_on_host and self.dlpack_type == IM_DL_CPU))
            and self.is_part(view, result_type, following)
        ):
            return self.make_part(view, result_type)
        return adopt(self.describe_view(view, result_type), result_type)

    cdef object copy_view(self, object variants, Py_ssize_t index):
        """The buffer view's bytes in memory of torch's, where the buffer itself cannot be handed out."""
        view = variants.get_as_object(index, HalBufferView)
        raw = copy_out(self.known.hal_device, view.get_buffer(), view.byte_length, self.torch_device)
        tensor = raw.view(element_types.TORCH_OF[view.element_type]).reshape(tuple(view.shape))
        return tensor_as_array(tensor) if self.as_arrays else tensor

    cdef bint is_part(self, im_hal_buffer_view_t* view, const ResultType* result_type, im_hal_buffer_t* following):
        """Whether the view shares its allocation with others of the list, and lies in it as a tensor can."""
        cdef im_hal_buffer_t* buffer = view.buffer
        return (
            (self.wholes is not None or following == self.allocation)
            and self.allocation.byte_offset == 0
            and buffer.byte_offset % result_type.item_size == 0
            and buffer.byte_offset + view.byte_length <= self.allocation.byte_length
        )

    cdef object make_part(self, im_hal_buffer_view_t* view, ResultType* result_type):
        """The view as a part of one tensor on the whole allocation, which is made by the first of them."""
        cdef int64_t strides[HIGHEST_RANK]
        cdef int64_t length
        cdef Exported* exported
        if self.wholes is None:
            self.wholes = {}
        whole = self.wholes.get(view.element_type)
        if whole is None:
            length = <int64_t>(self.allocation.byte_length // result_type.item_size)
            exported = self.describe(self.allocation, result_type, 1, &length, length * result_type.item_size)
            exported.holding.shared = True
            whole = adopt(exported, result_type)
            self.wholes[view.element_type] = whole
        fill_strides(view.rank, view.dims, strides)
        return part_of(whole, view.rank, view.dims, strides, view.buffer.byte_offset // result_type.item_size)

    cdef Exported* describe_view(self, im_hal_buffer_view_t* view, const ResultType* result_type) except NULL:
        return self.describe(view.buffer, result_type, view.rank, view.dims, <int64_t>view.byte_length)

    cdef Exported* describe(
        self, im_hal_buffer_t* buffer, const ResultType* result_type, size_t rank, const int64_t* dims, int64_t nbytes
    ) except NULL:
        """Everything torch needs to adopt a tensor at the start of `buffer`; holds the buffer until it is dropped."""
        cdef size_t size = size_of_description(rank)
        cdef Exported* exported = <Exported*>carve_holding(self.block, size, buffer, self.transient, self.account)
        if exported == NULL:
            # Rare: the whole of an allocation, or a list that was changed meanwhile.
            end_holdings(self.block)
            self.block = NULL
            self.block = begin_holdings(1, size)
            exported = <Exported*>carve_holding(self.block, size, buffer, self.transient, self.account)
        exported.holding.nbytes = nbytes
        exported.element_type = result_type.element_type
        exported.managed.version.major = IM_DLPACK_MAJOR
        exported.managed.version.minor = 0
        exported.managed.manager_ctx = exported
        exported.managed.deleter = on_tensor_dropped
        exported.managed.flags = 0
        # The offset is folded in: consumers are known to ignore byte_offset.
        exported.managed.dl_tensor.data = self.base + buffer.byte_offset
        exported.managed.dl_tensor.device.device_type = self.dlpack_type
        exported.managed.dl_tensor.device.device_id = self.device_index
        exported.managed.dl_tensor.ndim = <int>rank
        exported.managed.dl_tensor.dtype = result_type.dlpack
        exported.managed.dl_tensor.shape = exported.dims
        exported.managed.dl_tensor.strides = exported.dims + rank
        exported.managed.dl_tensor.byte_offset = 0
        memcpy(exported.dims, dims, rank * sizeof(int64_t))
        fill_strides(rank, dims, exported.dims + rank)
        return exported

    cdef object make_array(self, im_hal_buffer_view_t* view, ResultType* result_type):
        cdef HeldBuffer owner = HeldBuffer.__new__(HeldBuffer)
        owner.exported = self.describe_view(view, result_type)
        shape = tuple([view.dims[dim] for dim in range(<Py_ssize_t>view.rank)])
        return HalArray(
            owner, <uintptr_t>owner.exported.managed.dl_tensor.data, shape, element_types.TORCH_OF[view.element_type],
            self.torch_device,
        )

    cdef list convert(self, object variants, tuple path):
        """The values of one list; `path` leads to it from the outermost one."""
        cdef im_vm_list_t* native = borrow_list(variants)
        # Lists within lists have blocks of their own.
        cdef HoldingBlock* outer = self.block
        self.block = NULL
        try:
            self.block = begin_block(native)
            return self.convert_items(variants, native, path)
        finally:
            if self.block != NULL:
                end_holdings(self.block)
            self.block = outer

    cdef list convert_items(self, object variants, im_vm_list_t* native, tuple path):
        cdef Py_ssize_t count = <Py_ssize_t>native.count
        cdef Py_ssize_t index
        cdef im_vm_variant_t* variant
        # As long as it will be: growing it would have malloc tidy up again and again.
        cdef list results = [None] * count
        for index in range(count):
            if index >= <Py_ssize_t>native.count:
                raise RuntimeError(f"{where(path)}: the list changed its length while it was read")
            variant = &native.storage[index]
            if variant.type == ref_types.buffer_view:
                results[index] = self.export_view(
                    variants, <im_hal_buffer_view_t*>variant.value.ref, path, index, allocation_at(native, index + 1)
                )
            elif variant.type == IM_VALUE_TYPE_I64:
                results[index] = variant.value.i64
            elif variant.type == IM_VALUE_TYPE_F64:
                results[index] = variant.value.f64
            elif variant.type == IM_VALUE_TYPE_I32:
                results[index] = variant.value.i32
            elif variant.type == IM_VALUE_TYPE_F32:
                results[index] = <double>variant.value.f32
            elif variant.type == IM_VALUE_TYPE_I16:
                results[index] = variant.value.i16
            elif variant.type == IM_VALUE_TYPE_I8:
                results[index] = variant.value.i8
            elif variant.type == IM_VALUE_TYPE_NONE:
                pass
            elif variant.type == ref_types.list:
                check_depth(path + (index,))
                results[index] = self.convert(variants.get_as_list(index), path + (index,))
            else:
                results[index] = as_runtime_object(variants.get_as_ref(index))
        return results


cdef extern from "Python.h":
    object steal "(PyObject *)"(PyObject* owned)


cdef size_t size_of_description(size_t rank) noexcept nogil:
    """Bytes of an `Exported`, as blocks round them."""
    return (sizeof(Exported) + 2 * rank * sizeof(int64_t) + 15) & ~<size_t>15


cdef void fill_strides(size_t rank, const int64_t* dims, int64_t* strides) noexcept nogil:
    """Strides of a row-major tensor, in elements."""
    cdef int64_t stride = 1
    cdef size_t dim = rank
    while dim > 0:
        dim -= 1
        strides[dim] = stride
        # A size of 0 leaves strides that nobody follows; torch's own are made with at least 1.
        stride *= max(dims[dim], 1)


cdef HoldingBlock* begin_block(im_vm_list_t* native) except NULL:
    """Room for the descriptions of all buffer views of a list."""
    cdef size_t nbytes = 0
    cdef Py_ssize_t count = 0
    cdef size_t index
    cdef im_vm_variant_t* variant
    for index in range(native.count):
        variant = &native.storage[index]
        if variant.type == ref_types.buffer_view:
            # What claims more is refused when its turn comes.
            nbytes += size_of_description(
                min((<im_hal_buffer_view_t*>variant.value.ref).rank, <size_t>HIGHEST_RANK)
            )
            count += 1
    return begin_holdings(count, nbytes)


cdef im_hal_buffer_t* allocation_at(im_vm_list_t* native, size_t index) noexcept nogil:
    """The allocation of the buffer view at `index`; NULL where there is none."""
    if index >= native.count or native.storage[index].type != ref_types.buffer_view:
        return NULL
    return (<im_hal_buffer_view_t*>native.storage[index].value.ref).buffer.allocated_buffer


cdef void on_tensor_dropped(im_dl_managed_tensor_t* managed) noexcept nogil:
    """torch's deleter call: any thread, GIL or not."""
    drop_holding(&(<Exported*>managed.manager_ctx).holding)


cdef NativeDevice _host_device = None


cdef NativeDevice host_device():
    """The process-wide device of the CPU, which is the same for the life of the process."""
    global _host_device
    if _host_device is None:
        _host_device = native_device(devices.hal_device(torch.device("cpu")))
    return _host_device


cdef Account* _transient_account = NULL


cdef Account* transient_account() except NULL:
    """The account of all host devices that were never handed to us."""
    global _transient_account
    if _transient_account == NULL:
        _transient_account = new_account()
    return _transient_account


cdef class HeldBuffer:
    """Keeps one HAL buffer and its device alive for a `HalArray`."""

    cdef Exported* exported

    def __dealloc__(self):
        if self.exported != NULL:
            drop_holding(&self.exported.holding)

    def as_tensor(self):
        """A tensor on the same memory, with a holding of its own."""
        cdef Exported* copy = copy_exported(self.exported)
        return adopt(copy, find_result_type(self.exported.element_type))


cdef Exported* copy_exported(Exported* source) except NULL:
    """A second holding of the same buffer, described alike."""
    cdef size_t rank = <size_t>source.managed.dl_tensor.ndim
    cdef size_t nbytes = size_of_description(rank)
    cdef HoldingBlock* block = begin_holdings(1, nbytes)
    cdef Exported* copy = <Exported*>carve_holding(
        block, nbytes, source.holding.buffer, source.holding.device, source.holding.account
    )
    end_holdings(block)
    copy.holding.nbytes = source.holding.nbytes
    copy.element_type = source.element_type
    copy.managed = source.managed
    memcpy(copy.dims, source.dims, 2 * rank * sizeof(int64_t))
    copy.managed.manager_ctx = copy
    copy.managed.dl_tensor.shape = copy.dims
    copy.managed.dl_tensor.strides = copy.dims + rank
    return copy


cdef object adopt(Exported* exported, ResultType* result_type):
    """Hand the description over to torch: a new tensor that owns the holding."""
    cdef void* adopted = NULL
    try:
        exchange_api().managed_tensor_to_py_object_no_sync(&exported.managed, &adopted)
    except BaseException:
        # Only a successful call takes the managed tensor over.
        drop_holding(&exported.holding)
        raise
    tensor = steal(<PyObject*>adopted)
    if result_type.reinterpret_as != NULL:
        tensor = retyped(tensor, <object>result_type.reinterpret_as)
    return tensor


def from_variant_list(variants, hal_device, bint as_arrays, bint shared=False):
    """The native path of `iree_marshal.from_variant_list`; the arguments are resolved there.

    Results that lie in one allocation share one storage, as views of a tensor do: the allocation is
    exported once, and let go of with the last of them. On a GPU only with `shared`: what is let go of
    waits for the stream that it was dropped on, and of parts only the last one's drop is seen.
    """
    enter()
    require_reader()
    _load_result_types()
    cdef Export call = Export.__new__(Export)
    call.as_arrays = as_arrays
    require_views()
    call.shared = shared
    # as_strided in Python would cost more than a storage of each result's own.
    call.shared_on_host = views_are_native()
    if hal_device is not None:
        call.fallback = native_device(hal_device)
    return call.convert(variants, ())
