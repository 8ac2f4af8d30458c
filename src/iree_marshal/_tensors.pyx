# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Reads what an import needs of a torch.Tensor, natively.

The fast reader calls the C shim of libtorch (`aoti_torch_*`, found by name with
dlsym) on the `at::Tensor` inside the Python object, and three mangled functions for
the conjugate bit, the negative bit and requires-grad. Both the place of the tensor
and every answer are proven on known tensors in `_prove_reader` before the first use.
Where a symbol is missing or an answer is wrong, the reader stays off: then
`values.admit` looks at every tensor through Python, and the pointer is read through
the DLPack C exchange table.
"""
import ctypes
import os

import torch
from torch.utils._python_dispatch import _disable_current_modes

from cpython.object cimport PyObject, PyTypeObject
from cpython.pycapsule cimport PyCapsule_GetPointer
from libc.stdint cimport int32_t, int64_t, uint32_t, uintptr_t

from iree_marshal.abi.dlpack cimport (
    IM_DL_CPU,
    IM_DLPACK_MAJOR,
    im_dl_exchange_api_t,
    im_dl_exchange_header_t,
    im_dl_tensor_t,
)
from iree_marshal.abi.torch_native cimport (
    IM_TORCH_TENSOR_OFFSET,
    IM_TORCH_TENSOR_OFFSET_TAGGED,
    im_torch_constant_fn_t,
    im_torch_dims_fn_t,
    im_torch_flag_fn_t,
    im_torch_impl_bit_fn_t,
    im_torch_int32_fn_t,
    im_torch_int64_fn_t,
    im_torch_pointer_fn_t,
    im_torch_prefetch,
    im_torch_tensor_bit_fn_t,
)

from iree_marshal import element_types

# IREE's host drivers demand this alignment (bytes), and so does code compiled for any device.
cdef enum:
    ALIGNMENT = 64
    MOST_DTYPES = 128
    COMPLEX = 0x23  # top byte of a HAL element type

cdef struct Shim:
    im_torch_int32_fn_t layout
    im_torch_int32_fn_t device_type
    im_torch_int32_fn_t device_index
    im_torch_int32_fn_t dtype
    im_torch_int64_fn_t rank
    im_torch_dims_fn_t sizes
    im_torch_dims_fn_t strides
    im_torch_pointer_fn_t data
    im_torch_int64_fn_t storage_bytes
    im_torch_int64_fn_t storage_offset
    im_torch_tensor_bit_fn_t is_conjugate
    im_torch_tensor_bit_fn_t is_negative
    im_torch_impl_bit_fn_t requires_grad
    im_torch_flag_fn_t grad_mode
    int32_t strided
    int32_t cpu

cdef Shim _shim
cdef bint _reader_on = False
cdef str _reader_state = "not tried yet"
cdef Py_ssize_t _tensor_at = 0
# By libtorch's number of the dtype: HAL element type (0: none), bytes per element.
cdef uint32_t _element_types[MOST_DTYPES]
cdef int32_t _item_sizes[MOST_DTYPES]
cdef bint _tried = False

cdef PyObject* _tensor_type = <PyObject*>torch.Tensor
cdef PyObject* _parameter_type = <PyObject*>torch.nn.Parameter


cdef extern from "Python.h" nogil:
    PyTypeObject* Py_TYPE(PyObject* object)


cdef bint is_plain_tensor(PyObject* value) noexcept nogil:
    """Exactly torch.Tensor or nn.Parameter: any other subclass is looked at through Python."""
    cdef PyObject* cls = <PyObject*>Py_TYPE(value)
    return cls == _tensor_type or cls == _parameter_type


cdef bint grad_mode_enabled() except -1:
    if _reader_on:
        return _shim.grad_mode()
    return torch.is_grad_enabled()


cdef Reading read_clean(PyObject* tensor, bint grad_mode, TensorView* view) noexcept nogil:
    """Fill in `view` if the tensor can be imported as it is; whatever is doubtful is left to `values.admit`.

    `tensor` must be a plain tensor (`is_plain_tensor`).
    """
    cdef void* handle = <char*>tensor + _tensor_at
    cdef int32_t layout, dtype
    cdef int64_t* strides
    cdef int64_t storage_bytes, storage_offset, dim, size, count = 1
    if not _reader_on:
        return READ_UNCLEAR
    if _shim.layout(handle, &layout) != 0 or layout != _shim.strided:
        return READ_UNCLEAR
    if _shim.dtype(handle, &dtype) != 0 or dtype < 0 or dtype >= MOST_DTYPES:
        return READ_UNCLEAR
    view.element_type = _element_types[dtype]
    if view.element_type == 0:
        return READ_UNCLEAR
    if _shim.device_type(handle, &view.device_type) != 0:
        return READ_UNCLEAR
    if view.device_type == _shim.cpu:
        view.device_index = -1
    elif _shim.device_index(handle, &view.device_index) != 0:
        return READ_UNCLEAR
    if (
        _shim.rank(handle, &view.rank) != 0
        or _shim.sizes(handle, &view.sizes) != 0
        or _shim.strides(handle, &strides) != 0
    ):
        return READ_UNCLEAR
    # Compact row-major, whatever the strides of dimensions of size 0 and 1 say.
    dim = view.rank
    while dim > 0:
        dim -= 1
        size = view.sizes[dim]
        if size != 1:
            if size == 0:
                count = 0
                break
            if strides[dim] != count:
                return READ_UNCLEAR
            count *= size
    view.nbytes = count * _item_sizes[dtype]
    if _shim.data(handle, &view.data) != 0 or <uintptr_t>view.data % ALIGNMENT != 0:
        return READ_UNCLEAR
    if count != 0:
        # Fake, functional and lazily zero tensors have bytes but no memory; a storage
        # may have been resized under its views.
        if (
            view.data == NULL
            or _shim.storage_bytes(handle, &storage_bytes) != 0
            or _shim.storage_offset(handle, &storage_offset) != 0
            or storage_offset * _item_sizes[dtype] + view.nbytes > storage_bytes
        ):
            return READ_UNCLEAR
    if _shim.is_negative(handle) or _shim.is_conjugate(handle):
        return READ_UNCLEAR
    if grad_mode and _shim.requires_grad((<void**>handle)[0]):
        return READ_UNCLEAR
    return READ_CLEAN


cdef bint is_unchanged(
    PyObject* tensor, bint grad_mode, void* data, uint32_t element_type, int64_t rank, const int64_t* sizes
) noexcept nogil:
    """Whether a tensor object that `read_clean` has read before would be read the same again.

    Leaves out what cannot change in a living object without changing the pointer: the layout and the device.
    """
    cdef void* handle = <char*>tensor + _tensor_at
    cdef void* address
    cdef int32_t dtype
    cdef int64_t* found
    cdef int64_t* strides
    cdef int64_t now, dim, storage_bytes, storage_offset, count = 1
    if not _reader_on or _shim.data(handle, &address) != 0 or address != data:
        return False
    if _shim.dtype(handle, &dtype) != 0 or _element_types[dtype] != element_type:
        return False
    if _shim.rank(handle, &now) != 0 or now != rank:
        return False
    if _shim.sizes(handle, &found) != 0 or _shim.strides(handle, &strides) != 0:
        return False
    dim = rank
    while dim > 0:
        dim -= 1
        if found[dim] != sizes[dim]:
            return False
        if sizes[dim] != 1:
            if strides[dim] != count and count != 0 and sizes[dim] != 0:
                return False
            count *= sizes[dim]
    if count != 0 and (
        _shim.storage_bytes(handle, &storage_bytes) != 0
        or _shim.storage_offset(handle, &storage_offset) != 0
        or (storage_offset + count) * _item_sizes[dtype] > storage_bytes
    ):
        return False
    # Every dtype may be seen through a negative view, only complex ones through a conjugate one.
    if _shim.is_negative(handle) or (element_type >> 24 == COMPLEX and _shim.is_conjugate(handle)):
        return False
    return not (grad_mode and _shim.requires_grad((<void**>handle)[0]))


cdef void prefetch(PyObject* tensor) noexcept nogil:
    """Start fetching a plain tensor that `read_clean` will read: between calls its memory leaves the caches."""
    im_torch_prefetch(<char*>tensor + _tensor_at)


cdef bint lies_at(PyObject* tensor, void* data) noexcept nogil:
    """Whether a plain tensor's data pointer is this one; a quick look before `read_clean`."""
    cdef void* address
    return _reader_on and _shim.data(<char*>tensor + _tensor_at, &address) == 0 and address == data


