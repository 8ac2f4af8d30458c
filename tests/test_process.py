# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What needs a process of its own: the first call, forks, and how the interpreter ends."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

SETUP = """
import gc, os, sys, threading, warnings
warnings.simplefilter("error")
import torch
import iree.runtime as rt
import iree_marshal as im
"""


def run(text: str, *, seconds: float = 60, leaks: bool = False, **environment: str) -> str:
    """Run a script; it must end by itself, with exit code 0 and nothing on stderr (but leak reports, where meant)."""
    done = subprocess.run(
        [sys.executable, "-c", SETUP + textwrap.dedent(text)],
        capture_output=True,
        text=True,
        timeout=seconds,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(Path(__file__).parent)]), **environment},
        check=False,
    )
    assert done.stderr == "" or (leaks and done.stderr.startswith("nanobind: leaked"))
    assert done.returncode == 0
    return done.stdout.strip()


PATHS = pytest.mark.parametrize("path", ["fast", "portable"])


@PATHS
def test_c44_first_call_of_all(path: str) -> None:
    """A list made before any VmInstance exists crashes the process; our calls make one first."""
    assert run("print(len(im.to_variant_list([])), len(im.to_variant_list([1, [2]])))", IREE_MARSHAL_PATH=path) == "0 2"


@PATHS
def test_import_starts_nothing(path: str) -> None:
    text = """
    from iree_marshal import devices, paths
    assert devices._instance is None and devices.known_devices() == [] and paths._active is None
    print(threading.active_count())
    """
    assert run(text, IREE_MARSHAL_PATH=path) == "1"


@PATHS
def test_exit_with_everything_alive(path: str) -> None:
    text = """
    tensors = [torch.ones(16) for _ in range(8)]
    variants = im.to_variant_list(tensors)
    results = im.from_variant_list(variants)
    arrays = im.from_variant_list(variants, as_arrays=True)
    nested = im.to_variant_list([[tensors[0]], variants])
    print(results[0].sum().item())
    """
    assert run(text, IREE_MARSHAL_PATH=path) == "16.0"


def test_exit_with_a_private_device_and_its_results() -> None:
    """Stock IREE 3.12 and 3.13 crash here: the pool of a local-task device dies before its buffers do."""
    text = """
    import modules
    from iree_marshal import devices
    devices.vm_instance()
    device = rt.get_driver("local-task").create_default_device()
    program = modules.Program(modules.TWO_RESULTS, device)
    outputs = program.invoke(im.to_variant_list([torch.ones(7), torch.ones(5)], device=device))
    results = im.from_variant_list(outputs)
    print(results[1].sum().item())
    """
    assert run(text) == "5.0"


def test_exit_with_work_in_flight() -> None:
    text = """
    import modules
    device = im.hal_device("cpu")
    program = modules.Program(modules.SLOW, device, "main", "--iree-execution-model=async-external")
    calls = []
    for _ in range(8):
        done = device.create_semaphore(0)
        fences = [rt.HalFence.create_at(device.create_semaphore(0), 0), rt.HalFence.create_at(done, 1)]
        calls.append(program.invoke(im.to_variant_list([torch.eye(512), *fences])))
    print(len(calls))
    """
    assert run(text) == "8"


def test_dropped_during_finalization() -> None:
    """Module globals of an object whose destructor runs when the interpreter is already taken apart."""
    text = """
    class Late:
        def __init__(self): self.held = im.to_variant_list([torch.ones(16)])
        def __del__(self): self.held = None
    late = Late()
    late.again = late
    sys.late = Late()
    results = im.from_variant_list(late.held)
    print("end")
    """
    assert run(text) == "end"


def test_dropped_by_a_thread_that_outlives_main() -> None:
    text = """
    import time
    results = im.from_variant_list(im.to_variant_list([torch.ones(16)]))
    def drop():
        time.sleep(0.2)
        results.clear()
    threading.Thread(target=drop, daemon=True).start()
    threading.Thread(target=drop).start()
    print("end")
    """
    assert run(text) == "end"


@PATHS
@pytest.mark.parametrize(
    "call", ["im.to_variant_list([tensor])", "im.from_variant_list(variants)", "im.hal_device('cpu')"]
)
def test_c36_fork(path: str, call: str) -> None:
    """The child gets an error at once, and can exit although its device's threads are gone."""
    text = f"""
    warnings.simplefilter("ignore", DeprecationWarning)  # forking a process with threads is the point
    tensor = torch.ones(16)
    variants = im.to_variant_list([tensor])
    results = im.from_variant_list(variants)
    child = os.fork()
    if child == 0:
        try:
            {call}
        except RuntimeError as error:
            print(str(error).partition(":")[0], flush=True)
            del variants, results
            gc.collect()
            sys.exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert torch.equal(im.from_variant_list(im.to_variant_list([tensor]))[0], tensor)
    """
    # The portable path has no way to keep a device that the bindings do not see.
    leaks = path == "portable"
    assert run(text, leaks=leaks, IREE_MARSHAL_PATH=path) == "iree_marshal was used before this process was forked"


def test_fork_before_the_first_call() -> None:
    text = """
    warnings.simplefilter("ignore", DeprecationWarning)
    child = os.fork()
    value = im.from_variant_list(im.to_variant_list([torch.ones(4), 3]))[1]
    if child == 0:
        sys.exit(value)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    assert run(text) == "3"


def test_reading_tensors_through_dlpack_gives_the_same() -> None:
    text = """
    from iree_marshal import _tensors, _lifetime
    from iree_marshal.element_types import HAL_OF
    print(_tensors.describe()["torch reader"])
    for dtype in HAL_OF:
        for tensor in (torch.ones(16).to(dtype), torch.ones(()).to(dtype), torch.empty(0, 3, dtype=dtype)):
            result, = im.from_variant_list(im.to_variant_list([tensor], copy=False))
            assert result.dtype == dtype and result.shape == tensor.shape
            assert tensor.numel() == 0 or result.data_ptr() == tensor.data_ptr()
    conjugate = torch.ones(16, dtype=torch.complex64).conj()
    for bad in (torch.ones(3, requires_grad=True), conjugate, torch.ones(64)[1:33]):
        try:
            im.to_variant_list([bad], copy=False)
        except ValueError:
            continue
        raise AssertionError(bad)
    del tensor, result
    gc.collect()
    assert _lifetime.live_counts() == (0, 0, 0)
    """
    expected = "Python and DLPack table: switched off by IREE_MARSHAL_TORCH_READER=dlpack"
    assert run(text, IREE_MARSHAL_TORCH_READER="dlpack") == expected


def test_first_use_inside_modes_of_torch() -> None:
    """The reader is proven on known tensors, whatever the caller's modes would make of them."""
    text = """
    from iree_marshal import _tensors
    from torch._subclasses import FakeTensorMode
    tensor = torch.ones(16)
    with FakeTensorMode(), torch.device("meta"), torch.inference_mode():
        variants = im.to_variant_list([tensor])
    print(_tensors.describe()["torch reader"])
    """
    assert run(text) == "native (libtorch C shim)"
