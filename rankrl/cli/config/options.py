"""Convert the configuration into the option dataclasses and recipes of the packages."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from torch import nn

from rankrl.cli.config.compose import parsed_overrides
from rankrl.cli.config.schema import AppConfig
from rankrl.data import ImageData, load_dataset
from rankrl.errors import ConfigError
from rankrl.models import default_lr
from rankrl.onnx.runtimes import check_runtimes
from rankrl.options.search import BudgetOptions
from rankrl.options.timing import ExportOptions
from rankrl.options.training import OptimizerOptions, RecipeOptions
from rankrl.plan_search.selectors import SelectorEntry, check_selector, selector_class
from rankrl.plan_search.session import DEFAULT_KEPT_PARAMS, SearchGoal
from rankrl.pruners.options import PruningOptions, pruning_options
from rankrl.request import Request
from rankrl.runs.run_folder import cache_folder
from rankrl.training import TrainingRecipe


def selector_entry(text: str) -> SelectorEntry:
    """Parse an entry of the compared selectors, as `bayes` or `ddpg:noise=0.1`, and check its options."""
    selector, _, rest = text.partition(":")
    pairs = re.split(r",(?=\w+=)", rest) if rest else []
    if not all("=" in pair for pair in pairs):
        raise ConfigError(
            f"{text!r} is no selector with options; write NAME:OPTION=VALUE,OPTION=VALUE, for example "
            f"{selector}:plans_per_step=2"
        )
    options = {each.key_or_group: each.value() for each in parsed_overrides(pairs)}
    check_selector(selector, options)
    return SelectorEntry(text, selector, options)


# Where optim.lr is null: the best rate of 1e-4, 3e-4 and 1e-3 on held-out images (ResNet-20,
# CIFAR-10), after a removal of channels (half of the MACs, 2 epochs on 10,000 images) 90.1, 91.4 and 92.6 %.
_LR_AFTER_REMOVAL = {"onnx_adam": 1e-3}
# Where train.optim.lr is null; sgd takes the network's own rate, on which the others' hardly depend.
_LR_FROM_SCRATCH = {"onnx_adam": 1e-3, "onnx_adagrad": 1e-2}
# Options that replace an optimizer's defaults in training from scratch.
_OPTIONS_FROM_SCRATCH: Mapping[str, Mapping[str, Any]] = {
    "sgd": {"momentum": 0.9, "nesterov": True, "weight_decay": 5e-4}
}


def dataset(config: AppConfig) -> ImageData:
    return load_dataset(seed=config.seed, **config.dataset)


def check(config: AppConfig, *, finetuning: bool = True) -> None:
    """Check the options that need no data and no network."""
    config.decomposition.final_fit()
    asked = Request(search_goal(config), config.decomposition)
    setting = asked.goal.setting(asked.candidates())
    compared = (
        compared_selectors(config) if config.task == "compare" else [SelectorEntry("", *selector(config))]
    )
    for each in compared:
        check_selector(each.selector, each.options, setting)
    if finetuning:
        finetuning_recipe(config)
    training_recipe(config, None)
    export_options(config)


def search_goal(config: AppConfig) -> SearchGoal:
    timing = dataclasses.replace(export_options(config), folder=cache_folder() / "latencies")
    return SearchGoal(config.budget, config.search, timing, *_named(config.reward))


def selector(config: AppConfig) -> tuple[str, dict[str, Any]]:
    name, options = _named(config.selector)
    check_selector(name, options)
    return name, options


def request(config: AppConfig) -> Request:
    asked = Request(search_goal(config), config.decomposition, *selector(config), config.seed, cache_folder())
    asked = asked.fitted_to(config.calibration.images)
    return asked if config.model.get("architecture") == "onnx" else asked.refitting()


def verb_arguments(config: AppConfig) -> dict[str, Any]:
    """Return the arguments of `rankrl.compress` that modules and files share."""
    goal, (name, given) = search_goal(config), selector(config)
    budget = BudgetOptions(params=DEFAULT_KEPT_PARAMS) if goal.needs_budget else config.budget
    return {
        **vars(budget),
        "decomposition": config.decomposition,
        "selector": name,
        "selector_options": given,
        "reward": goal.reward,
        "reward_options": goal.reward_options,
        "search": config.search,
        "timing": goal.timing,
        "cache": cache_folder(),
        "seed": config.seed,
    }


def pruning(config: AppConfig) -> PruningOptions:
    name, values = _named(config.pruner)
    budget = config.budget
    options = pruning_options(name, values, params=budget.params, macs=budget.macs, seed=config.seed)
    return dataclasses.replace(options, sequential=config.decomposition.sequential)


def with_epochs(config: AppConfig, epochs: int) -> AppConfig:
    """Return the configuration with another number of epochs of fine-tuning."""
    return dataclasses.replace(config, finetune=dataclasses.replace(config.finetune, epochs=epochs))


def finetuning_recipe(
    config: AppConfig, *, after_removal: bool = False, heldout_is_new: bool = True
) -> TrainingRecipe:
    """Return the recipe of fine-tuning, with larger steps after a removal of channels."""
    rates = {**config.finetune.rates, **(_LR_AFTER_REMOVAL if after_removal else {})}
    lr = rates.get(config.optim.name)
    return _recipe(config.finetune, config.optim, "optim", config.seed, lr, heldout_is_new=heldout_is_new)


def training_recipe(config: AppConfig, network: nn.Module | None) -> TrainingRecipe:
    """Return the recipe of training from scratch; without a network only its options are checked."""
    name = config.train.optim.name
    default = _LR_FROM_SCRATCH.get(name)
    if name == "sgd":
        default = 1.0 if network is None else default_lr(config.model["architecture"], network)
    optim = dataclasses.replace(
        config.train.optim, options={**_OPTIONS_FROM_SCRATCH.get(name, {}), **config.train.optim.options}
    )
    return _recipe(config.train, optim, "train.optim", config.seed, default)


def tuning_recipe(config: AppConfig, **told: bool) -> TrainingRecipe | None:
    """Return the recipe of fine-tuning, or None for finetune.epochs=0."""
    return None if config.finetune.epochs == 0 else finetuning_recipe(config, **told)


def compared_selectors(config: AppConfig) -> list[SelectorEntry]:
    """Return the selectors that are compared, with all of their options.

    Options are the defaults, or, for the selector that the configuration itself names, those of the
    configuration, with the command line's; the options in the entry override both.
    """
    entries = []
    for text in config.compare.selectors:
        if config.compare.selectors.count(text) > 1:
            raise ConfigError(f"compare.selectors names {text!r} twice; compare.seeds repeats a search")
        try:
            entry = selector_entry(text)
        except ConfigError as error:
            raise ConfigError(f"compare.selectors: {error}") from error
        configured = entry.selector == config.selector["name"]
        base = _named(config.selector)[1] if configured else selector_class(entry.selector).default_options()
        entries.append(dataclasses.replace(entry, options={**base, **entry.options}))
    return entries


def export_options(config: AppConfig) -> ExportOptions:
    """Return the options of export and timing, with the runtimes that are available here."""
    check_runtimes(config.export)
    return dataclasses.replace(config.export, table=config.timing.table)


def _recipe(
    recipe: RecipeOptions,
    optim: OptimizerOptions,
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
    values = {each.name: getattr(recipe, each.name) for each in dataclasses.fields(RecipeOptions)}
    if recipe.restore_best is None:
        values["restore_best"] = heldout_is_new
    return TrainingRecipe(**values, lr=lr, optimizer=optim.name, optimizer_options=optim.options, seed=seed)


def _named(group: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Split a config group into its `name` and the options."""
    return group["name"], {key: value for key, value in group.items() if key != "name"}
