# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The crossing on an NVIDIA GPU. Races are made visible with long kernels, and shown to fail without the order."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import iree.runtime as rt
import modules
import numpy as np
import pytest
import torch

import iree_marshal as im
from iree_marshal import _lifetime
from iree_marshal.element_types import HAL_OF, typestr

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.usefixtures("fast"),
]

SHORT, LONG = 2_000_000, 20_000_000  # cycles of torch.cuda._sleep: about 1 and 10 ms


@pytest.fixture(scope="module")
def two_results() -> modules.Program:
    return modules.Program(modules.TWO_RESULTS, im.hal_device("cuda"), "main", *modules.CUDA)


@pytest.fixture(scope="module")
def add() -> modules.Program:
    return modules.Program(modules.ADD, im.hal_device("cuda"), "main", *modules.CUDA)


def call(program: modules.Program, *values: Any, **options: Any) -> list[Any]:
    return im.from_variant_list(program.invoke(im.to_variant_list(values, **options)))


def settle() -> None:
    """Nothing may be left once the device is idle."""
    torch.cuda.synchronize()
    gc.collect()
    _lifetime.live_counts()


def script(text: str, **environment: str) -> subprocess.CompletedProcess[str]:
    setup = "import gc, os, sys, torch\nimport iree.runtime as rt\nimport iree_marshal as im\nimport modules\n"
    folder = str(Path(__file__).parent)
    return subprocess.run(
        [sys.executable, "-c", setup + textwrap.dedent(text)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, folder]), **environment},
        check=False,
    )


# ---- devices ------------------------------------------------------------------------------


def test_one_device_per_process() -> None:
    assert im.hal_device("cuda") is im.hal_device("cuda:0")
    assert im.hal_device(torch.device("cuda", 0)) is im.hal_device("cuda")


def test_c28_matched_by_uuid() -> None:
    uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    done = script("print(im.hal_device('cuda:0'), torch.cuda.device_count())", CUDA_VISIBLE_DEVICES=uuid)
    assert done.stdout.split()[-1] == "1", done.stderr
    seen = [str(info["path"]) for info in rt.get_driver("cuda").query_available_devices()]
    assert any(path.lower() == uuid.lower() for path in seen)


def test_c28_mixed_devices_are_refused() -> None:
    gpu, cpu = torch.ones(4, device="cuda"), torch.ones(4)
    with pytest.raises(ValueError, match=r"^element 1: expected a tensor on cuda:0, got one on cpu; pass upload=True"):
        im.to_variant_list([gpu, cpu])
    with pytest.raises(ValueError, match=r"^element 1: expected a tensor on cpu, got one on cuda:0$"):
        im.to_variant_list([cpu, gpu])
    with pytest.raises(ValueError, match=r"^element 0: expected a tensor on cuda:0, got one on cpu; pass upload=True"):
        im.to_variant_list([cpu], device="cuda")


def test_proofs_of_the_device() -> None:
    from iree_marshal import _cuda

    im.to_variant_list([torch.ones(4, device="cuda")])
    assert all(finding.startswith("proven") for finding in _cuda.describe()["cuda:0"].values())


