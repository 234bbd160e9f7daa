"""Shortcuts without parameters as convolutions: the same numbers, in fewer and faster nodes."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from edited import edited
from hypothesis import given
from hypothesis import strategies as st
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from torch import Tensor, nn
from untrained import with_statistics

from decomposition import FitOptions, Quantise, apply_plan, calibrate_ranges, make_plan
from rankrl.models.zoo import CifarResNet
from rankrl.onnx.export import export_network, export_onnx, quantise_onnx
from rankrl.onnx.export.graph_passes import convolve_subsampling, selects, store_selections
from rankrl.onnx.export.int8 import integer_nodes

SHAPE = (3, 16, 16)
END = np.iinfo(np.int64).max


def images(count: int = 8) -> Tensor:
    return torch.randn(count, *SHAPE, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def resnet(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Path]:
    """A ResNet with two shortcuts that subsample, and its file."""
    torch.manual_seed(0)
    model = with_statistics(CifarResNet(1, in_channels=3, num_classes=10))
    path = tmp_path_factory.mktemp("resnet") / "model.onnx"
    export_onnx(model, path, SHAPE, progress=False)
    return model, path


def computed(path: Path, x: Tensor) -> np.ndarray:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]


def run(model: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x})[0]


def slices(
    source: str, target: str, axis: int, step: int, start: int = 0, end: int = END
) -> tuple[onnx.NodeProto, list[onnx.TensorProto]]:
    names = [f"{target}_{what}" for what in ("start", "end", "axis", "step")]
    values = [
        numpy_helper.from_array(np.array([value]), name)
        for value, name in zip((start, end, axis, step), names, strict=True)
    ]
    return helper.make_node("Slice", [source, *names], [target], target), values


def shortcut(
    channels: int,
    size: tuple[int, int],
    strides: tuple[int, int],
    pads: tuple[int, ...],
    *,
    value: float = 0.0,
    mode: str = "constant",
    start: int = 0,
    end: int = END,
    kind: int = onnx.TensorProto.FLOAT,
) -> onnx.ModelProto:
    """Make a graph of two slices and a padding, as torch's exporter writes option A."""
    first, one = slices("x", "rows", 2, strides[0], start, end)
    second, two = slices("rows", "both", -1, strides[1])
    inputs = ["both", "pads", "value"]
    filled = numpy_helper.from_array(np.array(value, helper.tensor_dtype_to_np_dtype(kind)), "value")
    nodes = [first, second, helper.make_node("Pad", inputs, ["y"], "pad", mode=mode)]
    graph = helper.make_graph(
        nodes,
        "shortcut",
        [helper.make_tensor_value_info("x", kind, ("n", channels, *size))],
        [helper.make_tensor_value_info("y", kind, ("n", "c", "h", "w"))],
        [*one, *two, numpy_helper.from_array(np.array(pads), "pads"), filled],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


@given(data=st.data())
def test_convolution_gives_what_slices_and_padding_give(data: st.DataObject) -> None:
    draw = data.draw
    channels = draw(st.integers(1, 64))
    size = draw(st.tuples(st.integers(1, 9), st.integers(1, 9)))
    strides = draw(st.tuples(st.integers(1, 4), st.integers(1, 4)).filter(lambda each: max(each) > 1))
    before, after = draw(st.tuples(st.integers(0, 40), st.integers(0, 40)))
    model = shortcut(channels, size, strides, (0, before, 0, 0, 0, after, 0, 0))
    x = np.random.default_rng(0).standard_normal((2, channels, *size), dtype=np.float32)
    expected = ReferenceEvaluator(model).run(None, {"x": x})[0]
    edited(model, convolve_subsampling)
    onnx.checker.check_model(model, full_check=True)
    kinds = Counter(node.op_type for node in model.graph.node)
    assert kinds["Conv"] == 1
    assert kinds["Slice"] == kinds["Pad"] == 0
    np.testing.assert_array_equal(ReferenceEvaluator(model).run(None, {"x": x})[0], expected)
    assert edited(model, store_selections)
    assert [node.op_type for node in model.graph.node] == ["Conv"]
    np.testing.assert_array_equal(ReferenceEvaluator(model).run(None, {"x": x})[0], expected)


CHANNELS = (0, 2, 0, 0, 0, 2, 0, 0)


@pytest.mark.parametrize(
    "model",
    [
        shortcut(65, (4, 4), (2, 2), CHANNELS),
        shortcut(4, (4, 4), (1, 1), CHANNELS),
        shortcut(4, (4, 4), (2, 1), CHANNELS, start=1),
        shortcut(4, (4, 4), (2, 1), CHANNELS, end=3),
        shortcut(4, (4, 4), (2, 2), CHANNELS, kind=onnx.TensorProto.DOUBLE),
    ],
    ids=["many channels", "nothing skipped", "late start", "early end", "double"],
)
def test_what_is_no_subsampling_of_few_channels_stays(model: onnx.ModelProto) -> None:
    before = model.SerializeToString()
    assert edited(model, convolve_subsampling) == 0
    assert model.SerializeToString() == before


@pytest.mark.parametrize(
    "model",
    [
        shortcut(4, (4, 4), (2, 2), (0, 2, 1, 0, 0, 2, 0, 0)),
        shortcut(4, (4, 4), (2, 2), (0, -1, 0, 0, 0, 2, 0, 0)),
        shortcut(4, (4, 4), (2, 2), CHANNELS, value=1.0),
        shortcut(4, (4, 4), (2, 2), (0, 1, 0, 0, 0, 1, 0, 0), mode="reflect"),
    ],
    ids=["rows too", "fewer channels", "ones", "reflected"],
)
def test_padding_of_another_kind_stays_behind_the_convolution(model: onnx.ModelProto) -> None:
    x = np.random.default_rng(0).standard_normal((2, 4, 4, 4), dtype=np.float32)
    expected = run(model, x)
    assert edited(model, convolve_subsampling) == 1
    assert [node.op_type for node in model.graph.node][-2:] == ["Conv", "Pad"]
    np.testing.assert_array_equal(run(model, x), expected)


def test_what_others_read_between_the_slices_is_still_there() -> None:
    model = shortcut(4, (5, 5), (2, 2), CHANNELS)
    model.graph.output.append(helper.make_tensor_value_info("rows", onnx.TensorProto.FLOAT, list("abcd")))
    x = np.random.default_rng(0).standard_normal((2, 4, 5, 5), dtype=np.float32)
    expected = ReferenceEvaluator(model).run(None, {"x": x})
    edited(model, convolve_subsampling)
    for one, other in zip(ReferenceEvaluator(model).run(None, {"x": x}), expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_exported_resnet_copies_no_shortcut_and_computes_the_same(resnet: tuple[nn.Module, Path]) -> None:
    model, path = resnet
    graph = ir.load(path).graph
    assert not {"Slice", "Pad"} & {node.op_type for node in graph}
    assert sum(map(selects, graph)) == 2
    with torch.no_grad():
        expected = model(images()).numpy()
    np.testing.assert_allclose(computed(path, images()), expected, rtol=1e-4, atol=1e-5)


def test_weights_that_pick_channels_are_not_stored(resnet: tuple[nn.Module, Path]) -> None:
    model, path = resnet
    graph = onnx.load(path).graph
    floats = sum(
        each.data_type == onnx.TensorProto.FLOAT and len(each.dims) == 4 for each in graph.initializer
    )
    assert floats == sum(isinstance(module, nn.Conv2d) for module in model.modules())


def test_dense_network_in_integers_keeps_its_shortcuts_in_integers(
    resnet: tuple[nn.Module, Path], tmp_path: Path
) -> None:
    before = computed(resnet[1], images(64))
    path = quantise_onnx(resnet[1], tmp_path / "integers.onnx", [images(64).numpy()])
    graph = onnx.load(path).graph
    shortcuts = [node for node in graph.node if node.name.startswith("rankrl_select")]
    producers = {output: node.op_type for node in graph.node for output in node.output}
    readers = {name: node.op_type for node in graph.node for name in node.input}
    convs = [node for node in shortcuts if node.op_type == "Conv"]
    assert len(convs) == 2
    for conv in convs:
        assert {producers[name] for name in conv.input} == {"DequantizeLinear"}
        assert readers[conv.output[0]] == "QuantizeLinear"
    after = computed(path, images(64))
    assert np.corrcoef(before.ravel(), after.ravel())[0, 1] > 0.99


class Two(nn.Module):
    """Two convolutions beside a shortcut that subsamples, and one behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.one = nn.Conv2d(4, 8, 3, stride=2, padding=1)
        self.two = nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Conv2d(8, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem(x))
        y = self.two(torch.relu(self.one(x))) + F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 2, 2))
        return self.head(torch.relu(y))


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> ir.Model:
    """The file of `Two` with its weights stored, for all tests to read."""
    path = tmp_path_factory.mktemp("two") / "model.onnx"
    torch.manual_seed(0)
    export_onnx(Two().eval(), path, SHAPE, progress=False)
    model = ir.load(path)
    store_selections(model)
    return model


@pytest.mark.parametrize(
    ("layers", "integer"),
    [
        (["stem", "one", "two", "head"], True),
        (["one", "two"], True),  # the sum is in integers, and so is what the first reads
        (["one", "head"], False),  # the sum is not
        (["two", "head"], False),  # nothing rounds what the shortcut reads
        (["stem", "two"], True),
    ],
)
def test_shortcut_is_in_integers_where_both_its_ends_are(
    layers: list[str], integer: bool, two: ir.Model
) -> None:
    chosen = integer_nodes(two.graph, {f"{name}.weight" for name in layers})
    (conv,) = filter(selects, two.graph)
    assert (conv in chosen) == integer


def test_mixed_network_agrees_with_its_file(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, path = Two().eval(), tmp_path / "model.onnx"
    plan = make_plan(model, SHAPE, "cp", {"two": 8})
    entries = [replace(each, operations=(*each.operations, Quantise())) for each in plan]
    entries = [each if each.name in ("one", "two") else replace(each, operations=()) for each in entries]
    network = apply_plan(
        model, replace(plan, layers=tuple(entries)), calibration=images(64), options=FitOptions(iterations=5)
    ).eval()
    calibrate_ranges(network, [images(64)])
    export_network(network, path, SHAPE, [images(64).numpy()])
    assert not {"Slice", "Pad"} & {node.op_type for node in onnx.load(path).graph.node}
    with torch.no_grad():
        expected = network(images(64)).numpy()
    assert np.corrcoef(expected.ravel(), computed(path, images(64)).ravel())[0, 1] > 0.999
