"""A policy from the scored plans of many tasks: its actions make an additive model of rewards fit them.

A plan's gain over greedy's is taken to be -s sum_l exp(k a_l) (loss_l - preset loss_l): greedy's own model
of losses, in which a layer counts e^(k a_l) times as much, a_l the policy's action in [-1, 1] for its
descriptors and k the importance scale. That is what actions mean to the environment, whose Lagrangian
allocation minimises just this sum within the budget: the policy whose actions explain best what plans gain
proposes the plan that is best by all that was seen. So every scored plan teaches about every layer, and about
layers of other networks with the same descriptors, without the noise of a search for each task's best plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rankrl.errors import NonFiniteError
from rankrl.options.pretraining import PretrainingOptions
from rankrl.plan_search.agents.policy_file import PolicyCard, PolicyFile, linear_layers
from rankrl.plan_search.pretraining.episodes import TaskEpisodes

# Gains of this size and larger count less: plans far from greedy's tell little about the best one.
_GAIN_UNIT = 0.03
# Plans that lose more than this many times what greedy's does are left out.
_FARTHEST = 2.0


@dataclass(frozen=True)
class _Lesson:
    """A task's plans: observations (layers, features), excess losses (plans, layers), gains (plans,)."""

    observations: Tensor
    excesses: Tensor
    gains: Tensor

    @classmethod
    def of(cls, episodes: TaskEpisodes) -> _Lesson:
        total = max(float(episodes.preset_losses.sum()), 1e-300)
        excesses = (episodes.losses - episodes.preset_losses) / total
        near = excesses.sum(1) < _FARTHEST - 1
        return cls(
            torch.from_numpy(episodes.observations).float(),
            torch.from_numpy(excesses[near]).float(),
            torch.from_numpy(episodes.gains[near]).float(),
        )

    def unexplained(self, actions: Tensor, importance_scale: float) -> Tensor:
        """Return the share of the gains' weighted squares that the model leaves over under actions (layers,).

        The factor s is the best one.
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
    """Train a policy.

    The previous action, the last number of an observation, keeps the weight 0: it is for the agents that
    start from here and learn on.
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
    """Return which share of a task's gains the additive model leaves over, 0 to 1 or a little more."""
    lesson = _Lesson.of(episodes)
    if policy is None:
        return float(lesson.unexplained(torch.zeros(len(lesson.observations)), 1.0))
    actions = policy.actions(lesson.observations)
    return float(lesson.unexplained(actions, policy.card.importance_scale))


def _network(observed: int, hidden: Sequence[int]) -> nn.Sequential:
    """Return a network whose actions begin near 0."""
    layers: list[nn.Module] = []
    for size, units in zip((observed, *hidden[:-1]), hidden, strict=True):
        layers += [nn.Linear(size, units), nn.ReLU()]
    last = nn.Linear((observed, *hidden)[-1], 1)
    with torch.no_grad():
        last.weight.mul_(0.1)
        last.bias.zero_()
    return nn.Sequential(*layers, last, nn.Tanh())
