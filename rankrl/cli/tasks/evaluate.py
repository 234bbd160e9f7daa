"""`task=evaluate`: accuracy and cost of a network."""

from __future__ import annotations

from rankrl.cli.config import options
from rankrl.cli.config.schema import AppConfig
from rankrl.cli.tasks import ending, steps
from rankrl.cli.tasks.compressed import compressed_from, dense_numbers, method_of
from rankrl.errors import ConfigError
from rankrl.runs.run_folder import RunFolder
from rankrl.training.networks import build_network
from rankrl.verify.measure import cost_ratios, network_numbers


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
        metrics = steps.head(config, data, dense, method_of(plan))
        metrics["baseline"] = dense_numbers(config, data, dense)
        metrics["compressed"] = network_numbers(network, data)
        metrics["ratios"] = cost_ratios(metrics["baseline"], metrics["compressed"])
    else:
        dense = build_network(config.model, data, seed=config.seed)
        metrics = {**steps.head(config, data, dense), "baseline": network_numbers(dense, data)}
    ending.finish(folder, metrics, seed=config.seed)
