"""The types of the configuration tree; the values and their explanations are in `configs/`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore


@dataclass
class DecompositionConfig:
    """How layers are factorised: format, shape of the weight, candidate ranks, effort of the fits."""

    format: str = "tensor_ring"
    formats: list[str] | None = None
    tensorised: bool = False
    candidates: int = 16
    rank_multiple: int | None = None
    iterations: int = 60
    final_iterations: int = 200
    final_starts: int = 1
    weigh_outputs: bool = True
    sequential: bool = True
    batch_norm: str = "mean"


@dataclass
class BudgetConfig:
    """The fraction of the dense network's cost that may be kept; at most one of them."""

    params: float | None = None
    macs: float | None = None
    bytes: float | None = None
    latency: float | None = None


@dataclass
class PruneConfig:
    """What follows pruning: the fraction of the pruned network that a decomposition keeps; at most one."""

    decompose_params: float | None = None
    decompose_macs: float | None = None


@dataclass
class CalibrationConfig:
    """Training images that layers are fitted on."""

    images: int = 768


@dataclass
class HalvingConfig:
    """Which plans are scored on a part of the images only; none without a fraction."""

    fraction: float | None = None
    keep: float = 0.5


@dataclass
class SearchConfig:
    """How long plans are searched and how they are scored."""

    episodes: int = 100
    seconds: float | None = None
    patience: int | None = None
    images: int = 2000
    term: str = "accuracy"
    augmented: bool = True
    statistics: str = "corrected"
    reestimation_images: int = 500
    batch_size: int | None = None
    halving: HalvingConfig = field(default_factory=HalvingConfig)
    finalists: int = 1
    workers: int | None = None
    cluster: str = "local"


@dataclass
class CompareConfig:
    """Which choosers are compared, and over which seeds."""

    selectors: list[str] = field(
        default_factory=lambda: [
            *("bayes_ddpg", "bayes", "ddpg", "tpe", "local", "random"),
            *("greedy", "energy", "vbmf", "uniform"),
        ]
    )
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2])


@dataclass
class OptimConfig:
    """The optimizer of fine-tuning."""

    name: str = "onnx_adam"
    lr: float | None = None
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class RecipeConfig:
    """A training recipe but for its optimizer."""

    epochs: int = 10
    batch_size: int = 128
    halvings: int = 4
    schedule: str = "cosine"
    warmup: float = 0.05
    label_smoothing: float = 0.0
    gradient_clip: float | None = None
    ema_decay: float | None = None
    distillation: float = 0.0
    temperature: float = 4.0
    augment: bool = True
    early_stop_patience: int | None = None
    restore_best: bool = True


@dataclass
class TrainConfig(RecipeConfig):
    """The recipe with which a network is trained from scratch."""

    optim: OptimConfig = field(default_factory=OptimConfig)


@dataclass
class ExportConfig:
    """The ONNX file and how its latency is measured."""

    opset: int | None = None
    preprocess: bool = False
    batch: int = 64
    threads: int = 1
    runs: int = 30
    training: bool = False


@dataclass
class TrackingConfig:
    """Where the run is tracked while it goes on."""

    name: str = "tensorboard"
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class AppConfig:
    """The whole configuration."""

    task: str = "pipeline"
    seed: int = 0
    resume: str | None = None
    plan: str | None = None
    weights: str | None = None
    runs: str | None = None
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
