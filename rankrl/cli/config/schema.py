"""Define the configuration: its sections, the groups whose choices are registered, and the tasks."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import types
import typing
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

from decomposition.registry import registered
from optim.registry import registered_optimizers
from pruning.registry import registered_pruners
from rankrl.errors import ConfigError
from rankrl.option_types import (
    OptionTypes,
    check_known,
    parameter_defaults,
    parameter_types,
    takes_any_option,
)
from rankrl.options.decomposition import DecompositionOptions
from rankrl.options.names import (
    DATASETS,
    FORMATS,
    HAND_ON,
    HEURISTICS,
    MODELS,
    NO_OPTIONS,
    NONE,
    OPTIMIZERS,
    TRACKERS,
    ModelOptions,
    TrackingOptions,
    option_fields,
)
from rankrl.options.search import REWARDS, BudgetOptions, CalibrationOptions, CompareOptions, SearchOptions
from rankrl.options.selectors import SELECTORS, NoOptions
from rankrl.options.timing import ExportOptions, TimingOptions
from rankrl.options.training import (
    PRUNERS,
    FineTuningOptions,
    OptimizerOptions,
    PruneOptions,
    TrainingOptions,
)

Options = TypeVar("Options")
Choice = Mapping[str, Any]
"""A group whose choices are registered: the name of one, and its own options."""


KITS = ("timing_kit", "verify_kit")
SEARCHING = ("pipeline", "search", "compare", "prune")
_FINETUNING = ("pipeline", "compare", "prune", "finetune", "export")  # export.training writes its optimizer
_TRAINING = ("train", "apply", *KITS, *SEARCHING)
_FITTING = ("inspect", "apply", "timing_kit", *SEARCHING)


@dataclass(frozen=True)
class InspectOptions:
    """Columns that task=inspect adds to every layer's shape, cost and feasible ranks.

    Attributes:
        errors: Fit every layer at a few ranks on the calibration images and show what they cost and lose.
    """

    errors: bool = False


@dataclass(frozen=True)
class AppConfig:
    """The whole configuration; `read_by` names the tasks that alone read a section.

    Attributes:
        task: What to do: pipeline (all of it), train, search, apply, prune, finetune, evaluate, export,
            inspect, report, compare, timing_kit, verify_kit.
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
        bench: A task of RankBench, or several: task=compare searches their tables instead of a network.
            Patterns such as "separable *" name the tasks that score every plan.
    """

    task: str = "pipeline"
    seed: int = 0
    resume: str | Path | None = None
    reuse: str | Path | None = None
    overwrite: bool = False
    run: str | Path | None = field(
        default=None, metadata={"read_by": ("finetune", "evaluate", "export", "apply")}
    )
    plan: str | Path | None = field(default=None, metadata={"read_by": ("apply",)})
    weights: str | Path | None = field(default=None, metadata={"read_by": ("finetune", "evaluate", "export")})
    plugins: tuple[str, ...] = ()
    runs: str | Path | None = field(default=None, metadata={"read_by": ("report", "verify_kit")})
    bench: str | tuple[str, ...] | None = field(default=None, metadata={"read_by": ("compare",)})
    model: Choice = field(default_factory=dict)
    dataset: Choice = field(default_factory=dict)
    decomposition: DecompositionOptions = field(
        default_factory=DecompositionOptions, metadata={"read_by": _FITTING}
    )
    budget: BudgetOptions = field(default_factory=BudgetOptions, metadata={"read_by": SEARCHING})
    selector: Choice = field(default_factory=dict, metadata={"read_by": SEARCHING})
    reward: Choice = field(default_factory=dict, metadata={"read_by": SEARCHING})
    pruner: Choice = field(default_factory=dict, metadata={"read_by": ("prune",)})
    prune: PruneOptions = field(default_factory=PruneOptions, metadata={"read_by": ("prune",)})
    calibration: CalibrationOptions = field(
        default_factory=CalibrationOptions, metadata={"read_by": _FITTING}
    )
    search: SearchOptions = field(default_factory=SearchOptions, metadata={"read_by": SEARCHING})
    compare: CompareOptions = field(default_factory=CompareOptions, metadata={"read_by": ("compare",)})
    inspect: InspectOptions = field(default_factory=InspectOptions, metadata={"read_by": ("inspect",)})
    optim: OptimizerOptions = field(default_factory=OptimizerOptions, metadata={"read_by": _FINETUNING})
    finetune: FineTuningOptions = field(default_factory=FineTuningOptions, metadata={"read_by": _FINETUNING})
    train: TrainingOptions = field(default_factory=TrainingOptions, metadata={"read_by": _TRAINING})
    export: ExportOptions = field(default_factory=ExportOptions)
    timing: TimingOptions = field(default_factory=TimingOptions)
    tracking: TrackingOptions = field(default_factory=TrackingOptions)

    def __post_init__(self) -> None:
        check_known("task", "task", [self.task], TASKS)
        for name, seeds in (("seed", [self.seed]), ("compare.seeds", self.compare.seeds)):
            if min(seeds, default=0) < 0:
                raise ConfigError(
                    f"{name} must not be negative, got {min(seeds)}; any whole number from 0 on will do"
                )


def option_table(owner: Any, without: Collection[str] = ()) -> dict[str, tuple[Any, Any]]:
    """Return type and default of every option that a dataclass, class or function takes."""
    if dataclasses.is_dataclass(owner):
        hints = typing.get_type_hints(owner)
        return {each.name: (hints[each.name], _default(each)) for each in option_fields(owner)}
    types, defaults = (read(owner, without=without) for read in (parameter_types, parameter_defaults))
    return {name: (types[name], default) for name, default in defaults.items()}


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def plain(value: Any) -> Any:
    """Convert a default to YAML's types; `???` stands for one that is missing."""
    if value in (inspect.Parameter.empty, dataclasses.MISSING):
        return MISSING
    if dataclasses.is_dataclass(value):
        return {each.name: plain(getattr(value, each.name)) for each in option_fields(value)}
    return list(value) if isinstance(value, tuple) else value


