# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Order between torch's streams and IREE's on one CUDA device, without blocking the host.

IREE has a stream of its own that nothing orders against torch's. Three orders are needed:

* IREE reads an input only after torch has written it: IREE's stream waits for an
  event on torch's current stream (`order_after_torch`, one event per call).
* torch reuses the memory of an input only after IREE is through with it: owners that
  IREE let go of wait for an event on IREE's stream (`_gate_owners`).
* IREE frees a result only after torch is through with it: IREE frees a dropped result
  at once and without any order, so its last reference waits for an event on the
  stream that was current where torch dropped it (`_gate_holding`, `_settle`).

What waits is looked at, without blocking, whenever this package is called; a backlog
that grows beyond its bound is waited for. Where IREE's stream is not proven (HIP, an
unknown layout), the host synchronizes instead.
"""
import ctypes
import logging
import os

import torch
from iree.runtime import HalBufferView

from libc.stdlib cimport calloc, free

from iree_marshal._lifetime cimport (
    Account,
    Holding,
    drop_owners,
    finish_holding,
    install_gates,
    is_closing,
    request_drain,
)
from iree_marshal._objects cimport NativeDevice, borrow_buffer, borrow_buffer_view, locate_exported
from iree_marshal.abi.interpreter cimport im_node_t, im_stack_push, im_stack_take_all
from iree_marshal.abi.iree cimport im_hal_buffer_t
from iree_marshal.abi.iree_cuda cimport (
    IM_CU_EVENT_DISABLE_TIMING,
    IM_CU_NOT_READY,
    IM_CU_SUCCESS,
    IM_HAL_CUDA_BUFFER_ASYNC,
    IM_HAL_CUDA_BUFFER_EXTERNAL,
    im_cu_context_sync_fn_t,
    im_cu_copy_fn_t,
    im_cu_device_get_fn_t,
    im_cu_error_name_fn_t,
    im_cu_event_create_fn_t,
    im_cu_event_record_fn_t,
    im_cu_get_int_fn_t,
    im_cu_get_pointer_fn_t,
    im_cu_out_pointer_fn_t,
    im_cu_pointer_fn_t,
    im_cu_result_t,
    im_cu_retain_context_fn_t,
    im_cu_stream_wait_fn_t,
    im_hal_cuda_buffer_t,
    im_hal_cuda_device_t,
    im_torch_current_stream_fn_t,
)

from iree_marshal import _importing

_log = logging.getLogger("iree_marshal.cuda")

cdef enum:
    EVENTS_KEPT = 64
    MOST_EXTRAS = 7          # streams named by record_stream
    EVENTS_PER_WAIT = 9      # those, the dropping stream and the default stream
    MOST_WAITS = 64          # a longer backlog is waited for, oldest first

cdef struct Driver:
    im_cu_device_get_fn_t device_get
    im_cu_retain_context_fn_t retain_primary_context
    im_cu_out_pointer_fn_t current_context
    im_cu_pointer_fn_t push_context
    im_cu_out_pointer_fn_t pop_context
    im_cu_context_sync_fn_t synchronize_context
    im_cu_event_create_fn_t event_create
    im_cu_pointer_fn_t event_destroy
    im_cu_event_record_fn_t event_record
    im_cu_pointer_fn_t event_query
    im_cu_pointer_fn_t event_synchronize
    im_cu_stream_wait_fn_t stream_wait_event
    im_cu_get_pointer_fn_t stream_context
    im_cu_get_int_fn_t stream_is_capturing
    im_cu_error_name_fn_t error_name
    im_cu_copy_fn_t copy
    im_torch_current_stream_fn_t torch_stream

# What is let go of once all events have happened.
cdef struct Wait:
    Wait* next
    void* events[EVENTS_PER_WAIT]
    int event_count
    im_node_t* owners
    im_node_t* holdings

# Everything about one device; the gate state of its account. Never freed.
cdef struct Ordering:
    int torch_index
    void* context             # the primary context, shared with torch
    void** buffer_vtable      # of the driver's buffers; NULL: not proven, stream-ordered results are copied
    void* iree_stream         # NULL: not proven, the host synchronizes
    void* order_event
    im_node_t* dropped        # holdings dropped since the last settling; pushed by any thread
    Wait* oldest
    Wait* newest
    int waits
    void* spare_events[EVENTS_KEPT]
    int spares
    void* extra_streams[MOST_EXTRAS]
    int extras

cdef Driver _driver
cdef bint _driver_on = False
cdef dict _proofs = {}        # torch device -> {what: finding}, for `doctor`


# ---- driver ---------------------------------------------------------------------------------


cdef int _load_driver() except -1:
    """Find the driver functions by name; raises LookupError naming what is missing."""
    global _driver_on
    if _driver_on:
        return 0
    if torch.version.hip is not None:
        raise LookupError("this torch is built for HIP")
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
        shim = ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cuda.so"))
    except OSError as error:
        raise LookupError(str(error)) from None
    _driver.device_get = <im_cu_device_get_fn_t>_find(cuda, "cuDeviceGet")
    _driver.retain_primary_context = <im_cu_retain_context_fn_t>_find(cuda, "cuDevicePrimaryCtxRetain")
    _driver.current_context = <im_cu_out_pointer_fn_t>_find(cuda, "cuCtxGetCurrent")
    _driver.push_context = <im_cu_pointer_fn_t>_find(cuda, "cuCtxPushCurrent_v2")
    _driver.pop_context = <im_cu_out_pointer_fn_t>_find(cuda, "cuCtxPopCurrent_v2")
    _driver.synchronize_context = <im_cu_context_sync_fn_t>_find(cuda, "cuCtxSynchronize")
    _driver.event_create = <im_cu_event_create_fn_t>_find(cuda, "cuEventCreate")
    _driver.event_destroy = <im_cu_pointer_fn_t>_find(cuda, "cuEventDestroy_v2")
    _driver.event_record = <im_cu_event_record_fn_t>_find(cuda, "cuEventRecord")
    _driver.event_query = <im_cu_pointer_fn_t>_find(cuda, "cuEventQuery")
    _driver.event_synchronize = <im_cu_pointer_fn_t>_find(cuda, "cuEventSynchronize")
    _driver.stream_wait_event = <im_cu_stream_wait_fn_t>_find(cuda, "cuStreamWaitEvent")
    _driver.stream_context = <im_cu_get_pointer_fn_t>_find(cuda, "cuStreamGetCtx")
    _driver.stream_is_capturing = <im_cu_get_int_fn_t>_find(cuda, "cuStreamIsCapturing")
    _driver.error_name = <im_cu_error_name_fn_t>_find(cuda, "cuGetErrorName")
    _driver.copy = <im_cu_copy_fn_t>_find(cuda, "cuMemcpyDtoD_v2")
    _driver.torch_stream = <im_torch_current_stream_fn_t>_find(shim, "aoti_torch_get_current_cuda_stream")
    _driver_on = True
    return 0


cdef size_t _find(object library, str name) except 0:
    try:
        return ctypes.cast(getattr(library, name), ctypes.c_void_p).value
    except AttributeError:
        raise LookupError(f"{library._name} has no {name}") from None


cdef int _check(im_cu_result_t result, str what) except -1:
    cdef const char* name = NULL
    if result == IM_CU_SUCCESS:
        return 0
    _driver.error_name(result, &name)
    text = name.decode() if name != NULL else str(result)
    raise RuntimeError(f"{what}: CUDA driver error {text}")


cdef bint _enter_context(Ordering* ordering) noexcept nogil:
    """Make the device's context current; returns whether `_leave_context` has to undo it."""
    cdef void* current = NULL
    _driver.current_context(&current)
    if current == ordering.context:
        return False
    _driver.push_context(ordering.context)
    return True


