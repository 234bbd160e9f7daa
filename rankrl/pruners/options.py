"""Check the options of a pruning: the pruner, its own options and the target."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pruning import MaskTrainingOptions, Pruner, PruningError, get_pruner, list_pruners
from pruning.selection import Scope
from rankrl.errors import ConfigError, did_you_mean
from rankrl.option_types import check_options, parameter_defaults, parameter_types
from rankrl.options.names import option_fields
from rankrl.options.training import PRUNERS, BlockOptions, CriterionOptions, MaskOptions, NetworkSteps

DEFAULT_KEPT_MACS = 0.5
Measure = Literal["params", "macs"]
_OF_TRAINING = ("epochs", "strength", "strengths", "limit")
# Parameters of masks that are no options: the code that builds and trains masks sets them.
_NO_OPTIONS = ("units", "temperature")


@dataclass(frozen=True)
class PruningOptions:
    """Choice of the channels or blocks to remove, and the target.

    The options are those of `CriterionOptions`, `MaskOptions` and `BlockOptions`.
    """

    pruner: str
    measure: Measure = "macs"
    kept: float = DEFAULT_KEPT_MACS
    layers: tuple[str, ...] | None = None
    scope: Scope = "uniform"
    multiple: int = 1
    mask: Mapping[str, Any] = field(default_factory=dict)
    training: MaskTrainingOptions = field(default_factory=MaskTrainingOptions)
    steps: NetworkSteps = field(default_factory=NetworkSteps)
    rewind: bool | None = None
    sequential: bool = True
    seed: int = 0

    @property
    def definition(self) -> Pruner:
        return get_pruner(self.pruner)


def options_class(name: str) -> type[BlockOptions]:
    pruner = _pruner(name)
    if pruner.unit == "blocks":
        return BlockOptions
    return MaskOptions if pruner.is_mask else CriterionOptions


def pruning_options(
    name: str, options: Mapping[str, Any], *, params: float | None, macs: float | None, seed: int = 0
) -> PruningOptions:
    """Check a pruner's options and the target, a fraction to keep (`DEFAULT_KEPT_MACS` with neither)."""
    pruner, of_class = _pruner(name), options_class(name)
    own, types = _mask_parameters(pruner), parameter_types(of_class)
    common = {each.name: types[each.name] for each in option_fields(of_class)}
    check_options(f"pruner {name!r}", "pruner", options, {**common, **own})
    measure, kept = _target(params, macs)
    mask = {key: value for key, value in options.items() if key in own}
    checked = of_class(**{key: value for key, value in options.items() if key not in own})
    values = {each.name: getattr(checked, each.name) for each in dataclasses.fields(checked)}
    if checked.layers is not None:
        values["layers"] = tuple(checked.layers)
    if isinstance(checked, CriterionOptions):
        values["scope"] = checked.scope or pruner.scope
    elif isinstance(checked, MaskOptions):
        try:
            pruner.definition(1, **mask)
            training = MaskTrainingOptions(**{key: values.pop(key) for key in _OF_TRAINING})
        except PruningError as error:
            raise ConfigError(f"pruner {name!r}: {error}") from error
        steps = {each.name: values.pop(each.name) for each in dataclasses.fields(NetworkSteps)}
        values |= {"mask": mask, "training": training, "steps": NetworkSteps(**steps)}
    return PruningOptions(name, measure, kept, **values, seed=seed)


def _pruner(name: str) -> Pruner:
    known = [pruner.name for pruner in list_pruners()]
    if name not in known:
        raise ConfigError(
            f"there is no pruner {name!r}; known are {', '.join(known)}.{did_you_mean(name, known)}"
        )
    return get_pruner(name)


def _mask_parameters(pruner: Pruner) -> dict[str, Any]:
    """Return the types of the parameters of a user's mask; none for the built-in masks."""
    if pruner.name in PRUNERS or not pruner.is_mask:
        return {}
    types = parameter_types(pruner.definition)
    return {key: types[key] for key in parameter_defaults(pruner.definition, without=_NO_OPTIONS)}


def _target(params: float | None, macs: float | None) -> tuple[Measure, float]:
    if params is not None and macs is not None:
        raise ConfigError("pruning has one target: set budget.params or budget.macs, not both")
    measure: Measure = "macs" if params is None else "params"
    kept = params if params is not None else DEFAULT_KEPT_MACS if macs is None else macs
    if not 0 < kept < 1:
        raise ConfigError(f"budget.{measure}={kept} is outside (0, 1); it is the fraction to keep, as in 0.5")
    return measure, kept
