# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Many threads on one executor, the GIL, forks, and the end of the process."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import executor_modules as modules
import pytest
import torch
from executor_support import BOTH_PATHS, aligned, executor, live

import iree_marshal


def in_threads(count: int, work: Callable[[int], Any]) -> None:
    """Run `work` in many threads at once, and raise the first error."""
    errors: list[BaseException] = []
    barrier = threading.Barrier(count)

    def run(number: int) -> None:
        try:
            barrier.wait()
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@BOTH_PATHS
@pytest.mark.parametrize("program", ["ADD", "STORAGE_BUFFER"])
def test_eight_threads_on_one_executor(path: str, program: str) -> None:
    before = live()
    exe = executor(getattr(modules, program), path=path)

    def work(number: int) -> None:
        shared = torch.full((4,), float(number))
        for call in range(200):
            x = aligned(4, start=1000 * number + call)
            if program == "ADD":
                assert torch.equal(exe(x, shared), x + number)
            else:
                y, z = exe(x)
                assert torch.equal(y, x * 2)
                assert torch.equal(z, (x * 2).int())

    in_threads(8, work)
    exe.trim()
    assert live() == before


@BOTH_PATHS
def test_one_executor_per_thread(path: str) -> None:
    def work(number: int) -> None:
        exe = executor(modules.ADD, path=path)
        exe.bind({1: torch.full((4,), float(number))})
        for call in range(100):
            assert torch.equal(exe(aligned(4, start=call)), aligned(4, start=call) + number)

    modules.compiled(modules.ADD)
    in_threads(4, work)


def test_binding_while_others_call() -> None:
    exe = executor(modules.ADD)
    exe.bind({1: torch.zeros(4)})
    stop = threading.Event()

    def work(number: int) -> None:
        if number == 0:
            try:
                for value in range(100):
                    exe.bind({1: torch.full((4,), float(value))})
                    exe.trim()
            finally:
                stop.set()
            return
        while not stop.is_set():
            x = aligned(4, start=number)
            added = exe(x) - x
            assert torch.equal(added, torch.full((4,), float(added[0])))
            assert 0 <= added[0] < 100

    in_threads(4, work)
    assert torch.equal(exe(torch.zeros(4)), torch.full((4,), 99.0))


def test_reused_outputs_let_one_call_in_at_a_time() -> None:
    exe = executor(modules.STORAGE_BUFFER, reuse_outputs=True)
    kept = exe(aligned(4))

    def work(number: int) -> None:
        for _ in range(50):
            assert exe(aligned(4, start=number))[0] is kept[0]

    in_threads(4, work)
    exe(aligned(4, start=9))
    assert torch.equal(kept[0], aligned(4, start=9) * 2)


def test_serialized_program_with_state() -> None:
    exe = executor(modules.COUNTER, serialize=True)
    found: list[int] = []
    in_threads(8, lambda number: [found.append(exe()) for _ in range(50)])
    assert sorted(found) == list(range(1, 401))


def test_gil_is_free_while_iree_works() -> None:
    exe = executor(modules.SLOW)
    x = torch.eye(512)
    exe(x)
    ticks = 0
    stop = threading.Event()

    def tick() -> None:
        nonlocal ticks
        while not stop.is_set():
            ticks += 1
            time.sleep(0.0005)

    thread = threading.Thread(target=tick)
    thread.start()
    begun = time.perf_counter()
    before = ticks
    exe(x)
    during = ticks - before
    seconds = time.perf_counter() - begun
    stop.set()
    thread.join()
    assert seconds > 0.005, "the call was too short to see anything"
    assert during >= 3


# ---- processes -----------------------------------------------------------------------------------------


def run_script(module: bytes, folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    """Run a script that finds the module in `MODULE`, with this package as it is here."""
    (folder / "module.vmfb").write_bytes(module)
    source = Path(iree_marshal.__file__).parent.parent
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text)],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(source), *sys.path]),
            "MODULE": str(folder / "module.vmfb"),
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


PRELUDE = """
    import os, torch
    from iree_marshal.executor import Executor
    exe = Executor.load(os.environ["MODULE"])
    x = torch.ones(4)
"""


def test_fork_raises_at_once(tmp_path: Path) -> None:
    finished = run_script(
        modules.compiled(modules.ADD),
        tmp_path,
        PRELUDE
        + """
    pending = exe.submit(x, x)
    pending.result()
    y = exe(x, x)
    child = os.fork()
    if child == 0:
        for use in (lambda: exe(x, x), lambda: exe.submit(x, x), lambda: Executor.load(os.environ["MODULE"]), exe.trim,
                    lambda: exe.bind({0: x})):
            try:
                use()
                print("no error")
            except RuntimeError as error:
                print("CHILD", error)
        import sys
        sys.exit(5)
    _, status = os.waitpid(child, 0)
    print("STATUS", os.waitstatus_to_exitcode(status), exe(x, x).tolist())
    """,
    )
    assert finished.returncode == 0, finished.stderr
    lines = finished.stdout.splitlines()
    assert (
        len([line for line in lines if line.startswith("CHILD iree_marshal was used before this process was forked")])
        == 5
    )
    assert lines[-1] == "STATUS 5 [2.0, 2.0, 2.0, 2.0]"


@pytest.mark.parametrize("program", ["ADD", "STORAGE_BUFFER"])
def test_clean_exit_with_everything_alive(tmp_path: Path, program: str) -> None:
    finished = run_script(
        modules.compiled(getattr(modules, program)),
        tmp_path,
        PRELUDE
        + """
    args = (x, x) if len(exe.signature.inputs) == 2 else (x,)
    results = exe(*args)
    exe.bind({0: x})
    more = exe(*args[1:])
    waiting = exe.submit(*args[1:])
    print("done")
    """,
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout == "done\n"
    assert finished.stderr == ""


def test_clean_exit_with_work_in_flight(tmp_path: Path) -> None:
    finished = run_script(
        modules.compiled(modules.SLOW, modules.FENCES),
        tmp_path,
        PRELUDE
        + """
    pending = [exe.submit(torch.eye(512)) for _ in range(3)]
    print("done")
    """,
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout == "done\n"
    assert finished.stderr == ""
