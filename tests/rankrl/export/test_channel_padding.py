"""Channels filled up to what a processor computes at a time: the same outputs, less time."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from torch import Tensor, nn

from decomposition import Quantise, apply_plan, calibrate_ranges, factorised_layers, make_plan
from rankrl.device import channel_block
from rankrl.export import export_network, export_onnx, quantise_onnx
from rankrl.export.channel_padding import pad_channels, unpad_channels
from rankrl.onnx_graph.network import OnnxNetwork

SHAPE = (3, 12, 12)


class Block(nn.Module):
    """Two convolutions and what they are added to."""

    def __init__(self, width: int, inside: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, inside, 3, padding=1)
        self.norm = nn.BatchNorm2d(inside)
        self.second = nn.Conv2d(inside, width, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.second(torch.relu(self.norm(self.first(x)))))


def residual(width: int, inside: int, blocks: int = 2) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1),
        nn.SiLU(),
        nn.MaxPool2d(2),
        *(Block(width, inside) for _ in range(blocks)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(width, 10),
    ).eval()


def decomposed(model: nn.Module, name: str, rank: int) -> nn.Module:
    """Decompose the convolutions inside the blocks."""
    inner = [each for each, module in model.named_modules() if "." in each and isinstance(module, nn.Conv2d)]
    small = apply_plan(model, make_plan(model, SHAPE, name, dict.fromkeys(inner, rank))).eval()
    assert len(factorised_layers(small)) == len(inner)
    return small


def exported(model: nn.Module, path: Path, block: int = 1) -> onnx.ModelProto:
    export_onnx(model, path, SHAPE, channel_block=block, progress=False)
    return onnx.load(path)


def images(count: int = 4) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((count, *SHAPE), dtype=np.float32)


def outputs(model: onnx.ModelProto, batch: np.ndarray) -> np.ndarray:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (result,) = session.run(None, {session.get_inputs()[0].name: batch})
    return np.asarray(result)


def weights(model: onnx.ModelProto) -> list[tuple[int, ...]]:
    """Return the sizes of all convolutions' weights, the computed ones too."""
    inferred = onnx.shape_inference.infer_shapes(model, data_prop=True)
    shapes = {tensor.name: tuple(tensor.dims) for tensor in inferred.graph.initializer}
    for value in inferred.graph.value_info:
        shapes[value.name] = tuple(axis.dim_value for axis in value.type.tensor_type.shape.dim)
    return [shapes[node.input[1]] for node in inferred.graph.node if node.op_type == "Conv"]