cdef void _leave_context(bint entered) noexcept nogil:
    cdef void* popped
    if entered:
        _driver.pop_context(&popped)


cdef bint enter_context(NativeDevice device) noexcept:
    """`NativeDevice.enter_context`."""
    return _enter_context(<Ordering*>device.account.gate_state)


cdef void leave_context() noexcept:
    """`NativeDevice.leave_context`."""
    _leave_context(True)


# ---- inputs: IREE's stream after torch's --------------------------------------------------------


cdef int order_after_torch(NativeDevice device) except -1:
    """Have IREE start after all that torch's current stream was given so far; nothing to do on a host device."""
    cdef Ordering* ordering = <Ordering*>device.account.gate_state
    cdef void* stream = NULL
    cdef int capturing = 0
    cdef im_cu_result_t result
    cdef bint entered
    if ordering == NULL or ordering.iree_stream == NULL:
        torch.cuda.current_stream(device.torch_device).synchronize()
        return 0
    if _driver.torch_stream(ordering.torch_index, &stream) != 0:
        raise RuntimeError(f"torch has no current stream on {device.torch_device}")
    entered = _enter_context(ordering)
    result = _driver.stream_is_capturing(stream, &capturing)
    if result == IM_CU_SUCCESS and not capturing:
        # Recording and waiting happen under the GIL, so one event serves every call.
        result = _driver.event_record(ordering.order_event, stream)
        if result == IM_CU_SUCCESS:
            result = _driver.stream_wait_event(ordering.iree_stream, ordering.order_event, 0)
    _leave_context(entered)
    if capturing:
        raise RuntimeError("IREE cannot be called while torch captures a CUDA graph on the current stream")
    return _check(result, f"cannot order IREE's stream after torch's on {device.torch_device}")


