"""`verify_onnx` accepts the right file and refuses every other; `onnx_accuracy` counts right answers."""

import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from edited import edited
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

import rankrl
from decomposition.network.inputs import tensors_in
from rankrl.errors import ExportError
from rankrl.onnx.export import export_onnx, onnx_accuracy, verify_onnx
from rankrl.onnx.export.graph_passes import name_values
from rankrl.onnx.export.onnx_file import return_tensors_alone

SHAPE = (3, 8, 8)
Maker = Callable[[str], nn.Module]


@pytest.fixture
def exported(make: Maker, plain_file: Path, tmp_path: Path) -> tuple[nn.Module, Path]:
    return make("plain"), Path(shutil.copy(plain_file, tmp_path / "model.onnx"))


def test_a_changed_weight_is_found(exported: tuple[nn.Module, Path]) -> None:
    model, path = exported
    with torch.no_grad():
        next(model.parameters())[0] += 0.1
    with pytest.raises(ExportError, match="differs from the PyTorch model by"):
        verify_onnx(model, path, torch.randn(7, *SHAPE))


def test_a_weight_that_is_not_a_number_is_found(exported: tuple[nn.Module, Path]) -> None:
    model, path = exported
    proto = onnx.load(path)
    tensor = max(proto.graph.initializer, key=lambda t: int(np.prod(t.dims)))
    tensor.CopyFrom(numpy_helper.from_array(np.full(tuple(tensor.dims), np.nan, np.float32), tensor.name))
    onnx.save(proto, path)
    with pytest.raises(ExportError, match="differs from the PyTorch model by nan"):
        verify_onnx(model, path, torch.randn(7, *SHAPE))


