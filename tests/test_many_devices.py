# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Several HAL devices in one process, as far as a CPU shows it; test_two_gpus.py needs the GPUs."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import executor_modules
import iree.runtime as rt
import modules
import pytest
import torch
from conftest import private_device
from executor_support import BOTH_PATHS, aligned, executor
from test_executor_threads import in_threads
from torch._subclasses.fake_tensor import FakeTensorMode

import iree_marshal as im
from iree_marshal import _cuda, _objects, arguments, devices, doctor, paths, values
from iree_marshal._executor import count_live

DRIVERS = ("local-task", "local-sync", "local-task", "local-sync")


def registered(driver: str) -> rt.HalDevice:
    device = private_device(driver)
    im.register_device(device, "cpu")
    return device


# ---- executors on several HAL devices ------------------------------------------------------


@BOTH_PATHS
def test_executors_on_four_devices_from_one_thread(path: str) -> None:
    made = [executor(executor_modules.ADD, path=path, device=registered(driver)) for driver in DRIVERS]
    for number, exe in enumerate(made):
        exe.bind({1: torch.full((4,), float(number))})
    for call in range(20):
        x = aligned(4, start=call)
        for number, exe in enumerate(made):
            y = exe(x)
            assert torch.equal(y, x + number)
            assert y.device == exe.device == torch.device("cpu")


@BOTH_PATHS
@pytest.mark.parametrize("program", ["ADD", "STORAGE_BUFFER"])
def test_executors_on_four_devices_from_eight_threads(path: str, program: str) -> None:
    text = getattr(executor_modules, program)
    made = [executor(text, path=path, device=registered(driver)) for driver in DRIVERS]

    def work(number: int) -> None:
        shared = torch.full((4,), float(number))
        for call in range(100):
            exe = made[(number + call) % len(made)]
            x = aligned(4, start=1000 * number + call)
            if program == "ADD":
                assert torch.equal(exe(x, shared), x + number)
            else:
                y, z = exe(x)
                assert torch.equal(y, x * 2)
                assert torch.equal(z, (x * 2).int())

    in_threads(8, work)


def test_a_result_of_one_device_is_an_argument_of_the_next() -> None:
    made = [executor(executor_modules.ADD, device=registered(driver)) for driver in DRIVERS]
    one = torch.ones(4)
    for call in range(20):
        value = aligned(4, start=call)
        expected = value + len(made)
        for exe in made:
            value = exe(value, one)
        assert torch.equal(value, expected)


def test_what_crosses_is_counted_per_device(nothing_left: None) -> None:
    first, second = registered("local-task"), registered("local-sync")
    held = im.to_variant_list([aligned(4), aligned(8)], device=first)
    assert (count_live(first)["imports"], count_live(second)["imports"]) == (2, 0)
    program = modules.Program(modules.ADD, second)
    arguments_ = im.to_variant_list([aligned(4), aligned(4)], device=second)
    results = im.from_variant_list(program.invoke(arguments_), device=second)
    assert (count_live(first)["exports"], count_live(second)["exports"]) == (0, 1)
    assert count_live(second)["imports"] == 2
    del held, arguments_
    gc.collect()
    assert (count_live(first)["imports"], count_live(second)["imports"]) == (0, 0)
    assert count_live(second)["exports"] == 1
    del results
    assert count_live(second)["exports"] == 0


def test_many_threads_meet_a_new_device_at_once(fast: None) -> None:
    for driver in DRIVERS:
        device = registered(driver)
        seen: list[Any] = []
        in_threads(8, lambda number, device=device, seen=seen: seen.append(_objects.native_device(device)))
        assert len(seen) == 8
        assert all(one is seen[0] for one in seen)


