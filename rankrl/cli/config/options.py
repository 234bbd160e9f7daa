"""From the configuration to the plain typed arguments of the workflow."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, get_args

from torch import nn

from decomposition import FitOptions
from decomposition.apply.apply import BatchNormCorrection
from decomposition.operations.quantise import PRECISIONS
from rankrl.cli.config.schema import AppConfig, BudgetConfig, OptimConfig, RecipeConfig
from rankrl.data import ImageData, load_dataset
from rankrl.data.calibration import check_calibration
from rankrl.errors import ConfigError, did_you_mean
from rankrl.models import default_lr
from rankrl.onnx.runtimes import DEFAULT_RUNTIME, get_runtime
from rankrl.options.search import CandidateOptions, SearchOptions
from rankrl.options.timing import LatencyOptions
from rankrl.plan_search.pretraining.tasks import EpisodeOptions
from rankrl.plan_search.pretraining.training import PretrainingOptions
from rankrl.plan_search.scores.evaluator import EvaluatorOptions, Term
from rankrl.plan_search.scores.scoring import ImageScoring
from rankrl.plan_search.selectors import SelectorEntry, check_selector, selector_options
from rankrl.pruners.options import PruningOptions, pruning_options
from rankrl.runs.run_folder import cache_folder
from rankrl.timing import fast_multiple
from rankrl.training import TrainingRecipe
from rankrl.verify.measure import ExportOptions

AUTO = "auto"
"""What `metrics.json` calls a choice among several formats."""

# Where optim.lr is null: the rate that keeps most, of 1e-4, 3e-4 and 1e-3 on held-out images (ResNet-20,
# CIFAR-10), after a removal of channels (half of the MACs, 2 epochs on 10,000 images) 90.1, 91.4 and 92.6 %.
_LR_AFTER_REMOVAL = {"onnx_adam": 1e-3}
# Where train.optim.lr is null; the rate of sgd is the network's own, that of the others hardly depends on it.
_LR_FROM_SCRATCH = {"onnx_adam": 1e-3, "onnx_adagrad": 1e-2}
# What an optimizer has instead of its own defaults where a network is trained from scratch.
_OPTIONS_FROM_SCRATCH: Mapping[str, Mapping[str, Any]] = {
    "sgd": {"momentum": 0.9, "nesterov": True, "weight_decay": 5e-4}
}


def dataset(config: AppConfig) -> ImageData:
    """Load the dataset."""
    return load_dataset(seed=config.seed, **config.dataset)


def candidate_options(config: AppConfig) -> CandidateOptions:
    """Return which candidates are fitted, and how; of a budget in time the processor may be measured."""
    multiple = config.decomposition.rank_multiple
    if multiple is None and config.budget.latency is not None:
        multiple = fast_multiple(cache_folder() / "latencies")
    return _candidate_options(config, multiple)


def _candidate_options(config: AppConfig, multiple: int | None) -> CandidateOptions:
    chosen = config.decomposition
    if multiple is not None and multiple < 1:
        raise ConfigError(f"decomposition.rank_multiple must be at least 1, got {multiple}")
    return CandidateOptions(
        precisions=_precisions(config),
        reduce_range=config.export.reduce_range,
        channels=tuple(chosen.channels),
        blocks=chosen.blocks,
        skip=tuple(chosen.skip),
        only=tuple(chosen.only),
        formats=(chosen.format,) if chosen.formats is None else tuple(chosen.formats),
        tensorised=chosen.tensorised,
        candidates=chosen.candidates,
        multiple=multiple or 1,
        iterations=chosen.iterations,
        weigh_outputs=chosen.weigh_outputs,
    )


def _precisions(config: AppConfig) -> tuple[str, ...]:
    """Return what layers may compute with or be stored in; by default what lowers the budget's measure."""
    given = config.decomposition.precisions
    if given is None:
        return default_precisions(latency=config.budget.latency, size=config.budget.bytes)
    for name in given:
        if name not in PRECISIONS:
            raise ConfigError(
                f"decomposition.precisions: there is no {name!r}; choose from {', '.join(PRECISIONS)}."
                f"{did_you_mean(name, list(PRECISIONS))}"
            )
    if not given:
        raise ConfigError(f"decomposition.precisions is empty; choose from {', '.join(PRECISIONS)}")
    return tuple(given)


