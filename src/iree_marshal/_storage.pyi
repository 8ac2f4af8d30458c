# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
from iree_marshal.calling import Program
from iree_marshal.slab import Layout

class ResultStorage:
    def __init__(self, program: Program, layout: Layout | None) -> None: ...
