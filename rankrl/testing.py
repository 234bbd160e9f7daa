"""Test the contracts of formats, selectors and runtimes, also of your own ones, with pytest.

Write `class TestMine(SelectorContract): names = ("mine",)` in a test file. The contract of pruners is in
`pruning.testing`, that of formats without ONNX files in `decomposition.testing`.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import onnxruntime
import pytest
import rich.style  # noqa: F401 (draws from `random` on import, which scikit-learn would do within a test)
import torch
from onnx.reference import ReferenceEvaluator
from torch import nn

import rankrl
from decomposition import (
    FitLibrary,
    FitOptions,
    Quantise,
    TensorFormat,
    apply_plan,
    compressible_layers,
    factorised_layers,
    make_plan,
)
from decomposition.testing import FormatContract as OfLayers
from decomposition.testing import normal
from rankrl.errors import ConfigError, ExportError
from rankrl.onnx.export import class_agreement, export_network, export_onnx, quantise_onnx, verify_onnx
from rankrl.onnx.graph.rewrite import writable_formats
from rankrl.onnx.runtimes import get_runtime, open_session
from rankrl.plan_search.selectors import Proposal, Selector, create_selector, selector_class
from rankrl.plan_search.space.problem import Choices, SearchProblem
from rankrl.timing import measure_latency, time_in_turns

_SHAPE = (4, 5, 5)


class FormatContract(OfLayers):
    """Contract of a tensor format, ONNX files included.

    Attributes:
        names: Registered names of the formats that are tested.
    """

    def test_an_exported_network_computes_the_same(self, tensor_format: TensorFormat, tmp_path: Path) -> None:
        model, x = _convolution_and_product()
        small = apply_plan(model, make_plan(model, _SHAPE, tensor_format.name, ranks=2), calibration=x)
        assert factorised_layers(small)
        rankrl.export_onnx(small, tmp_path / "small.onnx", _SHAPE)
        with torch.no_grad():
            torch.testing.assert_close(
                _outputs_of(tmp_path / "small.onnx", x), small(x), rtol=1e-3, atol=1e-4
            )

    def test_a_file_is_compressed_or_the_format_is_refused_by_name(
        self, tensor_format: TensorFormat, tmp_path: Path
    ) -> None:
        model, x = _convolution_and_product()
        rankrl.export_onnx(model, tmp_path / "given.onnx", _SHAPE)

        def compress() -> None:
            options = rankrl.DecompositionOptions(
                format=tensor_format.name, candidates=3, iterations=3, final_iterations=3
            )
            target = tmp_path / "small.onnx"
            rankrl.compress(tmp_path / "given.onnx", x.numpy(), target, params=0.7, decomposition=options)

        if tensor_format.name not in writable_formats():
            with pytest.raises(ConfigError, match=f"decomposition={tensor_format.name} cannot be written"):
                compress()
            return
        compress()
        assert _outputs_of(tmp_path / "small.onnx", x).isfinite().all()
        assert (tmp_path / "small.onnx").stat().st_size < (tmp_path / "given.onnx").stat().st_size


def _convolution_and_product() -> tuple[nn.Module, torch.Tensor]:
    """Return a small network and some inputs."""
    torch.manual_seed(0)
    layers = nn.Conv2d(4, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.Flatten(), nn.Linear(144, 6)
    return nn.Sequential(*layers).eval(), normal((64, *_SHAPE), seed=5).float()


def _outputs_of(path: Path, x: torch.Tensor) -> torch.Tensor:
    """Run a file in onnxruntime, and return its output."""
    session = onnxruntime.InferenceSession(path)
    return torch.from_numpy(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0])


_IMAGE = (3, 8, 8)


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
        return _network_of_images().train(), plain_file

    @pytest.fixture
    def plain_file(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """The file of a small network."""
        write = partial(export_onnx, _network_of_images(), input_shape=_IMAGE)
        return _written_once(tmp_path_factory, "plain", write)

    @pytest.fixture
    def fixed_file(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """The file of a small network for batches of 4."""
        options: dict[str, Any] = {"dynamic_batch": False, "sample": torch.zeros(4, *_IMAGE)}
        write = partial(export_onnx, _network_of_images(), input_shape=_IMAGE, **options)
        return _written_once(tmp_path_factory, "fixed", write)

    @pytest.fixture
    def rounded(self, tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Path]:
        """A network with weights stored in 8 bits and in 4, and its file."""
        torch.manual_seed(0)
        network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 5)).eval()
        for bits, layer in {8: network[0], 4: network[-1]}.items():
            Quantise(bits, "float32").round(layer)
        write = partial(export_network, network, input_shape=_IMAGE, inputs=[])
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
        assert (session.input_shape, session.fixed_batch) == ((None, *_IMAGE), None)
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
        assert class_agreement(_network_of_images(), integers, pairs, runtime=runtime) >= 0.95

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
    return np.random.default_rng(0).standard_normal((count, *_IMAGE), dtype=np.float32)


def _network_of_images() -> nn.Module:
    """Return a network with non-trivial batch norm statistics, in evaluation mode."""
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(8)
    network = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), norm, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 5)
    )
    for values in (norm.running_var, norm.weight):
        nn.init.uniform_(values, 0.5, 1.5)  # type: ignore[arg-type]
    return network.eval()


INPUT_SHAPE = (1, 8, 8)


class SelectorContract:
    """Properties that a search requires of every selector.

    Attributes:
        names: Registered names of the selectors that are tested.
        options: Options of selectors that are slow without them, by their names.
        episodes: Plans that a search may score.
    """

    names: Sequence[str]
    options: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    episodes: ClassVar[int] = 8

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Run every test for every selector, and for every kind of budget where it takes one."""
        if "measure" in metafunc.fixturenames:
            metafunc.parametrize("measure", ("params", "macs", "bytes"))
        metafunc.parametrize("name", self.names)

    def selector(self, name: str, problem: SearchProblem, seed: int = 0) -> Selector:
        options = self.options.get(name, {})
        return create_selector(name, problem, seed=seed, episodes=self.episodes, **options)

    def test_it_says_what_it_is(self, name: str) -> None:
        assert selector_class(name).description
        assert "problem" not in selector_class(name).default_options()

    def test_every_proposed_plan_keeps_the_budget(self, name: str, measure: str) -> None:
        problem = small_problem(("tucker",), **{measure: 0.6})
        plans = plans_of(self.selector(name, problem), self.episodes)
        assert plans
        assert all(problem.keeps_budget(choices) for choices in plans)
        assert all(type(choice) is int for choices in plans for choice in choices)

    def test_it_chooses_among_the_candidates_of_several_formats(self, name: str) -> None:
        problem = small_problem(("tucker", "cp"), params=0.5)
        plans = plans_of(self.selector(name, problem), 6)
        assert all(problem.keeps_budget(choices) for choices in plans)
        assert any(site.mixed for site in problem.sites)

    def test_the_seed_decides_everything(self, name: str) -> None:
        problem, before = small_problem(("cp",), params=0.6), surroundings()

        def outcome(seed: int) -> list[Proposal]:
            return proposals_of(self.selector(name, problem, seed), 6)

        first, again, other = (outcome(seed) for seed in (1, 1, 2))
        assert again == first
        assert (other != first) == selector_class(name).seeded
        assert surroundings() == before, "random numbers come from generators of the selector's own"

    def test_it_goes_on_from_what_it_is_told(self, name: str) -> None:
        problem = small_problem(params=0.5)
        whole, resumed, again = (self.selector(name, problem) for _ in range(3))
        for _ in range(4):
            proposals = whole.propose()
            recorded = [Proposal(each.choices, each.phase, as_recorded(each.actions)) for each in proposals]
            for selector in (whole, resumed, again):
                selector.observe(recorded, rewards_of(recorded))
        again.propose()
        for _ in range(3):
            expected = whole.propose()
            why = "proposals may depend on problem, seed, options and what was observed, not on propose()"
            assert resumed.propose() == expected, why
            assert again.propose() == expected, why
            for selector in (whole, resumed, again):
                selector.observe(expected, rewards_of(expected))


