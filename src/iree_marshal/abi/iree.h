/* SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
 *
 * The parts of the IREE runtime's in-memory layout that iree_marshal reads or
 * calls. This is the only file that knows an offset or a vtable slot.
 *
 * The iree-base-runtime wheels ship no headers and export no symbols, so these
 * declarations are our own. They describe Linux x86-64 wheels of
 * iree-base-runtime 3.4.0 to 3.13.0, GIL builds of CPython. Nothing here is
 * trusted as it stands: `iree_marshal.selfcheck` proves every field and slot in
 * the running process before the first use (see docs/trust.md).
 *
 * Every field that is used carries a static assertion on its offset; words that
 * lie between and are not used are named `unused_*`.
 */
#ifndef IREE_MARSHAL_ABI_IREE_H_
#define IREE_MARSHAL_ABI_IREE_H_

#include <assert.h>
#include <stddef.h>
#include <stdint.h>

#define IM_ASSERT_OFFSET(type, field, offset) \
  static_assert(offsetof(type, field) == (offset), #type "." #field " moved")
#define IM_ASSERT_SIZE(type, size) \
  static_assert(sizeof(type) == (size), #type " changed its size")

/* ---- status: 0 is OK, else code in the low 5 bits, storage in the others -- */

typedef uintptr_t im_status_t;
#define IM_STATUS_CODE_MASK ((uintptr_t)0x1F)

typedef struct im_status_storage_t {
  void *payload_head; /* 0: no payload to free apart */
  void *payload_tail;
  const char *file;
  uint32_t line;
  uint32_t unused_padding;
  const char *message; /* not NUL terminated */
  size_t message_length;
} im_status_storage_t;
IM_ASSERT_OFFSET(im_status_storage_t, payload_head, 0);
IM_ASSERT_OFFSET(im_status_storage_t, line, 24);
IM_ASSERT_OFFSET(im_status_storage_t, message, 32);
IM_ASSERT_OFFSET(im_status_storage_t, message_length, 40);

/* ---- host allocator ------------------------------------------------------- */

enum im_allocator_command_e {
  IM_ALLOCATOR_COMMAND_MALLOC = 0,
  IM_ALLOCATOR_COMMAND_FREE = 3,
};

/* `params` points to the byte length for MALLOC and is NULL for FREE. */
typedef im_status_t (*im_allocator_ctl_fn_t)(void *self, int command,
                                             const void *params, void **inout);
typedef struct im_host_allocator_t {
  void *self;
  im_allocator_ctl_fn_t ctl;
} im_host_allocator_t;
IM_ASSERT_SIZE(im_host_allocator_t, 16);

/* ---- nanobind instance: the Python object around a native pointer ---------- */

typedef struct im_py_instance_t {
  char object_head[16]; /* PyObject of a GIL build */
  int32_t offset;       /* from the start of the Python object to the payload */
  uint32_t state;
} im_py_instance_t;
IM_ASSERT_OFFSET(im_py_instance_t, offset, 16);
IM_ASSERT_OFFSET(im_py_instance_t, state, 20);
/* state & MASK == READY: initialised, payload stored inside the object. */
#define IM_PY_INSTANCE_STATE_MASK 7u
#define IM_PY_INSTANCE_STATE_READY 6u

/* ---- VM: type descriptors, variants, lists ---------------------------------- */

/* A type word is the address of a descriptor; its low 3 bits hold value types
 * (0 to 6) and, in ref types, a quarter of the count's offset (0 for all the
 * types below). */
typedef struct im_ref_type_descriptor_t {
  void (*destroy)(void *self);
  const char *name; /* not NUL terminated */
  size_t name_length;
  uintptr_t count_offset_bits;
} im_ref_type_descriptor_t;
IM_ASSERT_OFFSET(im_ref_type_descriptor_t, destroy, 0);
IM_ASSERT_OFFSET(im_ref_type_descriptor_t, name, 8);
IM_ASSERT_OFFSET(im_ref_type_descriptor_t, name_length, 16);
IM_ASSERT_OFFSET(im_ref_type_descriptor_t, count_offset_bits, 24);
#define IM_TYPE_LOW_BITS ((uintptr_t)7)

enum im_value_type_e {
  IM_VALUE_TYPE_NONE = 0,
  IM_VALUE_TYPE_I8 = 1,
  IM_VALUE_TYPE_I16 = 2,
  IM_VALUE_TYPE_I32 = 3,
  IM_VALUE_TYPE_I64 = 4,
  IM_VALUE_TYPE_F32 = 5,
  IM_VALUE_TYPE_F64 = 6,
};

typedef union im_vm_value_t {
  int8_t i8;
  int16_t i16;
  int32_t i32;
  int64_t i64;
  float f32;
  double f64;
  void *ref;
} im_vm_value_t;

typedef struct im_vm_variant_t {
  uintptr_t type;
  im_vm_value_t value;
  uintptr_t ref_type;
} im_vm_variant_t;
IM_ASSERT_OFFSET(im_vm_variant_t, type, 0);
IM_ASSERT_OFFSET(im_vm_variant_t, value, 8);
IM_ASSERT_OFFSET(im_vm_variant_t, ref_type, 16);
IM_ASSERT_SIZE(im_vm_variant_t, 24);

typedef struct im_vm_list_t {
  int32_t ref_count;
  int32_t unused_padding0;
  im_host_allocator_t host_allocator;
  size_t capacity;
  size_t count;
  uintptr_t element_type; /* 0 in a variant list */
  size_t element_size;    /* 24 in a variant list */
  int32_t storage_mode;   /* 2: variants */
  int32_t unused_padding1;
  im_vm_variant_t *storage; /* moves when the list grows: never keep it */
} im_vm_list_t;
IM_ASSERT_OFFSET(im_vm_list_t, ref_count, 0);
IM_ASSERT_OFFSET(im_vm_list_t, host_allocator, 8);
IM_ASSERT_OFFSET(im_vm_list_t, capacity, 24);
IM_ASSERT_OFFSET(im_vm_list_t, count, 32);
IM_ASSERT_OFFSET(im_vm_list_t, element_type, 40);
IM_ASSERT_OFFSET(im_vm_list_t, element_size, 48);
IM_ASSERT_OFFSET(im_vm_list_t, storage_mode, 56);
IM_ASSERT_OFFSET(im_vm_list_t, storage, 64);
#define IM_VM_LIST_STORAGE_MODE_VARIANT 2

/* ---- HAL: resources, buffers, buffer views ---------------------------------- */

/* Head of every HAL object with a vtable. */
typedef struct im_hal_resource_t {
  int32_t ref_count;
  int32_t unused_padding;
  void **vtable;
} im_hal_resource_t;
IM_ASSERT_OFFSET(im_hal_resource_t, ref_count, 0);
IM_ASSERT_OFFSET(im_hal_resource_t, vtable, 8);

/* The part of a buffer that is the same from 3.1 on; memory type, usage and
 * access follow at offsets that depend on the release and are not used. */
typedef struct im_hal_buffer_t {
  im_hal_resource_t resource;
  struct im_hal_buffer_t *allocated_buffer; /* itself, unless a subspan */
  uint64_t allocation_size;                 /* bytes */
  uint64_t byte_offset;
  uint64_t byte_length;
  im_hal_resource_t *placement_device; /* not retained; may be NULL */
} im_hal_buffer_t;
IM_ASSERT_OFFSET(im_hal_buffer_t, allocated_buffer, 16);
IM_ASSERT_OFFSET(im_hal_buffer_t, allocation_size, 24);
IM_ASSERT_OFFSET(im_hal_buffer_t, byte_offset, 32);
IM_ASSERT_OFFSET(im_hal_buffer_t, byte_length, 40);
IM_ASSERT_OFFSET(im_hal_buffer_t, placement_device, 48);

/* Where the fields that are not used lie: from 3.4 on, in 3.0, and in 3.1 to 3.3. They
 * are only read, to tell the layouts apart; the older releases are refused. */
enum im_hal_buffer_tail_e {
  IM_HAL_BUFFER_MEMORY_TYPE_AT = 84,
  IM_HAL_BUFFER_ALLOWED_USAGE_AT = 88,
  IM_HAL_BUFFER_ALLOWED_ACCESS_AT = 92,
};
enum im_hal_buffer_older_tail_e {
  IM_HAL_BUFFER_3_0_MEMORY_TYPE_AT = 72,
  IM_HAL_BUFFER_3_0_ALLOWED_USAGE_AT = 76,
  IM_HAL_BUFFER_3_0_ALLOWED_ACCESS_AT = 80,
  IM_HAL_BUFFER_3_1_MEMORY_TYPE_AT = 80,
  IM_HAL_BUFFER_3_1_ALLOWED_USAGE_AT = 84,
  IM_HAL_BUFFER_3_1_ALLOWED_ACCESS_AT = 88,
};

/* A foreign release goes through RECYCLE once the count has reached zero, never
 * through DESTROY: pooled buffers go back to their pool there. */
enum im_hal_buffer_slot_e {
  IM_HAL_BUFFER_SLOT_RECYCLE = 0,
  IM_HAL_BUFFER_SLOT_DESTROY = 1,
  IM_HAL_BUFFER_SLOT_MAP_RANGE = 2,
  IM_HAL_BUFFER_SLOTS_USED = 6,
};
typedef void (*im_hal_buffer_recycle_fn_t)(im_hal_buffer_t *buffer);

enum im_hal_device_slot_e {
  IM_HAL_DEVICE_SLOT_DESTROY = 0,
  IM_HAL_DEVICE_SLOT_DEVICE_ALLOCATOR = 3,
};
typedef void (*im_hal_resource_destroy_fn_t)(im_hal_resource_t *resource);
typedef im_hal_resource_t *(*im_hal_device_allocator_fn_t)(
    im_hal_resource_t *device);

typedef struct im_hal_buffer_view_t {
  int32_t ref_count;
  int32_t unused_padding;
  im_host_allocator_t host_allocator;
  im_hal_buffer_t *buffer;
  uint32_t element_type;
  uint32_t encoding_type;
  uint64_t byte_length;
  size_t rank;
  int64_t dims[];
} im_hal_buffer_view_t;
IM_ASSERT_OFFSET(im_hal_buffer_view_t, ref_count, 0);
IM_ASSERT_OFFSET(im_hal_buffer_view_t, host_allocator, 8);
IM_ASSERT_OFFSET(im_hal_buffer_view_t, buffer, 24);
IM_ASSERT_OFFSET(im_hal_buffer_view_t, element_type, 32);
IM_ASSERT_OFFSET(im_hal_buffer_view_t, encoding_type, 36);
IM_ASSERT_OFFSET(im_hal_buffer_view_t, byte_length, 40);
IM_ASSERT_OFFSET(im_hal_buffer_view_t, rank, 48);
IM_ASSERT_OFFSET(im_hal_buffer_view_t, dims, 56);
#define IM_HAL_ENCODING_DENSE_ROW_MAJOR 1u

/* Element type: numerical type in the top byte, bit count in the low one. */
#define IM_HAL_ELEMENT_BITS(element_type) ((element_type) & 0xFFu)

/* ---- HAL: allocator ----------------------------------------------------------- */

/* Values, not bit names: the same in all releases above. */
enum im_hal_memory_type_e {
  IM_HAL_MEMORY_TYPE_DEVICE_LOCAL = 0x30, /* includes device visible */
};
enum im_hal_memory_access_e {
  /* read, write, discard: a program may copy into an argument */
  IM_HAL_MEMORY_ACCESS_ALL = 0x7,
};
enum im_hal_buffer_usage_e {
  /* transfer source and target, dispatch storage read and write; no mapping */
  IM_HAL_BUFFER_USAGE_DEFAULT = 0xC03,
};
#define IM_HAL_QUEUE_AFFINITY_ANY UINT64_MAX

/* Calling a slot directly skips the wrapper that fills in zeros, so every
 * member is set by the caller (min_alignment 0 means none). */
typedef struct im_hal_buffer_params_t {
  uint32_t usage;
  uint16_t access;
  uint16_t unused_padding0;
  uint32_t type;
  uint32_t unused_padding1;
  uint64_t queue_affinity;
  uint64_t min_alignment;
} im_hal_buffer_params_t;
IM_ASSERT_OFFSET(im_hal_buffer_params_t, usage, 0);
IM_ASSERT_OFFSET(im_hal_buffer_params_t, access, 4);
IM_ASSERT_OFFSET(im_hal_buffer_params_t, type, 8);
IM_ASSERT_OFFSET(im_hal_buffer_params_t, queue_affinity, 16);
IM_ASSERT_OFFSET(im_hal_buffer_params_t, min_alignment, 24);
IM_ASSERT_SIZE(im_hal_buffer_params_t, 32);

enum im_hal_external_buffer_type_e {
  IM_HAL_EXTERNAL_BUFFER_HOST_ALLOCATION = 1,
  IM_HAL_EXTERNAL_BUFFER_DEVICE_ALLOCATION = 2,
};

typedef struct im_hal_external_buffer_t {
  int32_t type;
  uint32_t flags;
  uint64_t size;   /* bytes */
  uint64_t handle; /* the pointer */
} im_hal_external_buffer_t;
IM_ASSERT_OFFSET(im_hal_external_buffer_t, type, 0);
IM_ASSERT_OFFSET(im_hal_external_buffer_t, flags, 4);
IM_ASSERT_OFFSET(im_hal_external_buffer_t, size, 8);
IM_ASSERT_OFFSET(im_hal_external_buffer_t, handle, 16);

/* Passed by value. A failed import never calls it. */
typedef struct im_hal_release_callback_t {
  void (*fn)(void *user_data, im_hal_buffer_t *buffer);
  void *user_data;
} im_hal_release_callback_t;
IM_ASSERT_SIZE(im_hal_release_callback_t, 16);

enum im_hal_allocator_slot_e {
  IM_HAL_ALLOCATOR_SLOT_HOST_ALLOCATOR = 1,
  IM_HAL_ALLOCATOR_SLOT_TRIM = 2,
  IM_HAL_ALLOCATOR_SLOT_QUERY_COMPATIBILITY = 5,
  IM_HAL_ALLOCATOR_SLOT_ALLOCATE_BUFFER = 6,
  IM_HAL_ALLOCATOR_SLOT_IMPORT_BUFFER = 8,
  IM_HAL_ALLOCATOR_SLOT_EXPORT_BUFFER = 9,
  IM_HAL_ALLOCATOR_SLOTS_USED = 10,
};
typedef im_host_allocator_t (*im_hal_host_allocator_fn_t)(
    const im_hal_resource_t *allocator);
typedef uint32_t (*im_hal_query_compatibility_fn_t)(
    im_hal_resource_t *allocator, im_hal_buffer_params_t *params,
    uint64_t *allocation_size);
typedef im_status_t (*im_hal_import_buffer_fn_t)(
    im_hal_resource_t *allocator, const im_hal_buffer_params_t *params,
    im_hal_external_buffer_t *external_buffer,
    im_hal_release_callback_t release_callback, im_hal_buffer_t **out_buffer);
typedef im_status_t (*im_hal_export_buffer_fn_t)(
    im_hal_resource_t *allocator, im_hal_buffer_t *buffer, int requested_type,
    uint32_t requested_flags, im_hal_external_buffer_t *out_external_buffer);

/* ---- reference counts ----------------------------------------------------------- */

/* Lists, buffer views, buffers, allocators, devices and fences all start with
 * their int32 count. */
static inline void im_ref_retain(void *object) {
  __atomic_fetch_add((int32_t *)object, 1, __ATOMIC_RELAXED);
}

/* Returns 1 when the caller dropped the last reference. */
static inline int im_ref_drop(void *object) {
  return __atomic_fetch_sub((int32_t *)object, 1, __ATOMIC_ACQ_REL) == 1;
}

static inline void im_hal_buffer_release(im_hal_buffer_t *buffer) {
  if (im_ref_drop(buffer)) {
    ((im_hal_buffer_recycle_fn_t)
         buffer->resource.vtable[IM_HAL_BUFFER_SLOT_RECYCLE])(buffer);
  }
}

#endif /* IREE_MARSHAL_ABI_IREE_H_ */