def test_the_tolerance_grows_with_the_size_of_the_outputs(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(512, 8)
    with torch.no_grad():
        model.weight.mul_(1e5)
    export_onnx(model, tmp_path / "model.onnx", (512,))
    assert 1e-4 < verify_onnx(model, tmp_path / "model.onnx", torch.randn(7, 512)) < 10


def test_another_number_of_classes_is_found(exported: tuple[nn.Module, Path]) -> None:
    _, path = exported
    with pytest.raises(ExportError, match=r"returns \[\(1, 5\)\] for a batch of 1"):
        verify_onnx(nn.Sequential(nn.Flatten(), nn.Linear(192, 4)), path, torch.randn(7, *SHAPE))


def test_one_image_is_enough_and_none_is_refused(exported: tuple[nn.Module, Path]) -> None:
    model, path = exported
    assert verify_onnx(model, path, torch.randn(1, *SHAPE)) <= 1e-4
    with pytest.raises(ExportError, match="holds no image"):
        verify_onnx(model, path, torch.randn(0, *SHAPE))


def test_the_model_is_not_changed(exported: tuple[nn.Module, Path]) -> None:
    model, path = exported
    model.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    verify_onnx(model, path, torch.randn(7, *SHAPE))
    assert model.training
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("as_array", [np.asarray, torch.as_tensor])
def test_accuracy_is_the_share_of_right_answers(
    exported: tuple[nn.Module, Path], as_array: Callable[[Tensor], Tensor]
) -> None:
    model, path = exported
    images = torch.randn(50, *SHAPE)
    with torch.no_grad():
        labels = model.eval()(images).argmax(1)
    labels[:20] = (labels[:20] + 1) % 5
    batches = [(as_array(images[part]), as_array(labels[part])) for part in (slice(0, 33), slice(33, 50))]
    assert onnx_accuracy(path, batches) == 30 / 50


def test_accuracy_of_no_images_is_refused(exported: tuple[nn.Module, Path]) -> None:
    with pytest.raises(ExportError, match="no images"):
        onnx_accuracy(exported[1], [])


def test_images_of_another_shape_are_refused(exported: tuple[nn.Module, Path]) -> None:
    with pytest.raises(ExportError, match=r"takes tensor\(float\) of shape .* fails on float32"):
        onnx_accuracy(exported[1], [(np.zeros((2, 1, 8, 8), np.float32), np.zeros(2, np.int64))])


def test_a_missing_or_damaged_file_is_refused(exported: tuple[nn.Module, Path], tmp_path: Path) -> None:
    model, path = exported
    with pytest.raises(ExportError, match="there is no ONNX file"):
        verify_onnx(model, tmp_path / "other.onnx", torch.randn(7, *SHAPE))
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(ExportError, match="onnxruntime cannot load"):
        verify_onnx(model, path, torch.randn(7, *SHAPE))


IMAGES = torch.randn(3, 3, 6, 6, generator=torch.Generator().manual_seed(0))


class Detections(NamedTuple):
    boxes: torch.Tensor
    logits: Any


@dataclass
class Result:
    scores: torch.Tensor
    count: int
    hidden: torch.Tensor | None = None


OUTPUTS: dict[str, tuple[Any, list[str]]] = {
    "one tensor": (lambda x, y: y, ["output"]),
    "tuple": (lambda x, y: (y, y + 1), ["output_0", "output_1"]),
    "dict with a size": (lambda x, y: {"out": y, "size": x.shape[-2:], "batch": x.shape[0]}, ["out"]),
    "order of a dict": (lambda x, y: {"z": y, "a": y + 1, "name": "hi", "none": None}, ["z", "a"]),
    "named tuple": (
        lambda x, y: Detections(y, (y + 1, {"aux": y - 1})),
        ["boxes", "logits_0", "logits_1_aux"],
    ),
    "dataclass": (lambda x, y: Result(y, 3, y * 2), ["scores", "hidden"]),
    "one tensor twice": (lambda x, y: {"a": y, "b": y}, ["a", "b"]),
    "an input": (lambda x, y: {"x": x, "y": y}, ["x", "y"]),
    "names of values": (
        lambda x, y: {"relu": y + 1, "conv2d": torch.relu(y * 2), "mul": y},
        ["relu", "conv2d", "mul"],
    ),
    "name of a constant": (lambda x, y: {"scale": y + 1, "b": y}, ["output_0", "output_1"]),
    "name of the input": (lambda x, y: {"x": y}, ["x"]),
    "no identifiers": (lambda x, y: {"a b": y, "": y + 1}, ["output_0", "output_1"]),
    "names joined alike": (lambda x, y: {"a": [y], "a_0": y + 1}, ["output_0", "output_1"]),
}
RENAMED = {"name of a constant": ["scale", "b"]}
"""What the network calls outputs where its file has the name for something else."""


class Returning(nn.Module):
    """A network whose output is made of its input and of its features."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.scale, self.output = nn.Conv2d(3, 4, 3), nn.Parameter(torch.ones(4, 1, 1) / 2), output

    def forward(self, x: torch.Tensor) -> Any:
        return self.output(x, self.conv(x) * self.scale)


@pytest.mark.parametrize("kind", OUTPUTS)
def test_network_to_be_exported_returns_the_tensors_alone_with_their_names(kind: str) -> None:
    output, _ = OUTPUTS[kind]
    network = Returning(output).eval()
    expected = tensors_in(network(IMAGES))
    outputs = return_tensors_alone(network)
    found = tensors_in(network(IMAGES))
    assert outputs.names == RENAMED.get(kind, OUTPUTS[kind][1])
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize(
    "kind",
    [
        "dict with a size",
        "named tuple",
        "one tensor twice",
        "an input",
        "names of values",
        "name of the input",
        *RENAMED,
    ],
)
def test_file_returns_the_tensors_by_their_names(kind: str, tmp_path: Path) -> None:
    output, names = OUTPUTS[kind]
    network, path = Returning(output).eval(), tmp_path / "network.onnx"
    rankrl.export_onnx(network, path, (3, 6, 6))
    session = onnxruntime.InferenceSession(path)
    assert [each.name for each in session.get_outputs()] == names
    (name,) = (each.name for each in session.get_inputs())
    assert name == ("input" if "x" in names else "x")
    with torch.no_grad():
        expected = tensors_in(network(IMAGES))
    for found, tensor in zip(session.run(None, {name: IMAGES.numpy()}), expected, strict=True):
        np.testing.assert_allclose(found, tensor.numpy(), atol=1e-5)
    assert verify_onnx(network, path, IMAGES) < 1e-5


def test_outputs_with_names_of_several_inputs_are_numbered(tmp_path: Path) -> None:
    class Two(Returning):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
            return {"z": self.conv(x), "y": y}

    inputs = (IMAGES, IMAGES + 1)
    rankrl.export_onnx(Two(None).eval(), tmp_path / "two.onnx", inputs)
    graph = onnx.load(tmp_path / "two.onnx").graph
    assert [each.name for each in (*graph.input, *graph.output)] == ["x", "y", "output_0", "output_1"]


def test_names_and_free_axes_are_as_asked(tmp_path: Path) -> None:
    network, path = Returning(lambda x, y: {"z": y, "a": y + 1}).eval(), tmp_path / "network.onnx"
    free = {"x": {2: "height", 3: "width"}}
    rankrl.export_onnx(
        network, path, (3, 6, 6), input_names=["picture"], output_names=["conv2d", "b"], dynamic_axes=free
    )
    session = onnxruntime.InferenceSession(path)
    (entry,) = session.get_inputs()
    assert (entry.name, entry.shape) == ("picture", ["batch", 3, "height", "width"])
    images = torch.randn(2, 3, 9, 7)
    found = session.run(["conv2d", "b"], {"picture": images.numpy()})
    with torch.no_grad():
        for array, tensor in zip(found, tensors_in(network(images)), strict=True):
            np.testing.assert_allclose(array, tensor.numpy(), atol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"input_names": ["a", "b"]}, r"input_names=\['a', 'b'\] cannot be given to the inputs .* \['x'\]"),
        ({"output_names": ["scale", "b"]}, "none that a weight"),
        ({"dynamic_axes": {"y": {2: "height"}}}, "names the input 'y'; the forward takes x"),
        ({"dynamic_axes": {"x": {4: "height"}}}, "the axis 4 of 'x', which has 4"),
    ],
)
def test_names_and_axes_that_the_file_cannot_have_are_refused(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    network = Returning(lambda x, y: {"z": y, "a": y + 1})
    with pytest.raises(ExportError, match=message):
        rankrl.export_onnx(network, tmp_path / "network.onnx", (3, 6, 6), **options)


def test_what_is_no_tensor_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Sized(Returning):
        pass

    network = Sized(lambda x, y: {"out": y, "size": x.shape[-2:], "none": None, "kind": "map"})
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            rankrl.export_onnx(network, tmp_path / "network.onnx", (3, 6, 6))
    (message,) = [record.getMessage() for record in caplog.records]
    assert message == "the ONNX file of Sized returns tensors alone, not size (int), kind (str)"
    with pytest.raises(ExportError, match="Returning returns no tensor, but a dict"):
        rankrl.export_onnx(Returning(lambda x, y: {"n": 3}), tmp_path / "none.onnx", (3, 6, 6))


def test_values_inside_make_way_for_the_names_of_outputs() -> None:
    def value(name: str) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, [2])

    body = helper.make_graph([helper.make_node("Neg", ["a"], ["b"])], "body", [], [value("b")])
    other = helper.make_graph([helper.make_node("Identity", ["x"], ["c"])], "other", [], [value("c")])
    nodes = [
        helper.make_node("Abs", ["x"], ["a"]),
        helper.make_node("If", ["condition"], ["first"], then_branch=body, else_branch=other),
        helper.make_node("Add", ["a", "first"], ["second"]),
    ]
    inputs = [value("x"), helper.make_tensor_value_info("condition", TensorProto.BOOL, [])]
    graph = helper.make_graph(nodes, "graph", inputs, [value("first"), value("second")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    expected = None
    for names in (["first", "second"], ["a", "b"], ["second", "first"], ["b", "x"]):
        edited(model, lambda each, names=names: name_values(each.graph, each.graph.outputs, names))
        onnx.checker.check_model(model, full_check=True)
        feed = {"x": np.array([-1, 2], np.float32), "condition": np.array(True)}
        session = onnxruntime.InferenceSession(model.SerializeToString())
        found = session.run(None, feed)
        expected = found if expected is None else expected
        for before, after in zip(expected, found, strict=True):
            np.testing.assert_array_equal(before, after)
        kept = names if "x" not in names else ["second", "first"]  # inputs keep their names
        assert [each.name for each in session.get_outputs()] == kept