def as_recorded(actions: Sequence[float]) -> tuple[float, ...]:
    """Return a proposal's actions as they are read from `episodes.csv`."""
    return tuple(json.loads(json.dumps(list(actions))))


@cache
def small_network() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1, bias=False),
            nn.ReLU(),
            nn.Conv2d(8, 12, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(12, 12, 3, padding=1, bias=False),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(12, 5),
        ).eval()


@cache
def small_library(formats: tuple[str, ...]) -> FitLibrary:
    layers = compressible_layers(small_network(), INPUT_SHAPE)
    return FitLibrary(small_network(), layers, formats, options=FitOptions(iterations=3))


def small_problem(formats: tuple[str, ...] = ("tucker",), **budget: Any) -> SearchProblem:
    library = small_library(formats)
    sites = library.all_candidates(limit=8)
    problem = SearchProblem.from_model(small_network(), sites, INPUT_SHAPE, library=library, **budget)
    return replace(problem, divergences=lambda _: [site.errors**2 for site in problem.sites])


def rewards_of(proposals: Sequence[Proposal]) -> list[float]:
    return [float(np.tanh(sum(each.choices) / 20)) for each in proposals]


def proposals_of(selector: Selector, steps: int) -> list[Proposal]:
    """Run a selector for `steps` steps, with a reward for larger candidates, and list its proposals."""
    proposed = []
    for _ in range(steps):
        proposals = selector.propose()
        proposed += proposals
        selector.observe(proposals, rewards_of(proposals))
    return proposed


def plans_of(selector: Selector, steps: int) -> list[Choices]:
    return [proposal.choices for proposal in proposals_of(selector, steps)]


def surroundings() -> list[Any]:
    return [torch.get_rng_state().tolist(), repr(np.random.get_state()), random.getstate()]
