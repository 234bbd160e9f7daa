"""`task=train`: a network from scratch."""

from __future__ import annotations

from rankrl.cli.config import options
from rankrl.cli.config.schema import AppConfig
from rankrl.cli.tasks import ending, steps
from rankrl.runs.run_folder import RunFolder
from rankrl.training.networks import build_network
from rankrl.verify.measure import network_numbers


def train(config: AppConfig, folder: RunFolder) -> None:
    """Train and write `dense.safetensors`."""
    options.training_recipe(config, None)
    data = options.dataset(config)
    network = build_network(config.model, data, seed=config.seed)
    epochs = steps.dense_training(config, data, network, folder).history
    metrics = {**steps.head(config, data, network), "baseline": network_numbers(network, data)}
    ending.finish(folder, metrics, seed=config.seed, epochs=epochs)
