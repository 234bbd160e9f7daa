"""Fill RankBench's tables: score many plans of many tasks, a row each.

    RANKRL_DATA=data RANKRL_CHECKPOINTS=checkpoints python scripts/rankbench.py --folder TABLES \
        --tasks "separable *" --plans 400

Tasks are those of `leaderboard.yaml`, but for budgets in time. Plans are greedy's, plans around it by random
importances of three widths, random ones that spend the budget, and those of searches. Each is scored as
searches score it, and judged after the refit on images that no search sees. A killed run goes on: plans that
have a row are not scored again.
`--pack FILE` then writes the tables as RankBench's file, and prints what each task is worth. `--speed` times
queries of RankBench and steps of its environment.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import gymnasium
import numpy as np
import torch
from bench_frame import ResultRows, command_line, markdown, publish, say
from leaderboard_tasks import TASKS, Opened, opened, read_tasks
from made_inputs import MissingFileError
from scipy.stats import spearmanr

from decomposition import DecompositionError
from rankrl import reuse_memory
from rankrl.bench import BenchTask, Surrogate, Table, bench_task, write_tables
from rankrl.device import processor_name
from rankrl.errors import RankrlError
from rankrl.files import write_json
from rankrl.plan_search.envs.actions import create_action_map
from rankrl.plan_search.selectors import create_selector
from rankrl.plan_search.selectors.random_plans import random_choices
from rankrl.plan_search.space.problem import Choices, SearchProblem
from rankrl.plan_search.space.problem_file import problem_from_json, problem_to_json

KEY, VALUES = ("choices",), ("source", "score", "judged", "accuracy")
WIDTHS = (0.15, 0.4, 1.0)
SEARCHES = ("cmaes", "bayes", "local")
_SHARES = {"importance": 0.45, "random": 0.1}  # the rest are plans of searches
_SEED = 0
SPEED_TASKS = ("separable tucker params 0.35", "transformer tucker params 0.3")
_ENVIRONMENTS, _STEPS, _PLANS = 16, 2000, 1000


def rows_of(folder: Path) -> ResultRows:
    """Read the rows of a task's plans, in the order in which they were measured."""
    return ResultRows(folder / "plans.csv", KEY, VALUES)


def plan_of(row: Mapping[str, str]) -> Choices:
    """Return the plan of a row."""
    return tuple(map(int, row["choices"].split()))


