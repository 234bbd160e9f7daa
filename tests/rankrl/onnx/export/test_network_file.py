"""Networks with integers in their ONNX files: the nodes that were chosen, and what PyTorch computes."""

from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from torch import nn

from decomposition import (
    CompressionPlan,
    Factorise,
    FitOptions,
    LayerPlan,
    Operation,
    Quantise,
    apply_plan,
    fingerprint,
    inspect_layers,
    integer_layers,
    plain_transposed,
)
from rankrl.errors import ExportError
from rankrl.onnx.export import class_agreement, export_network, export_onnx, verify_onnx
from rankrl.onnx.export.int8 import integer_nodes
from rankrl.onnx.export.static_quantiser import as_in_file, integer_bits, runnable
from rankrl.onnx.runtimes import open_session

SHAPE = (3, 8, 8)
WEIGHTS = Quantise(8, "float32")


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.first = nn.Conv2d(16, 16, 3, padding=1)
        self.second = nn.Conv2d(16, 16, 3, padding=1, bias=False)
        self.after = nn.BatchNorm2d(16)
        self.head = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.stem(x)))
        y = self.after(self.second(torch.relu(self.first(x))))
        y = torch.relu(y + x)
        return self.head(y.mean((2, 3)))


@pytest.fixture(scope="module")
def dense() -> nn.Module:
    torch.manual_seed(0)
    model = Residual()
    model.train()
    for _ in range(5):  # statistics that are not trivial
        model(torch.randn(32, *SHAPE))
    return model.eval()


def images(count: int = 64, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, *SHAPE, generator=torch.Generator().manual_seed(seed))


def applied(dense: nn.Module, **operations: tuple[Operation, ...]) -> nn.Module:
    specs = inspect_layers(dense, SHAPE)
    layers = tuple(LayerPlan(spec.name, operations.get(spec.name, ())) for spec in specs)
    plan = CompressionPlan(layers, fingerprint(specs), SHAPE)
    return apply_plan(dense, plan, images(), options=FitOptions(iterations=5))


def exported(network: nn.Module, path: Path) -> onnx.ModelProto:
    export_network(network, path, SHAPE, [images().numpy()])
    return onnx.load(path)


