"""The types of the configuration tree; values and explanations are in `configs/`, and only there."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING


@dataclass
class DecompositionConfig:
    """How layers are factorised: format, shape of the weight, candidate ranks, effort of the fits."""

    format: str = MISSING
    # What a file may leave out: only `auto` lists formats, and not all formats can split channel counts.
    formats: list[str] | None = None
    tensorised: bool = False
    candidates: int = MISSING
    rank_multiple: int | None = MISSING
    iterations: int = MISSING
    final_iterations: int = MISSING
    final_starts: int = MISSING
    weigh_outputs: bool = MISSING
    sequential: bool = MISSING
    batch_norm: str = MISSING


@dataclass
class BudgetConfig:
    """The fraction of the dense network's cost that may be kept; at most one of them."""

    params: float | None = MISSING
    macs: float | None = MISSING
    bytes: float | None = MISSING
    latency: float | None = MISSING


@dataclass
class PruneConfig:
    """What follows pruning: the fraction of the pruned network that a decomposition keeps; at most one."""

    decompose_params: float | None = MISSING
    decompose_macs: float | None = MISSING


@dataclass
class CalibrationConfig:
    """Training images that layers are fitted on."""

    images: int = MISSING


@dataclass
class HalvingConfig:
    """Which plans are scored on a part of the images only; none without a fraction."""

    fraction: float | None = MISSING
    keep: float = MISSING


@dataclass
class SearchConfig:
    """How long plans are searched and how they are scored."""

    episodes: int = MISSING
    seconds: float | None = MISSING
    patience: int | None = MISSING
    images: int = MISSING
    term: str = MISSING
    augmented: bool = MISSING
    statistics: str = MISSING
    reestimation_images: int = MISSING
    batch_size: int | None = MISSING
    halving: HalvingConfig = field(default_factory=HalvingConfig)
    finalists: int = MISSING
    workers: int | None = MISSING
    cluster: str = MISSING


@dataclass
class CompareConfig:
    """Which selectors are compared, and over which seeds."""

    selectors: list[str] = MISSING
    seeds: list[int] = MISSING


@dataclass
class OptimConfig:
    """The optimizer of fine-tuning."""

    name: str = MISSING
    lr: float | None = MISSING
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class RecipeConfig:
    """A training recipe but for its optimizer."""

    epochs: int = MISSING
    batch_size: int = MISSING
    halvings: int = MISSING
    schedule: str = MISSING
    warmup: float = MISSING
    label_smoothing: float = MISSING
    gradient_clip: float | None = MISSING
    ema_decay: float | None = MISSING
    distillation: float = MISSING
    temperature: float = MISSING
    augment: bool = MISSING
    early_stop_patience: int | None = MISSING
    restore_best: bool = MISSING


@dataclass
class TrainConfig(RecipeConfig):
    """The recipe with which a network is trained from scratch."""

    optim: OptimConfig = field(default_factory=OptimConfig)


@dataclass
class ExportConfig:
    """The ONNX file and how its latency is measured."""

    opset: int | None = MISSING
    preprocess: bool = MISSING
    batch: int = MISSING
    threads: int = MISSING
    runs: int = MISSING
    training: bool = MISSING


@dataclass
class TrackingConfig:
    """Where the run is tracked while it goes on."""

    name: str = MISSING
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class AppConfig:
    """The whole configuration."""

    task: str = MISSING
    seed: int = MISSING
    resume: str | None = MISSING
    plan: str | None = MISSING
    weights: str | None = MISSING
    runs: str | None = MISSING
    model: dict[str, Any] = field(default_factory=dict)
    dataset: dict[str, Any] = field(default_factory=dict)
    decomposition: DecompositionConfig = field(default_factory=DecompositionConfig)
    budget: BudgetConfig = field(default_factory=BudgetConfig)
    selector: dict[str, Any] = field(default_factory=dict)
    reward: dict[str, Any] = field(default_factory=dict)
    pruner: dict[str, Any] = field(default_factory=dict)
    prune: PruneConfig = field(default_factory=PruneConfig)
    calibration: CalibrationConfig = field(default_factory=CalibrationConfig)
    search: SearchConfig = field(default_factory=SearchConfig)
    compare: CompareConfig = field(default_factory=CompareConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    finetune: RecipeConfig = field(default_factory=RecipeConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)


# `configs/config.yaml` takes its types from here, whoever composes it.
ConfigStore.instance().store(name="schema", node=AppConfig)
