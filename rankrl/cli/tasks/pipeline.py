"""`task=pipeline`: a trained network in, a smaller one out, with proof."""

from __future__ import annotations

from rankrl.cli.config import options
from rankrl.cli.config.schema import AppConfig
from rankrl.cli.tasks import ending, steps
from rankrl.plan_search.run import as_numbers, search_numbers
from rankrl.runs.run_folder import RunFolder


def pipeline(config: AppConfig, folder: RunFolder) -> None:
    """Run all steps; each finished step is reused when the run is resumed."""
    options.check(config, finetuning=config.finetune.epochs > 0)
    data = options.dataset(config)
    steps.check_budget(config, data)
    teacher = steps.teacher(config, data)
    dense = steps.dense_network(config, data, folder)
    network = steps.searched_network(config, data, dense, folder)
    if not network.export.skip:
        _ = network.baseline  # a network that cannot be exported is refused before the search
    _, result = steps.chosen_plan(config, network, folder)
    compressed = network.applied(result.plan)
    metrics = {
        **steps.head(config, data, dense, steps.searched(config)),
        "search": search_numbers(result),
        **as_numbers(result.layers),
    }
    ending.finish_compressed(config, network, result.plan, compressed, metrics, folder, taught_by=teacher)