# As on a GPU, whose proof lets go of the GIL many times: no thread may come by the device before it is through.
SLOW_PROOF = """
import threading, time
import iree.runtime as rt
import torch
import iree_marshal as im
from iree_marshal import _cuda, _objects, devices, paths

paths.active()
proven, early, entered = [], [], []

def attach(device):
    assert _objects.native_device(device.hal_device) is device  # the proof itself uses it
    time.sleep(0.2)
    proven.append(device)

@contextlib.contextmanager
def current(device):
    entered.append(device)
    yield

_cuda.attach, devices.current = attach, current
device = rt.get_driver("local-sync").create_default_device()
im.register_device(device, "cuda:7")
barrier = threading.Barrier(8)

def meet():
    barrier.wait()
    found = _objects.native_device(device)
    if found not in proven:
        early.append(found)

threads = [threading.Thread(target=meet) for _ in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(len(proven), len(early), entered)

def refuse(device):
    raise RuntimeError("no such stream")

_cuda.attach = refuse
other = rt.get_driver("local-sync").create_default_device()
im.register_device(other, "cuda:6")
for _ in range(2):
    try:
        _objects.native_device(other)
        print("unproven, and handed out")
    except RuntimeError as error:
        print(error)
"""


def test_a_device_is_proven_once_and_not_used_before() -> None:
    folder = str(Path(__file__).parent)
    done = subprocess.run(
        [sys.executable, "-c", "import contextlib\n" + textwrap.dedent(SLOW_PROOF)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, folder])},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "1 0 [device(type='cuda', index=7)]",
        "no such stream",
        "no such stream",
    ]


def test_the_own_device_is_current_while_iree_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it loads, where it invokes, and where it allocates; nowhere else of a portable call."""
    entered: list[torch.device] = []

    @contextlib.contextmanager
    def current(device: torch.device) -> Iterator[None]:
        entered.append(device)
        yield

    monkeypatch.setattr(devices, "current", current)
    exe = executor(executor_modules.STORAGE_BUFFER, path="portable")
    assert len(entered) == 1
    y, z = exe(aligned(4))
    assert torch.equal(y, aligned(4) * 2)
    assert torch.equal(z, (aligned(4) * 2).int())
    assert entered == [torch.device("cpu")] * 4  # and two results' memory
    exe.trim()
    assert len(entered) == 5


# ---- which HAL device belongs to which GPU ---------------------------------------------------

UUIDS = ("aaaaaaaa-1111-2222-3333-444444444444", "bbbbbbbb-1111-2222-3333-444444444444")


class TwoGpus:
    """What torch and IREE say of two GPUs; IREE counts them in its own order and leaves a new one current."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current = 0
        self.made: list[tuple[str, int]] = []
        driver = SimpleNamespace(
            query_available_devices=lambda: [{"path": f"GPU-{uuid.upper()}"} for uuid in reversed(UUIDS)]
        )
        monkeypatch.setattr(devices, "_by_torch_device", {})
        monkeypatch.setattr(devices, "_bound", {})
        monkeypatch.setattr(devices._thread, "has_context", True, raising=False)
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda device: SimpleNamespace(name="A GPU", uuid=UUIDS[device.index])
        )
        monkeypatch.setattr(torch.cuda, "current_device", lambda: self.current)
        monkeypatch.setattr(torch.cuda, "device", self.switch)
        monkeypatch.setattr(devices, "rt", SimpleNamespace(get_driver=lambda name: driver, get_device=self.make))
        monkeypatch.setattr(devices, "vm_instance", lambda: None)

    @contextlib.contextmanager
    def switch(self, device: torch.device) -> Iterator[None]:
        before, self.current = self.current, device.index
        try:
            yield
        finally:
            self.current = before

    def make(self, uri: str) -> SimpleNamespace:
        if not uri.startswith("cuda"):
            return SimpleNamespace(uri=uri)
        self.made.append((uri, self.current))
        self.current = [uuid in uri.lower() for uuid in UUIDS].index(True)
        return SimpleNamespace(uri=uri)


@pytest.mark.parametrize("current", [0, 1])
def test_gpus_are_matched_by_uuid_and_torch_keeps_its_current_one(
    monkeypatch: pytest.MonkeyPatch, current: int
) -> None:
    gpus = TwoGpus(monkeypatch)
    gpus.current = current
    for index in (1, 0):
        im.hal_device(f"cuda:{index}")
        assert gpus.made[-1] == (f"cuda://GPU-{UUIDS[index].upper()}", index)
        assert gpus.current == current
    assert im.hal_device("cuda") is im.hal_device(f"cuda:{current}")
    assert len(gpus.made) == 2


