"""Write pages as HTML, and the page and the terminal's tables of one run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from matplotlib.figure import Figure

from rankrl.errors import counted
from rankrl.files import atomic_path, write_atomically
from rankrl.options.search import budget_line, objective_line
from rankrl.plan_search.scores.evaluation import best_rows
from rankrl.report.figures import (
    LEFT_DENSE,
    ONLY_ROUNDED,
    Drawing,
    drawing,
    layer_kinds,
    layers_figure,
    plan_drawing,
    reward_figure,
)
from rankrl.report.run_folder import (
    DATE,
    PRESET_PHASE,
    LayerRow,
    RunReport,
    layer_formats,
    read_episodes,
    read_metrics,
)
from rankrl.report.run_tables import (
    AGREEMENT,
    SPACE,
    UNKNOWN,
    Card,
    Table,
    before_after,
    conclusion,
    costs,
    device_table,
    epoch_score,
    format_accuracy,
    format_count,
    format_large,
    format_share,
    heldout_note,
    is_unlabelled,
    measured_table,
    number,
    qualities,
    run_title,
    runtimes_table,
    score_measure,
    stages,
)
from rankrl.training import EpochRow

_TEMPLATES = Environment(
    loader=PackageLoader("rankrl.report"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)


def render(
    title: str,
    sections: Mapping[str, Mapping[str, Any]],
    *,
    eyebrow: Sequence[str] = (),
    lead: str = "",
    warnings: Sequence[str] = (),
    cards: Sequence[Card] = (),
) -> str:
    """Write a page as one self-contained HTML document; parts and sections without content are left out.

    The parts of a section go by the names of their macros in `parts.html.jinja`.
    """
    return _TEMPLATES.get_template("page.html.jinja").render(
        title=title,
        eyebrow=eyebrow,
        lead=lead,
        warnings=warnings,
        cards=cards,
        sections=sections,
    )


def run_page(report: RunReport) -> str:
    metrics, layers, layer_table = report.metrics, report.layers, _layer_table(report)
    return render(
        run_title(metrics),
        {
            "Before and after": {"table": before_after(metrics)},
            "Runtimes": {"table": runtimes_table(metrics)},
            "Search": {"figure": _search(report)},
            "The agent": {"table": _agent(report)},
            "Plans carried out": {"table": measured_table(metrics)},
            "On the other device": {"table": device_table(metrics)},
            "Layers": {
                "plan": plan_drawing(layers, row_titles(layer_table)),
                "figure": _layers(layers),
                "table": layer_table,
            },
            "Fine-tuning": {"facts": _fine_tuning(report)},
            "ONNX file": {"facts": _onnx_facts(metrics)},
            "Setup": {"facts": report.setup},
        },
        eyebrow=eyebrow(metrics, report.setup),
        lead=conclusion(metrics),
        warnings=metrics.get("warnings") or (),
        cards=_headline(metrics),
    )


def row_titles(table: Table) -> list[str]:
    """Write each row of a table as lines of `column: cell`."""
    return [
        "\n".join(f"{column}: {cell}" for column, cell in zip(table.columns, row, strict=True) if cell)
        for row in table.rows
    ]


def eyebrow(metrics: Mapping[str, Any], setup: Mapping[str, str]) -> list[str]:
    parts = [
        str(metrics[key]).replace("_", " ").replace(",", ", ")
        for key in ("task", "pruner", "decomposition", "selector")
        if metrics.get(key)
    ]
    if metrics.get("budget"):
        parts.append(budget_line(metrics["budget"]))
    if metrics.get("seed") is not None:
        parts.append(f"seed {metrics['seed']}")
    return [*parts, *([setup[DATE]] if DATE in setup else [])]


def _headline(metrics: Mapping[str, Any]) -> list[Card]:
    if len(stages(metrics)) < 2:
        return []
    return [
        *(
            Card(each.title, each.write(each.after), f"{each.change}, from {each.write(each.before)}")
            for each in qualities(metrics)
            if each.after is not None and each.title != AGREEMENT
        ),
        *(
            Card(each.title, each.change, f"{each.write(each.before)} → {each.write(each.after)}")
            for each in costs(metrics)
            if each.before is not None and each.after is not None
        ),
    ]


_SCORED = {
    False: "on the images that the search scores plans on, before fine-tuning",
    True: "(1 − relative error of the outputs, unless another score was chosen) before the refit",
}


def _scored(metrics: Mapping[str, Any], value: float) -> str:
    score = score_measure(metrics)
    if score is not None:
        return f"{score.title} {score.write(value)} before the refit"
    return f"{format_accuracy(value)} {_SCORED[is_unlabelled(metrics)]}"


def _search(report: RunReport) -> Drawing | None:
    rows, search = report.episodes, report.metrics.get("search") or {}
    if len(rows) < 2:  # the single plan of a heuristic is no search
        return None
    (best,) = best_rows(rows, 1)
    seconds, over = number(report.metrics, "search", "seconds"), sum(not row.within_budget for row in rows)
    done = [
        counted(len(rows), "episode"),
        f"{counted(len({row.choices for row in rows}), 'different plan')} scored",
        *([] if seconds is None else [f"{seconds:.0f}{SPACE}s"]),
    ]
    sentences = [
        f"{', '.join(done)}; {objective_line(search, report.metrics.get('budget') or {})}.",
        f"{counted(over, 'episode')} had a plan over the budget, which does not count." if over else "",
        f"The best plan, of episode {best.episode} ({best.phase}), earns the reward {best.reward:.4f}: "
        f"{_scored(report.metrics, best.accuracy)}, with {format_share(best.params_kept)} of the parameters "
        f"and {format_share(best.macs_kept)} of the MACs.",
        heldout_note(report.metrics),
    ]
    return drawing(
        reward_figure(rows),
        "reward",
        f"Reward of each episode; the best is {best.reward:.4f} in episode {best.episode}.",
        " ".join(filter(None, sentences)),
    )


_OBSERVED = (
    "index",
    "out_channels",
    "in_channels",
    "kernel_height",
    "stride_height",
    "params",
    "previous_action",
)


def _agent(report: RunReport) -> Table:
    """Tabulate an agent's observations and actions in its best episode, by layer."""
    search = report.metrics.get("search") or {}
    rows, caption = search.get("agent") or (), ""
    names = [name for name in (rows[0]["observation"] if rows else ()) if name in _OBSERVED]
    if rows:
        best = best_rows(report.episodes, 1)[0].reward
        greedy = next((row.reward for row in report.episodes if row.phase == PRESET_PHASE), None)
        against = "" if greedy is None else f", greedy's plan {greedy:.4f}"
        more = len(rows[0]["observation"]) - len(names)
        caption = (
            "What the agent saw of each layer, each in [0, 1], the action that it took, in [−1, 1], and what "
            f"the layer became in its best episode, which earned the reward {best:.4f}{against}."
        )
        if search.get("action") != "importance" and report.metrics.get("budget"):
            caption += " A layer is less than its action asked for where the budget clipped it."
        if more:
            caption += f" It saw {counted(more, 'more number')} of each layer, which metrics.json holds."
    cells = [
        [
            row["layer"],
            *(f"{row['observation'][name]:.2f}" for name in names),
            f"{row['action']:+.2f}".replace("-", "−"),
            row["taken"],
        ]
        for row in rows
    ]
    titles = ["Layer", *(name.replace("_", " ").capitalize() for name in names), "Action", "Became"]
    return Table(caption, titles, cells, text_columns=(0, len(titles) - 1))


