"""`task=finetune`: train a compressed network further."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from decomposition import save_compressed
from rankrl.cli.config import options
from rankrl.cli.config.schema import AppConfig
from rankrl.cli.tasks import ending, steps
from rankrl.cli.tasks.compressed import compressed_from, dense_numbers, method_of
from rankrl.errors import CheckpointError, ConfigError
from rankrl.runs.run_folder import RunFolder
from rankrl.training.state import extend_training
from rankrl.verify.measure import cost_ratios, network_numbers, test_accuracy, with_preprocessing


def finetune(config: AppConfig, folder: RunFolder) -> None:
    """Write the fine-tuned network as `model.safetensors`."""
    recipe = options.finetuning_recipe(config)
    data = options.dataset(config)
    network, dense, plan = compressed_from(config, data)
    plan = with_preprocessing(plan, data)
    teacher = steps.teacher(config, data)
    if recipe.distillation > 0 and teacher is None and not config.model.get("checkpoint"):
        raise ConfigError(
            "task=finetune distils from the dense network: give its weights with model.checkpoint=PATH or "
            "another teacher with finetune.teacher=PATH, or set finetune.distillation=0"
        )
    baseline, compressed = dense_numbers(config, data, dense), network_numbers(network, data)
    removed = bool(plan.group_kinds) and not any(layer.layer_operations for layer in plan)
    with _taken_up(config, folder):
        epochs = steps.finetuned(
            config, data, network, dense, folder, taught_by=teacher, after_removal=removed
        )
    save_compressed(network, plan, folder.model, dense=dense)
    plan.save(folder.plan)
    accuracy = test_accuracy(network, data)
    metrics = {
        **steps.head(config, data, dense, method_of(plan)),
        "baseline": baseline,
        "compressed": compressed,
        "finetuned": {"accuracy": accuracy},
        "ratios": cost_ratios(baseline, compressed),
    }
    known = config.model.get("checkpoint")
    before = steps.heldout_accuracy(dense, data) if known else compressed["accuracy"]
    ending.check_collapse(folder, metrics, data, before)
    ending.finish(folder, metrics, seed=config.seed, epochs=epochs)


@contextmanager
def _taken_up(config: AppConfig, folder: RunFolder) -> Iterator[None]:
    """Go on with the fine-tuning of the run that `run` names, where that kept its state."""
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
