"""A file that would be compressed as another network than it is, is refused before the search."""

import copy
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from call_options import layer_options
from onnx import TensorProto, helper, numpy_helper
from several_inputs import TwoInputs
from small_graphs import (
    FRAMES,
    MAPS,
    convolutions,
    images,
    model_of,
    of_low_rank,
    old_network,
    sentences,
    shared,
    tokens,
    upsampling,
)
from torch import Tensor, nn

import rankrl
from decomposition import DecompositionError, inspect_layers, integer_layers
from rankrl.networks import module
from rankrl.onnx.export import export_onnx
from rankrl.onnx.graph import OnnxGraphError, PreparedFile, network
from rankrl.options.decomposition import FILE_FORMATS
from rankrl.options.timing import LatencyOptions
from rankrl.verify import file_export
from rankrl.verify.fidelity import COARSE_FLOOR, check_as_read, check_rewritten, departure, relative_error
from rankrl.verify.file_export import FileInputs

CASES: dict[str, tuple[Callable[[], onnx.ModelProto], Any]] = {
    "convolutions": (convolutions, {"x": images(10)}),
    "tokens": (tokens, sentences(10)),
    "upsampling": (upsampling, {"x": MAPS[:10]}),
    "shared": (lambda: shared(bias=True, strides=(1, 2)), {"frames": FRAMES[:10]}),
    "opset 9": (lambda: old_network(9), {"x": images(10)}),
    "opset 11": (lambda: old_network(11), {"x": images(10)}),
}


def read(name: str, folder: Path) -> PreparedFile:
    made, feed = CASES[name]
    onnx.save(made(), folder / "net.onnx")
    return PreparedFile.read(folder / "net.onnx", feed)


@pytest.mark.parametrize("name", CASES)
def test_what_is_read_rightly_passes(name: str, tmp_path: Path) -> None:
    check_as_read(read(name, tmp_path))


@pytest.mark.parametrize("name", CASES)
def test_a_weight_that_is_read_wrongly_is_refused_by_its_node(name: str, tmp_path: Path) -> None:
    given = read(name, tmp_path)
    wrong = given.usable[1]
    weight = wrong.weight.flip(0)
    sites = tuple(replace(each, weight=weight) if each is wrong else each for each in given.sites)
    with pytest.raises(OnnxGraphError, match=rf"another network than it is.*the node '{wrong.name}'.*skip"):
        check_as_read(replace(given, sites=sites))


def test_geometry_that_is_read_wrongly_is_refused(tmp_path: Path) -> None:
    given = read("convolutions", tmp_path)
    first, *others = given.sites
    padded = replace(first, pads=((0, 2), (2, 0)))
    dilated = replace(first, dilation=(2, 2), pads=((2, 3), (1, 2)))
    for wrong in (padded, dilated):
        with pytest.raises(OnnxGraphError, match="the node 'first'"):
            check_as_read(replace(given, sites=(wrong, *others)))


def test_a_conversion_that_computes_something_else_is_refused_with_both_reasons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = network.version_converter.convert_version

    def wrong(model: onnx.ModelProto, version: int) -> onnx.ModelProto:
        found: onnx.ModelProto = right(model, version)
        norm = next(node for node in found.graph.node if node.op_type == "BatchNormalization")
        next(each for each in norm.attribute if each.name == "epsilon").f = 2.0
        return found

    monkeypatch.setattr(network.version_converter, "convert_version", wrong)
    onnx.save(old_network(9), tmp_path / "net.onnx")
    with pytest.raises(OnnxGraphError, match=r"the node 'norm' \(onnx's version converter took it from"):
        rankrl.compress(
            tmp_path / "net.onnx",
            {"x": images(10)},
            tmp_path / "small.onnx",
            params=0.5,
            decomposition=layer_options(FILE_FORMATS, candidates=3),
        )


