"""Define the configuration as a dataclass, and translate it for Hydra."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

from rankrl.options.decomposition import DecompositionOptions
from rankrl.options.names import option_fields
from rankrl.options.search import BudgetOptions, SearchOptions
from rankrl.options.tasks import (
    CalibrationOptions,
    CompareOptions,
    InspectOptions,
    PretrainOptions,
    PruneOptions,
    TimingOptions,
    TrackingOptions,
)
from rankrl.options.timing import ExportOptions
from rankrl.options.training import FineTuningOptions, OptimizerOptions, TrainingOptions

Options = TypeVar("Options")


@cache
def structured(section: Any) -> type:
    """Translate a section of the configuration into a dataclass of types that OmegaConf knows."""
    hints = typing.get_type_hints(section)
    fields = [(each.name, *_field(each, hints[each.name])) for each in option_fields(section)]
    return dataclasses.make_dataclass(section.__name__, fields, repr=False, eq=False)


def built(section: type[Options], values: Mapping[str, Any]) -> Options:
    """Build a section from plain values."""
    hints = typing.get_type_hints(section)
    return section(**{name: _value(hints[name], value) for name, value in values.items()})


def _value(hint: Any, value: Any) -> Any:
    if _is_section(hint):
        return built(hint, value)
    if isinstance(value, list) and any(typing.get_origin(each) is tuple for each in _members(hint)):
        return tuple(value)
    return float(value) if isinstance(value, int) and _takes_floats(hint, value) else value


def _takes_floats(hint: Any, value: Any) -> bool:
    members = _members(hint)
    return float in members and int not in members and not isinstance(value, bool)


def _field(field: dataclasses.Field[Any], hint: Any) -> tuple[Any, Any]:
    """Return the type and the default of a field for OmegaConf."""
    if _is_section(hint):
        default: Any = hint
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory
        return structured(hint), dataclasses.field(default_factory=lambda: _thawed(default()))
    return _annotation(hint), _default(field)


def _is_section(hint: Any) -> bool:
    return dataclasses.is_dataclass(hint)


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return dataclasses.field(default_factory=field.default_factory)
    if isinstance(field.default, tuple):
        entries = field.default
        return dataclasses.field(default_factory=lambda: list(entries))
    return MISSING if field.default is dataclasses.MISSING else field.default


def _thawed(options: Any) -> Any:
    """Translate a section with its values for OmegaConf."""
    values = {each.name: getattr(options, each.name) for each in option_fields(options)}
    for name, value in values.items():
        if dataclasses.is_dataclass(value):
            values[name] = _thawed(value)
        elif isinstance(value, tuple):
            values[name] = list(value)
    section: Any = type(options)
    return structured(section)(**values)


def _annotation(hint: Any) -> Any:
    """Translate an annotation into one that OmegaConf knows."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        members = list(dict.fromkeys(_annotation(each) for each in arguments if each is not type(None)))
        if len(members) > 1:  # OmegaConf knows unions of plain types only; `check_values` checks these
            return Any
        return members[0] | None if type(None) in arguments else members[0]
    if origin is Literal or hint is Path:
        return str
    if origin in (tuple, list, Sequence):
        return list[_annotation(arguments[0])]  # type: ignore[misc]
    if origin in (dict, Mapping):
        return dict[str, arguments[1]]  # type: ignore[valid-type]
    return hint


def _members(hint: Any) -> tuple[Any, ...]:
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return typing.get_args(hint) if union else (hint,)


Choice = Mapping[str, Any]
"""A group whose choices are registered: the name of one, and its own options."""


@dataclass(frozen=True)
class AppConfig:
    """The whole configuration.

    Attributes:
        task: What to do: pipeline (all of it), train, search, apply, prune, finetune, evaluate, export,
            inspect, report, compare, pretrain, timing_kit, verify_kit.
        seed: Seed of everything random: held-out images, calibration, exploration, augmentation.
        resume: The folder of an interrupted run to continue, with its own configuration.
        reuse: A folder whose finished runs a sweep takes for its jobs with the same options, as it does
            those in its own folder.
        overwrite: Whether a run starts over in a folder that holds another one, instead of being refused; the
            files that the other wrote, and no others, are removed when it has ended. Finished jobs of a sweep
            with the same options stay.
        run: The folder of a run that task=evaluate, finetune, export and apply take network, data, seed and
            weights or plan from, each unless it is set; task=finetune continues its fine-tuning, to
            finetune.epochs in all.
        plan: The plan that task=apply applies: a plan.json.
        weights: The compressed network that finetune, evaluate and export work on: a model.safetensors with
            its plan inside. Without options of model and dataset, those of the run in whose folder it lies
            are taken.
        plugins: Modules that are imported first, and register formats, selectors, rewards, ... of your own.
            Those that installed packages have in the entry points rankrl.plugins need not be named.
        runs: The folder whose runs task=report gathers in one page, and task=verify_kit takes.
    """

    task: str = "pipeline"
    seed: int = 0
    resume: str | Path | None = None
    reuse: str | Path | None = None
    overwrite: bool = False
    run: str | Path | None = None
    plan: str | Path | None = None
    weights: str | Path | None = None
    plugins: tuple[str, ...] = ()
    runs: str | Path | None = None
    model: Choice = field(default_factory=dict)
    dataset: Choice = field(default_factory=dict)
    decomposition: DecompositionOptions = field(default_factory=DecompositionOptions)
    budget: BudgetOptions = field(default_factory=BudgetOptions)
    selector: Choice = field(default_factory=dict)
    reward: Choice = field(default_factory=dict)
    pruner: Choice = field(default_factory=dict)
    prune: PruneOptions = field(default_factory=PruneOptions)
    calibration: CalibrationOptions = field(default_factory=CalibrationOptions)
    search: SearchOptions = field(default_factory=SearchOptions)
    compare: CompareOptions = field(default_factory=CompareOptions)
    pretrain: PretrainOptions = field(default_factory=PretrainOptions)
    inspect: InspectOptions = field(default_factory=InspectOptions)
    optim: OptimizerOptions = field(default_factory=OptimizerOptions)
    finetune: FineTuningOptions = field(default_factory=FineTuningOptions)
    train: TrainingOptions = field(default_factory=TrainingOptions)
    export: ExportOptions = field(default_factory=ExportOptions)
    timing: TimingOptions = field(default_factory=TimingOptions)
    tracking: TrackingOptions = field(default_factory=TrackingOptions)


# `configs/config.yaml` names this schema in its defaults, so that every composition is typed.
ConfigStore.instance().store(name="schema", node=structured(AppConfig))
