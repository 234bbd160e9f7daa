"""Make the tables of results for the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from textwrap import wrap
from typing import Any

from matplotlib.figure import Figure
from rich import table as terminal

from rankrl.errors import counted
from rankrl.files import atomic_path, write_atomically
from rankrl.report.figures import (
    LEFT_DENSE,
    ONLY_ROUNDED,
    fine_tuning_figure,
    layer_kind,
    layers_figure,
    plan_drawing,
    reward_figure,
)
from rankrl.report.html_page import Drawing, Head, Table, drawing, render, text_table
from rankrl.report.run_folder import (
    DATE,
    LayerRow,
    RunReport,
    gather_runs,
    layer_formats,
    read_episodes,
    read_metrics,
)
from rankrl.report.run_tables import (
    AGREEMENT,
    LAYER_COSTS_NOTE,
    UNKNOWN,
    certificate_card,
    certificate_note,
    dense_int8,
    device_note,
    device_rows,
    epoch_score,
    estimate_note,
    format_accuracy,
    format_bytes,
    format_count,
    format_large,
    format_latency,
    format_ratio,
    format_share,
    heldout_note,
    latency_change,
    latency_note,
    layer_cost_rows,
    measured_note,
    measured_rows,
    number,
    qualities,
    ratio,
    remains,
    runtime_note,
    runtime_rows,
    score_quality,
    stages,
)
from rankrl.report.sweep_table import SCORE, shown_columns, table_rows
from rankrl.training import EpochRow

_TITLES = {
    "accuracy": "Accuracy",
    "accuracy_change_points": "Points",
    "params_ratio": "Params",
    "macs_ratio": "MACs",
    "latency_ratio": "Latency",
}
_NOTE = "2.00×: half of the dense network's"
_MOST_ROWS = 40
_NAME = 28  # characters of a run's name in a line


def results_table(folder: str | Path) -> terminal.Table:
    """Return the finished runs below a folder for the terminal, the best first."""
    runs = [run for run in gather_runs(folder) if run.status == "finished"]
    columns = {column.key: column for column in shown_columns(runs)}
    shown = [columns[key] for key in ("folder", SCORE, *_TITLES) if key in columns]
    rows = table_rows(runs, shown)
    more = [f"{counted(len(rows) - _MOST_ROWS, 'more run')}"] if len(rows) > _MOST_ROWS else []
    note = [_NOTE] if "params_ratio" in columns else []
    page = f"`rankrl task=report runs={folder}` writes the page"
    table = terminal.Table(title=counted(len(rows), "finished run"), caption="; ".join([*more, *note, page]))
    for index, column in enumerate(shown):
        table.add_column(
            _TITLES.get(column.key, column.title), justify="right" if index else "left", overflow="fold"
        )
    for name, *row in rows[:_MOST_ROWS]:
        # Break a job's name between its options.
        lines = wrap(name.text.replace("+", "+ "), _NAME, break_long_words=False, break_on_hyphens=False)
        table.add_row("\n".join(lines).replace("+ ", "+"), *(cell.text for cell in row))
    return table


_TERMINAL = 80
"""Characters that a usual terminal shows in a line."""
_ATTRIBUTES = {"Test accuracy": "accuracy", AGREEMENT: "agreement"}
_COST_WORDS = {"Parameters": "parameters", "MACs": "MACs", "Time": "time", "Bytes of the file": "bytes"}


def comparison_rows(metrics: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return the before/after table as (titles, rows): accuracy, parameters, MACs, latency and file size."""
    run_stages = stages(metrics)
    if not run_stages:
        return [], []
    first, last = run_stages[0], run_stages[-1]

    def reduction(name: str, attribute: str, better: str, worse: str) -> str:
        before, after = getattr(first, attribute), getattr(last, attribute)
        return format_ratio(ratio(metrics, name, before, after), better, worse)

    table: list[tuple[str, Any, str, str]] = [
        ("Parameters", format_count, "params", reduction("params", "params", "fewer", "more")),
        ("MACs", format_large, "macs", reduction("macs", "macs", "fewer", "more")),
        ("Latency", format_latency, "latency_ms", latency_change(metrics, first.latency_ms, last.latency_ms)),
        ("File", format_bytes, "file_bytes", reduction("file_bytes", "file_bytes", "smaller", "larger")),
    ]
    several, rival = len(run_stages) > 1, dense_int8(metrics)
    rivals = [] if rival is None else [rival]
    rows = [
        [
            each.title,
            *map(each.write, each.values),
            *([each.change] if several else []),
            *(each.write(getattr(stage, _ATTRIBUTES.get(each.title, "score"))) for stage in rivals),
        ]
        for each in qualities(metrics)
    ] + [
        [
            title,
            *(write(getattr(stage, attribute)) for stage in run_stages),
            *([change] if several else []),
            *(write(getattr(stage, attribute)) for stage in rivals),
        ]
        for title, write, attribute, change in table
        if any(getattr(stage, attribute) is not None for stage in run_stages)
    ]
    names = [*(stage.name for stage in run_stages), *(["Change"] if several else [])]
    return ["", *names, *(stage.name for stage in rivals)], rows


