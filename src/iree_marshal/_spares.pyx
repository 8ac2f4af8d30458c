# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Memory for the bookkeeping of a call, kept for the next one.

malloc tidies its small free chunks up whenever a large chunk comes or goes. The tensors
that a call makes consist of such small chunks, and pay for it: 12 % of the
instructions of a result went into that.

Everything here needs the GIL, which guards the slots.
"""
from libc.stdlib cimport free, malloc

cdef extern from *:
    """
    /* A sanitizer shall see every use of what was given back. */
    #if defined(__SANITIZE_ADDRESS__)
    #define IM_MOST_SPARE_BYTES 0
    #else
    #define IM_MOST_SPARE_BYTES (256 * 1024)
    #endif
    """
    const size_t IM_MOST_SPARE_BYTES

cdef enum:
    SLOTS = 4   # one list in, one out, twice: results are let go of after the next ones were made
    SLACK = 4   # a spare serves what is at least this part of it

cdef struct Spare:
    void* memory    # NULL: an empty slot
    size_t nbytes

cdef Spare[SLOTS] _spares
cdef int _oldest = 0


cdef void* take_memory(size_t nbytes, size_t* got) noexcept nogil:
    """At least `nbytes`, of which `got` says how many; NULL where there are none."""
    cdef Spare* spare
    cdef void* memory
    cdef int slot
    for slot in range(SLOTS):
        spare = &_spares[slot]
        if spare.memory != NULL and nbytes <= spare.nbytes <= SLACK * nbytes:
            memory = spare.memory
            spare.memory = NULL
            got[0] = spare.nbytes
            return memory
    got[0] = nbytes
    return malloc(nbytes)


cdef void give_memory(void* memory, size_t nbytes) noexcept nogil:
    """Take back what `take_memory` gave, with the size that it said."""
    global _oldest
    cdef int slot
    if nbytes > IM_MOST_SPARE_BYTES:
        free(memory)
        return
    for slot in range(SLOTS):
        if _spares[slot].memory == NULL:
            break
    else:
        # In turn, so that sizes that nobody asks for any more make way.
        slot = _oldest
        _oldest = (_oldest + 1) % SLOTS
        free(_spares[slot].memory)
    _spares[slot].memory = memory
    _spares[slot].nbytes = nbytes


cdef void drop_spares() noexcept nogil:
    """Give all of it back to malloc."""
    cdef int slot
    for slot in range(SLOTS):
        free(_spares[slot].memory)
        _spares[slot].memory = NULL


def spare_bytes():
    """How much memory is kept for the bookkeeping of later calls."""
    cdef size_t nbytes = 0
    cdef int slot
    for slot in range(SLOTS):
        if _spares[slot].memory != NULL:
            nbytes += _spares[slot].nbytes
    return nbytes