@pytest.fixture(scope="module")
def float_file(dense: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The dense network's file, for all tests to read."""
    return export_onnx(dense, tmp_path_factory.mktemp("float") / "float.onnx", SHAPE).path


ALL = {name: (Quantise(),) for name in ("stem", "first", "second", "head")}
MIXED = {**ALL, "first": (Factorise("cp", (12,)), Quantise()), "second": (Factorise("tucker", (8, 8)),)}
OPERATIONS: dict[str, dict[str, tuple[Operation, ...]]] = {"all": ALL, "mixed": MIXED}
Written = tuple[nn.Module, Path]


@pytest.fixture(scope="module")
def in_integers(dense: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Written]:
    """Return the network with `all` or `mixed` operations, and its file, for all tests to read."""

    @cache
    def written(name: str) -> Written:
        network, path = applied(dense, **OPERATIONS[name]), tmp_path_factory.mktemp(name) / "model.onnx"
        exported(network, path)
        return network, path

    return written


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_file_computes_what_the_simulation_does(
    dense: nn.Module, name: str, in_integers: Callable[[str], Written]
) -> None:
    network, path = in_integers(name)
    inputs = images(400, seed=3)
    found = open_session(path).run(inputs.numpy())[0]
    with torch.no_grad():
        expected, floats = (network(inputs) * 1).numpy(), dense(inputs).numpy()
    scale = np.abs(floats).max()
    assert np.abs(found - expected).mean() < 0.02 * scale
    pairs = [(inputs, inputs)]
    assert class_agreement(network, path, pairs) > 0.95
    assert class_agreement(dense, path, pairs) < 1 or name == "all"


def test_the_file_of_seven_bits_computes_what_the_reduced_simulation_does(
    dense: nn.Module, in_integers: Callable[[str], Written], tmp_path: Path
) -> None:
    network, _ = in_integers("mixed")
    path = tmp_path / "seven.onnx"
    export_network(network, path, SHAPE, [images().numpy()], reduce_range=True)
    inputs = images(400, seed=3)
    found = open_session(path).run(inputs.numpy())[0]
    reduced = as_in_file(network, True, [images()])
    assert as_in_file(network, False) is network
    assert as_in_file(dense, True) is dense
    with torch.no_grad():
        expected, full = ((each(inputs) * 1).numpy() for each in (reduced, network))
    assert np.median(np.abs(found - expected)) < 0.5 * np.median(np.abs(found - full))


def test_weights_of_seven_bits_in_the_plan_are_those_of_the_file(dense: nn.Module, tmp_path: Path) -> None:
    seven = {name: (*each[:-1], Quantise(7)) for name, each in ALL.items()}
    network = applied(dense, **seven)
    assert as_in_file(network, None) is as_in_file(network, False) is network
    path = tmp_path / "seven.onnx"
    export_network(network, path, SHAPE, [images().numpy()], reduce_range=False)
    integers = {
        tensor.name: onnx.numpy_helper.to_array(tensor)
        for tensor in onnx.load(path).graph.initializer
        if tensor.data_type == onnx.TensorProto.INT8 and len(tensor.dims) > 1
    }
    assert len(integers) == len(ALL)
    for name, layer in integer_layers(network).items():
        weight = layer.weight.detach().numpy()
        rows = weight.reshape(len(weight), -1)
        expected = np.rint(rows / np.abs(rows).max(1, keepdims=True) * 64)
        found = next(each for key, each in integers.items() if key.startswith(f"{name}."))
        np.testing.assert_array_equal(found.reshape(expected.shape), expected)


def test_where_some_weights_have_seven_bits_all_get_them(dense: nn.Module) -> None:
    network = applied(dense, **{**ALL, "head": (Quantise(7),)})
    assert integer_bits(network) == {7, 8}
    assert integer_bits(as_in_file(network, False)) == {7}
    assert integer_bits(network) == {7, 8}


@pytest.mark.parametrize(
    ("precisions", "reduce_range", "expected"),
    [
        (("float32", "int8"), True, ("float32", "int7")),
        (("int8", "int7"), True, ("int7",)),
        (("float32", "int8"), False, ("float32", "int8")),
        (("float32", "int8_weights"), True, ("float32", "int8_weights")),
    ],
)
def test_precisions_are_those_that_the_file_may_have(
    precisions: tuple[str, ...], reduce_range: bool, expected: tuple[str, ...]
) -> None:
    assert runnable(precisions, reduce_range) == expected


def test_without_an_answer_the_processor_decides_on_precisions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rankrl.onnx.export.static_quantiser.sums_overflow", lambda: True)
    assert runnable(["int8"]) == ("int7",)
    monkeypatch.setattr("rankrl.onnx.export.static_quantiser.sums_overflow", lambda: False)
    assert runnable(["int8"]) == ("int8",)


def test_what_was_chosen_is_in_integers_and_nothing_else(in_integers: Callable[[str], Written]) -> None:
    graph = onnx.load(in_integers("mixed")[1]).graph
    producers = {output: node for node in graph.node for output in node.output}
    integer, floats = set(), set()
    for node in graph.node:
        if node.op_type in ("Conv", "Gemm"):
            sources = [producers[name].op_type for name in node.input[:2] if name in producers]
            (integer if sources == ["DequantizeLinear"] * 2 else floats).add(node.name)
    assert (len(integer), len(floats)) == (1 + 3 + 1, 3)


def test_no_pair_of_conversions_does_nothing(in_integers: Callable[[str], Written]) -> None:
    graph = onnx.load(in_integers("all")[1]).graph
    consumers: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.node:
        for name in node.input:
            consumers.setdefault(name, []).append(node)
    for node in graph.node:
        if node.op_type == "DequantizeLinear":
            after = [each.op_type for each in consumers.get(node.output[0], [])]
            assert after != ["QuantizeLinear"], node.name
    kinds = Counter(node.op_type for node in graph.node)
    # Three rounded tensors in the body, the input, the sum, the mean and the scores.
    assert kinds["QuantizeLinear"] <= 7
    assert "Relu" not in kinds


def test_a_sum_is_integer_where_both_summands_are(float_file: Path) -> None:
    graph = ir.load(float_file).graph

    def chosen(*names: str) -> Counter[str]:
        return Counter(node.op_type for node in integer_nodes(graph, {f"{each}.weight" for each in names}))

    assert chosen("stem", "first", "second") == Counter(Conv=3, Relu=3, Add=1)
    assert chosen("stem", "second")["Add"] == 1
    assert chosen("first", "second")["Add"] == 1  # the other summand is rounded for the first
    assert chosen("stem")["Add"] == 0
    assert chosen("first") == Counter(Conv=1, Relu=1)
    with pytest.raises(ExportError, match=r"the weight 'none.weight' belongs to no convolution"):
        integer_nodes(graph, {"none.weight"})


@pytest.mark.parametrize("bits", [8, 4])
def test_weights_alone_are_stored_in_integers(
    dense: nn.Module, float_file: Path, bits: int, tmp_path: Path
) -> None:
    rounded = Quantise(bits, "float32")
    network = applied(
        dense,
        stem=(rounded,),
        first=(Factorise("cp", (12,)), rounded),
        second=(Factorise("tensor_ring", (6, 4, 4)), rounded),
    )
    model = exported(network, tmp_path / "model.onnx")
    inputs = images(7, seed=5)
    found = open_session(tmp_path / "model.onnx").run(inputs.numpy())[0]
    with torch.no_grad():
        np.testing.assert_allclose(found, network(inputs).numpy(), atol=1e-4)
    kind = onnx.TensorProto.INT8 if bits == 8 else onnx.TensorProto.INT4
    stored = [tensor for tensor in model.graph.initializer if tensor.data_type == kind]
    assert len(stored) == 1 + 3 + 3
    assert (tmp_path / "model.onnx").stat().st_size < float_file.stat().st_size


def test_transposed_convolutions_are_stored_in_integers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    network = plain_transposed(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.ConvTranspose2d(8, 4, 4, 2)))
    rounded = applied(network.eval(), **{"2.product": (WEIGHTS,)})
    file = exported(rounded, tmp_path / "model.onnx")
    kinds = [tensor.data_type for tensor in file.graph.initializer if len(tensor.dims) > 1]
    assert kinds.count(onnx.TensorProto.INT8) == 1
    inputs = images(8)
    found = open_session(tmp_path / "model.onnx").run(inputs.numpy())[0]
    with torch.no_grad():
        np.testing.assert_allclose(found, rounded(inputs), atol=1e-5)


