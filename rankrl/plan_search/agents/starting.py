"""Starting from a pretrained policy: its weights in the actor."""

from __future__ import annotations

import math
from typing import cast

import torch
from stable_baselines3 import SAC
from torch import nn

from rankrl.plan_search.agents.policy_file import PolicyFile, actor_layers, load_layers
from rankrl.plan_search.agents.state import Algorithm


def start_from(model: Algorithm, policy: PolicyFile, *, deviation: float) -> None:
    """Give an actor, and its target, the weights of a policy."""
    policy.check_observed(int(model.observation_space.shape[0]))  # type: ignore[index]
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
