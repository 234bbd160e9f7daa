"""Recurrent layers in files are listed and counted as they are in modules; LSTMs compute in integers."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import quantize_dynamic
from small_graphs import model_of
from torch import nn

import rankrl
from decomposition import CompressionPlan, LayerPlan, PlanError, Quantise, inspect_layers
from decomposition.network.rounding import REDUCED_BITS
from rankrl.networks.graph import fit_library
from rankrl.networks.graph_scoring import NodeLosses, ScoringGraph
from rankrl.networks.network import CandidateOptions
from rankrl.onnx.export.static_quantiser import sums_overflow
from rankrl.onnx.graph import OnnxNetwork, PreparedFile, find_sites
from rankrl.onnx.graph.compressed import quantise_lstms
from rankrl.onnx.graph.network import BatchAxes
from rankrl.onnx.graph.prepared_file import network_costs, plan_costs
from rankrl.onnx.output_scores import output_score
from rankrl.onnx.protobuf import save_model
from rankrl.timing.latency import LocalStopwatch
from rankrl.timing.layer_latency import LoneNode
from rankrl.timing.network_timer import GraphFiles

STEPS, INPUTS, HIDDEN = 7, 6, 5
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}


def recurrent(kind: str, directions: int, output: int) -> onnx.ModelProto:
    """A recurrent layer of which one output is read: 0 for all steps, 1 for the last."""
    rows, generator = GATES[kind] * HIDDEN, np.random.default_rng(0)
    constants = {
        name: generator.standard_normal((directions, rows, columns)).astype(np.float32)
        for name, columns in (("w", INPUTS), ("r", HIDDEN))
    }
    direction = {"direction": "bidirectional"} if directions == 2 else {}
    outputs = ["", ""]
    outputs[output] = "y"
    node = helper.make_node(
        kind, ["x", "w", "r"], outputs[: output + 1], "layer", hidden_size=HIDDEN, **direction
    )
    shape = [STEPS, directions, "n", HIDDEN] if output == 0 else [directions, "n", HIDDEN]
    return model_of([node], constants, {"x": [STEPS, "n", INPUTS]}, {"y": shape})


@pytest.mark.parametrize("output", [0, 1])
@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize("kind", GATES)
def test_costs_are_those_of_the_module(kind: str, directions: int, output: int, tmp_path: Path) -> None:
    options: dict[str, Any] = {"bidirectional": directions == 2, "bias": False, "batch_first": True}
    module = nn.Sequential(getattr(nn, kind)(INPUTS, HIDDEN, **options))
    (expected,) = inspect_layers(module, (STEPS, INPUTS))
    onnx.save(recurrent(kind, directions, output), tmp_path / "net.onnx")
    network = OnnxNetwork.load(tmp_path / "net.onnx").with_axes(BatchAxes({"x": 1}))
    feed = {"x": torch.randn(STEPS, 1, INPUTS).numpy()}
    (site,) = find_sites(network, feed)
    assert site.spec.kind == expected.kind == kind.lower()
    assert (site.spec.params, site.spec.macs) == (expected.params, expected.macs)
    if kind == "LSTM":  # onnxruntime has integers for it
        assert site.spec.refusal is None
    else:
        assert "at every step of a sequence" in str(site.spec.refusal)
    costs = network_costs(network, [site])
    assert (costs["params"], costs["macs"]) == (expected.params, expected.macs)


BITS = REDUCED_BITS if sums_overflow() else 8  # of weights, whose products overflow on some processors
DYNAMIC = Quantise(BITS, activations="dynamic")


def lstm(direction: str = "forward", *, left_out: int = 0, **attributes: Any) -> onnx.ModelProto:
    """An LSTM with a bias, lengths, initial states and peepholes, the last ones left out; all outputs."""
    directions = 1 + (direction == "bidirectional")
    generator = np.random.default_rng(0)

    def drawn(*shape: int) -> np.ndarray:
        return (0.5 * generator.standard_normal((directions, *shape))).astype(np.float32)

    constants = {"w": drawn(4 * HIDDEN, INPUTS), "r": drawn(4 * HIDDEN, HIDDEN), "b": drawn(8 * HIDDEN)}
    constants |= {"p": drawn(3 * HIDDEN)}
    names = ["x", "w", "r", "b", "lengths", "h", "c", "p"][: 8 - left_out]
    state = [directions, "n", HIDDEN]
    inputs = {"x": [STEPS, "n", INPUTS], "lengths": ["n"], "h": state, "c": state}
    node = helper.make_node(
        "LSTM", names, ["y", "yh", "yc"], "layer", hidden_size=HIDDEN, direction=direction, **attributes
    )
    return model_of(
        [node],
        {name: value for name, value in constants.items() if name in names},
        {name: shape for name, shape in inputs.items() if name in names},
        {"y": [STEPS, directions, "n", HIDDEN], "yh": state, "yc": state},
        types={"lengths": TensorProto.INT32},
    )


def sequences(directions: int, count: int = 4) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(1)
    shapes = {"x": (STEPS, count, INPUTS), "h": (directions, count, HIDDEN), "c": (directions, count, HIDDEN)}
    feed = {name: generator.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    return feed | {"lengths": np.arange(STEPS, STEPS - count, -1, dtype=np.int32)}


@pytest.mark.parametrize(
    ("model", "directions"),
    [
        (lstm(left_out=4), 1),
        (lstm("reverse", left_out=5), 1),
        (lstm("bidirectional", left_out=1), 2),
        (lstm("bidirectional"), 2),
        (lstm("bidirectional", clip=0.5, activations=6 * ["HardSigmoid"]), 2),
        (lstm(input_forget=1, left_out=3), 1),
    ],
    ids=["bias", "reverse", "states", "peepholes", "activations", "lengths"],
)
def test_an_lstm_in_integers_is_that_of_onnxruntimes_quantiser(
    model: onnx.ModelProto, directions: int, tmp_path: Path
) -> None:
    plain, theirs, ours = (tmp_path / f"{name}.onnx" for name in ("plain", "theirs", "ours"))
    onnx.save(model, plain)
    quantize_dynamic(plain, theirs, op_types_to_quantize=["LSTM"], per_channel=True, reduce_range=BITS < 8)
    network, feed = OnnxNetwork.load(plain), sequences(directions)
    (site,) = find_sites(network, feed)
    graph = network.graph_model()
    quantise_lstms(graph, [(site, BITS)])
    save_model(graph, ours)
    exact, expected, found = (OnnxNetwork.load(path).session().run(feed) for path in (plain, theirs, ours))
    for one, other, right in zip(found, expected, exact, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
        assert 0 < np.abs(one - right).max() < 0.1
    (read,) = find_sites(OnnxNetwork.load(ours), feed)
    assert (read.spec.kind, read.spec.params, read.spec.macs) == ("lstm", site.spec.params, site.spec.macs)
    assert read.spec.refusal == "it computes in integers already"


def test_what_cannot_compute_in_integers_is_refused(tmp_path: Path) -> None:
    model = lstm(left_out=4)
    weight = model.graph.initializer[0]
    model.graph.node.insert(0, helper.make_node("Add", [weight.name, "more"], ["sum"], "add"))
    model.graph.node[1].input[1] = "sum"
    model.graph.input.append(helper.make_tensor_value_info("more", TensorProto.FLOAT, [1]))
    onnx.save(model, tmp_path / "net.onnx")
    feed = sequences(1) | {"more": np.zeros(1, np.float32)}
    (site,) = find_sites(OnnxNetwork.load(tmp_path / "net.onnx"), feed)
    assert site.spec.refusal == "its weights are computed"


def reader(folder: Path, kind: str = "LSTM") -> tuple[Path, np.ndarray]:
    """A convolution, a recurrent layer of both directions and a product; and inputs."""
    generator = np.random.default_rng(0)

    def drawn(*shape: int) -> np.ndarray:
        return (generator.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)

    gates, hidden = GATES[kind], 12
    constants: dict[str, np.ndarray] = {"kernel": drawn(16, 4, 3), "last": drawn(2 * hidden, 10)}
    constants |= {"w": drawn(2, gates * hidden, 16), "r": drawn(2, gates * hidden, hidden)}
    nodes = [
        helper.make_node("Conv", ["x", "kernel"], ["features"], "conv", pads=[1, 1]),
        helper.make_node("Transpose", ["features"], ["steps"], "steps", perm=[2, 0, 1]),
        helper.make_node(
            kind, ["steps", "w", "r"], ["states"], "layer", hidden_size=hidden, direction="bidirectional"
        ),
        helper.make_node("Transpose", ["states"], ["turned"], "turned", perm=[2, 0, 1, 3]),
        helper.make_node("Reshape", ["turned", "shape"], ["flat"], "flat"),
        helper.make_node("MatMul", ["flat", "last"], ["y"], "last"),
    ]
    model = model_of(
        nodes, constants | {"shape": np.array([0, 0, -1])}, {"x": ["n", 4, 9]}, {"y": ["n", 9, 10]}
    )
    onnx.save(model, folder / "reader.onnx")
    return folder / "reader.onnx", generator.standard_normal((60, 4, 9)).astype(np.float32)


def test_bytes_let_an_lstm_compute_in_integers_and_a_gru_stay(tmp_path: Path) -> None:
    for kind, operator in (("LSTM", "DynamicQuantizeLSTM"), ("GRU", "GRU")):
        path, inputs = reader(tmp_path, kind)
        target = tmp_path / f"{kind}.onnx"
        share = 0.35 if kind == "LSTM" else 0.95
        result = rankrl.compress(path, inputs, target, bytes=share, progress=False)
        operations = result.plan["layer"].operations
        assert operations == ((DYNAMIC,) if kind == "LSTM" else ())
        assert operator in [node.op_type for node in onnx.load(target).graph.node]
        assert CompressionPlan.from_json(result.plan.to_json()) == result.plan


def test_a_plan_costs_what_its_file_holds(tmp_path: Path) -> None:
    path, inputs = reader(tmp_path)
    file = PreparedFile.read(path, inputs)
    plan = CompressionPlan(
        tuple(LayerPlan(site.name, (DYNAMIC,) if site.hidden else ()) for site in file.sites),
        "",
        file.shape,
        "test",
    )
    (site,) = (site for site in file.sites if site.hidden)
    model = file.network.graph_model()
    quantise_lstms(model, [(site, 8)])
    constants = [*model.graph.initializers.values()]
    held = sum(value.const_value.nbytes for value in constants if value.name != "shape" and value.const_value)
    assert plan_costs(file.totals, file.sites, plan)["bytes"] == held


def test_it_is_timed_as_it_stands_in_the_file(tmp_path: Path) -> None:
    path, inputs = reader(tmp_path)
    file = PreparedFile.read(path, inputs)
    files = GraphFiles(file, file.feed(4), fit_library(file, CandidateOptions(("tucker",)), measure=False))
    node = files.modules["layer"]
    assert isinstance(node, LoneNode)
    assert (LocalStopwatch(1).times(node.files([(), (DYNAMIC,)], runs=3)) > 0).all()


@pytest.mark.parametrize("bits", [8, 7])
def test_losses_and_scores_of_an_lstm_are_those_of_its_file(bits: int, tmp_path: Path) -> None:
    path, inputs = reader(tmp_path)
    file = PreparedFile.read(path, inputs)
    options = CandidateOptions(("tucker",), precisions=("float32", "int8"), reduce_range=bits == 7)
    library = fit_library(file, options)
    sites = library.all_candidates(limit=3)
    (site,) = (site for site in file.sites if site.hidden)
    (candidates,) = (each for each in sites if each.name == "layer")
    assert [str(each) for each in candidates.candidates] == [f"int{bits} dynamic", "dense"]
    model = file.network.graph_model()
    quantise_lstms(model, [(site, bits)])
    losses = NodeLosses(file.network, file.changing, file.split.calibration)
    before, after = file.network.session(), file.network.rewritten(model).session()
    pairs = [(before.run(feed)[0], after.run(feed)[0]) for feed in losses._feeds]
    known, found = (
        np.concatenate([file.network.axes.first_axis(before.output_names[0], each) for each in side])
        for side in zip(*pairs, strict=True)
    )
    expected = output_score("", [known]).loss(known, found).mean()
    assert candidates.losses[0] == pytest.approx(expected, rel=1e-4)
    # Plans are scored with the weights as the file has them.
    scoring = ScoringGraph(file.network, file.sites, library, sites)
    scored = scoring.session([0 if each is candidates else each.dense for each in sites])
    integers = {name: tensor.numpy() for name, tensor in model.graph.initializers.tensor_items()}
    held = [
        integers[f"layer.{kind}_integers"].transpose(0, 2, 1) * integers[f"layer.{kind}_scales"][..., None]
        for kind in ("weight", "state")
    ]
    rounded = onnx.load(path)
    for name, array in zip(("w", "r"), held, strict=True):
        (tensor,) = (each for each in rounded.graph.initializer if each.name == name)
        tensor.CopyFrom(numpy_helper.from_array(array.astype(np.float32), name))
    onnx.save(rounded, path)
    feed = file.split.heldout[0]
    (scores,) = scored.run(None, dict(feed))
    np.testing.assert_allclose(scores, OnnxNetwork.load(path).session().run(feed)[0], atol=1e-5)


def test_operations_that_do_not_go_with_a_layer_are_refused(tmp_path: Path) -> None:
    path, inputs = reader(tmp_path)
    specs = {site.name: site.spec for site in PreparedFile.read(path, inputs).sites}
    DYNAMIC.check(specs["layer"])
    with pytest.raises(PlanError, match="'layer' is a lstm: activations='uint8'; choose dynamic"):
        Quantise().check(specs["layer"])
    with pytest.raises(PlanError, match="'conv' is a conv1d: activations='dynamic'"):
        DYNAMIC.check(specs["conv"])
