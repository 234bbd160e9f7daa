"""Selectors on many tasks: what their plans give away after no, few and many evaluations.

    RANKRL_DATA=data RANKRL_CHECKPOINTS=checkpoints python scripts/leaderboard.py --folder RUNS \
        --rows scripts/results/leaderboard.csv --output docs/leaderboard.md

Tasks are those of `leaderboard.yaml`: a network, the formats that its layers choose from, and a budget. Every
selector searches with the same held-out images. Its best plan after so many evaluations, and the one that it
proposes before any, are then scored after the refit on other held-out images. Its regret is what the best
plan that anyone found for the task scores more. Rows are kept in a CSV file, searches and trained networks
in the folder: a killed run goes on, and tasks, selectors and seeds are added to those that are there.
With `--bench` tasks are those of RankBench, whose tables answer in milliseconds.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from bench_frame import ResultRows, command_line, markdown, publish, say
from leaderboard_tasks import TASKS, Opened, Task, opened, read_tasks
from made_inputs import MissingFileError
from matplotlib.figure import Figure

from decomposition import DecompositionError
from rankrl import reuse_memory
from rankrl.bench.task import answering_tasks
from rankrl.cli.config.compose import load_plugins
from rankrl.cli.tasks.task_run import selector_entry
from rankrl.device import processor_name
from rankrl.errors import RankrlError, counted
from rankrl.files import write_atomically
from rankrl.options.search import SearchOptions
from rankrl.plan_search.compare import compared_searches, search_all
from rankrl.plan_search.run import SearchResult, run_search
from rankrl.plan_search.scores.evaluation import EpisodeRow, best_rows
from rankrl.plan_search.selectors import SelectorEntry, create_selector
from rankrl.plan_search.space.problem import Choices
from rankrl.report.figures import PALETTE, style_axes, upper_legend

AFTER = (0, 1, 5, 20, 100)
PREDICTED = "greedy, predicted losses"
GREEDY = "greedy"
SELECTORS = (
    *("uniform", "energy", "vbmf", PREDICTED, GREEDY, "divergence"),
    *("random", "local", "tpe", "cmaes", "bayes", "ddpg"),
)
OF_TABLES = (GREEDY, *SELECTORS[6:])
"""Selectors that need no weights."""
AT_ONCE = (PREDICTED, GREEDY, "divergence")
"""Selectors of one plan whose plans are fine-tuned."""
KEY = ("task", "selector", "seed", "search", "evaluations")
VALUES = ("score", "accuracy", "seconds", "task_seconds", "machine")
_COLOURS = tuple(colour for name, colour in PALETTE.items() if name.startswith("series-"))
_RESAMPLES = 10_000
_TUNED_TASKS = 4


def selector(text: str) -> SelectorEntry:
    """Read a selector of the command line; `PREDICTED` is greedy without measured divergences."""
    return replace(selector_entry(GREEDY if text == PREDICTED else text), text=text)


def after(evaluations: int) -> list[int]:
    """List after how many evaluations the plans of a search are judged."""
    return sorted({*(each for each in AFTER if each < evaluations), evaluations})


def best_plans(rows: Sequence[EpisodeRow], ends: Iterable[int]) -> dict[int, Choices]:
    """Find the best plan after some numbers of evaluations, by their number; after 0 that is the first."""
    return {end: best_rows(rows[: max(1, end)], 1)[0].key for end in ends}


def run(task: Task, options: argparse.Namespace, kept: ResultRows) -> None:
    """Add the rows of a task that are missing."""

    def key(one: SelectorEntry, seed: int, evaluations: int) -> dict[str, Any]:
        values = (task.name, one.text, seed, options.evaluations, evaluations)
        return dict(zip(KEY, values, strict=True))

    known = [row for row in kept.rows if row["task"] == task.name]
    searches = [(each.seed or 0, each.entry) for each in compared_searches(options.selectors, options.seeds)]
    missing = [(seed, one) for seed, one in searches if not kept.find(key(one, seed, options.evaluations))]
    if not missing:
        return
    with opened(task, options.folder, options.images) as ready:
        about = {"machine": processor_name()}
        about["task_seconds"] = known[0]["task_seconds"] if known else f"{ready.seconds:.1f}"
        for seed, one in missing:
            try:
                rows = _judged(ready, _searched(ready, task, one, seed, options), options)
            except (RankrlError, DecompositionError) as error:
                say(f"{task.name}: {one.text}: {error}")
                continue
            for evaluations, values in rows.items():
                if not kept.find(key(one, seed, evaluations)):
                    kept.add(key(one, seed, evaluations), about | values)
            say(f"{task.name}: {one.text}, seed {seed}: {rows}")


def of_bench(options: argparse.Namespace) -> list[dict[str, str]]:
    """Search RankBench's tables: rows of all selectors and seeds, and of the best plan of each table."""
    rows, limits = [], SearchOptions(episodes=options.evaluations)
    searches = compared_searches(options.selectors, options.seeds)
    for task in answering_tasks([options.tasks]):
        best = {"selector": "the table", "score": f"{task.table.judged.max():.6f}"}
        rows.append({"task": task.name, "search": "", **best})
        found = search_all(task.problem, limits, partial(task.searched, limits), searches)
        for compared, result in found.items():
            for end, plan in best_plans(result.rows, after(options.evaluations)).items():
                values = (task.name, compared.entry.text, compared.seed or 0, options.evaluations, end)
                row = dict(zip(KEY, map(str, values), strict=True))
                rows.append(row | {"score": f"{task.judged(plan):.6f}", "seconds": f"{result.seconds:.2f}"})
        say(f"{task.name}: searched")
    return rows


