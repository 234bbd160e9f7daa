"""Train, compress, fine-tune, evaluate and export networks: a task each, and the steps that tasks share."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from torch import nn

from decomposition import (
    CompressionPlan,
    Factorise,
    count_macs,
    count_parameters,
    load_compressed,
    save_compressed,
)
from decomposition.errors import DecompositionError
from pruning import PruningError, list_pruners
from rankrl import compression
from rankrl.cli.config import compose, options
from rankrl.cli.config.schema import AppConfig
from rankrl.compression import apply_plan, compress
from rankrl.data import ImageData
from rankrl.errors import CheckpointError, ConfigError, counted
from rankrl.models import checkpoint_heldout, save_checkpoint
from rankrl.module_compression import file_metadata, finetune_in, image_classifier, train_in
from rankrl.networks.module import FileModule, ModuleNetwork
from rankrl.onnx.graph import ImagePreprocessing
from rankrl.onnx.output_scores import SCORES
from rankrl.options.decomposition import AUTO
from rankrl.options.names import InputsOptions
from rankrl.plan_search.run import search_numbers
from rankrl.plan_search.session import check_reachable
from rankrl.pruners.prune import THEN, PruningSteps, check_target, compress_pruned
from rankrl.report import (
    LayerRow,
    conclusion,
    device_table,
    heldout_note,
    measured_table,
    runtimes_table,
    summary_table,
)
from rankrl.result import Compression, MeasuredModule, run_numbers, write_run
from rankrl.runs.run_folder import RunFolder, cache_folder
from rankrl.training import EpochRow, TrainingRecipe, TrainingResult, guessing_share
from rankrl.training.epochs import extend_training
from rankrl.training.networks import (
    Teacher,
    build_network,
    guessing_warning,
    heldout_accuracy,
    model_title,
    read_teacher,
    write_training_step,
)
from rankrl.verify.agreement import accuracy_collapse
from rankrl.verify.measure import cost_ratios, layer_rows, network_numbers, test_accuracy, with_preprocessing

log = logging.getLogger(__name__)
INPUTS = "inputs"
"""The dataset of model=onnx: inputs without labels."""
_LITTLE = 0.5
"""Agreement with the original below which hardly anyone would use a network."""


def compressed_from(config: AppConfig, data: ImageData) -> tuple[nn.Module, nn.Module, CompressionPlan]:
    """Return the compressed network that `weights` names, the dense architecture, and the plan."""
    if not config.weights:
        raise ConfigError(
            f"task={config.task} needs weights=RUN/model.safetensors, the compressed network of an "
            "earlier run"
        )
    dense = build_network(config.model, data, seed=config.seed)
    with _fitting(config, data, f"weights={config.weights}"):
        network, plan = load_compressed(dense, Path(config.weights))
    recorded, own = plan.metadata.get("preprocessing"), data.preprocessing.to_dict()
    known = recorded if isinstance(recorded, dict) else {}
    for name in ("mean", "std"):
        if known.get(name, own[name]) != own[name]:
            made, taken = f"{config.weights} was made with images of {name} {known[name]}", own[name]
            log.warning("%s, those of dataset=%s have %s; dataset.%s sets it", made, data.name, taken, name)
    return network.eval(), plan.prepared(dense), plan


@contextmanager
def _fitting(config: AppConfig, data: ImageData, option: str) -> Iterator[None]:
    """Name network and data where a plan does not fit them."""
    try:
        yield
    except DecompositionError as error:
        raise ConfigError(
            f"{option} does not fit model={config.model['architecture']} for dataset={data.name}: {error}. "
            "Give the options model and dataset that its run had; a dense network is model.checkpoint=PATH"
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


def both_numbers(
    config: AppConfig, data: ImageData, dense: nn.Module, network: nn.Module, plan: CompressionPlan
) -> dict[str, Any]:
    """Return the entries of metrics.json for a compressed network next to the dense one.

    The dense one has a test accuracy if its weights are known: from a checkpoint, or trained by task=apply.
    """
    if config.model.get("checkpoint") or config.task == "apply":
        before = network_numbers(dense, data)
    else:
        before = {"params": count_parameters(dense), "macs": count_macs(dense, data.input_shape)}
    after = network_numbers(network, data)
    head = run_head(config, data, dense, method_of(plan))
    return {**head, "baseline": before, "compressed": after, "ratios": cost_ratios(before, after)}


def train(config: AppConfig, folder: RunFolder) -> None:
    """Train and write `dense.safetensors`."""
    options.training_recipe(config, None)
    data = options.dataset(config)
    network = build_network(config.model, data, seed=config.seed)
    epochs = dense_training(config, data, network, folder).history
    metrics = {**run_head(config, data, network), "baseline": network_numbers(network, data)}
    finish(folder, metrics, epochs=epochs)


def pipeline(config: AppConfig, folder: RunFolder) -> None:
    """Run all steps; each finished step is reused when the run is resumed."""
    tuning = config.finetune.epochs > 0 and not in_file(config)
    options.check(config, finetuning=tuning)
    network: Any
    inputs: Any
    if in_file(config):
        network, inputs, told = file_inputs(config)
        if not config.budget.fractions:
            raise ConfigError(
                "model=onnx needs a budget: budget.latency=0.5 keeps at most half of the time; "
                "budget.params, budget.macs and budget.bytes likewise"
            )
        head = file_head(config, told["images"], searched(config))
    else:
        inputs = data = options.dataset(config)
        check_budget(config, data)
        told = {"teacher": named_teacher(config, data), "calibration": config.calibration.images}
        network = dense_network(config, data, folder)
        if tuning:
            new = heldout_is_new(config, data)
            told["finetune"] = options.finetuning_recipe(config, heldout_is_new=new)
        head = run_head(config, data, network, searched(config))
    folder.notes.about.update(head)
    result: Any = compress(network, inputs, folder, **options.verb_arguments(config), **told)
    finish_compressed(config, result, folder)


def search(config: AppConfig, folder: RunFolder) -> None:
    """Search and write the plan; no test image is read."""
    options.check(config, finetuning=False)
    data = options.dataset(config)
    check_budget(config, data)
    dense = dense_network(config, data, folder)
    asked = options.verb_arguments(config)
    found = compression.search(dense, data, folder=folder, calibration=config.calibration.images, **asked)
    metrics = {**run_head(config, data, dense, searched(config)), **search_numbers(found)}
    finish(folder, {**metrics, "ratios": found.ratios}, layers=layer_rows(found.plan, dense))


def apply(config: AppConfig, folder: RunFolder) -> None:
    """Write the compressed network as `model.safetensors`, that of an ONNX file as `model.onnx`."""
    if not config.plan:
        raise ConfigError("task=apply needs plan=RUN/plan.json, the plan of an earlier run or your own")
    plan = CompressionPlan.load(config.plan)
    told: dict[str, Any] = {"decomposition": config.decomposition, "seed": config.seed}
    if in_file(config):
        path, inputs, read = file_inputs(config)
        timing, cache = options.search_goal(config).timing, cache_folder()
        result = apply_plan(path, plan, inputs, folder.onnx, timing=timing, cache=cache, **told, **read)
        plan.save(folder.plan)
        folder.notes.about.update(file_head(config, read["images"], method_of(plan)))
        finish_compressed(config, result, folder)
        return
    data = options.dataset(config)
    with _fitting(config, data, f"plan={config.plan}"):  # before a network is trained for it
        plan.specs(build_network(config.model, data, seed=config.seed))
    plan = with_preprocessing(plan, data.preprocessing)
    dense = dense_network(config, data, folder)
    compressed = apply_plan(dense, plan, data, calibration=config.calibration.images, **told)
    save_compressed(compressed, plan, folder.model, dense=dense)
    plan.save(folder.plan)
    metrics = both_numbers(config, data, dense, compressed, plan)
    check_collapse(folder, metrics, data)
    finish(folder, metrics, layers=layer_rows(plan, dense, compressed))


def prune(config: AppConfig, folder: RunFolder) -> None:
    """Remove channels or blocks, decompose what is left if asked, fine-tune, verify and time."""
    pruning, left, epochs = options.pruning(config), config.prune.budget, config.prune.finetune_epochs
    decomposing = None if left is None else replace(config, budget=left)
    between = config if epochs is None else options.with_epochs(config, epochs)
    options.check(decomposing or config, finetuning=config.finetune.epochs > 0)
    if between.finetune.epochs > 0:
        options.finetuning_recipe(between, after_removal=True)
    data = options.dataset(config)
    try:
        check_target(build_network(config.model, data, seed=config.seed), data.input_shape, pruning)
    except PruningError as error:
        raise ConfigError(f"the network cannot be pruned as asked: {error}") from error
    teacher = named_teacher(config, data)
    dense = dense_network(config, data, folder)
    new = heldout_is_new(config, data)

    def recipe(config: AppConfig, *, removed: bool) -> TrainingRecipe | None:
        return options.tuning_recipe(config, after_removal=removed, heldout_is_new=new)

    following = PruningSteps(
        recipe(config, removed=decomposing is None),
        None if decomposing is None else options.request(decomposing),
        None if decomposing is None else recipe(between, removed=True),
        teacher,
        new,
    )
    method = None if decomposing is None else searched(config)
    head = {**run_head(config, data, dense, method), "pruner": config.pruner["name"]}
    folder.notes.about.update(head)
    result = compress_pruned(dense, data, folder, pruning, following, options.request(config))
    finish_compressed(config, result, folder)


def finetune(config: AppConfig, folder: RunFolder) -> None:
    """Write the fine-tuned network as `model.safetensors`."""
    recipe = options.finetuning_recipe(config)
    data = options.dataset(config)
    network, dense, plan = compressed_from(config, data)
    plan = with_preprocessing(plan, data.preprocessing)
    teacher = named_teacher(config, data)
    if recipe.distillation > 0 and teacher is None and not config.model.get("checkpoint"):
        raise ConfigError(
            "task=finetune distils from the dense network: give its weights with model.checkpoint=PATH or "
            "another teacher with finetune.teacher=PATH, or set finetune.distillation=0"
        )
    metrics = both_numbers(config, data, dense, network, plan)
    removed = bool(plan.group_kinds) and not any(layer.layer_operations for layer in plan)
    with _taken_up(config, folder):
        new = heldout_is_new(config, data)
        recipe = options.finetuning_recipe(config, after_removal=removed, heldout_is_new=new)
        epochs = finetune_in(folder, network, data, recipe, dense, teacher, heldout_is_new=new)
    save_compressed(network, plan, folder.model, dense=dense)
    plan.save(folder.plan)
    metrics["finetuned"] = {"accuracy": test_accuracy(network, data)}
    known = config.model.get("checkpoint")
    before = heldout_accuracy(dense, data) if known else metrics["compressed"]["accuracy"]
    check_collapse(folder, metrics, data, before)
    finish(folder, metrics, epochs=epochs)


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
        metrics = {**run_head(config, data, dense), "baseline": network_numbers(dense, data)}
    finish(folder, metrics)


def export(config: AppConfig, folder: RunFolder) -> None:
    """Write `model.onnx`, compare it with PyTorch and time it along with the dense network."""
    options.export_options(config)  # refuses a missing runtime before anything is read
    data = options.dataset(config)
    network, dense, plan = compressed_from(config, data)
    metrics = both_numbers(config, data, dense, network, plan)
    ratios = metrics.pop("ratios")
    original = searched_network(config, data, dense, folder)
    file = original.write(network, folder.onnx, file_metadata(plan, metrics))
    exported_step(config, network, folder)
    measured = {"ratios": {**ratios, "latency": file.latency.ratio}, "onnx": dict(file.numbers)}
    finish(folder, {**metrics, **measured, "runtimes": file.runtimes})


def dense_network(config: AppConfig, data: ImageData, folder: RunFolder) -> nn.Module:
    """Load the dense network from its checkpoint, or train it; warn if it is no better than guessing."""
    network = build_network(config.model, data, seed=config.seed)
    if not config.model.get("checkpoint"):
        dense_training(config, data, network, folder)
        return network
    warning = guessing_warning(network, data)
    if warning is not None:
        folder.warn(
            f"{warning}. Check that model.checkpoint={config.model['checkpoint']} was trained on this "
            "dataset, with its classes in this order and with its normalisation."
        )
    return network


def named_teacher(config: AppConfig, data: ImageData) -> Teacher | None:
    """Return the teacher that finetune.teacher names, its accuracy on held-out images logged; else None."""
    options = config.finetune
    if not options.teachers or options.epochs == 0 or options.distillation == 0:
        return None
    read = read_teacher(options, config.model, data, seed=config.seed)
    log.info("fine-tune: the teacher, %s: held-out accuracy %.4f", read.title, read.accuracy)
    return read


def check_budget(config: AppConfig, data: ImageData) -> None:
    """Refuse a budget that the network cannot reach, before it is trained."""
    if config.model.get("checkpoint"):  # no training to save; the search checks before it fits
        return
    network = build_network(config.model, data, seed=config.seed)
    request = options.request(config)
    check_reachable(ModuleNetwork(network, data.input_shape), request.timed_candidates(), request.goal)


def heldout_is_new(config: AppConfig, data: ImageData) -> bool:
    """Tell whether the dense network is known to be trained without the held-out images."""
    checkpoint = config.model.get("checkpoint")
    return not checkpoint or checkpoint_heldout(checkpoint) == data.heldout.digest()


def dense_training(
    config: AppConfig, data: ImageData, network: nn.Module, folder: RunFolder
) -> TrainingResult:
    """Train the dense network in place and save it; warn if it is no better than guessing."""
    recipe = options.training_recipe(config, network)
    result = train_in(folder, "train", network, data, recipe)
    new = heldout_is_new(config, data)  # false for initial weights that may have seen the held-out images
    save_checkpoint(
        network,
        folder.dense,
        heldout=data.heldout.digest() if new else None,
        preprocessing=data.preprocessing.to_dict(),
    )
    warning = guessing_warning(network, data)
    if warning is not None:
        folder.warn(
            f"{warning}. It was trained for {counted(recipe.epochs, 'epoch')} (train.epochs) at the learning "
            f"rate {result.lr:.3g} (train.optim.lr). Train it longer or at another rate, or give trained "
            "weights with model.checkpoint=PATH."
        )
    return result


def in_file(config: AppConfig) -> bool:
    """Tell whether the network is an ONNX file, trained elsewhere."""
    return bool(config.model.get("architecture") == "onnx")


def file_inputs(config: AppConfig) -> tuple[Path, Path, dict[str, Any]]:
    """Return the paths of an ONNX file and of its inputs, and how these are read, for the verbs."""
    given = config.dataset
    if given.get("name") != INPUTS:
        raise ConfigError(
            f"model=onnx takes its inputs from a file, but dataset={given.get('name')} is chosen; give "
            f"dataset={INPUTS} dataset.path=inputs.npz, one array for each input of the network"
        )
    inputs = Path(given["path"])
    values = {name: given[name] for name in ("size", "resize", "scale", "order", "mean", "std")}
    defaults = {each.name: each.default for each in fields(InputsOptions)}
    set_here = [name for name, value in values.items() if value != defaults[name]]
    if set_here and not inputs.is_dir():
        raise ConfigError(
            f"dataset.{set_here[0]} is for a folder of images; {inputs} is none, and arrays in a file are "
            "taken as they are. Leave it out"
        )
    images = ImagePreprocessing(**values) if inputs.is_dir() else None
    return Path(config.model["path"]), inputs, {"images": images, "batch_axes": given.get("batch_axes")}


def searched_network(config: AppConfig, data: ImageData, dense: nn.Module, folder: RunFolder) -> FileModule:
    return image_classifier(dense, data, options.request(config), folder.state)


def run_head(
    config: AppConfig, data: ImageData, network: nn.Module, method: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    checkpoint = config.model.get("checkpoint")
    return {
        "task": config.task,
        "model": model_title(config.model, network),
        "checkpoint": Path(checkpoint).name if checkpoint else None,
        "heldout_is_new": heldout_is_new(config, data),
        "dataset": data.name,
        "decomposition": None,
        "selector": None,
        **(method or {}),
        "seed": config.seed,
        "preprocessing": data.preprocessing.to_dict(),
    }


def file_head(
    config: AppConfig, images: ImagePreprocessing | None, method: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the entries of metrics.json on a run for an ONNX file."""
    return {
        "task": config.task,
        "model": Path(config.model["path"]).stem,
        "dataset": Path(config.dataset["path"]).name,
        **({} if images is None else {"preprocessing": asdict(images)}),
        **method,
        "seed": config.seed,
    }


