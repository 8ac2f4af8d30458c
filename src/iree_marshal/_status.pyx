# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A failed HAL status becomes the exception class that iree.runtime raises for it, with IREE's code and message."""
from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.stdlib cimport free

from iree_marshal.abi.iree cimport IM_STATUS_CODE_MASK, im_status_storage_t, im_status_t

cdef tuple CODE_NAMES = (
    "OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS",
    "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE", "UNIMPLEMENTED",
    "INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED", "DEFERRED", "INCOMPATIBLE",
)
# As in the stock bindings; every other code is a RuntimeError.
cdef dict EXCEPTIONS = {
    "INVALID_ARGUMENT": ValueError,
    "NOT_FOUND": ValueError,
    "OUT_OF_RANGE": IndexError,
    "UNIMPLEMENTED": NotImplementedError,
}
cdef size_t LONGEST_MESSAGE = 512


cdef int raise_status(im_status_t status, str what) except -1:
    """Raise for a status that is not OK, and free it; `what` says which step on which element failed."""
    cdef int code = <int>(status & IM_STATUS_CODE_MASK)
    cdef im_status_storage_t* storage = <im_status_storage_t*>(status & ~IM_STATUS_CODE_MASK)
    cdef str name = CODE_NAMES[code] if code < len(CODE_NAMES) else f"status code {code}"
    cdef str text = ""
    if storage != NULL:
        if storage.message != NULL and storage.message_length != 0:
            text = PyBytes_FromStringAndSize(
                storage.message, <Py_ssize_t>min(storage.message_length, LONGEST_MESSAGE)
            ).decode("utf-8", "replace")
        # The block comes from aligned_alloc on Linux, so free() is right. With payloads
        # attached (release wheels have none) it is leaked rather than guessed at.
        if storage.payload_head == NULL:
            free(storage)
    raise EXCEPTIONS.get(name, RuntimeError)(f"{what}: {name}" + (f"; {text}" if text else ""))
