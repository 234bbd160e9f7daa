"""The peak memory of activations, by hand, by brute force and against onnxruntime; limits of it."""

import json
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper
from small_graphs import convolutions, model_of, tokens
from torch import nn

from decomposition import DecompositionError, build_structure, inspect_layers, plan_from_choices
from decomposition.choose.listing import CandidateLister
from rankrl.onnx.export import export_onnx, quantise_onnx
from rankrl.onnx.graph_edits import depending
from rankrl.onnx.protobuf import load_model
from rankrl.verify.activations import Activations, DenseGraph


def activations(model: onnx.ModelProto, **inputs: np.ndarray) -> Activations:
    return Activations(ir.from_proto(model), inputs)


def test_a_chain_holds_the_input_and_the_output_of_one_node() -> None:
    constants = {"tall": np.array([3, 1]), "wide": np.array([3, 50])}
    nodes = [
        helper.make_node("Expand", ["x", "tall"], ["a"], "tall"),
        helper.make_node("Expand", ["a", "wide"], ["b"], "wide"),
        helper.make_node("ReduceMax", ["b"], ["c"], "narrow", axes=[1]),
        helper.make_node("Relu", ["c"], ["y"], "relu"),
    ]
    found = activations(model_of(nodes, constants, {"x": [1]}, {"y": [3, 1]}), x=np.zeros(1, np.float32))
    assert found.live.tolist() == [4 * 4, 4 * 153, 4 * 153, 4 * 6]
    assert found.peak == 4 * 153


def test_a_value_is_live_up_to_its_last_use_and_has_the_size_of_its_type() -> None:
    nodes = [
        helper.make_node("Cast", ["x"], ["half"], "cast", to=TensorProto.FLOAT16),
        helper.make_node("Relu", ["x"], ["positive"], "relu"),
        helper.make_node("Cast", ["half"], ["back"], "back", to=TensorProto.FLOAT),
        helper.make_node("Add", ["back", "positive"], ["y"], "add"),
    ]
    found = activations(model_of(nodes, {}, {"x": [10]}, {"y": [10]}), x=np.zeros(10, np.float32))
    assert found.live.tolist() == [40 + 20, 40 + 20 + 40, 20 + 40 + 40, 120]


def test_constants_and_what_is_computed_from_them_do_not_count() -> None:
    nodes = [
        helper.make_node("MatMul", ["a", "b"], ["weight"], "contract"),
        helper.make_node("MatMul", ["x", "weight"], ["y"], "product"),
    ]
    constants = {"a": np.ones((4, 9), np.float32), "b": np.ones((9, 4), np.float32)}
    found = activations(
        model_of(nodes, constants, {"x": [1, 4]}, {"y": [1, 4]}), x=np.ones((1, 4), np.float32)
    )
    assert found.live.tolist() == [16, 32]


def test_the_peak_of_a_body_is_added_where_its_node_stands() -> None:
    def body(size: int) -> onnx.GraphProto:
        value = helper.make_tensor("c", TensorProto.FLOAT, [size], np.ones(size))
        nodes = [
            helper.make_node("Constant", [], ["c"], value=value),
            helper.make_node("Add", ["x", "c"], ["sum"]),
            helper.make_node("Relu", ["sum"], ["out"]),
        ]
        return helper.make_graph(
            nodes, "body", [], [helper.make_tensor_value_info("out", TensorProto.FLOAT, [size])]
        )

    node = helper.make_node("If", ["flag"], ["y"], "if", then_branch=body(6), else_branch=body(6))
    model = model_of([node], {}, {"flag": [], "x": [1]}, {"y": [6]}, types={"flag": TensorProto.BOOL})
    found = activations(model, flag=np.array(True), x=np.ones(1, np.float32))
    assert found.peak == 1 + 4 + 24 + 2 * 24


@pytest.mark.parametrize(
    ("model", "inputs"), [(convolutions(), {"x": np.zeros((1, 3, 12, 10), np.float32)}), (tokens(), None)]
)
def test_a_brute_force_walk_finds_the_same(model: onnx.ModelProto, inputs) -> None:
    if inputs is None:
        session = onnxruntime.InferenceSession(model.SerializeToString())
        kinds = {"tensor(int64)": np.int64, "tensor(float)": np.float32}
        inputs = {
            entry.name: np.zeros(
                [
                    size if isinstance(size, int) else 4 if index else 1
                    for index, size in enumerate(entry.shape)
                ],
                kinds[entry.type],
            )
            for entry in session.get_inputs()
        }
    graph = ir.from_proto(model).graph
    counted = {str(value.name) for value in depending(graph, graph.inputs)}
    values = {name for node in graph for name in (str(each.name) for each in node.outputs)} & counted
    whole = onnx.ModelProto.FromString(model.SerializeToString())
    known = {entry.name for entry in whole.graph.output}
    whole.graph.output.extend(onnx.ValueInfoProto(name=name) for name in values - known)
    session = onnxruntime.InferenceSession(whole.SerializeToString())
    names = [entry.name for entry in session.get_outputs()]
    sizes = {name: array.nbytes for name, array in zip(names, session.run(None, inputs), strict=True)}
    sizes |= {name: array.nbytes for name, array in inputs.items()}
    peaks = []
    for step, _ in enumerate(graph):
        before, here = list(graph)[: step + 1], list(graph)[step:]
        made = {str(each.name) for node in before for each in node.outputs} | set(inputs)
        needed = {str(each.name) for node in here for each in node.inputs if each is not None} | known
        written = {str(each.name) for each in list(graph)[step].outputs}
        peaks.append(sum(sizes[name] for name in made & (needed | written) & set(sizes)))
    assert activations(model, **inputs).live.tolist() == peaks


class Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.a = nn.Conv2d(channels, channels, 3, padding=1)
        self.b = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + self.b(torch.relu(self.a(x))))


FEED = np.random.default_rng(0).standard_normal((1, 3, 16, 16)).astype(np.float32)
MAP = 16 * 16 * 16  # numbers in one activation of the blocks


@pytest.fixture(scope="module")
def residual(tmp_path_factory) -> tuple[nn.Module, DenseGraph]:
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), Block(16), nn.AvgPool2d(16), nn.Flatten(), nn.Linear(16, 5)
    ).eval()
    path = tmp_path_factory.mktemp("dense") / "dense.onnx"
    export_onnx(network, path, (3, 16, 16), progress=False)
    weights = {spec.name: f"{spec.name}.weight" for spec in inspect_layers(network, (3, 16, 16))}
    return network, DenseGraph(load_model(path), FEED, weights)


def candidates(network: nn.Module, *precisions: str, formats: tuple[str, ...] = ("tucker", "cp")):
    lister = CandidateLister.of_network(network, (3, 16, 16), formats, precisions=precisions)
    return [lister.candidates(name, limit=6) for name in lister.specs]


def test_between_nodes_in_integers_activations_are_integers(residual, tmp_path) -> None:
    _, dense = residual
    assert dense.activations.peak == 4 * 3 * MAP  # a shortcut, and both ends of a node
    path, plain = tmp_path / "int8.onnx", tmp_path / "plain.onnx"
    onnx.save(ir.to_proto(dense.model), plain)
    quantise_onnx(plain, path, [FEED], fitted=False)
    assert Activations(load_model(path), FEED).peak == 3 * MAP


def test_onnxruntime_needs_no_more(residual, tmp_path) -> None:
    """Its plan overwrites inputs where it can, and rounds up to its alignment."""
    _, dense = residual
    options = onnxruntime.SessionOptions()
    options.enable_profiling, options.profile_file_prefix = True, str(tmp_path / "profile")
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(ir.to_proto(dense.model).SerializeToString(), options)
    session.run(None, {session.get_inputs()[0].name: FEED})
    events = json.loads(Path(session.end_profiling()).read_text())
    outputs = [int(each["args"].get("output_size", 0)) for each in events if "args" in each]
    assert max(outputs) < dense.activations.peak < sum(outputs)


def test_a_limit_makes_layers_compute_in_integers(residual) -> None:
    network, dense = residual
    sites = candidates(network, "float32", "int8")
    free = dense.within(sites, 4.0)  # stages may hold more than the dense layer
    assert [len(site) for site in free] == [len(site) for site in sites]
    assert not any(site.must_change for site in free)
    bounded = {site.name: site for site in dense.within(sites, 0.4)}
    assert bounded["2.a"].must_change
    assert bounded["2.b"].must_change
    assert all(each.computes_integers for each in bounded["2.a"].candidates[:-1])


def test_an_unreachable_limit_names_what_needs_most(residual) -> None:
    network, dense = residual
    with pytest.raises(DecompositionError, match=r"budget.memory=0.9 cannot be reached: the .* needs 49,152"):
        dense.within(candidates(network, "float32"), 0.9)
    with pytest.raises(DecompositionError, match=r"least is 0\.2500; integers"):
        dense.within(candidates(network, "float32", "int8"), 0.2)


def test_candidates_are_left_out_whose_files_hold_more(tmp_path: Path) -> None:
    """Tensors between the stages of a layer count: here one map is wide, and the other small."""
    network = nn.Sequential(nn.Conv2d(3, 48, 3, padding=1), nn.Conv2d(48, 3, 3, padding=1)).eval()
    specs, shape = inspect_layers(network, (3, 16, 16)), (3, 16, 16)

    def peak(model: nn.Module) -> int:
        path = tmp_path / "net.onnx"
        export_onnx(model, path, shape, progress=False)
        return Activations(load_model(path), FEED).peak

    dense = DenseGraph(load_of(network, tmp_path), FEED, {"0": "0.weight", "1": "1.weight"})
    assert dense.activations.peak == peak(network) == 4 * 256 * (3 + 48)
    sites = candidates(network, "float32", formats=("tucker",))
    kept = dense.within(sites, 1.0)
    left_out = 0
    for candidate in sites[1].candidates[:-1]:
        index = sites[1].candidates.index(candidate)
        plan = plan_from_choices(sites, (sites[0].dense, index), specs, shape, "a test")
        fits = peak(build_structure(network, plan)) <= dense.activations.peak
        assert (candidate in kept[1].candidates) == fits
        left_out += not fits
    assert 0 < left_out < len(sites[1]) - 1


def load_of(network: nn.Module, folder: Path) -> ir.Model:
    export_onnx(network, folder / "dense.onnx", (3, 16, 16), progress=False)
    return load_model(folder / "dense.onnx")