def searched(config: AppConfig) -> dict[str, Any]:
    """Return the method of this run's search: format, selector and budget."""
    return {
        "decomposition": config.decomposition.format,
        "selector": config.selector["name"],
        "budget": options.search_goal(config).budget_numbers,
    }


def finish_compressed(config: AppConfig, result: MeasuredModule | Compression, folder: RunFolder) -> None:
    searched = {} if result.search is None else search_numbers(result.search)
    metrics = {**folder.notes.about, **run_numbers(result), **searched}
    if isinstance(result, MeasuredModule):
        exported_step(config, result.model, folder)
    else:
        Console().print(_outputs(result))
    told = result if isinstance(result, Compression) else result.search  # the search, where there is no file
    missed = None if told is None else told.missed
    if missed is not None:
        folder.miss(missed)
    if result.collapsed is not None:
        log.error(result.collapsed)
        folder.collapse(result.collapsed)
    elif not isinstance(result, MeasuredModule) and metrics["compressed"]["agreement"] < _LITTLE:
        folder.warn(
            f"the agreement with the original is {metrics['compressed']['agreement']:.2f}, of 1, on "
            f"{counted(result.heldout, 'held-out input')}: ask for a larger budget, or give more inputs"
        )
    epochs = result.epochs if isinstance(result, MeasuredModule) else ()
    finish(folder, metrics, layers=result.layers, epochs=epochs)


