# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
from cpython.object cimport PyObject

from iree_marshal._lifetime cimport Batch
from iree_marshal._objects cimport NativeDevice
from iree_marshal._tensors cimport TensorView
from iree_marshal.abi.iree cimport im_hal_buffer_t, im_hal_buffer_view_t, im_host_allocator_t

cdef im_hal_buffer_t* import_memory(
    NativeDevice device, Batch* batch, PyObject* tensor, const TensorView* view, tuple path, Py_ssize_t index
) except NULL
cdef im_hal_buffer_view_t* make_view(
    Batch* batch, im_hal_buffer_t* buffer, const TensorView* view, const im_host_allocator_t* host_allocator
) except NULL
