"""What selectors find at equal evaluations, judged on other images than they searched with.

    RANKRL_DATA=data python scripts/selector_curves.py --folder curves \
        --task resnet20:cifar100-resnet20.pt:cifar100:tucker:params:0.25 \
        --entries greedy random local tpe bayes bayes:policy=pretrained_refitted --output docs/benchmarks.md

The task is MODEL:CHECKPOINT:DATASET:FORMAT:MEASURE:FRACTION, an entry a selector with its options. Every
search scores its plans on the first held-out images (`--images`, `--term`). The best plan after so many
evaluations is then judged by its accuracy on the last held-out images (`--judged`), so that a plan which was
lucky in the search gains nothing by it. With `--statistics refitted` searches see what plans become, and so
does the judge; a folder is for one kind of score. With `--refit` the plan that each search ends with is
applied, layer by layer, and judged by the same images; with `--finetune EPOCHS` it is then fine-tuned by
the recipe of `finetune=full`, and its last epoch tested. Searches and judgements are kept in the folder: a
killed run goes on, and more entries or seeds are added to those that are there. A policy that knows the task
is refused.
"""

from __future__ import annotations

import argparse
import io
import itertools
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import get_args

import numpy as np
import torch
from matplotlib.figure import Figure
from result_rows import ResultRows
from torch import nn
from transfer import Asked, Prepared, augmented_accuracy, finetuned_accuracy

from decomposition import apply_plan
from rankrl import reuse_memory
from rankrl.cli.config.entries import selector_entry
from rankrl.data import Images
from rankrl.errors import RankrlError
from rankrl.files import write_atomically
from rankrl.options.scores import Statistics, Term
from rankrl.plan_search.agents.policy_file import read_policy
from rankrl.plan_search.pretraining.episodes import task_of
from rankrl.plan_search.run import SearchResult, run_search
from rankrl.plan_search.scores.evaluation import Evaluator
from rankrl.plan_search.scores.evaluator import EvaluatorOptions
from rankrl.plan_search.scores.history import EpisodeRow
from rankrl.plan_search.selectors import SelectorEntry, create_selector, selector_is_seeded, selector_options
from rankrl.plan_search.space.problem import Choices, SearchProblem
from rankrl.report.axes import percent_axis
from rankrl.report.comparison import Spread, milestones
from rankrl.report.figures import PALETTE, style_axes, upper_legend
from rankrl.report.markdown import shown_command, write_section
from rankrl.report.provenance import hardware_line

_COLOURS = tuple(colour for name, colour in PALETTE.items() if name.startswith("series-"))
_DASHES = ((0, (1, 1.5)), (0, (5, 2)), (0, (5, 2, 1, 2)))
DENSE, GREEDY = "the dense network", "greedy's plan"
REFIT, TUNED = "refitted", "fine-tuned, test"


def entry(text: str) -> SelectorEntry:
    """Read an entry of the command line.

    Raises:
        argparse.ArgumentTypeError: There is no such selector or option, or a value does not suit it.
    """
    try:
        return selector_entry(text)
    except RankrlError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def seeds_of(one: SelectorEntry, seeds: Sequence[int]) -> Sequence[int]:
    """Return the seeds to search with; the first alone where nothing is drawn."""
    return seeds if selector_is_seeded(one.selector) else seeds[:1]


@dataclass(frozen=True)
class Curve:
    """A search.

    Attributes:
        entry: What searched.
        seed: Its seed.
        judged: Accuracy, on the judging images, of its best plan after so many evaluations.
        applied: What became of the plan that it ended with, by what was done: accuracies.
    """

    entry: str
    seed: int
    judged: Mapping[int, float]
    applied: Mapping[str, float] = field(default_factory=dict)

    def at(self, evaluations: int) -> float:
        """Return the accuracy after so many evaluations; a search that ended keeps what it had."""
        return self.judged[max(after for after in self.judged if after <= evaluations)]


def best_plans(rows: Sequence[EpisodeRow], ends: Iterable[int]) -> dict[int, Choices]:
    """Return the best plan after some numbers of evaluations, by their number; after 0 that is the first."""
    return {end: max(rows[: max(1, end)], key=lambda row: row.reward).key for end in ends}


def search(
    problem: SearchProblem,
    evaluator: Evaluator,
    one: SelectorEntry,
    *,
    seed: int,
    episodes: int,
    folder: Path,
) -> SearchResult:
    """Search, or read the search that is in the folder."""
    evaluator.restore({})  # what one has scored must not help the next
    known = {"policy": None} if "policy" in selector_options(one.selector) else {}  # but for a named one
    options = {**known, **one.options}
    selector = create_selector(one.selector, problem, seed=seed, episodes=episodes, **options)
    return run_search(problem, evaluator, selector, episodes=episodes, folder=folder, resume=True)


