"""Transposed convolutions as products and spreadings compute what torch's own compute, and decompose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from call_options import layer_options
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import rankrl
from decomposition import (
    PlainTransposed,
    apply_plan,
    compressible_layers,
    count_macs,
    factorised_layers,
    inspect_layers,
    load_compressed,
    make_plan,
    plain_transposed,
    save_compressed,
)
from decomposition.network.rounding import is_rounded
from rankrl.onnx.export import export_onnx


@st.composite
def transposed(draw: st.DrawFn) -> tuple[nn.ConvTranspose1d | nn.ConvTranspose2d, torch.Tensor]:
    """A transposed convolution and inputs to it."""
    spatial = draw(st.integers(1, 2))

    def axis(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(low, high)) for _ in range(spatial))

    kernel, stride, dilation, padding = axis(1, 4), axis(1, 3), axis(1, 2), axis(0, 1)
    more = tuple(draw(st.integers(0, step - 1)) for step in stride)
    kind: Any = nn.ConvTranspose1d if spatial == 1 else nn.ConvTranspose2d
    torch.manual_seed(0)
    layer = kind(
        draw(st.integers(1, 4)),
        draw(st.integers(1, 3)),
        kernel,
        stride,
        padding,
        more,
        bias=draw(st.booleans()),
        dilation=dilation,
    )
    return layer, torch.randn(draw(st.integers(1, 2)), layer.in_channels, *axis(3, 5))


@given(case=transposed())
def test_computes_what_torch_does(case: tuple[nn.ConvTranspose1d | nn.ConvTranspose2d, torch.Tensor]) -> None:
    layer, x = case
    plain = PlainTransposed(layer)
    torch.testing.assert_close(plain(x), layer(x), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(plain(x[0]), layer(x[0]), atol=1e-5, rtol=1e-4)


@given(case=transposed(), data=st.data())
def test_takes_an_output_size_as_torch_does(
    case: tuple[nn.ConvTranspose1d | nn.ConvTranspose2d, torch.Tensor], data: st.DataObject
) -> None:
    layer, x = case
    layer.output_padding = (0,) * len(layer.stride)
    least = layer(x).shape[2:]
    more = tuple(data.draw(st.integers(0, step)) for step in layer.stride)
    size = [low + each for low, each in zip(least, more, strict=True)]
    plain = PlainTransposed(layer)
    if all(each < step for each, step in zip(more, layer.stride, strict=True)):
        torch.testing.assert_close(plain(x, size), layer(x, size), atol=1e-5, rtol=1e-4)
    else:
        with pytest.raises(ValueError, match="output_size"):
            plain(x, size)
        with pytest.raises(ValueError, match="output"):
            layer(x, size)


def test_gradients_are_those_of_torch() -> None:
    torch.manual_seed(0)
    layer = nn.ConvTranspose2d(3, 4, 3, 2, 1)
    plain = PlainTransposed(layer)
    x = torch.randn(2, 3, 5, 5)
    layer(x).square().sum().backward()
    plain(x).square().sum().backward()
    mine, theirs = (dict(each.named_parameters()) for each in (plain, layer))
    rows, columns = mine["product.weight"].grad, theirs["weight"].grad
    assert rows is not None
    assert columns is not None
    torch.testing.assert_close(rows.flatten(1), columns.flatten(1).T, atol=1e-3, rtol=1e-4)
    torch.testing.assert_close(mine["bias"].grad, theirs["bias"].grad)


class Decoder(nn.Module):
    """From few positions to many, as behind an encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Conv2d(3, 12, 3, 2, 1)
        self.up = nn.ConvTranspose2d(12, 16, 4, 2, 1)
        self.grouped = nn.ConvTranspose2d(16, 8, 3, 1, 1, groups=2)
        self.last = nn.ConvTranspose2d(8, 3, 3, 2, 1, output_padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (N, 3, H, W) to (N, 3, 2 H, 2 W)."""
        return self.last(torch.relu(self.grouped(torch.relu(self.up(torch.relu(self.narrow(x)))))))


@pytest.fixture
def decoder() -> nn.Module:
    torch.manual_seed(0)
    return Decoder().eval()


def images(count: int = 16) -> torch.Tensor:
    return torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def test_only_what_can_be_is_made_plain(decoder: nn.Module) -> None:
    plain = plain_transposed(decoder)
    kinds = {name: type(module) for name, module in plain.named_children()}
    assert kinds["up"] is kinds["last"] is PlainTransposed
    assert kinds["grouped"] is nn.ConvTranspose2d
    assert type(decoder.up) is nn.ConvTranspose2d
    torch.testing.assert_close(plain(images()), decoder(images()))
    before, after = (inspect_layers(each, (3, 8, 8)) for each in (decoder, plain))
    assert "plain_transposed" in (before[1].refusal or "")
    assert [spec.macs for spec in after] == [spec.macs for spec in before]
    assert [spec.name for spec in after if spec.refusal is None] == ["narrow", "up.product", "last.product"]
    alone: nn.Module = nn.ConvTranspose1d(3, 4, 3)
    assert isinstance(plain_transposed(alone), PlainTransposed)
    wide: nn.Module = nn.ConvTranspose2d(3, 4, 3, stride=1, dilation=2, output_padding=1)
    assert isinstance(plain_transposed(wide), nn.ConvTranspose2d)


@pytest.mark.parametrize(
    ("name", "rank"), [("tucker", 4), ("cp", 4), ("tensor_train", 4), ("spatial_svd", 4), ("tensor_ring", 2)]
)
def test_decomposes_with_data(name: str, rank: int, decoder: nn.Module, tmp_path: Path) -> None:
    """The matrix of `up` has rank 4, which every format finds; a ring of two cores has its rank squared."""
    with torch.no_grad():
        decoder.get_parameter("up.weight").copy_(
            (torch.randn(12, 4) @ torch.randn(4, 256) / 10).reshape(12, 16, 4, 4)
        )
    plain = plain_transposed(decoder)
    errors = []
    for ranks in (rank // 2, rank):
        plan = make_plan(plain, (3, 8, 8), name, {"up.product": ranks})
        small = apply_plan(plain, plan, calibration=images())
        assert list(factorised_layers(small)) == ["up.product"]
        with torch.no_grad():
            found, expected = small(images()), decoder(images())
        errors.append(float((found - expected).norm() / expected.norm()))
    assert errors[0] > 0.01
    assert errors[1] < 1e-3
    save_compressed(small, plan, tmp_path / "small.safetensors")
    again, _ = load_compressed(plain, tmp_path / "small.safetensors")
    torch.testing.assert_close(again(images()), small(images()))


def test_is_exported_as_one_transposed_convolution_a_spreading(decoder: nn.Module, tmp_path: Path) -> None:
    plain = plain_transposed(decoder)
    small = apply_plan(plain, make_plan(plain, (3, 8, 8), "tucker", {"up.product": 4}), calibration=images())
    assert count_macs(small, (3, 8, 8)) < count_macs(plain, (3, 8, 8))
    for network, layers in ((plain, 1), (small, 2)):
        path = export_onnx(network, tmp_path / "network.onnx", (3, 8, 8), progress=False).path
        operators = [node.op_type for node in onnx.load(path).graph.node]
        assert operators.count("ConvTranspose") == 3
        assert operators.count("Conv") == layers
        assert set(operators) == {"Conv", "ConvTranspose", "Relu"}
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        (found,) = session.run(None, {session.get_inputs()[0].name: images().numpy()})
        np.testing.assert_allclose(found, network(images()).detach().numpy(), atol=1e-5)


def test_products_may_compute_in_integers(decoder: nn.Module, tmp_path: Path) -> None:
    plain = plain_transposed(decoder)
    plan = rankrl.search(
        plain,
        score=lambda network: -float((network(images()) - plain(images())).square().mean()),
        inputs=images(),
        bytes=0.9,
        selector="greedy",
        cache=None,
        progress=False,
        decomposition=layer_options(precisions=["int8"], skip=["narrow", "last", "grouped"]),
    ).plan
    small = apply_plan(plain, plan, calibration=images())
    assert is_rounded(small.get_submodule("up.product"))
    assert [spec.name for spec in compressible_layers(plain, (3, 8, 8))][1] == "up.product"
    torch.testing.assert_close(small(images()), plain(images()), atol=0.2, rtol=0.2)