# ---- both ways ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", list(HAL_OF), ids=str)
@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (0, 3)], ids=str)
def test_every_dtype_in_place(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.ones(shape, device="cuda").to(dtype)
    (result,) = im.from_variant_list(im.to_variant_list([tensor], copy=False))
    assert result.dtype is dtype
    assert result.shape == tensor.shape
    assert result.device == tensor.device
    assert tensor.numel() == 0 or result.data_ptr() == tensor.data_ptr()


def test_c01_two_results_of_one_allocation(two_results: modules.Program) -> None:
    a, b = torch.arange(7.0, device="cuda"), torch.arange(5.0, device="cuda")
    first, second = call(two_results, a, b)
    assert torch.equal(first, a + a)
    del first
    for _ in range(20):
        call(two_results, a + 1, b + 1)
    assert torch.equal(second, b * b)


@pytest.mark.parametrize("flag", ["true", "false"])
def test_c06_both_allocation_modes(flag: str) -> None:
    text = f"""
    rt.flags.parse_flags("--cuda_async_allocations={flag}")
    program = modules.Program(modules.TWO_RESULTS, im.hal_device("cuda"), "main", *modules.CUDA)
    a, b = torch.arange(7.0, device="cuda"), torch.arange(5.0, device="cuda")
    for _ in range(20):
        first, second = im.from_variant_list(program.invoke(im.to_variant_list([a, b])))
        assert torch.equal(first, a + a) and torch.equal(second, b * b)
        assert first.device == a.device
    print("right")
    """
    done = script(text)
    assert done.stdout.strip() == "right", done.stderr


def test_unaligned_and_strided_memory_is_copied_on_the_device(add: modules.Program) -> None:
    base = torch.arange(64.0, device="cuda")
    for tensor in (base[1:5], base[::16], base.half()[3:7].float()[:4], torch._neg_view(base[:4])):
        (result,) = call(add, tensor, torch.zeros(4, device="cuda"))
        assert torch.equal(result, tensor.resolve_neg())
    with pytest.raises(ValueError, match="not aligned to 64 bytes"):
        im.to_variant_list([base[1:5]], copy=False)


def test_a_result_that_is_an_argument() -> None:
    identity = modules.Program(modules.IDENTITY, im.hal_device("cuda"), "main", *modules.CUDA)
    x = torch.arange(4.0, device="cuda")
    (y,) = call(identity, x)
    assert y.data_ptr() == x.data_ptr()
    del x
    gc.collect()
    others = [torch.full((4,), 9.0, device="cuda") for _ in range(64)]
    assert torch.equal(y.cpu(), torch.arange(4.0))
    assert len(others) == 64


def test_c31_upload(add: modules.Program) -> None:
    zero = torch.zeros(4, device="cuda")
    for step in range(500):
        (result,) = call(add, torch.full((4,), float(step)), zero, device="cuda", upload=True)
        assert result[2].item() == step


# ---- interfaces -------------------------------------------------------------------------------


def arrays_of(tensor: torch.Tensor) -> im.HalArray:
    (array,) = im.from_variant_list(im.to_variant_list([tensor]), as_arrays=True)
    assert isinstance(array, im.HalArray)
    return array


@pytest.mark.parametrize("dtype", list(HAL_OF), ids=str)
def test_cuda_array_interface(dtype: torch.dtype) -> None:
    tensor = torch.ones(4, device="cuda").to(dtype)
    array = arrays_of(tensor)
    assert not hasattr(array, "__array_interface__")
    assert hasattr(array, "__cuda_array_interface__") is (typestr(dtype) is not None)
    if typestr(dtype) is None:
        assert array.torch().data_ptr() == tensor.data_ptr()
        return
    interface = array.__cuda_array_interface__
    assert interface == {
        "shape": (4,),
        "typestr": typestr(dtype),
        "data": (tensor.data_ptr(), False),
        "strides": None,
        "version": 3,
        "stream": None,
    }
    if dtype not in (torch.uint16, torch.uint32, torch.uint64):  # torch reads no interface of these
        adopted = torch.as_tensor(array, device="cuda")
        assert adopted.data_ptr() == tensor.data_ptr()
        assert adopted.dtype is dtype


def test_cupy_and_numba_adopt(two_results: modules.Program) -> None:
    cupy = pytest.importorskip("cupy")
    numba_cuda = pytest.importorskip("numba.cuda")
    a, b = torch.arange(7.0, device="cuda"), torch.arange(5.0, device="cuda")
    outputs = two_results.invoke(im.to_variant_list([a, b]))
    first, second = im.from_variant_list(outputs, as_arrays=True)
    by_cupy = cupy.asarray(first)
    assert by_cupy.data.ptr == first.data_ptr
    assert np.array_equal(by_cupy.get(), (a + a).cpu().numpy())
    by_numba = numba_cuda.as_cuda_array(second)
    assert by_numba.device_ctypes_pointer.value == second.data_ptr
    assert np.array_equal(by_numba.copy_to_host(), (b * b).cpu().numpy())
    assert torch.from_dlpack(first).data_ptr() == first.data_ptr


# ---- order of inputs ------------------------------------------------------------------------------


def stale_reads(program: modules.Program, rounds: int, *, order: bool, side: bool) -> int:
    """How often IREE read an input before torch's stream had written it."""
    stale = 0
    zero = torch.zeros(4, device="cuda")
    stream = torch.cuda.Stream() if side else torch.cuda.current_stream()
    torch.cuda.synchronize()
    for step in range(1, rounds + 1):
        with torch.cuda.stream(stream):
            x = torch.zeros(4, device="cuda")
            torch.cuda.synchronize()
            torch.cuda._sleep(LONG)
            x.fill_(float(step))
            (result,) = call(program, x, zero, order=order)
            torch.cuda.synchronize()
        stale += result.tolist() != [float(step)] * 4
    return stale


@pytest.mark.parametrize("side", [False, True], ids=["default stream", "side stream"])
def test_c30_inputs_are_complete_when_read(add: modules.Program, side: bool) -> None:
    assert stale_reads(add, 10, order=True, side=side) == 0
    assert stale_reads(add, 10, order=False, side=side) > 0  # the race is real


def test_reused_list_is_ordered_by_hand(add: modules.Program) -> None:
    x, zero = torch.zeros(4, device="cuda"), torch.zeros(4, device="cuda")
    arguments = im.to_variant_list([x, zero])
    for step in range(1, 6):
        torch.cuda._sleep(LONG)
        x.fill_(float(step))
        im.order("cuda")
        (result,) = im.from_variant_list(add.invoke(arguments))
        assert result.tolist() == [float(step)] * 4


def test_ordering_does_not_block_the_host(add: modules.Program) -> None:
    x, zero = torch.zeros(4, device="cuda"), torch.zeros(4, device="cuda")
    im.to_variant_list([x, zero])
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    arguments = im.to_variant_list([x, zero])
    assert not torch.cuda.current_stream().query()  # the sleep still runs: nothing waited for it
    assert len(arguments) == 2


def test_capturing_stream_is_refused() -> None:
    x = torch.zeros(4, device="cuda")
    im.to_variant_list([x])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream()):
        # Relaxed: looking at events of other streams must not break the capture.
        graph.capture_begin(capture_error_mode="relaxed")
        x.add_(1)
        with pytest.raises(RuntimeError, match="while torch captures a CUDA graph"):
            im.to_variant_list([x])
        graph.capture_end()
    torch.cuda.synchronize()
    assert len(im.to_variant_list([x])) == 1


