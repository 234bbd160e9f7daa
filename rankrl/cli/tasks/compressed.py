"""Networks that are compressed already: read from `weights`, and called after what their own plan says."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from torch import nn

from decomposition import CompressionPlan, Factorise, count_macs, count_parameters, load_compressed
from decomposition.errors import DecompositionError, PlanError
from pruning import list_pruners
from rankrl.cli.config.schema import AppConfig
from rankrl.data import ImageData
from rankrl.errors import ConfigError
from rankrl.options.decomposition import AUTO
from rankrl.training.networks import build_network
from rankrl.verify.measure import network_numbers

log = logging.getLogger(__name__)

_THEN = ", then "
"""Between who removed channels and who chose the ranks of what was left, in a plan's `chosen_by`."""


def compressed_from(config: AppConfig, data: ImageData) -> tuple[nn.Module, nn.Module, CompressionPlan]:
    """Return the compressed network that `weights` names, the dense architecture, and the plan."""
    if not config.weights:
        raise ConfigError(
            f"task={config.task} needs weights=RUN/model.safetensors, the compressed network of an "
            "earlier run"
        )
    dense = build_network(config.model, data, seed=config.seed)
    try:
        network, plan = load_compressed(dense, Path(config.weights))
    except PlanError as error:
        raise ConfigError(
            f"weights={config.weights} cannot be loaded into model={config.model['architecture']} for "
            f"dataset={data.name}: {error}. It takes the model.safetensors of a run, with the options model "
            "and dataset that the run had; a dense network is given as model.checkpoint=PATH"
        ) from error
    _warn_of_other_images(config.weights, plan, data)
    return network.eval(), plan.prepared(dense), plan


def check_plan(config: AppConfig, data: ImageData, plan: CompressionPlan) -> None:
    """Refuse a plan that the network cannot take, before the network is trained for it."""
    try:
        plan.specs(build_network(config.model, data, seed=config.seed))
    except DecompositionError as error:
        raise ConfigError(
            f"plan={config.plan} cannot be applied to model={config.model['architecture']} for "
            f"dataset={data.name}: {error}"
        ) from error


def method_of(plan: CompressionPlan) -> dict[str, str | None]:
    """Return what a network was compressed with, for metrics.json: its formats, who chose, who removed."""
    formats = {operation.format for operation in plan.chosen(Factorise).values()}
    method: dict[str, str | None] = {
        "decomposition": AUTO if len(formats) > 1 else next(iter(formats), None),
        "selector": plan.chosen_by,
    }
    first, then, second = plan.chosen_by.partition(_THEN)
    only_removed = bool(plan.group_kinds) and not any(layer.layer_operations for layer in plan)
    if then or (only_removed and first in [pruner.name for pruner in list_pruners()]):
        method |= {"selector": second or None, "pruner": first}
    return method


def both_chose(pruner: str, selector: str) -> str:
    """Return who chose a plan that removes channels first; `method_of` reads it."""
    return f"{pruner}{_THEN}{selector}"


def dense_numbers(config: AppConfig, data: ImageData, dense: nn.Module) -> dict[str, Any]:
    """Return what the dense network costs, and its test accuracy where its weights are known."""
    if config.model.get("checkpoint"):
        return network_numbers(dense, data)
    return {"params": count_parameters(dense), "macs": count_macs(dense, data.input_shape)}


def _warn_of_other_images(weights: str | Path, plan: CompressionPlan, data: ImageData) -> None:
    """Warn when a network gets images that are normalised in another way than those it was made with."""
    known, own = plan.metadata.get("preprocessing"), data.preprocessing.to_dict()
    if not isinstance(known, dict):
        return
    for name in ("mean", "std"):
        if name in known and known[name] != own[name]:
            log.warning(
                "%s was made with images of %s %s, those of dataset=%s have %s; dataset.%s sets it",
                weights,
                name,
                known[name],
                data.name,
                own[name],
                name,
            )