def default_precisions(*, latency: float | None, size: float | None) -> tuple[str, ...]:
    """Return the precisions that lower what budgets in time and in bytes measure, beside float32."""
    finer = {"int8": latency, "int8_weights": size}
    return ("float32", *(name for name, fraction in finer.items() if fraction is not None))


def decomposition_name(config: AppConfig) -> str:
    """Return the tensor format, or `auto` where every layer chooses among several."""
    formats = config.decomposition.formats
    return config.decomposition.format if formats is None else AUTO


def final_fit(config: AppConfig) -> FitOptions:
    """Return the effort of the chosen plan's fits."""
    return FitOptions(config.decomposition.final_iterations, config.decomposition.final_starts)


def batch_norm_correction(config: AppConfig) -> BatchNormCorrection:
    """Return how batch normalisation is corrected for a plan."""
    chosen = config.decomposition.batch_norm
    if chosen not in get_args(BatchNormCorrection):
        allowed = get_args(BatchNormCorrection)
        raise ConfigError(
            f"decomposition.batch_norm must be one of {', '.join(allowed)}, got {chosen!r}."
            f"{did_you_mean(chosen, allowed)}"
        )
    correction: BatchNormCorrection = chosen  # type: ignore[assignment]
    return correction


def check(config: AppConfig, *, finetuning: bool = True) -> None:
    """Refuse what can be refused before anything takes time.

    Args:
        config: The configuration.
        finetuning: Whether there is to be fine-tuning.

    Raises:
        RankrlError: If an option is out of its range.
    """
    check_calibration(config.calibration.images)
    final_fit(config)
    batch_norm_correction(config)
    evaluator_options(config)
    setting = search_options(config).setting(_candidate_options(config, config.decomposition.rank_multiple))
    if config.task == "compare":
        chosen = [(each.selector, each.options) for each in compared_selectors(config)]
    else:
        chosen = [selector(config)]
    for name, given in chosen:
        check_selector(name, given, setting)
    if config.finetune.epochs < 0:
        raise ConfigError(
            f"finetune.epochs must be a whole number >= 0, got {config.finetune.epochs}; 0 leaves "
            "fine-tuning out"
        )
    if finetuning:
        finetuning_recipe(config)
    training_recipe(config, None)
    export_options(config)


def search_options(config: AppConfig) -> SearchOptions:
    """Return budget, reward and limits of a search."""
    search, budget, export = config.search, config.budget, config.export
    reward, reward_options = _named(config.reward)
    return SearchOptions(
        params=budget.params,
        macs=budget.macs,
        bytes=budget.bytes,
        latency=budget.latency,
        timing=LatencyOptions(
            batch=export.batch,
            threads=export.threads,
            runs=export.runs,
            folder=cache_folder() / "latencies",
            preprocess=export.preprocess,
            pad_channels=export.pad_channels,
            reduce_range=export.reduce_range,
        ),
        reward=reward,
        reward_options=reward_options,
        finalists=search.finalists,
        episodes=search.episodes,
        seconds=search.seconds,
        patience=search.patience,
        workers=search.workers,
        cluster=search.cluster,  # type: ignore[arg-type]  # checked there, with a message for users
        worker_cpus=search.worker_cpus,
        worker_gpus=search.worker_gpus,
    )


def pretraining(config: AppConfig) -> tuple[EpisodeOptions, PretrainingOptions]:
    """Return how the tasks of task=pretrain are played, and how the policy is trained on them."""
    given = dataclasses.asdict(config.pretrain)
    check_calibration(config.calibration.images)
    if given["formats"] == []:
        raise ConfigError(
            "pretrain.formats is empty; name formats, as in [tucker], or null for decomposition's"
        )
    if given["term"] not in get_args(Term):
        raise ConfigError(f"pretrain.term must be one of {', '.join(get_args(Term))}, got {given['term']!r}")
    plain: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in given.items()
    }

    def chosen(owner: type[Any]) -> dict[str, Any]:
        return {each.name: plain[each.name] for each in dataclasses.fields(owner)}

    return EpisodeOptions(**chosen(EpisodeOptions)), PretrainingOptions(**chosen(PretrainingOptions))


