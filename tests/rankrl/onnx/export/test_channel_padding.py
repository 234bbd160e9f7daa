"""Channels filled up to what a processor computes at a time: the same outputs, less time."""

import copy
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from edited import edited
from hypothesis import example, given
from hypothesis import strategies as st
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from torch import Tensor, nn

from decomposition import FitOptions, Quantise, apply_plan, calibrate_ranges, factorised_layers, make_plan
from rankrl.device import channel_block
from rankrl.onnx.export import export_network, export_onnx, quantise_onnx
from rankrl.onnx.export.graph_passes import pad_channels, unpad_channels
from rankrl.onnx.graph.network import OnnxNetwork

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


def network(width: int, *inside: nn.Module, head: int | None = None) -> nn.Module:
    """Make a network with convolutions around some layers that keep the width."""
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1),
        nn.SiLU(),
        nn.MaxPool2d(2),
        *inside,
        *([] if head is None else [nn.Conv2d(width, head, 1)]),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(head or width, 10),
    ).eval()


def residual(width: int, inside: int, head: int | None = None) -> nn.Module:
    torch.manual_seed(0)
    return network(width, Block(width, inside), head=head)


def decomposed(model: nn.Module, name: str, ranks: dict[str, int]) -> nn.Module:
    small = apply_plan(model, make_plan(model, SHAPE, name, ranks), options=FitOptions(iterations=1)).eval()
    assert factorised_layers(small).keys() == ranks.keys()
    return small


def exported(model: nn.Module, path: Path, block: int = 1) -> onnx.ModelProto:
    export_onnx(model, path, SHAPE, channel_block=block, progress=False)
    return onnx.load(path)


