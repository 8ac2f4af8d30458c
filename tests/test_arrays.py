# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""HalArray: what it shows, which interfaces it has, and who can adopt it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import iree_marshal as im
from iree_marshal.element_types import HAL_OF

pytestmark = pytest.mark.usefixtures("path")


def array_of(tensor: torch.Tensor) -> im.HalArray:
    (array,) = im.from_variant_list(im.to_variant_list([tensor]), as_arrays=True)
    assert isinstance(array, im.HalArray)
    return array


def test_attributes() -> None:
    tensor = torch.arange(12.0).reshape(3, 4)
    array = array_of(tensor)
    assert (array.shape, array.dtype, array.device) == ((3, 4), torch.float32, torch.device("cpu"))
    assert (array.nbytes, array.data_ptr, len(array)) == (48, tensor.data_ptr(), 3)
    assert repr(array) == f"HalArray(shape=(3, 4), dtype=float32, device=cpu, data_ptr={tensor.data_ptr():#x})"


def test_rank_0() -> None:
    array = array_of(torch.tensor(3.0))
    assert array.shape == ()
    assert array.torch().item() == 3.0
    with pytest.raises(TypeError, match="rank 0"):
        len(array)


@pytest.mark.parametrize("dtype", list(HAL_OF), ids=str)
def test_array_interface(dtype: torch.dtype) -> None:
    tensor = torch.ones(4).to(dtype)
    array = array_of(tensor)
    nameless = dtype is torch.bfloat16 or "float8" in str(dtype)
    assert hasattr(array, "__array_interface__") is not nameless
    assert not hasattr(array, "__cuda_array_interface__")
    if nameless:
        with pytest.raises(AttributeError, match=f"a HalArray of {dtype} on cpu has no __array_interface__"):
            getattr(array, "__array_interface__")  # noqa: B009
        return
    shown = np.asarray(array)
    assert shown.dtype == tensor.numpy().dtype
    assert np.array_equal(shown, tensor.numpy())
    assert shown.__array_interface__["data"][0] == tensor.data_ptr()


def test_empty_array_has_a_null_pointer() -> None:
    interface = array_of(torch.empty(0, 3)).__array_interface__
    assert interface["data"] == (0, False)
    assert interface["shape"] == (0, 3)


def test_adoption_shares_memory_and_keeps_it() -> None:
    tensor = torch.arange(16.0)
    array = array_of(tensor)
    adopted = [
        torch.from_dlpack(array),
        array.torch(),
        torch.from_numpy(np.from_dlpack(array)),
        torch.from_numpy(array.numpy()),
    ]
    del array
    tensor[3] = 42
    assert [view[3].item() for view in adopted] == [42.0] * 4


def test_dlpack_options() -> None:
    array = array_of(torch.arange(16.0))
    assert array.__dlpack_device__() == (1, 0)
    copied = torch.from_dlpack(array, copy=True)
    assert copied.data_ptr() != array.data_ptr


def test_bfloat16_has_no_numpy() -> None:
    with pytest.raises(TypeError, match="BFloat16"):
        array_of(torch.ones(4, dtype=torch.bfloat16)).numpy()