def selector(config: AppConfig) -> tuple[str, dict[str, Any]]:
    """Return the selector's name and its options.

    Raises:
        ConfigError: The name or an option is unknown, of another type or out of range.
    """
    name, given = _named(config.selector)
    check_selector(name, given)
    return name, given


def evaluator_options(config: AppConfig) -> EvaluatorOptions:
    """Return what is scored of a plan, and how."""
    search = config.search
    if search.images < 1:
        raise ConfigError(f"search.images must be at least 1, got {search.images}")
    return EvaluatorOptions(
        term=search.term,  # type: ignore[arg-type]  # checked there, with a message for users
        augmented=search.augmented,
        statistics=search.statistics,  # type: ignore[arg-type]
        reestimation_images=search.reestimation_images,
        refit_images=search.refit_images,
        batch_size=search.batch_size,
        seed=config.seed,
    )


def scoring(config: AppConfig, data: ImageData, dense: nn.Module) -> ImageScoring:
    """Return what plans are scored by."""
    return ImageScoring(dense, data, evaluator_options(config), config.search.images)


def pruning(config: AppConfig) -> PruningOptions:
    """Return how channels are chosen and how many are kept."""
    name, given = _named(config.pruner)
    budget = config.budget
    chosen = pruning_options(name, given, params=budget.params, macs=budget.macs, seed=config.seed)
    return dataclasses.replace(
        chosen, sequential=config.decomposition.sequential, batch_norm=batch_norm_correction(config)
    )


def decomposition_after_pruning(config: AppConfig) -> AppConfig | None:
    """Return the configuration of the decomposition that follows pruning, or None if there is to be none.

    Raises:
        ConfigError: If its budget is set twice or out of range.
    """
    chosen = config.prune
    if chosen.decompose_params is None and chosen.decompose_macs is None:
        return None
    if chosen.decompose_params is not None and chosen.decompose_macs is not None:
        raise ConfigError("set prune.decompose_params or prune.decompose_macs, not both")
    for name in ("decompose_params", "decompose_macs"):
        value = getattr(chosen, name)
        if value is not None and not 0 < value < 1:
            raise ConfigError(
                f"prune.{name}={value} is outside (0, 1); it is the fraction of the pruned network to keep"
            )
    if chosen.finetune_epochs is not None and chosen.finetune_epochs < 0:
        raise ConfigError(
            f"prune.finetune_epochs must be a whole number >= 0, got {chosen.finetune_epochs}; 0 decomposes "
            "the pruned network as it is"
        )
    budget = BudgetConfig(
        params=chosen.decompose_params, macs=chosen.decompose_macs, bytes=None, latency=None
    )
    return dataclasses.replace(config, budget=budget)


def before_decomposition(config: AppConfig) -> AppConfig:
    """Return the configuration with which a pruned network is fine-tuned before it is decomposed."""
    epochs = config.prune.finetune_epochs
    if epochs is None:
        return config
    return dataclasses.replace(config, finetune=dataclasses.replace(config.finetune, epochs=epochs))


def finetuning_recipe(
    config: AppConfig, *, after_removal: bool = False, heldout_is_new: bool = True
) -> TrainingRecipe:
    """Return the recipe of fine-tuning.

    Args:
        config: The configuration.
        after_removal: Whether channels were removed and nothing decomposed, which asks for larger steps.
        heldout_is_new: Whether the dense network never saw the held-out images, so that they may choose.
    """
    rates = {**config.finetune.rates, **(_LR_AFTER_REMOVAL if after_removal else {})}
    lr = rates.get(config.optim.name)
    return _recipe(config.finetune, config.optim, "optim", config.seed, lr, heldout_is_new=heldout_is_new)


