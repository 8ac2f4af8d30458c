#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Instructions per tensor of the two hot loops, counted by callgrind: repeatable where timings are noisy.

    python benchmarks/instructions.py            # count, and keep the counts in benchmarks/results/instructions.json
    python benchmarks/instructions.py --check    # count, and fail where a count grew by more than 10 %

Counting starts after the imports, and a count is the difference of two list lengths: what a process, a call and a list
cost on their own cancels. Each call is counted on its own and the least taken: now and then malloc tidies up. Counts
hold for the versions they were made with. With other ones `--check` compares what a loop takes per `t.detach()`, which
is torch's and the interpreter's alone, and allows more. Needs valgrind with its headers, and a C compiler.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

STORED = Path(__file__).parent / "results" / "instructions.json"
LENGTHS = (200, 600)
REPETITIONS = 10
LIMIT_S = 900
# Percent that a count may grow by; and per `t.detach()` where something else than our code has changed as well.
ALLOWED = 10.0
ALLOWED_ELSEWHERE = 25.0
# Valgrind serves requests that are special instructions, which only C can hold. And its 3.19 lets no other thread run
# while one waits in io_uring, where IREE's threads wait: told that there is none, they use poll.
REQUESTS = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdarg.h>
#include <sys/syscall.h>
#include <valgrind/callgrind.h>

void counting_start(void) { CALLGRIND_START_INSTRUMENTATION; }
void counting_zero(void) { CALLGRIND_ZERO_STATS; }
void counting_dump(const char *name) { CALLGRIND_DUMP_STATS_AT(name); }

