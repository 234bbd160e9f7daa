"""From the configuration to the plain typed arguments of the workflow."""

from __future__ import annotations

from typing import Any, get_args

from decomposition import FitOptions
from decomposition.apply import BatchNormCorrection
from rankrl.config.schema import AppConfig, OptimConfig, RecipeConfig
from rankrl.data import ImageData, load_dataset
from rankrl.errors import ConfigError, did_you_mean
from rankrl.plan_search.evaluator import EvaluatorOptions
from rankrl.training import TrainingRecipe
from rankrl.workflow.choose import CandidateOptions, SearchOptions
from rankrl.workflow.measure import ExportOptions


def dataset(config: AppConfig) -> ImageData:
    """Load the dataset."""
    return load_dataset(seed=config.seed, **config.dataset)


def candidate_options(config: AppConfig) -> CandidateOptions:
    """Return which candidates are fitted, and how."""
    chosen = config.decomposition
    if chosen.candidates < 1:
        raise ConfigError(f"decomposition.candidates must be at least 1, got {chosen.candidates}")
    return CandidateOptions(chosen.format, chosen.tensorised, chosen.candidates, chosen.iterations)


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


def check(config: AppConfig) -> None:
    """Refuse what can be refused before anything takes time.

    Raises:
        RankrlError: If an option is out of its range.
    """
    candidate_options(config)
    final_fit(config)
    batch_norm_correction(config)
    search_options(config)
    finetuning_recipe(config)
    training_recipe(config)
    export_options(config)


def search_options(config: AppConfig) -> SearchOptions:
    """Return how a plan is searched."""
    search = config.search
    selector, selector_options = _named(config.selector)
    reward, reward_options = _named(config.reward)
    return SearchOptions(
        selector=selector,
        selector_options=selector_options,
        reward=reward,
        reward_options=reward_options,
        params=config.budget.params,
        macs=config.budget.macs,
        episodes=search.episodes,
        seconds=search.seconds,
        patience=search.patience,
        images=search.images,
        evaluator=EvaluatorOptions(
            term=search.term,  # type: ignore[arg-type]  # checked there, with a message for users
            augmented=search.augmented,
            statistics=search.statistics,  # type: ignore[arg-type]
            seed=config.seed,
        ),
    )


def finetuning_recipe(config: AppConfig) -> TrainingRecipe:
    """Return the recipe of fine-tuning."""
    return _recipe(config.finetune, config.optim, config.seed)


def training_recipe(config: AppConfig) -> TrainingRecipe:
    """Return the recipe of training from scratch."""
    return _recipe(config.train, config.train.optim, config.seed)


def export_options(config: AppConfig) -> ExportOptions:
    """Return how the network is exported and timed."""
    export = config.export
    for name in ("batch", "threads", "runs"):
        if getattr(export, name) < 1:
            raise ConfigError(f"export.{name} must be at least 1, got {getattr(export, name)}")
    return ExportOptions(export.opset, export.batch, export.threads, export.runs)


def _recipe(recipe: RecipeConfig, optim: OptimConfig, seed: int) -> TrainingRecipe:
    return TrainingRecipe(
        epochs=recipe.epochs,
        batch_size=recipe.batch_size,
        lr=optim.lr,
        optimizer=optim.name,
        optimizer_options=optim.options,
        schedule=recipe.schedule,
        warmup=recipe.warmup,
        label_smoothing=recipe.label_smoothing,
        gradient_clip=recipe.gradient_clip,
        ema_decay=recipe.ema_decay,
        distillation=recipe.distillation,
        temperature=recipe.temperature,
        augment=recipe.augment,
        early_stop_patience=recipe.early_stop_patience,
        restore_best=recipe.restore_best,
        seed=seed,
    )


def _named(group: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Split a config group into its `name` and the options."""
    return group["name"], {key: value for key, value in group.items() if key != "name"}
