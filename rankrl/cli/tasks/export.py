"""`task=export`: a compressed network as a verified ONNX file."""

from __future__ import annotations

from rankrl.cli.config import options
from rankrl.cli.config.schema import AppConfig
from rankrl.cli.tasks import ending, steps
from rankrl.cli.tasks.compressed import compressed_from, dense_numbers, method_of
from rankrl.runs.run_folder import RunFolder
from rankrl.verify.measure import cost_ratios, network_numbers


def export(config: AppConfig, folder: RunFolder) -> None:
    """Write `model.onnx`, compare it with PyTorch and time it along with the dense network."""
    options.export_options(config)  # a runtime that is missing is refused before anything is read
    data = options.dataset(config)
    network, dense, plan = compressed_from(config, data)
    metrics = {
        **steps.head(config, data, dense, method_of(plan)),
        "baseline": dense_numbers(config, data, dense),
        "compressed": network_numbers(network, data),
    }
    metadata = ending.file_metadata(plan, metrics)
    original = steps.searched_network(config, data, dense, folder)
    file = original.write(network, folder.onnx, metadata)
    metrics["onnx"] = dict(file.numbers)
    metrics["runtimes"] = file.runtimes
    ending.exported_step(config, network, folder)
    metrics["ratios"] = {
        **cost_ratios(metrics["baseline"], metrics["compressed"]),
        "latency": file.latency.ratio,
    }
    ending.finish(folder, metrics, seed=config.seed)
