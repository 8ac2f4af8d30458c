# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
# What abi/interpreter.h declares, and the CPython calls a callback without the GIL may make.
from cpython.object cimport PyObject
from libc.stdint cimport int64_t


cdef extern from "interpreter.h" nogil:
    ctypedef struct im_node_t:
        im_node_t* next

    int im_stack_push(im_node_t** head, im_node_t* node)
    im_node_t* im_stack_take_all(im_node_t** head)
    int64_t im_atomic_add(int64_t* counter, int64_t amount)
    int64_t im_atomic_get(int64_t* counter)
    bint im_holds_gil()


# Declared nogil: each is called only where the GIL is known to be held (or, for
# Py_AddPendingCall, where CPython documents that it is not needed).
cdef extern from "Python.h" nogil:
    void Py_INCREF(PyObject* object)
    void Py_DECREF(PyObject* object)
    PyObject* PyErr_Occurred()


cdef extern from "Python.h":
    # The function itself runs later, on the main thread, with the GIL.
    int Py_AddPendingCall(int (*function)(void*) noexcept, void* argument) nogil


cdef extern from "pthread.h" nogil:
    int pthread_atfork(
        void (*prepare)() noexcept nogil, void (*parent)() noexcept nogil, void (*child)() noexcept nogil
    )