def measured(options: argparse.Namespace) -> tuple[list[Curve], dict[str, float]]:
    """Run and judge all searches.

    Returns:
        The searches, and the accuracies of what needs none, by name.
    """
    prepared = Prepared.of(options.task, seed=0)
    problem, heldout = prepared.problem, prepared.data.heldout
    task = task_of(problem, model=options.task.model, dataset=options.task.dataset)
    policies = {str(each.options["policy"]) for each in options.entries if each.options.get("policy")}
    for policy in policies:
        read_policy(policy).card.check_held_out(task)
    scoring = EvaluatorOptions(term=options.term, statistics=options.statistics)
    evaluator = prepared.evaluator(heldout.first(options.images), scoring)
    problem = replace(problem, divergences=evaluator.divergences)
    judging = heldout.subset(torch.arange(len(heldout) - options.judged, len(heldout)))
    judge = prepared.evaluator(judging, EvaluatorOptions(statistics=options.statistics))
    ends = Ends(prepared, judging, options)
    kept = ResultRows(options.folder / f"judged-{options.judged}.csv", ("plan",), ("accuracy",))

    def judged(plan: Choices) -> float:
        key = {"plan": " ".join(map(str, plan))}
        known = kept.find(key)
        if known is None:
            kept.add(key, {"accuracy": judge(plan).accuracy})
        return float((known or kept.rows[-1])["accuracy"])

    references = {
        "the dense network": judge.dense_accuracy,
        "greedy's plan": judged(tuple(problem.preset.tolist())),
    }
    for policy in policies:
        (first,) = create_selector("bayes", problem, episodes=1, policy=policy).propose()
        references[f"the plan of policy={policy}"] = judged(first.choices)
    curves = []
    # Seed by seed, so that a run which is stopped has searched as often with every entry.
    for seed, one in itertools.product(options.seeds, options.entries):
        if seed not in seeds_of(one, options.seeds):
            continue
        folder = options.folder / f"{one.folder_name}-{seed}"
        rows = search(problem, evaluator, one, seed=seed, episodes=options.episodes, folder=folder).rows
        plans = best_plans(rows, milestones(len(rows)))
        curve = Curve(
            one.text,
            seed,
            {after: judged(plan) for after, plan in plans.items()},
            ends.of(plans[len(rows)]),
        )
        print(f"{one.text}, seed {seed}: {curve.judged} {curve.applied}", file=sys.stderr, flush=True)
        curves.append(curve)
    return curves, references


class Ends:
    """What becomes of the plans that searches end with, each plan once; kept in the folder.

    Args:
        prepared: The task.
        judging: Images that judge an applied plan.
        options: Which of it is asked for, and where it is kept.
    """

    def __init__(self, prepared: Prepared, judging: Images, options: argparse.Namespace) -> None:
        data = prepared.data
        if options.train_images is not None:
            data = replace(data, train=data.train.first(options.train_images))
        self._prepared, self._judging = replace(prepared, data=data), judging
        self._refit, self._epochs = options.refit or options.finetune > 0, options.finetune
        self._kept = ResultRows(
            options.folder / f"applied-{options.judged}.csv", ("plan", "epochs", "images"), (REFIT, TUNED)
        )

    def of(self, plan: Choices) -> dict[str, float]:
        """Return the accuracies of a plan, by what was done, as far as they are asked for."""
        if not self._refit:
            return {}
        images = len(self._prepared.data.train) if self._epochs else 0
        key = {"plan": " ".join(map(str, plan)), "epochs": self._epochs, "images": images}
        row = self._kept.find(key)
        if row is None:
            network, accuracy = self._apply(plan)
            accuracies = {REFIT: str(accuracy), TUNED: ""}
            if self._epochs:
                accuracies[TUNED] = str(finetuned_accuracy(network, self._prepared, self._epochs, 0))
            self._kept.add(key, accuracies)
            row = self._kept.rows[-1]
        return {name: float(row[name]) for name in (REFIT, TUNED) if row[name]}

    def _apply(self, plan: Choices) -> tuple[nn.Module, float]:
        prepared = self._prepared
        network = apply_plan(prepared.model, prepared.problem.plan(plan, "curves"), prepared.inputs)
        return network, augmented_accuracy(network, prepared.data, self._judging)


def report(curves: Sequence[Curve], references: Mapping[str, float], episodes: int) -> str:
    """Return the table: mean accuracy and 95 % interval after some numbers of evaluations, the best first."""
    shown = [end for end in milestones(episodes) if end >= 10 or end == episodes]
    done = [name for name in (REFIT, TUNED) if any(name in curve.applied for curve in curves)]
    head = ["selector", "seeds", *(f"{after} evaluations" for after in shown), *done]
    lines = [f"| {' | '.join(head)} |", f"|---|---:|{'---:|' * len(head[2:])}"]
    groups = by_entry(curves)
    for name in sorted(groups, key=lambda name: -np.mean([each.at(episodes) for each in groups[name]])):
        cells = [_cell([each.at(after) for each in groups[name]]) for after in shown]
        cells += [_cell([each.applied[end] for each in groups[name]]) for end in done]
        lines.append(f"| `{name}` | {len(groups[name])} | {' | '.join(cells)} |")
    known = "; ".join(f"{name} {accuracy:.3f}" for name, accuracy in references.items())
    return "\n".join([*lines, "", f"Without any evaluation: {known}."])


