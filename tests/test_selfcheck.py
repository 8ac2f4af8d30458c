# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The self-check holds on this runtime, and refuses every table that is wrong in one place."""

from __future__ import annotations

import json
import logging
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import iree.runtime as rt
import pytest
import torch

from iree_marshal import _probe, selfcheck, subject
from iree_marshal.proofs import READS
from iree_marshal.proofs_by_call import CALLS

TABLE = _probe.layout_table()

# Where the neighbour of a right number is just as right. CALLOC follows MALLOC, and REALLOC
# of nothing is MALLOC; a status has a payload tail exactly when it has a payload head.
SPECIAL = {"host_allocator.malloc": (-1, 3), "status.payload_head": (-8, 16)}
CONSTANTS = {
    "py_instance.state_mask",
    "py_instance.state_ready",
    "list.storage_mode_variant",
    "host_allocator.free",
    "view.encoding_dense",
    "external.host_allocation",
    "external.device_allocation",
    "status.code_mask",
}


def changes(name: str) -> tuple[int, ...]:
    """By how much a number of the table is changed."""
    if name in SPECIAL:
        return SPECIAL[name]
    if name in CONSTANTS or ".slot." in name or name.startswith(("value_type.", "params.usage_", "params.access_")):
        return (-1, 1)
    if name in ("params.type_device_local", "params.queue_affinity_any"):
        return (-1, 1)
    return (-8, -4, -1, 1, 4, 8)


CHANGES = [(name, delta) for name in TABLE for delta in changes(name)]


@pytest.fixture(scope="module")
def outcomes() -> dict[tuple[str, int], selfcheck.Proof]:
    """What the self-check says of each changed table: reading in this process, calling in a child."""
    found = {}
    to_call = []
    for name, delta in CHANGES:
        table = {**TABLE, name: TABLE[name] + delta}
        with subject.Subject(table) as examined:
            found[name, delta] = selfcheck.run(examined, READS)[-1]
        if found[name, delta].ok:
            to_call.append((name, delta, table))
    answers = selfcheck.prove_in_child([table for _, _, table in to_call])
    for (name, delta, _), answer in zip(to_call, answers, strict=True):
        found[name, delta] = answer
    return found


@pytest.mark.parametrize("name", TABLE)
def test_a_wrong_number_is_refused(name: str, outcomes: dict[tuple[str, int], selfcheck.Proof]) -> None:
    accepted = [delta for delta in changes(name) if outcomes[name, delta].ok]
    assert accepted == [], f"{name} may be off by {accepted}"
    assert all(outcomes[name, delta].detail for delta in changes(name))


def test_the_right_table_passes_in_a_child() -> None:
    right, wrong = selfcheck.prove_in_child([TABLE, {**TABLE, "list.storage": 72}])
    assert right.ok, right
    assert (wrong.ok, wrong.name) == (False, "variants")


def test_every_proof_holds() -> None:
    report = selfcheck.prove()
    assert report.ok, report.failure
    assert report.failure == ""
    assert len(report.proofs) == len(READS) + len(CALLS)
    assert all(proof.name and proof.detail for proof in report.proofs)
    assert report.version == selfcheck.runtime_version() != ""


def test_it_takes_less_than_10_ms() -> None:
    """On the machine that the numbers are stated for: as long as 28,000 `Tensor.detach` take, 356 ns each there."""
    selfcheck.prove()
    tensors = [torch.zeros(1) for _ in range(400)]
    samples, unit = [], []
    for _ in range(10):
        # Time of this thread, and the least of it: others on the machine do not count.
        start = time.thread_time()
        assert selfcheck.prove().ok
        samples.append(time.thread_time() - start)
        start = time.thread_time()
        kept = [tensor.detach() for tensor in tensors]
        unit.append((time.thread_time() - start) / len(kept))
    assert min(samples) < 28_000 * min(unit), (samples, unit)


def test_nothing_is_left_behind() -> None:
    before = _probe.counts()
    for _ in range(3):
        assert selfcheck.prove().ok
    # Two imports and one view, each let go of once; one recycled buffer.
    assert [now - then for now, then in zip(_probe.counts(), before, strict=True)] == [6, 3, 3]


# ---- what is refused before anything is read or called -----------------------------------------


@pytest.fixture
def no_child(monkeypatch: pytest.MonkeyPatch) -> None:
    def unexpected(tables: object) -> None:
        raise AssertionError("a child process was started")

    monkeypatch.setattr(selfcheck, "prove_in_child", unexpected)


@pytest.mark.parametrize("version", ["3.3.0", "3.0.0", "2.9.0rc1", "3.3.1.dev20250101"])
def test_older_releases_are_refused(version: str, no_child: None) -> None:
    report = selfcheck.prove(version=version)
    assert not report.ok
    assert report.failure.startswith(f"version: iree-base-runtime {version}; supported: iree-base-runtime 3.4.0 to")


@pytest.mark.parametrize("version", selfcheck.TESTED)
def test_tested_releases_need_no_child(version: str, no_child: None) -> None:
    assert selfcheck.prove(version=version).ok


