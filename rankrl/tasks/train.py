"""`task=train`: a network from scratch."""

from __future__ import annotations

from rankrl.config import options
from rankrl.config.schema import AppConfig
from rankrl.tasks import steps
from rankrl.tasks.registry import register_task
from rankrl.workflow.measure import network_numbers
from rankrl.workflow.network import build_network
from rankrl.workflow.run_folder import RunFolder


@register_task("train", "train a network, from scratch or from model.checkpoint")
def train(config: AppConfig, folder: RunFolder) -> None:
    """Train and write `dense.safetensors`."""
    options.training_recipe(config, None)
    data = options.dataset(config)
    network = build_network(config.model, data, seed=config.seed)
    epochs = steps.dense_training(config, data, network, folder).history
    metrics = {**steps.head(config, data, network), "baseline": network_numbers(network, data)}
    steps.finish(folder, metrics, seed=config.seed, epochs=epochs)
