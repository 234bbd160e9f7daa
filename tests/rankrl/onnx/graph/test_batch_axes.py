"""Which axes count the inputs of a batch: constants beside it, states, sequences, files of one batch size."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from call_options import grouped, layer_options
from onnx import TensorProto, helper, numpy_helper
from small_graphs import drawn, model_of, network_of, of_low_rank, recorded_states, with_state

import rankrl
from rankrl.onnx.graph import OnnxGraphError, find_sites, split_inputs
from rankrl.onnx.graph.calibration import collect_moments
from rankrl.onnx.graph.inputs import find_batch_axes
from rankrl.onnx.graph.network import Array

node = helper.make_node
QUICK: dict[str, Any] = {
    "params": 0.6,
    "candidates": 3,
    "decomposition": "tucker",
    "iterations": 5,
    "final_iterations": 10,
}


def scaled(scale: Sequence[Any], *, batch: Any = "n") -> onnx.ModelProto:
    """Two products of x, divided by the largest of some scales, which come first among the inputs."""
    nodes = [
        node("MatMul", ["x", "first"], ["a"], "first"),
        node("Tanh", ["a"], ["b"], "tanh"),
        node("MatMul", ["b", "second"], ["c"], "second"),
        node("ReduceMax", ["scale"], ["most"], "most", keepdims=0),
        node("Div", ["c", "most"], ["y"], "divide"),
    ]
    constants = {"first": of_low_rank(24, 24, 5), "second": of_low_rank(24, 24, 4)}
    return model_of(nodes, constants, {"scale": scale, "x": [batch, 24]}, {"y": [batch, 24]})


def weights(path: Path) -> list[Array]:
    return [
        numpy_helper.to_array(each)
        for each in onnx.load(path).graph.initializer
        if each.data_type == TensorProto.FLOAT
    ]


@pytest.mark.parametrize("scale", [np.array(2, np.float32), np.array([1, 2, 0.5], np.float32)])
def test_an_input_without_a_batch_axis_is_a_constant(scale: Array, tmp_path: Path) -> None:
    model = scaled(scale.shape)
    onnx.save(model, tmp_path / "net.onnx")
    x = drawn(60, 24)
    found = rankrl.compress(
        tmp_path / "net.onnx", {"x": x, "scale": scale}, tmp_path / "small.onnx", **grouped(**QUICK)
    )
    constants = model.graph.initializer
    constants.append(numpy_helper.from_array(scale, "scale"))
    del model.graph.input[0]
    onnx.save(model, tmp_path / "inside.onnx")
    inside = rankrl.compress(tmp_path / "inside.onnx", x, tmp_path / "small2.onnx", **grouped(**QUICK))
    assert [layer.operations for layer in found.plan] == [layer.operations for layer in inside.plan]
    assert found.score == pytest.approx(inside.score)
    outputs = [
        onnxruntime.InferenceSession(tmp_path / name).run(None, feed)[0]
        for name, feed in (("small.onnx", {"x": x, "scale": scale}), ("small2.onnx", {"x": x}))
    ]
    np.testing.assert_allclose(*outputs, atol=1e-5)


def test_a_state_counts_inputs_on_another_axis(tmp_path: Path) -> None:
    """The same network with the batch in front throughout is the oracle."""
    results = []
    for name, order, state, axis in (("a", (0, 1, 2), [2, "n", 16], 1), ("b", (1, 0, 2), ["n", 2, 16], 0)):
        path = tmp_path / f"{name}.onnx"
        onnx.save(with_state(order, state), path)
        results.append(
            rankrl.compress(
                path, recorded_states(64, axis=axis), tmp_path / f"{name}s.onnx", **grouped(**QUICK)
            )
        )
    ours, oracle = results
    assert [layer.operations for layer in ours.plan] == [layer.operations for layer in oracle.plan]
    assert any(layer.operations for layer in ours.plan)
    for each, other in zip(weights(tmp_path / "as.onnx"), weights(tmp_path / "bs.onnx"), strict=True):
        np.testing.assert_allclose(each, other, atol=1e-4)
    assert [(each.name, each.top1) for each in ours.outputs] == [
        (each.name, each.top1) for each in oracle.outputs
    ]
    assert ours.heldout == 13
    assert ours.before["macs"] == 2 * 256 + 128


@pytest.mark.parametrize(
    ("shapes", "sizes", "axes"),
    [
        ({"x": ["n", 4], "t": [3]}, {"x": (9, 4), "t": (3,)}, {"x": 0, "t": None}),
        ({"t": ["k"], "x": ["n", 4]}, {"x": (9, 4), "t": (3,)}, {"x": 0, "t": None}),
        ({"x": ["T", "N", 4], "h": [2, "N", 4]}, {"x": (5, 9, 4), "h": (2, 9, 4)}, {"x": 1, "h": 1}),
        ({"x": [None, 4], "h": [2, None, 4]}, {"x": (9, 4), "h": (2, 9, 4)}, {"x": 0, "h": 1}),
        ({"x": ["time", "batch_size", 4]}, {"x": (5, 9, 4)}, {"x": 1}),
        ({"x": ["a", 3, "h", "w"], "z": ["b", 3, "h", "w"]}, {}, {"x": 0, "z": 0}),
        ({"x": [1, 4], "h": [2, 1, 4], "r": []}, {"x": (9, 4), "h": (2, 9, 4), "r": ()}, {"x": 0, "h": 1}),
        ({"x": [1, "t", 4], "n": ["t"]}, {"x": (1, 7, 4), "n": (7,)}, {"x": 0, "n": None}),
        ({"x": [4, "t", 8]}, {"x": (8, 7, 8)}, {"x": 0}),
        ({"x": [4, 3], "z": [4, 2], "t": [3]}, {"x": (4, 3), "z": (4, 2), "t": (3,)}, {"x": 0, "z": 0}),
    ],
)
def test_names_and_sizes_suggest_axes(
    shapes: dict[str, list[Any]],
    sizes: dict[str, tuple[int, ...]],
    axes: dict[str, int | None],
    tmp_path: Path,
) -> None:
    nodes = [node("Identity", [name], [f"{name}_out"]) for name in shapes]
    model = model_of(nodes, {}, shapes, {f"{name}_out": shape for name, shape in shapes.items()})
    network = network_of(model, tmp_path)
    if sizes:
        network = network.with_axes(
            find_batch_axes(network, {name: drawn(*size) for name, size in sizes.items()})
        )
    assert network.axes.inputs == {name: axes.get(name) for name in shapes}


def test_axes_with_which_no_output_grows_are_passed_over(tmp_path: Path) -> None:
    nodes = [node("Gather", ["x", "last"], ["y"], "last step", axis=0)]
    shapes = {"x": ["T", "N", 4]}, {"y": ["N", 4]}
    network = network_of(model_of(nodes, {"last": np.array(-1, np.int64)}, *shapes), tmp_path)
    found = find_batch_axes(network, {"x": drawn(5, 9, 4)})
    assert (found.inputs, found.outputs, found.fixed) == ({"x": 1}, {"y": 0}, None)


def over_time() -> onnx.ModelProto:
    """A recurrent layer along the first axis, (steps, 1, 4), behind a product."""
    nodes = [
        node("MatMul", ["x", "mix"], ["a"], "mix"),
        node("RNN", ["a", "into", "again", "", "", "h"], ["all"], "rnn", hidden_size=4),
        node("Squeeze", ["all", "one"], ["y"], "squeeze"),
    ]
    weights = {"mix": of_low_rank(4, 4, 2), "into": drawn(1, 4, 4), "again": drawn(1, 4, 4)}
    weights["one"] = np.array([1], np.int64)
    inputs: dict[str, Sequence[Any]] = {"x": ["steps", 1, 4], "h": [1, 1, 4]}
    return model_of(nodes, weights, inputs, {"y": ["steps", 1, 4]})


def test_steps_of_a_sequence_are_not_taken_for_inputs(tmp_path: Path) -> None:
    network = network_of(over_time(), tmp_path)
    feeds = [{"x": drawn(4 + number % 3, 1, 4) + number, "h": np.zeros((1, 1, 4))} for number in range(10)]
    with pytest.raises(OnnxGraphError, match=r"% off what they are alone.*batch_axes=\{x: null, h: null\}"):
        split_inputs(feeds, network)
    split = split_inputs(feeds, network, batch_axes={"x": None, "h": None})
    assert (split.axes.fixed, len(split.calibration), len(split.heldout)) == (1, 8, 2)
    held = {feed["x"].tobytes() for feed in (*split.calibration, *split.heldout)}
    assert held == {each["x"].tobytes() for each in feeds}
    assert split_inputs(feeds, network, batch_axes={"x": 0}).axes.inputs == {"x": 0, "h": None}


def test_integers_scaled_by_the_whole_batch_are_inputs_all_the_same(tmp_path: Path) -> None:
    nodes = [
        node("DynamicQuantizeLinear", ["x"], ["a", "scale", "zero"], "round"),
        node("DequantizeLinear", ["a", "scale", "zero"], ["y"], "back"),
    ]
    network = network_of(model_of(nodes, {}, {"x": ["n", 4]}, {"y": ["n", 4]}), tmp_path)
    x = drawn(9, 4) * np.array([[100]] + [[0.1]] * 8, np.float32)
    assert find_batch_axes(network, {"x": x}).inputs == {"x": 0}


def test_random_numbers_of_a_file_itself_are_no_influence(tmp_path: Path) -> None:
    nodes = [node("RandomNormalLike", ["x"], ["noise"]), node("Add", ["x", "noise"], ["y"])]
    network = network_of(model_of(nodes, {}, {"x": ["n", 4]}, {"y": ["n", 4]}), tmp_path)
    assert find_batch_axes(network, {"x": drawn(9, 4)}).inputs == {"x": 0}


def test_stated_axes_hold(tmp_path: Path) -> None:
    nodes = [node("Relu", ["x"], ["y"]), node("Relu", ["z"], ["v"])]
    shapes = {"x": ["a", "b", 4], "z": ["a"]}, {"y": ["a", "b", 4], "v": ["a"]}
    network = network_of(model_of(nodes, {}, *shapes), tmp_path)
    feed = {"x": drawn(5, 5, 4), "z": drawn(5)}
    assert find_batch_axes(network, feed).inputs == {"x": 0, "z": 0}
    found = find_batch_axes(network, feed, {"x": -2, "z": None})
    assert (found.inputs, found.outputs) == ({"x": 1, "z": None}, {"y": 1, "v": None})
    assert found.size(feed) == 5


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({"w": 0}, r"names the input 'w', but .* takes 'scale' .*, 'x' "),
        ({"x": 2}, r"says 2 of 'x' .*one of its 2 axes, counted from 0, or null"),
        ({"x": True}, r"says True of 'x'"),
        ({"scale": 0, "x": 0}, r"'scale' 3 \(axis 0\), 'x' 9 \(axis 0\); give as many of each"),
    ],
)
def test_stated_axes_that_do_not_fit_are_refused(
    stated: dict[str, int | None], message: str, tmp_path: Path
) -> None:
    network = network_of(scaled([3]), tmp_path)
    with pytest.raises(OnnxGraphError, match=message):
        find_batch_axes(network, {"x": drawn(9, 24), "scale": drawn(3)}, stated)


def with_fixed_reshape(batch: int) -> onnx.ModelProto:
    """A file whose batch is free, but for a Reshape that was traced at one size."""
    nodes = [
        node("Conv", ["x", "first"], ["a"], "first", pads=[1, 1, 1, 1]),
        node("Relu", ["a"], ["b"], "relu"),
        node("Reshape", ["b", "sizes"], ["c"], "traced"),
        node("MatMul", ["c", "last"], ["y"], "last"),
    ]
    constants = {
        "first": of_low_rank(8, 3 * 9, 4).reshape(8, 3, 3, 3),
        "sizes": np.array([batch, 8 * 16], np.int64),
        "last": of_low_rank(8 * 16, 6, 3),
    }
    return model_of(nodes, constants, {"x": ["n", 3, 4, 4]}, {"y": ["n", 6]})


@pytest.mark.parametrize(("size", "own"), [(1, 1), (1, 60), (4, 60), (5, 5)])
def test_batches_are_never_larger_than_the_file_can_run(size: int, own: int, tmp_path: Path) -> None:
    x = drawn(60, 3, 4, 4)
    inputs = x if own == 60 else [{"x": x[first : first + own]} for first in range(0, 60, own)]
    network = network_of(with_fixed_reshape(size), tmp_path)
    split = split_inputs(inputs, network)
    assert split.axes.fixed == size
    assert {len(feed["x"]) for feed in (*split.calibration, *split.heldout)} == {size}


@pytest.mark.parametrize("size", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_a_file_of_one_batch_size_is_measured_and_timed_in_it(size: int, tmp_path: Path) -> None:
    x = drawn(60, 3, 4, 4)
    onnx.save(with_fixed_reshape(size), tmp_path / "net.onnx")
    found = rankrl.compress(
        tmp_path / "net.onnx", x, tmp_path / "small.onnx", **grouped(precisions=("float32", "int8"), **QUICK)
    )
    assert found.latency.compressed.batch == size
    onnxruntime.InferenceSession(tmp_path / "small.onnx").run(None, {"x": x[:size]})


def test_a_file_that_runs_at_no_size_is_refused_with_what_was_tried(tmp_path: Path) -> None:
    network = network_of(with_fixed_reshape(7), tmp_path)
    with pytest.raises(
        OnnxGraphError, match=r"batches of 1, 2, 32, 16, 8, 4, .* batch_axes=\{x: 0\}; .*dataset\.batch_axes"
    ):
        split_inputs(drawn(300, 3, 4, 4), network)
    feeds = [{"x": drawn(7, 3, 4, 4)} for _ in range(4)]
    assert split_inputs(feeds, network).axes.fixed == 7


@pytest.mark.parametrize("size", [-1, 0])
def test_sizes_below_one_are_free(size: int, tmp_path: Path) -> None:
    model = scaled([], batch=1)
    for each in (model.graph.input[1], model.graph.output[0]):
        each.type.tensor_type.shape.dim[0].dim_value = size
    network = network_of(model, tmp_path)
    assert network.inputs[1].shape == (None, 24)
    split = split_inputs({"x": drawn(60, 24), "scale": np.float32(2)}, network)
    assert split.axes.fixed is None
    found = rankrl.compress(
        tmp_path / "net.onnx",
        {"x": drawn(60, 24), "scale": np.float32(2)},
        tmp_path / "small.onnx",
        **grouped(**QUICK),
    )
    assert found.latency.compressed.batch == 16


def test_a_file_of_one_input_at_a_time_takes_arrays_of_many(tmp_path: Path) -> None:
    network = network_of(with_state((0, 1, 2), [2, 1, 16], batch=1), tmp_path)
    split = split_inputs(recorded_states(30), network)
    assert (split.axes.inputs, split.axes.fixed) == ({"x": 0, "state": 1, "rate": None}, 1)
    assert {feed["state"].shape for feed in split.calibration} == {(2, 1, 16)}
    assert len(split.calibration) == 24


def test_inputs_without_any_batch_axis_are_run_one_by_one(tmp_path: Path) -> None:
    nodes = [node("MatMul", ["x", "weight"], ["a"], "mix"), node("Relu", ["a"], ["y"])]
    network = network_of(
        model_of(nodes, {"weight": of_low_rank(16, 16, 3)}, {"x": [5, 16]}, {"y": [5, 16]}), tmp_path
    )
    feeds = [{"x": each} for each in drawn(20, 5, 16)]
    split = split_inputs(feeds, network, batch_axes={"x": None})
    assert (len(split.calibration), len(split.heldout)) == (16, 4)
    found = rankrl.compress(
        tmp_path / "net.onnx", feeds, tmp_path / "small.onnx", batch_axes={"x": None}, **grouped(**QUICK)
    )
    assert (found.heldout, found.outputs[0].top1) == (4, None)
    assert found.certificate is not None
    assert found.certificate.inputs == 4


def test_constants_that_differ_keep_batches_apart(tmp_path: Path) -> None:
    network = network_of(scaled([]), tmp_path)
    feeds = [{"x": drawn(3, 24) + number, "scale": np.float32(number)} for number in range(1, 9)]
    split = split_inputs(feeds, network)
    for feed in (*split.calibration, *split.heldout):
        np.testing.assert_array_equal(feed["x"], drawn(3, 24) + feed["scale"])


def test_the_steps_of_a_sequence_stay_together_and_in_order(tmp_path: Path) -> None:
    network = network_of(with_state((0, 1, 2), [2, "n", 16]), tmp_path)
    steps = recorded_states(1)
    sequences = [
        [{**steps, "x": np.full((1, 16), 100 * number + step, np.float32)} for step in range(2 + number % 3)]
        for number in range(12)
    ]
    split = split_inputs(sequences, network, heldout=0.25, scored=0.25, seed=3)
    parts = [
        [int(feed["x"][0, 0]) for feed in part] for part in (split.calibration, split.scored, split.heldout)
    ]
    assert sorted(step for part in parts for step in part) == [
        100 * n + step for n in range(12) for step in range(2 + n % 3)
    ]
    numbers = [{each // 100 for each in part} for part in parts]
    assert [len(each) for each in numbers] == [6, 3, 3]
    assert not numbers[0] & numbers[1] | numbers[0] & numbers[2] | numbers[1] & numbers[2]
    assert all(part == sorted(part) for part in parts)


def test_a_scalar_that_comes_first_is_quantised_and_timed_with_the_others(tmp_path: Path) -> None:
    onnx.save(scaled([]), tmp_path / "net.onnx")
    inputs = {"x": drawn(60, 24), "scale": np.float32(2)}
    found = rankrl.compress(
        tmp_path / "net.onnx",
        inputs,
        tmp_path / "small.onnx",
        bytes=0.5,
        decomposition=layer_options(precisions=("int8",), candidates=4),
    )
    assert "QuantizeLinear" in {each.op_type for each in onnx.load(tmp_path / "small.onnx").graph.node}
    assert found.score > 0.8


def test_patches_know_which_input_they_are_from_wherever_that_is_counted(tmp_path: Path) -> None:
    """Time first or batch first, the moments are the same, their shrinkage over inputs included."""
    x = drawn(12, 8, 16) + 3 * drawn(12, 1, 16)[:, :, ::-1]
    moments = []
    for axis, shape in ((0, ["n", 8, 16]), (1, [8, "n", 16])):
        nodes = [node("MatMul", ["x", "weight"], ["a"], "mix"), node("Relu", ["a"], ["y"])]
        network = network_of(
            model_of(nodes, {"weight": of_low_rank(16, 16, 3)}, {"x": shape}, {"y": shape}), tmp_path
        )
        feeds = [{"x": np.moveaxis(each, 0, axis)} for each in np.split(x, 3)]
        network = network.with_axes(find_batch_axes(network, feeds[0], {"x": axis}))
        sites = find_sites(network, feeds[0])
        moments.append(collect_moments(network, sites, feeds)["mix"])
    np.testing.assert_allclose(moments[0].covariance, moments[1].covariance, rtol=1e-5)
    assert moments[0].shrinkage == pytest.approx(moments[1].shrinkage, rel=1e-4)
    assert moments[0].shrinkage > 0
