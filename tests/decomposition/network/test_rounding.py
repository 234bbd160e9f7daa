"""Rounded layers compute what a runtime's integers do, where it rounds, and gradients pass."""

import copy
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from onnx.reference import ReferenceEvaluator
from onnxruntime.quantization.quant_utils import compute_scale_zp, quantize_data
from torch import nn
from torch.nn import functional as F

from decomposition import (
    CompressionPlan,
    DecompositionError,
    Quantise,
    apply_plan,
    calibrate_ranges,
    integer_layers,
    load_compressed,
    make_plan,
    rounded_parameters,
    save_compressed,
    without_rounding,
)
from decomposition.network.rounding import (
    ActivationRange,
    is_rounded,
    marked,
    round_weights,
    rounded_weight,
    settled,
    taken,
)


def quantised(*layers: nn.Module) -> nn.Sequential:
    """Layers in a row, all convolutions and linear ones in integers."""
    for layer in layers:
        if isinstance(layer, nn.Conv2d | nn.Linear):
            Quantise().round(layer)
    return nn.Sequential(*layers).eval()


@given(seed=st.integers(0, 100), bits=st.sampled_from([8, 7]))
def test_weights_are_rounded_as_onnxruntime_does(seed: int, bits: int) -> None:
    weight = torch.randn(5, 3, 3, generator=torch.Generator().manual_seed(seed))
    for row, expected in zip(rounded_weight(weight, bits), weight, strict=True):
        zero, scale, values = quantize_data(
            expected.numpy().ravel(), onnx.TensorProto.INT8, symmetric=True, reduce_range=bits == 7
        )
        assert zero == 0
        torch.testing.assert_close(row.flatten(), torch.tensor(values.astype(np.float32) * scale).flatten())


@given(seed=st.integers(0, 100), bits=st.sampled_from([8, 7, 4]))
def test_weights_become_integers_of_a_channels_scale(seed: int, bits: int) -> None:
    weight = torch.randn(5, 3, 3, generator=torch.Generator().manual_seed(seed))
    weight[0] = 0
    rounded, largest = rounded_weight(weight, bits), {8: 127, 7: 64, 4: 7}[bits]
    scale = weight.flatten(1).abs().amax(1)[1:, None, None] / largest
    integers = rounded[1:] / scale
    torch.testing.assert_close(integers, integers.round(), atol=1e-4, rtol=0)
    assert integers.abs().max() <= largest + 1e-4
    assert ((rounded - weight)[1:].abs() <= scale * 0.501).all()
    assert not rounded[0].any()
    torch.testing.assert_close(rounded_weight(rounded, bits), rounded)


def test_gradients_pass_as_if_nothing_were_rounded() -> None:
    weight = torch.randn(4, 6, requires_grad=True)
    factors = torch.randn(4, 6)
    (rounded_weight(weight, 4) * factors).sum().backward()
    torch.testing.assert_close(weight.grad, factors)


@given(low=st.floats(-20, 0), width=st.floats(0.1, 50))
def test_activations_are_rounded_as_the_standard_says(low: float, width: float) -> None:
    where = ActivationRange().eval()
    where.observing = True
    where(torch.tensor([low, low + width]))
    where.observing = False
    x = torch.linspace(low - 1, low + width + 1, 301)
    least, most = float(where.low), float(where.high)
    zero, scale = compute_scale_zp(np.float32(least), np.float32(most), *np.array([0, 255], dtype=np.uint8))
    nodes = [
        onnx.helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["q"]),
        onnx.helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["y"]),
    ]
    kinds = (("x", onnx.TensorProto.FLOAT, [None]), ("scale", onnx.TensorProto.FLOAT, []))
    entries = [
        onnx.helper.make_tensor_value_info(*each) for each in (*kinds, ("zero", onnx.TensorProto.UINT8, []))
    ]
    end = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [None])
    graph = onnx.helper.make_graph(nodes, "rounding", entries, [end])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 19)])
    given_values = {"x": x.numpy(), "scale": np.float32(scale), "zero": np.uint8(zero)}
    (expected,) = ReferenceEvaluator(model).run(None, given_values)
    # A value midway between two steps may go either way.
    assert np.abs(where(x).detach().numpy() - expected).max() <= 1.001 * scale
    assert np.mean(np.abs(where(x).detach().numpy() - expected) > 1e-3 * scale) < 0.02


def test_without_a_range_nothing_is_rounded() -> None:
    x = torch.randn(5)
    assert ActivationRange().eval()(x) is x


