"""Compare selectors over seeds: means, confidence intervals, learning curves, the page."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.special import stdtrit

from rankrl.errors import counted
from rankrl.files import write_atomically
from rankrl.options.search import objective_line
from rankrl.report.figures import (
    PALETTE,
    SERIES,
    drawing,
    number_axis,
    panels,
    style_axes,
    upper_legend,
    whole_axis,
)
from rankrl.report.run_tables import (
    UNKNOWN,
    Card,
    Table,
    csv_text,
    format_accuracy,
    heldout_note,
    number,
    rival_note,
    run_title,
)
from rankrl.report.write import eyebrow, render, save_figure


@dataclass(frozen=True)
class ComparisonRow:
    """One search of one selector, a row of `compare.csv`."""

    selector: str
    seed: int | None
    best_reward: float
    heldout_accuracy: float | None
    params_kept: float
    macs_kept: float
    test_accuracy: float | None
    finetuned_accuracy: float | None
    episodes: float
    evaluations: float
    seconds: float
    best_rewards: tuple[float, ...]
    """The best reward after one, two, ... different plans."""
    regret: float | None = None
    task: str | None = None
    """Of RankBench."""


_SHOWN = {
    "best_reward": ("Best reward", 1.0, 4),
    "regret": ("Regret, points", 100.0, 2),
    "heldout_accuracy": ("Held-out accuracy, %", 100.0, 2),
    "params_kept": ("Parameters kept, %", 100.0, 1),
    "macs_kept": ("MACs kept, %", 100.0, 1),
    "test_accuracy": ("Test accuracy, %", 100.0, 2),
    "finetuned_accuracy": ("Fine-tuned, %", 100.0, 2),
    "evaluations": ("Plans scored", 1.0, 1),
    "seconds": ("Seconds", 1.0, 1),
}
"""Title, factor and decimals of the columns of means."""

MEASURES = (*_SHOWN, "episodes")
"""Numbers whose means and spreads are kept."""

SHORT = ("best_reward", "regret", "test_accuracy", "finetuned_accuracy")
"""The measures that fit on a terminal."""

_PROGRESS = "Best reward after so many different plans; – where a search found fewer."
_AFTER = (1, 5, 20, 50, 100, 200, 500, 1000)


@dataclass(frozen=True)
class Spread:
    """One measure over all seeds."""

    mean: float
    std: float | None
    half_width: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """Return the spread of one value for each seed, at least one."""
        mean, count = float(statistics.fmean(values)), len(values)
        if count < 2:
            return cls(mean, None, None)
        std = statistics.stdev(values)
        return cls(mean, std, float(stdtrit(count - 1, 0.975)) * std / count**0.5)

    def text(self, factor: float, digits: int) -> str:
        """Return `mean ± half_width`, each times a factor and with this number of decimals."""
        mean = f"{factor * self.mean:.{digits}f}"
        return mean if self.half_width is None else f"{mean} ± {factor * self.half_width:.{digits}f}"


def interval_note(counts: Iterable[int]) -> str:
    """Explain `mean ± half_width` in a sentence; empty if every mean is of one value."""
    several = sorted({count for count in counts if count > 1})
    if not several:
        return ""
    return f"mean ± half of its 95 % interval over {' or '.join(map(str, several))} seeds (Student's t)"


def mean_over_tasks(rows: Sequence[ComparisonRow]) -> list[ComparisonRow]:
    """Average the rows of a selector and a seed over their tasks; a row of one task stays as it is."""
    groups: dict[tuple[str, int | None], list[ComparisonRow]] = {}
    for row in rows:
        groups.setdefault((row.selector, row.seed), []).append(row)
    return [_mean(group) if len(group) > 1 else group[0] for group in groups.values()]


def _mean(rows: Sequence[ComparisonRow]) -> ComparisonRow:
    curves = _extended([row.best_rewards for row in rows], max(len(row.best_rewards) for row in rows))
    known = {name: [getattr(row, name) for row in rows] for name in MEASURES}
    means: dict[str, Any] = {
        name: statistics.fmean(values) for name, values in known.items() if None not in values
    }
    return replace(rows[0], task=None, best_rewards=tuple(curves.mean(0).tolist()), **means)


def _extended(curves: Sequence[Sequence[float]], end: int) -> np.ndarray:
    """Stack curves, (searches, end); one that ended before keeps its last best reward."""
    return np.array([[*curve, *[curve[-1]] * (end - len(curve))] for curve in curves])


def _plain(row: ComparisonRow) -> dict[str, Any]:
    return {name: value for name, value in asdict(row).items() if name != "best_rewards"}


def by_selector(rows: Sequence[ComparisonRow]) -> dict[str, list[ComparisonRow]]:
    """Group searches by their selector, the highest mean reward first."""
    groups: dict[str, list[ComparisonRow]] = {}
    for row in rows:
        groups.setdefault(row.selector, []).append(row)
    return dict(sorted(groups.items(), key=lambda group: -_rounded(group[1], "best_reward")))


def spread(runs: Sequence[ComparisonRow], measure: str) -> Spread | None:
    values = [value for run in runs if (value := getattr(run, measure)) is not None]
    return Spread.of(values) if values else None


def _rounded(runs: Sequence[ComparisonRow], measure: str) -> float:
    """Return a mean without the noise of floating point, by which equal searches would differ."""
    known = (value for run in runs if (value := getattr(run, measure)) is not None)
    return round(statistics.fmean(known), 9)


def means_table(
    rows: Sequence[ComparisonRow], caption: str = "", measures: Sequence[str] = tuple(_SHOWN)
) -> Table:
    taken = [name for name in measures if spread(rows, name)]
    cells = [
        [selector, str(len(runs)), *(_cell(spread(runs, name), name) for name in taken)]
        for selector, runs in by_selector(rows).items()
    ]
    return Table(caption, ["Selector", "Runs", *(_SHOWN[name][0] for name in taken)], cells)


def _cell(spread: Spread | None, measure: str) -> str:
    return UNKNOWN if spread is None else spread.text(*_SHOWN[measure][1:])


def seeds_note(rows: Sequence[ComparisonRow]) -> str:
    return interval_note(map(len, by_selector(rows).values()))


def progress_table(rows: Sequence[ComparisonRow], caption: str = "") -> Table:
    """Return the table of the best rewards after increasing numbers of plans; without rows for one plan."""
    longest = max(len(row.best_rewards) for row in rows)
    ends = [*(after for after in _AFTER if after < longest), longest]
    cells = []
    for selector, searches in by_selector(rows).items() if longest > 1 else ():
        runs = [row.best_rewards for row in searches]
        found = max(map(len, runs))
        known = [
            Spread.of([run[min(end, len(run)) - 1] for run in runs]) if found == 1 or found >= end else None
            for end in ends
        ]
        cells.append([selector, *(_cell(each, "best_reward") for each in known)])
    return Table(caption, ["Selector", *(counted(end, "plan") for end in ends)], cells)


def comparison_markdown(rows: Sequence[ComparisonRow]) -> str:
    table, note = progress_table(rows), seeds_note(rows)
    explained = f"\nNumbers: {note}.\n" if note else ""
    progress = f"\n{_PROGRESS}\n\n{table.markdown()}" if table else ""
    return f"{means_table(rows).markdown()}{explained}{progress}"


_DASHES = ("solid", (0, (5, 2)), (0, (1, 1.5)))
_ONE_PLAN = (0, (2, 2))


def rewards_figure(rows: Sequence[ComparisonRow]) -> Figure:
    """Draw the best reward so far over the plans: the mean of each selector's searches and their range."""
    figure, (axes,) = panels(1)
    style_axes(axes, "different plans", "best reward so far")
    _draw_rewards(axes, rows)
    number_axis(axes)
    whole_axis(axes, bins=6)
    upper_legend(figure, columns=8)
    return figure


