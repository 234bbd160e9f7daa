"""Test the contract of runtimes: verifying, timing and scoring ONNX files."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from torch import nn

from decomposition import Quantise
from rankrl.errors import ExportError
from rankrl.onnx.export import class_agreement, export_network, export_onnx, quantise_onnx, verify_onnx
from rankrl.onnx.runtimes import get_runtime, open_session
from rankrl.timing import measure_latency, time_in_turns

INPUT_SHAPE = (3, 8, 8)


class RuntimeContract:
    """Properties that verifying, timing and scoring files require of every runtime.

    A runtime that cannot be used on this machine is skipped with its own message. The fixture `exported` can
    be replaced by other networks with inputs of shape (3, 8, 8).

    Attributes:
        names: Registered names of the runtimes that are tested.
    """

    names: Sequence[str]

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Run every test for every runtime, and that of batches which do not fit for each of these."""
        metafunc.parametrize("name", self.names)
        if "wrong" in metafunc.fixturenames:
            metafunc.parametrize("wrong", [images(2)[:, :1], images(2).astype(np.float64), images(2)[0]])

    @pytest.fixture
    def runtime(self, name: str) -> str:
        """The name of a runtime that can be used."""
        obstacle = get_runtime(name).obstacle()
        if obstacle is not None:
            pytest.skip(f"{name}: {obstacle}")
        return name

    @pytest.fixture
    def exported(self, plain_file: Path) -> tuple[nn.Module, Path]:
        """A network in training mode and its file."""
        return small_network().train(), plain_file

    @pytest.fixture
    def plain_file(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """The file of a small network."""
        write = partial(export_onnx, small_network(), input_shape=INPUT_SHAPE)
        return _written_once(tmp_path_factory, "plain", write)

    @pytest.fixture
    def fixed_file(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """The file of a small network for batches of 4."""
        options: dict[str, Any] = {"dynamic_batch": False, "sample": torch.zeros(4, *INPUT_SHAPE)}
        write = partial(export_onnx, small_network(), input_shape=INPUT_SHAPE, **options)
        return _written_once(tmp_path_factory, "fixed", write)

    @pytest.fixture
    def rounded(self, tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Path]:
        """A network with weights stored in 8 bits and in 4, and its file."""
        torch.manual_seed(0)
        network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 5)).eval()
        for bits, layer in {8: network[0], 4: network[-1]}.items():
            Quantise(bits, "float32").round(layer)
        write = partial(export_network, network, input_shape=INPUT_SHAPE, inputs=[])
        return network, _written_once(tmp_path_factory, "rounded", write)

    @pytest.fixture
    def heavy_file(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """The file of a network whose pass takes a measurable time."""
        network = nn.Sequential(nn.Conv2d(3, 64, 3), nn.ReLU(), nn.Conv2d(64, 64, 3))
        write = partial(export_onnx, network, input_shape=(3, 32, 32))
        return _written_once(tmp_path_factory, "heavy", write)

    def test_a_network_computes_what_pytorch_and_onnx_s_reference_compute(
        self, runtime: str, exported: tuple[nn.Module, Path]
    ) -> None:
        model, path = exported
        assert verify_onnx(model, path, torch.from_numpy(images(7)), runtime=runtime) <= 1e-4
        reference: Any = ReferenceEvaluator(str(path)).run(None, {"input": images(3)})
        outputs = open_session(path, threads=1, runtime=runtime).run(images(3))
        assert [output.shape for output in outputs] == [output.shape for output in reference]
        np.testing.assert_allclose(outputs[0], reference[0], rtol=1e-4, atol=1e-4)

    def test_a_session_says_what_it_takes(self, runtime: str, plain_file: Path, fixed_file: Path) -> None:
        session = open_session(plain_file, runtime=runtime)
        assert (session.input_name, session.input_dtype) == ("input", np.dtype(np.float32))
        assert (session.input_shape, session.fixed_batch) == ((None, *INPUT_SHAPE), None)
        assert open_session(fixed_file, runtime=runtime).fixed_batch == 4

    def test_batches_that_do_not_fit_are_refused(
        self, runtime: str, plain_file: Path, wrong: np.ndarray[Any, Any]
    ) -> None:
        with pytest.raises(ExportError, match=r"takes .* of shape \(None, 3, 8, 8\) and fails on float"):
            open_session(plain_file, runtime=runtime).run(wrong)

    def test_outputs_stay_when_the_next_batch_runs(self, runtime: str, plain_file: Path) -> None:
        session = open_session(plain_file, runtime=runtime)
        (first,) = session.run(images(2))
        kept = first.copy()
        session.run(images(2) + 1)
        np.testing.assert_array_equal(first, kept)

    def test_files_that_are_missing_or_damaged_are_refused(
        self, runtime: str, plain_file: Path, tmp_path: Path
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
        self, runtime: str, plain_file: Path, tmp_path: Path
    ) -> None:
        integers = quantise_onnx(plain_file, tmp_path / "int8.onnx", [images(64)])
        expected = open_session(integers).run(images(200))[0]
        outputs = open_session(integers, runtime=runtime).run(images(200))[0]
        assert np.abs(outputs - expected).max() <= 0.05 * np.abs(expected).max()
        pairs = [(torch.from_numpy(images(200)), torch.from_numpy(images(200)))]
        assert class_agreement(small_network(), integers, pairs, runtime=runtime) >= 0.95

    def test_weights_stored_in_integers_are_computed_with_in_floating_point(
        self, runtime: str, rounded: tuple[nn.Module, Path]
    ) -> None:
        network, path = rounded
        with torch.no_grad():
            expected = network(torch.from_numpy(images(50))).numpy()
        outputs = open_session(path, runtime=runtime).run(images(50))[0]
        np.testing.assert_allclose(outputs, expected, rtol=1e-4, atol=1e-4)

    def test_files_are_timed(self, runtime: str, plain_file: Path) -> None:
        assert measure_latency(plain_file, batch=2, runs=3, runtime=runtime).ms > 0
        clock = "processor" if get_runtime(runtime).in_calling_thread else "wall"
        timed = time_in_turns([("onnxruntime", plain_file), (runtime, plain_file)], batch=2, runs=3)
        assert [latency.clock for latency in timed.latencies] == ["processor", clock]
        assert timed.compare(0, 1).ratio_low <= timed.compare(0, 1).ratio_high

    def test_one_thread_computes_in_the_thread_that_calls(self, runtime: str, heavy_file: Path) -> None:
        """Timing a pass by processor time requires this; otherwise passes are timed by wall clock."""
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

    def test_versions_are_known(self, runtime: str) -> None:
        assert get_runtime(runtime).version[0].isdigit()


def _written_once(factory: pytest.TempPathFactory, name: str, write: Callable[[Path], object]) -> Path:
    """Write a file on its first use and keep it for the session."""
    path = factory.getbasetemp() / "runtime_contract" / f"{name}.onnx"
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        write(path)
    return path


def images(count: int) -> np.ndarray[Any, Any]:
    """Return a batch of inputs."""
    return np.random.default_rng(0).standard_normal((count, *INPUT_SHAPE), dtype=np.float32)


def small_network() -> nn.Module:
    """Return a network with non-trivial batch norm statistics, in evaluation mode."""
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(8)
    network = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), norm, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 5)
    )
    for values in (norm.running_var, norm.weight):
        nn.init.uniform_(values, 0.5, 1.5)  # type: ignore[arg-type]
    return network.eval()
