"""Pretraining: the episodes of many tasks, each played once, and the policy that is trained on them."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path

from torch import nn

from decomposition import CandidateSet, DecompositionError, FitLibrary
from rankrl.data import ImageData
from rankrl.options.pretraining import EpisodeOptions, PretrainingOptions
from rankrl.plan_search.agents.policy_file import PolicyCard, PolicyFile, PolicyTask
from rankrl.plan_search.envs.features import DESCRIBING
from rankrl.plan_search.pretraining.episodes import TaskEpisodes, play_episodes, task_of
from rankrl.plan_search.pretraining.training import train_policy, unexplained
from rankrl.plan_search.scores.scoring import ImageScoring
from rankrl.plan_search.space.problem import SearchProblem
from rankrl.progress import progress_bar

log = logging.getLogger(__name__)

_PACKAGES = ("rankrl", "torch", "stable-baselines3")


@dataclass(frozen=True)
class FittedNetwork:
    """A network whose layers are fitted in some formats; its tasks differ in budget."""

    title: str
    model: nn.Module = field(repr=False)
    library: FitLibrary = field(repr=False)
    candidates: int
    data: ImageData = field(repr=False)


def play_tasks(
    network: FittedNetwork,
    scoring: ImageScoring,
    options: EpisodeOptions,
    folder: Path,
    *,
    seed: int,
    warn: Callable[[str], None],
) -> list[TaskEpisodes]:
    """Return the episodes of a network's tasks; those in the folder are read, the others played."""
    predicted = network.library.all_candidates(limit=network.candidates)
    sites = scoring.weighed(network.library, _problem(network, predicted))
    played = []
    for measure, fraction in options.budgets:
        try:
            problem = _problem(network, sites, **{measure: fraction})
        except DecompositionError as error:
            names = "/".join(each.name for each in network.library.formats)
            warn(f"pretrain: {network.title} in {names} has no such task: {error}")
            continue
        task = task_of(problem, model=network.title, dataset=network.data.name)
        played.append(_played(problem, network, scoring, task, options, folder, seed))
    return played


def _problem(
    network: FittedNetwork,
    sites: Sequence[CandidateSet],
    *,
    params: float | None = None,
    macs: float | None = None,
) -> SearchProblem:
    """Return the problem within fractions of the dense network's costs."""
    shape, library = network.data.input_shape, network.library
    return SearchProblem.from_model(network.model, sites, shape, params=params, macs=macs, library=library)


def _played(
    problem: SearchProblem,
    network: FittedNetwork,
    scoring: ImageScoring,
    task: PolicyTask,
    options: EpisodeOptions,
    folder: Path,
    seed: int,
) -> TaskEpisodes:
    evaluator = scoring.plan_evaluator(network.library, problem)
    drawn = asdict(options)
    del drawn["params"], drawn["macs"]
    identity = json.dumps([problem.fingerprint, evaluator.fingerprint, DESCRIBING, seed, drawn])
    name = hashlib.sha256(json.dumps(task.decision, default=sorted).encode()).hexdigest()[:12]
    path = folder / f"{name}.safetensors"
    known = TaskEpisodes.load(path, identity)
    if known is not None:
        return known
    with progress_bar(f"play {task}", total=options.plans) as bar:
        episodes = play_episodes(
            problem,
            evaluator,
            task,
            features=DESCRIBING,
            count=options.plans,
            noises=options.noises,
            importance_scale=options.importance_scale,
            batches=options.batches,
            term=options.term,
            seed=seed,
            on_plan=bar.update,
        )
    log.info("pretrain: %s: best gain of %d plans %.4f", task, options.plans, float(episodes.gains.max()))
    episodes.save(path, identity)
    return episodes


def pretrained(
    episodes: Sequence[TaskEpisodes], options: EpisodeOptions, training: PretrainingOptions, *, seed: int
) -> PolicyFile:
    """Train the policy on the episodes of all tasks, and write its card."""
    card = PolicyCard(
        features=DESCRIBING,
        importance_scale=options.importance_scale,
        hidden=training.hidden,
        tasks=tuple(each.task for each in episodes),
        trained={**asdict(training), "term": options.term, "plans": options.plans, "seed": seed},
        versions={name: version(name) for name in _PACKAGES},
    )
    with progress_bar("pretrain", total=training.steps) as bar:
        return train_policy(episodes, card, training, seed=seed, on_step=bar.update)


@dataclass(frozen=True)
class TaskFit:
    """How well the additive model explains what plans of a task gain."""

    task: PolicyTask
    plans: int
    greedy: float
    policy: float
    unseen: float | None


def task_fits(
    episodes: Sequence[TaskEpisodes], policy: PolicyFile, training: PretrainingOptions, *, seed: int
) -> list[TaskFit]:
    """Return how well a policy explains the gains of every task, and how well one that has not seen them."""
    kinds = [(each.task.network, each.task.formats) for each in episodes]
    without: dict[tuple[str, tuple[str, ...]], PolicyFile | None] = {}
    with progress_bar("leave out", total=len(set(kinds))) as bar:
        for kind in dict.fromkeys(kinds):
            others = [each for each, own in zip(episodes, kinds, strict=True) if own != kind]
            without[kind] = train_policy(others, policy.card, training, seed=seed) if others else None
            bar.update(len(without))
    return [
        TaskFit(
            each.task,
            len(each.gains),
            unexplained(each),
            unexplained(each, policy),
            None if without[kind] is None else unexplained(each, without[kind]),
        )
        for each, kind in zip(episodes, kinds, strict=True)
    ]
