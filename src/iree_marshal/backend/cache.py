# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Compiled modules on disk, so that the second start of a program compiles nothing.

An entry is one file, ``<key>.vmfb``: the module, its SHA-256 and a mark. It is written beside its place and renamed
into it, so that readers see a whole entry or none; the digest catches what a disk or a full file system did to it
afterwards. A lock per key makes processes that want the same module at the same time compile it once.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from iree_marshal.backend.progress import log

_MARK = b"iree_marshal-1\n"
_TRAILER_BYTES = hashlib.sha256().digest_size + len(_MARK)
_DEFAULT_MEGABYTES = 2048
_LOCK_SUFFIX = ".lock"
_TEMPORARY_SUFFIX = ".part"
_STALE_SECONDS = 24 * 3600


def directory() -> Path:
    """Return the cache's folder: ``IREE_MARSHAL_CACHE_DIR``, else ``iree_marshal`` in the user's cache folder."""
    chosen = os.environ.get("IREE_MARSHAL_CACHE_DIR")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "iree_marshal"


def limit_bytes() -> int:
    """Return the size the cache is kept under, in bytes: ``IREE_MARSHAL_CACHE_MB`` (default 2048)."""
    text = os.environ.get("IREE_MARSHAL_CACHE_MB", "")
    try:
        return int(float(text) * 2**20) if text else _DEFAULT_MEGABYTES * 2**20
    except ValueError:
        log.warning("IREE_MARSHAL_CACHE_MB=%s is no number; using %d", text, _DEFAULT_MEGABYTES)
        return _DEFAULT_MEGABYTES * 2**20


def key(program: str, parts: Sequence[str]) -> str:
    """Return the name of an entry: a digest over the program and everything else that decides the module.

    Parameters
    ----------
    program : str
        MLIR text.
    parts : sequence of str
        Flags, compiler version, package version, host.
    """
    digest = hashlib.sha256(program.encode())
    for part in parts:
        # Lengths keep ("ab", "c") and ("a", "bc") apart.
        digest.update(f"\0{len(part)}\0{part}".encode())
    return digest.hexdigest()


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file; the kernel drops it when its holder dies."""
    try:
        import fcntl

        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except (ImportError, OSError) as error:
        log.debug("no lock on %s (%s): another process may compile the same program", path, error)
        yield
        return
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError as error:
            # Some network file systems have no locks. Entries are still written atomically.
            log.debug("no lock on %s (%s): another process may compile the same program", path, error)
        yield
    finally:
        os.close(handle)


class Cache:
    """The modules in one folder.

    Parameters
    ----------
    folder : Path, optional
        Where entries are kept; :func:`directory` by default. Made when first written to.
    limit : int, optional
        Bytes that all entries together may take; :func:`limit_bytes` by default. The least recently used go first.

    Notes
    -----
    A folder that cannot be written is no error: everything is compiled anew, and a log line says so.
    """

    def __init__(self, folder: Path | None = None, limit: int | None = None) -> None:
        self.folder = directory() if folder is None else folder
        self.limit = limit_bytes() if limit is None else limit

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.vmfb"

    def read(self, name: str) -> bytes | None:
        """Return the module of an entry, or ``None`` where there is none. A corrupt entry is removed."""
        path = self._path(name)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            log.warning("cannot read the cached module %s: %s", path, error)
            return None
        module, trailer = data[:-_TRAILER_BYTES], data[-_TRAILER_BYTES:]
        if trailer != hashlib.sha256(module).digest() + _MARK:
            log.warning("the cached module %s is damaged; compiling it again", path)
            self.remove(name)
            return None
        with contextlib.suppress(OSError):
            # Its time of change is the time of last use, which eviction goes by.
            os.utime(path)
        return module

    def remove(self, name: str) -> None:
        """Remove an entry, if it is there."""
        with contextlib.suppress(OSError):
            self._path(name).unlink(missing_ok=True)

    def write(self, name: str, module: bytes) -> None:
        """Keep a module under a name, atomically, and bring the cache under its limit."""
        temporary: str | None = None
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            handle, temporary = tempfile.mkstemp(dir=self.folder, suffix=_TEMPORARY_SUFFIX)
            with os.fdopen(handle, "wb") as file:
                file.write(module + hashlib.sha256(module).digest() + _MARK)
                file.flush()
                os.fsync(file.fileno())
            Path(temporary).replace(self._path(name))
            temporary = None
        except OSError as error:
            log.warning("cannot keep a compiled module in %s: %s", self.folder, error)
        finally:
            if temporary is not None:
                with contextlib.suppress(OSError):
                    Path(temporary).unlink()
        self._evict(keep=name)

    def _evict(self, keep: str) -> None:
        entries: list[tuple[float, int, Path]] = []
        now = time.time()
        try:
            listing = list(os.scandir(self.folder))
        except OSError:
            return
        for item in listing:
            with contextlib.suppress(OSError):
                info = item.stat()
                if item.name.endswith(".vmfb"):
                    entries.append((info.st_mtime, info.st_size, Path(item.path)))
                elif item.name.endswith((_TEMPORARY_SUFFIX, _LOCK_SUFFIX)) and now - info.st_mtime > _STALE_SECONDS:
                    # Left by a process that died while writing, or a lock that nobody asks for any more.
                    Path(item.path).unlink()
        total = sum(size for _, size, _ in entries)
        for _, size, path in sorted(entries):
            if total <= self.limit:
                return
            if path != self._path(keep):
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)
                total -= size

    def get(self, name: str, build: Callable[[], bytes], check: Callable[[bytes], None]) -> tuple[bytes, bool]:
        """Return the module of an entry, built and kept when it is not there.

        Parameters
        ----------
        name : str
            The entry, see :func:`key`.
        build : callable
            Makes the module; called at most once, with the entry's lock held.
        check : callable
            Loads a module and raises when the runtime does not take it. A built module is kept only after it passed; a
            cached one that fails is built again once.

        Returns
        -------
        module : bytes
            The module, checked.
        hit : bool
            Whether it came from the cache.
        """
        module = self._checked(name, check)
        if module is not None:
            return module, True
        with contextlib.suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _locked(self.folder / f"{name}{_LOCK_SUFFIX}"):
            # Another process may have built it while we waited for the lock.
            module = self._checked(name, check)
            if module is not None:
                return module, True
            module = build()
            check(module)
            self.write(name, module)
        return module, False

    def _checked(self, name: str, check: Callable[[bytes], None]) -> bytes | None:
        module = self.read(name)
        if module is None:
            return None
        try:
            check(module)
        except Exception as error:  # whatever the runtime raises: the entry is of no use here
            log.warning("the cached module %s does not load (%s); compiling it again", self._path(name), error)
            self.remove(name)
            return None
        return module
