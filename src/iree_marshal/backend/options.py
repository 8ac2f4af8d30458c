# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What a user can choose: ``torch.compile(model, backend="iree_marshal", options={...})``."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

_VERIFY = ("first", "never", "always")


@dataclass(frozen=True)
class Options:
    """The backend's options.

    Attributes
    ----------
    verify : {"first", "never", "always"}
        Which calls of a compiled graph are compared with eager. Wrong code out of a clean compile has been seen.
    fallback : bool
        Whether a graph that IREE cannot compile, load, run or get right runs eager, with one warning. ``False``:
        raises.
    flags : tuple of str
        More flags for ``iree-compile``.
    storage : bool or None
        Whether results are written into memory that we allocate (``True``), or allocated by IREE (``False``). ``None``:
        whichever was measured to be faster for the device and the number of results.
    cache : bool
        Whether compiled modules are kept on disk.
    """

    verify: str = "first"
    fallback: bool = True
    flags: tuple[str, ...] = ()
    storage: bool | None = None
    cache: bool = True

    @classmethod
    def parse(cls, given: Mapping[str, Any] | None) -> Options:
        """Check a user's dictionary.

        Raises
        ------
        ValueError
            Unknown name, or a value that is none of those allowed.
        TypeError
            A value of another type.
        """
        values = dict(given or {})
        known = {field.name for field in fields(cls)}
        for name in values:
            if name not in known:
                close = difflib.get_close_matches(str(name), sorted(known), n=1)
                advice = f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(sorted(known))}"
                raise ValueError(f"iree_marshal backend: unknown option {name!r}{advice}")
        verify = values.get("verify", "first")
        if verify not in _VERIFY:
            known_values = ", ".join(_VERIFY)
            raise ValueError(f"iree_marshal backend: option 'verify' must be one of {known_values}, got {verify!r}")
        for name in ("fallback", "storage", "cache"):
            value = values.get(name)
            if name in values and not isinstance(value, bool) and not (name == "storage" and value is None):
                raise TypeError(f"iree_marshal backend: option {name!r} must be a bool, got {type(value).__name__}")
        flags = values.get("flags", ())
        if isinstance(flags, str) or not all(isinstance(flag, str) for flag in flags):
            raise TypeError("iree_marshal backend: option 'flags' must be a list of str")
        values["flags"] = tuple(flags)
        return cls(**values)
