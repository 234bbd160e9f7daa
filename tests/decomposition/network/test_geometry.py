"""How a layer slides over its input: one axis after the other is both at once."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from decomposition.network.patches import Geometry

PAIRS = st.tuples(st.integers(1, 3), st.integers(1, 3))


@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
@given(
    kernel=PAIRS,
    dilation=PAIRS,
    stride=PAIRS,
    padding=st.one_of(st.sampled_from(["same", "valid"]), st.tuples(st.integers(0, 2), st.integers(0, 2))),
    seed=st.integers(0, 100),
)
def test_a_separable_kernel_slides_along_one_axis_after_the_other(
    mode: str,
    kernel: tuple[int, int],
    dilation: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int] | str,
    seed: int,
) -> None:
    dense = nn.Conv2d(
        1,
        1,
        kernel,
        stride=(1, 1) if padding == "same" else stride,
        padding=padding,
        dilation=dilation,
        padding_mode=mode,  # type: ignore[arg-type]
        bias=False,
        dtype=torch.float64,
    )
    generator = torch.Generator().manual_seed(seed)
    columns, rows = (torch.randn(k, generator=generator, dtype=torch.float64) for k in kernel)
    with torch.no_grad():
        dense.weight.copy_(torch.outer(columns, rows))
    x = torch.randn(2, 1, 7, 8, generator=generator, dtype=torch.float64)
    geometry = Geometry.of(dense)
    first, second = geometry.along(0), geometry.along(1)
    assert (first.kernel_size, second.kernel_size) == ((kernel[0], 1), (1, kernel[1]))
    between = first.apply(x, columns.reshape(1, 1, -1), None)
    torch.testing.assert_close(second.apply(between, rows.reshape(1, 1, -1), None), dense(x))