def _searched(
    ready: Opened, task: Task, one: SelectorEntry, seed: int, options: argparse.Namespace
) -> SearchResult:
    """Search, or read the search that is in the folder."""
    episodes = options.evaluations
    folder = options.folder / task.name.replace(" ", "-") / f"{one.folder_name}-{seed}-{episodes}"
    problem = ready.predicted() if one.text == PREDICTED else ready.session.problem
    ready.session.evaluator.restore({})  # what one has scored must not help the next
    selector = create_selector(one.selector, problem, seed=seed, episodes=episodes, **one.options)
    evaluator = ready.session.evaluator
    return run_search(problem, evaluator, selector, episodes=episodes, folder=folder, resume=True)


def _judged(ready: Opened, result: SearchResult, options: argparse.Namespace) -> dict[int, dict[str, str]]:
    """Judge plans: the values of rows by evaluations."""
    judged = {}
    for evaluations, plan in best_plans(result.rows, after(options.evaluations)).items():
        score, accuracy = ready.judge(plan)
        judged[evaluations] = {
            "score": f"{score:.6f}",
            "accuracy": "" if accuracy is None else f"{accuracy:.4f}",
            "seconds": f"{result.seconds:.1f}",
        }
    return judged


@dataclass(frozen=True)
class Board:
    """Hold mean regrets over the seeds, on tasks on which all selectors were judged."""

    selectors: tuple[str, ...]
    tasks: tuple[str, ...]
    evaluations: tuple[int, ...]
    regrets: np.ndarray  # (selectors, tasks, evaluations)
    seconds: np.ndarray  # (selectors, tasks)

    @classmethod
    def of(
        cls, rows: Sequence[Mapping[str, str]], evaluations: int, selectors: Sequence[str] = SELECTORS
    ) -> Board:
        """Take regrets to the best plan of all rows; selectors without any row are left out."""
        shown = [row for row in rows if row["search"] == str(evaluations) and row["selector"] in selectors]
        names = tuple(name for name in selectors if any(row["selector"] == name for row in shown))
        ends = tuple(after(evaluations))
        groups: dict[tuple[str, str, int], list[Mapping[str, str]]] = {}
        for row in shown:
            groups.setdefault((row["selector"], row["task"], int(row["evaluations"])), []).append(row)
        tasks = tuple(
            task
            for task in dict.fromkeys(row["task"] for row in shown)
            if all((name, task, end) in groups for name in names for end in ends)
        )
        best = {
            task: max(float(row["score"]) for row in rows if row["task"] == task and row["score"])
            for task in tasks
        }

        def mean(name: str, task: str, end: int, column: str) -> float:
            return float(np.mean([float(row[column]) for row in groups[name, task, end]]))

        regrets = [
            [[best[task] - mean(name, task, end, "score") for end in ends] for task in tasks]
            for name in names
        ]
        seconds = [[mean(name, task, ends[-1], "seconds") for task in tasks] for name in names]
        return cls(names, tasks, ends, np.array(regrets), np.array(seconds))

    def of_selector(self, name: str, evaluations: int) -> np.ndarray:
        """Select the regrets of a selector after so many evaluations, (tasks,)."""
        of_all: np.ndarray = self.regrets[self.selectors.index(name), :, self.evaluations.index(evaluations)]
        return of_all

    def against(self, name: str, evaluations: int) -> str:
        """Count on how many tasks a selector's plan is better, and worse, than greedy's."""
        gains = self.of_selector(GREEDY, evaluations) - self.of_selector(name, evaluations)
        return f"{int((gains > 1e-9).sum())} / {int((gains < -1e-9).sum())}"