def summary_table(metrics: Mapping[str, Any]) -> terminal.Table:
    """Return the before/after table for the terminal."""
    columns, rows = comparison_rows(metrics)
    name = " on ".join(str(metrics[key]) for key in ("model", "dataset") if metrics.get(key))
    known = number(metrics, "onnx", "latency_ratio_low") is not None
    return _table(columns, rows, title=name or None, caption=latency_note(metrics) if known else None)


def conclusion(metrics: Mapping[str, Any]) -> str:
    """Return the result of a run and the certified loss in words; empty if it compressed nothing."""
    bars = remains(metrics)
    costs = [f"{bar.share} of the {_COST_WORDS[bar.name]}" for bar in bars if not bar.good_if_kept]
    if not costs:
        return ""
    needs = f"{', '.join(costs[:-1])} and {costs[-1]}" if len(costs) > 1 else costs[0]
    sentences = [
        f"The compressed network needs {needs}{_worth(metrics)}.",
        certificate_note(metrics),
        estimate_note(metrics),
    ]
    return " ".join(filter(None, sentences))


def _worth(metrics: Mapping[str, Any]) -> str:
    """Return the compressed network's quality by its most important measure; empty if unknown."""
    known = [each for each in qualities(metrics) if each.before is not None and each.after is not None]
    if not known:
        return ""
    best = known[0]
    article = "an" if best.words[0].lower() in "aeiou" else "a"
    return f" for {article} {best.words} of {best.write(best.after)} instead of {best.write(best.before)}"


def runtimes_table(metrics: Mapping[str, Any]) -> terminal.Table:
    """Return the table of runtimes for the terminal; without rows if only one was measured."""
    return _table(*runtime_rows(metrics), caption=runtime_note(metrics))


def measured_table(metrics: Mapping[str, Any]) -> terminal.Table:
    """Return the table of measured plans for the terminal; without rows if none was measured."""
    return _table(*measured_rows(metrics), caption=measured_note(metrics))


def device_table(metrics: Mapping[str, Any]) -> terminal.Table:
    """Return the table of networks measured on another device; without rows if none was."""
    return _table(*device_rows(metrics), caption=device_note(metrics))