# ---- what waits for the device --------------------------------------------------------------------


cdef void* _take_event(Ordering* ordering) noexcept nogil:
    cdef void* event = NULL
    if ordering.spares:
        ordering.spares -= 1
        return ordering.spare_events[ordering.spares]
    if _driver.event_create(&event, IM_CU_EVENT_DISABLE_TIMING) != IM_CU_SUCCESS:
        return NULL
    return event


cdef void _give_event(Ordering* ordering, void* event) noexcept nogil:
    if ordering.spares < EVENTS_KEPT:
        ordering.spare_events[ordering.spares] = event
        ordering.spares += 1
    else:
        _driver.event_destroy(event)


cdef Wait* _new_wait() noexcept nogil:
    return <Wait*>calloc(1, sizeof(Wait))


cdef bint _await_stream(Ordering* ordering, Wait* wait, void* stream) noexcept nogil:
    """Add an event on `stream` to the wait; False when the driver refuses."""
    cdef void* event = _take_event(ordering)
    if event == NULL:
        return False
    if _driver.event_record(event, stream) != IM_CU_SUCCESS:
        _driver.event_destroy(event)
        return False
    wait.events[wait.event_count] = event
    wait.event_count += 1
    return True


cdef bint _has_happened(Ordering* ordering, Wait* wait) noexcept nogil:
    while wait.event_count:
        if _driver.event_query(wait.events[wait.event_count - 1]) == IM_CU_NOT_READY:
            return False
        # Any other error belongs to work of the user's that failed; nothing runs behind it any more.
        wait.event_count -= 1
        _give_event(ordering, wait.events[wait.event_count])
    return True


cdef void _finish(Wait* wait) noexcept nogil:
    """Let go of everything that waited. Needs the GIL and the device's context."""
    cdef im_node_t* node = wait.holdings
    cdef im_node_t* following
    drop_owners(wait.owners)
    while node != NULL:
        following = node.next
        finish_holding(<Holding*>node)
        node = following
    free(wait)


cdef void _append(Ordering* ordering, Wait* wait) noexcept nogil:
    if ordering.newest == NULL:
        ordering.oldest = wait
    else:
        ordering.newest.next = wait
    ordering.newest = wait
    ordering.waits += 1


cdef Wait* _take_oldest(Ordering* ordering) noexcept nogil:
    """Unlinked before it is finished: dropping a tensor can run code that comes back here."""
    cdef Wait* wait = ordering.oldest
    ordering.oldest = wait.next
    if ordering.oldest == NULL:
        ordering.newest = NULL
    ordering.waits -= 1
    return wait