def test_what_an_original_does_not_know_itself_is_no_departure(tmp_path: Path) -> None:
    """Random numbers of its own are as far apart in two runs of the original."""
    nodes = [
        helper.make_node("RandomNormalLike", ["x"], ["noise"], "noise"),
        helper.make_node("Add", ["x", "noise"], ["a"], "add"),
        helper.make_node("MatMul", ["a", "w"], ["y"], "product"),
    ]
    ends: tuple[Any, Any] = {"x": ["n", 16]}, {"y": ["n", 16]}
    onnx.save(model_of(nodes, {"w": of_low_rank(16, 16, 3)}, *ends), tmp_path / "net.onnx")
    x = np.random.default_rng(0).standard_normal((20, 16)).astype(np.float32)
    check_as_read(PreparedFile.read(tmp_path / "net.onnx", {"x": x}))


def test_half_precision_has_a_tolerance_of_its_own(tmp_path: Path) -> None:
    model = model_of(
        [helper.make_node("MatMul", ["x", "w"], ["y"], "product")],
        {"w": of_low_rank(64, 64, 3)},
        {"x": ["n", 64]},
        {"y": ["n", 64]},
    )
    weight = model.graph.initializer[0]
    weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight).astype(np.float16), "w"))
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = TensorProto.FLOAT16
    onnx.save(model, tmp_path / "net.onnx")
    x = np.random.default_rng(0).standard_normal((20, 64)).astype(np.float16)
    check_as_read(PreparedFile.read(tmp_path / "net.onnx", {"x": x}))


def test_departures() -> None:
    x = np.array([[1.0, 2.0], [np.inf, 4.0]], np.float32)
    assert relative_error(x, x) == 0
    assert relative_error(x, x.T.copy()) == np.inf
    assert relative_error(x, x[:1]) == np.inf
    assert relative_error(np.array([1, 2, 3, 4]), np.array([1, 2, 3, 5])) == 0.25
    y = np.array([3.0, 4.0])
    assert relative_error(y, 1.1 * y) == pytest.approx(0.1)
    assert departure(["y"], [y], [[y]], [y * (1 + 1e-5)]) is None
    told = departure(["y"], [y], [[y]], [y * 1.01])
    assert told == "the output 'y' differs by 1.00e-02, where rounding explains 1e-04"
    assert departure(["y"], [y], [[y * 1.001]], [y * 1.01]) is None
    assert departure(["y"], [y], [[y]], [y * 1.01], floor=COARSE_FLOOR) is None
    assert departure(["y"], [y], [[y]], [np.full(2, np.nan)]) is not None


IMAGES = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(1))
NUMBERS = torch.randn(6, 5, generator=torch.Generator().manual_seed(2))


class Amplifier(nn.Module):
    """What depends on digits far behind the point."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(1e5 * x)


class Noisy(nn.Module):
    """A network whose outputs are different every time."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return y + torch.randn_like(y)


def test_the_same_network_passes() -> None:
    torch.manual_seed(0)
    model = TwoInputs().train()
    check_rewritten(model, copy.deepcopy(model), (IMAGES, NUMBERS))
    assert model.training