def by_entry(curves: Sequence[Curve]) -> dict[str, list[Curve]]:
    """Return the searches of every entry."""
    return {
        name: [each for each in curves if each.entry == name]
        for name in dict.fromkeys(c.entry for c in curves)
    }


def _cell(values: Sequence[float]) -> str:
    return Spread.of(values).text(factor=1, digits=3)


def picture(curves: Sequence[Curve], references: Mapping[str, float], episodes: int) -> Figure:
    """Draw the accuracies over the evaluations: means, and the bands that the seeds span.

    Selectors of one plan are level lines, like the references; those that end below greedy's plan are left
    out, for the others' sake.
    """
    figure = Figure(figsize=(7.2, 4.6), layout="constrained")
    axes = figure.subplots()
    style_axes(axes, "evaluations", "accuracy of the best plan so far, on other images")
    places = milestones(episodes)
    levels = {name: accuracy for name, accuracy in references.items() if name != DENSE}
    drawn = 0
    for name, group in by_entry(curves).items():
        accuracies = np.array([[each.at(after) for after in places] for each in group])
        if all(len(each.judged) == 1 for each in group):
            if accuracies[0, 0] not in levels.values():
                levels[name] = float(accuracies[0, 0])
        elif accuracies[:, -1].mean() >= references[GREEDY]:
            colour = _COLOURS[drawn % len(_COLOURS)]
            dashes = "solid" if drawn < len(_COLOURS) else (0, (4, 1.5))
            drawn += 1
            axes.plot(places, accuracies.mean(0), color=colour, linestyle=dashes, linewidth=1.7, label=name)
            axes.fill_between(
                places, accuracies.min(0), accuracies.max(0), color=colour, alpha=0.1, linewidth=0
            )
    for index, (name, accuracy) in enumerate(levels.items()):
        dashes = _DASHES[index % len(_DASHES)]
        axes.axhline(accuracy, color=PALETTE["ink"], linewidth=1.1, linestyle=dashes, label=name)
    axes.set_xscale("log")
    axes.set_xticks(places, [str(place) for place in places])
    axes.minorticks_off()
    percent_axis(axes)
    upper_legend(figure, columns=2)
    return figure


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--task", type=Asked.parse, required=True)
    parser.add_argument("--entries", nargs="+", type=entry, required=True)
    parser.add_argument("--folder", type=Path, required=True, help="where searches are kept, one task each")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--episodes", type=int, default=200)
    parser.add_argument("--images", type=int, default=1000, help="held-out images of a search")
    parser.add_argument("--term", choices=get_args(Term), default="accuracy")
    parser.add_argument(
        "--statistics",
        choices=get_args(Statistics),
        default="corrected",
        help="how plans are scored and judged",
    )
    parser.add_argument("--judged", type=int, default=3000, help="held-out images, the last ones, that judge")
    parser.add_argument("--refit", action="store_true", help="apply the plan that each search ends with")
    parser.add_argument("--finetune", type=int, default=0, help="epochs of fine-tuning after that")
    parser.add_argument("--train-images", type=int, help="images to fine-tune on; all without it")
    parser.add_argument("--output", type=Path, help="Markdown file whose section is replaced, or CSV file")
    parser.add_argument("--section", default="curves", help="name of that section")
    parser.add_argument("--picture", type=Path, help="PNG file to draw the curves in")
    return parser.parse_args(arguments)


def main() -> None:
    """Search, judge, print, and perhaps save table and picture."""
    options = parse()
    options.folder.mkdir(parents=True, exist_ok=True)
    try:
        curves, references = measured(options)
    except RankrlError as error:
        sys.exit(f"selector_curves.py: {error}")
    shortened = {word: re.sub(r"[^:]*/", "", word) for word in sys.argv[1:] if word.count(":") == 5}
    shortened[str(options.folder)] = options.folder.name
    command = shown_command(sys.argv, shortened=shortened)
    text = "\n\n".join([f"`{command}`", hardware_line(), report(curves, references, options.episodes)])
    print(text)
    if options.output:
        write_section(options.output, options.section, "Selectors at equal evaluations", text)
    if options.picture:
        drawn = io.BytesIO()
        picture(curves, references, options.episodes).savefig(drawn, format="png", dpi=150, facecolor="white")
        write_atomically(options.picture, drawn.getvalue())


if __name__ == "__main__":
    reuse_memory()
    main()