@pytest.mark.parametrize(
    ("name", "rank", "block", "filled"),
    [
        ("cp", 6, 16, 16),
        ("cp", 18, 16, 20),
        ("cp", 6, 8, 8),
        ("tucker", 11, 16, 16),
        ("spatial_svd", 6, 16, 6),
    ],
)
def test_a_decomposed_network_computes_the_same(
    name: str, rank: int, block: int, filled: int, tmp_path: Path
) -> None:
    small = decomposed(residual(20, 20), name, rank)
    plain = exported(small, tmp_path / "plain.onnx")
    padded = copy.deepcopy(plain)
    pad_channels(padded, block)
    assert {shape[0] for shape in weights(padded)} == {20, filled}
    batch = images()
    expected = outputs(plain, batch)
    np.testing.assert_allclose(outputs(padded, batch), expected, rtol=1e-4, atol=1e-5)
    (reference,) = ReferenceEvaluator(padded).run(None, {padded.graph.input[0].name: batch})
    np.testing.assert_allclose(reference, expected, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        np.testing.assert_allclose(expected, small(torch.from_numpy(batch)), rtol=1e-4, atol=1e-5)


def graph_of(width: int, inside: int, *, depthwise: bool, bias: bool) -> onnx.ModelProto:
    """Make a file of convolutions around a residual one, faster than a network is exported."""
    nodes, constants, generator = [], [], np.random.default_rng(0)

    def constant(name: str, *shape: int) -> str:
        values = 0.2 * generator.standard_normal(shape, dtype=np.float32)
        constants.append(numpy_helper.from_array(values, name))
        return name

    def convolution(x: str, y: str, entering: int, leaving: int, group: int = 1) -> str:
        operands = [x, constant(f"{y}.weight", leaving, entering // group, 3, 3)]
        operands += [constant(f"{y}.bias", leaving)] if bias else []
        nodes.append(helper.make_node("Conv", operands, [y], y, pads=[1, 1, 1, 1], group=group))
        return y

    x = convolution("input", "first", 3, width)
    nodes.append(helper.make_node("Relu", [x], ["active"]))
    x = convolution("active", "inner", width, inside)
    if depthwise:
        x = convolution(x, "depthwise", inside, inside, inside)
    nodes.append(helper.make_node("Sigmoid", [x], ["gate"]))
    convolution("gate", "outer", inside, width)
    nodes.append(helper.make_node("Add", ["active", "outer"], ["sum"]))
    convolution("sum", "output", width, 5)
    ends = [
        [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["n", channels, 12, 12])]
        for name, channels in (("input", 3), ("output", 5))
    ]
    graph = helper.make_graph(nodes, "residual", *ends, constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


@settings(max_examples=60, deadline=None)
@given(
    width=st.integers(1, 36),
    inside=st.integers(1, 36),
    depthwise=st.booleans(),
    bias=st.booleans(),
    block=st.sampled_from([4, 8, 16]),
)
def test_any_widths_compute_the_same(
    width: int, inside: int, depthwise: bool, bias: bool, block: int
) -> None:
    plain = graph_of(width, inside, depthwise=depthwise, bias=bias)
    padded = copy.deepcopy(plain)
    pad_channels(padded, block)
    onnx.checker.check_model(padded, full_check=True)
    np.testing.assert_allclose(outputs(padded, images()), outputs(plain, images()), rtol=1e-4, atol=1e-5)
    for before, after in zip(weights(plain), weights(padded), strict=True):
        for mine, new in zip(before[:2], after[:2], strict=True):
            assert new in (mine, max(block, -(-mine // 4) * 4))
    unpad_channels(padded)
    assert padded.SerializeToString() == plain.SerializeToString()


def test_a_residual_stream_is_filled_up_as_a_whole(tmp_path: Path) -> None:
    padded = exported(residual(12, 14), tmp_path / "network.onnx", 16)
    (first, *between) = weights(padded)
    # What is pooled for the linear layer has the channels of the stream, so the stream stays.
    assert first[:2] == (12, 3)
    assert [shape[:2] for shape in between] == [(16, 12), (12, 16)] * 2
    model = residual(12, 14)
    model = nn.Sequential(*model[:5], nn.Conv2d(12, 32, 1), *model[5:7], nn.Linear(32, 10)).eval()
    padded = exported(model, tmp_path / "network.onnx", 16)
    assert [shape[:2] for shape in weights(padded)] == [(16, 3), *[(16, 16)] * 4, (32, 16)]


@pytest.mark.parametrize(
    "layers",
    [
        [nn.Conv2d(3, 9, 3), nn.ReLU(), nn.Conv2d(9, 32, 1)],  # too few to pay
        [nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 1)],  # a whole block
        [nn.Conv2d(3, 20, 3), nn.ReLU(), nn.Conv2d(20, 32, 1)],  # rounded up by onnxruntime
        [nn.Conv2d(3, 19, 3), nn.ReLU(), nn.Conv2d(19, 32, 1)],  # too many zeros
        [nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3, groups=4), nn.Conv2d(4, 32, 1)],  # depthwise, too few
        [nn.Conv2d(3, 12, 3), nn.Conv2d(12, 12, 3, groups=3), nn.Conv2d(12, 32, 1)],  # grouped
        [nn.Conv2d(3, 12, 3), nn.Softmax(1), nn.Conv2d(12, 32, 1)],  # what adds over channels
        [nn.Conv2d(3, 12, 3), nn.PixelShuffle(2), nn.Conv2d(3, 32, 1)],  # what moves them
        [nn.Conv2d(3, 12, 3)],  # what the network returns
        [nn.Conv2d(3, 32, 1), nn.Flatten(2), nn.Conv1d(32, 12, 1), nn.Conv1d(12, 32, 1)],  # one axis
    ],
)
def test_what_gains_nothing_or_might_change_stays(layers: list[nn.Module], tmp_path: Path) -> None:
    model = exported(nn.Sequential(*layers).eval(), tmp_path / "network.onnx")
    before = model.SerializeToString()
    assert pad_channels(model, 16) == 0
    assert model.SerializeToString() == before


def test_a_block_of_one_and_old_files_stay(tmp_path: Path) -> None:
    model = exported(residual(20, 12), tmp_path / "network.onnx")
    before = model.SerializeToString()
    assert pad_channels(model, 1) == 0
    assert not unpad_channels(model)
    assert model.SerializeToString() == before
    model.opset_import[0].version = 10
    assert pad_channels(model, 16) == 0
    model.opset_import[0].version = 20
    assert pad_channels(model, 16) == 2


def test_what_others_padded_stays_padded() -> None:
    model = graph_of(20, 12, depthwise=False, bias=True)
    pads = numpy_helper.from_array(np.array([0, 0, 0, 0, 0, 4, 0, 0]), "sizes")
    model.graph.initializer.append(pads)
    model.graph.node.insert(0, helper.make_node("Pad", ["input", "sizes"], ["wider"], "padded_0"))
    reading = next(node for node in model.graph.node if node.name == "first")
    reading.input[0] = "wider"
    before = model.SerializeToString()
    assert not unpad_channels(model)
    pad_channels(model, 16)
    assert unpad_channels(model)
    assert model.SerializeToString() == before


def test_weights_are_stored_once_and_without_zeros(tmp_path: Path) -> None:
    model, path = residual(20, 12), tmp_path / "network.onnx"
    plain, padded = exported(model, path), exported(model, path, 16)
    stored = [{each.name: list(each.dims) for each in file.graph.initializer} for file in (plain, padded)]
    assert stored[0].items() <= stored[1].items()
    assert padded.ByteSize() - plain.ByteSize() < 150 * sum(n.op_type == "Pad" for n in padded.graph.node)


@pytest.mark.skipif(channel_block() != 16, reason="needs AVX-512")
@pytest.mark.parametrize("rank", [6, 18])
def test_onnxruntime_computes_all_in_blocks(rank: int, tmp_path: Path) -> None:
    small = decomposed(residual(32, 32), "cp", rank)

    def kinds(block: int) -> list[tuple[str, str]]:
        exported(small, tmp_path / "network.onnx", block)
        options = onnxruntime.SessionOptions()
        options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
        options.log_severity_level = 3
        onnxruntime.InferenceSession(tmp_path / "network.onnx", options, providers=["CPUExecutionProvider"])
        return [(node.domain, node.op_type) for node in onnx.load(tmp_path / "optimised.onnx").graph.node]

    plain, padded = kinds(1), kinds(16)
    assert {domain for domain, kind in padded if kind == "Conv"} == {"com.microsoft.nchwc"}
    assert ("", "Pad") not in padded  # done while the file is loaded
    # Nothing is taken out of the blocks before the last layer.
    assert padded.count(("com.microsoft.nchwc", "ReorderOutput")) <= 1
    assert plain.count(("com.microsoft.nchwc", "ReorderOutput")) > 1


def test_a_file_that_was_filled_up_is_quantised_like_the_plain_one(tmp_path: Path) -> None:
    model, files = residual(20, 12), {}
    for block in (1, 16):
        path = tmp_path / f"{block}.onnx"
        exported(model, path, block)
        files[block] = onnx.load(quantise_onnx(path, path, [images()]))
    assert sorted(map(str, files[1].graph.node)) == sorted(map(str, files[16].graph.node))
    assert outputs(files[1], images()).tolist() == outputs(files[16], images()).tolist()


def test_a_network_with_integers_is_filled_up_where_it_computes_in_floats(tmp_path: Path) -> None:
    model = residual(20, 12, blocks=1)
    plan = make_plan(model, SHAPE, "cp", {"3.second": 12})
    entries = [replace(e, operations=(Quantise(),)) if e.name == "3.first" else e for e in plan]
    small = apply_plan(model, replace(plan, layers=tuple(entries))).eval()
    calibrate_ranges(small, [torch.from_numpy(images())])
    path = tmp_path / "network.onnx"
    export_network(small, path, SHAPE, [images()], channel_block=16)
    file = onnx.load(path)
    kinds = [node.op_type for node in file.graph.node]
    assert (kinds.count("Conv"), kinds.count("Pad")) == (5, 3)  # two depthwise ones, and two that read ranks
    assert "QuantizeLinear" in kinds
    batch = images()
    with torch.no_grad():
        expected = small(torch.from_numpy(batch)).numpy()
    np.testing.assert_allclose(outputs(file, batch), expected, atol=0.05)


def test_the_file_can_be_compressed_again(tmp_path: Path) -> None:
    path = tmp_path / "network.onnx"
    exported(residual(20, 12), path, 16)
    nodes = OnnxNetwork.load(path).model.graph.node
    assert not any(node.op_type == "Pad" for node in nodes)