def interval(values: np.ndarray) -> tuple[float, float]:
    """Draw the 95 % bootstrap interval of a mean, (tasks,) values, tasks drawn with replacement."""
    drawn = np.random.default_rng(0).integers(len(values), size=(_RESAMPLES, len(values)))
    low, high = np.quantile(values[drawn].mean(1), (0.025, 0.975))
    return float(low), float(high)


def _cell(values: np.ndarray) -> str:
    low, high = interval(values)
    return f"{100 * values.mean():.2f} ({100 * low:.2f} to {100 * high:.2f})"


def report(board: Board) -> str:
    """Make the table, in points of the score, the least regret first."""
    last, shown = board.evaluations[-1], [end for end in board.evaluations if end != 1]
    head = ["selector", *(f"regret at {end}" for end in shown), "less regret than greedy at 0"]
    head += [f"better / worse than greedy at {end}" for end in (0, last)] + ["seconds"]
    lines = []
    for name in sorted(board.selectors, key=lambda name: board.of_selector(name, last).mean()):
        cells = [_cell(board.of_selector(name, end)) for end in shown]
        cells.append(
            "" if name == GREEDY else _cell(board.of_selector(GREEDY, 0) - board.of_selector(name, 0))
        )
        cells += [board.against(name, end) if name != GREEDY else "" for end in (0, last)]
        cells.append(f"{board.seconds[board.selectors.index(name)].mean():.1f}")
        lines.append([f"`{name}`", *cells])
    return markdown(head, lines)


def finetuned(board: Board, tasks: Mapping[str, Task], options: argparse.Namespace) -> str:
    """Make a table of accuracies after the refit and after fine-tuning, in %.

    Its tasks are those whose plans at 0 differ most between the selectors of one plan, files left out.
    """
    names = [name for name in AT_ONCE if name in board.selectors]
    regrets = np.stack([board.of_selector(name, 0) for name in names])
    widest = np.argsort(-np.ptp(regrets, axis=0), kind="stable")
    lines: list[list[str]] = []
    for index in widest:
        task = tasks[board.tasks[index]]
        with opened(task, options.folder, options.images) as ready:
            if ready.tuned is None:
                continue
            tuned = cache(ready.tuned)  # selectors may have the same plan
            cells = []
            for name in names:
                plan = _searched(ready, task, selector(name), options.seeds[0], options).rows[0].key
                before, now = tuned(plan, options.finetune)
                cells.append(f"{100 * before:.1f} → {100 * now:.1f}")
        lines.append([task.name, *cells])
        say(", ".join(lines[-1]))
        if len(lines) == _TUNED_TASKS:
            break
    return markdown(["task", *(f"`{name}`" for name in names)], lines)


