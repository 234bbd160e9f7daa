"""`task=compare`: selectors side by side."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from rankrl.cli.config import options
from rankrl.cli.config.schema import AppConfig
from rankrl.cli.tasks import ending, steps
from rankrl.plan_search.compare import FinalTest, compared_searches, search_all, tested, winner
from rankrl.report import collect_setup
from rankrl.report.comparison import (
    SHORT,
    ComparisonRow,
    comparison_cells,
    interval_note,
    summarise,
    write_comparison,
)
from rankrl.report.stages import rival_note
from rankrl.runs.run_folder import RunFolder
from rankrl.verify.measure import network_numbers, with_preprocessing


def compare(config: AppConfig, folder: RunFolder) -> None:
    """Search with every selector and seed, fine-tune their plans alike, and write one table.

    Every search keeps its state in `searches/NAME-SEED`; `plan.json` is the plan with the best reward.
    """
    options.check(config, finetuning=config.finetune.epochs > 0)
    entered = compared_searches(options.compared_selectors(config), config.compare.seeds)
    data = options.dataset(config)
    steps.check_budget(config, data)
    recipe = options.comparison_recipe(config, heldout_is_new=steps.heldout_is_new(config, data))
    teacher = steps.teacher(config, data)
    dense = steps.dense_network(config, data, folder)
    network = steps.searched_network(config, data, dense, folder)
    with steps.search_session(config, network) as session:
        results = search_all(session, entered, folder.searches, folder.warn)
    with_preprocessing(winner(results).plan, data).save(folder.plan)
    source = dense if teacher is None else teacher.network
    final = FinalTest(data, source, session.applied, recipe, folder.state / "plans")
    rows = tested(session.problem, results, final)
    metrics = {
        **steps.head(config, data, dense, steps.searched(config)),
        "selector": ",".join(config.compare.selectors),
        "baseline": network_numbers(dense, data),
        "search": {
            "episodes": sum(row.episodes for row in rows),
            "evaluations": sum(row.evaluations for row in rows),
            "seconds": sum(row.seconds for row in rows),
            "best_reward": max(row.best_reward for row in rows),
        },
        "compare": _numbers(rows),
    }
    metrics["dense_int8"] = network.dense_int8()
    ending.add_notes(metrics, folder)
    setup = collect_setup(["rankrl", *sys.argv[1:]], config.seed)
    page = write_comparison(folder.path, rows, metrics, setup)
    ending.track_result(folder, metrics)
    folder.finish(metrics)
    console = Console()
    console.print(_table(rows))
    note = interval_note(summary.runs for summary in summarise(rows))
    if note:
        console.print(f"Numbers: {note}.", soft_wrap=True)
    if rival_note(metrics):
        console.print(f"{rival_note(metrics)}.", soft_wrap=True)
    ending.print_end(console, metrics, page)


def _numbers(rows: list[ComparisonRow]) -> dict[str, Any]:
    """Return the section `compare` of metrics.json."""
    return {
        summary.selector: {
            "runs": summary.runs,
            **{name: asdict(spread) for name, spread in summary.measures.items()},
        }
        for summary in summarise(rows)
    }


def _table(rows: list[ComparisonRow]) -> Table:
    columns, cells = comparison_cells(rows, SHORT)
    table = Table(header_style="bold")
    for index, column in enumerate(columns):
        # Where the terminal is narrow, entries with many options are folded, numbers never.
        table.add_column(
            column,
            justify="right" if index else "left",
            no_wrap=index > 0,
            overflow="fold" if not index else "ellipsis",
        )
    for row in cells:
        table.add_row(*row)
    return table
