"""Workers change when plans are scored, never what comes out; what goes wrong in them is said plainly."""

from __future__ import annotations

import importlib
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from decomposition import Factorise, FitLibrary, collect_moments, compressible_layers
from rankrl.errors import ConfigError, NonFiniteError
from rankrl.plan_search.run import run_search
from rankrl.plan_search.scores.evaluators import EvaluatorOptions, PlanEvaluator, ScoredImages
from rankrl.plan_search.scores.scoring import FixedFits, ParallelEvaluator, ParallelScoreEvaluator
from rankrl.plan_search.selectors import create_selector
from rankrl.plan_search.selectors.random_plans import random_choices
from rankrl.plan_search.space.problem import Choices, SearchProblem
from rankrl.workers.processes import LocalCluster, LocalWorkers, WorkerError, Workers, check_workers
from rankrl.workers.ray_cluster import open_cluster

SHAPE = (1, 8, 8)
NORMALISATION = {"mean": (0.5,), "std": (0.25,)}
SCORES = """
import os

def size(network):
    return sum(float(p.abs().mean()) for p in network.parameters())

def nothing(network):
    return float("nan")

def deadly(network):
    if os.path.exists(__file__ + ".deadly"):
        os._exit(1)
    return size(network)
"""


@pytest.fixture(scope="module")
def network(three_convolutions: nn.Module) -> nn.Module:
    return three_convolutions


@pytest.fixture(scope="module")
def library(network: nn.Module) -> FitLibrary:
    layers = compressible_layers(network, SHAPE)
    inputs = torch.randn(64, *SHAPE, generator=torch.Generator().manual_seed(2))
    return FitLibrary(network, layers, "tucker", moments=collect_moments(network, layers, inputs))


@pytest.fixture(scope="module")
def problem(network: nn.Module, library: FitLibrary) -> SearchProblem:
    return SearchProblem.from_model(
        network, library.all_candidates(limit=8), SHAPE, params=0.5, library=library
    )


def options() -> EvaluatorOptions:
    return EvaluatorOptions(metric="soft_agreement", augmented=False, batch_size=16)


class SameProcess(LocalCluster):
    """Stands for a cluster whose workers need not be started."""

    def pool(self, build: Callable[[], Callable[[Any], Any]]) -> SameProcessPool:
        return SameProcessPool(build, self.workers.size)


class SameProcessPool:
    """Its workers: what they are sent and return is pickled."""

    def __init__(self, build: Callable[[], Callable[[Any], Any]], size: int) -> None:
        self.size, self._scorers = size, [pickle.loads(pickle.dumps(build))() for _ in range(size)]

    def map(self, tasks: Sequence[Any]) -> list[Any]:
        given = pickle.loads(pickle.dumps(list(tasks)))
        found = [self._scorers[index % self.size](task) for index, task in enumerate(given)]
        return pickle.loads(pickle.dumps(found))

    def close(self) -> None:
        self._scorers.clear()


@pytest.fixture(scope="module", params=["same process", pytest.param("processes", marks=pytest.mark.slow)])
def two_workers(request, network, library, problem, small_images) -> Iterator[ParallelEvaluator]:
    """Two workers; to start them as processes takes longer than all that is asked of them."""
    cluster = {"same process": SameProcess, "processes": LocalCluster}[request.param](Workers(2))
    images = ScoredImages(small_images, **NORMALISATION)
    with ParallelEvaluator(
        network, library, problem, images, cluster=cluster, options=options()
    ) as evaluator:
        yield evaluator


@pytest.fixture
def one_process(network, library, problem, small_images) -> PlanEvaluator:
    return PlanEvaluator(
        network, library, problem, ScoredImages(small_images, **NORMALISATION), options=options()
    )


@pytest.fixture
def scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    (tmp_path / "scores_for_workers.py").write_text(SCORES)
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("scores_for_workers", None)
    return importlib.import_module("scores_for_workers")


def plans(problem: SearchProblem, count: int) -> list[Choices]:
    generator = np.random.default_rng(0)
    drawn = [tuple(random_choices(problem, generator).tolist()) for _ in range(count)]
    assert len(set(drawn)) > 1
    return drawn


def lasting(evaluations: list) -> list:
    return [replace(each, seconds=0.0) for each in evaluations]


@pytest.mark.parametrize("together", [1, 2, 5])
def test_evaluations_equal_those_of_one_process(two_workers, one_process, problem, together) -> None:
    two_workers.restore({})
    chosen = plans(problem, 8)
    chosen.append(chosen[0])
    for start in range(0, len(chosen), together):
        part = chosen[start : start + together]
        assert lasting(two_workers.evaluate(part)) == lasting(one_process.evaluate(part))
    assert two_workers.fingerprint == one_process.fingerprint


@pytest.mark.parametrize("plans_per_step", [1, 3])
def test_searches_find_the_same_plans(two_workers, one_process, problem, plans_per_step) -> None:
    two_workers.restore({})
    results = [
        run_search(
            problem,
            evaluator,
            create_selector("local", problem, seed=4, episodes=9, plans_per_step=plans_per_step),
            episodes=9,
        )
        for evaluator in (two_workers, one_process)
    ]
    assert results[0].plan == results[1].plan
    found, expected = ([replace(row, elapsed=0.0) for row in lasting(list(each.rows))] for each in results)
    assert found == expected


