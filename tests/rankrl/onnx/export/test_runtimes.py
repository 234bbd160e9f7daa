"""What holds for every runtime; one that cannot be used here is skipped, with its own words for why."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from torch import nn

from decomposition import Quantise
from rankrl.errors import ConfigError
from rankrl.onnx.errors import ExportError
from rankrl.onnx.export import (
    ExportResult,
    class_agreement,
    export_network,
    export_onnx,
    quantise_onnx,
    verify_onnx,
)
from rankrl.onnx.runtimes import get_runtime, list_runtimes, onnxruntime_cuda, open_session
from rankrl.timing import measure_latency, time_in_turns

SHAPE = (3, 8, 8)
Maker = Callable[[str], nn.Module]


@pytest.fixture(params=list_runtimes())
def runtime(request: pytest.FixtureRequest) -> str:
    obstacle = get_runtime(request.param).obstacle()
    if obstacle is not None:
        pytest.skip(f"{request.param}: {obstacle}")
    return str(request.param)


def images(count: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((count, *SHAPE), dtype=np.float32)


def test_a_network_computes_what_pytorch_and_onnx_s_reference_compute(
    runtime: str, exported: tuple[nn.Module, ExportResult]
) -> None:
    model, written = exported
    assert verify_onnx(model, written.path, torch.from_numpy(images(7)), runtime=runtime) <= 1e-4
    expected = ReferenceEvaluator(str(written.path)).run(None, {"input": images(3)})
    found = open_session(written.path, threads=1, runtime=runtime).run(images(3))
    assert [output.shape for output in found] == [output.shape for output in expected]
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-4, atol=1e-4)


def test_a_session_says_what_it_takes(runtime: str, plain_file: Path, fixed_file: Path) -> None:
    session = open_session(plain_file, runtime=runtime)
    assert (session.input_name, session.input_dtype) == ("input", np.float32)
    assert (session.input_shape, session.fixed_batch) == ((None, *SHAPE), None)
    assert open_session(fixed_file, runtime=runtime).fixed_batch == 4


@pytest.mark.parametrize("wrong", [images(2)[:, :1], images(2).astype(np.float64), images(2)[0]])
def test_batches_that_do_not_fit_are_refused(runtime: str, plain_file: Path, wrong: np.ndarray) -> None:
    with pytest.raises(ExportError, match=r"takes .* of shape \(None, 3, 8, 8\) and fails on float"):
        open_session(plain_file, runtime=runtime).run(wrong)


def test_outputs_stay_when_the_next_batch_runs(runtime: str, plain_file: Path) -> None:
    session = open_session(plain_file, runtime=runtime)
    (first,) = session.run(images(2))
    kept = first.copy()
    session.run(images(2) + 1)
    np.testing.assert_array_equal(first, kept)


def test_files_that_are_missing_or_damaged_are_refused(
    runtime: str, plain_file: Path, tmp_path: Path
) -> None:
    with pytest.raises(ExportError, match="there is no ONNX file"):
        open_session(tmp_path / "other.onnx", runtime=runtime)
    damaged = tmp_path / "damaged.onnx"
    damaged.write_bytes(plain_file.read_bytes()[:200])
    with pytest.raises(ExportError, match=f"{runtime} cannot load"):
        open_session(damaged, runtime=runtime)
    with pytest.raises(ExportError, match="threads is 0"):
        open_session(plain_file, threads=0, runtime=runtime)


def test_a_file_in_integers_gives_the_classes_of_onnxruntime(
    runtime: str, make: Maker, plain_file: Path, tmp_path: Path
) -> None:
    integers = quantise_onnx(plain_file, tmp_path / "int8.onnx", [images(64)])
    expected = open_session(integers).run(images(200))[0]
    found = open_session(integers, runtime=runtime).run(images(200))[0]
    assert np.abs(found - expected).max() <= 0.05 * np.abs(expected).max()
    network = make("plain").eval()
    pairs = [(torch.from_numpy(images(200)), torch.from_numpy(images(200)))]
    assert class_agreement(network, integers, pairs, runtime=runtime) >= 0.95


@pytest.fixture(scope="module")
def rounded(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Path]:
    """A network with weights stored in 8 bits and in 4, and its file."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 5)).eval()
    for bits, layer in {8: network[0], 4: network[-1]}.items():
        Quantise(bits, "float32").round(layer)
    path = tmp_path_factory.mktemp("rounded") / "model.onnx"
    return network, export_network(network, path, SHAPE, []).path


def test_weights_stored_in_integers_are_computed_with_in_floating_point(
    runtime: str, rounded: tuple[nn.Module, Path]
) -> None:
    network, path = rounded
    with torch.no_grad():
        expected = network(torch.from_numpy(images(50))).numpy()
    found = open_session(path, runtime=runtime).run(images(50))[0]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_files_are_timed(runtime: str, plain_file: Path) -> None:
    assert measure_latency(plain_file, batch=2, runs=3, runtime=runtime).median_ms > 0
    clock = "processor" if get_runtime(runtime).in_calling_thread else "wall"
    timed = time_in_turns([("onnxruntime", plain_file), (runtime, plain_file)], batch=2, runs=3)
    assert [latency.clock for latency in timed.latencies] == ["processor", clock]
    assert timed.compare(0, 1).ratio_low <= timed.compare(0, 1).ratio_high


@pytest.fixture(scope="module")
def heavy_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a network that computes for a while."""
    network = nn.Sequential(nn.Conv2d(3, 64, 3), nn.ReLU(), nn.Conv2d(64, 64, 3))
    return export_onnx(network, tmp_path_factory.mktemp("heavy") / "model.onnx", (3, 32, 32)).path


def test_one_thread_computes_in_the_thread_that_calls(runtime: str, heavy_file: Path) -> None:
    """What the processor time of a pass stands on; elsewhere passes are timed on the wall."""
    if not get_runtime(runtime).in_calling_thread:
        pytest.skip(f"{runtime} does not promise it")
    session = open_session(heavy_file, threads=1, runtime=runtime)
    batch = np.zeros((8, 3, 32, 32), np.float32)
    session.run(batch)
    thread, process = time.thread_time(), time.process_time()
    for _ in range(5):
        session.run(batch)
    thread, process = time.thread_time() - thread, time.process_time() - process
    assert thread >= 0.9 * process


def test_versions_are_known(runtime: str) -> None:
    assert get_runtime(runtime).version[0].isdigit()


def test_unknown_runtimes_are_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"no runtime 'openvin'.* Did you mean 'openvino'"):
        get_runtime("openvin")


def test_a_runtime_that_is_not_installed_says_what_to_install(
    plain_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "openvino", None)
    with pytest.raises(
        ConfigError, match=r"'openvino' cannot be used here: .*pip install 'rankrl\[openvino\]'"
    ):
        open_session(plain_file, runtime="openvino")


@pytest.mark.parametrize(
    ("built", "starts", "said"),
    [(False, False, "pip install onnxruntime-gpu"), (True, False, "finds no GPU"), (True, True, None)],
)
def test_onnxruntime_without_cuda_says_what_is_missing(
    built: bool, starts: bool, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    providers = ["CPUExecutionProvider", *(["CUDAExecutionProvider"] if built else [])]
    monkeypatch.setattr(onnxruntime_cuda.onnxruntime, "get_available_providers", lambda: providers)
    monkeypatch.setattr(onnxruntime_cuda, "_starts", lambda: starts)
    obstacle = get_runtime("onnxruntime_cuda").obstacle()
    assert obstacle is None if said is None else said in str(obstacle)