cdef void _gate_owners(Account* account, im_node_t* owners) noexcept:
    """Tensors that IREE let go of: dropped once IREE's stream has passed this point."""
    cdef Ordering* ordering = <Ordering*>account.gate_state
    cdef Wait* wait = _new_wait()
    cdef bint entered
    if wait == NULL:
        return  # leaked: the one thing that is safe without memory
    wait.owners = owners
    entered = _enter_context(ordering)
    if ordering.iree_stream == NULL or not _await_stream(ordering, wait, ordering.iree_stream):
        _driver.synchronize_context()
    if _has_happened(ordering, wait):
        _finish(wait)
    else:
        _append(ordering, wait)
    _leave_context(entered)


# For tests: False gives results back to IREE the moment torch drops them, as if nothing were ordered.
cdef bint _release_in_order = True


def release_in_order(bint in_order):
    """Switch the order of releases off and on (for tests, which show what goes wrong without it)."""
    global _release_in_order
    _release_in_order = in_order


cdef void _gate_holding(Holding* holding) noexcept nogil:
    """A result that torch dropped, on any thread: remembered with the stream current there."""
    cdef Ordering* ordering = <Ordering*>holding.account.gate_state
    if not _release_in_order:
        finish_holding(holding)
        return
    if is_closing():
        return  # leaked: the process, and with it the device's memory, ends
    holding.stream = NULL
    _driver.torch_stream(ordering.torch_index, &holding.stream)
    if im_stack_push(&ordering.dropped, &holding.node):
        request_drain()


cdef void _settle(Account* account) noexcept:
    """Give dropped results their events, and let go of everything whose events have happened."""
    cdef Ordering* ordering = <Ordering*>account.gate_state
    cdef im_node_t* node = im_stack_take_all(&ordering.dropped)
    cdef bint entered
    if node == NULL and ordering.oldest == NULL:
        return
    entered = _enter_context(ordering)
    while node != NULL:
        node = _await_droppers(ordering, node)
    while ordering.oldest != NULL:
        if not _has_happened(ordering, ordering.oldest):
            if ordering.waits <= MOST_WAITS:
                break
            while ordering.oldest.event_count:
                _driver.event_synchronize(ordering.oldest.events[ordering.oldest.event_count - 1])
                ordering.oldest.event_count -= 1
                _give_event(ordering, ordering.oldest.events[ordering.oldest.event_count])
        _finish(_take_oldest(ordering))
    _leave_context(entered)


cdef im_node_t* _await_droppers(Ordering* ordering, im_node_t* node) noexcept:
    """One wait for all holdings dropped on the stream of the first one; returns the others.

    The event comes later than the drop, which only makes the order stricter.
    """
    cdef void* stream = (<Holding*>node).stream
    cdef im_node_t* others = NULL
    cdef im_node_t* following
    cdef Wait* wait = _new_wait()
    cdef int index
    cdef bint awaited, shared = False
    if wait == NULL:
        return NULL  # leaked
    while node != NULL:
        following = node.next
        if (<Holding*>node).stream == stream:
            shared = shared or (<Holding*>node).shared
            node.next = wait.holdings
            wait.holdings = node
        else:
            node.next = others
            others = node
        node = following
    awaited = _await_stream(ordering, wait, stream)
    if shared and stream != NULL:
        # Only the last part of it to go is seen here: others may have been used, and dropped, on the default stream.
        awaited = awaited and _await_stream(ordering, wait, NULL)
    for index in range(ordering.extras):
        awaited = awaited and _await_stream(ordering, wait, ordering.extra_streams[index])
    if not awaited:
        # A stream that is gone, or a driver that refuses: everything on the device is waited for.
        _driver.synchronize_context()
    _append(ordering, wait)
    return others


def record_stream(NativeDevice device, size_t stream):
    """From now on, dropped results of this device also wait for `stream` (a native handle)."""
    cdef Ordering* ordering = <Ordering*>device.account.gate_state
    cdef int index
    if ordering == NULL:
        return
    for index in range(ordering.extras):
        if ordering.extra_streams[index] == <void*>stream:
            return
    if ordering.extras == MOST_EXTRAS:
        raise RuntimeError(f"more than {MOST_EXTRAS} streams were recorded on {device.torch_device}")
    ordering.extra_streams[ordering.extras] = <void*>stream
    ordering.extras += 1


