"""Convolutions that compute several positions at once, and outputs that stay the same."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from call_options import grouped, layer_options
from hypothesis import given
from hypothesis import strategies as st
from onnx import helper
from onnx.reference import ReferenceEvaluator
from small_graphs import OPSETS, Array, generator, model_of, network_of

import rankrl
from decomposition import CompressionPlan, PlanError
from rankrl.onnx.graph.network import OnnxNetwork
from rankrl.onnx.graph.prepared_file import PreparedFile
from rankrl.onnx.graph.rewrite import METADATA, SeveralPositions, possible_positions, with_several_positions
from rankrl.onnx.graph.sites import Site, find_sites
from rankrl.onnx.protobuf import to_proto
from rankrl.options.decomposition import FILE_FORMATS
from rankrl.options.timing import LatencyOptions
from rankrl.timing import form as positions
from rankrl.timing.form import faster_positions
from rankrl.timing.latency import Latency, RelativeTime, TimedTurns

GROUP = 16


def one(
    weight: Array,
    sizes: tuple[int | str, ...],
    *,
    bias: bool = True,
    opset: int = OPSETS[0],
    behind: str | None = None,
    **attributes: Any,
) -> onnx.ModelProto:
    """A convolution, perhaps with an operator behind it."""
    constants = {"weight": weight}
    if bias:
        constants["bias"] = generator().standard_normal(len(weight)).astype(np.float32)
    end = "c" if behind else "y"
    nodes = [helper.make_node("Conv", ["x", *constants], [end], "conv", **attributes)]
    if behind:
        nodes.append(helper.make_node(behind, [end], ["y"], "behind"))
    channels = weight.shape[1] * attributes.get("group", 1)
    free = [None] * len(sizes)
    return model_of(
        nodes, constants, {"x": ["n", channels, *sizes]}, {"y": ["n", len(weight), *free]}, opset=opset
    )


def weight(*shape: int) -> Array:
    return generator().standard_normal(shape).astype(np.float32)


def sites_of(network: OnnxNetwork, *sizes: int) -> list[Site]:
    return find_sites(network, {"x": np.zeros((2, *sizes), np.float32)})


def ways(model: onnx.ModelProto, folder: Path, *sizes: int, group: int = GROUP) -> list[SeveralPositions]:
    network = network_of(model, folder)
    return possible_positions(network, sites_of(network, *sizes)[0], group)


def outputs(model: onnx.ModelProto, x: Array) -> list[Array]:
    found: Any = ReferenceEvaluator(model).run(None, {"x": x})
    return [np.asarray(each) for each in found]


def operators(model: onnx.ModelProto) -> list[str]:
    return [each.op_type for each in model.graph.node]


@given(data=st.data())
def test_computes_the_same_in_every_way(data: st.DataObject, tmp_path: Path) -> None:
    """By onnx's own reference, for strides, paddings, dilations and sizes of all kinds."""
    draw = data.draw
    axes = draw(st.integers(1, 2))
    kernel, stride, dilation = (draw(st.tuples(*[st.integers(1, most)] * axes)) for most in (4, 3, 2))
    attributes: dict[str, Any] = {"strides": stride}
    padding = draw(st.sampled_from(["pads", "VALID", "SAME_UPPER", "SAME_LOWER"]))
    if not padding.startswith("SAME"):  # onnxruntime has no such kernel
        attributes["dilations"] = dilation
    if padding == "pads":
        attributes["pads"] = draw(st.tuples(*[st.integers(0, 2)] * (2 * axes)))
    else:
        attributes["auto_pad"] = padding
    sizes = draw(st.tuples(*[st.integers(10, 15)] * axes))
    channels = draw(st.tuples(st.integers(1, 8), st.integers(1, 3)))
    model = one(weight(*channels, *kernel), sizes, bias=draw(st.booleans()), **attributes)
    network = network_of(model, tmp_path)
    sites = sites_of(network, channels[1], *sizes)
    for way in possible_positions(network, sites[0], GROUP):
        found = to_proto(with_several_positions(network, sites, {"conv": way}).model)
        onnx.checker.check_model(found, full_check=True)
        assert next(each for each in found.graph.node if each.op_type == "Conv").name == "conv"
        for batch in (1, 3):
            x = generator().standard_normal((batch, channels[1], *sizes)).astype(np.float32)
            expected, new = outputs(model, x)[0], OnnxNetwork(found, "").session().run({"x": x})[0]
            np.testing.assert_allclose(new, expected, atol=2e-5)