def _outputs(result: Compression) -> Table:
    table = Table(title=f"Agreement with the original on {counted(result.heldout, 'held-out input')}")
    table.add_column("output", overflow="fold")
    table.add_column("agreement", justify="right")
    table.add_column("relative error", justify="right")
    table.add_column("agreement is", overflow="fold")
    for each in result.outputs:
        meaning = f"{SCORES[each.kind]}, since {each.reason}"
        table.add_row(each.name, f"{each.score:.2%}", f"{each.error:.4f}", meaning)
        for unit in each.units:
            name = f"{each.name}[{unit.channels}]"
            table.add_row(name, f"{unit.score:.2%}", f"{unit.error:.4f}", "the same")
    return table


def exported_step(config: AppConfig, network: nn.Module, folder: RunFolder) -> None:
    """Write the optimizer's step as ONNX if the configuration asks for it."""
    if config.export.training:
        # A recipe needs an epoch; a step does not depend on their number.
        recipe = options.finetuning_recipe(options.with_epochs(config, max(1, config.finetune.epochs)))
        write_training_step(network, recipe, folder.optimizer_step)


def finish(
    folder: RunFolder,
    metrics: dict[str, Any],
    *,
    layers: Sequence[LayerRow] = (),
    epochs: Sequence[EpochRow] = (),
) -> None:
    """Write the run's report and metrics, and print the final table."""
    metrics.pop("epochs", None)
    if epochs:
        metrics["epochs"] = [asdict(row) for row in epochs]
    add_notes(metrics, folder)
    page = write_run(folder, metrics, command=command(), layers=layers, epochs=epochs)
    console = Console()
    for make in (measured_table, device_table, runtimes_table, summary_table):
        table = make(metrics)
        if table.row_count:
            console.print(table)
    print_end(console, metrics, page)


