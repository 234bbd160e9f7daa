"""Reading ONNX files, and what is refused."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper
from onnx.reference import ReferenceEvaluator
from small_graphs import (
    OPSETS,
    Array,
    convolutions,
    images,
    model_of,
    network_of,
    old_network,
    sentences,
    tokens,
)

from rankrl.onnx.graph import OnnxGraphError, OnnxNetwork
from rankrl.onnx.graph.network import GraphSession
from rankrl.onnx.graph_edits import until


@pytest.mark.parametrize("opset", OPSETS)
def test_a_network_runs_as_the_reference_evaluator_does(opset: int, tmp_path: Path) -> None:
    cases: list[tuple[onnx.ModelProto, dict[str, Array]]] = [(tokens(opset), sentences(3))]
    if opset > 13:  # the evaluator's own batch normalisation of opset 13 is that of training
        cases.append((convolutions(opset), {"x": images(3)}))
    for model, feed in cases:
        found = network_of(model, tmp_path).session().run(feed)
        for output, expected in zip(found, ReferenceEvaluator(model).run(None, feed), strict=True):
            np.testing.assert_allclose(output, expected, rtol=1e-3, atol=1e-4)


def test_inputs_say_their_types_and_which_sizes_are_free(tmp_path: Path) -> None:
    words, extra = network_of(tokens(), tmp_path).inputs
    assert (words.dtype, words.shape) == (np.int64, (None, None))
    assert (extra.dtype, extra.shape) == (np.float32, (None, None, 24))


def test_external_data_are_read_and_missed(tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    onnx.save(convolutions(), path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    expected = GraphSession(convolutions(), "memory").run({"x": images(2)})
    np.testing.assert_array_equal(OnnxNetwork.load(path).session().run({"x": images(2)})[0], expected[0])
    (tmp_path / "weights.bin").unlink()
    with pytest.raises(OnnxGraphError, match=r"weights in a file next to it.*weights\.bin"):
        OnnxNetwork.load(path)


def test_until_computes_a_value_inside(tmp_path: Path) -> None:
    network = network_of(convolutions(), tmp_path)
    part = until(network.graph_model(), ["b"])
    assert [node.op_type for node in part.graph] == ["Conv", "Relu"]
    (found,) = GraphSession(part, "part").run({"x": images(2)})
    assert found.min() == 0


def test_nodes_get_names_of_their_own(tmp_path: Path) -> None:
    model = convolutions()
    for node in model.graph.node:
        node.name = "" if node.op_type == "Conv" else "same"
    names = [node.name for node in network_of(model, tmp_path).model.graph]
    assert len(set(names)) == len(names)
    assert all(names)


@pytest.mark.parametrize("content", [b"", b"no network", b"\x08\x07" * 50])
def test_what_is_no_onnx_file_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "net.onnx").write_bytes(content)
    with pytest.raises(OnnxGraphError, match=r"is no ONNX file"):
        OnnxNetwork.load(tmp_path / "net.onnx")


@pytest.mark.parametrize("kept", [0.3, 0.6, 0.9, 0.99])
def test_a_truncated_file_is_refused(kept: float, tmp_path: Path) -> None:
    content = convolutions().SerializeToString()
    (tmp_path / "net.onnx").write_bytes(content[: int(kept * len(content))])
    with pytest.raises(OnnxGraphError, match=r"again"):
        OnnxNetwork.load(tmp_path / "net.onnx")


def test_a_missing_file_and_one_that_cannot_be_converted_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(OnnxGraphError, match=r"no ONNX file at"):
        OnnxNetwork.load(tmp_path / "net.onnx")
    old = old_network(11)

    def fail(*_: object) -> onnx.ModelProto:
        raise RuntimeError("no adapter for Squeeze")

    monkeypatch.setattr("onnx.version_converter.convert_version", fail)
    with pytest.raises(
        OnnxGraphError, match=r"has opset 11; 13 or newer.*converter cannot convert it \(no adapter"
    ):
        network_of(old, tmp_path)


@pytest.mark.parametrize("opset", [9, 11])
def test_an_old_operator_set_is_converted(opset: int, tmp_path: Path) -> None:
    """Upsample, Clip, Squeeze and Dropout had attributes for what they take as inputs since."""
    model, feed = old_network(opset), {"x": images(3)}
    network = network_of(model, tmp_path)
    (found,) = network.session().run(feed)
    expected = onnxruntime.InferenceSession(model.SerializeToString()).run(None, feed)[0]
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert network.model.opset_imports == {"": 13}
    assert network.model.ir_version >= 7
    assert f"from operator set {opset} to 13" in network.converted


def test_nodes_out_of_order_are_sorted_as_onnxruntime_does(tmp_path: Path) -> None:
    model, feed = convolutions(), {"x": images(3)}
    nodes = [*reversed(model.graph.node)]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    (expected,) = network_of(convolutions(), tmp_path).session().run(feed)
    np.testing.assert_array_equal(network_of(model, tmp_path).session().run(feed)[0], expected)
    model.graph.node[0].input[0] = model.graph.node[0].output[0]
    with pytest.raises(OnnxGraphError, match="is damaged"):
        network_of(model, tmp_path)


def test_a_node_that_onnxruntime_does_not_know_is_named(tmp_path: Path) -> None:
    model = model_of([helper.make_node("Relu", ["x"], ["y"], "known")], {}, {"x": ["n", 2]}, {"y": ["n", 2]})
    model.graph.node[0].op_type, model.graph.node[0].domain = "Magic", "nobody.knows"
    model.opset_import.append(helper.make_opsetid("nobody.knows", 1))
    with pytest.raises(OnnxGraphError, match=r"cannot run .*Magic"):
        network_of(model, tmp_path).session()
