/* SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
 *
 * DLPack 1.x: the versioned managed tensor and the C exchange API, declared
 * from the published layout (https://dmlc.github.io/dlpack). torch >= 2.10
 * hands out the table as `torch.Tensor.__dlpack_c_exchange_api__`, a capsule
 * named "dlpack_exchange_api". The major version is checked before use.
 */
#ifndef IREE_MARSHAL_ABI_DLPACK_H_
#define IREE_MARSHAL_ABI_DLPACK_H_

#include <assert.h>
#include <stddef.h>
#include <stdint.h>

#define IM_DLPACK_MAJOR 1

enum im_dl_device_type_e {
  IM_DL_CPU = 1,
  IM_DL_CUDA = 2,
  IM_DL_ROCM = 10,
};

typedef struct im_dl_version_t {
  uint32_t major;
  uint32_t minor;
} im_dl_version_t;

typedef struct im_dl_device_t {
  int32_t device_type;
  int32_t device_id;
} im_dl_device_t;

typedef struct im_dl_data_type_t {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
} im_dl_data_type_t;

typedef struct im_dl_tensor_t {
  void *data;
  im_dl_device_t device;
  int32_t ndim;
  im_dl_data_type_t dtype;
  int64_t *shape;
  int64_t *strides; /* in elements */
  uint64_t byte_offset;
} im_dl_tensor_t;
static_assert(offsetof(im_dl_tensor_t, device) == 8, "DLTensor.device");
static_assert(offsetof(im_dl_tensor_t, ndim) == 16, "DLTensor.ndim");
static_assert(offsetof(im_dl_tensor_t, dtype) == 20, "DLTensor.dtype");
static_assert(offsetof(im_dl_tensor_t, shape) == 24, "DLTensor.shape");
static_assert(offsetof(im_dl_tensor_t, strides) == 32, "DLTensor.strides");
static_assert(offsetof(im_dl_tensor_t, byte_offset) == 40, "DLTensor.offset");

typedef struct im_dl_managed_tensor_t {
  im_dl_version_t version;
  void *manager_ctx;
  void (*deleter)(struct im_dl_managed_tensor_t *self);
  uint64_t flags;
  im_dl_tensor_t dl_tensor;
} im_dl_managed_tensor_t;
static_assert(offsetof(im_dl_managed_tensor_t, manager_ctx) == 8, "ctx");
static_assert(offsetof(im_dl_managed_tensor_t, deleter) == 16, "deleter");
static_assert(offsetof(im_dl_managed_tensor_t, flags) == 24, "flags");
static_assert(offsetof(im_dl_managed_tensor_t, dl_tensor) == 32, "tensor");

typedef struct im_dl_exchange_header_t {
  im_dl_version_t version;
  struct im_dl_exchange_header_t *prev_api;
} im_dl_exchange_header_t;

/* All functions return 0, or -1 with a Python error set. */
typedef struct im_dl_exchange_api_t {
  im_dl_exchange_header_t header;
  int (*managed_tensor_allocator)(im_dl_tensor_t *prototype,
                                  im_dl_managed_tensor_t **out, void *error_ctx,
                                  void (*set_error)(void *error_ctx,
                                                    const char *kind,
                                                    const char *message));
  int (*managed_tensor_from_py_object_no_sync)(void *py_object,
                                               im_dl_managed_tensor_t **out);
  /* Takes the managed tensor over when it succeeds. */
  int (*managed_tensor_to_py_object_no_sync)(im_dl_managed_tensor_t *tensor,
                                             void **out_py_object);
  /* Borrowed: valid while the object lives and is not changed. May be NULL. */
  int (*dltensor_from_py_object_no_sync)(void *py_object, im_dl_tensor_t *out);
  int (*current_work_stream)(int device_type, int32_t device_id,
                             void **out_stream);
} im_dl_exchange_api_t;
static_assert(offsetof(im_dl_exchange_api_t, managed_tensor_allocator) == 16,
              "exchange table");
static_assert(offsetof(im_dl_exchange_api_t, current_work_stream) == 48,
              "exchange table");

#endif /* IREE_MARSHAL_ABI_DLPACK_H_ */