def test_a_convolution_is_rounded_behind_its_batch_norm_and_relu() -> None:
    torch.manual_seed(0)
    conv, norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
    network = quantised(conv, norm, nn.ReLU())
    x = torch.randn(8, 3, 6, 6)
    calibrate_ranges(network, [x])
    assert float(conv.output_range.low) == 0  # type: ignore[union-attr, arg-type]
    with torch.no_grad():
        outputs = network(x) * 1.0
    assert type(outputs) is torch.Tensor
    assert len(outputs.unique()) <= 256
    assert outputs.max() == pytest.approx(float(conv.output_range.high))  # type: ignore[union-attr, arg-type]


def test_a_sum_of_integers_is_taken_of_rounded_summands() -> None:
    torch.manual_seed(0)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.second(torch.relu(self.first(x)))
            y += x
            return y

    block = Block().eval()
    for layer in (block.first, block.second):
        Quantise().round(layer)
    x = torch.randn(32, 6)
    calibrate_ranges(block, [x])
    first, second = block.first, block.second
    hidden = torch.relu(nn.functional.linear(first.input_range(x), first.weight, first.bias))  # type: ignore[operator]
    linear = nn.functional.linear(second.input_range(hidden), second.weight, second.bias)  # type: ignore[operator]
    expected = second.output_range(linear) + first.input_range(x)  # type: ignore[operator]
    torch.testing.assert_close(block(x), expected)


def test_training_reaches_the_weights_through_the_rounding() -> None:
    torch.manual_seed(0)
    network = quantised(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2)
    ).train()
    before = network[4].output_range.high.clone()  # type: ignore[union-attr, operator]
    x = torch.randn(16, 3, 6, 6)
    calibrate_ranges(network, [x])
    optimizer = torch.optim.SGD(network.parameters(), lr=0.2)
    labels = (x[:, 0].mean((1, 2)) > 0).long()
    losses = []
    for _ in range(100):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(network(x), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    assert network[4].output_range.high > before  # type: ignore[union-attr, operator]


def test_what_is_taken_off_a_copy_stays_on_the_network() -> None:
    torch.manual_seed(0)
    network = quantised(nn.Conv2d(3, 4, 3), nn.ReLU())
    x = torch.randn(8, 3, 6, 6)
    calibrate_ranges(network, [x])
    expected = network(x) * 1
    plain = without_rounding(copy.deepcopy(network))
    assert not is_rounded(plain)
    assert not integer_layers(plain)
    assert type(plain[0]) is nn.Conv2d
    torch.testing.assert_close(plain[0].weight.detach(), network[0].weight.detach())  # type: ignore[union-attr, operator]
    assert set(integer_layers(network)) == {"0"}
    assert rounded_parameters(network) == {"0.weight": 8}
    torch.testing.assert_close(network(x) * 1, expected)


def test_ranges_and_weights_come_back_from_a_state_dict() -> None:
    torch.manual_seed(0)
    network = quantised(nn.Conv2d(3, 4, 3), nn.ReLU())
    x = torch.randn(8, 3, 6, 6)
    calibrate_ranges(network, [x])
    other = quantised(nn.Conv2d(3, 4, 3), nn.ReLU())
    other.load_state_dict(network.state_dict())
    torch.testing.assert_close(other(x) * 1, network(x) * 1)


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([], "at least one batch"),
        ([torch.zeros(2, 3)], r"layer '0': its inputs are 0 on all calibration inputs"),
        ([torch.full((2, 3), float("inf"))], r"layer '0': its inputs reach 0.0 to inf"),
        ([torch.full((2, 3), float("nan"))], r"layer '0': its inputs reach nan"),
    ],
)
def test_ranges_that_are_none_are_refused(batches: list[torch.Tensor], message: str) -> None:
    with pytest.raises(DecompositionError, match=message):
        calibrate_ranges(quantised(nn.Linear(3, 3)), batches)


def test_networks_without_integers_need_no_ranges() -> None:
    network = nn.Sequential(nn.Linear(3, 3))
    round_weights(network[0], 8)
    calibrate_ranges(network, [])
    assert is_rounded(network)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_activations_are_rounded_as_torch_rounds_them(
    dtype: torch.dtype, memory_format: torch.memory_format
) -> None:
    generator = torch.Generator().manual_seed(0)
    x = (3 * torch.randn(4, 8, 6, 6, generator=generator)).to(dtype).contiguous(memory_format=memory_format)
    where = ActivationRange().eval()
    where.low.fill_(-2.0)
    where.high.fill_(3.0)
    scale = torch.tensor(5.0 / 255)
    zero = torch.round(2.0 / scale).to(torch.int32)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    found = where(ours)
    expected = torch.fake_quantize_per_tensor_affine(theirs.float(), scale, zero, 0, 255).to(dtype)
    assert found.dtype == dtype
    assert found.stride() == x.stride()
    # A value half way between two levels may go either way: they multiply by 1 / scale.
    steps = (found - expected).float().abs() / scale
    assert float((steps > 0.5).float().mean()) < 0.01
    assert float(steps.max()) <= 1.05
    gradient = torch.randn(x.shape, generator=generator).to(dtype)
    found.backward(gradient)
    expected.backward(gradient)
    assert ours.grad is not None
    assert theirs.grad is not None
    assert torch.equal(ours.grad, theirs.grad.to(dtype))
    assert 0 < float((ours.grad == 0).float().mean()) < 1


