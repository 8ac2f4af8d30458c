# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Who keeps whose memory alive, and how it is let go.

IREE calls back when it is through with an imported buffer: from any thread, with
or without the GIL, inside a destructor, while an exception is pending, at
interpreter exit. The callback never waits for the GIL (the thread that holds it
may be waiting for IREE). Where this thread holds the GIL already, the tensor is
dropped at once; else its owner goes on a lock-free queue, which the next call of
this package, a pending call of the interpreter, or the exit handler drains. Once
the interpreter shuts down, owners are leaked on purpose.
"""
import atexit

from cpython.object cimport PyObject
from libc.stdint cimport int64_t
from libc.stdlib cimport malloc

from iree_marshal.abi.interpreter cimport (
    Py_AddPendingCall,
    Py_DECREF,
    PyErr_Occurred,
    im_atomic_add,
    im_holds_gil,
    im_node_t,
    im_stack_push,
    im_stack_take_all,
    pthread_atfork,
)
from iree_marshal.abi.iree cimport (
    IM_ALLOCATOR_COMMAND_FREE,
    IM_HAL_DEVICE_SLOT_DESTROY,
    im_hal_buffer_release,
    im_hal_buffer_t,
    im_hal_buffer_view_t,
    im_hal_resource_destroy_fn_t,
    im_hal_resource_t,
    im_ref_drop,
    im_ref_retain,
    im_status_t,
)

from iree_marshal._spares cimport give_memory, take_memory

from iree_marshal.errors import FORKED

cdef im_node_t* _released = NULL   # owners that IREE let go of and nobody dropped yet, on devices without gates
cdef im_node_t* _finished = NULL   # batches whose last view was freed without the GIL
cdef im_node_t* _unheld = NULL     # blocks of results, all of them let go of
cdef Batch* _live_batches = NULL   # guarded by the GIL
cdef HoldingBlock* _live_blocks = NULL  # guarded by the GIL
cdef Account* _accounts = NULL     # guarded by the GIL
cdef bint _gated = False           # some device's work runs behind the host
cdef bint _closing = False
cdef bint _forked = False


cdef bint is_closing() noexcept nogil:
    """Nothing may wait for a device any more: the interpreter shuts down, or this is a forked child."""
    return _closing or _forked


# ---- batches -------------------------------------------------------------------------


cdef inline size_t _round16(size_t nbytes) noexcept nogil:
    return (nbytes + 15) & ~<size_t>15


cdef Account* new_account() except NULL:
    """A new account; one per device, for the life of the process."""
    global _accounts
    cdef Account* account = <Account*>malloc(sizeof(Account))
    if account == NULL:
        raise MemoryError
    account.release_gate = NULL
    account.drop_gate = NULL
    account.settle_gate = NULL
    account.gate_state = NULL
    account.released = NULL
    account.next = _accounts
    _accounts = account
    return account


cdef void install_gates(Account* account, ReleaseGate release, DropGate drop, SettleGate settle, void* state) noexcept:
    """Order what is let go of on this account's device behind the device's work."""
    global _gated
    account.gate_state = state
    account.settle_gate = settle
    account.drop_gate = drop
    account.release_gate = release
    _gated = True


cdef Batch* begin_batch(Account* account, Py_ssize_t count, size_t view_bytes) except NULL:
    """A block for `count` imports with `view_bytes` for their views; `end_batch` hands it over to IREE's references."""
    global _live_batches
    cdef size_t owners_at = _round16(sizeof(Batch))
    cdef size_t views_at = _round16(owners_at + <size_t>count * sizeof(Owner))
    cdef size_t nbytes = 0
    cdef char* block = <char*>take_memory(views_at + view_bytes, &nbytes)
    if block == NULL:
        raise MemoryError(f"cannot allocate {views_at + view_bytes} bytes to import {count} tensors")
    cdef Batch* batch = <Batch*>block
    batch.nbytes = nbytes
    # Counted up front and settled by end_batch, so that an import itself costs no atomic operation.
    batch.pending = 1 + 2 * count
    batch.account = account
    batch.capacity = count
    batch.owners_used = 0
    batch.views_used = 0
    batch.owners = <Owner*>(block + owners_at)
    batch.views = block + views_at
    batch.views_end = batch.views + view_bytes
    batch.previous = NULL
    batch.following = _live_batches
    if _live_batches != NULL:
        _live_batches.previous = batch
    _live_batches = batch
    return batch


