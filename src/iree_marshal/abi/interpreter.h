/* SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
 *
 * What a callback that may come from any thread needs: a lock-free stack, an
 * atomic counter, and the question whether this thread holds the GIL.
 */
#ifndef IREE_MARSHAL_ABI_INTERPRETER_H_
#define IREE_MARSHAL_ABI_INTERPRETER_H_

#include <Python.h>
#include <stdint.h>

/* Intrusive node: the first member of whatever is queued. */
typedef struct im_node_t {
  struct im_node_t *next;
} im_node_t;

/* Pushes one node; returns 1 when the stack was empty before. */
static inline int im_stack_push(im_node_t **head, im_node_t *node) {
  im_node_t *old = __atomic_load_n(head, __ATOMIC_RELAXED);
  do {
    node->next = old;
  } while (!__atomic_compare_exchange_n(head, &old, node, 1, __ATOMIC_RELEASE,
                                        __ATOMIC_RELAXED));
  return old == NULL;
}

/* Takes all nodes at once, so there is no ABA problem; newest first. */
static inline im_node_t *im_stack_take_all(im_node_t **head) {
  if (__atomic_load_n(head, __ATOMIC_RELAXED) == NULL) return NULL;
  return __atomic_exchange_n(head, NULL, __ATOMIC_ACQUIRE);
}

static inline int64_t im_atomic_add(int64_t *counter, int64_t amount) {
  return __atomic_add_fetch(counter, amount, __ATOMIC_ACQ_REL);
}
static inline int64_t im_atomic_get(int64_t *counter) {
  return __atomic_load_n(counter, __ATOMIC_ACQUIRE);
}

/* True when the calling thread holds the GIL. Never takes it. PyGILState_Check
 * answers "yes" on every thread once a subinterpreter exists or the runtime is
 * gone, so the thread states are compared here. Up to 3.11 the current state is
 * that of whichever thread holds the GIL, from 3.12 on that of this thread; in
 * both, equality with this thread's own state means "held here". */
static inline int im_holds_gil(void) {
#if PY_VERSION_HEX >= 0x030D0000
  PyThreadState *current = PyThreadState_GetUnchecked();
#else
  PyThreadState *current = _PyThreadState_UncheckedGet();
#endif
  return current != NULL && current == PyGILState_GetThisThreadState();
}

#endif /* IREE_MARSHAL_ABI_INTERPRETER_H_ */
