# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from iree_marshal.signature import Value

class Binding:
    def __new__(
        cls,
        values: Sequence[Value | None],
        storage: Mapping[int, int],
        bound: Any,
        positions: tuple[int, ...],
        tensors: Mapping[int, torch.Tensor],
    ) -> Binding: ...
    @property
    def bound_tensors(self) -> dict[int, torch.Tensor]: ...

class NativeFrame:
    @property
    def arguments(self) -> Any: ...
    @property
    def results(self) -> Any: ...
    @property
    def times(self) -> list[int]: ...