def _layers(layers: Sequence[LayerRow]) -> Drawing | None:
    if not layers:
        return None
    kinds = Counter(layer_kinds(layers)[0])
    rounded = f"{kinds[ONLY_ROUNDED]} {ONLY_ROUNDED}, " if kinds[ONLY_ROUNDED] else ""
    kept = sum(row.params_after for row in layers) / sum(row.params_before for row in layers)
    return drawing(
        layers_figure(layers),
        "layers",
        "Share of its parameters that each layer keeps, and its ranks. The table below holds the numbers.",
        f"{counted(len(layers), 'layer')}, {rounded}{kinds[LEFT_DENSE]} {LEFT_DENSE}; "
        f"together they keep {format_share(kept)} of their parameters.",
    )


def _layer_table(report: RunReport) -> Table:
    """Tabulate the layers, in columns with a value in some row."""
    layers, lost_by = report.layers, {each["name"]: each for each in report.metrics.get("layers") or ()}
    lost = sum(each["loss"] for each in lost_by.values()) or 1.0
    mixed = len(layer_formats(layers)) > 1
    plain = "float32" if any(row.precision for row in layers) else ""
    only_pruned = any(row.channels for row in layers) and not any(row.ranks for row in layers)
    reason = "Outputs stay because" if only_pruned else "Left dense because"
    columns: dict[str, Callable[[LayerRow], str]] = {
        "Layer": lambda row: row.name,
        "Shape": lambda row: "×".join(map(str, row.shape)),
        "Channels kept": lambda row: UNKNOWN if row.channels is None else "{} of {}".format(*row.channels),
        "Format, ranks" if mixed else "Ranks": partial(_ranks, mixed=mixed),
        "Precision": lambda row: row.precision or plain,
        "Parameters before": lambda row: format_count(row.params_before),
        "Parameters after": lambda row: format_count(row.params_after),
        "Kept": lambda row: format_share(row.kept),
        "MACs before": lambda row: format_large(row.macs_before),
        "MACs after": lambda row: format_large(row.macs_after),
        "Relative error": lambda row: UNKNOWN if row.error is None else f"{row.error:.3f}",
        "Share of the loss": lambda row: _share(lost_by, row, "loss", lost),
        "Time saved": lambda row: _share(lost_by, row, "saved_time"),
        reason: lambda row: row.reason,
    }
    cells = {title: [cell(row) for row in layers] for title, cell in columns.items()}
    shown = {title: column for title, column in cells.items() if set(column) - {"", UNKNOWN}}
    caption = "Every layer, before and after."
    if any(row.error and not row.ranks and not row.precision for row in layers):
        caption += " The error of a layer that is left dense is what those in front of it hand on."
    if lost_by:
        caption += (
            " Shares are of the sum of the losses at the network's output, as the search estimated them. A "
            "layer that loses much and saves little is one to leave as it is: decomposition.skip=[NAME]."
        )
    text_columns = (0, len(shown) - 1) if reason in shown else (0,)
    return Table(caption, list(shown), list(zip(*shown.values(), strict=True)), text_columns)