def test_workers_are_given_the_fits_of_every_candidate(library, problem) -> None:
    fits = FixedFits(library, problem)
    for site in problem.sites:
        for candidate in site.candidates:
            weight = fits.weight(site.name, candidate.operations)
            assert torch.equal(weight, library.weight(site.name, candidate.operations))
    with pytest.raises(KeyError):
        fits.fit(problem.names[0], Factorise("cp", (1,)))


@pytest.mark.slow
def test_the_users_own_score_runs_in_workers(network, library, problem, scores) -> None:
    example = torch.randn(4, *SHAPE)
    *chosen, another = list(dict.fromkeys(plans(problem, 8)))[:4]
    one = LocalCluster(Workers(1))
    with ParallelScoreEvaluator(network, library, problem, scores.deadly, example, cluster=one) as evaluator:
        found = evaluator.evaluate([*chosen, chosen[0]])
        assert len({each.score for each in found}) > 1
        assert found[3] == replace(found[0], seconds=0.0, cached=True)
        Path(f"{scores.__file__}.deadly").touch()
        with pytest.raises(WorkerError, match=r"died.*resume"):
            evaluator.evaluate([another])


@pytest.mark.slow
def test_errors_in_a_worker_reach_the_caller() -> None:
    pool = LocalWorkers(failing_builder, 1)
    try:
        with pytest.raises(NonFiniteError, match="cannot be built"):
            pool.map([1])
    finally:
        pool.close()


class _FailingBuilder:
    """Pickled by what it calls, which every process can import."""

    def __reduce__(self) -> tuple:
        return exec, ("from rankrl.errors import NonFiniteError\nraise NonFiniteError('cannot be built')",)

    def __call__(self) -> None:
        raise AssertionError


failing_builder = _FailingBuilder()


def test_what_cannot_be_sent_is_refused_at_once(network, library, problem) -> None:
    two = LocalCluster(Workers(2))
    with pytest.raises(ConfigError, match=r"search\.workers=2.*top level of a module"):
        ParallelScoreEvaluator(network, library, problem, lambda _: 1.0, torch.zeros(2, *SHAPE), cluster=two)


class _DyingOnce:
    """A task that kills its worker, once."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self, task: int) -> int:
        if task == 2 and not self.path.exists():
            self.path.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return task**2


@dataclass(frozen=True)
class Dying:
    """Builds it."""

    path: Path

    def __call__(self) -> _DyingOnce:
        return _DyingOnce(self.path)


@pytest.mark.slow
def test_the_work_of_a_killed_worker_is_done_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pool = LocalCluster(Workers(2)).pool(Dying(tmp_path / "died"))
    try:
        assert pool.map(range(6)) == [0, 1, 4, 9, 16, 25]
    finally:
        pool.close()
    assert "a process for scores ended with code -9; its work is done again" in caplog.text


def test_resources_of_workers_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"search\.worker_cpus must be a whole number >= 1.*got 0"):
        Workers(2, cpus=0)
    with pytest.raises(ConfigError, match=r"search\.worker_gpus must be a whole number.*got 1\.5"):
        Workers(2, "ray", gpus=1.5)
    with pytest.raises(ConfigError, match=r"search\.worker_gpus=1 asks a cluster.*search\.cluster=ray"):
        Workers(2, gpus=1)
    assert Workers(2, "ray", cpus=4, gpus=0.5).gpus == 0.5


@pytest.mark.parametrize(
    ("size", "cluster", "message"),
    [
        (0, "local", "search.workers must be a whole number >= 1"),
        (-1, "local", "got -1"),
        (2, "locla", "Did you mean 'local'"),
        (None, "ray", "needs search.workers=N"),
    ],
)
def test_bad_values_are_refused(size, cluster, message) -> None:
    with pytest.raises(ConfigError, match=message):
        check_workers(size, cluster)


def test_a_missing_ray_is_named() -> None:
    if importlib.util.find_spec("ray") is not None:
        pytest.skip("Ray is installed")
    with pytest.raises(ConfigError, match="extra `ray`"):
        open_cluster(Workers(1, "ray"))


@pytest.mark.slow
def test_workers_end_with_a_killed_parent(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        "import os, signal\n"
        "from rankrl.workers.processes import LocalWorkers\n"
        "import operator\n"
        "def build():\n"
        "    return os.getpgid\n"
        "if __name__ == '__main__':\n"
        "    pool = LocalWorkers(build, 1)\n"
        "    pool.map([0])\n"
        "    print(*(process.pid for _, process in pool._processes._idle), flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    worker = int(subprocess.run([sys.executable, str(script)], capture_output=True, text=True).stdout)
    deadline = time.monotonic() + 120  # against a hang; a busy machine takes its time
    while _alive(worker) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _alive(worker)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    # In a container without an init process an orphan stays as a zombie.
    status = Path(f"/proc/{process}/stat")
    return not (status.exists() and status.read_text().rpartition(")")[2].split()[0] == "Z")
