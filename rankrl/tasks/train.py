"""`task=train`: a network from scratch."""

from __future__ import annotations

from rankrl.config import options
from rankrl.config.schema import AppConfig
from rankrl.models import save_checkpoint
from rankrl.tasks import steps
from rankrl.tasks.registry import register_task
from rankrl.workflow.measure import network_numbers
from rankrl.workflow.network import build_network, run_training
from rankrl.workflow.run_folder import RunFolder


@register_task("train", "train a network, from scratch or from model.checkpoint")
def train(config: AppConfig, folder: RunFolder) -> None:
    """Train and write `dense.safetensors`."""
    recipe = options.training_recipe(config)
    data = options.dataset(config)
    network = build_network(config.model, data, seed=config.seed)
    state = folder.state / "train.safetensors"
    track = folder.tracking.epochs("train")
    epochs = run_training("train", network, data, recipe, state_file=state, on_epoch=track).history
    save_checkpoint(network, folder.dense)
    metrics = {**steps.head(config, data), "baseline": network_numbers(network, data)}
    steps.finish(folder, metrics, seed=config.seed, epochs=epochs)
