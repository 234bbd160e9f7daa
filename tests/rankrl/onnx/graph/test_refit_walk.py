"""The refit runs each part of both graphs once; nodes receive what they do when all before them is run."""

from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import TensorProto, helper
from small_graphs import FRAMES, Array, drawn, generator, model_of, network_of, of_low_rank

from decomposition import CompressionPlan, Factorise
from decomposition.plan.plan import LayerPlan, fingerprint
from rankrl.onnx.graph import calibration, compressed, find_sites
from rankrl.onnx.graph.calibration import Captured
from rankrl.onnx.graph.compressed import CompressedGraph, refitted_graph
from rankrl.onnx.graph.network import OnnxNetwork, open_session
from rankrl.onnx.graph.sites import Site

LATE = drawn(80, 8, 9, 9)
FACTORISED = {"one": (5, 4), "third": (3,)}


def branching() -> onnx.ModelProto:
    """Branches, a weight of two nodes, a side output, a late input, a sequence and a body."""
    random = generator()
    constants = {
        "first": (random.standard_normal((16, 8, 3, 3)) / 8).astype(np.float32),
        "first_bias": random.standard_normal(16).astype(np.float32),
        "shared": of_low_rank(16, 16 * 9, 6).reshape(16, 16, 3, 3),
        "shared_bias": random.standard_normal(16).astype(np.float32),
        "inner": (random.standard_normal((16, 16, 1, 1)) / 4).astype(np.float32),
        "gamma": random.uniform(0.5, 1, 16).astype(np.float32),
        "beta": random.standard_normal(16).astype(np.float32),
        "mean": random.standard_normal(16).astype(np.float32),
        "variance": random.uniform(0.5, 1, 16).astype(np.float32),
        "aside": of_low_rank(4, 16, 3).reshape(4, 16, 1, 1),
        "zero": np.array(0, np.int64),
        "one_": np.array(1, np.int64),
        "eight": np.array(8, np.int64),
        "third": of_low_rank(12, 8, 4).reshape(12, 8, 1, 1),
        "yes": np.array(True),
        "last": of_low_rank(5, 12, 3),
        "last_bias": random.standard_normal(5).astype(np.float32),
    }
    value = helper.make_tensor_value_info("chosen", TensorProto.FLOAT, None)
    bodies = [
        helper.make_graph([helper.make_node(kind, ["j"], ["chosen"], f"{kind}_j")], kind, [], [value])
        for kind in ("Relu", "Tanh")
    ]
    node, pads = helper.make_node, [1] * 4
    nodes = [
        node("Conv", ["frames", "first", "first_bias"], ["a"], "first", pads=pads),
        node("Relu", ["a"], ["r"], "relu"),
        node("Conv", ["r", "shared", "shared_bias"], ["b"], "one", pads=pads),
        node("Conv", ["r", "inner"], ["c"], "inner"),
        node("BatchNormalization", ["c", "gamma", "beta", "mean", "variance"], ["d"], "norm"),
        node("Add", ["d", "r"], ["e"], "residual"),
        node("Conv", ["e", "shared", "shared_bias"], ["f"], "two", pads=pads),
        node("Conv", ["r", "aside"], ["z"], "aside"),
        node("Add", ["b", "f"], ["g"], "sum"),
        node("SplitToSequence", ["g", "eight"], ["s"], "cut", axis=1),
        node("SequenceAt", ["s", "zero"], ["s0"], "half"),
        node("SequenceAt", ["s", "one_"], ["s1"], "other_half"),
        node("Mul", ["s0", "late"], ["h"], "times"),
        node("Conv", ["h", "third"], ["i"], "third"),
        node("ReduceMean", ["s1"], ["m"], "average", axes=[1]),
        node("Add", ["i", "m"], ["j"], "sum2"),
        node("If", ["yes"], ["k"], "if", then_branch=bodies[0], else_branch=bodies[1]),
        node("GlobalAveragePool", ["k"], ["l"], "pool"),
        node("Flatten", ["l"], ["n"], "flatten"),
        node("Gemm", ["n", "last", "last_bias"], ["y"], "last", transB=1),
    ]
    shape = ["n", 8, 9, 9]
    return model_of(
        nodes, constants, {"frames": shape, "late": shape}, {"y": ["n", 5], "z": ["n", 4, "h", "w"]}
    )


class Compared(compressed.GraphWalk):
    """A walk whose values are those of a run from the inputs of the network to the node."""

    def __init__(self, *arguments: Any, room: int) -> None:
        super().__init__(*arguments, room)
        self.room = room

    def inputs_of(self, site: Site) -> Iterator[dict[str, Array]]:
        direct = Captured(self._model, [node.input_name for node in site.nodes], "here")
        for feed, values in zip(self._batches, super().inputs_of(site), strict=True):
            expected = direct.run(feed)
            assert set(values) == set(expected)
            for name, value in values.items():
                np.testing.assert_allclose(value, expected[name], rtol=1e-5, atol=1e-5)
            yield values
        assert sum(value.nbytes for values in self._kept for value in values.values()) <= self.room


@pytest.fixture
def network(tmp_path: Path) -> OnnxNetwork:
    return network_of(branching(), tmp_path)


def refitted(network: OnnxNetwork) -> CompressedGraph:
    sites = find_sites(network, {"frames": FRAMES, "late": LATE})
    layers = [
        LayerPlan(site.name, (Factorise("tucker", FACTORISED[site.name]),) if site.name in FACTORISED else ())
        for site in sites
    ]
    plan = CompressionPlan(tuple(layers), (8, 9, 9), fingerprint([site.spec for site in sites]))
    rows = (slice(0, 32), slice(32, 64), slice(64, 80))
    batches = [{"frames": FRAMES[each], "late": LATE[each]} for each in rows]
    return refitted_graph(network, sites, plan, batches, sensitivities={})


@pytest.mark.parametrize(("room", "largest"), [(compressed.KEPT, 2**26), (1_500_000, 100_000), (0, 100_000)])
def test_nodes_receive_what_the_whole_graph_before_them_computes(
    network: OnnxNetwork, room: int, largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "_LARGEST", largest)
    monkeypatch.setattr(compressed, "GraphWalk", partial(Compared, room=room))
    result = refitted(network)
    assert list(result.errors) == ["one", "inner", "aside", "third", "last"]


def test_what_was_run_is_not_run_again(network: OnnxNetwork, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: Counter[str] = Counter()

    def counted(model: ir.Model, source: str, **options: Any) -> onnxruntime.InferenceSession:
        runs.update(str(node.name) for node in model.graph)
        return open_session(model, source, **options)

    monkeypatch.setattr(compressed, "open_session", counted)
    refitted(network)
    assert [runs[name] for name in ("first", "relu", "average", "if", "flatten")] == [2] * 5  # two graphs
    assert runs["inner"] > 2  # it lies before a node that is fitted earlier, with "one"
    assert runs["cut"] == 4  # a sequence cannot be kept
    assert runs["aside"] == runs["last"] == 0  # nothing reads what they give