def built(section: type[Options], values: Mapping[str, Any]) -> Options:
    hints = typing.get_type_hints(section)
    return section(**{name: _value(hints[name], value) for name, value in values.items()})


def _value(hint: Any, value: Any) -> Any:
    if dataclasses.is_dataclass(hint):
        return built(typing.cast(type, hint), value)
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    members = typing.get_args(hint) if union else (hint,)
    if isinstance(value, list) and any(typing.get_origin(each) is tuple for each in members):
        return tuple(value)
    return float(value) if type(value) is int and float in members and int not in members else value


@dataclass(frozen=True)
class Group:
    """A group whose choices are registered: ours, with the dataclasses of their options, and plugins'.

    Options of ours are known without importing torch; None for what takes them stands for the code itself.
    """

    noun: str
    ours: Mapping[str, type | None]
    others: Callable[[], Collection[str]] = list
    """Returns names that are registered elsewhere than under the noun."""
    key: str = "name"
    nested: bool = False
    added: bool = False
    """Whether options are added to the configuration as they are set."""

    def known(self) -> list[str]:
        return sorted({*self.ours, *registered(self.noun), *self.others()})

    def owners(self, choice: str) -> dict[Any, Collection[str]]:
        """Return the code that takes a choice's options, with its parameters that are no options."""
        match self.noun:
            case "model":
                from rankrl.models import model_source

                build = model_source(choice).build
                shape_and_classes = list(inspect.signature(build).parameters)[:2]
                return {ModelOptions: (), build: shape_and_classes}
            case "dataset":
                from rankrl.data import dataset_source, load_dataset

                return {load_dataset: ("name", "seed", "root"), dataset_source(choice).read: ("root",)}
            case "selector":
                from rankrl.plan_search.selectors import selector_class

                return {selector_class(choice).option_owner(): ("problem", "seed", "episodes")}
            case "reward":
                from rankrl.plan_search.scores.rewards import reward_source

                return {reward_source(choice).make: ()}
            case "pruner":
                from pruning import get_pruner
                from rankrl.pruners.options import options_class

                pruner = get_pruner(choice)
                own = {pruner.definition: ("units", "temperature")} if pruner.is_mask else {}
                return {options_class(choice): (), **({} if choice in PRUNERS else own)}
            case "optimizer":
                from optim import optimizer_record

                return {optimizer_record(choice).factory: NO_OPTIONS}
            case "tracker" if choice != NONE:
                from rankrl.runs.tracking import tracker_class

                return {tracker_class(choice): ("folder",)}
        return {}

    def live(self, choice: str) -> dict[str, tuple[Any, Any]]:
        """Return type and default of a choice's options as the code that takes them has them."""
        tables = [option_table(owner, without) for owner, without in self.owners(choice).items()]
        return {name: entry for table in tables for name, entry in table.items()}

    def _table(self, choice: str) -> dict[str, tuple[Any, Any]]:
        options = self.ours.get(choice)
        return self.live(choice) if options is None else option_table(options)

    def types(self, choice: str) -> OptionTypes:
        """Return the types of a choice's options."""
        return {name: kind for name, (kind, _) in self._table(choice).items()}

    def hands_on(self, choice: str) -> bool:
        """Tell whether a choice takes other options, too, and hands them on."""
        if self.noun != "model" or choice in self.ours:
            return self.noun == "model" and choice in HAND_ON
        return any(map(takes_any_option, self.owners(choice)))

    def node(self, choice: str) -> dict[str, Any]:
        table = {} if self.added else self._table(choice)
        options = {name: plain(default) for name, (_, default) in table.items()}
        return {self.key: choice, **({"options": options} if self.nested else options)}


