# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
# What abi/iree.h declares, for cimport. The layouts and their guards are explained there.
from libc.stdint cimport int8_t, int16_t, int32_t, int64_t, uint16_t, uint32_t, uint64_t, uintptr_t


cdef extern from "iree.h" nogil:
    ctypedef uintptr_t im_status_t
    const uintptr_t IM_STATUS_CODE_MASK

    ctypedef struct im_status_storage_t:
        void* payload_head
        const char* file
        uint32_t line
        const char* message
        size_t message_length

    const int IM_ALLOCATOR_COMMAND_MALLOC
    const int IM_ALLOCATOR_COMMAND_FREE
    ctypedef im_status_t (*im_allocator_ctl_fn_t)(
        void* self, int command, const void* params, void** inout
    ) noexcept nogil

    ctypedef struct im_host_allocator_t:
        void* self
        im_allocator_ctl_fn_t ctl

    ctypedef struct im_py_instance_t:
        int32_t offset
        uint32_t state
    const uint32_t IM_PY_INSTANCE_STATE_MASK
    const uint32_t IM_PY_INSTANCE_STATE_READY

    ctypedef struct im_ref_type_descriptor_t:
        void (*destroy)(void* self) noexcept nogil
        const char* name
        size_t name_length
        uintptr_t count_offset_bits
    const uintptr_t IM_TYPE_LOW_BITS

    const uintptr_t IM_VALUE_TYPE_NONE
    const uintptr_t IM_VALUE_TYPE_I8
    const uintptr_t IM_VALUE_TYPE_I16
    const uintptr_t IM_VALUE_TYPE_I32
    const uintptr_t IM_VALUE_TYPE_I64
    const uintptr_t IM_VALUE_TYPE_F32
    const uintptr_t IM_VALUE_TYPE_F64

    ctypedef union im_vm_value_t:
        int8_t i8
        int16_t i16
        int32_t i32
        int64_t i64
        float f32
        double f64
        void* ref

    ctypedef struct im_vm_variant_t:
        uintptr_t type
        im_vm_value_t value
        uintptr_t ref_type

    ctypedef struct im_vm_list_t:
        int32_t ref_count
        im_host_allocator_t host_allocator
        size_t capacity
        size_t count
        uintptr_t element_type
        size_t element_size
        int32_t storage_mode
        im_vm_variant_t* storage
    const int IM_VM_LIST_STORAGE_MODE_VARIANT

    ctypedef struct im_hal_resource_t:
        int32_t ref_count
        void** vtable

    ctypedef struct im_hal_buffer_t:
        im_hal_resource_t resource
        im_hal_buffer_t* allocated_buffer
        uint64_t allocation_size
        uint64_t byte_offset
        uint64_t byte_length
        im_hal_resource_t* placement_device

    const int IM_HAL_BUFFER_MEMORY_TYPE_AT
    const int IM_HAL_BUFFER_ALLOWED_USAGE_AT
    const int IM_HAL_BUFFER_ALLOWED_ACCESS_AT
    const int IM_HAL_BUFFER_3_0_MEMORY_TYPE_AT
    const int IM_HAL_BUFFER_3_0_ALLOWED_USAGE_AT
    const int IM_HAL_BUFFER_3_0_ALLOWED_ACCESS_AT
    const int IM_HAL_BUFFER_3_1_MEMORY_TYPE_AT
    const int IM_HAL_BUFFER_3_1_ALLOWED_USAGE_AT
    const int IM_HAL_BUFFER_3_1_ALLOWED_ACCESS_AT
    const int IM_HAL_BUFFER_SLOT_RECYCLE
    const int IM_HAL_BUFFER_SLOT_DESTROY
    const int IM_HAL_BUFFER_SLOT_MAP_RANGE
    const int IM_HAL_BUFFER_SLOTS_USED
    ctypedef void (*im_hal_buffer_recycle_fn_t)(im_hal_buffer_t* buffer) noexcept nogil

    const int IM_HAL_DEVICE_SLOT_DESTROY
    const int IM_HAL_DEVICE_SLOT_DEVICE_ALLOCATOR
    ctypedef void (*im_hal_resource_destroy_fn_t)(im_hal_resource_t* resource) noexcept nogil
    ctypedef im_hal_resource_t* (*im_hal_device_allocator_fn_t)(im_hal_resource_t* device) noexcept nogil

    ctypedef struct im_hal_buffer_view_t:
        int32_t ref_count
        im_host_allocator_t host_allocator
        im_hal_buffer_t* buffer
        uint32_t element_type
        uint32_t encoding_type
        uint64_t byte_length
        size_t rank
        int64_t* dims  # a flexible array member
    const uint32_t IM_HAL_ENCODING_DENSE_ROW_MAJOR
    uint32_t IM_HAL_ELEMENT_BITS(uint32_t element_type)

    const uint32_t IM_HAL_MEMORY_TYPE_DEVICE_LOCAL
    const uint16_t IM_HAL_MEMORY_ACCESS_ALL
    const uint32_t IM_HAL_BUFFER_USAGE_DEFAULT
    const uint64_t IM_HAL_QUEUE_AFFINITY_ANY

    ctypedef struct im_hal_buffer_params_t:
        uint32_t usage
        uint16_t access
        uint32_t type
        uint64_t queue_affinity
        uint64_t min_alignment

    const int IM_HAL_EXTERNAL_BUFFER_HOST_ALLOCATION
    const int IM_HAL_EXTERNAL_BUFFER_DEVICE_ALLOCATION

    ctypedef struct im_hal_external_buffer_t:
        int32_t type
        uint32_t flags
        uint64_t size
        uint64_t handle

    ctypedef struct im_hal_release_callback_t:
        void (*fn)(void* user_data, im_hal_buffer_t* buffer) noexcept nogil
        void* user_data

    const int IM_HAL_ALLOCATOR_SLOT_HOST_ALLOCATOR
    const int IM_HAL_ALLOCATOR_SLOT_TRIM
    const int IM_HAL_ALLOCATOR_SLOT_QUERY_COMPATIBILITY
    const int IM_HAL_ALLOCATOR_SLOT_ALLOCATE_BUFFER
    const int IM_HAL_ALLOCATOR_SLOT_IMPORT_BUFFER
    const int IM_HAL_ALLOCATOR_SLOT_EXPORT_BUFFER
    const int IM_HAL_ALLOCATOR_SLOTS_USED
    ctypedef im_host_allocator_t (*im_hal_host_allocator_fn_t)(const im_hal_resource_t* allocator) noexcept nogil
    ctypedef uint32_t (*im_hal_query_compatibility_fn_t)(
        im_hal_resource_t* allocator, im_hal_buffer_params_t* params, uint64_t* allocation_size
    ) noexcept nogil
    ctypedef im_status_t (*im_hal_import_buffer_fn_t)(
        im_hal_resource_t* allocator,
        const im_hal_buffer_params_t* params,
        im_hal_external_buffer_t* external_buffer,
        im_hal_release_callback_t release_callback,
        im_hal_buffer_t** out_buffer,
    ) noexcept nogil
    ctypedef im_status_t (*im_hal_export_buffer_fn_t)(
        im_hal_resource_t* allocator,
        im_hal_buffer_t* buffer,
        int requested_type,
        uint32_t requested_flags,
        im_hal_external_buffer_t* out_external_buffer,
    ) noexcept nogil

    void im_ref_retain(void* object)
    int im_ref_drop(void* object)
    void im_hal_buffer_release(im_hal_buffer_t* buffer)