def order(NativeDevice device):
    """Python face of `order_after_torch`; does nothing on a host device."""
    if device.order != NULL:
        device.order(device)


def waiting(NativeDevice device):
    """How many groups of releases still wait for the device."""
    cdef Ordering* ordering = <Ordering*>device.account.gate_state
    return 0 if ordering == NULL else ordering.waits


def describe():
    """What was proven on each CUDA device, for `doctor`."""
    return {str(device): dict(findings) for device, findings in _proofs.items()}


# ---- proving a device -------------------------------------------------------------------------------


cdef bytes _read_memory(size_t address, size_t nbytes):
    """Read this process's memory through the kernel: a wild address raises OSError instead of crashing."""
    memory = os.open("/proc/self/mem", os.O_RDONLY)
    try:
        return os.pread(memory, nbytes, address)
    finally:
        os.close(memory)


def attach(NativeDevice device):
    """Prove what is known of IREE's CUDA driver on this device, and install the gates; called once per device."""
    cdef Ordering* ordering
    findings = _proofs.setdefault(device.torch_device, {})
    device.order = order_after_torch
    torch.cuda.init()
    try:
        _load_driver()
        ordering = _new_ordering(device)
    except LookupError as missing:
        findings["stream"] = f"host synchronizes: {missing}"
        _log.info("%s: IREE's stream is not used: %s", device.torch_device, missing)
        return
    install_gates(device.account, _gate_owners, _gate_holding, _settle, ordering)
    device.enter_context = enter_context
    device.leave_context = leave_context
    findings["stream"] = _prove_stream(device, ordering) or "proven: events order it"
    findings["buffers"] = _prove_buffers(device) or "proven: stream-ordered results are adopted in place"


cdef Ordering* _new_ordering(NativeDevice device) except NULL:
    cdef Ordering* ordering = <Ordering*>calloc(1, sizeof(Ordering))
    cdef int ordinal = 0
    cdef bint entered
    if ordering == NULL:
        raise MemoryError
    ordering.torch_index = device.torch_index
    # torch and the driver number the visible devices alike.
    _check(_driver.device_get(&ordinal, device.torch_index), "cuDeviceGet")
    _check(_driver.retain_primary_context(&ordering.context, ordinal), "cuDevicePrimaryCtxRetain")
    entered = _enter_context(ordering)
    result = _driver.event_create(&ordering.order_event, IM_CU_EVENT_DISABLE_TIMING)
    _leave_context(entered)
    _check(result, "cuEventCreate")
    return ordering


cdef object _prove_stream(NativeDevice device, Ordering* ordering):
    """Find IREE's stream in the device struct and show that it orders a copy; returns what is wrong, or None."""
    cdef im_hal_cuda_device_t* native = <im_hal_cuda_device_t*>device.device
    cdef void* context = NULL
    cdef int ordinal = 0
    # Read through a channel that cannot crash the process, then follow.
    try:
        words = _read_memory(<size_t>native, sizeof(im_hal_cuda_device_t))
        stream = int.from_bytes(words[len(words) - 8:], "little")
        _read_memory(stream, 8)
    except OSError:
        return "host synchronizes: the device struct could not be read"
    _check(_driver.device_get(&ordinal, device.torch_index), "cuDeviceGet")
    if native.cu_context != ordering.context or native.cu_device != ordinal:
        return "host synchronizes: the device struct of this runtime has another layout"
    if _driver.stream_context(native.dispatch_stream, &context) != IM_CU_SUCCESS or context != ordering.context:
        return "host synchronizes: the device struct holds no stream of this context"
    ordering.iree_stream = native.dispatch_stream
    source = torch.zeros(1 << 16, device=device.torch_device)
    target = torch.zeros(1 << 16, device=device.torch_device)
    try:
        variants = _importing.to_variant_list(
            [source, target], device.hal_device, device.torch_device, False, True, False
        )
        torch.cuda.synchronize(device.torch_device)
        torch.cuda._sleep(20_000_000)  # cycles: some 10 ms, long enough for an unordered copy to be early
        source.fill_(7)
        order_after_torch(device)
        _copy(device, variants, 0, 1)
        torch.cuda.synchronize(device.torch_device)
        if not bool((target == 7).all()):
            raise RuntimeError("a copy was not ordered")
    except RuntimeError as error:
        ordering.iree_stream = NULL
        return f"host synchronizes: {error}"
    return None