def test_a_gpu_that_iree_does_not_see(monkeypatch: pytest.MonkeyPatch) -> None:
    TwoGpus(monkeypatch)
    unknown = SimpleNamespace(uuid="cccccccc-1111-2222-3333-444444444444")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: unknown)
    with pytest.raises(ValueError, match=r"no device with the UUID cccccccc-.* of cuda:1; it sees \['GPU-BBBB"):
        im.hal_device("cuda:1")


def test_doctor_names_uuid_hal_device_and_proofs_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        TwoGpus(patched)
        patched.setattr(torch.cuda, "is_available", lambda: True)
        patched.setattr(torch.cuda, "device_count", lambda: 2)
        opened: list[str] = []
        patched.setattr(_objects, "native_device", lambda device: opened.append(device.uri))
        proofs = {
            "cuda:0": {"stream": "proven: a", "buffers": "proven: b"},
            "cuda:1": {"stream": "host synchronizes: c"},
        }
        patched.setattr(_cuda, "describe", lambda: proofs)
        with paths.force("fast"):
            found = doctor.examine()
    uris = [f"cuda://GPU-{uuid.upper()}" for uuid in UUIDS]
    assert opened == ["local-task", *uris]
    assert found["devices"] == {
        "cpu": "local-task",
        "cuda:0": f"{uris[0]} (A GPU, UUID {UUIDS[0]})",
        "cuda:1": f"{uris[1]} (A GPU, UUID {UUIDS[1]})",
    }
    shown = " ".join(doctor.render(found).split())
    for text in ("cuda:0 stream proven: a", "cuda:0 buffers proven: b", "cuda:1 stream host synchronizes: c", *UUIDS):
        assert text in shown


# ---- refusals ------------------------------------------------------------------------------------


def on(device: str) -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(4, device=device)


def test_a_tensor_of_another_gpu_is_refused_by_index() -> None:
    with pytest.raises(ValueError, match=r"^element 3: expected a tensor on cuda:1, got one on cuda:0$"):
        values._moved(on("cuda:0"), (3,), torch.device("cuda:1"), False)
    # Uploading is for CPU tensors: a copy between GPUs is never made unasked.
    with pytest.raises(ValueError, match=r"^element 3\[1\]: expected a tensor on cuda:1, got one on cuda:0$"):
        values._moved(on("cuda:0"), (3, 1), torch.device("cuda:1"), True)
    with pytest.raises(ValueError, match=r"^element 0: expected a tensor on cuda:1, got one on cpu; pass upload=True"):
        values.admit(torch.empty(4), (0,), torch.device("cuda:1"), None)


def test_an_argument_of_another_gpu_is_refused_by_name() -> None:
    signature = im.Executor.load(executor_modules.compiled(executor_modules.NAMED)).signature
    assert signature is not None
    with pytest.raises(ValueError, match=r"argument 0 \(x\).*: expected a tensor on cuda:1, got one on cuda:0$"):
        arguments.settle(0, signature.arguments[0], on("cuda:0"), torch.device("cuda:1"), None, True)


def test_a_stream_of_another_gpu_is_refused() -> None:
    tensor, stream = (SimpleNamespace(device=torch.device("cuda", index)) for index in (0, 1))
    with pytest.raises(
        ValueError, match=r"^stream: expected a stream of cuda:0, the tensor's device, got one of cuda:1$"
    ):
        im.record_stream(tensor, stream)  # type: ignore[arg-type]


def test_a_stream_is_recorded_on_every_hal_device_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = TwoGpus(monkeypatch)
    own, other = im.hal_device("cuda:0"), im.hal_device("cuda:1")
    second = SimpleNamespace()
    devices._bound[id(second)] = (second, torch.device("cuda:0"))
    recorded: list[Any] = []
    path = SimpleNamespace(record_stream=lambda device, stream: recorded.append((device, stream)))
    monkeypatch.setattr(paths, "active", lambda: path)
    place = torch.device("cuda:0")
    im.record_stream(SimpleNamespace(device=place), SimpleNamespace(device=place, cuda_stream=17))  # type: ignore[arg-type]
    assert recorded == [(own, 17), (second, 17)]
    assert other is not own
    assert len(gpus.made) == 2
