# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
from libc.stdint cimport int32_t, int64_t


# What a new tensor is made of, as libtorch numbers it.
cdef struct Kind:
    int32_t dtype
    int32_t device_type
    int32_t device_index


cdef int require_views() except -1
cdef bint views_are_native() noexcept
cdef object part_of(object base, int64_t rank, const int64_t* sizes, const int64_t* strides, int64_t offset)
cdef bint read_kind(object tensor, Kind* kind) noexcept
cdef object new_flat(const Kind* kind, int64_t count)
