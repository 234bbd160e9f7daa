"""`task=evaluate`: accuracy and cost of a network."""

from __future__ import annotations

from rankrl.config import options
from rankrl.config.schema import AppConfig
from rankrl.errors import ConfigError
from rankrl.tasks import steps
from rankrl.tasks.registry import register_task
from rankrl.workflow.measure import network_numbers
from rankrl.workflow.network import build_network
from rankrl.workflow.run_folder import RunFolder


@register_task("evaluate", "test accuracy, parameters and MACs of model.checkpoint or weights=PATH")
def evaluate(config: AppConfig, folder: RunFolder) -> None:
    """Measure the dense network, the compressed one, or both."""
    if not config.weights and not config.model.get("checkpoint"):
        raise ConfigError(
            "task=evaluate needs a trained network: model.checkpoint=PATH, weights=RUN/model.safetensors, "
            "or both"
        )
    data = options.dataset(config)
    dense = build_network(config.model, data, seed=config.seed)
    metrics = steps.head(config, data, dense)
    if config.model.get("checkpoint"):
        metrics["baseline"] = network_numbers(dense, data)
    if config.weights:
        network, _, _ = steps.compressed_from(config, data)
        metrics["compressed"] = network_numbers(network, data)
    steps.finish(folder, metrics, seed=config.seed)