@pytest.mark.parametrize("version", ["3.14.0", "3.13.1", "3.4.0rc20250430", "4.0.0", ""])
def test_unknown_releases_are_tried_in_a_child(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def refuse(tables: list[dict[str, int]]) -> list[selfcheck.Proof]:
        tried.extend(tables)
        return [selfcheck.Proof("trial", False, "ended by SIGSEGV")]

    monkeypatch.setattr(selfcheck, "prove_in_child", refuse)
    report = selfcheck.prove(version=version)
    assert tried == [TABLE]
    assert report.failure == "in a child process, trial: ended by SIGSEGV"
    # Nothing was called in this process.
    assert len(report.proofs) == len(READS) + 1


def test_an_unknown_release_that_passes_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="iree_marshal"):
        assert selfcheck.prove(version="3.99.0").ok
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert "3.99.0" in record.getMessage()


@pytest.mark.parametrize("table", [{}, {**TABLE, "list.colour": 8}, {"list.count": 32}])
def test_a_table_of_other_names_is_refused(table: dict[str, int], no_child: None) -> None:
    report = selfcheck.prove(table)
    assert [proof.name for proof in report.proofs] == ["table"]
    assert not report.ok


def test_a_wrong_slot_is_not_called_here() -> None:
    # The same question asked of the next slot crashes; that must happen in the child.
    report = selfcheck.prove({**TABLE, "allocator.slot.import_buffer": 7})
    assert not report.ok
    assert report.failure.startswith("in a child process, ")


@pytest.mark.parametrize(("memory_type", "usage", "access"), [(72, 76, 80), (80, 84, 88)])
def test_layouts_of_older_releases_are_refused(memory_type: int, usage: int, access: int, no_child: None) -> None:
    tails = {"buffer.memory_type": memory_type, "buffer.allowed_usage": usage, "buffer.allowed_access": access}
    report = selfcheck.prove({**TABLE, **tails})
    assert report.failure.startswith("buffers: layouts that fit")


@pytest.mark.parametrize(("index", "kind", "usage", "access"), [(0, 72, 76, 80), (1, 80, 84, 88)])
def test_buffers_of_older_releases_are_recognised(
    index: int, kind: int, usage: int, access: int, monkeypatch: pytest.MonkeyPatch, no_child: None
) -> None:
    read, head = subject.Subject.read, 104

    def older(self: subject.Subject, address: int, nbytes: int) -> bytes:
        """As if the last fields of a buffer lay where they once did."""
        found = bytearray(read(self, address, nbytes))
        if nbytes == head:
            fields = struct.unpack_from("<IIH", found, TABLE["buffer.memory_type"])
            found[TABLE["buffer.memory_type"] :] = bytes(head - TABLE["buffer.memory_type"])
            for offset, kind_of_field, field in zip((kind, usage, access), "IIH", fields, strict=True):
                struct.pack_into(f"<{kind_of_field}", found, offset, field)
        return bytes(found)

    monkeypatch.setattr(subject.Subject, "read", older)
    report = selfcheck.prove()
    assert report.failure.startswith(f"buffers: layouts that fit: [{index}] of those of 3.0, 3.1 to 3.3, ")


# ---- the child process -----------------------------------------------------------------------------


def test_a_crash_in_the_child_is_told() -> None:
    (proof,) = selfcheck.prove_in_child([{**TABLE, "callback.user_data": 0}])
    assert (proof.ok, proof.name, proof.detail) == (False, "trial", "ended by SIGSEGV")


def test_no_child_no_proof(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "missing"))
    assert [proof.ok for proof in selfcheck.prove_in_child([TABLE, TABLE])] == [False, False]
    assert not selfcheck.prove(version="3.99.0").ok


@pytest.mark.parametrize("script", ["#!/bin/sh\nexit 3\n", "#!/bin/sh\necho '[{}]'\n", "#!/bin/sh\necho oops\n"])
def test_a_child_that_says_something_else(script: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = tmp_path / "python"
    fake.write_text(script)
    fake.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(fake))
    (proof,) = selfcheck.prove_in_child([TABLE])
    assert not proof.ok


def test_the_child_does_not_import_torch() -> None:
    code = selfcheck.CHILD.replace("trial.main()", "assert 'torch' not in sys.modules, 'torch was imported'")
    arguments = [str(Path(selfcheck.__file__).parent), json.dumps(sys.path)]
    subprocess.run([sys.executable, "-c", code, *arguments], check=True)


# ---- reading -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("address", [0, 0x10, (1 << 47) - 8, 1 << 47, (1 << 63) + 8, (1 << 64) - 8, -8, 1 << 70])
def test_wild_addresses_raise(address: int) -> None:
    with pytest.raises(OSError, match=r"memory at|mapped at|error"):
        selfcheck.read_memory(address, 8)


def test_memory_is_read() -> None:
    content = bytes(range(64))
    whole = selfcheck.read_memory(id(content), sys.getsizeof(content))
    assert content in whole


@pytest.fixture
def examined() -> Iterator[subject.Subject]:
    with subject.Subject(TABLE) as made:
        yield made


@pytest.mark.parametrize("name", ["VmVariantList", "HalBufferView", "HalBuffer", "HalDevice", "HalAllocator"])
def test_an_uninitialised_instance_is_refused(name: str, examined: subject.Subject) -> None:
    cls = getattr(rt, name)
    with pytest.raises(subject.Refused, match="initialised"):
        examined.pointer_in(cls.__new__(cls))
