# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The benchmark: `python -m benchmarks` from the repository's root, see the README beside this file."""
