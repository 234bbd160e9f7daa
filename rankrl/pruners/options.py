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

    Attributes:
        pruner: A registered name.
        measure: What the target counts.
        kept: The target: the fraction of the dense network's cost to keep at most, in (0, 1).
        layers: Names of the layers whose channels, or blocks, may go; None for all that can be pruned.
        scope: Criteria only: how scores are compared (see `pruning.keep_within`).
        multiple: Criteria only: channels are kept in multiples of it; processors compute several at a time.
        mask: Masks only: keyword arguments of the mask.
        training: Masks only: their training.
        steps: Masks only: how the network learns meanwhile.
        rewind: Masks only: see `MaskOptions`.
        sequential: Where the weights are the dense network's: let what stays make up for what goes (see
            `decomposition.apply_plan`).
        seed: Seed of everything random.
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
        """The registered pruner."""
        return get_pruner(self.pruner)


def options_class(name: str) -> type[BlockOptions]:
    """Return the dataclass of a pruner's options.

    Raises:
        ConfigError: There is no pruner of that name.
    """
    pruner = _pruner(name)
    if pruner.unit == "blocks":
        return BlockOptions
    return MaskOptions if pruner.is_mask else CriterionOptions


def pruner_defaults(name: str) -> dict[str, Any]:
    """Return a pruner's options, by name, with their defaults.

    Raises:
        ConfigError: There is none of that name.
    """
    options: Any = options_class(name)()
    common = {each.name: getattr(options, each.name) for each in option_fields(options)}
    return {**common, **{key: default for key, (_, default) in _mask_parameters(name).items()}}


def pruner_option_types(name: str) -> dict[str, Any]:
    """Return the types of a pruner's options, by name.

    Raises:
        ConfigError: There is none of that name.
    """
    options = options_class(name)
    common = {each.name: parameter_types(options)[each.name] for each in option_fields(options)}
    return {**common, **{key: kind for key, (kind, _) in _mask_parameters(name).items()}}


def pruning_options(
    name: str,
    options: Mapping[str, Any],
    *,
    params: float | None,
    macs: float | None,
    seed: int = 0,
) -> PruningOptions:
    """Check a pruner's options and the target.

    Args:
        name: A registered pruner.
        options: Some or all of `pruner_defaults`.
        params: Fraction of the parameters to keep, or None.
        macs: Fraction of the multiply-accumulates to keep; with neither, `DEFAULT_KEPT_MACS`.
        seed: Seed of everything random.

    Raises:
        ConfigError: If the name or an option is unknown or out of its range, or there are two targets.
    """
    check_options(f"pruner {name!r}", "pruner", options, pruner_option_types(name))
    measure, kept = _target(params, macs)
    pruner = _pruner(name)
    own = _mask_parameters(name)
    mask = {key: value for key, value in options.items() if key in own}
    checked = options_class(name)(**{key: value for key, value in options.items() if key not in own})
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


def _mask_parameters(name: str) -> dict[str, tuple[Any, Any]]:
    """Return types and defaults of a user's mask's parameters; none for the built-in masks."""
    pruner = get_pruner(name)
    if name in PRUNERS or not pruner.is_mask:
        return {}
    defaults = parameter_defaults(pruner.definition, without=_NO_OPTIONS)
    types = parameter_types(pruner.definition)
    return {key: (types[key], default) for key, default in defaults.items()}


def _target(params: float | None, macs: float | None) -> tuple[Measure, float]:
    if params is not None and macs is not None:
        raise ConfigError("pruning has one target: set budget.params or budget.macs, not both")
    measure: Measure = "macs" if params is None else "params"
    kept = params if params is not None else DEFAULT_KEPT_MACS if macs is None else macs
    if not 0 < kept < 1:
        raise ConfigError(f"budget.{measure}={kept} is outside (0, 1); it is the fraction to keep, as in 0.5")
    return measure, kept
