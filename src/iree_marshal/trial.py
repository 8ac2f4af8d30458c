# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The child process of the self-check: tables in on stdin, proofs out on stdout, as JSON.

Each table is tried in a fork, because calling a wrong slot may crash or hang. Does not
import torch.
"""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import signal
import sys
import warnings
from collections.abc import Mapping
from typing import NoReturn

from iree_marshal import selfcheck
from iree_marshal.proofs import READS
from iree_marshal.proofs_by_call import CALLS
from iree_marshal.selfcheck import Proof
from iree_marshal.subject import Subject, keep_instance

__all__ = ["main"]

_SECONDS = 5


def _try(table: Mapping[str, int], output: int) -> NoReturn:
    """In the fork: run all proofs, write the outcome, and leave without cleaning up."""
    signal.alarm(_SECONDS)
    with Subject(table) as subject:
        last = selfcheck.run(subject, READS)[-1]
        if last.ok:
            last = selfcheck.run(subject, CALLS)[-1]
    os.write(output, json.dumps(dataclasses.asdict(last)).encode())
    os._exit(0)


def _outcome(table: Mapping[str, int]) -> Proof:
    source, sink = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            _try(table, sink)
        finally:
            os._exit(1)
    os.close(sink)
    with os.fdopen(source, "rb") as stream:
        answer = stream.read()
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        return Proof("trial", False, f"ended by {signal.Signals(-code).name}")
    try:
        return Proof(**json.loads(answer))
    except (ValueError, TypeError):
        return Proof("trial", False, f"no answer, exit status {code}")


def main() -> None:
    """Try every table."""
    # Newer interpreters warn of a fork beside threads (numpy's, which no proof uses).
    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    keep_instance()
    answer = json.dumps([dataclasses.asdict(_outcome(table)) for table in json.load(sys.stdin)])
    # Whatever a wrong call printed went to stdout before; nothing of it is in this buffer.
    sys.stdout.write(answer)