def heuristics() -> frozenset[str]:
    return frozenset((*HEURISTICS, *registered("heuristic")))


def formats() -> list[str]:
    return sorted({*FORMATS, *registered("format")})


GROUPS = {
    "model": Group("model", MODELS, key="architecture"),
    "dataset": Group("dataset", DATASETS),
    "decomposition": Group("format", dict.fromkeys(FORMATS, NoOptions), key="format"),
    "selector": Group("selector", {**SELECTORS, **dict.fromkeys(HEURISTICS, NoOptions)}, heuristics),
    "reward": Group("reward", REWARDS),
    "pruner": Group("pruner", PRUNERS, registered_pruners),
    "optim": Group("optimizer", dict.fromkeys(OPTIMIZERS), registered_optimizers, nested=True, added=True),
    "tracking": Group("tracker", TRACKERS, nested=True),
}
"""The groups whose choices are registered."""
_UNTYPED = "budget"
"""A group whose choices are files alone: those in a user's folder."""


def config_folder() -> Path:
    """Return the folder `configs`: inside the installed package, or next to it in a checkout."""
    package = Path(__file__).resolve().parents[2]
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


def _files(group: str) -> list[str]:
    return [path.stem for path in (config_folder() / group).glob("*.yaml")]


def group_names() -> list[str]:
    """Return the names of all groups, nested ones included, except Hydra's own."""
    folder = config_folder()
    files = {path.parent.relative_to(folder).as_posix() for path in folder.rglob("*/*.yaml")}
    return sorted(name for name in {*GROUPS, _UNTYPED, *files} if not name.startswith("hydra/"))


def group_choices(group: str) -> list[str]:
    stored = GROUPS[group].known() if group in GROUPS else ["default"] if group == _UNTYPED else []
    return sorted({*_files(group), *stored})


def store_groups() -> None:
    """Store the schema and the choices registered so far, and no others, in Hydra's groups.

    The schema is untyped: `checks` compares values with the dataclasses themselves, and says what is allowed.
    """
    store = ConfigStore.instance()
    store.store(
        name="schema", node={name: plain(value) for name, (_, value) in option_table(AppConfig).items()}
    )
    store.store(group=_UNTYPED, name="default", node={}, provider="rankrl")
    for name, group in GROUPS.items():
        store.repo[name] = {}
        for choice in {*group.known()} - {*_files(name)}:
            store.store(group=name, name=choice, node=group.node(choice), provider="rankrl")


TASKS = {
    "apply": "rewrite the network under plan=PATH or that of run=FOLDER, without fine-tuning",
    "compare": "several selectors on the same evaluator or RankBench's tables, over several seeds",
    "evaluate": "test accuracy, parameters and MACs of model.checkpoint, weights=PATH or run=FOLDER",
    "export": "write the compressed network weights=PATH or run=FOLDER as a verified ONNX file",
    "finetune": "fine-tune the compressed network weights=PATH or run=FOLDER, the dense one as teacher",
    "inspect": "list the layers: shape, cost and feasible ranks, or why not; errors if asked",
    "pipeline": "choose ranks, rewrite, fine-tune, export and report",
    "prune": "remove channels or blocks to a target, fine-tune, export and report",
    "report": "gather all runs below runs=FOLDER in one page and one CSV file",
    "search": "choose ranks and write plan.json",
    "timing_kit": "write what a budget in time needs to be timed on another device",
    "verify_kit": "write the finished networks below runs=FOLDER to be timed and compared on another device",
    "train": "train a network, from scratch or from model.checkpoint",
}
"""The tasks, each the function of its name in a module of `cli.tasks`, and what they do."""
_OVERVIEWS = ("compare", "inspect", "report", *KITS)
ON_FILE = ("apply", "inspect", "timing_kit", "verify_kit", "pipeline")
"""The tasks that work on a network in an ONNX file, too."""


def task_function(config: AppConfig) -> Callable[[Any], None]:
    """Import the function of the task for the kind of network in a configuration; it takes a `TaskRun`."""
    task, module = config.task, "overviews" if config.task in _OVERVIEWS else "compression"
    if config.model.get("architecture") == "onnx" and task not in ON_FILE:
        raise ConfigError(
            f"task={task} has no use for model=onnx, a network in a file that is not trained "
            f"here; choose task={' or task='.join(ON_FILE)}"
        )
    function: Callable[[Any], None] = getattr(importlib.import_module(f"rankrl.cli.tasks.{module}"), task)
    return function
