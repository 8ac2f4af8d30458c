# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
from typing import Any

import torch

class Export: ...

class HeldBuffer:
    def as_tensor(self) -> torch.Tensor: ...

def from_variant_list(variants: Any, hal_device: Any, as_arrays: bool, shared: bool = False) -> list[Any]: ...