class Turned(nn.Module):
    """A network whose first axis counts no inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.layer(x)
        return y.T, y.mean()


def test_outputs_need_not_count_inputs_on_their_first_axis() -> None:
    torch.manual_seed(0)
    model = Turned()
    check_rewritten(model, copy.deepcopy(model), NUMBERS)
    wrong = copy.deepcopy(model)
    with torch.no_grad():
        wrong.layer.weight[0] *= 1.1
    with pytest.raises(DecompositionError, match="'layer'"):
        check_rewritten(model, wrong, NUMBERS)


def test_what_amplifies_rounding_is_no_departure() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), Amplifier()).double()
    nearly = copy.deepcopy(model)
    with torch.no_grad():
        nearly[0].weight *= 1 + 1e-7
    inputs = NUMBERS.double()
    change = model(inputs) - nearly(inputs)
    assert change.norm() > 1e-3 * model(inputs).norm()
    check_rewritten(model, nearly, inputs)


def test_noise_of_its_own_is_no_departure() -> None:
    model = Noisy().eval()
    check_rewritten(model, copy.deepcopy(model), NUMBERS)


def test_a_copy_that_computes_something_else_is_refused_by_its_layer() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 4)).eval()
    wrong = copy.deepcopy(model)
    with torch.no_grad():
        wrong[2].bias[0] += 0.1
    with pytest.raises(DecompositionError, match=r"Sequential would be .*first of all that of the layer '2'"):
        check_rewritten(model, wrong, NUMBERS)
    assert not any(each._forward_hooks for each in (*model.modules(), *wrong.modules()))


SHAPE = (3, 8, 8)


@dataclass
class Inputs(FileInputs):
    x: torch.Tensor
    shape, options = SHAPE, LatencyOptions()

    def ranges(self) -> Iterator[torch.Tensor]:
        yield self.x

    def feeds(self) -> Iterator[np.ndarray[Any, Any]]:
        yield from (part.numpy() for part in self.x.split(3))  # in smaller batches than the network's

    def verified(self, *_: Any) -> Any:
        raise NotImplementedError

    score = worth = verified


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Conv2d(n, 8, 3, padding=1) for n in (3, 8, 8))
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.a(x)
        y.mul_(2).relu_()
        z = self.b(y).add_(y)
        z[:, ::2] = 0
        return {"scores": self.head(self.c(z).sub_(0.1).mean((2, 3))), "map": z}


def unlike(folder: Path) -> list[str]:
    torch.manual_seed(0)
    net, x = Net().eval(), torch.randn(20, *SHAPE)
    baseline = export_onnx(net, folder / "dense.onnx", SHAPE, progress=False).path
    return file_export.unlike_file(net, inspect_layers(net, SHAPE), baseline, Inputs(x))


def test_what_is_simulated_right_may_be_integers(tmp_path: Path) -> None:
    assert unlike(tmp_path) == []


def test_layers_that_are_simulated_wrongly_are_found_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def calibrated(network: nn.Module, batches: Any) -> None:
        ranges_of(network, batches)
        if (layer := integer_layers(network).get("b")) is not None:
            layer.input_range.high /= 20  # type: ignore[union-attr, operator]

    ranges_of = file_export.calibrate_ranges
    monkeypatch.setattr(file_export, "calibrate_ranges", calibrated)
    with caplog.at_level(logging.WARNING):
        assert unlike(tmp_path) == ["b"]
    (message,) = [record.getMessage() for record in caplog.records if record.name == file_export.__name__]
    assert message.startswith("layer 'b' does not compute in integers")
    assert "where rounding moves the file by" in message


@pytest.mark.parametrize(
    ("simulated", "file", "allowed"), [(0.0, 0.0, 0.05), (0.2, 0.2, 0.62), (8.0, 0.1, 0.32), (0.1, 8.0, 0.32)]
)
def test_as_much_is_allowed_as_rounding_moves_both(simulated: float, file: float, allowed: float) -> None:
    assert file_export.allowed_error(simulated, file) == pytest.approx(allowed)


@pytest.mark.slow
def test_a_search_goes_on_without_integers_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "unlike_file", lambda *_: ["b"])
    torch.manual_seed(0)
    result = rankrl.compress(
        Net().eval(),
        torch.randn(96, *SHAPE),
        tmp_path / "run",
        bytes=0.35,
        decomposition=rankrl.DecompositionOptions(format="tucker", precisions=("int8",), candidates=3),
        timing=rankrl.LatencyOptions(batch=4, runs=3, int8=False),
        progress=False,
    )
    chosen = {layer.name: str(layer.operations[-1]) for layer in result.plan if layer.operations}
    assert chosen["c"].removesuffix(" weights") in ("int8", "int7")
    assert "weights" in chosen.get("b", "weights")
