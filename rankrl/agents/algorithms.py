"""stable-baselines3's DDPG, TD3 and SAC with what rank selection needs changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from stable_baselines3 import DDPG, SAC, TD3
from stable_baselines3.common.logger import Logger
from torch import Tensor, nn

from rankrl.agents.buffer import EpisodeBuffer
from rankrl.agents.critics import CriticEnsemble, EnsembleSACPolicy, EnsembleTD3Policy
from rankrl.agents.options import AgentOptions
from rankrl.agents.state import Algorithm
from rankrl.envs.rank_selection import RankSelectionEnv
from rankrl.errors import ConfigError


class _ReturnLearner:
    """Training of a deterministic actor and its critics on whole returns.

    It stands in for stable-baselines3's `train` in DDPG and TD3. Their bootstrapped target is the reward
    itself when every transition is the last of its episode (`EpisodeBuffer`), so the target networks have
    nothing to do; beside that, the actor climbs the mean of all critics instead of the first one's value, and
    pays for the square of its output before tanh.
    """

    output_penalty: float

    def train(self: Any, gradient_steps: int, batch_size: int = 100) -> None:
        """Take gradient steps on batches from the buffer."""
        critic: CriticEnsemble = self.critic
        # One draw for all steps: drawing costs as much as a step.
        drawn = self.replay_buffer.sample(gradient_steps * batch_size)
        parts = (drawn.observations, drawn.actions, drawn.rewards)
        for observations, actions, rewards in zip(*(part.split(batch_size) for part in parts), strict=True):
            self._n_updates += 1
            values = critic.values(observations, actions)
            _descend(critic, F.mse_loss(values, rewards.T.expand_as(values)) * critic.n_critics)
            if self._n_updates % self.policy_delay == 0:
                output = self.actor.mu[:-1](observations)
                value = critic.values(observations, torch.tanh(output)).mean()
                _descend(self.actor, self.output_penalty * output.square().mean() - value)


class ReturnDDPG(_ReturnLearner, DDPG):
    """Deep deterministic policy gradient (Lillicrap et al., ICLR 2016) on whole returns."""


class ReturnTD3(_ReturnLearner, TD3):
    """TD3 (Fujimoto et al., ICML 2018) on whole returns: of its tricks the delayed actor remains."""


class ReturnSAC(SAC):
    """Soft actor-critic (Haarnoja et al., ICML 2018) on whole returns, with rates of its own."""

    actor_rate: float
    critic_rate: float

    def _update_learning_rate(self, optimizers: Any) -> None:
        """Give the actor its rate, and critics and entropy coefficient theirs."""
        actor, *others = optimizers
        for optimizer, rate in ((actor, self.actor_rate), *((other, self.critic_rate) for other in others)):
            for group in optimizer.param_groups:
                group["lr"] = rate


def _deterministic(cls: type[ReturnDDPG] | type[ReturnTD3]) -> Callable[..., Algorithm]:
    def make(env: RankSelectionEnv, options: AgentOptions, buffer_size: int) -> Algorithm:
        model = cls(EnsembleTD3Policy, env, **_shared(options, buffer_size))
        for optimizer, rate in (
            (model.actor.optimizer, options.actor_rate),
            (model.critic.optimizer, options.critic_rate),
        ):
            for group in optimizer.param_groups:
                group["lr"] = rate
        model.output_penalty = options.output_penalty
        _start_at_zero(model.actor.mu[-2])
        return model

    return make


def _soft(env: RankSelectionEnv, options: AgentOptions, buffer_size: int) -> Algorithm:
    model = ReturnSAC(EnsembleSACPolicy, env, **_shared(options, buffer_size))
    model.actor_rate, model.critic_rate = options.actor_rate, options.critic_rate
    _start_at_zero(model.actor.mu)
    return model


def _shared(options: AgentOptions, buffer_size: int) -> dict[str, Any]:
    return {
        "learning_rate": options.critic_rate,
        "buffer_size": buffer_size,
        "batch_size": options.batch_size,
        "gamma": 1.0,
        "replay_buffer_class": EpisodeBuffer,
        "policy_kwargs": {
            "net_arch": list(options.hidden),
            "n_critics": options.critics,
            "optimizer_kwargs": {"fused": True},
        },
        "device": "cpu",  # networks this small are slower on a GPU
    }


def _start_at_zero(layer: nn.Module) -> None:
    """Scale the actor's last layer down, so that the untrained policy's plan is the preset."""
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.mul_(0.01)


def _descend(network: Any, loss: Tensor) -> None:
    """Take a step of a network's optimizer; no other network's gradients are computed."""
    parameters = network.optimizer.param_groups[0]["params"]
    for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        parameter.grad = gradient
    network.optimizer.step()


ALGORITHMS: dict[str, Callable[..., Algorithm]] = {
    "ddpg": _deterministic(ReturnDDPG),
    "td3": _deterministic(ReturnTD3),
    "sac": _soft,
}


def create_algorithm(
    name: str, env: RankSelectionEnv, options: AgentOptions, *, buffer_size: int
) -> Algorithm:
    """Make an algorithm of stable-baselines3 for rank selection.

    Its networks are drawn from torch's global generator; stable-baselines3's own `seed` would seed the
    generators of the whole process.

    Args:
        name: `ddpg`, `td3` or `sac`.
        env: The environment; only its spaces are used.
        options: Hyper-parameters.
        buffer_size: Transitions that the replay buffer holds.

    Raises:
        ConfigError: There is no such algorithm.
    """
    if name not in ALGORITHMS:
        raise ConfigError(f"there is no algorithm {name!r}; known are {', '.join(sorted(ALGORITHMS))}")
    model = ALGORITHMS[name](env, options, buffer_size)
    model.set_logger(Logger(None, []))
    return model
