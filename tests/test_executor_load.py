# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Modules and parameters from files and from memory."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import executor_modules as modules
import iree.runtime as rt
import numpy as np
import pytest
import torch
from executor_support import BOTH_PATHS, aligned

from iree_marshal import paths
from iree_marshal.executor import Executor

pytestmark = BOTH_PATHS
WEIGHT = np.array([10.0, 20.0, 30.0, 40.0], np.float32)


@pytest.fixture(autouse=True)
def chosen(path: str) -> Iterator[None]:
    with paths.force("fast" if path == "native" else "portable"):
        yield


def test_file_that_may_only_be_read(tmp_path: Path) -> None:
    file = tmp_path / "module.vmfb"
    file.write_bytes(modules.compiled(modules.ADD))
    file.chmod(0o444)
    for vmfb in (file, str(file)):
        exe = Executor.load(vmfb)
        assert torch.equal(exe(aligned(4), aligned(4)), aligned(4) * 2)
    # The mapping is the module's own: the name may go.
    file.unlink()
    assert torch.equal(exe(aligned(4), aligned(4)), aligned(4) * 2)


def test_bytes() -> None:
    module = modules.compiled(modules.ADD)
    for vmfb in (module, bytearray(module), memoryview(module)):
        assert torch.equal(Executor.load(vmfb)(aligned(4), aligned(4)), aligned(4) * 2)


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^the module module has no function 'forward'; it has main$"):
        Executor.load(modules.compiled(modules.ADD), "forward")
    with pytest.raises(TypeError, match=r"^vmfb: expected a path or bytes, got int$"):
        Executor.load(3)  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError):
        Executor.load(tmp_path / "missing.vmfb")
    empty = tmp_path / "empty.vmfb"
    empty.touch()
    with pytest.raises(ValueError, match=r"empty.vmfb: the file is empty$"):
        Executor.load(empty)
    with pytest.raises((ValueError, RuntimeError)):
        Executor.load(b"not a module, not by far, and long enough to be read" * 10)


def archives(folder: Path) -> dict[str, Path]:
    """The same parameter in the formats that IREE reads."""
    irpa = folder / "weights.irpa"
    index = rt.ParameterIndex()
    rt.parameter_index_add_numpy_ndarray(index, "w", WEIGHT)
    index.create_archive_file(str(irpa))
    safetensors = folder / "weights.safetensors"
    header = json.dumps({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode()
    header += b" " * (-len(header) % 8)
    safetensors.write_bytes(struct.pack("<Q", len(header)) + header + WEIGHT.tobytes())
    return {"irpa": irpa, "safetensors": safetensors}


@pytest.mark.parametrize("scope", ["", "model", "other"])
@pytest.mark.parametrize("kind", ["irpa", "safetensors"])
def test_parameters(tmp_path: Path, kind: str, scope: str) -> None:
    file = archives(tmp_path)[kind]
    module = modules.compiled(modules.PARAMETERS.format(f'"{scope}"::' if scope else ""))
    index = rt.ParameterIndex()
    index.load(str(file))
    given: list[Any] = [
        {scope: file},
        {scope: str(file)},
        {scope: index},
        index.create_provider(scope),
        [{scope: file}],
    ]
    if scope != "other":
        given += [file, str(file), index]
    for parameters in given:
        exe = Executor.load(module, parameters=parameters)
        assert torch.equal(exe(aligned(4)), aligned(4) + torch.from_numpy(WEIGHT))


def test_parameters_refused(tmp_path: Path) -> None:
    module = modules.compiled(modules.PARAMETERS.format(""))
    with pytest.raises(FileNotFoundError, match=r"^parameters: no file .*missing.irpa$"):
        Executor.load(module, parameters=tmp_path / "missing.irpa")
    with pytest.raises(TypeError, match=r"^parameters: expected a path, a mapping .*, got int$"):
        Executor.load(module, parameters=5)
    with pytest.raises(Exception, match="io_parameters"):
        Executor.load(module)