cdef void end_batch(Batch* batch) noexcept nogil:
    """The builder is through: from here on only what IREE holds keeps the block. Needs the GIL."""
    cdef int64_t unused = 2 * batch.capacity - batch.owners_used - batch.views_used
    if im_atomic_add(&batch.pending, -1 - unused) == 0:
        _free_batch(batch)


cdef void _free_batch(Batch* batch) noexcept nogil:
    """Needs the GIL, which guards the list of live batches."""
    global _live_batches
    if batch.previous != NULL:
        batch.previous.following = batch.following
    else:
        _live_batches = batch.following
    if batch.following != NULL:
        batch.following.previous = batch.previous
    give_memory(batch, batch.nbytes)


cdef im_hal_buffer_view_t* carve_view(Batch* batch, size_t rank) noexcept nogil:
    """Memory for a buffer view that the batch itself owns, or NULL when the slab is used up.

    The runtime frees a view through the host allocator words stored in the view; the
    self-check proves that it calls exactly `FREE` on them, once.
    """
    cdef size_t nbytes = _round16(sizeof(im_hal_buffer_view_t) + rank * sizeof(int64_t))
    cdef im_hal_buffer_view_t* view = <im_hal_buffer_view_t*>batch.views
    if nbytes > <size_t>(batch.views_end - batch.views) or batch.views_used == batch.capacity:
        return NULL
    batch.views += nbytes
    batch.views_used += 1
    view.host_allocator.self = batch
    view.host_allocator.ctl = _view_allocator_ctl
    return view


cdef im_status_t _view_allocator_ctl(void* self, int command, const void* params, void** inout) noexcept nogil:
    cdef Batch* batch = <Batch*>self
    if command != IM_ALLOCATOR_COMMAND_FREE:
        return 12  # UNIMPLEMENTED, as a code without storage: nobody allocates through a view
    if im_atomic_add(&batch.pending, -1) == 0:
        if not _closing and im_holds_gil():
            _free_batch(batch)
        else:
            _enqueue(&_finished, &batch.node)
    return 0


# ---- release -------------------------------------------------------------------------


cdef void on_input_released(void* user_data, im_hal_buffer_t* buffer) noexcept nogil:
    """IREE's release callback of an imported buffer: any thread, GIL or not."""
    cdef Owner* owner = <Owner*>user_data
    cdef Account* account = owner.batch.account
    # With an exception pending, dropping a tensor could run Python code that loses or
    # replaces it (weak references, a subclass): that waits for the drain.
    if account.release_gate != NULL:
        _enqueue(&account.released, &owner.node)
    elif not _closing and im_holds_gil() and PyErr_Occurred() == NULL:
        drop_owner(owner)
    else:
        _enqueue(&_released, &owner.node)


cdef void drop_owner(Owner* owner) noexcept nogil:
    """Needs the GIL. Declared nogil only because taking it again would cost more than the rest."""
    cdef PyObject* object = owner.object
    cdef Batch* batch = owner.batch
    owner.object = NULL
    if im_atomic_add(&batch.pending, -1) == 0:
        _free_batch(batch)
    Py_DECREF(object)


cdef void _enqueue(im_node_t** queue, im_node_t* node) noexcept nogil:
    if im_stack_push(queue, node):
        request_drain()


cdef void request_drain() noexcept nogil:
    """Have the interpreter drain the queues soon; called when one of them was empty before.

    When its table of pending calls is full, the queues wait for the next call of this package.
    """
    if not _closing:
        Py_AddPendingCall(_pending_drain, NULL)


cdef int _pending_drain(void* argument) noexcept:
    if not _closing and PyErr_Occurred() == NULL:
        _drain()
    return 0