# ---- reading a tensor that values.admit has passed --------------------------------------------

cdef im_dl_exchange_api_t* _exchange = NULL


cdef im_dl_exchange_api_t* exchange_api() except NULL:
    """torch's DLPack C exchange table; it lives as long as torch."""
    global _exchange
    if _exchange != NULL:
        return _exchange
    capsule = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if capsule is None:
        raise RuntimeError(f"torch {torch.__version__} has no DLPack C exchange API; iree_marshal needs torch >= 2.10")
    cdef im_dl_exchange_header_t* header = <im_dl_exchange_header_t*>PyCapsule_GetPointer(
        capsule, "dlpack_exchange_api"
    )
    # A newer table may link to older ones.
    while header != NULL and header.version.major != IM_DLPACK_MAJOR:
        header = header.prev_api
    if header == NULL:
        raise RuntimeError(f"torch {torch.__version__} offers no DLPack {IM_DLPACK_MAJOR}.x exchange table")
    _exchange = <im_dl_exchange_api_t*>header
    if _exchange.dltensor_from_py_object_no_sync == NULL or _exchange.managed_tensor_to_py_object_no_sync == NULL:
        _exchange = NULL
        raise RuntimeError(f"the DLPack exchange table of torch {torch.__version__} is incomplete")
    return _exchange


