"""Play episodes on many tasks (networks, formats, budgets) and pretrain one policy on them."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.metadata import version
from itertools import cycle
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from decomposition import DecompositionError, FitLibrary
from decomposition.progress import progress_bar
from rankrl.data import ImageData
from rankrl.errors import CheckpointError, NonFiniteError
from rankrl.options.tasks import EpisodeOptions, PretrainingOptions
from rankrl.plan_search.agents.policy_file import PolicyCard, PolicyFile, PolicyTask, linear_layers
from rankrl.plan_search.envs.observations import DESCRIBING
from rankrl.plan_search.envs.rank_selection import RankSelectionEnv, repeat, rollout
from rankrl.plan_search.scores.evaluators import PlanEvaluator
from rankrl.plan_search.scores.scoring import ImageScoring
from rankrl.plan_search.space.problem import Choices, SearchProblem
from rankrl.state_file import read_state, write_state

log = logging.getLogger(__name__)

_VERSION = 1


@dataclass(frozen=True)
class TaskEpisodes:
    """Scored plans of one task; `identity` stands for the settings that they were drawn and scored with."""

    task: PolicyTask
    observations: np.ndarray
    preset_losses: np.ndarray
    losses: np.ndarray
    gains: np.ndarray
    identity: str = ""

    def save(self, path: Path) -> None:
        """Write the episodes atomically."""
        tensors = {
            name: torch.from_numpy(np.ascontiguousarray(value))
            for name, value in vars(self).items()
            if isinstance(value, np.ndarray)
        }
        write_state(path, tensors, {"task": asdict(self.task), "identity": self.identity}, _VERSION)


def read_episodes(path: Path) -> TaskEpisodes:
    """Read the episodes of a task."""
    tensors, content = read_state(path, _VERSION, "episodes of a task")
    try:
        arrays = {name: tensor.numpy().copy() for name, tensor in tensors.items()}
        task, identity = PolicyTask.from_values(content["task"]), str(content["identity"])
        return TaskEpisodes(task, **arrays, identity=identity)
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged or holds no episodes: {error}") from error


def weights_fingerprint(library: FitLibrary) -> str:
    """Hash a network's weights, independent of the fitted formats, to 16 hexadecimal digits."""
    digest = hashlib.sha256()
    for name, weight in library.weights.items():
        digest.update(f"{name} {tuple(weight.shape)}".encode())
        digest.update(weight.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def task_of(problem: SearchProblem, *, model: str, dataset: str) -> PolicyTask:
    """Describe a search problem as a task: its network, dataset, formats and budgets."""
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
    options: EpisodeOptions,
    *,
    seed: int,
    identity: str = "",
    on_plan: Callable[[int], None] | None = None,
) -> TaskEpisodes:
    """Score random plans around greedy's, each on a few batches of images, in turn.

    A plan's gain is its difference to greedy's plan on the same images, which cancels most of the noise of
    few images; batches take turns, so that all images are used equally often.
    """
    preset = tuple(problem.preset.tolist())
    batches = min(options.batches, evaluator.batches)
    starts = range(0, evaluator.batches - batches + 1, batches)

    def score(choices: Choices, start: int) -> float:
        return evaluator.metric(evaluator.forward(choices, start, start + batches), options.metric, start)

    known = {start: score(preset, start) for start in starts}
    turns = cycle(starts)

    def gain(choices: Choices) -> float:
        start = next(turns)
        return score(choices, start) - known[start]

    env = RankSelectionEnv(
        problem,
        gain,
        action="importance",
        features=DESCRIBING,
        importance_scale=options.importance_scale,
    )
    generator, played = np.random.default_rng(seed), []
    for number, noise in zip(range(options.plans), cycle(options.noises), strict=False):
        played.append(rollout(env, repeat(noise * generator.standard_normal(env.layers))))
        if on_plan is not None:
            on_plan(number + 1)
    return TaskEpisodes(
        task,
        env.encoder.static,
        _losses(problem, preset),
        np.stack([_losses(problem, episode.choices) for episode in played]),
        np.array([episode.reward for episode in played]),
        identity,
    )


def _losses(problem: SearchProblem, choices: Choices) -> np.ndarray:
    return np.array([site.losses[choice] for site, choice in zip(problem.sites, choices, strict=True)])


# Gains from this size on get less weight: plans far from greedy's say little about the best one.
_GAIN_UNIT = 0.03
# Plans that lose more than this many times greedy's loss are left out.
_FARTHEST = 2.0


@dataclass(frozen=True)
class _Lesson:
    """A task's plans: observations (layers, features), excess losses (plans, layers), gains (plans,)."""

    observations: Tensor
    excesses: Tensor
    gains: Tensor

    @classmethod
    def of(cls, episodes: TaskEpisodes) -> _Lesson:
        total = max(float(episodes.preset_losses.sum()), 1e-300)  # greedy may lose nothing
        excesses = (episodes.losses - episodes.preset_losses) / total
        near = excesses.sum(1) < _FARTHEST - 1
        return cls(
            torch.from_numpy(episodes.observations).float(),
            torch.from_numpy(excesses[near]).float(),
            torch.from_numpy(episodes.gains[near]).float(),
        )

    def unexplained(self, actions: Tensor, importance_scale: float) -> Tensor:
        """Return the unexplained share of the gains' weighted squares under actions (layers,).

        The factor s is fitted by weighted least squares.
        """
        weights = 1 / (_GAIN_UNIT + self.gains.abs())
        counts = torch.exp(importance_scale * (actions - actions.mean()))
        predicted = -self.excesses @ counts
        factor = (weights * predicted * self.gains).sum() / ((weights * predicted**2).sum() + 1e-12)
        left = (weights * (self.gains - factor * predicted) ** 2).sum()
        return left / ((weights * self.gains**2).sum() + 1e-12)