cdef int _copy(NativeDevice device, object variants, int source, int target) except -1:
    """Copy one buffer to another on IREE's stream and wait for it."""
    done = device.hal_device.create_semaphore(0)
    device.hal_device.queue_copy(
        variants.get_as_object(source, HalBufferView).get_buffer(),
        variants.get_as_object(target, HalBufferView).get_buffer(),
        [],
        [(done, 1)],
    )
    done.wait(1)
    return 0


cdef object _prove_buffers(NativeDevice device):
    """Read the pointer of an imported buffer and of a stream-ordered one; returns what is wrong, or None."""
    cdef im_hal_cuda_buffer_t* known
    cdef im_hal_cuda_buffer_t* ordered
    pattern = torch.arange(64, dtype=torch.float32, device=device.torch_device)
    variants = _importing.to_variant_list([pattern], device.hal_device, device.torch_device, False, True, False)
    known = <im_hal_cuda_buffer_t*>borrow_buffer_view(variants.get_as_object(0, HalBufferView)).buffer.allocated_buffer
    if not _is_readable(known):
        return "results are copied: a buffer could not be read"
    if known.type != IM_HAL_CUDA_BUFFER_EXTERNAL or known.device_pointer != <size_t>pattern.data_ptr():
        return "results are copied: the buffer struct of this runtime has another layout"
    done = device.hal_device.create_semaphore(0)
    made = device.hal_device.queue_alloca(pattern.nbytes, [], [(done, 1)])
    done.wait(1)
    ordered = <im_hal_cuda_buffer_t*>borrow_buffer(made).allocated_buffer
    if not _is_readable(ordered) or ordered.base.resource.vtable != known.base.resource.vtable:
        return "results are copied: a stream-ordered buffer is of an unknown kind"
    if ordered.type == IM_HAL_CUDA_BUFFER_ASYNC:
        done = device.hal_device.create_semaphore(0)
        device.hal_device.queue_copy(variants.get_as_object(0, HalBufferView).get_buffer(), made, [], [(done, 1)])
        done.wait(1)
        copied = torch.empty_like(pattern)
        torch.cuda.synchronize(device.torch_device)
        if _driver.copy(<size_t>copied.data_ptr(), ordered.device_pointer, pattern.nbytes) != IM_CU_SUCCESS:
            return "results are copied: the pointer of a stream-ordered buffer is no device memory"
        torch.cuda.synchronize(device.torch_device)
        if not torch.equal(copied, pattern):
            return "results are copied: the pointer of a stream-ordered buffer leads elsewhere"
    (<Ordering*>device.account.gate_state).buffer_vtable = known.base.resource.vtable
    device.locate = locate_cuda
    return None


cdef bint _is_readable(im_hal_cuda_buffer_t* buffer):
    try:
        _read_memory(<size_t>buffer, sizeof(im_hal_cuda_buffer_t))
    except OSError:
        return False
    return True


cdef int locate_cuda(NativeDevice device, im_hal_buffer_t* allocation, char** base) except -1:
    """Base address of an allocation of IREE's CUDA driver; 1 when only a copy can hand it out."""
    cdef im_hal_cuda_buffer_t* buffer = <im_hal_cuda_buffer_t*>allocation
    if allocation.resource.vtable == (<Ordering*>device.account.gate_state).buffer_vtable:
        if buffer.type == IM_HAL_CUDA_BUFFER_ASYNC:
            # export_buffer refuses stream-ordered allocations, although they stay valid
            # for as long as the buffer is held.
            base[0] = <char*>buffer.device_pointer
            return 0
    return locate_exported(device, allocation, base)