def filled_up(model: onnx.ModelProto, block: int) -> onnx.ModelProto:
    padded = copy.deepcopy(model)
    assert edited(padded, pad_channels, block) > 0
    return padded


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> onnx.ModelProto:
    """The file of a residual network with 12 channels, 14 inside, for all tests to read."""
    return exported(residual(12, 14), tmp_path_factory.mktemp("residual") / "network.onnx")


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
    ("name", "rank", "filled"),
    [("cp", 6, {8: 8, 16: 16}), ("cp", 18, {16: 20}), ("tucker", 11, {16: 16}), ("spatial_svd", 6, {16: 6})],
)
def test_a_decomposed_network_computes_the_same(
    name: str, rank: int, filled: dict[int, int], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    dense = network(20, nn.Conv2d(20, 20, 3, padding=1), nn.ReLU())
    small, batch = decomposed(dense, name, {"3": rank}), images()
    plain = exported(small, tmp_path / "plain.onnx")
    expected = outputs(plain, batch)
    with torch.no_grad():
        np.testing.assert_allclose(expected, small(torch.from_numpy(batch)), rtol=1e-4, atol=1e-5)
    for block, channels in filled.items():
        padded = copy.deepcopy(plain)
        edited(padded, pad_channels, block)
        assert {shape[0] for shape in weights(padded)} == {20, channels}
        np.testing.assert_allclose(outputs(padded, batch), expected, rtol=1e-4, atol=1e-5)
        (reference,) = ReferenceEvaluator(padded).run(None, {padded.graph.input[0].name: batch})
        np.testing.assert_allclose(reference, expected, rtol=1e-4, atol=1e-5)


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


@example(width=12, inside=14, depthwise=False, bias=True, block=16)
@example(width=20, inside=5, depthwise=True, bias=False, block=16)
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
    edited(padded, pad_channels, block)
    onnx.checker.check_model(padded, full_check=True)
    np.testing.assert_allclose(outputs(padded, images()), outputs(plain, images()), rtol=1e-4, atol=1e-5)
    for before, after in zip(weights(plain), weights(padded), strict=True):
        for mine, new in zip(before[:2], after[:2], strict=True):
            assert new in (mine, max(block, -(-mine // 4) * 4))
    edited(padded, unpad_channels)
    assert padded.SerializeToString() == plain.SerializeToString()


def test_a_residual_stream_is_filled_up_as_a_whole(shared: onnx.ModelProto, tmp_path: Path) -> None:
    # What is pooled for the linear layer has the channels of the stream, so the stream stays.
    assert [shape[:2] for shape in weights(filled_up(shared, 16))] == [(12, 3), (16, 12), (12, 16)]
    padded = exported(residual(12, 14, head=32), tmp_path / "network.onnx", 16)
    assert [shape[:2] for shape in weights(padded)] == [(16, 3), (16, 16), (16, 16), (32, 16)]


Layer = tuple[int, ...] | tuple[str, dict[str, int]]
RELU: Layer = ("Relu", {})


def chain(*layers: Layer) -> onnx.ModelProto:
    """Make a file of one layer after the other: sizes of a convolution's weight, or an operator."""
    nodes, constants, channels = [], [], 3
    for position, layer in enumerate(layers):
        operands = [f"v{position}"]
        if isinstance(layer[0], str):
            kind, options = layer
            if kind == "Reshape":
                operands.append("sizes")
                constants.append(numpy_helper.from_array(np.array([0, 0, -1]), "sizes"))
            channels = channels // 4 if kind == "DepthToSpace" else channels
        else:
            kind, options = "Conv", {"group": channels // layer[1]}
            operands.append(f"w{position}")
            constants.append(numpy_helper.from_array(np.ones(layer, dtype=np.float32), operands[1]))
            channels = layer[0]
        nodes.append(helper.make_node(kind, operands, [f"v{position + 1}"], kind, **options))
    shapes = ["n", 3, 12, 12], [None] * (3 if ("Reshape", {}) in layers else 4)
    ends = [
        helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape)
        for name, shape in zip(("v0", f"v{len(layers)}"), shapes, strict=True)
    ]
    graph = helper.make_graph(nodes, "chain", ends[:1], ends[1:], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    onnx.checker.check_model(model, full_check=True)
    return model


@pytest.mark.parametrize(
    "layers",
    [
        pytest.param(((9, 3, 3, 3), RELU, (32, 9, 1, 1)), id="too few to pay"),
        pytest.param(((16, 3, 3, 3), RELU, (32, 16, 1, 1)), id="a whole block"),
        pytest.param(((20, 3, 3, 3), RELU, (32, 20, 1, 1)), id="rounded up by onnxruntime"),
        pytest.param(((19, 3, 3, 3), RELU, (32, 19, 1, 1)), id="too many zeros"),
        pytest.param(((4, 3, 3, 3), (4, 1, 3, 3), (32, 4, 1, 1)), id="depthwise, too few"),
        pytest.param(((12, 3, 3, 3), (12, 4, 3, 3), (32, 12, 1, 1)), id="grouped"),
        pytest.param(((12, 3, 3, 3), ("Softmax", {"axis": 1}), (32, 12, 1, 1)), id="adds over channels"),
        pytest.param(((12, 3, 3, 3), ("DepthToSpace", {"blocksize": 2}), (32, 3, 1, 1)), id="moves them"),
        pytest.param(((12, 3, 3, 3),), id="what the network returns"),
        pytest.param(((32, 3, 1, 1), ("Reshape", {}), (12, 32, 1), (32, 12, 1)), id="one axis"),
    ],
)
def test_what_gains_nothing_or_might_change_stays(layers: tuple[Layer, ...]) -> None:
    model = chain(*layers)
    before = model.SerializeToString()
    assert edited(model, pad_channels, 16) == 0
    assert model.SerializeToString() == before


def test_chains_are_filled_up_otherwise() -> None:
    for model in (
        chain((12, 3, 3, 3), RELU, (32, 12, 1, 1)),
        chain((5, 3, 3, 3), (5, 1, 3, 3), (32, 5, 1, 1)),
    ):
        assert {shape[0] for shape in weights(filled_up(model, 16))} == {16, 32}


def test_a_block_of_one_and_old_files_stay(shared: onnx.ModelProto) -> None:
    model = copy.deepcopy(shared)
    before = model.SerializeToString()
    assert edited(model, pad_channels, 1) == 0
    assert not edited(model, unpad_channels)
    assert model.SerializeToString() == before
    model.opset_import[0].version = 10
    assert edited(model, pad_channels, 16) == 0
    model.opset_import[0].version = 20
    assert edited(model, pad_channels, 16) == 1


def test_what_others_padded_stays_padded() -> None:
    model = graph_of(20, 12, depthwise=False, bias=True)
    pads = numpy_helper.from_array(np.array([0, 0, 0, 0, 0, 4, 0, 0]), "sizes")
    model.graph.initializer.append(pads)
    model.graph.node.insert(0, helper.make_node("Pad", ["input", "sizes"], ["wider"], "padded_0"))
    reading = next(node for node in model.graph.node if node.name == "first")
    reading.input[0] = "wider"
    before = model.SerializeToString()
    assert not edited(model, unpad_channels)
    edited(model, pad_channels, 16)
    assert edited(model, unpad_channels)
    assert model.SerializeToString() == before


def test_weights_are_stored_once_and_without_zeros(shared: onnx.ModelProto, tmp_path: Path) -> None:
    padded = exported(residual(12, 14), tmp_path / "network.onnx", 16)
    assert padded.graph == filled_up(shared, 16).graph
    stored = [{each.name: list(each.dims) for each in file.graph.initializer} for file in (shared, padded)]
    assert stored[0].items() <= stored[1].items()
    assert padded.ByteSize() - shared.ByteSize() < 150 * sum(n.op_type == "Pad" for n in padded.graph.node)


@pytest.mark.skipif(channel_block() != 16, reason="needs AVX-512")
def test_onnxruntime_computes_all_in_blocks(tmp_path: Path) -> None:
    small = decomposed(residual(32, 32), "cp", {"3.first": 6, "3.second": 18})
    path = tmp_path / "network.onnx"
    model = exported(small, path)

    def kinds() -> list[tuple[str, str]]:
        options = onnxruntime.SessionOptions()
        options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
        options.log_severity_level = 3
        onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        return [(node.domain, node.op_type) for node in onnx.load(tmp_path / "optimised.onnx").graph.node]

    plain = kinds()
    onnx.save(filled_up(model, 16), path)
    padded = kinds()
    assert {domain for domain, kind in padded if kind == "Conv"} == {"com.microsoft.nchwc"}
    assert ("", "Pad") not in padded  # done while the file is loaded
    # Nothing is taken out of the blocks before the last layer.
    assert padded.count(("com.microsoft.nchwc", "ReorderOutput")) <= 1
    assert plain.count(("com.microsoft.nchwc", "ReorderOutput")) > 1


def test_a_file_that_was_filled_up_is_quantised_like_the_plain_one(
    shared: onnx.ModelProto, tmp_path: Path
) -> None:
    files = {}
    for name, model in {"plain": shared, "padded": filled_up(shared, 16)}.items():
        path = tmp_path / f"{name}.onnx"
        onnx.save(model, path)
        files[name] = onnx.load(quantise_onnx(path, path, [images()]))
    assert sorted(map(str, files["plain"].graph.node)) == sorted(map(str, files["padded"].graph.node))
    assert outputs(files["plain"], images()).tolist() == outputs(files["padded"], images()).tolist()


def test_a_network_with_integers_is_filled_up_where_it_computes_in_floats(tmp_path: Path) -> None:
    model = residual(20, 12)
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


def test_the_file_can_be_compressed_again(shared: onnx.ModelProto, tmp_path: Path) -> None:
    path = tmp_path / "network.onnx"
    onnx.save(filled_up(shared, 16), path)
    nodes = OnnxNetwork.load(path).model.graph
    assert not any(node.op_type == "Pad" for node in nodes)