cdef void _drain() noexcept:
    """Drop what IREE let go of. Needs the GIL and no exception pending."""
    cdef im_node_t* node = im_stack_take_all(&_released)
    cdef im_node_t* following
    cdef Account* account = _accounts
    drop_owners(node)
    while account != NULL:
        if account.release_gate != NULL:
            node = im_stack_take_all(&account.released)
            if node != NULL:
                account.release_gate(account, node)
            account.settle_gate(account)
        account = account.next
    node = im_stack_take_all(&_finished)
    while node != NULL:
        following = node.next
        _free_batch(<Batch*>node)
        node = following
    node = im_stack_take_all(&_unheld)
    while node != NULL:
        following = node.next
        _free_block(<HoldingBlock*>node)
        node = following


cdef void drop_owners(im_node_t* node) noexcept nogil:
    """Drop all owners of a list. Needs the GIL."""
    cdef im_node_t* following
    cdef Batch* batch = NULL
    cdef int64_t dropped = 0
    cdef PyObject* object
    while node != NULL:
        following = node.next
        if (<Owner*>node).batch != batch:
            _settle_batch(batch, dropped)
            batch = (<Owner*>node).batch
            dropped = 0
        object = (<Owner*>node).object
        (<Owner*>node).object = NULL
        dropped += 1
        # May run Python code; the block is still held for this owner.
        Py_DECREF(object)
        node = following
    _settle_batch(batch, dropped)


cdef void _settle_batch(Batch* batch, int64_t dropped) noexcept nogil:
    if batch != NULL and im_atomic_add(&batch.pending, -dropped) == 0:
        _free_batch(batch)


# ---- results -------------------------------------------------------------------------


cdef HoldingBlock* begin_holdings(Py_ssize_t count, size_t nbytes) except NULL:
    """A block for `count` holdings, each rounded up to 16 bytes, of `nbytes` in all; end it with `end_holdings`."""
    global _live_blocks
    cdef size_t head = _round16(sizeof(HoldingBlock))
    cdef size_t got = 0
    cdef HoldingBlock* block = <HoldingBlock*>take_memory(head + nbytes, &got)
    if block == NULL:
        raise MemoryError(f"cannot allocate {head + nbytes} bytes to hold {count} results")
    # Counted up front and settled by end_holdings, so that a result costs one atomic operation: when it is dropped.
    block.pending = 1 + count
    block.nbytes = got
    block.capacity = count
    block.used = 0
    block.last = NULL
    block.next = <char*>block + head
    block.end = block.next + nbytes
    block.previous = NULL
    block.following = _live_blocks
    if _live_blocks != NULL:
        _live_blocks.previous = block
    _live_blocks = block
    return block


cdef void end_holdings(HoldingBlock* block) noexcept nogil:
    """The builder is through: from here on only its holdings keep the block. Needs the GIL."""
    if im_atomic_add(&block.pending, -1 - (block.capacity - block.used)) == 0:
        _free_block(block)


cdef void _free_block(HoldingBlock* block) noexcept nogil:
    """Needs the GIL, which guards the list of live blocks."""
    global _live_blocks
    if block.previous != NULL:
        block.previous.following = block.following
    else:
        _live_blocks = block.following
    if block.following != NULL:
        block.following.previous = block.previous
    give_memory(block, block.nbytes)


cdef Holding* carve_holding(
    HoldingBlock* block, size_t nbytes, im_hal_buffer_t* buffer, im_hal_resource_t* device, Account* account
) noexcept nogil:
    """Take a reference to `buffer` and, unless it is NULL, to `device`; NULL when the block is used up.

    The holding heads `nbytes` of memory of the caller's layout.
    """
    cdef Holding* holding = <Holding*>block.next
    nbytes = _round16(nbytes)
    if nbytes > <size_t>(block.end - block.next) or block.used == block.capacity:
        return NULL
    im_ref_retain(buffer)
    if device != NULL:
        im_ref_retain(device)
    holding.buffer = buffer
    holding.device = device
    holding.account = account
    holding.block = block
    holding.earlier = block.last
    holding.nbytes = 0
    holding.shared = False
    block.last = holding
    block.next += nbytes
    block.used += 1
    return holding


