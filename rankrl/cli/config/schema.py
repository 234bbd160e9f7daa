"""The configuration: one section for each dataclass of options, the same that Python takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore

from rankrl.cli.config.structured import structured
from rankrl.options.budget import BudgetOptions
from rankrl.options.decomposition import DecompositionOptions
from rankrl.options.pretraining import PretrainOptions
from rankrl.options.search import SearchOptions
from rankrl.options.tasks import (
    CalibrationOptions,
    CompareOptions,
    InspectOptions,
    PruneOptions,
    TimingOptions,
    TrackingOptions,
)
from rankrl.options.timing import ExportOptions
from rankrl.options.training import FineTuningOptions, OptimizerOptions, TrainingOptions

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


# `configs/config.yaml` takes its types from here, whoever composes it.
ConfigStore.instance().store(name="schema", node=structured(AppConfig))
