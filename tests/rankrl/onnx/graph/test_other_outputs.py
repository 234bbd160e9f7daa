"""Outputs that are no tensors: the network is compressed up to the tensors in front, and they stay."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from call_options import layer_options
from onnx import TensorProto, helper, numpy_helper
from small_graphs import Array, classifier, convolutions, images

import rankrl
from rankrl.onnx.graph import OnnxGraphError, OnnxNetwork
from rankrl.onnx.protobuf import set_aside_outputs

LABELS = ["nought", "one", "two", "three", "four"]
CALL: dict[str, Any] = {
    "decomposition": layer_options("tucker", candidates=4, iterations=5, final_iterations=10),
    "timing": rankrl.LatencyOptions(batch=2, runs=2, int8=False),
    "progress": False,
}


def mapped() -> onnx.ModelProto:
    """Labels as text and a map of probabilities, as skl2onnx writes a classifier, behind a Scaler."""
    model = classifier(probabilities=True)
    graph = model.graph
    graph.node[0].input[0] = "scaled"
    graph.node.insert(
        0,
        helper.make_node(
            "Scaler", ["x"], ["scaled"], "scaler", domain="ai.onnx.ml", offset=[0.1], scale=[0.5]
        ),
    )
    graph.node.extend(
        [
            helper.make_node("ArgMax", ["y"], ["best"], "best", axis=1, keepdims=0),
            helper.make_node(
                "LabelEncoder",
                ["best"],
                ["label"],
                "label",
                domain="ai.onnx.ml",
                keys_int64s=range(5),
                values_strings=LABELS,
            ),
            helper.make_node(
                "ZipMap", ["y"], ["maps"], "zip", domain="ai.onnx.ml", classlabels_strings=LABELS
            ),
        ]
    )
    del graph.output[:]
    value = helper.make_tensor_type_proto(TensorProto.FLOAT, [])
    maps = helper.make_sequence_type_proto(helper.make_map_type_proto(TensorProto.STRING, value))
    graph.output.extend(
        [
            helper.make_value_info("maps", maps),
            helper.make_tensor_value_info("label", TensorProto.STRING, ["n"]),
        ]
    )
    model.opset_import.append(helper.make_opsetid("ai.onnx.ml", 3))
    return model


def in_pieces() -> onnx.ModelProto:
    """A sequence of parts of an output, cut at sizes that nothing else reads."""
    model = convolutions()
    graph = model.graph
    graph.initializer.append(numpy_helper.from_array(np.array([2, 3]), "sizes"))
    graph.node.append(helper.make_node("SplitToSequence", ["y", "sizes"], ["parts"], "split", axis=1))
    del graph.output[:]
    graph.output.append(helper.make_tensor_sequence_value_info("parts", TensorProto.FLOAT, None))
    return model


def read_again() -> onnx.ModelProto:
    """A sequence that is an output, and that the network itself reads, too."""
    model = convolutions()
    graph = model.graph
    graph.node[-1].output[0] = "scores"
    graph.node.extend(
        [
            helper.make_node("SequenceConstruct", ["scores", "f"], ["several"], "several"),
            helper.make_node("ConcatFromSequence", ["several"], ["y"], "joined", axis=1),
        ]
    )
    graph.output[0].type.tensor_type.shape.dim[1].dim_value = 37
    graph.output.append(helper.make_tensor_sequence_value_info("several", TensorProto.FLOAT, None))
    return model


MADE = {"maps": mapped, "pieces": in_pieces, "read again": read_again}


def answers(path: Path, x: Array) -> list[Any]:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return list(session.run(None, {"x": x}))


def numbers(answer: Any) -> Array:
    """Return the floats of a tensor, or of a sequence of tensors or maps."""
    if isinstance(answer, np.ndarray):
        return answer.reshape(len(answer), -1)
    if isinstance(answer[0], dict):
        return np.array([list(each.values()) for each in answer])
    return np.concatenate(answer, 1)


@pytest.mark.parametrize("name", MADE)
def test_what_is_set_aside_is_put_back(name: str) -> None:
    model = MADE[name]()
    onnx.checker.check_model(model)
    cut = onnx.ModelProto()
    cut.CopyFrom(model)
    aside = set_aside_outputs(cut)
    assert {value.type.WhichOneof("value") for value in cut.graph.output} == {"tensor_type"}
    onnx.checker.check_model(cut)
    whole = aside.put_back(cut)
    assert [value.name for value in whole.graph.output] == [value.name for value in model.graph.output]
    assert sorted(node.name for node in whole.graph.node) == sorted(node.name for node in model.graph.node)
    onnx.checker.check_model(whole)


@pytest.mark.parametrize("name", MADE)
def test_a_compressed_file_has_the_originals_outputs(name: str, tmp_path: Path) -> None:
    path, small = tmp_path / "net.onnx", tmp_path / "small.onnx"
    onnx.save(MADE[name](), path)
    result = rankrl.compress(path, {"x": images(60)}, small, params=0.8, **CALL)
    assert result.after["params"] <= 0.8 * result.before["params"]
    assert result.after["file_bytes"] == small.stat().st_size
    outputs = [onnx.load(each).graph.output for each in (path, small)]
    assert list(outputs[0]) == list(outputs[1])
    x = images(60)
    for before, after in zip(answers(path, x), answers(small, x), strict=True):
        if isinstance(before, np.ndarray) and before.dtype.kind not in "f":
            assert np.mean(before == after) > 0.9
            continue
        assert type(before) is type(after)
        if isinstance(before[0], dict):
            assert list(before[0]) == list(after[0])
        expected = numbers(before)
        assert np.linalg.norm(numbers(after) - expected) < 0.3 * np.linalg.norm(expected)


def test_a_score_gets_the_outputs_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    onnx.save(mapped(), path)
    x = images(40)
    right = answers(path, x)[1]

    def score(session: onnxruntime.InferenceSession) -> float:
        maps = session.run(["maps"], {"x": x})[0]
        assert session.run(None, {"x": x})[0] == maps
        return float(
            np.mean([max(each, key=each.get) == label for each, label in zip(maps, right, strict=True)])
        )

    result = rankrl.compress(path, {"x": x}, tmp_path / "small.onnx", params=0.8, score=score, **CALL)
    assert result.baseline_score == 1.0
    assert result.score > 0.8


def test_an_input_that_is_no_tensor_is_named(tmp_path: Path) -> None:
    model = convolutions()
    several = helper.make_tensor_sequence_value_info("several", TensorProto.FLOAT, ["n", 3, "h", "w"])
    model.graph.input[0].CopyFrom(several)
    model.graph.initializer.append(numpy_helper.from_array(np.array(0), "zero"))
    model.graph.node.insert(0, helper.make_node("SequenceAt", ["several", "zero"], ["x"], "at"))
    onnx.save(model, tmp_path / "net.onnx")
    with pytest.raises(OnnxGraphError, match="the input 'several' is no tensor"):
        OnnxNetwork.load(tmp_path / "net.onnx")
