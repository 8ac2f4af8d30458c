# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What IREE itself does wrong in some of the supported releases, whoever calls it: with buffers of its own, too."""

from __future__ import annotations

from importlib.metadata import version

import pytest

# Of the runtime in use, as (major, minor).
RELEASE = tuple(int(part) for part in version("iree-base-runtime").split(".")[:2])

# Releases that wait on the host, inside the invocation, for the fence that lets the work begin.
WAITS_WITHIN_INVOCATION = RELEASE < (3, 12)

# Its interpreter takes the registers of a call to be aligned to 16 bytes, which they are not (iree-org/iree#22555).
CRASHES_ON_UNREAD_ARGUMENTS = pytest.mark.skipif(
    RELEASE < (3, 9), reason="IREE before 3.9 crashes in calls of programs that never read one of their tensors"
)
WRITES_INTO_ARGUMENTS = pytest.mark.skipif(
    RELEASE < (3, 13), reason="which arguments a program writes into is the compiler's choice; that of 3.13 is known"
)
# The memory that DLPack capsules bring: programs may not write into it without reading it.
NO_DISCARDING_WRITES = (3, 9) <= RELEASE < (3, 11)
TAKES_LOW_BYTES = RELEASE < (3, 10)  # of a float that is passed for an f32
NO_CONVERTED_SCALARS = pytest.mark.skipif(
    TAKES_LOW_BYTES, reason="IREE before 3.10 takes the low bytes of a float that is passed for an f32"
)
NO_STORAGE_OF_UNKNOWN_SIZE = pytest.mark.skipif(
    RELEASE == (3, 5), reason="the compiler of IREE 3.5 refuses storage for a result whose size is not known"
)
NO_F64_SCALARS = pytest.mark.skipif(RELEASE < (3, 5), reason="IREE 3.4 loads no function with f64 scalars")