cdef int read_admitted(object tensor, TensorView* view) except -1:
    """Fill in `view` for a tensor that `values.admit` returned as ready to import."""
    cdef im_dl_tensor_t borrowed
    if is_plain_tensor(<PyObject*>tensor) and read_clean(<PyObject*>tensor, False, view) == READ_CLEAN:
        return 0
    exchange_api().dltensor_from_py_object_no_sync(<void*>tensor, &borrowed)
    view.data = <char*>borrowed.data + borrowed.byte_offset
    view.sizes = borrowed.shape
    view.rank = borrowed.ndim
    view.device_type = 0 if borrowed.device.device_type == IM_DL_CPU else 1
    view.device_index = -1 if borrowed.device.device_type == IM_DL_CPU else borrowed.device.device_id
    # From torch, not from the table, which mislabels 4-bit and some 1-bit types.
    view.element_type = element_types.HAL_OF[tensor.dtype]
    view.nbytes = tensor.numel() * tensor.element_size()
    return 0


# ---- proving the native reader -------------------------------------------------------------------


cdef int require_reader() except -1:
    """Try the native reader once per process."""
    global _tried, _reader_state, _reader_on
    if _tried:
        return 0
    _tried = True
    exchange_api()
    problem = "switched off by IREE_MARSHAL_TORCH_READER=dlpack"
    if os.environ.get("IREE_MARSHAL_TORCH_READER", "auto") != "dlpack":
        # Known tensors must be made as themselves, whatever modes the caller is in.
        with _disable_current_modes(), torch.inference_mode(False), torch.enable_grad():
            problem = _load_shim() or _prove_reader()
    _reader_on = problem is None
    _reader_state = "native (libtorch C shim)" if problem is None else f"Python and DLPack table: {problem}"
    return 0


def describe():
    """How tensors are read in this process, for `doctor`."""
    require_reader()
    return {"torch reader": _reader_state}


cdef uintptr_t _symbol(list libraries, str name) except? 0:
    for library in libraries:
        try:
            return ctypes.cast(getattr(library, name), ctypes.c_void_p).value
        except AttributeError:
            continue
    raise LookupError(f"libtorch has no symbol {name}")


cdef object _load_shim():
    """Resolve all functions; returns what is missing, or None."""
    folder = os.path.join(os.path.dirname(torch.__file__), "lib")
    cdef list libraries = []
    for name in ("libtorch_cpu.so", "libc10.so"):
        try:
            libraries.append(ctypes.CDLL(os.path.join(folder, name), mode=ctypes.RTLD_LOCAL))
        except OSError as error:
            return f"cannot open {name}: {error}"
    try:
        _shim.layout = <im_torch_int32_fn_t>_symbol(libraries, "aoti_torch_get_layout")
        _shim.device_type = <im_torch_int32_fn_t>_symbol(libraries, "aoti_torch_get_device_type")
        _shim.device_index = <im_torch_int32_fn_t>_symbol(libraries, "aoti_torch_get_device_index")
        _shim.dtype = <im_torch_int32_fn_t>_symbol(libraries, "aoti_torch_get_dtype")
        _shim.rank = <im_torch_int64_fn_t>_symbol(libraries, "aoti_torch_get_dim")
        _shim.sizes = <im_torch_dims_fn_t>_symbol(libraries, "aoti_torch_get_sizes")
        _shim.strides = <im_torch_dims_fn_t>_symbol(libraries, "aoti_torch_get_strides")
        _shim.data = <im_torch_pointer_fn_t>_symbol(libraries, "aoti_torch_get_data_ptr")
        _shim.storage_bytes = <im_torch_int64_fn_t>_symbol(libraries, "aoti_torch_get_storage_size")
        _shim.storage_offset = <im_torch_int64_fn_t>_symbol(libraries, "aoti_torch_get_storage_offset")
        _shim.is_conjugate = <im_torch_tensor_bit_fn_t>_symbol(libraries, "_ZN2at6native7is_conjERKNS_6TensorE")
        _shim.is_negative = <im_torch_tensor_bit_fn_t>_symbol(libraries, "_ZN2at6native6is_negERKNS_6TensorE")
        _shim.requires_grad = <im_torch_impl_bit_fn_t>_symbol(libraries, "_ZNK3c1010TensorImpl13requires_gradEv")
        _shim.grad_mode = <im_torch_flag_fn_t>_symbol(libraries, "aoti_torch_grad_mode_is_enabled")
        _shim.strided = (<im_torch_constant_fn_t>_symbol(libraries, "aoti_torch_layout_strided"))()
        _shim.cpu = (<im_torch_constant_fn_t>_symbol(libraries, "aoti_torch_device_type_cpu"))()
    except LookupError as error:
        return str(error)
    return None