def train_policy(
    episodes: Sequence[TaskEpisodes],
    card: PolicyCard,
    options: PretrainingOptions,
    *,
    seed: int,
    on_step: Callable[[int], None] | None = None,
) -> PolicyFile:
    """Train a policy on the plans of all tasks.

    The weight of the previous action, the last number of an observation, stays 0: only agents that go on
    learning from the policy use it.
    """
    lessons = [_Lesson.of(each) for each in episodes]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = _network(lessons[0].observations.shape[1], options.hidden)
        optimizer = torch.optim.AdamW(
            network.parameters(), lr=options.learning_rate, weight_decay=options.weight_decay
        )
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
        for step in range(options.steps):
            loss = torch.zeros(())
            for lesson in lessons:
                seen = lesson.observations + options.jitter * torch.randn_like(lesson.observations)
                actions = network(seen)[:, 0]
                loss = loss + lesson.unexplained(actions, card.importance_scale)
                loss = loss + options.restraint * (actions**2).mean()
            if not torch.isfinite(loss):
                raise NonFiniteError(
                    f"the loss of pretraining is {float(loss)} at step {step}; lower learning_rate"
                )
            optimizer.zero_grad()
            (loss / len(lessons)).backward()
            optimizer.step()
            schedule.step()
            if on_step is not None:
                on_step(step + 1)
    layers = [(each.weight.detach().clone(), each.bias.detach().clone()) for each in linear_layers(network)]
    weight, bias = layers[0]
    layers[0] = torch.cat([weight, torch.zeros(len(weight), 1)], dim=1), bias
    return PolicyFile(tuple(layers), card)


def unexplained(episodes: TaskEpisodes, policy: PolicyFile | None = None) -> float:
    """Return the share of a task's gains that the additive model leaves unexplained, about 0 to 1."""
    lesson = _Lesson.of(episodes)
    if policy is None:
        return float(lesson.unexplained(torch.zeros(len(lesson.observations)), 1.0))
    actions = policy.actions(lesson.observations)
    return float(lesson.unexplained(actions, policy.card.importance_scale))


def _network(observed: int, hidden: Sequence[int]) -> nn.Sequential:
    """Build a policy network whose actions begin near 0, that is, near greedy's plan."""
    layers: list[nn.Module] = []
    for size, units in zip((observed, *hidden[:-1]), hidden, strict=True):
        layers += [nn.Linear(size, units), nn.ReLU()]
    last = nn.Linear((observed, *hidden)[-1], 1)
    with torch.no_grad():
        last.weight.mul_(0.1)
        last.bias.zero_()
    return nn.Sequential(*layers, last, nn.Tanh())


_PACKAGES = ("rankrl", "torch", "stable-baselines3")  # whose versions a policy's card records


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
    """Play the episodes of a network's tasks, or read those that the folder holds."""
    library, shape = network.library, network.data.input_shape
    problem_of: Callable[..., SearchProblem] = partial(
        SearchProblem.from_model, network.model, input_shape=shape, library=library
    )
    sites = scoring.weighed(library, problem_of(library.all_candidates(limit=network.candidates)))
    played = []
    for measure, fraction in options.budgets:
        try:
            problem = problem_of(sites, **{measure: fraction})
        except DecompositionError as error:
            names = "/".join(each.name for each in library.formats)
            warn(f"pretrain: {network.title} in {names} has no such task: {error}")
            continue
        task = task_of(problem, model=network.title, dataset=network.data.name)
        evaluator = scoring.plan_evaluator(library, problem)
        played.append(_played(problem, evaluator, task, options, folder, seed))
    return played


def _played(
    problem: SearchProblem,
    evaluator: PlanEvaluator,
    task: PolicyTask,
    options: EpisodeOptions,
    folder: Path,
    seed: int,
) -> TaskEpisodes:
    drawn = asdict(options)
    del drawn["params"], drawn["macs"]
    identity = json.dumps([problem.fingerprint, evaluator.fingerprint, DESCRIBING, seed, drawn])
    name = hashlib.sha256(json.dumps(task.decision, default=sorted).encode()).hexdigest()[:12]
    path = folder / f"{name}.safetensors"
    if path.exists() and (known := read_episodes(path)).identity == identity:
        return known
    with progress_bar(f"play {task}", total=options.plans) as bar:
        episodes = play_episodes(
            problem, evaluator, task, options, seed=seed, identity=identity, on_plan=bar.update
        )
    log.info("pretrain: %s: best gain of %d plans %.4f", task, options.plans, float(episodes.gains.max()))
    episodes.save(path)
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
        trained={**asdict(training), "metric": options.metric, "plans": options.plans, "seed": seed},
        versions={name: version(name) for name in _PACKAGES},
    )
    with progress_bar("pretrain", total=training.steps) as bar:
        return train_policy(episodes, card, training, seed=seed, on_step=bar.update)


@dataclass(frozen=True)
class TaskFit:
    """Fit of the additive model to the gains of one task's plans."""

    task: PolicyTask
    plans: int
    greedy: float
    policy: float
    unseen: float | None


def task_fits(
    episodes: Sequence[TaskEpisodes], policy: PolicyFile, training: PretrainingOptions, *, seed: int
) -> list[TaskFit]:
    """Return the policy's fit to the gains of every task, and that of a policy trained without the task."""
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
