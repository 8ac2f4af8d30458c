# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Memory for the results of a call: provided before it, handed out after it.

The native counterpart of `iree_marshal.slab`, which words the refusals.
"""
import torch

from cpython.object cimport PyObject
from libc.stdint cimport int64_t, uintptr_t
from libc.stdlib cimport free, malloc, qsort

from iree_marshal._importing cimport import_memory
from iree_marshal._lifetime cimport Batch, begin_batch, end_batch
from iree_marshal._objects cimport native_device, ref_types
from iree_marshal._slots cimport (
    SLOT_BUFFER,
    SLOT_VIEW,
    VIEW_BYTES,
    Binding,
    Known,
    NativeFrame,
    import_view,
    learn,
    put_reference,
)
from iree_marshal._tensors cimport TensorView, is_unchanged, read_admitted
from iree_marshal._views cimport new_flat, part_of, read_kind, require_views
from iree_marshal.abi.iree cimport im_hal_buffer_t, im_hal_buffer_view_t, im_vm_variant_t

from iree_marshal import arguments, element_types, slab
from iree_marshal._exporting import from_variant_list
from iree_marshal.calling import as_returned


cdef uintptr_t _slice_alignment = slab.SLICE_ALIGNMENT


cdef struct Extent:
    char* start
    char* end


cdef int _by_start(const void* left, const void* right) noexcept nogil:
    cdef char* a = (<Extent*>left).start
    cdef char* b = (<Extent*>right).start
    return (a > b) - (a < b)


cdef class ResultStorage:
    """Provides the storage arguments of one program and hands its results out; see the declaration."""

    def __init__(self, program, layout):
        require_views()
        self.program = program
        self.signature = program.signature
        self.torch_device = program.torch_device
        self.device = native_device(program.hal_device)
        self.reuse_outputs = program.reuse_outputs
        self.layout = layout
        self.order = []
        if self.signature is None:
            return
        self.order = sorted(self.signature.storage)
        self.result_places = tuple([
            self.order.index(result) if result in self.signature.storage else None
            for result in range(len(self.signature.results))
        ])
        self.all_stored = len(self.order) > 0 and len(self.order) == len(self.signature.results)
        self.lay_out()

    def __dealloc__(self):
        free(self.pieces)
        free(self.piece_dims)

    cdef int lay_out(self) except -1:
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
        # Slices start and end at multiples of their alignment, of which every element's size is a divisor.
        self.slab_dtype = dtypes[0] if len(dtypes) == 1 else torch.uint8
        self.slab_length = (self.layout.nbytes + slab.SLICE_ALIGNMENT) // self.slab_dtype.itemsize
        with slab.real_memory():
            known = torch.empty(0, dtype=self.slab_dtype, device=self.torch_device)
        self.slab_is_native = read_kind(known, &self.slab_kind)
        return 0

    # ---- storage for results ----

    cdef int provide(self, NativeFrame frame, object out, bint changed, bint grad_mode) except -1:
        """Fill the storage positions: from the caller's tensors, the static slab, or a new one."""
        if out is not None:
            given = slab.out_tensors(self.signature, out)
            for result in self.order:
                if given[result] is None:
                    return self.provide_mixed(frame, given, grad_mode)
            return self.provide_given(frame, given, changed, grad_mode)
        if frame.binding.storage_count == 0:
            return 0
        if not self.reuse_outputs:
            frame.outputs = self.provide_slab(frame)
            return 0
        if self.static_outputs is None:
            self.static_outputs = self.allocate(True)
            self.static_returned = as_returned(self.static_outputs)
        if frame.kept_outputs is not self.static_outputs:
            frame.forget(True)
            self.provide_tensors(frame, self.static_outputs)
            frame.kept_outputs = self.static_outputs
            changed = True
        frame.outputs = self.static_outputs
        if changed:
            self.check_overlaps(frame)
        return 0

    cdef list allocate(self, bint lasting):
        """A new slab, as tensors in the order of their results."""
        tensors = self.layout.allocate_lasting() if lasting else self.layout.allocate()
        return [tensors[result] for result in sorted(tensors)]

    cdef list provide_slab(self, NativeFrame frame):
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
        base = self.allocate_slab()
        read_admitted(base, &whole)
        skip = <int64_t>(-<uintptr_t>whole.data % _slice_alignment)
        start = <char*>whole.data + skip
        for dtype in self.piece_dtypes:
            typed.append(base if dtype is self.slab_dtype else slab.retyped(base, dtype))
        frame.transient = True
        frame.kept_outputs = None
        batch = begin_batch(self.device.account, self.piece_count, self.piece_count * VIEW_BYTES)
        try:
            for index in range(self.piece_count):
                piece = &self.pieces[index]
                view = piece.view
                view.data = start + piece.offset
                self.import_storage(frame, batch, <PyObject*>base, &view, piece.position)
                outputs.append(part_of(
                    typed[piece.typed], view.rank, view.sizes, piece.strides, (skip + piece.offset) // piece.item_size
                ))
        finally:
            end_batch(batch)
        return outputs

    cdef object allocate_slab(self):
        cdef object base = None
        if self.slab_is_native:
            base = new_flat(&self.slab_kind, self.slab_length)
        if base is None:
            with slab.real_memory():
                base = torch.empty(self.slab_length, dtype=self.slab_dtype, device=self.torch_device)
        return base

    cdef int import_storage(
        self, NativeFrame frame, Batch* batch, PyObject* tensor, const TensorView* view, Py_ssize_t position
    ) except -1:
        cdef im_hal_buffer_t* buffer
        if frame.binding.slots[position].kind == SLOT_BUFFER:
            buffer = import_memory(self.device, batch, tensor, view, (), position)
            frame.known[position].tensor = NULL
            put_reference(&frame.native_arguments.storage[position], ref_types.buffer, buffer)
        else:
            import_view(self.device, frame, batch, tensor, view, position)
            buffer = frame.known[position].buffer
        learn(&frame.known[position], tensor, view, buffer)
        return 0

    cdef int provide_tensors(self, NativeFrame frame, object tensors) except -1:
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
                self.import_storage(frame, batch, <PyObject*>tensor, &view, frame.binding.storage[index])
        finally:
            end_batch(batch)
        return 0

    cdef int provide_given(self, NativeFrame frame, object given, bint changed, bint grad_mode) except -1:
        """The caller's own tensors, one for each storage argument."""
        cdef Py_ssize_t index, position
        cdef Binding binding = frame.binding
        cdef Known* known
        cdef PyObject* item
        cdef list outputs = list(given) if self.all_stored else [
            given[result] for result in self.order
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
            self.take_over(frame, outputs, missed)
        if missed or changed:
            self.check_overlaps(frame)
        return 0

    cdef int take_over(self, NativeFrame frame, list outputs, list missed) except -1:
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
                self.import_storage(frame, batch, <PyObject*>tensor, &view, frame.binding.storage[<Py_ssize_t>index])
        finally:
            end_batch(batch)
        return 0

    cdef int provide_mixed(self, NativeFrame frame, object given, bint grad_mode) except -1:
        """The caller's tensors where there are some, a part of a new slab for every other result."""
        cdef list outputs
        order = self.order
        if all([given[result] is None for result in order]):
            return self.provide(frame, None, True, grad_mode)
        outputs = self.allocate(False)
        for index, result in enumerate(order):
            if given[result] is not None:
                outputs[index] = given[result]
        frame.kept_outputs = None
        frame.transient = True
        frame.outputs = outputs
        self.take_over(frame, outputs, list(range(len(order))))
        self.check_overlaps(frame)
        return 0

    cdef int check_overlaps(self, NativeFrame frame) except -1:
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
            self.name_overlap(frame)
        return 0

    cdef int name_overlap(self, NativeFrame frame) except -1:
        """Say which tensors overlap."""
        cdef Binding binding = frame.binding
        cdef Py_ssize_t index, position
        names = []
        for index, result in enumerate(self.order):
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

    cdef object hand_out(self, NativeFrame frame):
        cdef Py_ssize_t count = <Py_ssize_t>frame.native_results.count
        cdef list outputs = frame.outputs
        cdef list results
        if outputs is None:
            results = from_variant_list(frame.results, self.program.hal_device, False, True)
            frame.drop_results()
            return as_returned(results)
        if self.all_stored and (count == 0 or self.all_written(frame)):
            if outputs is self.static_outputs:
                # One object for all calls: a new tuple would touch every tensor twice.
                frame.drop_results()
                frame.outputs = None
                return self.static_returned
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

    cdef bint all_written(self, NativeFrame frame) noexcept:
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
            if view.buffer != known.buffer and (
                # Another buffer may be on the same memory.
                view.buffer.allocated_buffer != known.buffer.allocated_buffer
                or view.buffer.byte_offset != known.buffer.byte_offset
            ):
                return False
            if <int64_t>view.rank != known.rank:
                return False
            for dim in range(view.rank):
                if view.dims[dim] != known.dims[dim]:
                    return False
        return True