@pytest.mark.parametrize("opset", OPSETS)
def test_what_takes_its_place(opset: int, tmp_path: Path) -> None:
    """Channels for each position, a kernel longer by what they lie apart, steps as wide as all of them."""
    model = one(weight(2, 3, 3, 5), (9, 12), opset=opset, behind="Relu", pads=[1, 2, 1, 2])
    network = network_of(model, tmp_path)
    sites = sites_of(network, 3, 9, 12)
    found = with_several_positions(network, sites, {"conv": SeveralPositions(1, 4)})
    assert operators(to_proto(found.model)) == ["Conv", "Reshape", "Transpose", "Reshape", "Relu"]
    site = sites_of(found, 3, 9, 12)[0]
    assert site.spec.weight_shape == (8, 3, 3, 8)
    assert site.spec.stride == (1, 4)
    assert site.spec.output_sizes == ((9, 3),)
    cut = with_several_positions(network, sites, {"conv": SeveralPositions(0, 2)})  # nine rows, two at once
    assert operators(to_proto(cut.model)) == ["Conv", "Reshape", "Transpose", "Reshape", "Slice", "Relu"]
    assert with_several_positions(network, sites, {}) is network


def test_nodes_that_share_a_weight_share_it_still(tmp_path: Path) -> None:
    constants = {"weight": weight(1, 1, 6), "last": weight(20, 1, 3)}
    nodes = [
        helper.make_node("Conv", ["x", "weight"], ["a"], "first", strides=[2], pads=[2, 2]),
        helper.make_node("Conv", ["a", "weight"], ["b"], "second", strides=[2], pads=[2, 2]),
        helper.make_node("Conv", ["b", "last"], ["y"], "last"),
    ]
    model = model_of(nodes, constants, {"x": ["n", 1, 64]}, {"y": ["n", 20, None]})
    network = network_of(model, tmp_path)
    sites = sites_of(network, 1, 64)
    found = with_several_positions(network, sites, {"first": SeveralPositions(0, 8)})
    x = generator().standard_normal((2, 1, 64)).astype(np.float32)
    np.testing.assert_allclose(found.session().run({"x": x})[0], outputs(model, x)[0], atol=1e-5)
    held = {tuple(each.shape) for each in found.model.graph.initializers.tensors() if len(each.shape) == 3}
    assert held == {(8, 1, 20), (20, 1, 3)}
    first, *_ = sites_of(found, 1, 64)
    assert [each.name for each in first.nodes] == ["first", "second"]


def test_which_can(tmp_path: Path) -> None:
    both = [SeveralPositions(axis, count) for axis in (0, 1) for count in (2, 4)]
    assert ways(one(weight(4, 3, 3, 3), (9, 9)), tmp_path, 3, 9, 9) == both
    assert ways(one(weight(4, 3, 3, 1), (9, 9)), tmp_path, 3, 9, 9) == both[:2]
    assert ways(one(weight(4, 3, 3, 3), (9, 9), dilations=[2, 1]), tmp_path, 3, 9, 9) == both[2:]
    assert ways(one(weight(4, 3, 3, 3), (9, 9), strides=[4, 1]), tmp_path, 3, 9, 9) == [both[0], *both[2:]]
    assert ways(one(weight(4, 3, 3, 3), (9, 9)), tmp_path, 3, 9, 9, group=8) == both[::2]


@pytest.mark.parametrize(
    ("model", "sizes"),
    [
        (one(weight(9, 3, 3, 3), (9, 9)), (3, 9, 9)),
        (one(weight(4, 1, 3, 3), (9, 9), group=4), (4, 9, 9)),
        (one(weight(4, 3, 1, 1), (9, 9)), (3, 9, 9)),
        (one(weight(4, 3, 3, 3), (9, "w")), (3, 9, 9)),
    ],
    ids=["many channels", "groups", "one position", "sizes that are free"],
)
def test_which_cannot(model: onnx.ModelProto, sizes: tuple[int, ...], tmp_path: Path) -> None:
    assert ways(model, tmp_path, *sizes) == []


OPTIONS = LatencyOptions(batch=2, runs=2)
FITS = layer_options("spatial_svd", candidates=2, iterations=5, final_iterations=10, rank_multiple=1)


def timed(monkeypatch: pytest.MonkeyPatch, times: dict[str, float], beside: float = 0.5) -> list[int]:
    """Let nodes take times by their weight's shape; return how many files were timed at once."""
    calls: list[int] = []

    def in_turns(files: Any, **_: Any) -> TimedTurns:
        calls.append(len(files))
        held = [[tuple(each.dims) for each in onnx.load(path).graph.initializer] for _, path in files]
        shapes = ["x".join(map(str, max(dims, key=len))) for dims in held]
        taken = [times.get(shape, 10.0) for shape in shapes]
        latencies = [Latency(each, each, each, 2, 1, 2, "processor") for each in taken]
        return TimedTurns(latencies, np.array([taken, taken]), None)

    monkeypatch.setattr(positions, "time_in_turns", in_turns)
    monkeypatch.setattr(positions, "relative_time", lambda *_: beside)
    monkeypatch.setattr(positions, "fast_multiple", lambda *_: 8)
    return calls


