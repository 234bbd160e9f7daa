"""Give tasks their data, networks, recipes and requests, as the configuration describes them."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn

from decomposition import CompressionPlan, Factorise, count_macs, count_parameters, load_compressed
from decomposition.errors import DecompositionError
from pruning import list_pruners
from rankrl.cli.config.compose import parsed_overrides
from rankrl.cli.config.schema import AppConfig
from rankrl.data import ImageData, load_dataset
from rankrl.errors import ConfigError, counted
from rankrl.models import checkpoint_heldout, default_lr, save_checkpoint
from rankrl.module_compression import image_classifier, train_in
from rankrl.networks.module import FileModule, ModuleNetwork
from rankrl.onnx.graph import ImagePreprocessing
from rankrl.onnx.runtimes import check_runtimes
from rankrl.options.decomposition import AUTO
from rankrl.options.names import InputsOptions
from rankrl.options.search import BudgetOptions
from rankrl.options.timing import ExportOptions
from rankrl.options.training import OptimizerOptions, RecipeOptions
from rankrl.plan_search.selectors import SelectorEntry, check_selector, selector_class
from rankrl.plan_search.session import DEFAULT_KEPT_PARAMS, SearchGoal, check_reachable
from rankrl.pruners.options import PruningOptions, pruning_options
from rankrl.pruners.prune import THEN
from rankrl.request import Request
from rankrl.runs.run_folder import RunFolder, cache_folder
from rankrl.training import TrainingRecipe, TrainingResult
from rankrl.training.networks import Teacher, build_network, guessing_warning, model_title, read_teacher
from rankrl.verify.measure import cost_ratios, network_numbers

log = logging.getLogger(__name__)

INPUTS = "inputs"
"""The dataset of model=onnx: inputs without labels."""

# Where optim.lr is null: the best rate of 1e-4, 3e-4 and 1e-3 on held-out images (ResNet-20,
# CIFAR-10), after a removal of channels (half of the MACs, 2 epochs on 10,000 images) 90.1, 91.4 and 92.6 %.
_LR_AFTER_REMOVAL = {"onnx_adam": 1e-3}
# Where train.optim.lr is null; sgd takes the network's own rate, on which the others' hardly depend.
_LR_FROM_SCRATCH = {"onnx_adam": 1e-3, "onnx_adagrad": 1e-2}
# Options that replace an optimizer's defaults in training from scratch.
_OPTIONS_FROM_SCRATCH: Mapping[str, Mapping[str, Any]] = {
    "sgd": {"momentum": 0.9, "nesterov": True, "weight_decay": 5e-4}
}


class TaskRun:
    """The configuration of one run as the packages take it; data and networks are read when they are used."""

    def __init__(self, config: AppConfig, folder: RunFolder) -> None:
        self.config, self.folder = config, folder
        self.checkpoint = config.model.get("checkpoint")
        self.in_file = config.model.get("architecture") == "onnx"  # trained elsewhere

    def check(self, *, finetuning: bool = True) -> None:
        """Check the options that need no data and no network."""
        self.config.decomposition.final_fit()
        asked = Request(self.goal, self.config.decomposition)
        setting = asked.goal.setting(asked.candidates())
        compares = self.config.task == "compare"
        for each in self.compared_selectors() if compares else [SelectorEntry("", *self.selector)]:
            check_selector(each.selector, each.options, setting)
        if finetuning:
            self.finetuning_recipe()
        self.training_recipe()
        check_runtimes(self.config.export)

    def check_before_training(self, *, finetuning: bool = True) -> None:
        """Refuse options and a budget that no search can meet; without a training the search is as quick."""
        if not (self.checkpoint or self.in_file):
            self.check(finetuning=finetuning)
            self.check_budget()

    @property
    def export(self) -> ExportOptions:
        """The options of export and timing."""
        return replace(self.config.export, table=self.config.timing.table)

    @property
    def goal(self) -> SearchGoal:
        config, timing = self.config, replace(self.export, folder=cache_folder() / "latencies")
        return SearchGoal(config.budget, config.search, timing, *_named(config.reward))

    @property
    def selector(self) -> tuple[str, dict[str, Any]]:
        return _named(self.config.selector)

    def request(self) -> Request:
        """Return a request whose time begins now."""
        config = self.config
        asked = Request(self.goal, config.decomposition, *self.selector, config.seed, cache_folder())
        asked = asked.fitted_to(config.calibration.images)
        return asked if self.in_file else asked.refitting()

    def verb_arguments(self) -> dict[str, Any]:
        """Return the arguments of `rankrl.compress` that modules and files share."""
        goal, (name, given) = self.goal, self.selector
        budget = BudgetOptions(params=DEFAULT_KEPT_PARAMS) if goal.needs_budget else goal.budget
        return {
            **vars(budget),
            "decomposition": self.config.decomposition,
            "selector": name,
            "selector_options": given,
            "reward": goal.reward,
            "reward_options": goal.reward_options,
            "search": goal.search,
            "timing": goal.timing,
            "cache": cache_folder(),
            "seed": self.config.seed,
        }

    def compared_selectors(self) -> list[SelectorEntry]:
        """Return the selectors that are compared, with all of their options.

        Options are the defaults, or, for the selector that the configuration itself names, those of the
        configuration, with the command line's; the options in the entry override both.
        """
        entries, (configured, given) = [], _named(self.config.selector)
        for text in self.config.compare.selectors:
            if self.config.compare.selectors.count(text) > 1:
                raise ConfigError(f"compare.selectors names {text!r} twice; compare.seeds repeats a search")
            try:
                entry = selector_entry(text)
            except ConfigError as error:
                raise ConfigError(f"compare.selectors: {error}") from error
            own = entry.selector == configured
            base = given if own else selector_class(entry.selector).default_options()
            entries.append(replace(entry, options={**base, **entry.options}))
        return entries

    def pruning(self) -> PruningOptions:
        config, budget = self.config, self.config.budget
        kept: dict[str, Any] = {"params": budget.params, "macs": budget.macs}
        options = pruning_options(*_named(config.pruner), **kept, seed=config.seed)
        return replace(options, sequential=config.decomposition.sequential)

    def finetuning_recipe(
        self, *, epochs: int | None = None, after_removal: bool = False, heldout_is_new: bool = True
    ) -> TrainingRecipe:
        """Return the recipe of fine-tuning, with larger steps after a removal of channels."""
        given, optim = self.config.finetune, self.config.optim
        recipe = given if epochs is None else replace(given, epochs=epochs)
        if recipe.restore_best is None:
            recipe = replace(recipe, restore_best=heldout_is_new)
        rates = {**recipe.rates, **(_LR_AFTER_REMOVAL if after_removal else {})}
        return _recipe(recipe, optim, "optim", self.config.seed, rates.get(optim.name))

    def tuning_recipe(self, *, epochs: int | None = None, **told: bool) -> TrainingRecipe | None:
        """Return the recipe of fine-tuning, or None for no epochs."""
        asked = self.config.finetune.epochs if epochs is None else epochs
        return None if asked == 0 else self.finetuning_recipe(epochs=asked, **told)

    def training_recipe(self, network: nn.Module | None = None) -> TrainingRecipe:
        """Return the recipe of training from scratch; without a network only its options are checked."""
        recipe, optim = self.config.train, self.config.train.optim
        lr = _LR_FROM_SCRATCH.get(optim.name)
        if optim.name == "sgd":
            lr = 1.0 if network is None else default_lr(self.config.model["architecture"], network)
        if recipe.restore_best is None:
            recipe = replace(recipe, restore_best=True)
        optim = replace(optim, options={**_OPTIONS_FROM_SCRATCH.get(optim.name, {}), **optim.options})
        return _recipe(recipe, optim, "train.optim", self.config.seed, lr)

    @cached_property
    def data(self) -> ImageData:
        return load_dataset(seed=self.config.seed, **self.config.dataset)

    @cached_property
    def network(self) -> nn.Module:
        """The dense architecture, with the weights of model.checkpoint, if that is set."""
        return build_network(self.config.model, self.data, seed=self.config.seed)

    @cached_property
    def dense(self) -> nn.Module:
        """The dense network from its checkpoint, or trained; warns if it is no better than guessing."""
        if not self.checkpoint:
            self.train_dense()
            return self.network
        warning = guessing_warning(self.network, self.data)
        if warning is not None:
            self.folder.warn(
                f"{warning}. Check that model.checkpoint={self.checkpoint} was trained on this "
                "dataset, with its classes in this order and with its normalisation."
            )
        return self.network

    def train_dense(self) -> TrainingResult:
        """Train the dense network in place and save it; warn if it is no better than guessing."""
        recipe = self.training_recipe(self.network)
        result = train_in(self.folder, "train", self.network, self.data, recipe)
        heldout = self.data.heldout.digest() if self.heldout_is_new else None  # initial weights may know them
        preprocessing = self.data.preprocessing.to_dict()
        save_checkpoint(self.network, self.folder.dense, heldout=heldout, preprocessing=preprocessing)
        warning = guessing_warning(self.network, self.data)
        if warning is not None:
            self.folder.warn(
                f"{warning}. It was trained for {counted(recipe.epochs, 'epoch')} (train.epochs) at the "
                f"learning rate {result.lr:.3g} (train.optim.lr). Train it longer or at another rate, or "
                "give trained weights with model.checkpoint=PATH."
            )
        return result

    @property
    def heldout_is_new(self) -> bool:
        """Whether the dense network is known to be trained without the held-out images."""
        return not self.checkpoint or checkpoint_heldout(self.checkpoint) == self.data.heldout.digest()

    @cached_property
    def teacher(self) -> Teacher | None:
        """The teacher that finetune.teacher names, its accuracy on held-out images logged; else None."""
        options = self.config.finetune
        if not options.teachers or options.epochs == 0 or options.distillation == 0:
            return None
        read = read_teacher(options, self.config.model, self.data, seed=self.config.seed)
        log.info("fine-tune: the teacher, %s: held-out accuracy %.4f", read.title, read.accuracy)
        return read

    def check_budget(self) -> None:
        """Refuse a budget that the network cannot reach."""
        request, network = self.request(), ModuleNetwork(self.network, self.data.input_shape)
        check_reachable(network, request.timed_candidates(), request.goal)

    def searched_network(self, network: nn.Module) -> FileModule:
        return image_classifier(network, self.data, self.request(), self.folder.state)

    def file(self) -> tuple[Path, Path, dict[str, Any]]:
        """Return the paths of an ONNX file and of its inputs, and how these are read, for the verbs."""
        given = self.config.dataset
        if given.get("name") != INPUTS:
            raise ConfigError(
                f"model=onnx takes its inputs from a file, but dataset={given.get('name')} is chosen; give "
                f"dataset={INPUTS} dataset.path=inputs.npz, one array for each input of the network"
            )
        inputs = Path(given["path"])
        values = {name: given[name] for name in ("size", "resize", "scale", "order", "mean", "std")}
        defaults = {each.name: each.default for each in dataclasses.fields(InputsOptions)}
        set_here = [name for name, value in values.items() if value != defaults[name]]
        if set_here and not inputs.is_dir():
            raise ConfigError(
                f"dataset.{set_here[0]} is for a folder of images; {inputs} is none, and arrays in a file "
                "are taken as they are. Leave it out"
            )
        images = ImagePreprocessing(**values) if inputs.is_dir() else None
        read = {"images": images, "batch_axes": given.get("batch_axes")}
        return Path(self.config.model["path"]), inputs, read

    def given(self) -> tuple[Any, Any, dict[str, Any]]:
        """Return the network, its inputs and how these are read, for the verbs; train where necessary."""
        if self.in_file:
            return self.file()
        return self.dense, self.data, {"calibration": self.config.calibration.images}

    def compressed(self) -> tuple[nn.Module, nn.Module, CompressionPlan]:
        """Return the compressed network that `weights` names, the dense architecture, and the plan."""
        weights, data = self.config.weights, self.data
        if not weights:
            raise ConfigError(
                f"task={self.config.task} needs weights=RUN/model.safetensors, the compressed network of an "
                "earlier run"
            )
        with self.fitting(f"weights={weights}"):
            network, plan = load_compressed(self.network, Path(weights))
        recorded, own = plan.metadata.get("preprocessing"), data.preprocessing.to_dict()
        known = recorded if isinstance(recorded, dict) else {}
        for name in ("mean", "std"):
            if known.get(name, own[name]) != own[name]:
                made, taken = f"{weights} was made with images of {name} {known[name]}", own[name]
                log.warning(
                    "%s, those of dataset=%s have %s; dataset.%s sets it", made, data.name, taken, name
                )
        return network.eval(), plan.prepared(self.network), plan

    @contextmanager
    def fitting(self, option: str) -> Iterator[None]:
        """Name network and data where a plan does not fit them."""
        try:
            yield
        except DecompositionError as error:
            raise ConfigError(
                f"{option} does not fit model={self.config.model['architecture']} for "
                f"dataset={self.data.name}: {error}. Give the options model and dataset that its run had; a "
                "dense network is model.checkpoint=PATH"
            ) from error

    @property
    def searched(self) -> dict[str, Any]:
        """The method of this run's search for metrics.json: format, selector and budget."""
        return {
            "decomposition": self.config.decomposition.format,
            "selector": self.config.selector["name"],
            "budget": self.goal.budget_numbers,
        }

    def head(self, method: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the entries of metrics.json on the run itself."""
        if self.in_file:
            path, inputs, read = self.file()
            images = read["images"]
            about: dict[str, Any] = {"model": path.stem, "dataset": inputs.name}
            about |= {} if images is None else {"preprocessing": asdict(images)}
        else:
            about = {
                "model": model_title(self.config.model, self.network),
                "checkpoint": Path(self.checkpoint).name if self.checkpoint else None,
                "heldout_is_new": self.heldout_is_new,
                "dataset": self.data.name,
                "decomposition": None,
                "selector": None,
                "preprocessing": self.data.preprocessing.to_dict(),
            }
        return {"task": self.config.task, **about, **(method or {}), "seed": self.config.seed}

    def numbers(self, dense: nn.Module, network: nn.Module, plan: CompressionPlan) -> dict[str, Any]:
        """Return the entries of metrics.json for a compressed network next to the dense one.

        The dense one has a test accuracy if its weights are known: from a checkpoint, or trained by
        task=apply.
        """
        if self.checkpoint or self.config.task == "apply":
            before = network_numbers(dense, self.data)
        else:
            before = {"params": count_parameters(dense), "macs": count_macs(dense, self.data.input_shape)}
        after = network_numbers(network, self.data)
        compared = {"baseline": before, "compressed": after, "ratios": cost_ratios(before, after)}
        return {**self.head(method_of(plan)), **compared}


def method_of(plan: CompressionPlan) -> dict[str, str | None]:
    """Return the compression method for metrics.json: formats, selector and pruner."""
    formats = {operation.format for operation in plan.chosen(Factorise).values()}
    method: dict[str, str | None] = {
        "decomposition": AUTO if len(formats) > 1 else next(iter(formats), None),
        "selector": plan.chosen_by,
    }
    first, then, second = plan.chosen_by.partition(THEN)
    if then or (only_removes(plan) and first in [pruner.name for pruner in list_pruners()]):
        method |= {"selector": second or None, "pruner": first}
    return method


def only_removes(plan: CompressionPlan) -> bool:
    """Tell whether a plan removes channels or blocks, and changes no layer otherwise."""
    return bool(plan.group_kinds) and not any(layer.layer_operations for layer in plan)


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


def _recipe(
    recipe: RecipeOptions, optim: OptimizerOptions, group: str, seed: int, default: float | None
) -> TrainingRecipe:
    lr = default if optim.lr is None else optim.lr
    if lr is None:
        raise ConfigError(
            f"the learning rate of {optim.name} is null, and none is known that suits it here; set a number, "
            f"such as {group}.lr=0.01"
        )
    values = {each.name: getattr(recipe, each.name) for each in dataclasses.fields(RecipeOptions)}
    return TrainingRecipe(**values, lr=lr, optimizer=optim.name, optimizer_options=optim.options, seed=seed)


def _named(group: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Split a config group into its `name` and the options."""
    return group["name"], {key: value for key, value in group.items() if key != "name"}
