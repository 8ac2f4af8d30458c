# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
from iree_marshal.abi.iree cimport im_status_t


cdef int raise_status(im_status_t status, str what) except -1