def command() -> list[str]:
    """Return the command line as it was written, without what `compose.sweep_arguments` adds for Hydra."""
    return ["rankrl", *(each for each in sys.argv[1:] if not compose.is_added(each))]


def add_notes(metrics: dict[str, Any], folder: RunFolder) -> None:
    """Add the notes of the run's steps to the metrics, trainings and warnings; pass all to the trackers."""
    if folder.notes.trainings:
        metrics["trainings"] = folder.notes.trainings
    metrics["warnings"] = folder.notes.warnings
    inputs = ("seed", "preprocessing")
    folder.tracking.result({key: value for key, value in metrics.items() if key not in inputs})


def print_end(console: Console, metrics: Mapping[str, Any], page: Path) -> None:
    """Print the warnings and the path of the report below the final table."""
    plain: dict[str, Any] = {"soft_wrap": True, "markup": False, "highlight": False}
    if any(metrics.get(key) for key in ("search", "epochs")) and heldout_note(metrics):
        console.print(heldout_note(metrics), **plain)
    for warning in metrics["warnings"]:
        console.print(f"warning: {warning}", style="bold yellow", **plain)
    if conclusion(metrics):
        console.print(conclusion(metrics), **plain)
    console.print(f"report: {page}", soft_wrap=True)


def check_collapse(
    folder: RunFolder, metrics: Mapping[str, Any], data: ImageData, baseline: float | None = None
) -> None:
    """Warn if the accuracy of the last network in the metrics is no better than guessing."""
    last = metrics.get("finetuned") or metrics["compressed"]
    before = metrics["baseline"]["accuracy"] if baseline is None else baseline
    share = guessing_share(data.heldout.y)
    text = accuracy_collapse(last["accuracy"], before, share, len(data.test))
    if text is not None:
        log.error(text)
        folder.collapse(text)
