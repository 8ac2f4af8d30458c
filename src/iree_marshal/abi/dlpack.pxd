# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
# What abi/dlpack.h declares, for cimport.
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t


cdef extern from "dlpack.h":
    const uint32_t IM_DLPACK_MAJOR
    const int IM_DL_CPU
    const int IM_DL_CUDA
    const int IM_DL_ROCM

    ctypedef struct im_dl_version_t:
        uint32_t major
        uint32_t minor

    ctypedef struct im_dl_device_t:
        int32_t device_type
        int32_t device_id

    ctypedef struct im_dl_data_type_t:
        uint8_t code
        uint8_t bits
        uint16_t lanes

    ctypedef struct im_dl_tensor_t:
        void* data
        im_dl_device_t device
        int32_t ndim
        im_dl_data_type_t dtype
        int64_t* shape
        int64_t* strides
        uint64_t byte_offset

    ctypedef struct im_dl_managed_tensor_t:
        im_dl_version_t version
        void* manager_ctx
        void (*deleter)(im_dl_managed_tensor_t* self) noexcept nogil
        uint64_t flags
        im_dl_tensor_t dl_tensor

    ctypedef struct im_dl_exchange_header_t:
        im_dl_version_t version
        im_dl_exchange_header_t* prev_api

    # `except -1`: the table's functions return -1 with a Python error set.
    ctypedef struct im_dl_exchange_api_t:
        im_dl_exchange_header_t header
        int (*managed_tensor_to_py_object_no_sync)(im_dl_managed_tensor_t* tensor, void** out_py_object) except -1
        int (*dltensor_from_py_object_no_sync)(void* py_object, im_dl_tensor_t* out) except -1
        int (*current_work_stream)(int device_type, int32_t device_id, void** out_stream) except -1
