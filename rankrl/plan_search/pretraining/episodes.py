"""What a task teaches: plans around greedy's, what their layers lose, and what their reward gains."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from decomposition import FitLibrary
from rankrl.errors import CheckpointError
from rankrl.plan_search.agents.policy_file import PolicyTask
from rankrl.plan_search.envs.actions import ImportanceMap
from rankrl.plan_search.envs.features import Feature, ObservationEncoder
from rankrl.plan_search.scores.evaluator import PlanEvaluator, Term
from rankrl.plan_search.space.problem import SearchProblem
from rankrl.state_file import read_state, write_state

_VERSION = 1


@dataclass(frozen=True)
class TaskEpisodes:
    """Scored plans of one task."""

    task: PolicyTask
    observations: np.ndarray
    preset_losses: np.ndarray
    losses: np.ndarray
    gains: np.ndarray

    def save(self, path: Path, identity: str) -> None:
        """Write them, atomically, with what they depend on."""
        arrays = ("observations", "preset_losses", "losses", "gains")
        tensors = {name: torch.from_numpy(np.ascontiguousarray(getattr(self, name))) for name in arrays}
        write_state(path, tensors, {"task": asdict(self.task), "identity": identity}, _VERSION)

    @classmethod
    def load(cls, path: Path, identity: str) -> TaskEpisodes | None:
        """Read a file of `save`; None where there is none, or it depends on something else."""
        if not path.exists():
            return None
        episodes, kept = _read(path)
        return episodes if kept == identity else None


def read_episodes(path: Path) -> TaskEpisodes:
    """Read the episodes of a task, whatever they depend on."""
    return _read(path)[0]


def _read(path: Path) -> tuple[TaskEpisodes, str]:
    tensors, content = read_state(path, _VERSION, "episodes of a task")
    try:
        task = PolicyTask(**{**content["task"], "formats": tuple(content["task"]["formats"])})
        arrays = {name: tensor.numpy().copy() for name, tensor in tensors.items()}
        return TaskEpisodes(task, **arrays), str(content["identity"])
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged or holds no episodes: {error}") from error


def weights_fingerprint(library: FitLibrary) -> str:
    """Return a hash of a network's weights, whatever formats are fitted to them; 16 hexadecimal digits."""
    digest = hashlib.sha256()
    for name, weight in library.weights.items():
        digest.update(f"{name} {tuple(weight.shape)}".encode())
        digest.update(weight.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def task_of(problem: SearchProblem, *, model: str, dataset: str) -> PolicyTask:
    """Return what a search problem is called as a task."""
    assert problem.library is not None
    limits = () if problem.budget is None else problem.budget.limits
    return PolicyTask(
        model,
        weights_fingerprint(problem.library),
        dataset,
        tuple(sorted(each.name for each in problem.library.formats)),
        {each.measure: each.fraction for each in limits},
    )


def play_episodes(
    problem: SearchProblem,
    evaluator: PlanEvaluator,
    task: PolicyTask,
    *,
    features: tuple[Feature, ...],
    count: int,
    noises: tuple[float, ...],
    importance_scale: float,
    batches: int,
    term: Term,
    seed: int,
    on_plan: Callable[[int], None] | None = None,
) -> TaskEpisodes:
    """Score random plans around greedy's, each on a few batches of images, in turn.

    A plan's gain is taken against greedy's plan on the same images, so that few of them tell much, and no
    image is met more often than another.
    """
    generator = np.random.default_rng(seed)
    actions = ImportanceMap(problem, scale=importance_scale)
    preset = tuple(problem.preset.tolist())
    batches = min(batches, evaluator.batches)
    starts = range(0, evaluator.batches - batches + 1, batches)
    known = {
        start: evaluator.term(evaluator.forward(preset, start, start + batches), term, start)
        for start in starts
    }
    losses, gains = [], []
    for number in range(count):
        noise = noises[number % len(noises)] * generator.standard_normal(len(problem.sites))
        choices = tuple(actions.allocate(noise.clip(-1, 1)).tolist())
        start = starts[number % len(starts)]
        score = evaluator.term(evaluator.forward(choices, start, start + batches), term, start)
        losses.append(_losses(problem, choices))
        gains.append(score - known[start])
        if on_plan is not None:
            on_plan(number + 1)
    return TaskEpisodes(
        task,
        ObservationEncoder(problem, features).static,
        _losses(problem, preset),
        np.stack(losses),
        np.array(gains),
    )


def _losses(problem: SearchProblem, choices: tuple[int, ...]) -> np.ndarray:
    return np.array([site.losses[choice] for site, choice in zip(problem.sites, choices, strict=True)])
