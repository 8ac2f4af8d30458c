/* SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
 *
 * CUDA: the few driver API functions that order IREE's stream and torch's, and
 * the parts of IREE's CUDA driver that hold a stream and a device pointer.
 *
 * The driver's types and error codes are those of its published C ABI; the
 * functions are found by name in libcuda at first use, so that nothing is linked.
 *
 * The IREE structs describe iree-base-runtime 3.4.0 to 3.13.0. `_cuda` proves
 * them per device before use: the context word equals the primary context, the
 * ordinal word the device's, the stream belongs to that context and orders a
 * copy; a buffer over known memory shows its type and that very pointer.
 */
#ifndef IREE_MARSHAL_ABI_IREE_CUDA_H_
#define IREE_MARSHAL_ABI_IREE_CUDA_H_

#include <assert.h>
#include <stddef.h>
#include <stdint.h>

#include "iree.h"

/* ---- driver API ---------------------------------------------------------------- */

typedef int im_cu_result_t;
enum im_cu_result_e {
  IM_CU_SUCCESS = 0,
  IM_CU_NOT_READY = 600,
};
enum im_cu_flags_e {
  IM_CU_EVENT_DISABLE_TIMING = 2,
};

typedef im_cu_result_t (*im_cu_pointer_fn_t)(void *handle);
typedef im_cu_result_t (*im_cu_out_pointer_fn_t)(void **out);
typedef im_cu_result_t (*im_cu_get_pointer_fn_t)(void *handle, void **out);
typedef im_cu_result_t (*im_cu_get_int_fn_t)(void *handle, int *out);
/* libtorch's C shim, not the driver: the stream that torch uses on this thread. */
typedef int32_t (*im_torch_current_stream_fn_t)(int32_t device_index,
                                                void **out);
typedef im_cu_result_t (*im_cu_device_get_fn_t)(int *out_device, int ordinal);
typedef im_cu_result_t (*im_cu_retain_context_fn_t)(void **out, int device);
typedef im_cu_result_t (*im_cu_event_create_fn_t)(void **out, unsigned flags);
typedef im_cu_result_t (*im_cu_event_record_fn_t)(void *event, void *stream);
typedef im_cu_result_t (*im_cu_stream_wait_fn_t)(void *stream, void *event,
                                                 unsigned flags);
typedef im_cu_result_t (*im_cu_context_sync_fn_t)(void);
typedef im_cu_result_t (*im_cu_copy_fn_t)(uint64_t target, uint64_t source,
                                          size_t nbytes);
typedef im_cu_result_t (*im_cu_error_name_fn_t)(im_cu_result_t result,
                                                const char **out);

/* ---- IREE's CUDA device and buffer ------------------------------------------------ */

typedef struct im_hal_cuda_device_t {
  im_hal_resource_t resource;
  char unused_head[160];
  void *cu_context;
  int32_t cu_device;
  int32_t unused_padding;
  void *dispatch_stream;
} im_hal_cuda_device_t;
IM_ASSERT_OFFSET(im_hal_cuda_device_t, cu_context, 176);
IM_ASSERT_OFFSET(im_hal_cuda_device_t, cu_device, 184);
IM_ASSERT_OFFSET(im_hal_cuda_device_t, dispatch_stream, 192);

enum im_hal_cuda_buffer_type_e {
  IM_HAL_CUDA_BUFFER_DEVICE = 0,
  IM_HAL_CUDA_BUFFER_ASYNC = 3, /* stream-ordered: export_buffer refuses it */
  IM_HAL_CUDA_BUFFER_EXTERNAL = 4,
};

typedef struct im_hal_cuda_buffer_t {
  im_hal_buffer_t base;
  char unused_tail[64];
  int32_t type;
  int32_t unused_padding;
  void *host_pointer;
  uint64_t device_pointer;
} im_hal_cuda_buffer_t;
IM_ASSERT_OFFSET(im_hal_cuda_buffer_t, type, 120);
IM_ASSERT_OFFSET(im_hal_cuda_buffer_t, host_pointer, 128);
IM_ASSERT_OFFSET(im_hal_cuda_buffer_t, device_pointer, 136);

#endif /* IREE_MARSHAL_ABI_IREE_CUDA_H_ */
