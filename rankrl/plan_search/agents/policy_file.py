"""Save and load pretrained policies: their weights, training tasks and the options that they fix."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any, cast, get_args

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from rankrl.errors import CheckpointError, ConfigError
from rankrl.options.decomposition import AUTO
from rankrl.options.selectors import ActionKind, AgentOptions
from rankrl.plan_search.envs.observations import (
    DESCRIBING,
    Feature,
    descriptor_names,
    unknown_descriptors,
)
from rankrl.plan_search.envs.rank_selection import RankSelectionEnv, rollout
from rankrl.plan_search.space.problem import SearchProblem, SearchSetting
from rankrl.state_file import write_state

__all__ = ["AgentOptions", "options_with_policy", "resolved_policy"]

PRETRAINED_REFITTED = "pretrained_refitted"
"""Name in `selector.policy` of the policy that comes with rankrl."""

_FIXED = ("features", "hidden")  # options on which the shapes of a policy's weights depend


def resolved_policy(
    policy: str | Path | None, action: ActionKind | None, setting: SearchSetting
) -> str | Path | None:
    """Return the policy that a search begins with: a file, a name, or None.

    The policy that comes with rankrl predicts the importance of each layer's loss in an allocation of ranks
    within a budget; it does not apply to channels or blocks, or without a budget.
    """
    if policy != AUTO:
        return policy
    fits = bool(setting.measures) and not setting.narrows and action != "rank"
    return PRETRAINED_REFITTED if fits else None


def options_with_policy(options: AgentOptions, policy: PolicyFile) -> AgentOptions:
    """Return the options with those that a policy fixes; refuse others than the policy's or the defaults."""
    card = policy.card
    fixed: dict[str, Any] = {name: getattr(card, name) for name in _FIXED}
    for name, value in fixed.items():
        asked = getattr(options, name)
        if asked not in (getattr(AgentOptions, name), value):
            raise ConfigError(
                f"selector.{name}={_shown(asked)} contradicts selector.policy={options.policy}, which was "
                f"trained with {_shown(value)}; leave selector.{name} out"
            )
    if options.action not in (None, card.action):
        raise ConfigError(
            f"selector.policy={options.policy} gives every layer an {card.action}; leave selector.action out"
        )
    return replace(options, action=card.action, **fixed)


def _shown(value: Any) -> str:
    return f"[{','.join(map(str, value))}]" if isinstance(value, tuple) else str(value)


_VERSION = 1


@dataclass(frozen=True)
class PolicyTask:
    """A task that a policy was trained on."""

    model: str
    network: str
    dataset: str
    formats: tuple[str, ...]
    budgets: Mapping[str, float]

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> PolicyTask:
        """Read a task from the plain values of `dataclasses.asdict`."""
        return cls(**{**values, "formats": tuple(values["formats"])})

    @property
    def decision(self) -> tuple[str, frozenset[str], tuple[tuple[str, float], ...]]:
        """Key of the task: network, formats and budgets; tasks with the same key are the same."""
        return self.network, frozenset(self.formats), tuple(sorted(self.budgets.items()))

    def __str__(self) -> str:
        budgets = " and ".join(f"{fraction:g} of {measure}" for measure, fraction in self.budgets.items())
        return f"{self.model} on {self.dataset}, {'/'.join(self.formats)}, {budgets}"


@dataclass(frozen=True)
class PolicyCard:
    """Description of a policy: its observations, the meaning of its actions, and its training tasks."""

    features: tuple[Feature, ...]
    importance_scale: float
    hidden: tuple[int, ...]
    tasks: tuple[PolicyTask, ...]
    descriptors: tuple[str, ...] = field(default_factory=descriptor_names)
    action: ActionKind = "importance"
    trained: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not set(self.features) <= set(DESCRIBING):
            raise ConfigError(
                f"a policy for every network sees {', '.join(DESCRIBING)} at most, got "
                f"{', '.join(self.features)}: the others depend on the network"
            )

    def known(self, task: PolicyTask) -> PolicyTask | None:
        """Return the training task with the same network, formats and budgets, or None."""
        return next((known for known in self.tasks if known.decision == task.decision), None)

    def check_held_out(self, task: PolicyTask) -> None:
        """Refuse to evaluate the policy on a task that it was trained on."""
        known = self.known(task)
        if known is not None:
            raise ConfigError(
                f"the policy was trained on this very task ({known}); what it carries over shows on "
                "another network, format or budget"
            )

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> PolicyCard:
        """Read a card from the plain values of `dataclasses.asdict`."""
        tasks = tuple(PolicyTask.from_values(task) for task in values["tasks"])
        lists = {name: tuple(values[name]) for name in ("features", "hidden", "descriptors")}
        return cls(**{**values, **lists, "tasks": tasks})