long syscall(long number, ...) {
  if (number == SYS_io_uring_setup) {
    errno = ENOSYS;
    return -1;
  }
  long (*next)(long, ...) = (long (*)(long, ...))dlsym(RTLD_NEXT, "syscall");
  long a[6];
  va_list more;
  va_start(more, number);
  for (int i = 0; i < 6; ++i) a[i] = va_arg(more, long);
  va_end(more);
  return next(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}
"""


class MissingToolError(RuntimeError):
    """Valgrind or the C compiler is not installed; the text says which."""


def find_valgrind() -> tuple[str, Path]:
    """Return the program, and the folder that it is installed in: a package unpacked anywhere will do."""
    # Debian's `valgrind` is a script that knows only where the package belongs.
    found = shutil.which("valgrind.bin") or shutil.which("valgrind")
    if found is None:
        raise MissingToolError("counting instructions needs valgrind and a C compiler")
    return found, Path(found).resolve().parent.parent


def compile_requests(folder: Path, installed: Path) -> Path:
    """Build the shared object that talks to callgrind."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        raise MissingToolError("counting instructions needs valgrind and a C compiler")
    target = folder / "requests.so"
    include = f"-I{installed / 'include'}"
    done = subprocess.run(
        [compiler, "-O1", "-shared", "-fPIC", include, "-x", "c", "-", "-o", str(target), "-ldl"],
        input=REQUESTS,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise MissingToolError(f"counting instructions needs valgrind's headers: {done.stderr.strip()}")
    return target


def count(folder: Path) -> dict[str, float]:
    """Run the loops under callgrind and return the instructions per tensor of each.

    Parameters
    ----------
    folder : Path
        For temporary files.
    """
    valgrind, installed = find_valgrind()
    requests = compile_requests(folder, installed)
    command = [
        valgrind,
        "--tool=callgrind",
        "--instr-atstart=no",
        f"--callgrind-out-file={folder / 'out'}",
        sys.executable,
        __file__,
        "--loops",
        str(requests),
    ]
    # One thread and fixed hashes: the same process each time.
    environment = os.environ | {
        "LD_PRELOAD": str(requests),
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONHASHSEED": "0",
    }
    for tools in (installed / "libexec" / "valgrind", installed / "lib" / "valgrind"):
        if tools.is_dir():
            environment["VALGRIND_LIB"] = str(tools)
            break
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=LIMIT_S, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"the loops failed under valgrind:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    totals: dict[tuple[str, int], int] = {}
    for path in folder.glob("out.*"):
        text = path.read_text(errors="replace")
        name = re.search(r"^desc: Trigger: Client Request: (\w+)\.(\d+)$", text, re.MULTILINE)
        total = re.search(r"^(?:summary|totals): (\d+)", text, re.MULTILINE)
        if name and total:
            key = name[1], int(name[2])
            totals[key] = min(int(total[1]), totals.get(key, sys.maxsize))
    short, long = LENGTHS
    loops = sorted({loop for loop, _ in totals})
    if loops != ["detach", "from_variant_list", "to_variant_list"]:
        raise RuntimeError(f"callgrind wrote no counts for the loops, only {loops}")
    return {loop: (totals[loop, long] - totals[loop, short]) / (long - short) for loop in loops}


def loops(requests: Path) -> None:
    """Run the loops, and torch's floor for scale; in the child process, under callgrind."""
    import ctypes
    import gc

    import iree.runtime as rt
    import torch

    import iree_marshal as im
    from iree_marshal.bench.cases import detach

    library = ctypes.CDLL(str(requests))
    # One that works on the calling thread: nothing else is counted.
    device = rt.get_driver("local-sync").create_default_device()
    torch.set_num_threads(1)
    gc.collect()
    gc.disable()

    def counted(name: str, call: Callable[[], object]) -> None:
        for _ in range(REPETITIONS):
            library.counting_zero()
            call()
            library.counting_dump(name.encode())

    with torch.no_grad():
        pool = [torch.zeros(64, 64) for _ in range(max(LENGTHS))]
        lists = {length: im.to_variant_list(pool[:length], device=device) for length in LENGTHS}
        for length in LENGTHS:
            im.from_variant_list(lists[length], device=device)
        library.counting_start()
        for length in LENGTHS:
            tensors, variants = pool[:length], lists[length]
            counted(f"detach.{length}", partial(detach, tensors))
            counted(f"to_variant_list.{length}", partial(im.to_variant_list, tensors, device=device))
            counted(f"from_variant_list.{length}", partial(im.from_variant_list, variants, device=device))


def grown(stored: Mapping[str, float], found: Mapping[str, float], percent: float, *, relative: bool) -> list[str]:
    """Say which loops need more instructions than allowed.

    Parameters
    ----------
    stored, found : mapping
        Instructions per tensor, by loop.
    percent : float
        Allowed growth.
    relative : bool
        Compare instructions per instruction of torch's own floor.
    """
    scale = stored["detach"] / found["detach"] if relative else 1.0
    return [
        f"{loop}: {found[loop]:.0f} instructions per tensor, {(found[loop] * scale / stored[loop] - 1) * 100:+.1f} % "
        f"{'per `t.detach()` ' if relative else ''}over the stored {stored[loop]:.0f}"
        for loop in stored
        if loop != "detach" and found[loop] * scale > stored[loop] * (1 + percent / 100)
    ]


def surroundings() -> dict[str, str]:
    """Return what the counts depend on besides our code."""
    # What follows a plus is a build of the same code: for another device, or from another index.
    torch, iree = (importlib.metadata.version(name).partition("+")[0] for name in ("torch", "iree-base-runtime"))
    return {
        "python": ".".join(platform.python_version_tuple()[:2]),
        "torch": torch,
        "iree-base-runtime": iree,
        "libc": " ".join(platform.libc_ver()),
        "machine": platform.machine(),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Count; keep or check."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare with the stored counts instead of keeping them")
    parser.add_argument("--threshold", type=float, help=f"percent a count may grow by (default {ALLOWED:g})")
    parser.add_argument("--loops", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.loops is not None:
        loops(arguments.loops)
        return 0
    try:
        with tempfile.TemporaryDirectory(prefix="iree_marshal-") as folder:
            found = count(Path(folder))
    except MissingToolError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    for loop, instructions in found.items():
        sys.stdout.write(f"{loop}: {instructions:.1f} instructions per tensor\n")
    if not arguments.check:
        STORED.parent.mkdir(exist_ok=True)
        report = {"instructions_per_tensor": {loop: round(number, 1) for loop, number in found.items()}}
        STORED.write_text(json.dumps(report | surroundings(), indent=1) + "\n")
        return 0
    stored = json.loads(STORED.read_text())
    differs = {name: here for name, here in surroundings().items() if stored.get(name) != here}
    for name, here in differs.items():
        sys.stdout.write(f"note: counted with {name} {here}, stored with {stored.get(name)}\n")
    threshold = arguments.threshold or (ALLOWED_ELSEWHERE if differs else ALLOWED)
    problems = grown(stored["instructions_per_tensor"], found, threshold, relative=bool(differs))
    sys.stdout.writelines(f"{problem}\n" for problem in problems)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
