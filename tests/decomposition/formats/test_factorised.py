"""A factorised layer equals the dense layer with its reconstructed weight."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from decomposition import DecompositionError, get_format, list_formats
from decomposition.formats.layers import ContractedLayer, FactorisedLayer
from decomposition.network.geometry import WeightModes
from decomposition.network.layers import LayerSpec, inspect_layers

FORMATS = [(name, False) for name in list_formats()]
FORMATS += [(name, True) for name in list_formats() if get_format(name).tensorisable]


def factorise_layer(
    dense: nn.Module, input_shape: tuple[int, ...], name: str, rank: int, *, tensorised: bool = False
) -> tuple[FactorisedLayer, LayerSpec, WeightModes, tuple[int, ...]]:
    """Build the layer that replaces `dense`, with random cores."""
    model = nn.Sequential(dense)
    spec = inspect_layers(model, input_shape)[0]
    assert spec.refusal is None
    tensor_format = get_format(name)
    modes = tensor_format.modes(spec, tensorised=tensorised)
    ranks = tensor_format.expand(modes, min(rank, tensor_format.max_rank(modes)))
    layer = tensor_format.build(dense, spec, modes, ranks)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(0)
    cores = [
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in tensor_format.core_shapes(modes, ranks)
    ]
    bias = None if layer.bias is None else torch.randn(layer.bias.shape, generator=generator)
    layer.load(cores, bias)
    return layer, spec, modes, ranks


def assert_same_outputs(layer: FactorisedLayer, x: torch.Tensor, tolerance: float) -> None:
    for training in (False, True):
        layer.train(training)
        with torch.no_grad():
            ours, dense = layer(x), layer.to_dense()(x)
        assert ours.shape == dense.shape
        assert (ours - dense).norm() <= tolerance * dense.norm()


@st.composite
def convolutions(draw: st.DrawFn) -> tuple[nn.Module, tuple[int, ...]]:
    """Draw a Conv1d or Conv2d and an input shape that it accepts."""
    spatial = draw(st.sampled_from([1, 2]))
    small = st.integers(1, 3)
    kernel = tuple(draw(small) for _ in range(spatial))
    dilation = tuple(draw(st.integers(1, 2)) for _ in range(spatial))
    padding: tuple[int, ...] | str = draw(
        st.one_of(st.sampled_from(["same", "valid"]), st.tuples(*[st.integers(0, 2)] * spatial))
    )
    stride = (1,) * spatial if padding == "same" else tuple(draw(small) for _ in range(spatial))
    mode = draw(st.sampled_from(["zeros", "reflect", "replicate", "circular"]))
    convolution = nn.Conv1d if spatial == 1 else nn.Conv2d
    inputs, outputs = draw(st.sampled_from([3, 4, 8])), draw(st.sampled_from([2, 6, 16]))
    layer = convolution(
        inputs,
        outputs,
        kernel,  # type: ignore[arg-type]
        stride=stride,  # type: ignore[arg-type]
        padding=padding,  # type: ignore[arg-type]
        dilation=dilation,  # type: ignore[arg-type]
        bias=draw(st.booleans()),
        padding_mode=mode,
    )
    return layer, (inputs, *(draw(st.integers(7, 9)) for _ in range(spatial)))


@pytest.mark.parametrize(("name", "tensorised"), FORMATS)
@given(drawn=convolutions(), rank=st.integers(1, 6), double=st.booleans())
def test_convolution_equals_dense_with_reconstructed_weight(
    name: str, tensorised: bool, drawn: tuple[nn.Module, tuple[int, ...]], rank: int, double: bool
) -> None:
    dense, shape = copy.deepcopy(drawn[0]), drawn[1]
    if double:
        dense.double()
    layer, _, _, _ = factorise_layer(dense, shape, name, rank, tensorised=tensorised)
    x = torch.randn(2, *shape, dtype=torch.float64 if double else torch.float32)
    assert_same_outputs(layer, x, 1e-10 if double else 1e-5)


@pytest.mark.parametrize(("name", "tensorised"), FORMATS)
@given(inputs=st.integers(1, 20), outputs=st.integers(1, 20), rank=st.integers(1, 5), bias=st.booleans())
def test_linear_equals_dense_with_reconstructed_weight(
    name: str, tensorised: bool, inputs: int, outputs: int, rank: int, bias: bool
) -> None:
    layer, _, _, _ = factorise_layer(
        nn.Linear(inputs, outputs, bias=bias), (5, inputs), name, rank, tensorised=tensorised
    )
    assert_same_outputs(layer, torch.randn(2, 5, inputs), 1e-5)


@pytest.mark.parametrize(("name", "tensorised"), FORMATS)
def test_every_execution_computes_the_same(name: str, tensorised: bool) -> None:
    dense = nn.Conv2d(8, 12, 3, 2, 1, bias=True).double()
    layer, spec, modes, ranks = factorise_layer(dense, (8, 9, 9), name, 3, tensorised=tensorised)
    x = torch.randn(2, 8, 9, 9, dtype=torch.float64)
    for execution in layer.tensor_format.stage_macs(spec, modes, ranks):
        if name in ("tensor_ring", "tensor_train"):
            other = ContractedLayer(dense, layer.tensor_format, modes, ranks, execution)
            other.load(layer.cores(), layer.bias)
            torch.testing.assert_close(other(x), layer(x), rtol=1e-10, atol=1e-10)


def test_ring_chains_while_that_is_cheaper_and_contracts_otherwise() -> None:
    executions = [
        factorise_layer(nn.Conv2d(64, 64, 3, padding=1), (64, 8, 8), "tensor_ring", rank)[0].execution
        for rank in (2, 8, 15)
    ]
    assert executions == ["chain", "chain", "dense"]


@pytest.mark.parametrize(
    ("channels", "name", "rank", "contracted"),
    [(16, "cp", 8, False), (16, "cp", 32, True), (64, "cp", 64, False), (64, "tucker", 16, False)],
)
def test_few_channels_of_high_rank_train_contracted(
    channels: int, name: str, rank: int, contracted: bool
) -> None:
    dense = nn.Conv2d(channels, channels, 3, padding=1).double()
    layer, *_ = factorise_layer(dense, (channels, 6, 6), name, rank)
    calls = []
    layer.reduce.register_forward_hook(lambda *_: calls.append(layer.training))  # type: ignore[union-attr]
    x = torch.randn(2, channels, 6, 6, dtype=torch.float64)
    gradients = []
    for training in (True, False):
        layer.train(training).zero_grad()
        layer(x).square().sum().backward()
        gradients.append([core.grad for core in layer.parameters()])
    assert calls == ([False] if contracted else [True, False])
    for trained, staged in zip(*gradients, strict=True):
        torch.testing.assert_close(trained, staged)


@pytest.mark.parametrize(("name", "tensorised"), FORMATS)
def test_gradients_reach_every_core(name: str, tensorised: bool) -> None:
    layer, _, _, _ = factorise_layer(nn.Conv2d(4, 6, 3), (4, 8, 8), name, 2, tensorised=tensorised)
    layer(torch.randn(2, 4, 8, 8)).square().sum().backward()
    assert all(p.grad is not None and bool((p.grad != 0).any()) for p in layer.parameters())


@pytest.mark.parametrize(("name", "tensorised"), FORMATS)
def test_the_products_norm_and_its_gradient_are_those_of_the_contracted_weight(
    name: str, tensorised: bool
) -> None:
    layer, *_ = factorise_layer(nn.Conv2d(16, 16, 3, padding=1), (16, 5, 5), name, 3, tensorised=tensorised)
    layer = layer.double()
    assert torch.allclose(layer.squared_norm(), layer.weight.square().sum())
    gradients = []
    for norm in (layer.squared_norm(), layer.weight.square().sum()):
        layer.zero_grad()
        norm.backward()
        gradients.append([core.grad for core in layer.parameters() if core.grad is not None])
    assert len(gradients[0]) >= 2
    for ours, expected in zip(*gradients, strict=True):
        assert torch.allclose(ours, expected)


def test_cores_of_another_shape_are_refused() -> None:
    layer, _, modes, _ = factorise_layer(nn.Conv2d(4, 6, 3, bias=False), (4, 8, 8), "tucker", 2)
    wrong = [torch.zeros(s) for s in layer.tensor_format.core_shapes(modes, (3, 2))]
    with pytest.raises(DecompositionError, match="need cores of shapes"):
        layer.load(wrong, None)