@dataclass(frozen=True)
class PolicyFile:
    """A pretrained policy."""

    layers: tuple[tuple[Tensor, Tensor], ...]
    card: PolicyCard

    @property
    def observed(self) -> int:
        """Length of an observation."""
        return self.layers[0][0].shape[1]

    def actions(self, observations: Tensor) -> Tensor:
        """Return the policy's action for each observation without its last number, as after an action 0."""
        before = torch.full((len(observations), 1), 0.5)
        return self._act(torch.cat([observations, before], dim=1))

    def _act(self, values: Tensor) -> Tensor:
        """Return the actions, (N,), for observations (N, observed)."""
        for number, (weight, bias) in enumerate(self.layers):
            values = values @ weight.T + bias
            values = torch.relu(values) if number < len(self.layers) - 1 else torch.tanh(values)
        return values[:, 0]

    def environment(self, problem: SearchProblem) -> RankSelectionEnv:
        """Return a problem's environment, which shows what the policy sees."""
        card = self.card
        env = RankSelectionEnv(
            problem,
            action=card.action,
            features=card.features,
            importance_scale=card.importance_scale,
            descriptors=card.descriptors,
        )
        if self.observed != env.encoder.size:
            raise ConfigError(
                f"the policy sees {self.observed} numbers of a layer, the environment shows "
                f"{env.encoder.size}; train it anew with task=pretrain"
            )
        return env

    def actions_for(self, problem: SearchProblem) -> np.ndarray:
        """Roll out the policy without noise over a problem's layers; return its actions (layers,)."""
        env = self.environment(problem)
        played = rollout(env, lambda _, seen: self._act(torch.from_numpy(seen[None])).numpy())
        return played.actions[:, 0].astype(float)

    def counts(self, actions: np.ndarray) -> np.ndarray:
        """Return the factor of each layer's importance under actions (layers,), relative to greedy's."""
        factors: np.ndarray = np.exp(self.card.importance_scale * (actions - actions.mean()))
        return factors

    def save(self, path: Path) -> None:
        """Write the file, atomically."""
        tensors = {}
        for number, (weight, bias) in enumerate(self.layers):
            tensors[f"{number}.weight"], tensors[f"{number}.bias"] = weight, bias
        write_state(path, tensors, {"card": asdict(self.card)}, _VERSION)

    @classmethod
    def load(cls, path: Path) -> PolicyFile:
        """Read a file of `save`."""
        if not path.is_file():
            raise CheckpointError(
                f"selector.policy: there is no policy file {path}; `rankrl task=pretrain` makes one, and "
                f"{PRETRAINED_REFITTED} comes with rankrl"
            )
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                metadata = file.metadata() or {}
                tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a dict)
            content = json.loads(metadata["rankrl"])
            version = content["version"]
            if version != _VERSION:
                raise CheckpointError(
                    f"{path} is a policy of version {version}, this program reads version {_VERSION}; "
                    "train it anew with task=pretrain"
                )
            card = PolicyCard.from_values(content["card"])
            count = len(card.hidden) + 1
            layers = tuple((tensors[f"{n}.weight"], tensors[f"{n}.bias"]) for n in range(count))
        except (SafetensorError, OSError, KeyError, ValueError, TypeError, ConfigError) as error:
            raise CheckpointError(f"{path} is damaged or no policy file: {error}") from error
        read = cls(layers, card)
        read._check(path)
        return read

    def _check(self, path: Path) -> None:
        if self.card.action not in get_args(ActionKind):
            raise CheckpointError(f"{path} has actions of an unknown kind, {self.card.action!r}")
        if unknown := unknown_descriptors(self.card.descriptors):
            raise CheckpointError(
                f"{path} was trained on descriptors that this version of rankrl does not have "
                f"({', '.join(unknown[:5])}); train it anew with task=pretrain"
            )
        sizes = [self.observed, *self.card.hidden, 1]
        for number, (weight, bias) in enumerate(self.layers):
            wanted = (sizes[number + 1], sizes[number])
            if tuple(weight.shape) != wanted or tuple(bias.shape) != wanted[:1]:
                raise CheckpointError(
                    f"{path} is damaged: its layer {number} has the shape {tuple(weight.shape)}, its card "
                    f"says {wanted}"
                )
            if not (torch.isfinite(weight).all() and torch.isfinite(bias).all()):
                raise CheckpointError(f"{path} is damaged: its layer {number} is not finite")


def read_policy(policy: str | Path) -> PolicyFile:
    """Read a policy from a file, or the one that comes with rankrl by its name."""
    if str(policy) != PRETRAINED_REFITTED:
        return PolicyFile.load(Path(policy))
    with resources.as_file(resources.files("rankrl.plan_search.agents") / f"{policy}.safetensors") as path:
        return PolicyFile.load(path)


def linear_layers(network: nn.Module) -> list[nn.Linear]:
    """Return the linear layers of a network, in order."""
    return [module for module in network.modules() if isinstance(module, nn.Linear)]


def load_actor(actor: nn.Module, policy: PolicyFile) -> None:
    """Copy a policy into the layers behind the deterministic action of one of stable-baselines3's actors.

    TD3 and DDPG have them in `mu`; SAC in `latent_pi` and the mean, `mu`.
    """
    parts = [cast(nn.Module, getattr(actor, name)) for name in ("latent_pi", "mu") if hasattr(actor, name)]
    targets = [layer for part in parts for layer in linear_layers(part)]
    with torch.no_grad():
        for target, (weight, bias) in zip(targets, policy.layers, strict=True):
            target.weight.copy_(weight)
            target.bias.copy_(bias)
