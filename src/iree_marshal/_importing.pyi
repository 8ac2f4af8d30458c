# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
from collections.abc import Iterable
from typing import Any

import torch

class Import: ...

def refuse_import_after(imports: int) -> None: ...
def to_variant_list(
    values: Iterable[Any],
    hal_device: Any,
    torch_device: torch.device | None,
    copy: bool | None,
    order: bool,
    upload: bool,
) -> Any: ...
