# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""`python -m iree_marshal`: the demo, the report of what was proven, the benchmark."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

__all__ = ["COMMANDS", "main"]

COMMANDS = {
    "demo": "run ResNet-50 through IREE, compare it with eager and measure the crossing",
    "doctor": "report what was found and proven, and which path is active; exit 1 on the portable one",
    "bench": "measure the crossing beside the stock bindings",
}


def usage() -> str:
    """What the command line accepts."""
    lines = "".join(f"  {name:<8}{text}\n" for name, text in COMMANDS.items())
    return f"usage: python -m iree_marshal COMMAND [OPTION ...]\n\n{lines}\nCOMMAND --help shows the options of one.\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Parameters
    ----------
    argv : sequence of str, optional
        The command and its options; those of the process by default.

    Returns
    -------
    int
        The exit status; 2 for an unknown command.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    if given and given[0] in ("-h", "--help", "help"):
        sys.stdout.write(usage())
        return 0
    if not given or given[0] not in COMMANDS:
        problem = f"unknown command {given[0]!r}\n" if given else ""
        sys.stderr.write(problem + usage())
        return 2
    command = importlib.import_module(f"iree_marshal.{given[0]}")
    return int(command.main(given[1:]))


if __name__ == "__main__":
    sys.exit(main())
