"""`task=export`: a compressed network as a verified ONNX file."""

from __future__ import annotations

from rankrl.cli.config import options
from rankrl.cli.config.schema import AppConfig
from rankrl.cli.tasks import steps
from rankrl.cli.tasks.compressed import compressed_from, dense_numbers, method_of
from rankrl.runs.run_folder import RunFolder
from rankrl.verify.measure import cost_ratios, export_dense, export_numbers, network_numbers
from rankrl.verify.runtimes import runtime_numbers


def export(config: AppConfig, folder: RunFolder) -> None:
    """Write `model.onnx`, compare it with PyTorch and time it beside the dense network."""
    export_options = options.export_options(config)
    data = options.dataset(config)
    network, dense, plan = compressed_from(config, data)
    metrics = {
        **steps.head(config, data, dense, method_of(plan)),
        "baseline": dense_numbers(config, data, dense),
        "compressed": network_numbers(network, data),
    }
    metadata = steps.file_metadata(plan, metrics)
    baseline = export_dense(dense, data, folder.state, export_options)
    metrics["onnx"], latency = export_numbers(
        network, baseline, data, folder.onnx, export_options, metadata=metadata, scratch=folder.state
    )
    metrics["runtimes"] = runtime_numbers(
        network, baseline, folder.onnx, data, export_options, known=metrics["onnx"], scratch=folder.state
    )
    steps.exported_step(config, network, folder)
    metrics["ratios"] = {**cost_ratios(metrics["baseline"], metrics["compressed"]), "latency": latency}
    steps.finish(folder, metrics, seed=config.seed)
