# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
# What abi/torch_native.h declares, for cimport.
from libc.stdint cimport int32_t, int64_t


cdef extern from "torch_native.h" nogil:
    ctypedef int32_t (*im_torch_int32_fn_t)(void* tensor, int32_t* out) noexcept nogil
    ctypedef int32_t (*im_torch_int64_fn_t)(void* tensor, int64_t* out) noexcept nogil
    ctypedef int32_t (*im_torch_pointer_fn_t)(void* tensor, void** out) noexcept nogil
    ctypedef int32_t (*im_torch_dims_fn_t)(void* tensor, int64_t** out) noexcept nogil
    ctypedef int32_t (*im_torch_constant_fn_t)() noexcept nogil
    ctypedef bint (*im_torch_tensor_bit_fn_t)(const void* tensor) noexcept nogil
    ctypedef bint (*im_torch_impl_bit_fn_t)(const void* tensor_impl) noexcept nogil
    ctypedef bint (*im_torch_flag_fn_t)() noexcept nogil
    const int IM_TORCH_TENSOR_OFFSET
    const int IM_TORCH_TENSOR_OFFSET_TAGGED
    ctypedef int32_t (*im_torch_reinterpret_fn_t)(
        void* tensor, int64_t rank, const int64_t* sizes, const int64_t* strides, int64_t offset, void** out
    ) noexcept nogil
    ctypedef int32_t (*im_torch_delete_fn_t)(void* tensor) noexcept nogil
    ctypedef int32_t (*im_torch_empty_fn_t)(
        int64_t rank, const int64_t* sizes, const int64_t* strides, int32_t dtype, int32_t device_type,
        int32_t device_index, void** out
    ) noexcept nogil
    ctypedef void* (*im_torch_wrap_fn_t)(const void* tensor) except NULL
    void im_torch_prefetch(const void* tensor) noexcept nogil
