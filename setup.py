# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Builds the Cython extensions; everything else is in pyproject.toml.

Every `src/iree_marshal/**/*.pyx` becomes an extension of the same name. Needs setuptools, Cython
and a C compiler: neither torch nor IREE, since both are met through addresses taken at run time.
The generated C goes to `build/`, one folder per kind of build (for line tracing: beside the source).

Environment variables, each for one kind of build:

| variable | effect |
|---|---|
| `IREE_MARSHAL_WERROR=1` | warnings of Cython and of the C compiler are errors |
| `IREE_MARSHAL_LINETRACE=1` | line tracing for coverage; slow |
| `IREE_MARSHAL_SANITIZE=address` | instrumented for AddressSanitizer (see `make asan`) |
"""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

if sysconfig.get_config_var("Py_GIL_DISABLED"):
    raise SystemExit(
        "iree_marshal does not support free-threaded CPython: its release queues and caches rely on the GIL. "
        "Build it with a CPython that has the GIL (3.10 or newer)."
    )

SOURCE = Path("src")
HEADERS = sorted(str(path) for path in SOURCE.glob("iree_marshal/**/*.h"))

WERROR = os.environ.get("IREE_MARSHAL_WERROR", "") == "1"
LINETRACE = os.environ.get("IREE_MARSHAL_LINETRACE", "") == "1"
SANITIZE = os.environ.get("IREE_MARSHAL_SANITIZE", "")
if SANITIZE not in ("", "address"):
    raise SystemExit(f"IREE_MARSHAL_SANITIZE: expected 'address' or nothing, got {SANITIZE!r}")

DIRECTIVES: dict[str, object] = {
    "language_level": 3,
    # The loops index what they have just measured; a check per element would be the largest cost left.
    "boundscheck": False,
    "wraparound": False,
    "initializedcheck": False,
    "cdivision": True,
    "embedsignature": True,
    "binding": True,
    "linetrace": LINETRACE,
}


def compile_arguments() -> list[str]:
    arguments = ["-std=c17", "-O2", "-fvisibility=hidden", "-Wall", "-Wextra"]
    if WERROR:
        arguments.append("-Werror")
    if SANITIZE:
        arguments += [f"-fsanitize={SANITIZE}", "-fno-omit-frame-pointer", "-O1", "-g"]
    elif not LINETRACE:
        # The interpreter's own flags ask for debug information, which is three quarters of a wheel.
        arguments.append("-g0")
    return arguments


def kind_of_build() -> str:
    kinds = [name for name, on in (("linetrace", LINETRACE), (SANITIZE, bool(SANITIZE)), ("werror", WERROR)) if on]
    return "-".join(kinds) or "release"


def extension(path: Path) -> Extension:
    return Extension(
        ".".join(path.relative_to(SOURCE).with_suffix("").parts),
        [str(path)],
        include_dirs=["src", "src/iree_marshal/abi"],
        define_macros=[("CYTHON_TRACE_NOGIL", "1")] if LINETRACE else [],
        extra_compile_args=compile_arguments(),
        extra_link_args=[f"-fsanitize={SANITIZE}"] if SANITIZE else [],
        depends=HEADERS,
    )


class BuildExtensions(build_ext):
    """Cythonizes when extensions are built, so that an sdist lists `.pyx` files and needs no C of them."""

    def finalize_options(self) -> None:
        super().finalize_options()
        # Objects of different kinds of build must not meet.
        self.build_temp = str(Path(self.build_temp) / kind_of_build())

    def build_extensions(self) -> None:
        if self.extensions:
            self.cythonize()
        super().build_extensions()

    def cythonize(self) -> None:
        from Cython.Build import cythonize
        from Cython.Compiler import Options
        from Cython.Compiler.Errors import CompileError

        directives = dict(DIRECTIVES)
        if WERROR:
            Options.warning_errors = True
            directives.update(Options.extra_warnings)
            # Cython takes the `&result` of an out parameter for a read; the C compiler tells the two apart.
            directives["warn.maybe_uninitialized"] = False
        try:
            translated = cythonize(
                [Extension(each.name, list(each.sources), depends=each.depends) for each in self.extensions],
                # The coverage plugin looks for the C beside its source; `make coverage` builds in a copy of the tree.
                build_dir=None if LINETRACE else f"build/cython-{kind_of_build()}",
                include_path=[str(SOURCE)],
                compiler_directives=directives,
                force=bool(self.force),
                quiet=not self.verbose,
            )
        except CompileError as error:
            # Cython has printed the place and the reason; a traceback through setuptools adds nothing.
            raise SystemExit(f"Cython: {error}") from None
        # setuptools has notes of its own on its extension objects: they stay, their sources change.
        for mine, theirs in zip(self.extensions, translated, strict=True):
            mine.sources = theirs.sources


setup(
    ext_modules=[extension(path) for path in sorted(SOURCE.glob("iree_marshal/**/*.pyx"))],
    cmdclass={"build_ext": BuildExtensions},
)
