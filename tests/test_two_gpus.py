# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Two GPUs in one process: the right device, whichever is torch's current one, from one thread and from many.

    python -m pytest tests/test_two_gpus.py tests/test_distributed.py

runs all that needs two; the first tests here need only one.
"""

from __future__ import annotations

import gc
import subprocess
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import executor_modules
import iree.runtime as rt
import modules
import pytest
import torch
from executor_support import executor
from test_cuda import LONG, script, settle
from test_executor_threads import in_threads

import iree_marshal as im
from iree_marshal import _cuda, _objects

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.usefixtures("fast"),
]
TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs: torch.cuda.device_count() >= 2")
CURRENT = pytest.mark.parametrize("current", [0, 1])
GPUS = ("cuda:0", "cuda:1")


@pytest.fixture(autouse=True)
def _current_restored() -> Iterator[None]:
    before = torch.cuda.current_device()
    yield
    torch.cuda.set_device(before)


def on(device: str, program: str = executor_modules.ADD, **options: Any) -> im.Executor:
    return executor(program, *modules.CUDA, device=device, **options)


def numbers(device: str, start: float = 0.0, count: int = 4) -> torch.Tensor:
    return torch.arange(count, dtype=torch.float32, device=device) + start


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


# ---- which GPU is which ----------------------------------------------------------------------

# Each device is told its own UUID, four numbers at a time, and IREE's results say where they are: what torch calls the
# device, what was in them, and what the driver says of their address.
WHO = """
import ctypes
driver = ctypes.CDLL("libcuda.so.1")

def owner(address):
    ordinal, device, raw = ctypes.c_int(-1), ctypes.c_int(-1), (ctypes.c_ubyte * 16)()
    assert driver.cuPointerGetAttribute(ctypes.byref(ordinal), 9, ctypes.c_uint64(address)) == 0
    assert driver.cuDeviceGet(ctypes.byref(device), ordinal) == 0
    assert driver.cuDeviceGetUuid(raw, device) == 0
    return bytes(raw).hex()

found = []
for index in range(torch.cuda.device_count()):
    place = torch.device("cuda", index)
    uuid = bytes.fromhex(str(torch.cuda.get_device_properties(place).uuid).replace("-", ""))
    exe = im.Executor.load(modules.compile_module(modules.ADD, *modules.CUDA), device=place)
    zero = torch.zeros(4, device=place)
    written = bytes()
    for start in range(0, 16, 4):
        y = exe(torch.tensor(list(uuid[start : start + 4]), dtype=torch.float32, device=place), zero)
        assert y.device == place and owner(y.data_ptr()) == uuid.hex(), (y.device, owner(y.data_ptr()), uuid.hex())
        written += bytes(int(value) for value in y.tolist())
    found.append(written.hex())
print(*found)
"""


def seen(visible: str) -> list[str]:
    """The UUIDs that each device wrote into its results, in torch's order, of a process that sees these GPUs."""
    return last_line(script(WHO, CUDA_VISIBLE_DEVICES=visible)).split()


def as_uuid(digits: str) -> str:
    return f"GPU-{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"


def test_visible_devices_by_index_and_by_uuid() -> None:
    (first,) = seen("0")
    assert seen(as_uuid(first)) == [first]


@TWO
def test_visible_devices_in_another_order() -> None:
    first, second = seen("0,1")
    assert first != second
    assert seen("1,0") == [second, first]
    assert seen("1") == [second]
    assert seen(f"{as_uuid(second)},{as_uuid(first)}") == [second, first]


