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
from libc.stdint cimport int64_t

from iree_marshal._lifetime cimport Account, Batch, begin_batch, count_exports, count_imports, end_batch, enter
from iree_marshal._objects cimport NativeDevice, borrow_list, native_device
from iree_marshal._slots cimport (
    SLOT_FLOAT,
    SLOT_INTEGER,
    SLOT_TENSOR,
    VIEW_BYTES,
    Binding,
    Known,
    NativeFrame,
    Slot,
    fits,
    import_view,
    is_known,
    learn,
    move_variant,
    put_float,
    put_integer,
)
from iree_marshal._spares cimport drop_spares
from iree_marshal._storage cimport ResultStorage
from iree_marshal._tensors cimport (
    READ_CLEAN,
    TensorView,
    grad_mode_enabled,
    is_plain_tensor,
    is_unchanged,
    lies_at,
    prefetch,
    read_admitted,
    read_clean,
    require_reader,
)
from iree_marshal.abi.iree cimport im_vm_variant_t

from iree_marshal import arguments, values as admission
from iree_marshal._importing import to_variant_list
from iree_marshal.calling import Timing

cdef extern from "Python.h":
    # Without the reference that Cython's own declarations would add.
    PyObject* borrow_tuple_item "PyTuple_GET_ITEM"(object sequence, Py_ssize_t index)

cdef enum:
    MOST_SPARE_FRAMES = 8
    AHEAD = 4  # how many arguments ahead of the one that is looked at


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
    cdef bint has_fences
    cdef readonly object last_timing
    cdef public bint timing
    cdef ResultStorage storage
    cdef Binding binding
    cdef dict bound_values       # position -> what to_variant_list takes for it
    cdef NativeFrame warm        # the frame of the last call, with what is known of it
    cdef list spare              # frames that know nothing

    def __init__(self, program, layout):
        require_reader()
        self.program = program
        self.signature = program.signature
        self.invoke = program.invoke
        self.function = program.function
        self.torch_device = program.torch_device
        self.device = native_device(program.hal_device)
        self.copy = program.copy
        self.upload = program.upload
        self.has_fences = program.fences
        self.storage = ResultStorage(program, layout)
        self.bound_values = {}
        self.spare = []
        self._rebind({})

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
        # Last: what the frame held may just have become spare.
        drop_spares()

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
            if place + AHEAD < binding.input_count:
                last = frame.known[binding.inputs[place + AHEAD]].tensor
                if last != NULL:
                    prefetch(last)
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
            put_float(variant, real, slot.single)
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
                    import_view(self.device, frame, batch, item, &view, position)
                    learn(&frame.known[position], item, &view, frame.known[position].buffer)
                else:
                    self._import_other(frame, batch, <object>item, position)
        finally:
            end_batch(batch)
        return 1

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
            import_view(self.device, frame, batch, <PyObject*>payload, &view, position)
            learn(known, NULL, &view, known.buffer)
        elif kind == admission.INT:
            put_integer(variant, payload)
        elif kind == admission.FLOAT:
            put_float(variant, payload, frame.binding.slots[position].single)
        else:
            held = to_variant_list([payload], self.program.hal_device, self.torch_device, self.copy, False, self.upload)
            move_variant(variant, &borrow_list(held).storage[0])
        return 0

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
            self.storage.provide(frame, out, changed, grad_mode)
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
        cdef bint entered
        begun = time.perf_counter_ns() if self.timing else 0
        # Another GPU may be the current one of this thread, or none.
        entered = self.device.enter_context != NULL and self.device.enter_context(self.device)
        try:
            self.invoke(self.function, frame.arguments, frame.results)
        finally:
            if entered:
                self.device.leave_context()
        if self.timing:
            frame.times[2] = time.perf_counter_ns() - begun

    def collect(self, NativeFrame frame):
        """Hand out the results; the frame must not be used any more."""
        begun = time.perf_counter_ns() if self.timing else 0
        results = self.storage.hand_out(frame)
        if frame.transient:
            frame.forget(True)
        if self.timing:
            frame.times[3] = time.perf_counter_ns() - begun
            self.last_timing = Timing(*frame.times)
        # Last: what is raised before it makes the caller abandon the frame, which must be in one place only.
        self._give_back(frame)
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
    cdef int64_t imports, import_bytes, exports, export_bytes
    enter()
    cdef Account* account = native_device(hal_device).account
    count_imports(account, &imports, &import_bytes)
    count_exports(account, &exports, &export_bytes)
    return {
        "imports": imports,
        "import_bytes": import_bytes,
        "exports": exports,
        "export_bytes": export_bytes,
    }
