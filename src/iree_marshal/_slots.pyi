# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
from collections.abc import Mapping, Sequence

import iree.runtime as rt
import torch

from iree_marshal.signature import Value

class Binding:
    bound_tensors: dict[int, torch.Tensor]
    def __init__(
        self,
        values: Sequence[Value | None],
        storage: Mapping[int, int],
        bound: rt.VmVariantList,
        positions: tuple[int, ...],
        tensors: Mapping[int, torch.Tensor],
    ) -> None: ...

class NativeFrame:
    arguments: rt.VmVariantList
    results: rt.VmVariantList
    times: list[int]