def _table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], *, title: str | None = None, caption: str | None
) -> terminal.Table:
    table = terminal.Table(title=title, title_style="bold", header_style="bold", caption=caption)
    cells = [max((len(row[index]) for row in rows), default=0) for index in range(len(columns))]
    wide = sum(map(max, cells, map(len, columns))) + 3 * len(columns) + 1 > _TERMINAL
    for index, (column, width) in enumerate(zip(columns, cells, strict=True)):
        heading = "\n".join(wrap(column, max(1, width), break_long_words=False)) if wide else column
        table.add_column(heading, justify="right" if index else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def run_page(report: RunReport) -> str:
    """Write the page of one run as one self-contained HTML document."""
    metrics = report.metrics
    eyebrow = [*_eyebrow(metrics), *([report.setup[DATE]] if DATE in report.setup else [])]
    head = Head(run_title(metrics), eyebrow, metrics.get("warnings") or (), _headline(metrics))
    return render(
        "run",
        head,
        remains=remains(metrics),
        comparison=_comparison(metrics),
        search=_search(report),
        network=plan_drawing(report.layers),
        layers=_layers(report),
        layer_table=_layer_table(report.layers),
        fine_tuning=_fine_tuning(report),
        onnx=_onnx_facts(metrics),
        runtimes=_runtimes(metrics),
        layer_costs=text_table(LAYER_COSTS_NOTE, *layer_cost_rows(metrics)),
        measured=text_table(measured_note(metrics), *measured_rows(metrics)),
        device=text_table(device_note(metrics), *device_rows(metrics)),
        run_files=report.files,
        setup=report.setup,
    )


def run_title(metrics: Mapping[str, Any]) -> str:
    """Return a short name for the run, e.g. `resnet20 on cifar10`."""
    return " on ".join(str(metrics[key]) for key in ("model", "dataset") if metrics.get(key)) or "rankrl run"


def _eyebrow(metrics: Mapping[str, Any]) -> list[str]:
    parts = [
        str(metrics[key]).replace("_", " ")
        for key in ("task", "pruner", "decomposition", "selector")
        if metrics.get(key)
    ]
    if metrics.get("seed") is not None:
        parts.append(f"seed {metrics['seed']}")
    return parts


def _headline(metrics: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return the headline numbers as (name, value, note)."""
    run_stages = stages(metrics)
    if len(run_stages) < 2:
        return []
    first, last = run_stages[0], run_stages[-1]
    values = [
        (each.title, each.write(each.after), f"{each.change}, from {each.write(each.before)}")
        for each in qualities(metrics)
        if each.after is not None and each.title != AGREEMENT
    ]
    values += certificate_card(metrics)
    for name, key, attribute, write, better, worse in (
        ("Parameters", "params", "params", format_count, "fewer", "more"),
        ("MACs", "macs", "macs", format_large, "fewer", "more"),
    ):
        before, after = getattr(first, attribute), getattr(last, attribute)
        if before is not None and after is not None:
            gained = format_ratio(ratio(metrics, key, before, after), better, worse)
            values.append((name, gained, f"{write(before)} → {write(after)}"))
    if first.latency_ms is not None and last.latency_ms is not None:
        note = f"{format_latency(first.latency_ms)} → {format_latency(last.latency_ms)}"
        values.append(("Latency", latency_change(metrics, first.latency_ms, last.latency_ms), note))
    return values


def _comparison(metrics: Mapping[str, Any]) -> Table | None:
    columns, rows = comparison_rows(metrics)
    caption = "Accuracy is measured on the test set, which chose nothing."
    if _of_file(metrics):
        caption = "Agreement with the original is measured on held-out inputs, which nothing was fitted to."
        caption += agreement_note(metrics)
    score = score_quality(metrics)
    if score is not None:
        caption = f"{score.title} is what plans were chosen by. {caption}"
    if certificate_note(metrics):
        caption += f" {certificate_note(metrics)}"
    if estimate_note(metrics):
        caption += f" {estimate_note(metrics)}"
    if number(metrics, "onnx", "latency_ms") is not None:
        caption += f" {latency_note(metrics)}"
    return text_table(caption, columns, rows)


def agreement_note(metrics: Mapping[str, Any]) -> str:
    """Return a note on the agreement of each output, and of the worst of several quantities in one.

    Empty if the metrics lack it.
    """
    outputs = metrics.get("outputs", {}).items()
    meanings: dict[str, list[str]] = {}
    for name, output in outputs:
        if "scored_by" in output:
            meanings.setdefault(f"{output['scored_by']}, since {output['reason']}", []).append(name)
    several = len(meanings) > 1
    notes = [
        f" That of {', '.join(names)} is {meaning}." if several else f" It is {meaning}."
        for meaning, names in meanings.items()
    ]
    worst = [(output["worst"], output["score"]) for _, output in outputs if "worst" in output]
    notes += [f" The worst quantity is {name}: {score:.4f}." for name, score in worst]
    return "".join(notes)


_SCORED = {
    False: "on held-out images before fine-tuning",
    True: "(1 − relative error of the outputs, unless another score was chosen) before the refit",
}


def _scored(metrics: Mapping[str, Any], value: float) -> str:
    """Return a plan's score with the name that the run gives it."""
    score = score_quality(metrics)
    if score is not None:
        return f"{score.title} {score.write(value)} before the refit"
    return f"{format_accuracy(value)} {_SCORED[_of_file(metrics)]}"


def _of_file(metrics: Mapping[str, Any]) -> bool:
    """Tell whether the network was compared with its original, without labels."""
    return number(metrics, "compressed", "agreement") is not None


def _runtimes(metrics: Mapping[str, Any]) -> Table | None:
    columns, rows = runtime_rows(metrics)
    return text_table(f"All were timed in the same turns. {runtime_note(metrics)}", columns, rows)


def _search(report: RunReport) -> Drawing | None:
    rows = report.episodes
    ruled = len(rows) == 1 and _of_file(report.metrics)  # the single plan of a heuristic is no search
    if not rows or ruled:
        return None
    best = max(rows, key=lambda row: row.reward)
    seconds = number(report.metrics, "search", "seconds")
    plans = counted(len(rows), "evaluated plan")
    caption = (
        f"{plans}{'' if seconds is None else f' in {seconds:.0f} s'}. "
        f"The best one, episode {best.episode} ({best.phase}), earns the reward {best.reward:.4f}: "
        f"{_scored(report.metrics, best.accuracy)}, with "
        f"{format_share(best.params_kept)} of the parameters and {format_share(best.macs_kept)} of the MACs. "
        f"{heldout_note(report.metrics)}"
    )
    return drawing(
        partial(reward_figure, rows),
        "reward",
        f"Reward of each episode; the best is {best.reward:.4f} in episode {best.episode}.",
        caption.strip(),
    )


def _layers(report: RunReport) -> Drawing | None:
    if not report.layers:
        return None
    kinds = Counter(layer_kind(row, mixed=False) for row in report.layers)
    rounded = f"{kinds[ONLY_ROUNDED]} {ONLY_ROUNDED}, " if kinds[ONLY_ROUNDED] else ""
    kept = sum(row.params_after for row in report.layers) / sum(row.params_before for row in report.layers)
    caption = (
        f"{counted(len(report.layers), 'layer')}, {rounded}{kinds[LEFT_DENSE]} {LEFT_DENSE}; "
        f"together they keep {format_share(kept)} of their parameters."
    )
    return drawing(
        partial(layers_figure, report.layers),
        "layers",
        "Share of its parameters that each layer keeps, and its ranks. The table below holds the numbers.",
        caption,
    )


def _layer_table(layers: Sequence[LayerRow]) -> Table | None:
    ranked = any(row.ranks for row in layers)
    pruned = any(row.channels for row in layers)
    mixed = len(layer_formats(layers)) > 1
    reasoned = any(row.reason for row in layers)
    columns: list[tuple[str, bool, Callable[[LayerRow], str]]] = [
        ("Layer", True, lambda row: row.name),
        ("Shape", True, lambda row: "×".join(map(str, row.shape))),
        ("Channels kept", pruned, _channels),
        ("Format, ranks" if mixed else "Ranks", ranked, partial(_ranks, mixed=mixed)),
        ("Precision", any(row.precision for row in layers), lambda row: row.precision or "float32"),
        ("Parameters before", True, lambda row: format_count(row.params_before)),
        ("Parameters after", True, lambda row: format_count(row.params_after)),
        ("Kept", True, lambda row: format_share(row.kept)),
        ("MACs before", True, lambda row: format_large(row.macs_before)),
        ("MACs after", True, lambda row: format_large(row.macs_after)),
        ("Relative error", any(row.error is not None for row in layers), _error),
        (
            "Outputs stay because" if pruned and not ranked else "Left dense because",
            reasoned,
            lambda row: row.reason,
        ),
    ]
    shown = [(title, cell) for title, is_shown, cell in columns if is_shown]
    caption = "Every layer, before and after."
    if any(row.error and not row.ranks and not row.precision for row in layers):
        caption += " The error of a layer that is left dense is what those in front of it hand on."
    return text_table(
        caption,
        [title for title, _ in shown],
        [[cell(row) for _, cell in shown] for row in layers],
        text_columns=(0, len(shown) - 1) if reasoned else (0,),
    )


def _channels(row: LayerRow) -> str:
    return UNKNOWN if row.channels is None else "{} of {}".format(*row.channels)


def _ranks(row: LayerRow, *, mixed: bool) -> str:
    if not row.ranks:
        return UNKNOWN
    ranks = ", ".join(map(str, row.ranks))
    return f"{row.format} {ranks}" if mixed else ranks


def _error(row: LayerRow) -> str:
    return UNKNOWN if row.error is None else f"{row.error:.3f}"


def _fine_tuning(report: RunReport) -> Drawing | None:
    if not report.epochs:
        return None
    best, score = max(report.epochs, key=lambda row: row.accuracy), epoch_score(report.metrics)
    return drawing(
        partial(fine_tuning_figure, report.epochs, score=score),
        "fine-tuning",
        f"{score.title} and training loss per epoch of fine-tuning.",
        f"Best {score.words}: {score.write(best.accuracy)}, after epoch {best.epoch} "
        f"of {len(report.epochs)}. {heldout_note(report.metrics)}".strip(),
    )


def _onnx_facts(metrics: Mapping[str, Any]) -> dict[str, str]:
    values = {}
    difference = number(metrics, "onnx", "max_abs_difference")
    agreement = number(metrics, "onnx", "agreement")
    if difference is not None:
        before = "" if agreement is None else ", before rounding"
        values[f"Largest difference from PyTorch{before}"] = f"{difference:.1e}"
    if agreement is not None:
        values["Agreement with PyTorch, with rounding"] = format_accuracy(agreement)
    accuracy = number(metrics, "onnx", "accuracy")
    if accuracy is not None:
        values["Test accuracy measured from the file"] = format_accuracy(accuracy)
    size = number(metrics, "onnx", "file_bytes")
    if size is not None:
        values["File size"] = format_bytes(size)
    for name, prefix in (("Latency of the original", "baseline_latency"), ("Latency of the file", "latency")):
        median = number(metrics, "onnx", f"{prefix}_ms")
        if median is not None:
            low, high = (
                number(metrics, "onnx", f"{prefix}_low_ms"),
                number(metrics, "onnx", f"{prefix}_high_ms"),
            )
            spread = f", 10th to 90th percentile {low:.3g} to {high:.3g} ms" if low and high else ""
            values[name] = f"median {format_latency(median)}{spread}"
    return values


_DOTS_PER_INCH = 160
METRICS = "metrics.json"
_FILES = {
    METRICS: "the numbers of this page, for programs",
    "plan.json": "the operations of every layer",
    "model.safetensors": "the compressed network with its plan",
    "model.onnx": "the same for onnxruntime, verified",
    "dense.safetensors": "the dense network, as trained here",
    "optimizer_step.onnx": "a step of the optimizer as an ONNX graph",
    "episodes.csv": "every plan that was tried",
    ".hydra/config.yaml": "the whole configuration",
    "rankrl.log": "the log",
}


def write_report(
    folder: str | Path,
    *,
    metrics: Mapping[str, Any] | None = None,
    layers: Sequence[LayerRow] = (),
    epochs: Sequence[EpochRow] = (),
    setup: Mapping[str, str] | None = None,
) -> Path:
    """Write the report of a run next to its other files.

    `episodes.csv` is read from the folder where there is one.
    """
    folder = Path(folder)
    report = RunReport(
        read_metrics(folder) if metrics is None else metrics,
        layers,
        read_episodes(folder),
        epochs,
        setup or {},
        _files(folder),
    )
    page = folder / "report.html"
    document = run_page(report)
    if report.episodes:
        save_figure(reward_figure(report.episodes), folder / "plots" / "reward.png")
    if report.layers:
        save_figure(layers_figure(report.layers), folder / "plots" / "layers.png")
    if report.epochs:
        figure = fine_tuning_figure(report.epochs, score=epoch_score(report.metrics))
        save_figure(figure, folder / "plots" / "finetune.png")
    write_atomically(page, document)
    return page


def _files(folder: Path) -> list[tuple[str, str]]:
    """Return the files that the page links to; `metrics.json` is one of them, though written later."""
    return [(name, text) for name, text in _FILES.items() if name == METRICS or (folder / name).is_file()]


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure as PNG, atomically."""
    with atomic_path(path) as temporary:
        figure.savefig(temporary, dpi=_DOTS_PER_INCH, facecolor="white")