@TWO
@CURRENT
def test_first_use_leaves_the_current_device_and_proves_both(current: int) -> None:
    text = f"""
    torch.cuda.set_device({current})
    for index in ({1 - current}, {current}):
        im.hal_device(torch.device("cuda", index))
        assert torch.cuda.current_device() == {current}
        im.to_variant_list([torch.ones(4, device=torch.device("cuda", index))])
        assert torch.cuda.current_device() == {current}
    assert im.hal_device("cuda") is im.hal_device("cuda:{current}") is not im.hal_device("cuda:{1 - current}")
    from iree_marshal import _cuda
    proofs = _cuda.describe()
    assert set(proofs) == {{"cuda:0", "cuda:1"}}, proofs
    assert all(text.startswith("proven") for findings in proofs.values() for text in findings.values()), proofs
    print("right")
    """
    assert last_line(script(text)) == "right"


@TWO
def test_first_use_from_many_threads_at_once() -> None:
    text = """
    import threading
    program = modules.compile_module(modules.ADD, *modules.CUDA)
    barrier, wrong = threading.Barrier(8), []
    def work(number):
        place = torch.device("cuda", number % 2)
        barrier.wait()
        try:
            exe = im.Executor.load(program, device=place)
            for step in range(50):
                x = torch.full((4,), float(step), device=place)
                y = exe(x, x)
                assert y.device == place and y.tolist() == [2.0 * step] * 4, y
        except BaseException as error:
            wrong.append(repr(error))
    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    print(wrong)
    """
    assert last_line(script(text)) == "[]"


# ---- executors on both -----------------------------------------------------------------------


@TWO
@CURRENT
@pytest.mark.parametrize("path", ["native", "portable"])
def test_executors_from_one_thread(current: int, path: str) -> None:
    torch.cuda.set_device(current)
    made = {gpu: on(gpu, path=path) for gpu in GPUS}
    assert torch.cuda.current_device() == current
    for step in range(20):
        for gpu, exe in made.items():
            x = numbers(gpu, step)
            y = exe(x, x)
            assert y.device == exe.device == torch.device(gpu)
            assert torch.equal(y, x + x)
            assert torch.cuda.current_device() == current
    for gpu, exe in made.items():
        exe.bind({1: numbers(gpu, 5)})
        assert exe(numbers(gpu)).tolist() == [5.0, 7.0, 9.0, 11.0]
        pending = [exe.submit(numbers(gpu, step)) for step in range(8)]
        assert [call.result()[0].item() for call in pending] == [5.0 + step for step in range(8)]
        exe.trim()
        assert torch.cuda.current_device() == current


@TWO
@CURRENT
def test_storage_and_out(current: int) -> None:
    torch.cuda.set_device(current)
    for gpu, other in (GPUS, GPUS[::-1]):
        exe = on(gpu, executor_modules.STORAGE_PAIR)
        x = numbers(gpu, count=16)
        first, second = exe(x)
        assert first.device == second.device == torch.device(gpu)
        assert torch.equal(first, x + x)
        out = [torch.empty(16, device=gpu) for _ in range(2)]
        results = exe(x, out=out)
        assert [one.data_ptr() for one in results] == [one.data_ptr() for one in out]
        assert torch.equal(out[1], second)
        with pytest.raises(ValueError, match=rf"^out\[1\].*: expected a tensor on {gpu}, got one on {other}$"):
            exe(x, out=[out[0], torch.empty(16, device=other)])


