"""`task=apply`: carry out a plan."""

from __future__ import annotations

from decomposition import CompressionPlan, save_compressed
from rankrl.cli.config import options
from rankrl.cli.config.schema import AppConfig
from rankrl.cli.tasks import ending, steps
from rankrl.cli.tasks.compressed import check_plan, method_of
from rankrl.errors import ConfigError
from rankrl.runs.run_folder import RunFolder
from rankrl.verify.measure import cost_ratios, layer_rows, network_numbers, with_preprocessing


def apply(config: AppConfig, folder: RunFolder) -> None:
    """Write the compressed network as `model.safetensors`."""
    if not config.plan:
        raise ConfigError("task=apply needs plan=RUN/plan.json, the plan of an earlier run or your own")
    plan = CompressionPlan.load(config.plan)
    data = options.dataset(config)
    check_plan(config, data, plan)
    plan = with_preprocessing(plan, data)
    dense = steps.dense_network(config, data, folder)
    compressed = steps.searched_network(config, data, dense, folder).applied(plan)
    save_compressed(compressed, plan, folder.model, dense=dense)
    plan.save(folder.plan)
    before, after = network_numbers(dense, data), network_numbers(compressed, data)
    ratios = cost_ratios(before, after)
    metrics = {
        **steps.head(config, data, dense, method_of(plan)),
        "baseline": before,
        "compressed": after,
        "ratios": ratios,
    }
    rows = layer_rows(plan, dense, compressed)
    ending.check_collapse(folder, metrics, data)
    ending.finish(folder, metrics, seed=config.seed, layers=rows)
