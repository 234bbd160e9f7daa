"""How channels are chosen and removed, checked: a pruner, its options and the target."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from pruning import MaskTrainingOptions, Pruner, PruningError, PushPull, get_pruner, list_pruners
from pruning.hard_concrete import HardConcreteMask
from pruning.selection import Scope
from rankrl.errors import ConfigError, did_you_mean
from rankrl.option_types import check_options, parameter_types
from rankrl.options.pruners import NetworkSteps

DEFAULT_KEPT_MACS = 0.5
Measure = Literal["params", "macs"]


@dataclass(frozen=True)
class PruningOptions:
    """How channels are chosen, and how many.

    Attributes:
        pruner: A registered name.
        measure: What the target counts.
        kept: The target: the fraction of the dense network's cost to keep at most, in (0, 1).
        layers: Names of the layers whose channels, or blocks, may go; None for all that can be pruned.
        scope: Criteria only: `uniform` keeps the same share of every channel group, `global` ranks all
            channels together, `per_cost` by what they save (see `pruning.keep_within`).
        multiple: Criteria only: channels are kept in multiples of it; processors compute several at a time.
        mask: Masks only: keyword arguments of the mask.
        training: Masks only: their training.
        steps: Masks only: how the network learns meanwhile.
        rewind: Masks only: keep what the masks chose and go back to the dense network's weights, solved for
            anew like those that a criterion leaves; None for whichever weights do better on held-out images.
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


def pruner_defaults(name: str) -> dict[str, Any]:
    """Return a pruner's options, by name, with their defaults.

    Raises:
        ConfigError: There is none of that name.
    """
    known = [pruner.name for pruner in list_pruners()]
    if name not in known:
        raise ConfigError(
            f"there is no pruner {name!r}; known are {', '.join(known)}.{did_you_mean(name, known)}"
        )
    pruner = get_pruner(name)
    if pruner.unit == "blocks":
        return {"layers": None}
    if not pruner.is_mask:
        return {"layers": None, "scope": pruner.scope, "multiple": 1}
    training = {field.name: getattr(MaskTrainingOptions(), field.name) for field in _fields(pruner)}
    training["push_pull"] = [training["push_pull"].network_steps, training["push_pull"].mask_steps]
    if "temperature" in training:
        training["temperature"] = list(training["temperature"])
    training["strengths"] = dict(training["strengths"])
    return {
        "layers": None,
        "rewind": None,
        **_mask_defaults(pruner),
        **training,
        **dataclasses.asdict(NetworkSteps()),
    }


def pruner_option_types(name: str) -> dict[str, Any]:
    """Return the types of a pruner's options, by name.

    Raises:
        ConfigError: There is none of that name.
    """
    owners = (get_pruner(name).definition, MaskTrainingOptions, NetworkSteps, PruningOptions)
    types = {key: kind for owner in reversed(owners) for key, kind in parameter_types(owner).items()}
    types["push_pull"] = tuple[int, int]  # the steps of a `PushPull`
    if "temperature" in types:
        types["temperature"] = parameter_types(MaskTrainingOptions)["temperature"]
    return {key: types[key] for key in pruner_defaults(name)}


def pruning_options(
    name: str, given: Mapping[str, Any], *, params: float | None, macs: float | None, seed: int = 0
) -> PruningOptions:
    """Check a pruner's options and the target.

    Args:
        name: A registered pruner.
        given: Its options, some or all of `pruner_defaults`.
        params: Fraction of the parameters to keep, or None.
        macs: Fraction of the multiply-accumulates to keep; with neither, `DEFAULT_KEPT_MACS`.
        seed: Seed of everything random.

    Raises:
        ConfigError: If the name or an option is unknown or out of its range, or there are two targets.
    """
    defaults = pruner_defaults(name)
    check_options(f"pruner {name!r}", "pruner", given, pruner_option_types(name))
    values = {**defaults, **given}
    layers = values.pop("layers")
    measure, kept = _target(params, macs)
    common: dict[str, Any] = {"measure": measure, "kept": kept, "seed": seed}
    common["layers"] = None if layers is None else tuple(layers)
    pruner = get_pruner(name)
    if pruner.unit == "blocks":
        return PruningOptions(name, **common)
    if not pruner.is_mask:
        if values["scope"] not in get_args(Scope):
            allowed = get_args(Scope)
            raise ConfigError(
                f"pruner.scope must be one of {', '.join(allowed)}, got {values['scope']!r}."
                f"{did_you_mean(values['scope'], allowed)}"
            )
        if values["multiple"] < 1:
            raise ConfigError(f"pruner.multiple must be at least 1, got {values['multiple']}")
        return PruningOptions(name, scope=values["scope"], multiple=values["multiple"], **common)
    try:
        mask = {key: values[key] for key in _mask_defaults(pruner)}
        pruner.definition(1, **mask)
        training = {field.name: values[field.name] for field in _fields(pruner)}
        training["push_pull"] = PushPull(*training["push_pull"])
        if "temperature" in training:
            training["temperature"] = tuple(training["temperature"])
        steps = {field.name: values[field.name] for field in dataclasses.fields(NetworkSteps)}
        return PruningOptions(
            name,
            mask=mask,
            training=MaskTrainingOptions(**training),
            steps=NetworkSteps(**steps),
            rewind=values["rewind"],
            **common,
        )
    except PruningError as error:
        raise ConfigError(f"pruner {name!r}: {error}") from error


def _target(params: float | None, macs: float | None) -> tuple[Measure, float]:
    if params is not None and macs is not None:
        raise ConfigError("pruning has one target: set budget.params or budget.macs, not both")
    measure: Measure = "macs" if params is None else "params"
    kept = params if params is not None else DEFAULT_KEPT_MACS if macs is None else macs
    if not 0 < kept < 1:
        raise ConfigError(f"budget.{measure}={kept} is outside (0, 1); it is the fraction to keep, as in 0.5")
    return measure, kept


def _fields(pruner: Pruner) -> list[dataclasses.Field[Any]]:
    """Return the fields of the mask training that concern a mask."""
    stochastic = issubclass(pruner.definition, HardConcreteMask)  # type: ignore[arg-type]
    every = dataclasses.fields(MaskTrainingOptions)
    return [field for field in every if stochastic or field.name != "temperature"]


def _mask_defaults(pruner: Pruner) -> dict[str, Any]:
    """Return the options of a mask itself; the temperature is the training's, which anneals it."""
    parameters = inspect.signature(pruner.definition).parameters.values()
    return {
        parameter.name: parameter.default
        for parameter in parameters
        if parameter.name not in ("units", "temperature")
    }
