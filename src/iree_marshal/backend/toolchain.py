# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""`iree-compile` in a child process: flags for a device, and one program in, one module out.

The compiler runs outside our process because it can crash (floor division of int8 does) and because many of its flags
exist only on its command line. It is found through ``iree.compiler``, which the extra ``iree_marshal[compile]``
installs.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from iree_marshal.backend.progress import Progress, log


class CompileError(RuntimeError):
    """A graph could not be turned into a loadable IREE module; the text names the graph and the cause."""


class MissingCompilerError(ImportError):
    """The compiler is not installed; the text names the extra that brings it."""


# Newest CUDA targets first. What the compiler at hand does not know it refuses, so the list is tried on it.
_CUDA_TARGETS = (90, 89, 86, 80, 75, 70)
_DIAGNOSTIC_LINES = 12


def require_compiler() -> None:
    """Raise :class:`MissingCompilerError` unless ``iree.compiler`` can be imported."""
    try:
        found = importlib.util.find_spec("iree.compiler") is not None
    except ModuleNotFoundError:
        found = False
    if not found:
        raise MissingCompilerError(
            "iree_marshal's torch.compile backend needs IREE's compiler, which is not installed; "
            "install the extra: pip install 'iree_marshal[compile]'"
        )


@functools.cache
def compiler_path() -> Path:
    """Return the `iree-compile` executable of the installed ``iree.compiler``."""
    require_compiler()
    binaries = importlib.import_module("iree.compiler.tools.binaries")
    return Path(binaries.find_tool("iree-compile")).resolve()


@functools.cache
def compiler_version() -> str:
    """Return the compiler's version and source revision, as it prints them itself."""
    done = subprocess.run([str(compiler_path()), "--version"], capture_output=True, text=True, check=True)
    found = re.search(r"compiler version (.+)", done.stdout)
    return found.group(1).strip() if found else done.stdout.strip()


@functools.cache
def host_cpu() -> str:
    """Return a digest of what ``--iree-llvmcpu-target-cpu=host`` resolves to on this machine.

    A home directory, and so a cache, may be shared by machines of different kinds; code for one can be illegal on
    another.
    """
    text = platform.machine() + platform.processor()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    wanted = ("model name", "flags", "Features", "CPU part", "CPU implementer")
    text += "".join(sorted({line for line in lines if line.startswith(wanted)}))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@functools.cache
def cuda_target(major: int, minor: int) -> str:
    """Return the newest CUDA target that this compiler knows and that runs on the given compute capability.

    Parameters
    ----------
    major, minor : int
        Compute capability of the device, ``torch.cuda.get_device_capability``.

    Returns
    -------
    str
        ``"sm_89"`` for a Hopper device and a compiler that stops there: PTX runs on newer devices.

    Raises
    ------
    CompileError
        If the compiler knows no target that old.
    """
    capability = 10 * major + minor
    candidates = [target for target in _CUDA_TARGETS if target <= capability]
    body = "%y = math.sqrt %x : tensor<4xf32>\nreturn %y : tensor<4xf32>"
    probe = f"func.func @main(%x: tensor<4xf32>) -> tensor<4xf32> {{\n{body}\n}}\n"
    for target in candidates:
        command = [
            str(compiler_path()),
            "-",
            "-o",
            "/dev/null",
            "--iree-hal-target-backends=cuda",
            f"--iree-cuda-target=sm_{target}",
        ]
        if subprocess.run(command, input=probe, capture_output=True, text=True, check=False).returncode == 0:
            return f"sm_{target}"
    raise CompileError(
        f"IREE compiler {compiler_version()} knows no CUDA target for compute capability {major}.{minor}; "
        f"tried {', '.join(f'sm_{target}' for target in candidates) or 'none'}"
    )


def flags_for(device: torch.device) -> tuple[str, ...]:
    """Return the compiler flags for a torch device.

    Parameters
    ----------
    device : torch.device
        ``cpu`` or ``cuda[:i]``.

    Returns
    -------
    tuple of str
        Flags without input and output names.

    Raises
    ------
    CompileError
        For a device type that has no target here.
    """
    # The default turns every f64 into f32, arguments and results too: a float64 tensor would come in mislabelled.
    # Without im2col, IREE 3.13 compiles chains of convolutions on CUDA into wrong code, and slower code (ResNet-50 2.7
    # to 3.6 times on an H200; 7 times on two CPU cores, 870 ms against 125).
    common = (
        "--iree-input-type=torch",
        "--iree-input-demote-f64-to-f32=false",
        "--iree-global-opt-use-im2col-for-convs",
    )
    if device.type == "cpu":
        return (
            *common,
            "--iree-hal-target-device=local",
            "--iree-hal-local-target-device-backends=llvm-cpu",
            "--iree-llvmcpu-target-cpu=host",
        )
    if device.type == "cuda":
        if torch.version.hip is not None:
            # torch calls ROCm devices "cuda" as well. Untested: no such device was at hand.
            arch = torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
            return (*common, "--iree-hal-target-backends=rocm", f"--iree-rocm-target={arch}")
        target = cuda_target(*torch.cuda.get_device_capability(device))
        return (*common, "--iree-hal-target-backends=cuda", f"--iree-cuda-target={target}")
    raise CompileError(f"no IREE target for torch device {device!s} (supported: cpu, cuda)")


def _diagnostics(stderr: str) -> str:
    """Return the first errors of the compiler's output, without the program dump that follows them."""
    lines = stderr.splitlines()
    errors = [line for line in lines if re.search(r"\berror:|Assertion|LLVM ERROR|UNREACHABLE", line)]
    kept = errors[:3] or [line for line in lines if line.strip()][:_DIAGNOSTIC_LINES]
    return "\n".join(line[:400] for line in kept)


def compile_program(program: str, flags: Sequence[str], name: str) -> bytes:
    """Compile one MLIR program in a child process.

    Parameters
    ----------
    program : str
        MLIR text.
    flags : sequence of str
        Flags, see :func:`flags_for`.
    name : str
        The graph's name, for the progress line and for errors.

    Returns
    -------
    bytes
        The module (vmfb).

    Raises
    ------
    CompileError
        The compiler refused the program or crashed; carries its exit status and first diagnostics.
    """
    with tempfile.TemporaryDirectory(prefix="iree_marshal-") as folder:
        target = Path(folder, "program.vmfb")
        command = [str(compiler_path()), "-", "-o", str(target), *flags]
        log.debug("%s: %s", name, " ".join(command))
        with Progress(f"compiling {name}"):
            done = subprocess.run(
                command, input=program, capture_output=True, encoding="utf-8", errors="replace", check=False
            )
            if done.returncode != 0 or not target.exists():
                raise CompileError(_failure(name, done.returncode, done.stderr))
        if done.stderr.strip():
            log.debug("%s: compiler said: %s", name, done.stderr.strip())
        return target.read_bytes()


def _failure(name: str, status: int, stderr: str) -> str:
    detail = _diagnostics(stderr)
    if status < 0:
        # A negative status is the signal that ended the child: the compiler itself crashed.
        cause = f"the IREE compiler crashed with signal {-status}"
    else:
        cause = f"the IREE compiler refused it (exit status {status})"
    return f"{name}: {cause}" + (f":\n{detail}" if detail else "")


def describe() -> str:
    """Return one line that names compiler and Python, for cache keys."""
    return f"{compiler_version()} python{sys.version_info.major}.{sys.version_info.minor}"