cdef void drop_holding(Holding* holding) noexcept nogil:
    """Whoever used the buffer is through with it, as far as the host can tell. Any thread, GIL or not."""
    if holding.account.drop_gate != NULL:
        holding.account.drop_gate(holding)
    else:
        finish_holding(holding)


cdef void finish_holding(Holding* holding) noexcept nogil:
    """Give the references back. Any thread, GIL or not; the holding must not be touched any more."""
    cdef HoldingBlock* block = holding.block
    im_hal_buffer_release(holding.buffer)
    # After the buffer: its memory may belong to a pool of the device.
    if holding.device != NULL and im_ref_drop(holding.device):
        (<im_hal_resource_destroy_fn_t>holding.device.vtable[IM_HAL_DEVICE_SLOT_DESTROY])(holding.device)
    holding.buffer = NULL
    if im_atomic_add(&block.pending, -1) == 0:
        if not _closing and im_holds_gil():
            _free_block(block)
        else:
            _enqueue(&_unheld, &block.node)


# ---- entry, exit, fork -----------------------------------------------------------------


cdef int enter() except -1:
    """Every public call starts here: refuse in a forked child, drop what was released meanwhile."""
    if _forked:
        raise RuntimeError(FORKED)
    if _released != NULL or _finished != NULL or _unheld != NULL or _gated:
        _drain()
    return 0


cdef void _after_fork_in_child() noexcept nogil:
    global _forked
    _forked = True


def _at_exit():
    # From here on the interpreter takes itself apart: what IREE still releases is leaked.
    global _closing
    if not _forked:
        _drain()
    _closing = True


cdef bint _watching = False


def watch_process():
    """Install the fork and exit handlers; called once, when the first HAL device comes to be used."""
    global _watching
    if _watching:
        return
    if pthread_atfork(NULL, NULL, _after_fork_in_child) != 0:
        raise MemoryError("cannot install the fork handler")
    atexit.register(_at_exit)
    _watching = True


def check_entry():
    """Raise `RuntimeError` in a forked child, else drop what IREE released meanwhile."""
    enter()


# ---- what is alive -----------------------------------------------------------------------


cdef void count_imports(Account* account, int64_t* live, int64_t* nbytes) noexcept:
    """Tensors that IREE holds on one device (NULL: on all of them), and their bytes."""
    cdef Batch* batch = _live_batches
    cdef Py_ssize_t index
    live[0] = 0
    nbytes[0] = 0
    while batch != NULL:
        if account == NULL or batch.account == account:
            for index in range(batch.owners_used):
                if batch.owners[index].object != NULL:
                    live[0] += 1
                    nbytes[0] += batch.owners[index].nbytes
        batch = batch.following


cdef void count_exports(Account* account, int64_t* live, int64_t* nbytes) noexcept:
    """Buffers that torch or a HalArray holds on one device (NULL: on all of them), and their bytes."""
    cdef HoldingBlock* block = _live_blocks
    cdef Holding* holding
    live[0] = 0
    nbytes[0] = 0
    while block != NULL:
        holding = block.last
        while holding != NULL:
            # Another thread may be letting go of it: counted or not, it was one or the other a moment ago.
            if holding.buffer != NULL and (account == NULL or holding.account == account):
                live[0] += 1
                nbytes[0] += holding.nbytes
            holding = holding.earlier
        block = block.following


def live_counts():
    """What is alive in this process, over all devices.

    Returns
    -------
    tuple of int
        Tensors held by IREE, buffers held by torch or a `HalArray`, blocks of import
        bookkeeping. All three are zero when nothing of IREE is alive.
    """
    cdef int64_t imports, nbytes, exports, batches = 0
    if not PyErr_Occurred():
        _drain()
    count_imports(NULL, &imports, &nbytes)
    count_exports(NULL, &exports, &nbytes)
    cdef Batch* batch = _live_batches
    while batch != NULL:
        batches += 1
        batch = batch.following
    return imports, exports, batches
