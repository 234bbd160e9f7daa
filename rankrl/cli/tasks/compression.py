"""Train, compress, fine-tune, evaluate and export networks: a task each."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from decomposition import (
    CompressionPlan,
    Factorise,
    count_macs,
    count_parameters,
    load_compressed,
    save_compressed,
)
from decomposition.errors import DecompositionError, PlanError
from pruning import PruningError, list_pruners
from rankrl import compression
from rankrl.cli.config import options
from rankrl.cli.config.schema import AppConfig
from rankrl.cli.tasks import steps
from rankrl.compression import apply_plan, compress
from rankrl.data import ImageData
from rankrl.errors import CheckpointError, ConfigError
from rankrl.module_compression import file_metadata, finetune_in
from rankrl.options.decomposition import AUTO
from rankrl.plan_search.run import search_numbers
from rankrl.pruners.compress import THEN, PruningSteps, compress_pruned
from rankrl.pruners.prune import check_target
from rankrl.runs.run_folder import RunFolder, cache_folder
from rankrl.training import TrainingRecipe
from rankrl.training.networks import build_network, heldout_accuracy
from rankrl.training.state import extend_training
from rankrl.verify.measure import cost_ratios, layer_rows, network_numbers, test_accuracy, with_preprocessing

log = logging.getLogger(__name__)


def compressed_from(config: AppConfig, data: ImageData) -> tuple[nn.Module, nn.Module, CompressionPlan]:
    """Return the compressed network that `weights` names, the dense architecture, and the plan."""
    if not config.weights:
        raise ConfigError(
            f"task={config.task} needs weights=RUN/model.safetensors, the compressed network of an "
            "earlier run"
        )
    dense = build_network(config.model, data, seed=config.seed)
    try:
        network, plan = load_compressed(dense, Path(config.weights))
    except PlanError as error:
        raise ConfigError(
            f"weights={config.weights} cannot be loaded into model={config.model['architecture']} for "
            f"dataset={data.name}: {error}. It takes the model.safetensors of a run, with the options model "
            "and dataset that the run had; a dense network is given as model.checkpoint=PATH"
        ) from error
    _warn_of_other_images(config.weights, plan, data)
    return network.eval(), plan.prepared(dense), plan


def check_plan(config: AppConfig, data: ImageData, plan: CompressionPlan) -> None:
    """Refuse a plan that the network cannot take, before the network is trained for it."""
    try:
        plan.specs(build_network(config.model, data, seed=config.seed))
    except DecompositionError as error:
        raise ConfigError(
            f"plan={config.plan} cannot be applied to model={config.model['architecture']} for "
            f"dataset={data.name}: {error}"
        ) from error


def method_of(plan: CompressionPlan) -> dict[str, str | None]:
    """Return the compression method for metrics.json: formats, selector and pruner."""
    formats = {operation.format for operation in plan.chosen(Factorise).values()}
    method: dict[str, str | None] = {
        "decomposition": AUTO if len(formats) > 1 else next(iter(formats), None),
        "selector": plan.chosen_by,
    }
    first, then, second = plan.chosen_by.partition(THEN)
    only_removed = bool(plan.group_kinds) and not any(layer.layer_operations for layer in plan)
    if then or (only_removed and first in [pruner.name for pruner in list_pruners()]):
        method |= {"selector": second or None, "pruner": first}
    return method


def dense_numbers(config: AppConfig, data: ImageData, dense: nn.Module) -> dict[str, Any]:
    """Return the costs of the dense network, and its test accuracy if its weights are known."""
    if config.model.get("checkpoint"):
        return network_numbers(dense, data)
    return {"params": count_parameters(dense), "macs": count_macs(dense, data.input_shape)}


def both_numbers(
    config: AppConfig, data: ImageData, dense: nn.Module, network: nn.Module, plan: CompressionPlan
) -> dict[str, Any]:
    """Return the entries of metrics.json for a compressed network next to the dense one."""
    before, after = dense_numbers(config, data, dense), network_numbers(network, data)
    return _next_to(steps.head(config, data, dense, method_of(plan)), before, after)


def _next_to(head: dict[str, Any], before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    return {**head, "baseline": before, "compressed": after, "ratios": cost_ratios(before, after)}


def _warn_of_other_images(weights: str | Path, plan: CompressionPlan, data: ImageData) -> None:
    """Warn if images are normalised differently from those that the network was compressed with."""
    known, own = plan.metadata.get("preprocessing"), data.preprocessing.to_dict()
    if not isinstance(known, dict):
        return
    for name in ("mean", "std"):
        if name in known and known[name] != own[name]:
            log.warning(
                "%s was made with images of %s %s, those of dataset=%s have %s; dataset.%s sets it",
                weights,
                name,
                known[name],
                data.name,
                own[name],
                name,
            )


def train(config: AppConfig, folder: RunFolder) -> None:
    """Train and write `dense.safetensors`."""
    options.training_recipe(config, None)
    data = options.dataset(config)
    network = build_network(config.model, data, seed=config.seed)
    epochs = steps.dense_training(config, data, network, folder).history
    metrics = {**steps.head(config, data, network), "baseline": network_numbers(network, data)}
    steps.finish(folder, metrics, epochs=epochs)


def pipeline(config: AppConfig, folder: RunFolder) -> None:
    """Run all steps; each finished step is reused when the run is resumed."""
    tuning = config.finetune.epochs > 0 and not steps.in_file(config)
    options.check(config, finetuning=tuning)
    network: Any
    inputs: Any
    if steps.in_file(config):
        network, inputs, told = steps.file_inputs(config)
        if not config.budget.fractions:
            raise ConfigError(
                "model=onnx needs a budget: budget.latency=0.5 keeps at most half of the time; "
                "budget.params, budget.macs and budget.bytes likewise"
            )
        head = steps.file_head(config, told["images"], steps.searched(config))
    else:
        inputs = data = options.dataset(config)
        steps.check_budget(config, data)
        told = {"teacher": steps.teacher(config, data), "calibration": config.calibration.images}
        network = steps.dense_network(config, data, folder)
        if tuning:
            new = steps.heldout_is_new(config, data)
            told["finetune"] = options.finetuning_recipe(config, heldout_is_new=new)
        head = steps.head(config, data, network, steps.searched(config))
    folder.notes.about.update(head)
    result: Any = compress(network, inputs, folder, **options.verb_arguments(config), **told)
    steps.finish_compressed(config, result, folder)


def search(config: AppConfig, folder: RunFolder) -> None:
    """Search and write the plan; no test image is read."""
    options.check(config, finetuning=False)
    data = options.dataset(config)
    steps.check_budget(config, data)
    dense = steps.dense_network(config, data, folder)
    asked = options.verb_arguments(config)
    found = compression.search(dense, data, folder=folder, calibration=config.calibration.images, **asked)
    metrics = {**steps.head(config, data, dense, steps.searched(config)), **search_numbers(found)}
    steps.finish(folder, {**metrics, "ratios": found.ratios}, layers=layer_rows(found.plan, dense))


def apply(config: AppConfig, folder: RunFolder) -> None:
    """Write the compressed network as `model.safetensors`, that of an ONNX file as `model.onnx`."""
    if not config.plan:
        raise ConfigError("task=apply needs plan=RUN/plan.json, the plan of an earlier run or your own")
    plan = CompressionPlan.load(config.plan)
    told: dict[str, Any] = {"decomposition": config.decomposition, "seed": config.seed}
    if steps.in_file(config):
        path, inputs, read = steps.file_inputs(config)
        timing, cache = options.search_goal(config).timing, cache_folder()
        result = apply_plan(path, plan, inputs, folder.onnx, timing=timing, cache=cache, **told, **read)
        plan.save(folder.plan)
        folder.notes.about.update(steps.file_head(config, read["images"], method_of(plan)))
        steps.finish_compressed(config, result, folder)
        return
    data = options.dataset(config)
    check_plan(config, data, plan)
    plan = with_preprocessing(plan, data.preprocessing)
    dense = steps.dense_network(config, data, folder)
    compressed = apply_plan(dense, plan, data, calibration=config.calibration.images, **told)
    save_compressed(compressed, plan, folder.model, dense=dense)
    plan.save(folder.plan)
    before, after = network_numbers(dense, data), network_numbers(compressed, data)
    metrics = _next_to(steps.head(config, data, dense, method_of(plan)), before, after)
    rows = layer_rows(plan, dense, compressed)
    steps.check_collapse(folder, metrics, data)
    steps.finish(folder, metrics, layers=rows)


def prune(config: AppConfig, folder: RunFolder) -> None:
    """Remove channels or blocks, decompose what is left if asked, fine-tune, verify and time."""
    pruning = options.pruning(config)
    decomposing = options.decomposition_after_pruning(config)
    between = options.before_decomposition(config)
    options.check(config if decomposing is None else decomposing, finetuning=config.finetune.epochs > 0)
    if between.finetune.epochs > 0:
        options.finetuning_recipe(between, after_removal=True)
    data = options.dataset(config)
    try:
        check_target(build_network(config.model, data, seed=config.seed), data.input_shape, pruning)
    except PruningError as error:
        raise ConfigError(f"the network cannot be pruned as asked: {error}") from error
    teacher = steps.teacher(config, data)
    dense = steps.dense_network(config, data, folder)
    new = steps.heldout_is_new(config, data)

    def recipe(config: AppConfig, *, removed: bool) -> TrainingRecipe | None:
        return options.tuning_recipe(config, after_removal=removed, heldout_is_new=new)

    following = PruningSteps(
        recipe(config, removed=decomposing is None),
        None if decomposing is None else options.request(decomposing),
        None if decomposing is None else recipe(between, removed=True),
        teacher,
        new,
    )
    method = None if decomposing is None else steps.searched(config)
    head = {**steps.head(config, data, dense, method), "pruner": config.pruner["name"]}
    folder.notes.about.update(head)
    result = compress_pruned(dense, data, folder, pruning, following, options.request(config))
    steps.finish_compressed(config, result, folder)


def finetune(config: AppConfig, folder: RunFolder) -> None:
    """Write the fine-tuned network as `model.safetensors`."""
    recipe = options.finetuning_recipe(config)
    data = options.dataset(config)
    network, dense, plan = compressed_from(config, data)
    plan = with_preprocessing(plan, data.preprocessing)
    teacher = steps.teacher(config, data)
    if recipe.distillation > 0 and teacher is None and not config.model.get("checkpoint"):
        raise ConfigError(
            "task=finetune distils from the dense network: give its weights with model.checkpoint=PATH or "
            "another teacher with finetune.teacher=PATH, or set finetune.distillation=0"
        )
    metrics = both_numbers(config, data, dense, network, plan)
    removed = bool(plan.group_kinds) and not any(layer.layer_operations for layer in plan)
    with _taken_up(config, folder):
        new = steps.heldout_is_new(config, data)
        recipe = options.finetuning_recipe(config, after_removal=removed, heldout_is_new=new)
        epochs = finetune_in(folder, network, data, recipe, dense, teacher, heldout_is_new=new)
    save_compressed(network, plan, folder.model, dense=dense)
    plan.save(folder.plan)
    metrics["finetuned"] = {"accuracy": test_accuracy(network, data)}
    known = config.model.get("checkpoint")
    before = heldout_accuracy(dense, data) if known else metrics["compressed"]["accuracy"]
    steps.check_collapse(folder, metrics, data, before)
    steps.finish(folder, metrics, epochs=epochs)


@contextmanager
def _taken_up(config: AppConfig, folder: RunFolder) -> Iterator[None]:
    """Continue the fine-tuning of the run that `run` names, if it kept its state."""
    own, before = (run.training_state("finetune") for run in (folder, RunFolder(Path(config.run or ""))))
    if not config.run or own.exists() or not before.is_file():
        yield
        return
    extend_training(before, own, config.finetune.epochs)
    try:
        yield
    except CheckpointError as error:
        own.unlink()
        raise ConfigError(
            f"run={config.run} goes on with a fine-tuning as it began, but for finetune.epochs: {error} "
            f"A new one begins with weights={config.weights}, without run"
        ) from error


def evaluate(config: AppConfig, folder: RunFolder) -> None:
    """Measure the dense network, the compressed one, or both."""
    if not config.weights and not config.model.get("checkpoint"):
        raise ConfigError(
            "task=evaluate needs a trained network: model.checkpoint=PATH, weights=RUN/model.safetensors, "
            "or both"
        )
    data = options.dataset(config)
    if config.weights:
        network, dense, plan = compressed_from(config, data)
        metrics = both_numbers(config, data, dense, network, plan)
    else:
        dense = build_network(config.model, data, seed=config.seed)
        metrics = {**steps.head(config, data, dense), "baseline": network_numbers(dense, data)}
    steps.finish(folder, metrics)


def export(config: AppConfig, folder: RunFolder) -> None:
    """Write `model.onnx`, compare it with PyTorch and time it along with the dense network."""
    options.export_options(config)  # refuses a missing runtime before anything is read
    data = options.dataset(config)
    network, dense, plan = compressed_from(config, data)
    metrics = both_numbers(config, data, dense, network, plan)
    metadata = file_metadata(plan, {key: value for key, value in metrics.items() if key != "ratios"})
    original = steps.searched_network(config, data, dense, folder)
    file = original.write(network, folder.onnx, metadata)
    metrics["onnx"] = dict(file.numbers)
    metrics["runtimes"] = file.runtimes
    steps.exported_step(config, network, folder)
    metrics["ratios"]["latency"] = file.latency.ratio
    steps.finish(folder, metrics)
