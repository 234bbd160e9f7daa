"""`task=search`: a plan, and nothing else."""

from __future__ import annotations

from rankrl.cli.config import options
from rankrl.cli.config.schema import AppConfig
from rankrl.cli.tasks import ending, steps
from rankrl.plan_search.run import search_numbers
from rankrl.runs.run_folder import RunFolder
from rankrl.verify.measure import layer_rows


def search(config: AppConfig, folder: RunFolder) -> None:
    """Search and write the plan; no test image is read."""
    options.check(config, finetuning=False)
    data = options.dataset(config)
    steps.check_budget(config, data)
    dense = steps.dense_network(config, data, folder)
    network = steps.searched_network(config, data, dense, folder)
    problem, result = steps.chosen_plan(config, network, folder)
    cost = problem.cost(result.row.key)
    metrics = {
        **steps.head(config, data, dense, steps.searched(config)),
        "search": search_numbers(result),
        "ratios": {"params": problem.params / cost.params, "macs": problem.macs / cost.macs},
    }
    ending.finish(folder, metrics, seed=config.seed, layers=layer_rows(result.plan, dense))