def chosen(tmp_path: Path, folder: Path | None = None) -> dict[str, SeveralPositions]:
    network = network_of(one(weight(2, 3, 3, 3), (8, 8)), tmp_path)
    feed = {"x": np.zeros((2, 3, 8, 8), np.float32)}
    return faster_positions(network, sites_of(network, 3, 8, 8), feed, replace(OPTIONS, folder=folder))


def test_takes_what_is_fastest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls = timed(monkeypatch, {"4x3x3x4": 6.0, "8x3x3x6": 5.0, "8x3x6x3": 7.0})
    assert chosen(tmp_path, tmp_path) == {"conv": SeveralPositions(1, 4)}
    assert chosen(tmp_path, tmp_path) == {"conv": SeveralPositions(1, 4)}
    assert calls == [
        5
    ]  # as it is, and two or four positions along each axis; the second time from the folder
    assert chosen(tmp_path) == {"conv": SeveralPositions(1, 4)}
    assert calls == [5, 5]


@pytest.mark.parametrize(
    ("times", "beside"),
    [({}, 0.5), ({"8x3x3x6": 9.9}, 0.5), ({"8x3x3x6": 5.0}, 0.99), ({"8x3x3x6": 5.0}, 1.5)],
)
def test_leaves_what_gains_nothing(
    times: dict[str, float], beside: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    timed(monkeypatch, times, beside)
    assert chosen(tmp_path) == {}


def test_times_real_nodes(tmp_path: Path) -> None:
    """Whatever is faster here, what is said of it can be carried out."""
    network = network_of(one(weight(1, 2, 5, 5), (24, 24), bias=False), tmp_path)
    sites = sites_of(network, 2, 24, 24)
    feed = {"x": np.ones((2, 2, 24, 24), np.float32)}
    found = positions._fastest(network, sites[0], possible_positions(network, sites[0], GROUP), 2, OPTIONS)
    rewritten = with_several_positions(network, sites, {} if found is None else {"conv": found})
    np.testing.assert_allclose(rewritten.session().run(feed)[0], network.session().run(feed)[0], atol=1e-5)


def small() -> onnx.ModelProto:
    """A long kernel to few channels, another one, and scores."""
    random = generator()
    constants = {
        "first": (random.standard_normal((2, 1, 1, 15)) / 4).astype(np.float32),
        "bias": random.standard_normal(2).astype(np.float32),
        "second": (random.standard_normal((24, 2, 5, 5)) / 7).astype(np.float32),
        "last": (random.standard_normal((24, 6)) / 5).astype(np.float32),
    }
    nodes = [
        helper.make_node("Conv", ["x", "first", "bias"], ["a"], "first", pads=[0, 7, 0, 7]),
        helper.make_node("Relu", ["a"], ["b"], "relu"),
        helper.make_node("Conv", ["b", "second"], ["c"], "second", strides=[2, 2]),
        helper.make_node("Tanh", ["c"], ["d"], "tanh"),
        helper.make_node("GlobalAveragePool", ["d"], ["e"], "pool"),
        helper.make_node("Flatten", ["e"], ["f"], "flatten"),
        helper.make_node("MatMul", ["f", "last"], ["y"], "last"),
    ]
    return model_of(nodes, constants, {"x": ["n", 1, 12, 20]}, {"y": ["n", 6]})


@pytest.fixture(scope="module")
def compressed(tmp_path_factory: pytest.TempPathFactory) -> rankrl.Compression:
    """The network above within its whole time, its first convolution with four positions at once."""
    folder = tmp_path_factory.mktemp("compressed")
    onnx.save(small(), folder / "net.onnx")
    found = {"first": SeveralPositions(1, 4)}
    x = generator().standard_normal((40, 1, 12, 20)).astype(np.float32)
    np.save(folder / "x.npy", x)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rankrl.file_compression.faster_positions", lambda *_: found)
        patch.setattr("rankrl.file_compression.relative_time", lambda *_: 1.1)
        patch.setattr("rankrl.timing.network_timer.NetworkTimer.whole", lambda *_: RelativeTime(0.7))
        return rankrl.compress(
            folder / "net.onnx",
            x,
            folder / "small.onnx",
            latency=1.0,
            timing=OPTIONS,
            decomposition=FITS,
            score=lambda _: 1.0,  # no inputs are kept for scores: nodes are fitted to the same ones again
        )


def test_plans_say_what_was_rewritten(compressed: rankrl.Compression) -> None:
    assert compressed.plan.metadata[METADATA] == {"first": {"axis": 1, "positions": 4}}
    assert compressed.before["params"] == 30 + 2 + 1200 + 144
    plan, folder = CompressionPlan.from_json(compressed.plan.to_json()), compressed.path.parent
    again = rankrl.apply_plan(
        folder / "net.onnx", plan, folder / "x.npy", folder / "again.onnx", timing=OPTIONS, decomposition=FITS
    )
    assert again.after["params"] == compressed.after["params"]
    models = [onnx.load(folder / name) for name in ("small.onnx", "again.onnx")]
    assert operators(models[0]) == operators(models[1])
    assert "Transpose" in operators(models[1])
    x = np.load(folder / "x.npy")
    np.testing.assert_allclose(*(outputs(model, x)[0] for model in models), atol=1e-5)


def test_nothing_more_is_done_where_that_is_fast_enough(
    monkeypatch: pytest.MonkeyPatch, compressed: rankrl.Compression, tmp_path: Path
) -> None:
    found = {"first": SeveralPositions(1, 4)}
    monkeypatch.setattr("rankrl.file_compression.faster_positions", lambda *_: found)
    monkeypatch.setattr("rankrl.file_compression.relative_time", lambda *_: 0.55)
    monkeypatch.setattr("rankrl.networks.graph.fit_library", lambda *_, **__: pytest.fail("fitted"))
    path, x = compressed.path.parent / "net.onnx", compressed.path.parent / "x.npy"
    kept = rankrl.compress(
        path,
        x,
        tmp_path / "small.onnx",
        latency=0.6,
        timing=OPTIONS,
        decomposition=layer_options(FILE_FORMATS, rank_multiple=1),
    )
    assert kept.score == pytest.approx(1, abs=1e-5)
    assert kept.rewritten == {"first": "4 positions at once"}
    assert set(kept.untouched.values()) == {"the budget is kept without"}
    again = rankrl.apply_plan(path, kept.plan, x, tmp_path / "again.onnx", timing=OPTIONS)
    assert again.rewritten == kept.rewritten
    assert "weight" not in repr(kept)


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({}, "fingerprint"),
        ({METADATA: 3}, "hold 3"),
        ({METADATA: {"nobody": {"axis": 1, "positions": 4}}}, "'nobody'"),
        ({METADATA: {"second": {"axis": 1, "positions": 3}}}, "'second'"),
        ({METADATA: {"first": {"axis": 5, "positions": 4}}}, "'first'"),
        ({METADATA: {"first": {"axis": 1, "positions": 4.0}}}, "'first'"),
        ({METADATA: {"first": {"axis": 1, "positions": -4}}}, "'first'"),
        ({METADATA: {"first": {"axis": 1}}}, "'first'"),
        ({METADATA: {"last": {"axis": 0, "positions": 2}}}, "'last'"),
        ({METADATA: {"first": {"axis": 1, "positions": 2**70}}}, "'first'"),
    ],
)
def test_plans_of_another_file(
    metadata: dict[str, Any], said: str, compressed: rankrl.Compression, tmp_path: Path
) -> None:
    plan = replace(compressed.plan, metadata=metadata)
    folder = compressed.path.parent
    with pytest.raises(PlanError, match=said):
        rankrl.apply_plan(folder / "net.onnx", plan, folder / "x.npy", tmp_path / "again.onnx")
    assert not (tmp_path / "again.onnx").exists()


