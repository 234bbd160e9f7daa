"""Networks and optimizers of a stable-baselines3 model as named tensors, without pickling."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from stable_baselines3 import SAC, TD3
from stable_baselines3.common.buffers import ReplayBuffer
from torch import Tensor
from torch.optim import Optimizer

Algorithm = TD3 | SAC
"""Every algorithm here is one of these; DDPG is a TD3."""


def model_tensors(model: Algorithm) -> dict[str, Tensor]:
    """Return all that training changes in a model but its replay buffer and counters, by name."""
    tensors = {f"policy.{key}": value for key, value in model.policy.state_dict().items()}
    for name, optimizer in _optimizers(model).items():
        for index, entries in optimizer.state_dict()["state"].items():
            tensors |= {f"{name}.{index}.{key}": torch.as_tensor(value) for key, value in entries.items()}
    if isinstance(model, SAC) and model.log_ent_coef is not None:
        tensors["log_ent_coef"] = model.log_ent_coef.detach()
    return tensors


def restore_model(model: Algorithm, tensors: Mapping[str, Tensor]) -> None:
    """Take over what `model_tensors` returned from a model of the same shape."""
    policy = {key.removeprefix("policy."): v for key, v in tensors.items() if key.startswith("policy.")}
    model.policy.load_state_dict(policy)
    for name, optimizer in _optimizers(model).items():
        entries: dict[int, dict[str, Any]] = {}
        for key, value in tensors.items():
            if key.startswith(f"{name}."):
                _, index, entry = key.split(".")
                entries.setdefault(int(index), {})[entry] = value.clone()
        optimizer.load_state_dict({**optimizer.state_dict(), "state": entries})
    if isinstance(model, SAC) and model.log_ent_coef is not None:
        with torch.no_grad():
            model.log_ent_coef.copy_(tensors["log_ent_coef"])


@contextmanager
def actor_kept(model: Algorithm) -> Iterator[None]:
    """Undo what training in the block does to the actor, its target, and its optimizer."""
    parts = [model.actor, model.actor.optimizer]
    if not isinstance(model, SAC):
        parts.append(model.actor_target)
    before = [copy.deepcopy(part.state_dict()) for part in parts]
    yield
    for part, state in zip(parts, before, strict=True):
        part.load_state_dict(state)


def _optimizers(model: Algorithm) -> dict[str, Optimizer]:
    optimizers: dict[str, Optimizer] = {
        "actor_optimizer": model.actor.optimizer,
        "critic_optimizer": model.critic.optimizer,
    }
    if isinstance(model, SAC) and model.ent_coef_optimizer is not None:
        optimizers["entropy_optimizer"] = model.ent_coef_optimizer
    return optimizers


def buffer_tensors(buffer: ReplayBuffer) -> dict[str, Tensor]:
    """Return the filled part of a replay buffer, and where the next transition goes, by name."""
    filled = buffer.buffer_size if buffer.full else buffer.pos
    tensors = {f"buffer.{name}": torch.from_numpy(getattr(buffer, name)[:filled].copy()) for name in _ARRAYS}
    return tensors | {"buffer.position": torch.tensor([buffer.pos, int(buffer.full)])}


def restore_buffer(buffer: ReplayBuffer, tensors: Mapping[str, Tensor]) -> None:
    """Take over what `buffer_tensors` returned from a buffer of the same size."""
    for name in _ARRAYS:
        filled = tensors[f"buffer.{name}"].numpy()
        getattr(buffer, name)[: len(filled)] = filled
    position, full = tensors["buffer.position"].tolist()
    buffer.pos, buffer.full = position, bool(full)


_ARRAYS = ("observations", "next_observations", "actions", "rewards", "dones", "timeouts")
