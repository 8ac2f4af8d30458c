# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
# What abi/iree_cuda.h declares, for cimport.
from libc.stdint cimport int32_t, int64_t, uint64_t

from iree_marshal.abi.iree cimport im_hal_buffer_t, im_hal_resource_t


cdef extern from "iree_cuda.h" nogil:
    ctypedef int im_cu_result_t
    const int IM_CU_SUCCESS
    const int IM_CU_NOT_READY
    const unsigned IM_CU_EVENT_DISABLE_TIMING
    ctypedef im_cu_result_t (*im_cu_pointer_fn_t)(void* handle) noexcept nogil
    ctypedef im_cu_result_t (*im_cu_out_pointer_fn_t)(void** out) noexcept nogil
    ctypedef im_cu_result_t (*im_cu_get_pointer_fn_t)(void* handle, void** out) noexcept nogil
    ctypedef im_cu_result_t (*im_cu_get_int_fn_t)(void* handle, int* out) noexcept nogil
    ctypedef int32_t (*im_torch_current_stream_fn_t)(int32_t device_index, void** out) noexcept nogil
    ctypedef im_cu_result_t (*im_cu_device_get_fn_t)(int* out_device, int ordinal) noexcept nogil
    ctypedef im_cu_result_t (*im_cu_retain_context_fn_t)(void** out, int device) noexcept nogil
    ctypedef im_cu_result_t (*im_cu_event_create_fn_t)(void** out, unsigned flags) noexcept nogil
    ctypedef im_cu_result_t (*im_cu_event_record_fn_t)(void* event, void* stream) noexcept nogil
    ctypedef im_cu_result_t (*im_cu_stream_wait_fn_t)(void* stream, void* event, unsigned flags) noexcept nogil
    ctypedef im_cu_result_t (*im_cu_context_sync_fn_t)() noexcept nogil
    ctypedef im_cu_result_t (*im_cu_copy_fn_t)(uint64_t target, uint64_t source, size_t nbytes) noexcept nogil
    ctypedef im_cu_result_t (*im_cu_error_name_fn_t)(im_cu_result_t result, const char** out) noexcept nogil

    ctypedef struct im_hal_cuda_device_t:
        im_hal_resource_t resource
        void* cu_context
        int32_t cu_device
        void* dispatch_stream

    const int IM_HAL_CUDA_BUFFER_DEVICE
    const int IM_HAL_CUDA_BUFFER_ASYNC
    const int IM_HAL_CUDA_BUFFER_EXTERNAL

    ctypedef struct im_hal_cuda_buffer_t:
        im_hal_buffer_t base
        int32_t type
        void* host_pointer
        uint64_t device_pointer