def drawn(problem: SearchProblem, plans: int) -> Iterator[tuple[Choices, str]]:
    """Draw plans without looking at scores: greedy's, around it, at random; in a mixed order."""
    generator = np.random.default_rng(_SEED)
    actions = create_action_map(problem, "importance")
    yield tuple(problem.preset.tolist()), "greedy"
    around, at_random = (round(plans * _SHARES[name]) for name in ("importance", "random"))
    sources = [f"importance {width}" for width in WIDTHS] * (around // len(WIDTHS)) + ["random"] * at_random
    for source in generator.permutation(sources):
        if source == "random":
            yield tuple(map(int, random_choices(problem, generator))), str(source)
        else:
            noise = float(source.split()[1]) * generator.standard_normal(len(problem.sites))
            yield tuple(map(int, actions.choices_of(noise.clip(-1, 1)))), str(source)


def measure(ready: Opened, rows: ResultRows, plans: int) -> None:
    """Add rows until there are that many."""
    problem = ready.session.problem
    known = {plan_of(row): float(row["score"]) for row in rows.rows}

    def score(plan: Choices, source: str) -> float:
        if plan not in known:
            (evaluation,) = ready.session.evaluator.evaluate([plan])
            numbers = zip(VALUES[1:], (evaluation.score, *ready.judge(plan)), strict=True)
            shown = {name: "" if number is None else f"{number:.6f}" for name, number in numbers}
            rows.add({"choices": " ".join(map(str, plan))}, {"source": source, **shown})
            known[plan] = float(shown["score"])
        return known[plan]

    for plan, source in drawn(problem, plans):
        score(plan, source)
    for seed in range(100):
        for name in SEARCHES:
            episodes = max(20, round(plans * 0.15))
            selector = create_selector(name, problem, seed=seed, episodes=episodes)
            while selector.observed < episodes:
                if len(known) >= plans:
                    return
                proposals = selector.propose()
                selector.observe(proposals, [score(each.choices, name) for each in proposals])


def table_of(folder: Path) -> Table:
    """Read a task's folder."""
    content = json.loads((folder / "task.json").read_text(encoding="utf-8"))
    rows = rows_of(folder).rows
    return Table(
        content["name"],
        content["family"],
        content["network"],
        problem_from_json(content["problem"], str(folder)),
        np.array([plan_of(row) for row in rows]),
        tuple(row["source"] for row in rows),
        np.array([float(row["score"]) for row in rows]),
        np.array([float(row["judged"]) for row in rows]),
        {"machine": processor_name(), "torch": torch.__version__},
    )


def pack(folder: Path, target: Path, least: int) -> str:
    """Write all tables of at least so many plans as one file, and list them."""
    folders = sorted(path.parent for path in folder.glob("*/task.json"))
    tables = [table for table in map(table_of, folders) if len(table) >= least]
    for number, table in enumerate(tables):
        known = Surrogate(table.problem, table.choices, table.scores).correlation
        tables[number] = replace(table, about={**table.about, "correlation": round(known, 3)})
    write_tables(tables, target)
    lines = []
    for table in tables:
        best = int(table.judged.argmax())
        lines.append(
            [
                table.name,
                str(len(table.problem.sites)),
                str(len(table)),
                f"{100 * table.judged[0]:.2f}",
                f"{100 * table.prize:.2f}",
                table.sources[best],
                f"{spearmanr(table.scores, table.judged).statistic:.3f}",
                str(table.about["correlation"]),
            ]
        )
    head = ["task", "layers", "plans", "greedy", "prize", "best is from", "search and judge", "surrogate"]
    return markdown(head, lines)


def microseconds(task: BenchTask, plans: Sequence[Choices]) -> str:
    """Time a query, the mean over some plans."""
    task.score(plans[0])  # a surrogate is fitted at its first query
    begun = time.perf_counter()
    for plan in plans:
        task.score(plan)
    return f"{1e6 * (time.perf_counter() - begun) / len(plans):.0f}"


def speed(names: Sequence[str]) -> str:
    """Time plans that a table holds, plans that it lacks, and environments with random actions."""
    lines = []
    for name in names:
        task = bench_task(name)
        known = list(task.table.rows)
        others = [plan for plan, _ in drawn(task.problem, _PLANS) if plan not in task.table.rows]
        env = gymnasium.make_vec("rankrl/RankBench-v0", num_envs=_ENVIRONMENTS, task=name)
        env.reset(seed=_SEED)
        env.action_space.seed(_SEED)
        cells = [name, str(len(task.problem.sites)), microseconds(task, known), microseconds(task, others)]
        begun = time.perf_counter()
        for _ in range(_STEPS):
            env.step(env.action_space.sample())
        lines.append([*cells, f"{_ENVIRONMENTS * _STEPS / (time.perf_counter() - begun):.0f}"])
    steps = f"steps a second, {_ENVIRONMENTS} environments"
    return markdown(["task", "layers", "µs a plan of the table", "µs a predicted plan", steps], lines)


def main() -> None:
    """Measure what is missing of every task."""
    parser = command_line(__doc__)
    parser.add_argument("--folder", type=Path, help="where tables and networks are kept")
    parser.add_argument("--yaml", type=Path, default=TASKS, help="file of the tasks")
    parser.add_argument("--tasks", default="*", help="pattern of names")
    parser.add_argument("--plans", type=int, default=400, help="of a task; for --pack, at least")
    parser.add_argument("--images", type=int, default=1000, help="held-out images, or inputs, of a search")
    parser.add_argument("--pack", type=Path, metavar="FILE", help="measure nothing, write RankBench's file")
    parser.add_argument("--speed", action="store_true", help="measure no plans, time RankBench")
    options = parser.parse_args()
    if options.speed:
        publish(speed(SPEED_TASKS), options.output, section="speed", title="Speed")
        return
    if options.folder is None:
        parser.error("--folder is needed, but for --speed")
    if options.pack:
        table = pack(options.folder, options.pack, options.plans)
        short: dict[Path | None, str] = {options.folder: "TABLES"}
        publish(table, options.output, section="rankbench", title="RankBench's tasks", shortened=short)
        return
    options.folder.mkdir(parents=True, exist_ok=True)
    for task in read_tasks(options.yaml, options.tasks, ("tasks", "bench")):
        if task.measure == "latency":  # measured times differ from run to run
            continue
        folder = options.folder / task.name.replace(" ", "_")
        folder.mkdir(exist_ok=True)
        rows = rows_of(folder)
        if len(rows.rows) >= options.plans:
            continue
        try:
            with opened(task, options.folder, options.images) as ready:
                content = json.loads(json.dumps(problem_to_json(ready.session.problem)))
                about = {"name": task.name, "family": task.network.family, "network": task.network.name}
                write_json(folder / "task.json", {**about, "problem": content})
                measure(ready, rows, options.plans)
        except (MissingFileError, RankrlError, DecompositionError) as error:
            print(f"{task.name}: {error}", file=sys.stderr, flush=True)
            continue
        say(f"{task.name}: {len(rows.rows)} plans")


if __name__ == "__main__":
    reuse_memory()
    main()
