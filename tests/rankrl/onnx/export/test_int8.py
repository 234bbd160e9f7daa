"""Files in 8-bit integers: onnxruntime's own quantiser on our exports, and what it cannot take."""

import shutil
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

from rankrl.errors import ExportError
from rankrl.onnx.export import export_onnx, quantise_onnx, static_quantiser
from rankrl.onnx.export.int8 import choose_ranges
from rankrl.onnx.export.static_quantiser import output_error, sums_overflow

SHAPE = (3, 12, 12)


def make_network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 10),
    ).eval()


@pytest.fixture(scope="module")
def float_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_onnx(make_network(), tmp_path_factory.mktemp("float") / "float.onnx", SHAPE).path


def batches(count: int = 4, size: int = 16) -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    return [generator.standard_normal((size, *SHAPE), dtype=np.float32) for _ in range(count)]


def outputs(path: Path, batch: np.ndarray, *, integers: bool = True) -> np.ndarray:
    """Run a file; without integers, the rounded numbers are computed with in floating point."""
    options = onnxruntime.SessionOptions()
    if not integers:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    found: np.ndarray = session.run(None, {session.get_inputs()[0].name: batch})[0]
    return found


def old_model() -> onnx.ModelProto:
    entry, end = (
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["batch", *SHAPE])
        for name in ("input", "output")
    )
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Relu", ["input"], ["output"])], "old", [entry], [end]
    )
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 12)], ir_version=7)


def test_an_int8_file_is_smaller_and_computes_nearly_the_same(float_file: Path, tmp_path: Path) -> None:
    path, target = float_file, tmp_path / "int8.onnx"
    assert quantise_onnx(path, target, iter(batches())) == target
    (batch,) = batches(1, 7)
    expected, found = outputs(path, batch), outputs(target, batch)
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() < 0.03 * np.abs(expected).max()
    weights = [
        each for each in onnx.load(target).graph.initializer if each.data_type == onnx.TensorProto.INT8
    ]
    assert sum(np.prod(each.dims) for each in weights) >= 16 * 3 * 9 + 16 * 16 * 9 + 160


@pytest.mark.parametrize("kind", ["convolution", "product"])
def test_weights_of_seven_bits_overflow_nowhere_and_are_taken_where_eight_would(
    kind: str, tmp_path: Path
) -> None:
    layer = nn.Conv2d(3, 16, 3) if kind == "convolution" else nn.Linear(3 * 12 * 12, 16)
    network = nn.Sequential(layer if kind == "convolution" else nn.Sequential(nn.Flatten(), layer), nn.ReLU())
    for parameter in network.parameters():
        nn.init.ones_(parameter)  # with inputs of one, the largest sums that there are
    batch = np.ones((4, *SHAPE), dtype=np.float32)
    path = export_onnx(network.eval(), tmp_path / "float.onnx", SHAPE).path
    calibration = [np.concatenate([batch, 0 * batch])]

    def written(reduce_range: bool | None) -> Path:
        target = tmp_path / f"{reduce_range}.onnx"
        return quantise_onnx(path, target, calibration, reduce_range=reduce_range)

    def largest(file: Path) -> int:
        tensors = map(onnx.numpy_helper.to_array, onnx.load(file).graph.initializer)
        return max(int(np.abs(each.astype(int)).max()) for each in tensors if each.dtype == np.int8)

    reduced, full = written(True), written(False)
    assert (largest(reduced), largest(full)) == (64, 127)
    assert written(None).read_bytes() == (reduced if sums_overflow() else full).read_bytes()
    exact = outputs(path, batch)
    for file, cut in ((reduced, False), (full, sums_overflow())):
        np.testing.assert_allclose(outputs(file, batch, integers=False), exact, rtol=0.02)
        assert (outputs(file, batch) < 0.9 * exact).all() == cut
    np.testing.assert_allclose(outputs(reduced, batch), exact, rtol=0.02)


def test_a_file_of_fixed_batch_is_calibrated_on_batches_of_that_size(tmp_path: Path) -> None:
    path, network = tmp_path / "float.onnx", nn.Conv2d(3, 4, 3)
    export_onnx(network, path, SHAPE, sample=torch.zeros(4, *SHAPE), dynamic_batch=False)
    with pytest.raises(ExportError, match="without calibration batches of 4, the batch size of the file"):
        quantise_onnx(path, tmp_path / "int8.onnx", batches(size=16))
    assert quantise_onnx(path, tmp_path / "int8.onnx", batches(size=4)).exists()