cdef object _prove_reader():
    """Compare every native answer with Python's on known tensors; returns the first difference, or None."""
    global _tensor_at, _reader_on
    cdef TensorView view
    cdef Reading reading
    cdef int32_t dtype
    probe = torch.zeros(2, 3, device="cpu")
    for offset in (IM_TORCH_TENSOR_OFFSET, IM_TORCH_TENSOR_OFFSET_TAGGED):
        if (<uintptr_t*>(<char*><PyObject*>probe + <Py_ssize_t>offset))[0] == <uintptr_t>probe._cdata:
            _tensor_at = offset
            break
    else:
        return "the tensor was not found inside the Python object"
    for index in range(MOST_DTYPES):
        _element_types[index] = 0
    for torch_dtype, element_type in element_types.HAL_OF.items():
        empty = torch.empty(0, dtype=torch_dtype, device="cpu")
        if (<uintptr_t*>(<char*><PyObject*>empty + _tensor_at))[0] != <uintptr_t>empty._cdata:
            return "the tensor was not found inside the Python object"
        if _shim.dtype(<char*><PyObject*>empty + _tensor_at, &dtype) != 0 or not 0 <= dtype < MOST_DTYPES:
            return f"the dtype of a {torch_dtype} tensor could not be read"
        if _element_types[dtype] != 0:
            return f"{torch_dtype} has the number of another dtype"
        _element_types[dtype] = element_type
        _item_sizes[dtype] = empty.element_size()
    real = torch.arange(24, dtype=torch.float32, device="cpu").reshape(2, 3, 4)
    complex_ = torch.zeros(16, dtype=torch.complex64, device="cpu")
    leaf = torch.zeros(16, requires_grad=True, device="cpu")
    clean = (
        real, complex_, real[1:1], real.reshape(1, 24, 1), torch.zeros((), device="cpu"),
        torch.zeros(8, dtype=torch.bool, device="cpu"),
    )
    unclear = (
        real.transpose(0, 1), real.reshape(-1)[1:], complex_.conj(), complex_.conj().imag, torch._neg_view(real), leaf,
        torch.nn.Parameter(torch.zeros(16, device="cpu")),
        torch.zeros(3, device="meta"),
        torch.zeros(3, device="cpu").to_sparse(),
        torch._efficientzerotensor((3,), device="cpu"),
    )
    was_on = _reader_on
    _reader_on = True
    try:
        if bool(_shim.grad_mode()) != torch.is_grad_enabled():
            return "the grad mode was read wrongly"
        for tensor in clean:
            reading = read_clean(<PyObject*>tensor, True, &view)
            if reading != READ_CLEAN:
                return f"a plain tensor of shape {tuple(tensor.shape)} was not read"
            if (
                <uintptr_t>view.data != tensor.data_ptr()
                or [view.sizes[dim] for dim in range(view.rank)] != list(tensor.shape)
                or view.nbytes != tensor.numel() * tensor.element_size()
                or view.element_type != element_types.HAL_OF[tensor.dtype]
                or view.device_index != -1
            ):
                return f"a plain tensor of shape {tuple(tensor.shape)} was read wrongly"
        for index, tensor in enumerate(unclear):
            reading = read_clean(<PyObject*>tensor, True, &view)
            if reading == READ_CLEAN:
                return f"special tensor {index} was taken for a plain one"
        if read_clean(<PyObject*>leaf, False, &view) != READ_CLEAN:
            return "requires-grad was read although grad mode is off"
    finally:
        _reader_on = was_on
    return None
