/* SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
 *
 * Native reads of a torch.Tensor without torch's headers.
 *
 * AOTI's C shim (torch/csrc/inductor/aoti_torch/c/shim.h, a stable C ABI) reads
 * the metadata of an `at::Tensor*`; a few mangled libtorch functions answer what
 * the shim does not: the conjugate bit, the negative bit, requires-grad. All are
 * resolved by name with dlsym at first use, and `iree_marshal._tensors` proves
 * each on known tensors before it trusts it; where one is missing or disagrees,
 * the DLPack table and Python are asked instead.
 */
#ifndef IREE_MARSHAL_ABI_TORCH_NATIVE_H_
#define IREE_MARSHAL_ABI_TORCH_NATIVE_H_

#include <stdint.h>

typedef int32_t (*im_torch_int32_fn_t)(void *tensor, int32_t *out);
typedef int32_t (*im_torch_int64_fn_t)(void *tensor, int64_t *out);
typedef int32_t (*im_torch_pointer_fn_t)(void *tensor, void **out);
typedef int32_t (*im_torch_dims_fn_t)(void *tensor, int64_t **out);
typedef int32_t (*im_torch_constant_fn_t)(void);
typedef _Bool (*im_torch_tensor_bit_fn_t)(const void *tensor);
/* c10::TensorImpl::requires_grad() const: takes the TensorImpl itself. */
typedef _Bool (*im_torch_impl_bit_fn_t)(const void *tensor_impl);
typedef _Bool (*im_torch_flag_fn_t)(void);
/* A tensor on part of another one's storage; the handle given out is deleted with
 * im_torch_delete_fn_t. Sizes, strides and offset in elements. */
typedef int32_t (*im_torch_reinterpret_fn_t)(void *tensor, int64_t rank,
                                             const int64_t *sizes,
                                             const int64_t *strides,
                                             int64_t offset, void **out);
typedef int32_t (*im_torch_delete_fn_t)(void *tensor);
/* A new tensor on memory of torch's own; its handle is deleted in the same way. */
typedef int32_t (*im_torch_empty_fn_t)(int64_t rank, const int64_t *sizes,
                                       const int64_t *strides, int32_t dtype,
                                       int32_t device_type, int32_t device_index,
                                       void **out);
/* THPVariable_Wrap of libtorch_python: a new reference to the Python object of a
 * tensor, or NULL with a Python error set. */
typedef void *(*im_torch_wrap_fn_t)(const void *tensor);

/* Where the at::Tensor may lie in a Python torch.Tensor: right behind the object
 * head, or one word later (an owned/borrowed tag comes first). Which of the two
 * it is, is proven against `tensor._cdata`. */
#define IM_TORCH_TENSOR_OFFSET 16
#define IM_TORCH_TENSOR_OFFSET_TAGGED 24

/* Fetch what a reader of the tensor at `tensor` will look at first; reads nothing
 * but the pointer to the TensorImpl. */
static inline void im_torch_prefetch(const void *tensor) {
  const char *impl = *(const char *const *)tensor;
  __builtin_prefetch(impl);
  __builtin_prefetch(impl + 64);
  __builtin_prefetch(impl + 128);
}

#endif /* IREE_MARSHAL_ABI_TORCH_NATIVE_H_ */
