"""Workers on a local Ray cluster: their resources, what happens when one is killed, and a whole search."""

import importlib.util
import logging
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rankrl
from decomposition import FitLibrary, collect_moments, compressible_layers
from rankrl.errors import ConfigError
from rankrl.plan_search.scores.evaluators import EvaluatorOptions, PlanEvaluator, ScoredImages
from rankrl.plan_search.scores.scoring import ParallelEvaluator
from rankrl.plan_search.space.problem import SearchProblem
from rankrl.workers.processes import WorkerError, Workers
from rankrl.workers.ray_cluster import open_cluster

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="the extra `ray` is not installed"),
]
SHAPE = (1, 8, 8)
NORMALISATION = {"mean": (0.5,), "std": (0.25,)}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A cluster here of two processors that says it had two GPUs."""
    ray = pytest.importorskip("ray")
    with pytest.MonkeyPatch.context() as patch:
        # Workers import this module by the name it has here.
        paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
        patch.delenv("RAY_ADDRESS", raising=False)
        ray.init(
            address="local", num_cpus=2, num_gpus=2, include_dashboard=False, log_to_driver=False,
            logging_level="error",
        )  # fmt: skip
        yield ray
        ray.shutdown()


def told(path: Path) -> Callable[[int], tuple[int, str]]:
    """Return what squares a number and says which GPU it sees, after it was killed once over the 2."""

    def apply(task: int) -> tuple[int, str]:
        if task == 2 and not path.exists():
            path.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return task**2, os.environ.get("CUDA_VISIBLE_DEVICES", "")

    return apply


@dataclass(frozen=True)
class Doomed:
    """Builds what kills its worker whenever it is called."""

    def __call__(self) -> Callable[[Any], Any]:
        return lambda _: os.kill(os.getpid(), signal.SIGKILL)


def test_every_worker_has_a_gpu_and_the_work_of_a_killed_one_is_done_again(
    cluster: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    workers = open_cluster(Workers(2, "ray", gpus=1))
    try:
        with caplog.at_level(logging.INFO):
            results = workers.pool(lambda: told(tmp_path / "died")).map(range(8))
        assert [square for square, _ in results] == [number**2 for number in range(8)]
        assert {gpu for _, gpu in results} <= {"0", "1"}
        assert (tmp_path / "died").exists()
        if not torch.cuda.is_available():
            assert "computes on the CPU: torch sees no GPU there" in caplog.text
        assert sorted(workers.spread(lambda job: -job, range(5), "negatives")) == [-4, -3, -2, -1, 0]
    finally:
        workers.close()


def test_workers_without_gpus_see_none(cluster: Any, tmp_path: Path) -> None:
    (tmp_path / "died").touch()
    workers = open_cluster(Workers(1, "ray", cpus=2))
    try:
        pool = workers.pool(lambda: lambda _: (torch.get_num_threads(), torch.cuda.is_available()))
        assert pool.map([0]) == [(2, False)]
    finally:
        workers.close()


def test_more_workers_than_there_is_room_for_work_with_those_that_are_up(cluster: Any) -> None:
    workers = open_cluster(Workers(3, "ray", gpus=2))
    try:
        assert workers.pool(lambda: abs).map([-3, 4, -5]) == [3, 4, 5]
    finally:
        workers.close()


def test_work_that_kills_every_worker_is_given_up(cluster: Any) -> None:
    workers = open_cluster(Workers(1, "ray"))
    try:
        with pytest.raises(WorkerError, match=r"worker of the Ray cluster died.*resume"):
            workers.pool(Doomed()).map([0])
        with pytest.raises(ZeroDivisionError):
            workers.pool(lambda: lambda task: 1 / task).map([0])
    finally:
        workers.close()


def test_workers_that_no_node_has_room_for_are_refused(cluster: Any) -> None:
    with pytest.raises(ConfigError, match=r"no node .* has the 1 CPU and 4 GPU .* nodes have 2 CPU, 2 GPU"):
        open_cluster(Workers(1, "ray", gpus=4))


def test_fits_and_scores_on_a_cluster_are_those_of_one_process(
    cluster: Any, three_convolutions: nn.Module, small_images: Any
) -> None:
    network = three_convolutions
    layers = compressible_layers(network, SHAPE)
    inputs = torch.randn(64, *SHAPE, generator=torch.Generator().manual_seed(2))
    moments = collect_moments(network, layers, inputs)
    here, there = (FitLibrary(network, layers, "tucker", moments=moments) for _ in range(2))
    fitted: dict[str, Any] = {}
    workers = open_cluster(Workers(2, "ray", gpus=0.5))
    try:
        there.fit_all(
            [there.unfitted(name, limit=3) for name in there.specs],
            lambda site: fitted.update({site.name: site}),
            workers=workers.spread,
        )
        expected = here.all_candidates(limit=3)
        sites = [fitted[each.name] for each in expected]
        errors = [[each.error for each in site.candidates] for site in sites]
        assert errors == [pytest.approx([each.error for each in site.candidates]) for site in expected]
        problem = SearchProblem.from_model(network, sites, SHAPE, params=0.9, library=there)
        options = EvaluatorOptions(augmented=False, batch_size=16)
        images = ScoredImages(small_images, **NORMALISATION)
        one = PlanEvaluator(network, there, problem, images, options=options)
        with ParallelEvaluator(
            network, there, problem, images, cluster=workers, options=options
        ) as evaluator:
            plans = [tuple(0 for _ in sites), tuple(len(site.candidates) - 1 for site in sites)]
            scores = [each.score for each in evaluator.evaluate(plans)]
            assert scores == pytest.approx([one(plan).score for plan in plans])
            assert evaluator.fingerprint == f"{one.fingerprint}-cuda"
    finally:
        workers.close()


def resources_of_this_process(network: nn.Module) -> float:
    """A score that says what its process has: ten for each thread, one for a GPU."""
    return 10.0 * torch.get_num_threads() + bool(os.environ.get("CUDA_VISIBLE_DEVICES"))


def test_search_from_python_gives_its_workers_processors_and_gpus(
    cluster: Any, three_convolutions: nn.Module
) -> None:
    found = rankrl.search(
        three_convolutions,
        score=resources_of_this_process,
        inputs=torch.randn(32, *SHAPE, generator=torch.Generator().manual_seed(2)),
        params=0.9,
        selector="random",
        progress=False,
        decomposition=rankrl.DecompositionOptions(format="tucker", precisions=("float32",), candidates=2),
        search=rankrl.SearchOptions(episodes=2, workers=1, cluster="ray", worker_cpus=2, worker_gpus=0.5),
    )
    assert {row.score for row in found.rows} == {21.0}