def _draw_rewards(axes: Axes, rows: Sequence[ComparisonRow]) -> None:
    longest = max(len(row.best_rewards) for row in rows)
    for index, (selector, searches) in enumerate(by_selector(rows).items()):
        runs = [row.best_rewards for row in searches]
        one_plan = longest > 1 and all(len(run) == 1 for run in runs)
        end = longest if one_plan else max(map(len, runs))
        plans = np.arange(1, end + 1)
        curves = _extended(runs, end)
        colour = PALETTE[SERIES[index % len(SERIES)]]
        axes.plot(
            plans,
            curves.mean(0),
            color=colour,
            linestyle=_ONE_PLAN if one_plan else _DASHES[index // len(SERIES) % len(_DASHES)],
            marker="." if longest == 1 else None,
            linewidth=1.1 if one_plan else 1.6,
            label=selector,
        )
        if len(curves) > 1:
            axes.fill_between(plans, curves.min(0), curves.max(0), color=colour, alpha=0.15, linewidth=0)


_ANSWERS = {
    "best_reward": ("Highest reward", max),
    "regret": ("Least regret, points", min),
    "test_accuracy": ("Highest test accuracy, %", max),
    "finetuned_accuracy": ("Highest after fine-tuning, %", max),
}
_CAPTION = (
    "Every selector had the same evaluator, fits and number of episodes, but for rules, which propose one "
    "plan; a plan that is proposed again is not scored again. Held-out accuracies are of the images that "
    "searches score plans on. Test images choose nothing. Best reward first."
)
_OF_TABLES = (
    "Rewards are scores of RankBench's tables, or predicted by their surrogates. Regret is how much more the "
    "best plan of the table scores on inputs that no search sees. Numbers of several tasks are means. Best "
    "reward first."
)


def tasks_table(rows: Sequence[ComparisonRow]) -> Table:
    """Return the mean regrets of each task of several."""
    groups: dict[tuple[str | None, str], list[float]] = {}
    for row in rows:
        groups.setdefault((row.task, row.selector), []).append(row.regret or 0.0)
    tasks, selectors = (list(dict.fromkeys(names)) for names in zip(*groups, strict=True))
    cells = [
        [str(task), *(f"{100 * statistics.fmean(groups[task, name]):.2f}" for name in selectors)]
        for task in tasks
    ]
    return Table("Mean regret over the seeds, in points.", ["Task", *map(str, selectors)], cells)


def comparison_page(
    rows: Sequence[ComparisonRow],
    metrics: Mapping[str, Any],
    setup: Mapping[str, str],
) -> str:
    every, rows = rows, mean_over_tasks(rows)
    rival, accuracy = rival_note(metrics), number(metrics, "baseline", "accuracy")
    note = seeds_note(rows)
    explained = f"Numbers: {note}." if note else ""
    dense = "" if accuracy is None else f"The dense network's test accuracy is {format_accuracy(accuracy)}."
    caption = _OF_TABLES if metrics.get("bench") else _CAPTION
    notes = (caption, explained, dense, f"{rival}." if rival else "", heldout_note(metrics))
    search = {"Search": _objective(metrics)} if metrics.get("search") else {}
    return render(
        f"Selectors compared: {run_title(metrics)}",
        {
            "Result": {"table": means_table(rows, " ".join(filter(None, notes)))},
            "Search": {
                "figure": drawing(
                    rewards_figure(rows),
                    "rewards",
                    "Best reward so far of every selector over the plans; the table holds its values.",
                    "Mean over the seeds; the band spans them. Dashed: selectors with a single plan.",
                ),
                "table": progress_table(rows, f"{_PROGRESS} {explained}".strip()),
            },
            "Tasks": {"table": tasks_table(every)} if len(every) > len(rows) else {},
            "Setup": {"facts": {**search, **setup}},
        },
        eyebrow=eyebrow(metrics, setup),
        warnings=metrics.get("warnings") or (),
        cards=_headline(rows),
    )


def _objective(metrics: Mapping[str, Any]) -> str:
    """Name what was searched; tasks of RankBench have their budgets in their names."""
    searched = objective_line(metrics.get("search") or {}, metrics.get("budget") or {})
    return ", ".join(metrics.get("bench") or ()) or searched


def _headline(rows: Sequence[ComparisonRow]) -> list[Card]:
    """Return the selectors with the best mean of each measure that matters."""
    cards, groups = [], by_selector(rows)
    for measure, (title, best_of) in _ANSWERS.items():
        known = {name: _rounded(runs, measure) for name, runs in groups.items() if spread(runs, measure)}
        if known:
            best = [name for name, mean in known.items() if mean == best_of(known.values())]
            equal = " (equal)" if len(best) > 1 else ""
            value = _cell(spread(groups[best[0]], measure), measure)
            cards.append(Card(title, value, ", ".join(best) + equal))
    return cards


_LATEX = {
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    UNKNOWN: "--",
}


def comparison_latex(rows: Sequence[ComparisonRow], about: str = "") -> str:
    """Write the table of means for LaTeX's package booktabs; a comment says what was compared."""
    table = means_table(rows)
    head, *body = (
        " & ".join("".join(_LATEX.get(sign, sign) for sign in cell) for cell in line) + r" \\"
        for line in (table.columns, *table.rows)
    )
    note = seeds_note(rows)
    lines = [
        *(f"% {line}." for line in (about, note and f"Numbers: {note}") if line),
        rf"\begin{{tabular}}{{l{'r' * (len(table.columns) - 1)}}}",
        *(r"\toprule", head, r"\midrule", *body, r"\bottomrule"),
        r"\end{tabular}",
    ]
    return "\n".join(lines) + "\n"


def write_comparison(
    folder: Path,
    rows: Sequence[ComparisonRow],
    metrics: Mapping[str, Any],
    setup: Mapping[str, str],
    *,
    latex: bool = False,
) -> Path:
    """Write the page, CSV, Markdown and plots; with `latex` also `compare.tex` and a PDF. Return the page."""
    write_atomically(folder / "compare.csv", csv_text([_plain(row) for row in rows]))
    means = mean_over_tasks(rows)
    write_atomically(folder / "compare.md", comparison_markdown(means))
    save_figure(rewards_figure(means), folder / "plots" / "rewards.png")
    if latex:
        about = f"{run_title(metrics)}; {_objective(metrics)}"
        write_atomically(folder / "compare.tex", comparison_latex(means, about))
        save_figure(rewards_figure(means), folder / "plots" / "rewards.pdf")
    document = folder / "report.html"
    write_atomically(document, comparison_page(rows, metrics, setup))
    return document
