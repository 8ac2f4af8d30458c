# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Zero-copy crossing between PyTorch tensors and the IREE runtime."""

__version__ = "0.1.0"
