"""Starting from a pretrained policy: what it fixes of the agent's options, and its weights in the actor."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any, cast

import torch
from stable_baselines3 import SAC
from torch import nn

from rankrl.agents.options import AgentOptions
from rankrl.agents.policy_file import PolicyFile, actor_layers, load_layers
from rankrl.agents.state import Algorithm
from rankrl.errors import ConfigError

_FIXED = ("features", "hidden", "importance_scale")


def options_with_policy(options: AgentOptions, policy: PolicyFile) -> AgentOptions:
    """Return the options with those that a policy fixes.

    Args:
        options: The agent's; what the policy fixes is its default or what the policy says.
        policy: The policy.

    Raises:
        ConfigError: An option contradicts the policy.
    """
    card = policy.card
    defaults = {field.name: field.default for field in fields(AgentOptions)}
    fixed: dict[str, Any] = {name: getattr(card, name) for name in _FIXED}
    for name, value in fixed.items():
        given = getattr(options, name)
        if given not in (defaults[name], value):
            raise ConfigError(
                f"selector.{name}={_shown(given)} contradicts selector.policy={options.policy}, which was "
                f"trained with {_shown(value)}; leave selector.{name} out"
            )
    if options.action not in (None, card.action) or options.per_bond:
        raise ConfigError(
            f"selector.policy={options.policy} gives every layer an {card.action}; leave selector.action "
            "and selector.per_bond out"
        )
    return replace(options, action=card.action, **fixed)


def start_from(model: Algorithm, policy: PolicyFile, *, deviation: float) -> None:
    """Give an actor, and its target, the weights of a policy.

    Args:
        model: The algorithm, its networks made for the policy's options.
        policy: The policy.
        deviation: Standard deviation that a stochastic actor, SAC's, begins with, before the tanh.

    Raises:
        ConfigError: The policy sees another number of features than the environment shows.
    """
    shown = int(model.observation_space.shape[0])  # type: ignore[index]
    if policy.observed != shown:
        raise ConfigError(
            f"the policy sees {policy.observed} numbers of a layer, the environment shows {shown}; train it "
            "anew with task=pretrain"
        )
    actors = [model.actor]
    if not isinstance(model, SAC):
        actors.append(model.actor_target)
    for actor in actors:
        load_layers(actor_layers(actor), policy)
    if isinstance(model, SAC):
        with torch.no_grad():
            spread = cast(nn.Linear, model.actor.log_std)
            spread.weight.zero_()
            spread.bias.fill_(math.log(max(deviation, 1e-3)))


def _shown(value: Any) -> str:
    return f"[{','.join(map(str, value))}]" if isinstance(value, tuple) else str(value)
