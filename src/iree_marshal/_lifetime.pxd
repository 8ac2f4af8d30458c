# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
from cpython.object cimport PyObject
from libc.stdint cimport int64_t

from iree_marshal.abi.interpreter cimport im_node_t
from iree_marshal.abi.iree cimport im_hal_buffer_t, im_hal_buffer_view_t, im_hal_resource_t


# A device whose work runs behind the host adds these to its account; all are NULL on
# a host device, where memory may be reused the moment it is let go of.
#
# ReleaseGate takes over owners that IREE let go of (linked through their nodes) and
# drops them with drop_owners, now or once the device is through. Called with the GIL.
ctypedef void (*ReleaseGate)(Account* account, im_node_t* owners) noexcept
# DropGate takes over a holding that torch dropped and lets it go with finish_holding
# once that is safe. Any thread, GIL or not.
ctypedef void (*DropGate)(Holding* holding) noexcept nogil
# SettleGate lets go of what has become safe meanwhile. Called with the GIL.
ctypedef void (*SettleGate)(Account* account) noexcept


# One imported tensor. IREE's release callback carries its address.
cdef struct Owner:
    im_node_t node        # first: link of the release queue
    PyObject* object      # strong: the tensor whose memory IREE uses
    Batch* batch          # keeps this struct itself alive
    int64_t nbytes


# The imports of one call: their owners and buffer views in one block of memory.
cdef struct Batch:
    im_node_t node        # first: link of the queue of finished batches
    # Owners not yet dropped, views not yet freed by IREE, and what the builder
    # still may hand out. Zero frees the block; atomic, because views are freed on any thread.
    int64_t pending
    Batch* previous       # live batches, for the statistics; guarded by the GIL
    Batch* following
    Account* account      # borrowed: accounts are never freed
    size_t nbytes         # of the block
    Py_ssize_t capacity
    Py_ssize_t owners_used
    Py_ssize_t views_used
    Owner* owners
    char* views           # the next free byte of the view slab
    char* views_end


# One buffer of IREE that torch or a HalArray holds; heads a description that is carved out of a block.
cdef struct Holding:
    im_node_t node              # first: link of the queue of an account's drop gate
    im_hal_buffer_t* buffer     # one reference; NULL once it was given back
    im_hal_resource_t* device   # one reference; NULL where the device is never destroyed anyway
    Account* account            # borrowed: accounts are never freed
    HoldingBlock* block         # keeps this struct itself alive
    Holding* earlier            # in the same block, for the statistics
    int64_t nbytes
    void* stream                # for the drop gate: the stream that the dropping thread used
    bint shared                 # several tensors are parts of it


# The holdings of one call: one block of memory instead of one per result.
cdef struct HoldingBlock:
    im_node_t node              # first: link of the queue of finished blocks
    # Holdings not let go of, and what the builder still may carve. Zero frees the
    # block; atomic, because torch drops tensors on any thread.
    int64_t pending
    HoldingBlock* previous      # live blocks, for the statistics; guarded by the GIL
    HoldingBlock* following
    size_t nbytes               # of the block
    Py_ssize_t capacity
    Py_ssize_t used
    Holding* last               # the one carved last
    char* next                  # the next free byte
    char* end


# What IREE and torch hold of each other on one device. Never freed.
cdef struct Account:
    ReleaseGate release_gate
    DropGate drop_gate
    SettleGate settle_gate
    void* gate_state
    im_node_t* released   # owners that IREE let go of, for the release gate
    Account* next


cdef Account* new_account() except NULL
cdef void request_drain() noexcept nogil
cdef void install_gates(Account* account, ReleaseGate release, DropGate drop, SettleGate settle, void* state) noexcept
cdef Batch* begin_batch(Account* account, Py_ssize_t count, size_t view_bytes) except NULL
cdef void end_batch(Batch* batch) noexcept nogil
cdef im_hal_buffer_view_t* carve_view(Batch* batch, size_t rank) noexcept nogil
cdef void on_input_released(void* user_data, im_hal_buffer_t* buffer) noexcept nogil
cdef void drop_owners(im_node_t* node) noexcept nogil
cdef HoldingBlock* begin_holdings(Py_ssize_t count, size_t nbytes) except NULL
cdef void end_holdings(HoldingBlock* block) noexcept nogil
cdef Holding* carve_holding(
    HoldingBlock* block, size_t nbytes, im_hal_buffer_t* buffer, im_hal_resource_t* device, Account* account
) noexcept nogil
cdef void drop_holding(Holding* holding) noexcept nogil
cdef void finish_holding(Holding* holding) noexcept nogil
cdef int enter() except -1
cdef bint is_closing() noexcept nogil
cdef void count_imports(Account* account, int64_t* live, int64_t* nbytes) noexcept
cdef void count_exports(Account* account, int64_t* live, int64_t* nbytes) noexcept
