# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What is handed out: the source distribution, the wheel built from it, and the house rules of the tree."""

from __future__ import annotations

import email
import importlib.metadata
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import iree_marshal

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src"
MODULES = sorted(path.relative_to(SOURCE) for path in SOURCE.glob("iree_marshal/**/*.pyx"))
SUPPORT = sorted(
    path.relative_to(SOURCE) for suffix in ("pxd", "h", "pyi") for path in SOURCE.glob(f"iree_marshal/**/*.{suffix}")
)
PYTHON = sorted(path.relative_to(SOURCE) for path in SOURCE.glob("iree_marshal/**/*.py"))


def output_of(*command: str | Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the sdist and a wheel built from it, in a new environment with setuptools and Cython only."""
    folder = tmp_path_factory.mktemp("dist")
    done = subprocess.run(
        [sys.executable, "-m", "build", "--outdir", folder, ROOT],
        env={**os.environ, "PIP_CONSTRAINT": str(ROOT / "constraints.txt")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return folder


@pytest.fixture(scope="module")
def sdist_names(distributions: Path) -> set[str]:
    (path,) = distributions.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        return {name.partition("/")[2] for name in archive.getnames()}


@pytest.fixture(scope="module")
def wheel(distributions: Path) -> Path:
    (path,) = distributions.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def wheel_names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.fixture(scope="module")
def extensions(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("wheel")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return sorted(folder.rglob("*.so"))


def test_sdist_has_all_sources(sdist_names: set[str]) -> None:
    wanted = {f"src/{path}" for path in (*MODULES, *SUPPORT, *PYTHON)}
    wanted |= {"src/iree_marshal/py.typed", "LICENSE", "README.md", "Makefile", "setup.py", "pyproject.toml"}
    wanted |= {f"tests/{path.name}" for path in (ROOT / "tests").glob("*.py")}
    assert wanted <= sdist_names


def test_sdist_has_nothing_built(sdist_names: set[str]) -> None:
    assert not [name for name in sdist_names if name.endswith((".c", ".so", ".pyc"))]


def test_wheel_has_extensions_and_their_declarations(wheel_names: set[str]) -> None:
    assert {str(path) for path in (*SUPPORT, *PYTHON)} | {"iree_marshal/py.typed"} <= wheel_names
    built = {name.partition(".")[0] for name in wheel_names if name.endswith(".so")}
    assert built == {str(path.with_suffix("")) for path in MODULES}
    assert not [name for name in wheel_names if name.endswith(".c")]


def test_wheel_metadata(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = email.message_from_bytes(archive.read(name))
        entry_points = archive.read(name.replace("METADATA", "entry_points.txt")).decode()
    assert metadata["Version"] == iree_marshal.__version__
    assert metadata["License-Expression"] == "Apache-2.0 WITH LLVM-exception"
    assert metadata["Requires-Python"] == ">=3.10"
    required = [line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line]
    assert {line.partition(">")[0] for line in required} == {"torch", "iree-base-runtime", "numpy"}
    assert entry_points.split() == ["[torch_dynamo_backends]", "iree_marshal", "=", "iree_marshal.backend:iree_marshal"]


def test_extensions_link_only_libc(extensions: list[Path]) -> None:
    # torch and IREE are met through addresses taken at run time: one wheel serves every torch.
    for path in extensions:
        needed = [
            line.split("[")[1].rstrip("]") for line in output_of("readelf", "-d", path).splitlines() if "NEEDED" in line
        ]
        assert set(needed) <= {"libc.so.6", "libpthread.so.0"}, path.name
        undefined = output_of("nm", "-D", "--undefined-only", path)
        assert "iree" not in undefined, path.name
        assert "torch" not in undefined, path.name


def test_extensions_export_only_their_initializer(extensions: list[Path]) -> None:
    for path in extensions:
        defined = [line.split()[-1] for line in output_of("nm", "-D", "--defined-only", path).splitlines()]
        assert defined == [f"PyInit_{path.name.partition('.')[0]}"]


def test_installed_version_is_the_source_version() -> None:
    assert importlib.metadata.version("iree_marshal") == iree_marshal.__version__


def test_free_threaded_builds_are_refused() -> None:
    script = (
        "import runpy, sysconfig; ask = sysconfig.get_config_var; "
        "sysconfig.get_config_var = lambda name: 1 if name == 'Py_GIL_DISABLED' else ask(name); "
        "runpy.run_path('setup.py')"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("iree_marshal does not support free-threaded CPython")


def test_every_extension_has_types() -> None:
    assert [path for path in MODULES if not (SOURCE / path).with_suffix(".pyi").exists()] == []


def test_house_rules() -> None:
    paths = [SOURCE / path for path in (*MODULES, *SUPPORT, *PYTHON)]
    paths += [path for folder in ("tests", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    paths += [ROOT / "setup.py", ROOT / "Makefile", ROOT / ".ci" / "run"]
    nameless = [str(path) for path in paths if "SPDX-License-Identifier: Apache-2.0 WITH" not in path.read_text()]
    too_long = [str(path) for path in paths if len(path.read_text().splitlines()) > 600]
    assert (nameless, too_long) == ([], [])