def test_what_cannot_be_quantised_is_refused_and_nothing_is_written(float_file: Path, tmp_path: Path) -> None:
    path, target = tmp_path / "float.onnx", tmp_path / "int8.onnx"
    with pytest.raises(ExportError, match=r"no ONNX file at .*float\.onnx"):
        quantise_onnx(path, target, batches())
    shutil.copy(float_file, path)
    with pytest.raises(ExportError, match="without calibration batches"):
        quantise_onnx(path, target, [])
    with pytest.raises(ExportError, match="NaN or infinite values on the calibration inputs"):
        quantise_onnx(path, target, [np.full((2, *SHAPE), np.nan, dtype=np.float32)])
    with pytest.raises(ExportError, match="fails on float32 of shape"):
        quantise_onnx(path, target, [np.zeros((2, 5, 5, 5), dtype=np.float32)])
    onnx.save(old_model(), tmp_path / "old.onnx")
    with pytest.raises(ExportError, match="opset 12; 8-bit integers need 13"):
        quantise_onnx(tmp_path / "old.onnx", target, batches())
    assert not target.exists()
    quantise_onnx(path, target, batches())
    before = path.read_bytes(), target.read_bytes()
    for there in (path, target):  # a later batch fails inside onnxruntime
        with pytest.raises(ExportError, match="onnxruntime cannot quantise"):
            quantise_onnx(path, there, [*batches(), np.zeros((2, 5, 5, 5), dtype=np.float32)])
    assert (path.read_bytes(), target.read_bytes()) == before
    with pytest.raises(ExportError, match="quantised already"):
        quantise_onnx(target, tmp_path / "again.onnx", batches())


def error(path: Path, exact: Path, batch: np.ndarray) -> float:
    expected = outputs(exact, batch)
    return float(np.mean((outputs(path, batch) - expected) ** 2) / expected.var())


def test_ranges_are_those_that_change_the_outputs_least(tmp_path: Path) -> None:
    network = make_network()
    with torch.no_grad():
        network[0].weight[:, 0] = 0  # type: ignore[index, union-attr]
    path, plain, target = (tmp_path / f"{name}.onnx" for name in ("float", "ends", "fitted"))
    export_onnx(network, path, SHAPE)
    ordinary = batches()
    quantise_onnx(path, plain, ordinary, fitted=False)
    quantise_onnx(path, target, ordinary)
    whole = np.concatenate(ordinary)
    assert error(target, path, whole) <= error(plain, path, whole)
    ordinary[0][0, 0, 0, 0] = 1000  # nothing depends on it, and it makes the steps of the others too coarse
    quantise_onnx(path, plain, ordinary, fitted=False)
    quantise_onnx(path, target, ordinary)
    (batch,) = batches(1, 7)
    assert error(target, path, batch) < 0.1 * error(plain, path, batch)


@pytest.mark.parametrize("probable", [False, True])
def test_an_error_of_outputs_is_none_for_the_same_and_one_for_their_mean(probable: bool) -> None:
    exact = np.random.default_rng(0).random((20, 10), np.float32) * (1 if probable else 5)
    other = np.random.default_rng(1).random((20, 10), np.float32)
    assert output_error([exact], [exact]) == pytest.approx(0, abs=1e-12)
    assert output_error([np.full_like(exact, exact.mean())], [exact]) == pytest.approx(1)
    assert output_error([0.9 * exact, other], [exact, other]) == output_error([0.9 * exact], [exact]) / 2 > 0
    assert output_error([other], [np.ones_like(other)]) == 0  # an output that never changes


def test_a_choice_serves_files_with_fewer_integers_without_a_pass(
    float_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = [each.name for each in onnx.load(float_file).graph.initializer if len(each.dims) > 1]
    choice = choose_ranges(float_file, batches(), weights=weights)
    own = quantise_onnx(float_file, tmp_path / "own.onnx", batches(), weights=weights)
    monkeypatch.setattr(static_quantiser, "collect_spreads", None)
    monkeypatch.setattr(static_quantiser, "mean_moves", None)
    for count in (3, 2, 1):
        target = tmp_path / f"{count}.onnx"
        quantise_onnx(float_file, target, batches(), weights=weights[:count], choice=choice)
        assert error(target, float_file, np.concatenate(batches())) < 3e-3
    assert (tmp_path / "3.onnx").read_bytes() == own.read_bytes()


def test_a_choice_says_how_ranges_of_other_weights_are_found(float_file: Path, tmp_path: Path) -> None:
    choice = choose_ranges(float_file, batches()).without_values()
    again = quantise_onnx(float_file, tmp_path / "again.onnx", batches(), choice=choice)
    assert again.read_bytes() == quantise_onnx(float_file, tmp_path / "own.onnx", batches()).read_bytes()


def test_weights_and_biases_in_constant_nodes_are_what_they_are_elsewhere(
    float_file: Path, tmp_path: Path
) -> None:
    model = onnx.load(float_file)
    nodes = [
        onnx.helper.make_node("Constant", [], [tensor.name], value=tensor)
        for tensor in model.graph.initializer
    ]
    nodes += model.graph.node
    del model.graph.initializer[:]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    path = tmp_path / "constants.onnx"
    onnx.save(model, path)
    found, expected = (
        quantise_onnx(each, tmp_path / f"{each.stem}8.onnx", batches()) for each in (path, float_file)
    )
    (batch,) = batches(1, 7)
    np.testing.assert_array_equal(outputs(found, batch), outputs(expected, batch))
