# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""One invocation with nothing per tensor in Python.

The engine keeps argument lists between calls. An argument that lies where the last
call's lay in that position, with the same dtype and shape, is left as it is; only what
changed is checked, imported and written. Everything doubtful goes through
`iree_marshal.arguments` and `iree_marshal.slab`, which also word all refusals.
"""
import time

import torch

from cpython.object cimport PyObject
from libc.stdint cimport int64_t, uintptr_t
from libc.stdlib cimport free, malloc, qsort

from iree_marshal._importing cimport import_memory, make_view
from iree_marshal._lifetime cimport Account, Batch, begin_batch, count_imports, end_batch, enter
from iree_marshal._objects cimport NativeDevice, borrow_list, native_device, ref_types
from iree_marshal._slots cimport (
    SLOT_BUFFER,
    SLOT_FLOAT,
    SLOT_INTEGER,
    SLOT_TENSOR,
    SLOT_VIEW,
    Binding,
    Known,
    NativeFrame,
    Slot,
    fits,
    is_known,
    learn,
    move_variant,
    put_float,
    put_integer,
    put_reference,
)
from iree_marshal._tensors cimport (
    READ_CLEAN,
    TensorView,
    grad_mode_enabled,
    is_plain_tensor,
    is_unchanged,
    lies_at,
    read_admitted,
    read_clean,
    require_reader,
)
from iree_marshal._views cimport part_of, require_views
from iree_marshal.abi.interpreter cimport im_atomic_get
from iree_marshal.abi.iree cimport (
    im_hal_buffer_t,
    im_hal_buffer_view_t,
    im_vm_variant_t,
)

from iree_marshal import arguments, element_types, slab, values as admission
from iree_marshal._exporting import from_variant_list
from iree_marshal._importing import to_variant_list
from iree_marshal.calling import Timing, as_returned

cdef extern from "Python.h":
    # Without the reference that Cython's own declarations would add.
    PyObject* borrow_tuple_item "PyTuple_GET_ITEM"(object sequence, Py_ssize_t index)

cdef enum:
    VIEW_BYTES = 80       # of a buffer view up to rank 3
    MOST_SPARE_FRAMES = 8

cdef struct Extent:
    char* start
    char* end


cdef int _by_start(const void* left, const void* right) noexcept nogil:
    cdef char* a = (<Extent*>left).start
    cdef char* b = (<Extent*>right).start
    return (a > b) - (a < b)


# Where one result lies in the slab.
cdef struct Piece:
    Py_ssize_t position   # of its storage argument
    Py_ssize_t typed      # index of the slab's alias of this dtype
    int64_t offset        # in bytes
    int64_t item_size
    TensorView view       # sizes point into the engine's own memory; data and device are filled in per call
    int64_t* strides


cdef class NativeEngine:
    """Calls a program; the native counterpart of `iree_marshal.calling.PortableEngine`.

    Safe to call from many threads: a call takes a frame out of the pool and nobody else
    touches that frame meanwhile.
    """

    cdef object program
    cdef object signature
    cdef object invoke
    cdef object function
    cdef object torch_device
    cdef NativeDevice device
    cdef object copy
    cdef bint upload
    cdef bint reuse_outputs
    cdef bint has_fences
    cdef readonly object last_timing
    cdef public bint timing
    cdef object layout
    cdef Binding binding
    cdef dict bound_values       # position -> what to_variant_list takes for it
    cdef NativeFrame warm        # the frame of the last call, with what is known of it
    cdef list spare              # frames that know nothing
    cdef Piece* pieces
    cdef int64_t* piece_dims
    cdef Py_ssize_t piece_count
    cdef tuple piece_dtypes
    cdef Py_ssize_t result_count  # that the signature declares; -1 without one
    cdef tuple result_places     # result -> index among the storage arguments, or None where IREE allocates
    cdef bint all_stored         # every result has a storage argument
    cdef list static_outputs

    def __init__(self, program, layout):
        require_reader()
        require_views()
        self.program = program
        self.signature = program.signature
        self.invoke = program.invoke
        self.function = program.function
        self.torch_device = program.torch_device
        self.device = native_device(program.hal_device)
        self.copy = program.copy
        self.upload = program.upload
        self.reuse_outputs = program.reuse_outputs
        self.has_fences = program.fences
        self.layout = layout
        self.bound_values = {}
        self.spare = []
        self.result_count = -1
        if self.signature is not None:
            self.result_count = len(self.signature.results)
            order = sorted(self.signature.storage)
            self.result_places = tuple([
                order.index(result) if result in self.signature.storage else None
                for result in range(self.result_count)
            ])
            self.all_stored = self.result_count > 0 and len(order) == self.result_count
            self._lay_out()
        self._rebind({})

    def __dealloc__(self):
        free(self.pieces)
        free(self.piece_dims)

    cdef int _lay_out(self) except -1:
        """Take the layout of the slab over into C."""
        cdef Py_ssize_t ranks = 0, count = 0
        cdef int64_t* dims
        cdef int64_t stride
        cdef Piece* piece
        if self.layout is None or self.layout.missing or not self.layout.slices:
            return 0
        for part in self.layout.slices.values():
            ranks += len(part.shape)
        self.pieces = <Piece*>malloc(len(self.layout.slices) * sizeof(Piece))
        self.piece_dims = <int64_t*>malloc((2 * ranks + 1) * sizeof(int64_t))
        if self.pieces == NULL or self.piece_dims == NULL:
            raise MemoryError
        dims = self.piece_dims
        dtypes = []
        for result in sorted(self.layout.slices):
            part = self.layout.slices[result]
            if part.dtype not in dtypes:
                dtypes.append(part.dtype)
            piece = &self.pieces[count]
            piece.position = self.signature.storage[result]
            piece.typed = dtypes.index(part.dtype)
            piece.offset = part.offset
            piece.item_size = part.dtype.itemsize
            piece.view.rank = len(part.shape)
            piece.view.nbytes = part.nbytes
            piece.view.element_type = element_types.HAL_OF[part.dtype]
            piece.view.sizes = dims
            piece.strides = dims + piece.view.rank
            stride = 1
            for dim in reversed(range(len(part.shape))):
                piece.view.sizes[dim] = part.shape[dim]
                piece.strides[dim] = stride
                stride *= max(part.shape[dim], 1)
            dims += 2 * piece.view.rank
            count += 1
        self.piece_count = count
        self.piece_dtypes = tuple(dtypes)
        return 0

    # ---- fixed arguments ----

    def bind(self, fixed):
        """Fix arguments for all calls to come; all of them or, on failure, none."""
        cdef dict checked = {}
        enter()
        for index, value in fixed.items():
            kind, payload = arguments.settle(
                index, self.program.argument(index), value, self.torch_device, self.copy, self.upload
            )
            # An alias: what the caller does to its own tensor object later leaves the memory alone.
            checked[index] = payload.detach() if kind == admission.TENSOR else payload
        self._rebind({**self.bound_values, **checked})

    def unbind(self, indices):
        """Take arguments again from the caller."""
        self._rebind({index: value for index, value in self.bound_values.items() if index not in indices})

    def bound(self):
        """The fixed arguments: the tensor, or `None` for what is no tensor."""
        return {
            index: value if isinstance(value, torch.Tensor) else None for index, value in self.bound_values.items()
        }

    cdef int _rebind(self, dict values) except -1:
        self.binding = self._new_binding(values, -1)
        self.bound_values = values
        return 0

    cdef Binding _new_binding(self, dict values, Py_ssize_t count):
        """What a call takes once `values` are fixed; `count` is the number of positions where no signature says it."""
        if self.signature is not None:
            expected = list(self.signature.arguments)
            storage = dict(self.signature.storage)
        else:
            expected = [None] * max(count, max(values, default=-1) + 1)
            storage = {}
        bound = to_variant_list(
            list(values.values()), self.program.hal_device, self.torch_device, None, False, False
        )
        tensors = {index: value for index, value in values.items() if isinstance(value, torch.Tensor)}
        return Binding(expected, storage, bound, tuple(values), tensors)

    # ---- frames ----

    cdef NativeFrame _take(self, Py_ssize_t passed):
        cdef NativeFrame frame = self.warm
        cdef Binding binding = self.binding
        self.warm = None
        if passed != binding.input_count and self.signature is None:
            # The call says how many arguments there are.
            binding = self._new_binding(self.bound_values, passed + len(self.bound_values))
        if passed != binding.input_count:
            self.warm = frame
            raise arguments.count_error(
                self.signature, [binding.inputs[place] for place in range(binding.input_count)],
                len(self.bound_values), passed,
            )
        self.binding = binding
        if frame is None:
            frame = self.spare.pop() if self.spare else NativeFrame.__new__(NativeFrame)
        if frame.binding is not binding:
            frame.adopt(binding, 2 if self.has_fences else 0)
        return frame

    cdef int _give_back(self, NativeFrame frame) except -1:
        """Keep what this call knows for the next one, and let go of what the call before knew."""
        cdef NativeFrame older = self.warm
        self.warm = frame
        if older is not None:
            older.forget(False)
            if len(self.spare) < MOST_SPARE_FRAMES:
                self.spare.append(older)
        return 0

    def abandon(self, NativeFrame frame):
        """Take back the frame of a call that failed: nothing of that call stays."""
        frame.drop_results()
        frame.forget(False)
        if len(self.spare) < MOST_SPARE_FRAMES:
            self.spare.append(frame)

    def trim(self):
        """Drop what is kept for the next call."""
        cdef NativeFrame warm = self.warm
        self.warm = None
        self.spare = []
        if warm is not None:
            warm.forget(False)

    # ---- arguments ----

    cdef int _fill(self, NativeFrame frame, tuple args, bint grad_mode) except -1:
        """Put the call's arguments into their positions; returns whether any memory changed."""
        cdef Binding binding = frame.binding
        cdef im_vm_variant_t* variants = frame.native_arguments.storage
        cdef Py_ssize_t place, position, missed = 0
        cdef Slot* slot
        cdef Known* known
        cdef PyObject* item
        cdef PyObject* last
        cdef bint fast = self.copy is not True
        for place in range(binding.input_count):
            position = binding.inputs[place]
            slot = &binding.slots[position]
            item = borrow_tuple_item(args, place)
            if slot.kind <= SLOT_TENSOR:
                known = &frame.known[position]
                last = known.tensor
                if last != NULL and self._is_same(known, last, item, grad_mode):
                    continue
            elif self._put_number(slot, &variants[position], <object>item):
                continue
            frame.missed[missed] = place
            missed += 1
        if missed == 0:
            return 0
        return self._import_missed(frame, args, grad_mode, missed, fast)

    cdef bint _is_same(self, const Known* known, PyObject* last, PyObject* item, bint grad_mode) noexcept nogil:
        """Whether the argument lies where the last one of this position lies, with its dtype and shape."""
        cdef TensorView view
        if item == last:
            return is_unchanged(item, grad_mode, known.data, known.element_type, known.rank, known.dims)
        # Another tensor on the same memory, which stays as long as the known one has not let go of it.
        return (
            is_plain_tensor(item)
            and lies_at(item, known.data)
            and read_clean(item, grad_mode, &view) == READ_CLEAN
            and is_known(known, &view)
            and view.device_type == self.device.torch_type
            and view.device_index == self.device.torch_index
            and is_unchanged(last, False, known.data, known.element_type, known.rank, known.dims)
        )

    cdef bint _put_number(self, const Slot* slot, im_vm_variant_t* variant, object value):
        """Write a number that is clearly right; whether it was."""
        cdef int64_t integer
        cdef double real
        if slot.kind == SLOT_INTEGER and type(value) is int:
            if not slot.low <= value <= slot.high:
                return False
            integer = value
            put_integer(variant, integer)
            return True
        if slot.kind == SLOT_FLOAT and type(value) is float:
            real = value
            if real - real == 0 and not -slot.largest <= real <= slot.largest:
                return False
            put_float(variant, real)
            return True
        return False

    cdef int _import_missed(
        self, NativeFrame frame, tuple args, bint grad_mode, Py_ssize_t missed, bint fast
    ) except -1:
        cdef Binding binding = frame.binding
        cdef Py_ssize_t index, position
        cdef PyObject* item
        cdef TensorView view
        cdef Slot* slot
        cdef Batch* batch = begin_batch(self.device.account, missed, missed * VIEW_BYTES)
        try:
            for index in range(missed):
                position = binding.inputs[frame.missed[index]]
                slot = &binding.slots[position]
                item = borrow_tuple_item(args, frame.missed[index])
                if (
                    fast
                    and slot.kind <= SLOT_TENSOR
                    and is_plain_tensor(item)
                    and read_clean(item, grad_mode, &view) == READ_CLEAN
                    and view.device_type == self.device.torch_type
                    and view.device_index == self.device.torch_index
                    and fits(slot, &view)
                ):
                    self._import_view(frame, batch, item, &view, position)
                    learn(&frame.known[position], item, &view, frame.known[position].buffer)
                else:
                    self._import_other(frame, batch, <object>item, position)
        finally:
            end_batch(batch)
        return 1

    cdef int _import_view(
        self, NativeFrame frame, Batch* batch, PyObject* tensor, const TensorView* view, Py_ssize_t position
    ) except -1:
        """Put a buffer view on the tensor's memory into a position."""
        cdef im_hal_buffer_t* buffer = import_memory(self.device, batch, tensor, view, (), position)
        cdef im_hal_buffer_view_t* made = make_view(batch, buffer, view, &frame.native_arguments.host_allocator)
        # First: what was there before may run Python code when it goes.
        frame.known[position].tensor = NULL
        frame.known[position].buffer = buffer
        put_reference(&frame.native_arguments.storage[position], ref_types.buffer_view, made)
        return 0

    cdef int _import_other(self, NativeFrame frame, Batch* batch, object value, Py_ssize_t position) except -1:
        """Whatever is not plainly right: Python decides what it becomes."""
        cdef TensorView view
        cdef im_vm_variant_t* variant = &frame.native_arguments.storage[position]
        cdef Known* known = &frame.known[position]
        kind, payload = arguments.settle(
            position, self.program.argument(position), value, self.torch_device, self.copy, self.upload
        )
        known.tensor = NULL
        known.nbytes = 0
        if kind == admission.TENSOR:
            read_admitted(payload, &view)
            self._import_view(frame, batch, <PyObject*>payload, &view, position)
            learn(known, NULL, &view, known.buffer)
        elif kind == admission.INT:
            put_integer(variant, payload)
        elif kind == admission.FLOAT:
            put_float(variant, payload)
        else:
            held = to_variant_list([payload], self.program.hal_device, self.torch_device, self.copy, False, self.upload)
            move_variant(variant, &borrow_list(held).storage[0])
        return 0

    # ---- storage for results ----

    cdef int _provide(self, NativeFrame frame, object out, bint changed, bint grad_mode) except -1:
        """Fill the storage positions: from the caller's tensors, the static slab, or a new one."""
        if out is not None:
            given = slab.out_tensors(self.signature, out)
            for result in range(self.result_count):
                if given[result] is None:
                    return self._provide_mixed(frame, given, grad_mode)
            return self._provide_given(frame, given, changed, grad_mode)
        if frame.binding.storage_count == 0:
            return 0
        if not self.reuse_outputs:
            frame.outputs = self._provide_slab(frame)
            return 0
        if self.static_outputs is None:
            self.static_outputs = list(self._allocate())
        if frame.kept_outputs is not self.static_outputs:
            frame.forget(True)
            self._provide_tensors(frame, self.static_outputs)
            frame.kept_outputs = self.static_outputs
            changed = True
        frame.outputs = self.static_outputs
        if changed:
            self._check_overlaps(frame)
        return 0

    cdef list _allocate(self):
        """A new slab, as tensors in the order of their results."""
        tensors = self.layout.allocate()
        return [tensors[result] for result in sorted(tensors)]

    cdef list _provide_slab(self, NativeFrame frame):
        """One allocation, imported piece by piece; returns the tensors on it."""
        cdef Piece* piece
        cdef Py_ssize_t index
        cdef char* start
        cdef TensorView whole
        cdef TensorView view
        cdef list outputs = []
        cdef list typed = []
        cdef Batch* batch
        cdef object base
        cdef int64_t skip
        if self.piece_count == 0:
            raise ValueError(f"{self.layout.missing}; pass out=[...] with tensors to write into")
        base = torch.empty(self.layout.nbytes + slab.SLICE_ALIGNMENT, dtype=torch.uint8, device=self.torch_device)
        read_admitted(base, &whole)
        skip = <int64_t>(-<uintptr_t>whole.data % <uintptr_t>256)
        start = <char*>whole.data + skip
        for dtype in self.piece_dtypes:
            typed.append(base if dtype is torch.uint8 else base.view(dtype))
        frame.transient = True
        frame.kept_outputs = None
        batch = begin_batch(self.device.account, self.piece_count, self.piece_count * VIEW_BYTES)
        try:
            for index in range(self.piece_count):
                piece = &self.pieces[index]
                view = piece.view
                view.data = start + piece.offset
                self._import_storage(frame, batch, <PyObject*>base, &view, piece.position)
                outputs.append(part_of(
                    typed[piece.typed], view.rank, view.sizes, piece.strides, (skip + piece.offset) // piece.item_size
                ))
        finally:
            end_batch(batch)
        return outputs

    cdef int _import_storage(
        self, NativeFrame frame, Batch* batch, PyObject* tensor, const TensorView* view, Py_ssize_t position
    ) except -1:
        cdef im_hal_buffer_t* buffer
        if frame.binding.slots[position].kind == SLOT_BUFFER:
            buffer = import_memory(self.device, batch, tensor, view, (), position)
            frame.known[position].tensor = NULL
            put_reference(&frame.native_arguments.storage[position], ref_types.buffer, buffer)
        else:
            self._import_view(frame, batch, tensor, view, position)
            buffer = frame.known[position].buffer
        learn(&frame.known[position], tensor, view, buffer)
        return 0

    cdef int _provide_tensors(self, NativeFrame frame, object tensors) except -1:
        """Import one tensor per storage argument; they are known to be right."""
        cdef Py_ssize_t index
        cdef TensorView view
        cdef Batch* batch = begin_batch(
            self.device.account, frame.binding.storage_count, frame.binding.storage_count * VIEW_BYTES
        )
        try:
            for index in range(frame.binding.storage_count):
                tensor = tensors[index]
                read_admitted(tensor, &view)
                self._import_storage(frame, batch, <PyObject*>tensor, &view, frame.binding.storage[index])
        finally:
            end_batch(batch)
        return 0

    cdef int _provide_given(self, NativeFrame frame, object given, bint changed, bint grad_mode) except -1:
        """The caller's own tensors, one for each storage argument."""
        cdef Py_ssize_t index, position
        cdef Binding binding = frame.binding
        cdef Known* known
        cdef PyObject* item
        cdef list outputs = list(given) if self.all_stored else [
            given[result] for result in sorted(self.signature.storage)
        ]
        cdef list missed = []
        frame.kept_outputs = None
        for index in range(binding.storage_count):
            position = binding.storage[index]
            known = &frame.known[position]
            item = <PyObject*>outputs[index]
            if item == known.tensor and is_unchanged(
                item, grad_mode, known.data, known.element_type, known.rank, known.dims
            ):
                continue
            missed.append(index)
        frame.outputs = outputs
        if missed:
            self._take_over(frame, outputs, missed)
        if missed or changed:
            self._check_overlaps(frame)
        return 0

    cdef int _take_over(self, NativeFrame frame, list outputs, list missed) except -1:
        """Check and import those of the caller's tensors that are new."""
        cdef TensorView view
        cdef Py_ssize_t position
        cdef Batch* batch
        for index in missed:
            position = frame.binding.storage[<Py_ssize_t>index]
            slab.check_out(
                self.signature, frame.binding.slots[position].result, outputs[index], self.torch_device
            )
        batch = begin_batch(self.device.account, len(missed), len(missed) * VIEW_BYTES)
        try:
            for index in missed:
                tensor = outputs[index]
                read_admitted(tensor, &view)
                self._import_storage(frame, batch, <PyObject*>tensor, &view, frame.binding.storage[<Py_ssize_t>index])
        finally:
            end_batch(batch)
        return 0

    cdef int _provide_mixed(self, NativeFrame frame, object given, bint grad_mode) except -1:
        """The caller's tensors where there are some, a part of a new slab for every other result."""
        cdef list outputs
        order = sorted(self.signature.storage)
        if all([given[result] is None for result in order]):
            return self._provide(frame, None, True, grad_mode)
        outputs = self._allocate()
        for index, result in enumerate(order):
            if given[result] is not None:
                outputs[index] = given[result]
        frame.kept_outputs = None
        frame.transient = True
        frame.outputs = outputs
        self._take_over(frame, outputs, list(range(len(order))))
        self._check_overlaps(frame)
        return 0

    cdef int _check_overlaps(self, NativeFrame frame) except -1:
        """Refuse storage that overlaps an argument or other storage."""
        cdef Binding binding = frame.binding
        cdef Py_ssize_t index, low, high, middle, used = 0
        cdef Known* known
        cdef Extent* extents = <Extent*>malloc((binding.storage_count + 1) * sizeof(Extent))
        cdef bint overlap = False
        if extents == NULL:
            raise MemoryError
        for index in range(binding.storage_count):
            known = &frame.known[binding.storage[index]]
            if known.nbytes:
                extents[used].start = <char*>known.data
                extents[used].end = <char*>known.data + known.nbytes
                used += 1
        qsort(extents, used, sizeof(Extent), _by_start)
        for index in range(1, used):
            overlap = overlap or extents[index].start < extents[index - 1].end
        for index in range(binding.count):
            known = &frame.known[index]
            if known.nbytes == 0 or overlap or binding.slots[index].kind >= SLOT_VIEW:
                continue
            # The last storage that begins before the argument ends.
            low, high = 0, used
            while low < high:
                middle = (low + high) // 2
                if extents[middle].start < <char*>known.data + known.nbytes:
                    low = middle + 1
                else:
                    high = middle
            overlap = low > 0 and extents[low - 1].end > <char*>known.data
        free(extents)
        if overlap:
            self._name_overlap(frame)
        return 0

    cdef int _name_overlap(self, NativeFrame frame) except -1:
        """Say which tensors overlap."""
        cdef Binding binding = frame.binding
        cdef Py_ssize_t index, position
        names = []
        for index, result in enumerate(sorted(self.signature.storage)):
            names.append((f"out[{result}] ({self.signature.results[result].name})", index))
        outs = {name: slab.extent(frame.outputs[index]) for name, index in names}
        inputs = {}
        for position in range(binding.count):
            if frame.known[position].nbytes and binding.slots[position].kind < SLOT_VIEW:
                start = <uintptr_t>frame.known[position].data
                inputs[arguments.place_of(position, self.program.argument(position))] = (
                    start, start + frame.known[position].nbytes
                )
        slab.check_extents(outs, inputs)
        return 0

    # ---- results ----

    cdef object _hand_out(self, NativeFrame frame):
        cdef Py_ssize_t count = <Py_ssize_t>frame.native_results.count
        cdef list outputs = frame.outputs
        cdef list results
        if outputs is None:
            results = from_variant_list(frame.results, self.program.hal_device, False)
            frame.drop_results()
            return as_returned(results)
        if self.all_stored and (count == 0 or self._all_written(frame)):
            results = outputs
        elif count == 0:
            results = [None if place is None else outputs[place] for place in self.result_places]
        else:
            results = from_variant_list(frame.results, self.program.hal_device, False)
            for result, place in enumerate(self.result_places):
                if place is not None:
                    slab.settle_result(self.signature, result, outputs[place], results[result])
                    results[result] = outputs[place]
        frame.drop_results()
        frame.outputs = None
        return as_returned(results)

    cdef bint _all_written(self, NativeFrame frame) noexcept:
        """Whether every result that IREE returned is the storage that it was given for it."""
        cdef Binding binding = frame.binding
        cdef im_vm_variant_t* variant
        cdef im_hal_buffer_view_t* view
        cdef Known* known
        cdef Py_ssize_t index
        cdef size_t dim
        if <Py_ssize_t>frame.native_results.count != binding.storage_count:
            return False
        for index in range(binding.storage_count):
            variant = &frame.native_results.storage[index]
            known = &frame.known[binding.storage[index]]
            if variant.type != ref_types.buffer_view or known.rank < 0:
                return False
            view = <im_hal_buffer_view_t*>variant.value.ref
            if (
                view.buffer.allocated_buffer != known.buffer.allocated_buffer
                or view.buffer.byte_offset != known.buffer.byte_offset
                or <int64_t>view.rank != known.rank
            ):
                return False
            for dim in range(view.rank):
                if view.dims[dim] != known.dims[dim]:
                    return False
        return True

    # ---- a call ----

    def prepare(self, tuple args, out, tuple fences=()):
        """Check and import everything that one call passes."""
        cdef NativeFrame frame
        cdef Py_ssize_t index
        cdef bint grad_mode, changed
        enter()
        begun = time.perf_counter_ns() if self.timing else 0
        frame = self._take(len(args))
        try:
            grad_mode = grad_mode_enabled()
            changed = self._fill(frame, args, grad_mode)
            self._provide(frame, out, changed, grad_mode)
            if fences:
                held = to_variant_list(fences, self.program.hal_device, self.torch_device, None, False, False)
                for index in range(len(fences)):
                    move_variant(
                        &frame.native_arguments.storage[frame.binding.count + index], &borrow_list(held).storage[index]
                    )
            if self.timing:
                frame.times[0] = time.perf_counter_ns() - begun
                begun = time.perf_counter_ns()
            if self.device.order != NULL:
                # After all copies and allocations: they too are in torch's stream.
                self.device.order(self.device)
            if self.timing:
                frame.times[1] = time.perf_counter_ns() - begun
        except BaseException:
            self.abandon(frame)
            raise
        return frame

    def run(self, NativeFrame frame):
        """Invoke."""
        if not self.timing:
            self.invoke(self.function, frame.arguments, frame.results)
            return
        begun = time.perf_counter_ns()
        self.invoke(self.function, frame.arguments, frame.results)
        frame.times[2] = time.perf_counter_ns() - begun

    def collect(self, NativeFrame frame):
        """Hand out the results; the frame must not be used any more."""
        begun = time.perf_counter_ns() if self.timing else 0
        results = self._hand_out(frame)
        if frame.transient:
            frame.forget(True)
        self._give_back(frame)
        if self.timing:
            frame.times[3] = time.perf_counter_ns() - begun
            self.last_timing = Timing(*frame.times)
        return results

    def call(self, tuple args, out):
        """All three steps."""
        frame = self.prepare(args, out)
        try:
            self.run(frame)
            return self.collect(frame)
        except BaseException:
            self.abandon(frame)
            raise


def count_live(hal_device):
    """What crosses the border on one HAL device at this moment: tensors held by IREE, buffers held by torch."""
    cdef int64_t imports = 0, import_bytes = 0
    enter()
    cdef Account* account = native_device(hal_device).account
    count_imports(account, &imports, &import_bytes)
    return {
        "imports": imports,
        "import_bytes": import_bytes,
        "exports": im_atomic_get(&account.live_exports),
        "export_bytes": im_atomic_get(&account.export_bytes),
    }