@TWO
def test_executors_from_many_threads() -> None:
    made = [on(gpu) for gpu in GPUS]

    def work(number: int) -> None:
        torch.cuda.set_device(number // 4)  # half of the threads call the GPU that is not their current one
        with torch.cuda.stream(torch.cuda.Stream(device=GPUS[number % 2])):
            for step in range(100):
                which = (number + step) % 2
                x = torch.full((4,), float(1000 * number + step), device=GPUS[which])
                y = made[which](x, x)
                assert y.device == torch.device(GPUS[which])
                assert y.tolist() == [2.0 * (1000 * number + step)] * 4

    in_threads(8, work)


@TWO
def test_threads_that_never_used_cuda() -> None:
    """No context is current on such a thread, and torch makes none there for tensors that exist."""
    made = [on(gpu) for gpu in GPUS]
    given = [numbers(gpu, 3) for gpu in GPUS]
    torch.cuda.synchronize(GPUS[0])
    torch.cuda.synchronize(GPUS[1])
    results: dict[int, torch.Tensor] = {}

    def work(number: int) -> None:
        results[number] = made[number % 2](given[number % 2], given[number % 2])

    in_threads(4, work)
    for number, result in results.items():
        assert result.device == torch.device(GPUS[number % 2])
        assert result.tolist() == [6.0, 8.0, 10.0, 12.0]


@TWO
def test_from_one_gpu_to_the_other() -> None:
    first, second = (on(gpu) for gpu in GPUS)
    for step in range(50):
        x = numbers(GPUS[0], step)
        y = first(x, x).to(GPUS[1], non_blocking=True)
        z = second(y, y)
        assert z.tolist() == [4.0 * (step + index) for index in range(4)]


@TWO
@CURRENT
def test_compiled_for_both(current: int, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("iree.compiler")
    from compiling import compile_

    monkeypatch.setenv("IREE_MARSHAL_CACHE_DIR", str(tmp_path))
    torch.cuda.set_device(current)
    run = compile_(lambda x: torch.relu(x) * 2 - 1)
    for _ in range(3):
        for gpu in GPUS:
            x = torch.randn(64, device=gpu)
            y = run(x)
            assert y.device == x.device
            torch.testing.assert_close(y, torch.relu(x) * 2 - 1)
            assert torch.cuda.current_device() == current
    kinds = {torch.cuda.get_device_capability(gpu) for gpu in GPUS}
    assert len(list(tmp_path.glob("*.vmfb"))) == len(kinds)


# ---- results say where they are --------------------------------------------------------------


@TWO
@CURRENT
def test_results_and_arrays_say_their_own_device(current: int) -> None:
    torch.cuda.set_device(current)
    for index, gpu in enumerate(GPUS):
        program = _program(gpu)
        variants = program.invoke(im.to_variant_list([numbers(gpu), numbers(gpu)]))
        (tensor,) = im.from_variant_list(variants)
        (array,) = im.from_variant_list(variants, as_arrays=True)
        assert tensor.device == array.device == torch.device(gpu)
        assert array.__dlpack_device__()[1] == index
        assert torch.from_dlpack(array).data_ptr() == tensor.data_ptr()
        adopted = torch.as_tensor(array, device=gpu)
        assert adopted.data_ptr() == tensor.data_ptr()
        # Nothing but the interface, which does not say the device: not moved to the current one.
        bare = SimpleNamespace(__cuda_array_interface__=array.__cuda_array_interface__)
        (again,) = im.from_variant_list(im.to_variant_list([bare], copy=False, device=gpu), device=gpu)
        assert again.data_ptr() == tensor.data_ptr()
        assert again.device == torch.device(gpu)


def _program(gpu: str) -> modules.Program:
    with torch.cuda.device(gpu):
        torch.zeros(1, device=gpu)
        program = modules.Program(modules.ADD, im.hal_device(gpu), "main", *modules.CUDA)
    invoke = program.invoke

    def within(arguments: rt.VmVariantList) -> rt.VmVariantList:
        with torch.cuda.device(gpu):
            return invoke(arguments)

    program.invoke = within  # type: ignore[method-assign]
    return program


# ---- refusals --------------------------------------------------------------------------------


@TWO
@CURRENT
def test_mixed_lists_are_refused_by_index(current: int) -> None:
    torch.cuda.set_device(current)
    first, second = (numbers(gpu) for gpu in GPUS)
    settle()
    before = im.memory_stats()
    for mixed, place in (([first, first, second], "element 2"), ([first, [first, second]], r"element 1\[1\]")):
        with pytest.raises(ValueError, match=rf"^{place}: expected a tensor on cuda:0, got one on cuda:1$"):
            im.to_variant_list(mixed)
    with pytest.raises(ValueError, match=r"^element 1: expected a tensor on cuda:1, got one on cuda:0$"):
        im.to_variant_list([second, first], upload=True)
    with pytest.raises(ValueError, match=r"^element 0: expected a tensor on cuda:1, got one on cuda:0$"):
        im.to_variant_list([first], device="cuda:1")
    exe = on(GPUS[1])
    with pytest.raises(ValueError, match=r"^argument 1.*: expected a tensor on cuda:1, got one on cuda:0$"):
        exe(second, first)
    settle()
    after = im.memory_stats()
    assert [after[gpu]["imports"] for gpu in GPUS] == [before[gpu]["imports"] for gpu in GPUS]


@TWO
def test_a_stream_of_the_other_gpu_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^stream: expected a stream of cuda:1, .*, got one of cuda:0$"):
        im.record_stream(numbers(GPUS[1]), torch.cuda.Stream(device=GPUS[0]))


# ---- order and release -----------------------------------------------------------------------


def sleep(gpu: str, cycles: int) -> None:
    """Keep a GPU's current stream busy; torch's own call keeps that of the current device."""
    with torch.cuda.device(gpu):
        torch.cuda._sleep(cycles)


@TWO
@CURRENT
@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("side", [False, True], ids=["default stream", "side stream"])
def test_inputs_are_complete_when_read(current: int, gpu: str, side: bool) -> None:
    torch.cuda.set_device(current)
    exe = on(gpu)
    zero, x = torch.zeros(4, device=gpu), torch.zeros(4, device=gpu)
    torch.cuda.synchronize(gpu)
    stream = torch.cuda.Stream(device=gpu) if side else torch.cuda.default_stream(gpu)
    for step in range(1, 11):
        with torch.cuda.stream(stream):
            sleep(gpu, LONG)
            x.fill_(float(step))
        with torch.cuda.device(gpu), torch.cuda.stream(stream), torch.cuda.device(current):
            y = exe(x, zero)
        torch.cuda.synchronize(gpu)
        assert y.tolist() == [float(step)] * 4


@TWO
@CURRENT
def test_without_the_order_the_race_is_real(current: int) -> None:
    torch.cuda.set_device(current)
    for gpu in GPUS:
        program = _program(gpu)
        zero, x = torch.zeros(4, device=gpu), torch.zeros(4, device=gpu)
        stale = 0
        for step in range(1, 11):
            torch.cuda.synchronize(gpu)
            sleep(gpu, LONG)
            x.fill_(float(step))
            (y,) = im.from_variant_list(program.invoke(im.to_variant_list([x, zero], order=False)))
            torch.cuda.synchronize(gpu)
            stale += y.tolist() != [float(step)] * 4
        assert stale > 0


@TWO
def test_a_call_waits_for_its_own_gpu_only() -> None:
    for busy, idle in (GPUS, GPUS[::-1]):
        exe = on(idle)
        x = numbers(idle)
        exe(x, x)
        torch.cuda.synchronize(idle)
        done = torch.cuda.Event()
        sleep(busy, 50 * LONG)
        with torch.cuda.device(busy):
            done.record(torch.cuda.current_stream(busy))
        for step in range(5):
            assert exe(numbers(idle, step), x)[0].item() == step
        assert not done.query(), "the other GPU was waited for"
        torch.cuda.synchronize(busy)


DROPS = """
from iree_marshal import _cuda
_cuda.release_in_order({in_order})
torch.cuda.set_device({current})
copies = []
def prepare(gpu):
    exe = im.Executor.load(modules.compile_module(modules.TWO_RESULTS, *modules.CUDA), device=gpu)
    return exe, torch.arange(7.0, device=gpu), torch.arange(5.0, device=gpu)
prepared = [prepare("cuda:0"), prepare("cuda:1")]
for step in range(60):
    for exe, a, b in prepared:
        first, second = exe(a, b)
        with torch.cuda.device(a.device):
            torch.cuda._sleep(2_000_000)
        copies.append((a, b, first.clone(), second.clone()))
        del first, second
    for exe, a, b in prepared:
        for _ in range(3):
            exe(a * 0, b * 0)
torch.cuda.synchronize("cuda:0")
torch.cuda.synchronize("cuda:1")
print("wrong", sum(not torch.equal(x, a + a) or not torch.equal(y, b * b) for a, b, x, y in copies))
"""


@TWO
@CURRENT
def test_results_dropped_while_in_use(current: int) -> None:
    assert last_line(script(DROPS.format(in_order=True, current=current))) == "wrong 0"


@TWO
@CURRENT
def test_dropped_where_the_other_gpu_is_current(current: int) -> None:
    """On a thread of its own, and counted on the GPU that the results are of."""
    torch.cuda.set_device(current)
    for gpu, other in (GPUS, GPUS[::-1]):
        exe = on(gpu, executor_modules.ODD_SIZES)
        x = torch.ones(5, device=gpu)
        settle()
        before = im.memory_stats()
        holder = [exe(x) for _ in range(40)]
        now = im.memory_stats()
        assert now[gpu]["exports"] > before[gpu]["exports"]
        assert now[other]["exports"] == before[other]["exports"]

        def drop(holder: list[Any] = holder, other: str = other) -> None:
            torch.cuda.set_device(other)
            holder.clear()

        thread = threading.Thread(target=drop)
        thread.start()
        thread.join()
        exe.trim()
        for _ in range(3):
            torch.cuda.synchronize(gpu)
            gc.collect()
            after = im.memory_stats()
        assert [after[one]["exports"] for one in GPUS] == [before[one]["exports"] for one in GPUS]
        assert torch.equal(exe(x)[0], x + 1)


@TWO
def test_what_waits_is_per_gpu() -> None:
    natives = {gpu: _objects.native_device(im.hal_device(gpu)) for gpu in GPUS}
    for busy, idle in (GPUS, GPUS[::-1]):
        exe = on(busy)
        x = numbers(busy)
        for gpu in GPUS:
            torch.cuda.synchronize(gpu)
        im.memory_stats()
        y = exe(x, x)
        sleep(busy, 10 * LONG)
        del y
        im.memory_stats()  # any call settles what was dropped
        assert _cuda.waiting(natives[busy]) > 0
        assert _cuda.waiting(natives[idle]) == 0
        torch.cuda.synchronize(busy)
        im.memory_stats()
        assert _cuda.waiting(natives[busy]) == 0


@TWO
def test_free_memory_stays_what_it_was_on_both() -> None:
    made = [on(gpu, executor_modules.ODD_SIZES) for gpu in GPUS]
    given = [torch.ones(5, device=gpu) for gpu in GPUS]
    for exe, x in zip(made, given, strict=True):
        exe(x)
    free = [torch.cuda.mem_get_info(gpu)[0] for gpu in GPUS]
    for _ in range(2000):
        for exe, x in zip(made, given, strict=True):
            exe(x)
    for gpu, before in zip(GPUS, free, strict=True):
        torch.cuda.synchronize(gpu)
        assert abs(torch.cuda.mem_get_info(gpu)[0] - before) < 64 << 20


# ---- doctor ------------------------------------------------------------------------------------


def test_doctor_names_uuid_hal_device_and_proof_of_every_gpu() -> None:
    from iree_marshal import doctor

    found = doctor.examine()
    for index in range(torch.cuda.device_count()):
        uuid = str(torch.cuda.get_device_properties(index).uuid)
        assert f"UUID {uuid}" in found["devices"][f"cuda:{index}"]
        assert f"cuda://GPU-{uuid}".lower() in found["devices"][f"cuda:{index}"].lower()
        assert found["native"][f"cuda:{index} stream"].startswith("proven")
        assert found["native"][f"cuda:{index} buffers"].startswith("proven")