def test_four_bits_need_a_new_operator_set(dense: nn.Module, tmp_path: Path) -> None:
    network = applied(dense, first=(Quantise(4, "float32"),))
    with pytest.raises(ExportError, match=r"opset is 18; weights of 4 bits need 21"):
        export_network(network, tmp_path / "model.onnx", SHAPE, [], opset=18)
    assert not (tmp_path / "model.onnx").exists()


def test_a_network_without_integers_is_exported_as_ever(dense: nn.Module, tmp_path: Path) -> None:
    network = applied(dense, first=(Factorise("cp", (8,)),))
    written = export_network(network, tmp_path / "model.onnx", SHAPE, [])
    assert written.file_bytes == (tmp_path / "model.onnx").stat().st_size
    assert verify_onnx(network, tmp_path / "model.onnx", images(4)) < 1e-4


def test_ranges_need_inputs(
    dense: nn.Module, in_integers: Callable[[str], Written], float_file: Path, tmp_path: Path
) -> None:
    with pytest.raises(ExportError, match="without calibration batches"):
        export_network(in_integers("all")[0], tmp_path / "model.onnx", SHAPE, [])
    assert not (tmp_path / "model.onnx").exists()  # nor the network in float32 in its place
    with pytest.raises(ExportError, match="no images to compare"):
        class_agreement(dense, float_file, [])
