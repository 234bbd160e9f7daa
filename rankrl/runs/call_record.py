"""The record of a call from Python in its folder, which tells a repeated call from a different one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from decomposition.cache import digest
from rankrl.networks.candidates import CandidateOptions
from rankrl.plan_search.goal import SearchGoal
from rankrl.runs.run_folder import COMPRESS


def call_record(
    model: nn.Module,
    candidates: CandidateOptions,
    goal: SearchGoal,
    selector: str,
    selector_options: Mapping[str, Any],
    *,
    seed: int,
) -> dict[str, Any]:
    """Return everything that a search depends on except data and score, which its own state identifies.

    Args:
        model: The network.
        candidates: What may become of its layers.
        goal: Budgets and limits.
        selector: Name of what chooses.
        selector_options: Its options.
        seed: Seed of everything random.
    """
    return {
        "task": COMPRESS,
        "network": network_digest(model),
        **asdict(goal.budget),
        "episodes": goal.search.episodes,
        "timing": None if goal.budget.latency is None else goal.timing.timing,
        "candidates": asdict(candidates),
        "selector": selector,
        "selector options": {name: repr(each) for name, each in selector_options.items()},
        "seed": seed,
    }


def network_digest(model: nn.Module) -> str:
    """Return the hash of a network's modules and weights, 16 hexadecimal digits."""
    modules = [(name, type(module).__qualname__) for name, module in model.named_modules()]
    tensors = {
        name: value
        for name, value in model.state_dict().items()
        if isinstance(value, Tensor) and value.layout == torch.strided
    }
    return digest(modules, tensors)[:16]