def training_recipe(config: AppConfig, network: nn.Module | None) -> TrainingRecipe:
    """Return the recipe of training from scratch.

    Args:
        config: The configuration.
        network: The network to train, whose own learning rate is taken where none is set; None checks the
            other options before there is a network.
    """
    name = config.train.optim.name
    default = _LR_FROM_SCRATCH.get(name)
    if name == "sgd":
        default = 1.0 if network is None else default_lr(config.model["architecture"], network)
    optim = dataclasses.replace(
        config.train.optim, options={**_OPTIONS_FROM_SCRATCH.get(name, {}), **config.train.optim.options}
    )
    return _recipe(config.train, optim, "train.optim", config.seed, default)


def comparison_recipe(config: AppConfig, *, heldout_is_new: bool) -> TrainingRecipe | None:
    """Return the recipe with which compared plans are fine-tuned, or None for finetune.epochs=0."""
    return None if config.finetune.epochs == 0 else finetuning_recipe(config, heldout_is_new=heldout_is_new)


def compared_selectors(config: AppConfig) -> list[SelectorEntry]:
    """Return the selectors that are compared, with all of their options.

    They are the defaults, for the selector that the configuration itself names those of the configuration,
    with whatever was set on the command line; and over them what the entry says.

    Raises:
        ConfigError: A selector or option is unknown, or an entry named twice.
    """
    found = []
    for text in config.compare.selectors:
        if config.compare.selectors.count(text) > 1:
            raise ConfigError(f"compare.selectors names {text!r} twice; compare.seeds repeats a search")
        try:
            entry = SelectorEntry.parse(text)
        except ConfigError as error:
            raise ConfigError(f"compare.selectors: {error}") from error
        configured = entry.selector == config.selector["name"]
        base = _named(config.selector)[1] if configured else selector_options(entry.selector)
        found.append(dataclasses.replace(entry, options={**base, **entry.options}))
    return found


def export_options(config: AppConfig) -> ExportOptions:
    """Return how the network is exported and timed."""
    export = config.export
    for name in ("batch", "threads", "runs"):
        if getattr(export, name) < 1:
            raise ConfigError(f"export.{name} must be at least 1, got {getattr(export, name)}")
    return ExportOptions(
        opset=export.opset,
        batch=export.batch,
        threads=export.threads,
        runs=export.runs,
        preprocess=export.preprocess,
        pad_channels=export.pad_channels,
        reduce_range=export.reduce_range,
        int8=export.int8,
        runtimes=_runtimes(config),
    )


def _runtimes(config: AppConfig) -> tuple[str, ...]:
    """Return the runtimes to measure in, the one that decides first; each can be used here."""
    names = tuple(dict.fromkeys((DEFAULT_RUNTIME, *config.export.runtimes)))
    try:
        for name in names:
            get_runtime(name).check()
    except ConfigError as error:
        raise ConfigError(f"export.runtimes: {error}") from error
    return names


def _recipe(
    recipe: RecipeConfig,
    optim: OptimConfig,
    group: str,
    seed: int,
    default: float | None,
    *,
    heldout_is_new: bool = True,
) -> TrainingRecipe:
    lr = default if optim.lr is None else optim.lr
    if lr is None:
        raise ConfigError(
            f"the learning rate of {optim.name} is null, and none is known that suits it here; set a number, "
            f"such as {group}.lr=0.01"
        )
    return TrainingRecipe(
        epochs=recipe.epochs,
        batch_size=recipe.batch_size,
        lr=lr,
        halvings=recipe.halvings,
        optimizer=optim.name,
        optimizer_options=optim.options,
        product_decay=recipe.product_decay,
        balance_cores=recipe.balance_cores,
        schedule=recipe.schedule,
        warmup=recipe.warmup,
        label_smoothing=recipe.label_smoothing,
        gradient_clip=recipe.gradient_clip,
        ema_decay=recipe.ema_decay,
        distillation=recipe.distillation,
        temperature=recipe.temperature,
        augment=recipe.augment,
        early_stop_patience=recipe.early_stop_patience,
        restore_best=heldout_is_new if recipe.restore_best is None else recipe.restore_best,
        seed=seed,
    )


def _named(group: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Split a config group into its `name` and the options."""
    return group["name"], {key: value for key, value in group.items() if key != "name"}
