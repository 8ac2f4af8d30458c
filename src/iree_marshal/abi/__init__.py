# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Declarations of foreign binary layouts: the IREE runtime, DLPack, libtorch. No logic."""