# ---- order of releases ------------------------------------------------------------------------------

DROPS = """
from iree_marshal import _cuda
_cuda.release_in_order({in_order})
program = modules.Program(modules.TWO_RESULTS, im.hal_device("cuda"), "main", *modules.CUDA)
a, b = torch.arange(7.0, device="cuda"), torch.arange(5.0, device="cuda")
zero_a, zero_b = torch.zeros(7, device="cuda"), torch.zeros(5, device="cuda")
stream = torch.cuda.Stream() if {side} else torch.cuda.current_stream()
copies = []
for step in range(60):
    first, second = im.from_variant_list(program.invoke(im.to_variant_list([a, b])))
    with torch.cuda.stream(stream):
        torch.cuda._sleep(2_000_000)
        copies.append((first.clone(), second.clone()))
        del first, second
    for _ in range(3):
        im.from_variant_list(program.invoke(im.to_variant_list([zero_a, zero_b], order=False)))
torch.cuda.synchronize()
wrong = sum(not torch.equal(x, a + a) or not torch.equal(y, b * b) for x, y in copies)
print("wrong", wrong)
"""


@pytest.mark.parametrize("side", [False, True], ids=["default stream", "side stream"])
def test_results_dropped_while_in_use(side: bool) -> None:
    done = script(DROPS.format(in_order=True, side=side))
    assert done.stdout.strip() == "wrong 0", done.stderr


def test_results_dropped_while_in_use_without_order() -> None:
    """Without the order the same program reads freed memory: wrong values, or a dead context."""
    done = script(DROPS.format(in_order=False, side=False))
    assert done.returncode != 0 or done.stdout.strip() != "wrong 0"


def test_record_stream(two_results: modules.Program) -> None:
    a, b = torch.arange(7.0, device="cuda"), torch.arange(5.0, device="cuda")
    side = torch.cuda.Stream()
    copies = []
    for _ in range(20):
        first, second = call(two_results, a, b)
        with torch.cuda.stream(side):
            torch.cuda._sleep(SHORT)
            copies.append(first.clone())
        im.record_stream(first, side)
        del first, second  # on the default stream, which is idle
        for _ in range(3):
            call(two_results, a * 0, b * 0)
    torch.cuda.synchronize()
    assert all(torch.equal(copy, a + a) for copy in copies)