class Residual(nn.Module):
    """A block whose sum is of integers, behind batch norms and activations of every spelling."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.first, self.act = nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(inplace=True)
        self.second, self.head = nn.Conv2d(16, 16, 3, padding=1), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = F.relu(self.norm(self.stem(x)))
        y = self.second(self.act(self.first(x)))
        x = (y + x).relu()
        return {"scores": self.head(F.adaptive_avg_pool2d(x, 1).flatten(1)), "map": self.second(x)}


class Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = torch.relu(self.first(x))
        return {"map": self.second(x) + x}


def in_integers(dense: nn.Module, x: torch.Tensor, ranks: dict[str, int]) -> CompressionPlan:
    plan = make_plan(dense, x, "tucker", ranks)
    layers = tuple(replace(e, operations=(*e.operations, Quantise()), reason=None) for e in plan.layers)
    return replace(plan, layers=layers)


@pytest.fixture(scope="module")
def network() -> nn.Module:
    torch.manual_seed(0)
    dense, x = Residual().eval(), torch.randn(40, 3, 8, 8)
    return apply_plan(dense, in_integers(dense, x, {"first": 6}), x)


@pytest.fixture(scope="module")
def small() -> nn.Module:
    torch.manual_seed(0)
    dense, x = Sum().eval(), torch.randn(8, 3, 8, 8)
    return apply_plan(dense, in_integers(dense, x, {}), x)


@pytest.mark.parametrize(
    ("name", "strict"),
    [("network", False), ("small", True), pytest.param("network", True, marks=pytest.mark.slow)],
)
def test_an_exported_network_computes_what_the_network_does(
    request: pytest.FixtureRequest, name: str, strict: bool
) -> None:
    network: nn.Module = request.getfixturevalue(name)
    x = torch.randn(5, 3, 8, 8)
    free = ({0: torch.export.Dim("batch")},)
    with torch.no_grad():
        program = torch.export.export(network, (x[:2],), dynamic_shapes=free, strict=strict)
        found, expected = program.module()(x), network(x)
        plain = without_rounding(copy.deepcopy(network))(x)
    for name, output in expected.items():
        torch.testing.assert_close(found[name], output + 0.0, rtol=0, atol=1e-6)
        assert type(found[name]) is torch.Tensor
        assert (found[name] - plain[name]).abs().max() > 1e-4


def test_a_loaded_network_is_exported_and_one_inside_of_another(network: nn.Module, tmp_path: Path) -> None:
    x = torch.randn(2, 3, 8, 8)
    dense = Residual().eval()
    plan = in_integers(dense, x, {"first": 6})
    save_compressed(network, plan, tmp_path / "small.safetensors", dense=dense)
    loaded = load_compressed(dense, tmp_path / "small.safetensors")[0].eval()

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = loaded

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)["scores"].softmax(1)

    with torch.no_grad():
        found = torch.export.export(Outer(), (x,)).module()(x)
    torch.testing.assert_close(found, network(x)["scores"].softmax(1).detach(), rtol=0, atol=1e-6)


def test_a_part_that_cannot_know_where_it_is_rounded_is_refused(small: nn.Module) -> None:
    with pytest.raises(DecompositionError, match="takes the whole network that apply_plan returned"):
        torch.export.export(small.first, (torch.randn(2, 3, 8, 8),), strict=False)  # type: ignore[arg-type]
    assert without_rounding(copy.deepcopy(small))._forward_hooks == {}
    torch.export.export(small, (torch.randn(2, 3, 8, 8),), strict=False)


def test_a_sum_of_integers_is_rounded_in_the_range_of_the_layer_that_takes_it_first() -> None:
    summands = [marked(torch.tensor([0.3]), lambda x, _: x.clone()) for _ in range(2)]
    total = summands[0] + summands[1]
    assert settled(total).item() == pytest.approx(0.6)  # nothing has taken it yet
    for where in (lambda x, _: x.ceil(), lambda x, _: x.floor()):
        assert type(taken(total, where)) is torch.Tensor
    assert settled(total).item() == 1
