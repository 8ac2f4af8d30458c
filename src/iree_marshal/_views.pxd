# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
from libc.stdint cimport int64_t


cdef int require_views() except -1
cdef object part_of(object base, int64_t rank, const int64_t* sizes, const int64_t* strides, int64_t offset)
