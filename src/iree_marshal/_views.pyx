# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Allocations of torch's, and tensors on parts of them, made natively.

A part shares the storage of its base, as `Tensor.as_strided` would make it, but costs
a third: libtorch's C shim makes the tensor and `THPVariable_Wrap` its Python object.
All are proven on a known tensor before the first use; where a symbol is missing or an
answer is wrong, `as_strided` and `torch.empty` are called instead.
"""
import ctypes
import os

import torch
from torch.utils._python_dispatch import _disable_current_modes

from cpython.object cimport PyObject
from libc.stdint cimport int64_t, uintptr_t

from iree_marshal.abi.torch_native cimport (
    IM_TORCH_TENSOR_OFFSET,
    IM_TORCH_TENSOR_OFFSET_TAGGED,
    im_torch_delete_fn_t,
    im_torch_empty_fn_t,
    im_torch_int32_fn_t,
    im_torch_reinterpret_fn_t,
    im_torch_wrap_fn_t,
)

from iree_marshal.slab import real_memory

cdef extern from "Python.h":
    object steal "(PyObject *)"(void* owned)

cdef im_torch_reinterpret_fn_t _reinterpret = NULL
cdef im_torch_delete_fn_t _delete = NULL
cdef im_torch_wrap_fn_t _wrap = NULL
cdef im_torch_empty_fn_t _empty = NULL
cdef im_torch_int32_fn_t _dtype = NULL
cdef im_torch_int32_fn_t _device_type = NULL
cdef im_torch_int32_fn_t _device_index = NULL
cdef Py_ssize_t _tensor_at = 0
cdef bint _native = False
cdef bint _tried = False
cdef str _state = "not tried yet"


cdef object part_of(object base, int64_t rank, const int64_t* sizes, const int64_t* strides, int64_t offset):
    """A tensor of the base's dtype on part of its storage.

    Sizes, strides and the offset (from the storage's start) count elements. `base` must be a plain tensor.
    """
    if _native:
        return _native_part(base, rank, sizes, strides, offset)
    with real_memory():
        # As `.data`, no view to autograd, as the native way makes it.
        return base.as_strided(
            [sizes[dim] for dim in range(rank)], [strides[dim] for dim in range(rank)], offset
        ).data


cdef object _native_part(object base, int64_t rank, const int64_t* sizes, const int64_t* strides, int64_t offset):
    cdef void* handle = NULL
    if _reinterpret(<char*><PyObject*>base + _tensor_at, rank, sizes, strides, offset, &handle) != 0:
        raise RuntimeError("torch could not make a tensor on part of an allocation")
    return _as_object(handle)


cdef object _as_object(void* handle):
    """The Python object of a new tensor; the handle is used up."""
    cdef void* wrapped
    try:
        wrapped = _wrap(handle)
    finally:
        # The Python object has a reference of its own.
        _delete(handle)
    return steal(wrapped)


cdef bint read_kind(object tensor, Kind* kind) noexcept:
    """Note what the plain tensor is made of; False where tensors are not made natively."""
    cdef void* handle = <char*><PyObject*>tensor + _tensor_at
    return (
        _native
        and _dtype(handle, &kind.dtype) == 0
        and _device_type(handle, &kind.device_type) == 0
        and _device_index(handle, &kind.device_index) == 0
    )


cdef object new_flat(const Kind* kind, int64_t count):
    """An uninitialised tensor of one dimension; None where torch cannot make it, for the caller to ask again in Python.

    `kind` must come from `read_kind`, and that must have been True.
    """
    cdef void* handle = NULL
    cdef int64_t stride = 1
    if _empty(1, &count, &stride, kind.dtype, kind.device_type, kind.device_index, &handle) != 0:
        return None
    return _as_object(handle)


cdef bint views_are_native() noexcept:
    """Whether `part_of` is quick; after `require_views`."""
    return _native


cdef int require_views() except -1:
    """Try the native way once per process."""
    global _tried, _native, _state
    if _tried:
        return 0
    _tried = True
    problem = "switched off by IREE_MARSHAL_TORCH_READER=dlpack"
    if os.environ.get("IREE_MARSHAL_TORCH_READER", "auto") != "dlpack":
        with _disable_current_modes(), torch.inference_mode(False), torch.enable_grad():
            problem = _load() or _prove()
    _native = problem is None
    _state = "native (libtorch C shim)" if problem is None else f"Tensor.as_strided: {problem}"
    return 0


def describe():
    """How parts of an allocation become tensors in this process, for `doctor`."""
    require_views()
    return {"torch views": _state}


cdef object _load():
    """Resolve the functions; returns what is missing, or None."""
    global _reinterpret, _delete, _wrap, _empty, _dtype, _device_type, _device_index
    cdef uintptr_t reinterpret, delete, wrap, empty, dtype, device_type, device_index
    folder = os.path.join(os.path.dirname(torch.__file__), "lib")
    try:
        compute = ctypes.CDLL(os.path.join(folder, "libtorch_cpu.so"))
        python = ctypes.CDLL(os.path.join(folder, "libtorch_python.so"))
        reinterpret = ctypes.cast(compute.aoti_torch__reinterpret_tensor, ctypes.c_void_p).value
        delete = ctypes.cast(compute.aoti_torch_delete_tensor_object, ctypes.c_void_p).value
        empty = ctypes.cast(compute.aoti_torch_empty_strided, ctypes.c_void_p).value
        dtype = ctypes.cast(compute.aoti_torch_get_dtype, ctypes.c_void_p).value
        device_type = ctypes.cast(compute.aoti_torch_get_device_type, ctypes.c_void_p).value
        device_index = ctypes.cast(compute.aoti_torch_get_device_index, ctypes.c_void_p).value
        wrap = ctypes.cast(python._Z16THPVariable_WrapRKN2at10TensorBaseE, ctypes.c_void_p).value
    except (OSError, AttributeError) as error:
        return str(error)
    _reinterpret = <im_torch_reinterpret_fn_t>reinterpret
    _delete = <im_torch_delete_fn_t>delete
    _wrap = <im_torch_wrap_fn_t>wrap
    _empty = <im_torch_empty_fn_t>empty
    _dtype = <im_torch_int32_fn_t>dtype
    _device_type = <im_torch_int32_fn_t>device_type
    _device_index = <im_torch_int32_fn_t>device_index
    return None


cdef object _prove():
    """Make a tensor, and a part of a known one, and compare with what Python says; returns what differs, or None."""
    global _tensor_at, _native
    cdef Kind kind
    cdef int64_t[2] sizes
    cdef int64_t[2] strides
    base = torch.arange(64, dtype=torch.int16, device="cpu")
    for offset in (IM_TORCH_TENSOR_OFFSET, IM_TORCH_TENSOR_OFFSET_TAGGED):
        if (<uintptr_t*>(<char*><PyObject*>base + <Py_ssize_t>offset))[0] == <uintptr_t>base._cdata:
            _tensor_at = offset
            break
    else:
        return "the tensor was not found inside the Python object"
    sizes[0], sizes[1], strides[0], strides[1] = 2, 3, 5, 1
    part = _native_part(base, 2, sizes, strides, 7)
    expected = base.as_strided((2, 3), (5, 1), 7)
    if (
        type(part) is not torch.Tensor
        or part.dtype != base.dtype
        or part.device != base.device
        or part.shape != expected.shape
        or part.stride() != expected.stride()
        or part.storage_offset() != 7
        or part.untyped_storage().data_ptr() != base.untyped_storage().data_ptr()
        or part.requires_grad
        or not torch.equal(part, expected)
    ):
        return "a part of a tensor came out wrongly"
    if part._use_count() != 1:
        return "a part of a tensor has references that nobody gives back"
    _native = True
    flat = new_flat(&kind, 5) if read_kind(base, &kind) else None
    if (
        type(flat) is not torch.Tensor
        or flat.dtype != base.dtype
        or flat.device != base.device
        or flat.shape != (5,)
        or flat.stride() != (1,)
        or flat.untyped_storage().nbytes() != 10
        or flat.requires_grad
        or flat._use_count() != 1
    ):
        return "a new tensor came out wrongly"
    return None
