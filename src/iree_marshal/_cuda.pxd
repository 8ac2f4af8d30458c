# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
from iree_marshal._lifetime cimport Account
from iree_marshal._objects cimport NativeDevice
from iree_marshal.abi.iree cimport im_hal_buffer_t


cdef int order_after_torch(NativeDevice device) except -1