def test_inputs_dropped_while_iree_reads_them() -> None:
    """An asynchronous call; its list and tensor are dropped at once, and torch's allocator is kept busy."""
    device = im.hal_device("cuda")
    program = modules.Program(modules.SLOW, device, "main", "--iree-execution-model=async-external", *modules.CUDA)
    for step in range(1, 21):
        x = torch.eye(512, device="cuda") * step
        done = device.create_semaphore(0)
        fences = [rt.HalFence.create_at(device.create_semaphore(0), 0), rt.HalFence.create_at(done, 1)]
        arguments = im.to_variant_list([x, *fences])
        results = program.invoke(arguments)
        del arguments, x
        for _ in range(8):
            torch.full((512, 512), -1.0, device="cuda")
        done.wait(1)
        (result,) = im.from_variant_list(results)
        assert torch.equal(result.diagonal(), torch.full((512,), float(step) ** 3, device="cuda"))


def test_many_results_stay_intact(two_results: modules.Program) -> None:
    held = []
    for step in range(300):
        a = torch.full((7,), float(step), device="cuda")
        held.append(call(two_results, a, torch.full((5,), float(step), device="cuda")))
    a, b = torch.zeros(7, device="cuda"), torch.zeros(5, device="cuda")
    for _ in range(1000):
        call(two_results, a, b)
    for step, (first, second) in enumerate(held):
        assert first.tolist() == [2.0 * step] * 7
        assert second.tolist() == [float(step) ** 2] * 5


def test_storm_of_drops_from_four_threads(two_results: modules.Program) -> None:
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for step in range(50):
                    a = torch.full((7,), float(seed * 100 + step), device="cuda")
                    b = torch.full((5,), float(step), device="cuda")
                    first, second = call(two_results, a, b)
                    torch.cuda._sleep(100_000)
                    copies = first.clone(), second.clone()
                    expected = a + a, b * b
                    del first, second, a, b
                    torch.cuda.current_stream().synchronize()
                    assert torch.equal(copies[0], expected[0])
                    assert torch.equal(copies[1], expected[1])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_nothing_is_left(two_results: modules.Program) -> None:
    settle()
    before = _lifetime.live_counts()
    free = torch.cuda.mem_get_info()[0]
    a, b = torch.ones(7, device="cuda"), torch.ones(5, device="cuda")
    for _ in range(2000):
        call(two_results, a, b)
    settle()
    settle()
    assert _lifetime.live_counts() == before
    assert abs(torch.cuda.mem_get_info()[0] - free) < 64 << 20


def test_dropped_on_a_thread_without_a_context(two_results: modules.Program) -> None:
    a, b = torch.ones(7, device="cuda"), torch.ones(5, device="cuda")
    settle()
    before = _lifetime.live_counts()
    holder = [call(two_results, a, b) for _ in range(60)]
    thread = threading.Thread(target=holder.clear)
    thread.start()
    thread.join()
    settle()
    settle()
    assert _lifetime.live_counts() == before
    assert torch.equal(call(two_results, a, b)[0], a + a)


def test_c33_live_results_at_exit() -> None:
    text = """
    program = modules.Program(modules.TWO_RESULTS, im.hal_device("cuda"), "main", *modules.CUDA)
    arguments = im.to_variant_list([torch.ones(7, device="cuda"), torch.ones(5, device="cuda")])
    outputs = program.invoke(arguments)
    results = im.from_variant_list(outputs)
    arrays = im.from_variant_list(outputs, as_arrays=True)
    torch.cuda._sleep(20_000_000)
    kept = results[0].clone()
    print(results[1].sum().item())
    """
    done = script(text)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "5.0"
    assert "nanobind" not in done.stderr


def test_portable_path_agrees() -> None:
    text = """
    program = modules.Program(modules.TWO_RESULTS, im.hal_device("cuda"), "main", *modules.CUDA)
    a, b = torch.arange(7.0, device="cuda"), torch.arange(5.0, device="cuda")
    for step in range(10):
        torch.cuda._sleep(2_000_000)
        a.fill_(step)
        first, second = im.from_variant_list(program.invoke(im.to_variant_list([a, b])), device="cuda")
        assert torch.equal(first, a + a) and torch.equal(second, b * b) and first.device == a.device
    print("right")
    """
    done = script(text, IREE_MARSHAL_PATH="portable")
    assert done.stdout.strip() == "right", done.stderr
