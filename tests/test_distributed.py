# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The programs of ``docs/distributed.md``, run as the page says: one process per device, here two on the CPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import torch.distributed

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGE = DOCS / "distributed.md"
if not PAGE.is_file():
    pytest.skip("a copy of the sources without the pages", allow_module_level=True)
pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available() or not torch.distributed.is_gloo_available(), reason="a torch without gloo"
)

TWO_GPUS = [
    pytest.mark.cuda,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs: torch.cuda.device_count() >= 2"),
]
ON = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=TWO_GPUS)])


def torchrun(name: str, cache: Path, device: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run one of the page's programs in two processes that share an empty cache; an eager graph fails it."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "IREE_MARSHAL_CACHE_DIR": str(cache),
        "IREE_MARSHAL_LOGS": "debug",
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "error::RuntimeWarning",
    }
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.run(
        [sys.executable, "-m", *launcher, str(DOCS / name), *arguments],
        capture_output=True,
        text=True,
        timeout=500,
        env=environment,
        check=False,
    )


def assert_compiled_once(log: str, cache: Path, graphs: int) -> None:
    """Of two processes one compiled each graph, and the other found it."""
    assert len(re.findall(r"^\[[01]\] graph .*: compiled$", log, re.MULTILINE)) == graphs, log
    assert len(re.findall(r"^\[[01]\] graph .*: found in the cache$", log, re.MULTILINE)) == graphs, log
    assert len(list(cache.glob("*.vmfb"))) == graphs
    assert not list(cache.glob("*.part"))


@ON
def test_inference(tmp_path: Path, device: str) -> None:
    done = torchrun("distributed_inference.py", tmp_path, device, "--model", "tiny", "--images", "32", "--batch", "8")
    assert done.returncode == 0, done.stderr
    found = re.fullmatch(rf"32 images, 2 processes on {device}: [\d.]+ images/s, error (\S+)\n", done.stdout)
    assert found, done.stdout
    assert float(found[1]) < 1e-3
    assert_compiled_once(done.stderr, tmp_path, 1)


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs: torch.cuda.device_count() >= 2")
def test_inference_of_resnet50_on_two_gpus(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    done = torchrun("distributed_inference.py", tmp_path, "cuda")
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"64 images, 2 processes on cuda: [\d.]+ images/s, error \S+\n", done.stdout), done.stdout


@ON
def test_training(tmp_path: Path, device: str) -> None:
    done = torchrun("distributed_training.py", tmp_path, device, "--steps", "5")
    assert done.returncode == 0, done.stderr
    found = re.fullmatch(rf"5 steps, 2 processes on {device}: moved (\S+), error (\S+)\n", done.stdout)
    assert found, done.stdout
    assert float(found[2]) < 1e-4 < float(found[1])
    assert_compiled_once(done.stderr, tmp_path, 2)


def test_images_that_cannot_be_shared_evenly(tmp_path: Path) -> None:
    done = torchrun("distributed_inference.py", tmp_path, "cpu", "--model", "tiny", "--images", "20", "--batch", "8")
    assert done.returncode != 0
    assert "--images must be a multiple of 16: 2 processes, 8 a call" in done.stderr


def test_the_page_quotes_the_programs() -> None:
    programs = [(DOCS / name).read_text() for name in ("distributed_inference.py", "distributed_training.py")]
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 3
    for block in blocks:
        # Lines of a function's body are shown without their indentation.
        assert any(textwrap.indent(block, " " * depth) in text for text in programs for depth in (0, 4, 8)), block