def test_only_for_budgets_in_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Copies of kernels are more parameters, which other budgets forbid."""
    onnx.save(small(), tmp_path / "net.onnx")
    monkeypatch.setattr("rankrl.file_compression.faster_positions", lambda *_: pytest.fail("asked for"))
    x = generator().standard_normal((40, 1, 12, 20)).astype(np.float32)
    options: Any = {"decomposition": "tucker", "candidates": 2, "timing": OPTIONS}
    found = rankrl.compress(tmp_path / "net.onnx", x, tmp_path / "small.onnx", macs=0.8, **grouped(**options))
    assert METADATA not in found.plan.metadata


def test_nodes_that_are_skipped_stay(tmp_path: Path) -> None:
    onnx.save(small(), tmp_path / "net.onnx")
    x = generator().standard_normal((40, 1, 12, 20)).astype(np.float32)
    given_file = PreparedFile.read(tmp_path / "net.onnx", x, skip=["first"])
    first = next(site for site in given_file.sites if site.name == "first")
    assert possible_positions(given_file.network, first, GROUP) == []
    rewritten = PreparedFile.read(tmp_path / "net.onnx", x, skip=["second"]).with_several_positions(
        {"first": SeveralPositions(1, 2)}
    )
    assert [site.name for site in rewritten.usable] == ["first", "last"]
    assert isinstance(rewritten.network.graph_model(), ir.Model)