def _share(costs: Mapping[str, Any], row: LayerRow, key: str, whole: float = 1.0) -> str:
    value = costs.get(row.name, {}).get(key)
    return UNKNOWN if value is None else format_share(value / whole).replace("-", "−")


def _ranks(row: LayerRow, *, mixed: bool) -> str:
    if not row.ranks:
        return UNKNOWN
    ranks = ", ".join(map(str, row.ranks))
    return f"{row.format} {ranks}" if mixed else ranks


def _fine_tuning(report: RunReport) -> dict[str, str]:
    if not report.epochs:
        return {}
    best, score = max(report.epochs, key=lambda row: row.accuracy), epoch_score(report.metrics)
    trained = (report.metrics.get("trainings") or {}).get("finetune") or {}
    untaken = "No epoch was better than the network before training, which is taken."
    first, last = report.epochs[0].loss, report.epochs[-1].loss
    return {
        f"Best {score.words}": f"{score.write(best.accuracy)}, epoch {best.epoch} of {len(report.epochs)}",
        "Training loss": f"{first:.3g} in the first epoch, {last:.3g} in the last",
        "Epoch taken": untaken if trained.get("epoch") == 0 else "",
        "Held-out images": heldout_note(report.metrics),
    }


def _onnx_facts(metrics: Mapping[str, Any]) -> dict[str, str]:
    if not metrics.get("onnx"):
        return {}
    difference, agreement, accuracy = (
        number(metrics, "onnx", key) for key in ("max_abs_difference", "agreement", "accuracy")
    )
    rounded = "" if agreement is None else ", before rounding"
    return {
        f"Largest difference from PyTorch{rounded}": "" if difference is None else f"{difference:.1e}",
        "Agreement with PyTorch, with rounding": "" if agreement is None else format_accuracy(agreement),
        "Test accuracy measured from the file": "" if accuracy is None else format_accuracy(accuracy),
    }


_DOTS_PER_INCH = 160


def write_report(
    folder: str | Path,
    *,
    metrics: Mapping[str, Any] | None = None,
    layers: Sequence[LayerRow] = (),
    epochs: Sequence[EpochRow] = (),
    setup: Mapping[str, str] | None = None,
) -> Path:
    """Write the report of a run next to its other files; `episodes.csv` is read where there is one."""
    folder = Path(folder)
    report = RunReport(
        read_metrics(folder) if metrics is None else metrics,
        layers,
        read_episodes(folder),
        epochs,
        setup or {},
    )
    page = folder / "report.html"
    document = run_page(report)
    if report.episodes:
        save_figure(reward_figure(report.episodes), folder / "plots" / "reward.png")
    if report.layers:
        save_figure(layers_figure(report.layers), folder / "plots" / "layers.png")
    write_atomically(page, document)
    return page


def save_figure(figure: Figure, path: Path) -> None:
    with atomic_path(path) as temporary:
        figure.savefig(temporary, dpi=_DOTS_PER_INCH, facecolor="white")
