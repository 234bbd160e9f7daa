"""`task=pipeline`: a trained network in, a smaller one out, with proof."""

from __future__ import annotations

from decomposition import save_compressed
from decomposition.network.surgery import copied
from rankrl.cli.config import options
from rankrl.cli.config.schema import AppConfig
from rankrl.cli.tasks import steps
from rankrl.plan_search.run import search_numbers
from rankrl.runs.run_folder import RunFolder
from rankrl.verify.measure import (
    cost_ratios,
    export_dense,
    export_numbers,
    int8_numbers,
    layer_rows,
    network_numbers,
    test_accuracy,
)
from rankrl.verify.runtimes import runtime_numbers


def pipeline(config: AppConfig, folder: RunFolder) -> None:
    """Run all steps; each finished step is reused when the run is resumed."""
    options.check(config, finetuning=config.finetune.epochs > 0)
    data = options.dataset(config)
    steps.check_budget(config, data)
    dense = steps.dense_network(config, data, folder)
    export_options = options.export_options(config)
    baseline = export_dense(dense, data, folder.state, export_options)
    images = steps.calibration(config, data, dense)
    _, result = steps.chosen_plan(config, data, dense, images, folder)
    plan = result.plan
    compressed = steps.applied_plan(config, data, plan, dense, images)
    rows = layer_rows(plan, dense, compressed)
    finetuned = copied(compressed)
    epochs = steps.finetuned(config, data, finetuned, dense, folder)
    save_compressed(finetuned, plan, folder.model, dense=dense)

    metrics = {
        **steps.head(config, data, dense, steps.searched(config)),
        "baseline": network_numbers(dense, data),
        "compressed": network_numbers(compressed, data),
        "finetuned": {"accuracy": test_accuracy(finetuned, data)},
        "search": search_numbers(result),
    }
    metrics["onnx"], latency = export_numbers(
        finetuned,
        baseline,
        data,
        folder.onnx,
        export_options,
        metadata=steps.file_metadata(plan, metrics),
        scratch=folder.state,
    )
    steps.exported_step(config, finetuned, folder)
    metrics["dense_int8"] = int8_numbers(baseline, data, export_options, folder.state)
    metrics["runtimes"] = runtime_numbers(
        finetuned, baseline, folder.onnx, data, export_options, known=metrics["onnx"], scratch=folder.state
    )
    metrics["ratios"] = {**cost_ratios(metrics["baseline"], metrics["compressed"]), "latency": latency}
    steps.check_collapse(folder, metrics, data)
    steps.finish(folder, metrics, seed=config.seed, layers=rows, epochs=epochs)
