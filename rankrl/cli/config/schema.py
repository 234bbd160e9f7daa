"""The types of the configuration tree, and what `docs/configuration.md` says of its options.

An option that the workflow takes as it is has one owner there: `owned` takes over its default, and the page
its type and explanation. The others are explained here.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

from rankrl.cli.config.taken import default_of

# What takes options; named, not imported, because the command line is to answer before torch is.
_APPLY_PLAN = "decomposition.apply.apply:apply_plan"
_FINAL = "decomposition.operations.base:FINAL"
_CANDIDATES = "rankrl.plan_search.session:CandidateOptions"
_SEARCH = "rankrl.plan_search.session:SearchOptions"
_EVALUATOR = "rankrl.plan_search.scores.evaluator:EvaluatorOptions"
_RECIPE = "rankrl.training.recipe:TrainingRecipe"
_EXPORT = "rankrl.verify.measure:ExportOptions"
_EPISODES = "rankrl.plan_search.pretraining.tasks:EpisodeOptions"
_PRETRAINING = "rankrl.plan_search.pretraining.training:PretrainingOptions"
_RUNTIME = default_of("rankrl.onnx.runtimes.registry:DEFAULT_RUNTIME")


def owned(owner: str, name: str, *, default: Any = dataclasses.MISSING) -> Any:
    """Return the field of an option that a class or function of the workflow takes.

    Args:
        owner: What takes it, as `MODULE:NAME`.
        name: Its name there.
        default: The default, where the owner has none or is not given its own.
    """
    if default is dataclasses.MISSING:
        default = default_of(f"{owner}.{name}")
    return field(default=default, metadata={"owner": owner, "name": name})


@dataclass
class DecompositionConfig:
    """How layers are factorised: format, shape of the weight, candidate ranks, effort of the fits.

    Attributes:
        format: The tensor format; auto for the best of `formats` in every layer.
        formats: What every layer chooses from, with format auto.
        precisions: What every layer may compute with or be stored in: float32, int8 (weights and
            activations; int7, with weights of 7 bits, takes its place where export.reduce_range has it so),
            int8_weights, int4_weights. None takes float32 and int8 for budget.latency, float32 and
            int8_weights for budget.bytes, else float32.
        channels: Fractions of the channels between two layers that may be kept, for example [0.75, 0.5]: the
            first layer loses the others, where the second alone reads them. Empty keeps all of them.
        blocks: Whether whole residual blocks may be removed.
        skip: Layers that stay as they are: names of layers or of modules that hold some, or patterns of such
            names, for example [fc, layer1, "*.downsample.*"].
        only: Layers that alone may change, named likewise; empty for all.
        rank_multiple: Ranks are multiples of it: processors compute several channels at a time. None times
            a few for budget.latency and takes what suits this machine, else 1.
        final_iterations: L-BFGS iterations of the fit of each layer of the chosen plan.
        final_starts: Starting points of each of these fits.
    """

    format: str = MISSING
    formats: list[str] | None = None
    precisions: list[str] | None = None
    channels: list[float] = field(default_factory=list)
    blocks: bool = owned(_CANDIDATES, "blocks")
    skip: list[str] = field(default_factory=list)
    only: list[str] = field(default_factory=list)
    tensorised: bool = owned(_CANDIDATES, "tensorised")
    candidates: int = owned(_CANDIDATES, "candidates")
    rank_multiple: int | None = None
    iterations: int = owned(_CANDIDATES, "iterations")
    final_iterations: int = default_of(f"{_FINAL}.iterations")
    final_starts: int = default_of(f"{_FINAL}.starts")
    weigh_outputs: bool = owned(_CANDIDATES, "weigh_outputs")
    sequential: bool = owned(_APPLY_PLAN, "sequential")
    batch_norm: str = owned(_APPLY_PLAN, "batch_norm")


@dataclass
class BudgetConfig:
    """The fraction of the dense network's cost that every plan keeps at most; set one, or two at once.

    With none, rewards that ignore size keep 0.4 of the parameters, the others have no limit.
    """

    params: float | None = owned(_SEARCH, "params")
    macs: float | None = owned(_SEARCH, "macs")
    bytes: float | None = owned(_SEARCH, "bytes")
    latency: float | None = owned(_SEARCH, "latency")


@dataclass
class PruneConfig:
    """What task=prune does when budget.params or budget.macs is reached (0.5 of the MACs if neither is set).

    Attributes:
        decompose_params: Decompose what is left (decomposition, selector, search) to this fraction of its
            parameters; None does not.
        decompose_macs: The same for its multiply-accumulates.
        finetune_epochs: Epochs of fine-tuning before the decomposition; None takes finetune.epochs, 0 is
            none.
    """

    decompose_params: float | None = None
    decompose_macs: float | None = None
    finetune_epochs: int | None = None


@dataclass
class CalibrationConfig:
    """The training images that layers are fitted on.

    Attributes:
        images: How many. More than 1,000 rarely help.
    """

    images: int = 768


@dataclass
class SearchConfig:
    """How long plans are searched and how they are scored.

    Attributes:
        images: Images held out of the training set that each plan is scored on.
    """

    episodes: int = owned(_SEARCH, "episodes")
    seconds: float | None = owned(_SEARCH, "seconds")
    patience: int | None = owned(_SEARCH, "patience")
    images: int = 2000
    term: str = owned(_EVALUATOR, "term")
    augmented: bool = owned(_EVALUATOR, "augmented")
    statistics: str = owned(_EVALUATOR, "statistics")
    reestimation_images: int = owned(_EVALUATOR, "reestimation_images")
    refit_images: int = owned(_EVALUATOR, "refit_images")
    batch_size: int | None = owned(_EVALUATOR, "batch_size")
    finalists: int = owned(_SEARCH, "finalists")
    workers: int | None = owned(_SEARCH, "workers")
    cluster: str = owned(_SEARCH, "cluster")
    worker_cpus: int = owned(_SEARCH, "worker_cpus")
    worker_gpus: float = owned(_SEARCH, "worker_gpus")


@dataclass
class PretrainConfig:
    """What task=pretrain trains a policy on: networks, formats and budgets, and how.

    Every network is a checkpoint; decomposition, calibration and search.images say how its layers are fitted
    and its plans scored.

    Attributes:
        networks: The networks, each with the options of `model`, for example
            [{architecture: resnet20, checkpoint: a.th}]; empty for `model` itself.
        formats: The formats, tasks each; None for decomposition.
        add: Folders of earlier runs of task=pretrain, perhaps on other datasets, whose tasks count too.
        params: Fractions of the parameters to keep, a task each.
        macs: Fractions of the multiply-accumulates to keep, a task each.
        noises: Standard deviations of the plans' actions, in turn.
        hidden: Units of the policy's hidden layers.
    """

    networks: list[dict[str, Any]] = field(default_factory=list)
    formats: list[str] | None = None
    add: list[str] = field(default_factory=list)
    params: list[float] = field(default_factory=lambda: [0.35, 0.25, 0.167, 0.11])
    macs: list[float] = field(default_factory=lambda: [0.4])
    plans: int = owned(_EPISODES, "plans")
    noises: list[float] = field(default_factory=lambda: [0.1, 0.2, 0.3, 0.5])
    batches: int = owned(_EPISODES, "batches")
    term: str = owned(_EPISODES, "term")
    importance_scale: float = owned(_EPISODES, "importance_scale")
    hidden: list[int] = field(default_factory=lambda: [32, 32])
    steps: int = owned(_PRETRAINING, "steps")
    learning_rate: float = owned(_PRETRAINING, "learning_rate")
    weight_decay: float = owned(_PRETRAINING, "weight_decay")
    jitter: float = owned(_PRETRAINING, "jitter")
    restraint: float = owned(_PRETRAINING, "restraint")


@dataclass
class InspectConfig:
    """What task=inspect shows beside every layer's shape, cost and feasible ranks.

    Attributes:
        errors: Fit every layer at a few ranks on the calibration images and show what they cost and lose.
    """

    errors: bool = False


@dataclass
class CompareConfig:
    """What task=compare runs on the same evaluator, with search.episodes evaluations each.

    Selectors that are not random run once. finetune.epochs=0 leaves out fine-tuning.

    Attributes:
        selectors: Their names. Each has its own defaults; the one that `selector` names has the options
            given. "NAME:OPTION=VALUE,OPTION=VALUE" sets options of one entry, so that a selector may enter
            several times: [bayes, "bayes:policy=pretrained_refitted"].
        seeds: The seeds that each runs with.
    """

    selectors: list[str] = field(
        default_factory=lambda: [
            *("bayes_ddpg", "bayes", "ddpg", "tpe", "cmaes", "local", "random"),
            *("greedy", "energy", "vbmf", "uniform"),
        ]
    )
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2, 3, 4])


@dataclass
class OptimConfig:
    """An optimizer.

    Attributes:
        name: A registered optimizer.
        lr: Its learning rate; for fine-tuning None takes that of finetune.rates, but 1e-3 for onnx_adam after
            a removal of channels, which moves weights further. For training from scratch None takes what
            suits the network: for sgd 0.1 for the CIFAR ResNets, 0.01 for lenet5 and 0.05 for conv4; for
            torchvision's and your own 0.1 with batch normalisation, 0.01 without. 1e-3 for onnx_adam, 1e-2
            for onnx_adagrad.
        options: What the optimizer takes beside its rate, where it is not to have its own default. For
            training from scratch sgd has momentum 0.9, nesterov, and weight_decay 5e-4.
    """

    name: str = MISSING
    lr: float | None = None
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class RecipeConfig:
    """How a network is trained.

    Attributes:
        restore_best: Whether the weights with the best held-out accuracy are returned, those before the first
            epoch included, rather than the last. None does so unless the dense network may have been trained
            on these images: a checkpoint that was not trained here with the same ones held out.
    """

    epochs: int = owned(_RECIPE, "epochs")
    batch_size: int = owned(_RECIPE, "batch_size")
    halvings: int = owned(_RECIPE, "halvings")
    product_decay: float = owned(_RECIPE, "product_decay")
    balance_cores: bool = owned(_RECIPE, "balance_cores")
    schedule: str = owned(_RECIPE, "schedule")
    warmup: float = owned(_RECIPE, "warmup")
    label_smoothing: float = owned(_RECIPE, "label_smoothing")
    gradient_clip: float | None = owned(_RECIPE, "gradient_clip")
    ema_decay: float | None = owned(_RECIPE, "ema_decay")
    distillation: float = owned(_RECIPE, "distillation")
    temperature: float = owned(_RECIPE, "temperature")
    augment: bool = owned(_RECIPE, "augment")
    early_stop_patience: int | None = owned(_RECIPE, "early_stop_patience")
    restore_best: bool | None = None


@dataclass
class FineTuneConfig(RecipeConfig):
    """Fine-tuning of the compressed network, with the dense one as teacher.

    Attributes:
        rates: Highest learning rate after a decomposition by optimizer, where optim.lr is null.
    """

    rates: dict[str, float] = field(
        default_factory=lambda: {"onnx_adam": 1e-4, "onnx_adagrad": 1e-2, "sgd": 1e-2}
    )


@dataclass
class TrainConfig(RecipeConfig):
    """How a network without a checkpoint is trained first (He et al. 2016, shortened)."""

    optim: OptimConfig = field(default_factory=OptimConfig)


@dataclass
class ExportConfig:
    """The ONNX file and how its latency in onnxruntime is measured; one thread is timed in processor time.

    Attributes:
        runtimes: Where the finished files are verified and timed side by side: onnxruntime, by which budgets
            and choices go and which is measured in any case; onnxruntime_cuda, on an NVIDIA GPU; openvino
            (extra `openvino`).
        training: Write the optimizer's step (optim, an ONNX operator) as optimizer_step.onnx too.
    """

    opset: int | None = owned(_EXPORT, "opset")
    preprocess: bool = owned(_EXPORT, "preprocess")
    pad_channels: bool = owned(_EXPORT, "pad_channels")
    reduce_range: bool | None = owned(_EXPORT, "reduce_range")
    batch: int = owned(_EXPORT, "batch")
    threads: int = owned(_EXPORT, "threads")
    runs: int = owned(_EXPORT, "runs")
    int8: bool = owned(_EXPORT, "int8")
    runtimes: list[str] = field(default_factory=lambda: [_RUNTIME])
    training: bool = False


@dataclass
class TrackingConfig:
    """Where the run is tracked while it goes on.

    Attributes:
        name: A registered tracker.
        options: Its own options.
    """

    name: str = MISSING
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class AppConfig:
    """The whole configuration.

    Attributes:
        task: What to do: pipeline (all of it), train, search, apply, prune, finetune, evaluate, export,
            inspect, report, compare, pretrain.
        seed: Seed of everything random: held-out images, calibration, exploration, augmentation.
        resume: A run folder to go on with after it was interrupted; its own configuration is used.
        plan: The plan that task=apply applies: a plan.json.
        weights: The compressed network that finetune, evaluate and export work on: a model.safetensors with
            its plan inside. Without options of model and dataset, those of the run in whose folder it lies
            are taken.
        runs: The folder whose runs task=report gathers in one page.
    """

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
    pretrain: PretrainConfig = field(default_factory=PretrainConfig)
    inspect: InspectConfig = field(default_factory=InspectConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    finetune: FineTuneConfig = field(default_factory=FineTuneConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)


# `configs/config.yaml` takes its types from here, whoever composes it.
ConfigStore.instance().store(name="schema", node=AppConfig)