def picture(board: Board) -> Figure:
    """Draw mean regrets over evaluations; a selector of one plan is a level line.

    Selectors that end with more regret than greedy are left out, for the others' sake, but for greedy with
    predicted losses.
    """
    figure = Figure(figsize=(7.2, 4.8), layout="constrained")
    axes = figure.subplots()
    style_axes(axes, "evaluations", "mean regret, points of the score")
    means = dict(zip(board.selectors, 100 * board.regrets.mean(1), strict=True))
    shown = [name for name in means if name == PREDICTED or means[name][-1] <= means[GREEDY][-1]]
    for index, name in enumerate(shown):
        line = (":" if np.ptp(means[name]) == 0 else "-") if index < len(_COLOURS) else "--"
        colour = PALETTE["ink"] if name == GREEDY else _COLOURS[index % len(_COLOURS)]
        axes.plot(means[name], label=name, color=colour, linestyle=line, linewidth=1.7)
    axes.set_xticks(range(len(board.evaluations)), [str(end) for end in board.evaluations])
    axes.set_ylim(bottom=0)
    upper_legend(figure, columns=2)
    return figure


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = command_line(__doc__)
    parser.add_argument("--folder", type=Path, help="where searches and networks are kept")
    parser.add_argument("--rows", type=Path, help="CSV file of the rows")
    parser.add_argument("--yaml", type=Path, default=TASKS, help="file of the tasks")
    parser.add_argument("--tasks", default="*", help="pattern of names")
    parser.add_argument("--selectors", nargs="+")
    parser.add_argument(
        "--plugins", nargs="+", default=[], metavar="MODULE", help="register what they define"
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--evaluations", type=int, default=20, help="of a search")
    parser.add_argument("--images", type=int, default=1000, help="held-out images, or inputs, of a search")
    parser.add_argument("--bench", action="store_true", help="search the tables of RankBench")
    parser.add_argument("--report", action="store_true", help="run nothing, report the rows that are there")
    parser.add_argument("--section", default="leaderboard", help="name of that section")
    parser.add_argument(
        "--finetune",
        type=int,
        metavar="STEPS",
        help="print what plans at 0 become after so many steps, of the tasks where they differ most",
    )
    parser.add_argument("--picture", type=Path, help="PNG file to draw the regrets in")
    options = parser.parse_args(arguments)
    if not options.bench and (options.folder is None or options.rows is None):
        parser.error("--folder and --rows are needed, but for --bench")
    try:
        load_plugins(options.plugins)
        names = options.selectors or (OF_TABLES if options.bench else SELECTORS)
        options.selectors = [*map(selector, names)]
    except RankrlError as error:
        parser.error(str(error))
    return options


def main() -> None:
    """Run what is missing, print the table, and perhaps save it and the picture."""
    options = parse()
    if options.bench:
        board = Board.of(of_bench(options), options.evaluations, [each.text for each in options.selectors])
        note = f"{counted(len(board.tasks), 'table')}, {counted(len(options.seeds), 'seed')}."
        publish(f"{note}\n\n{report(board)}", options.output, section="bench", title="Selectors on RankBench")
        return
    options.folder.mkdir(parents=True, exist_ok=True)
    kept = ResultRows(options.rows, KEY, VALUES)
    tasks = read_tasks(options.yaml, options.tasks)
    for task in [] if options.report else tasks:
        try:
            run(task, options, kept)
        except (MissingFileError, RankrlError, DecompositionError) as error:
            say(f"{task.name}: {error}")
    named = {task.name: task for task in tasks}
    rows = [row for row in kept.rows if row["task"] in named]
    board = Board.of(rows, options.evaluations, [each.text for each in options.selectors])
    if not board.tasks:
        sys.exit("leaderboard.py: there is no task yet with rows of all these selectors")
    if GREEDY not in board.selectors:
        sys.exit(f"leaderboard.py: the others are compared with {GREEDY}; name it in --selectors, too")
    left = len({row["task"] for row in rows}) - len(board.tasks)
    note = f"{len(board.tasks)} tasks; {left} more lack rows of some selectors."
    table = finetuned(board, named, options) if options.finetune else report(board)
    short: dict[Path | None, str] = {options.folder: "RUNS"}
    publish(
        f"{note}\n\n{table}",
        options.output,
        section=options.section,
        title="Leaderboard of selectors",
        shortened=short,
    )
    if options.picture:
        drawn = io.BytesIO()
        picture(board).savefig(drawn, format="png", dpi=150, facecolor="white")
        write_atomically(options.picture, drawn.getvalue())


if __name__ == "__main__":
    reuse_memory()
    main()
