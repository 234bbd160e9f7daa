"""Write pages as HTML, and the page and the terminal's tables of one run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from matplotlib.figure import Figure
from rich import table as terminal

from rankrl.errors import counted
from rankrl.files import atomic_path, write_atomically
from rankrl.onnx.runtimes import DEFAULT_RUNTIME
from rankrl.options.search import budget_line, objective_line
from rankrl.plan_search.scores.evaluation import best_rows
from rankrl.report.figures import (
    LEFT_DENSE,
    ONLY_ROUNDED,
    Drawing,
    drawing,
    fine_tuning_figure,
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
    UNKNOWN,
    Table,
    before_after,
    certificate_card,
    certificate_note,
    costs,
    epoch_score,
    estimate,
    estimate_note,
    format_accuracy,
    format_count,
    format_large,
    format_latency,
    format_share,
    format_speed,
    heldout_note,
    is_unlabelled,
    latency_note,
    number,
    qualities,
    remains,
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

Sections = Mapping[str, Mapping[str, Any]]
"""The parts of each section of a page, by the names of their macros in `parts.html.jinja`."""


@dataclass(frozen=True)
class Head:
    """The top of a page."""

    title: str
    eyebrow: Sequence[str] = ()
    warnings: Sequence[str] = ()
    cards: Sequence[tuple[str, str, str]] = ()


def render(head: Head, sections: Sections) -> str:
    """Write a page as one self-contained HTML document; parts and sections without content are left out."""
    filled = {
        title: {name: content for name, content in parts.items() if content}
        for title, parts in sections.items()
    }
    shown = {title: parts for title, parts in filled.items() if parts}
    return _TEMPLATES.get_template("page.html.jinja").render(head=head, sections=shown)


def summary_table(metrics: Mapping[str, Any]) -> terminal.Table:
    """Return the before/after table for the terminal."""
    known = number(metrics, "onnx", "latency_ratio_low") is not None
    table = replace(before_after(metrics), caption=latency_note(metrics) if known else "")
    return table.printed(title=run_title(metrics, unnamed=""))


def conclusion(metrics: Mapping[str, Any]) -> str:
    """Return the result of a run and the certified loss in words; empty if it compressed nothing."""
    shares = [f"{each.share} of the {each.cost}" for each in remains(metrics) if each.cost]
    if not shares:
        return ""
    needs = f"{', '.join(shares[:-1])} and {shares[-1]}" if len(shares) > 1 else shares[0]
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


def measured_table(metrics: Mapping[str, Any]) -> terminal.Table:
    """Return the table of measured plans for the terminal; without rows if none was measured."""
    return measured_plans(metrics).printed()


def device_table(metrics: Mapping[str, Any]) -> terminal.Table:
    """Return the table of networks measured on another device; without rows if none was."""
    return device_networks(metrics).printed()


def runtimes_table(metrics: Mapping[str, Any]) -> terminal.Table:
    """Return the table of runtimes for the terminal; without rows if only one was measured."""
    return runtime_times(metrics).printed()


def run_page(report: RunReport) -> str:
    """Write the page of one run as one self-contained HTML document."""
    metrics, layers = report.metrics, report.layers
    eyebrow = [*_eyebrow(metrics), *([report.setup[DATE]] if DATE in report.setup else [])]
    head = Head(run_title(metrics), eyebrow, metrics.get("warnings") or (), _headline(metrics))
    return render(
        head,
        {
            "What is left": {"bars": remains(metrics)},
            "Runtimes": {"table": runtime_times(metrics)},
            "Before and after": {"table": before_after(metrics)},
            "Search": {"figure": _search(report)},
            "The agent": {"table": _agent(report)},
            "Plans carried out": {"table": measured_plans(metrics)},
            "On the other device": {"table": device_networks(metrics)},
            "Layers": {
                "plan": plan_drawing(layers),
                "figure": _layers(layers),
                "table": _layer_table(report),
            },
            "Fine-tuning": {"figure": _fine_tuning(report)},
            "ONNX file": {"facts": _onnx_facts(metrics)},
            "Files": {"files": report.files},
            "Setup": {"facts": report.setup},
        },
    )


def run_title(metrics: Mapping[str, Any], unnamed: str = "rankrl run") -> str:
    """Return a short name for the run, e.g. `resnet20 on cifar10`."""
    return " on ".join(str(metrics[key]) for key in ("model", "dataset") if metrics.get(key)) or unnamed


def _eyebrow(metrics: Mapping[str, Any]) -> list[str]:
    parts = [
        str(metrics[key]).replace("_", " ")
        for key in ("task", "pruner", "decomposition", "selector")
        if metrics.get(key)
    ]
    if metrics.get("budget"):
        parts.append(budget_line(metrics["budget"]))
    if metrics.get("seed") is not None:
        parts.append(f"seed {metrics['seed']}")
    return parts


def _headline(metrics: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return the headline numbers as (name, value, note)."""
    if len(stages(metrics)) < 2:
        return []
    return [
        *(
            (each.title, each.write(each.after), f"{each.change}, from {each.write(each.before)}")
            for each in qualities(metrics)
            if each.after is not None and each.title != AGREEMENT
        ),
        *certificate_card(metrics),
        *(
            (each.title, each.change, f"{each.write(each.before)} → {each.write(each.after)}")
            for each in costs(metrics)
            if each.before is not None and each.after is not None
        ),
    ]


_ONNX = (
    *("max_abs_difference", "agreement", "accuracy"),
    *("latency_low_ms", "latency_high_ms", "baseline_latency_low_ms", "baseline_latency_high_ms"),
)
_SCORED = {
    False: "on held-out images before fine-tuning",
    True: "(1 − relative error of the outputs, unless another score was chosen) before the refit",
}


def _scored(metrics: Mapping[str, Any], value: float) -> str:
    """Return a plan's score with the name that the run gives it."""
    score = score_measure(metrics)
    if score is not None:
        return f"{score.title} {score.write(value)} before the refit"
    return f"{format_accuracy(value)} {_SCORED[is_unlabelled(metrics)]}"


def _search(report: RunReport) -> Drawing | None:
    rows = report.episodes
    if len(rows) < 2:  # the single plan of a heuristic is no search
        return None
    (best,) = best_rows(rows, 1)
    seconds = number(report.metrics, "search", "seconds")
    plans = counted(len({row.choices for row in rows}), "evaluated plan")
    over = sum(not row.within_budget for row in rows)
    line = objective_line(report.metrics.get("search") or {}, report.metrics.get("budget") or {})
    caption = (
        f"{plans}{'' if seconds is None else f' in {seconds:.0f} s'} ({line}). "
        f"The best one, episode {best.episode} ({best.phase}), earns the reward {best.reward:.4f}: "
        f"{_scored(report.metrics, best.accuracy)}, with "
        f"{format_share(best.params_kept)} of the parameters and {format_share(best.macs_kept)} of the MACs. "
        f"{heldout_note(report.metrics)}"
    )
    if over:
        caption += (
            f" Of {counted(len(rows), 'episode')}, {over} had a plan over the budget, which do not count."
        )
    return drawing(
        partial(reward_figure, rows),
        "reward",
        f"Reward of each episode; the best is {best.reward:.4f} in episode {best.episode}.",
        caption.strip(),
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
"""Numbers of an observation that the page shows."""


def _agent(report: RunReport) -> Table:
    """Tabulate an agent's observations and actions in its best episode, by layer."""
    rows, caption = (report.metrics.get("search") or {}).get("agent") or (), ""
    names = [name for name in (rows[0]["observation"] if rows else ()) if name in _OBSERVED]
    if rows:
        best = best_rows(report.episodes, 1)[0].reward
        greedy = next((row.reward for row in report.episodes if row.phase == PRESET_PHASE), None)
        against = "" if greedy is None else f", greedy's plan {greedy:.4f}"
        more = len(rows[0]["observation"]) - len(names)
        caption = (
            "What the agent saw of each layer, each in [0, 1], the action that it took, in [-1, 1], and what "
            f"the layer became in its best episode, which earned the reward {best:.4f}{against}."
        )
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
        partial(layers_figure, layers),
        "layers",
        "Share of its parameters that each layer keeps, and its ranks. The table below holds the numbers.",
        f"{counted(len(layers), 'layer')}, {rounded}{kinds[LEFT_DENSE]} {LEFT_DENSE}; "
        f"together they keep {format_share(kept)} of their parameters.",
    )


def _layer_table(report: RunReport) -> Table:
    layers, lost_by = report.layers, {each["name"]: each for each in report.metrics.get("layers") or ()}
    lost = sum(each["loss"] for each in lost_by.values()) or 1.0
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
        ("Share of the loss", bool(lost_by), lambda row: _share(lost_by, row, "loss", lost)),
        (
            "Time saved",
            any(each["saved_time"] is not None for each in lost_by.values()),
            lambda row: _share(lost_by, row, "saved_time"),
        ),
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
    if lost_by:
        caption += (
            " Shares are of the sum of the losses at the network's output, as the search estimated them. A "
            "layer that loses much and saves little is one to leave as it is: decomposition.skip=[NAME]."
        )
    return Table(
        caption,
        [title for title, _ in shown],
        [[cell(row) for _, cell in shown] for row in layers],
        text_columns=(0, len(shown) - 1) if reasoned else (0,),
    )


def _share(costs: Mapping[str, Any], row: LayerRow, key: str, whole: float = 1.0) -> str:
    value = costs.get(row.name, {}).get(key)
    return UNKNOWN if value is None else format_share(value / whole).replace("-", "−")


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
    trained = (report.metrics.get("trainings") or {}).get("finetune") or {}
    taken = " No epoch was better than the network was before, which is taken as it was."
    return drawing(
        partial(fine_tuning_figure, report.epochs, score=score),
        "fine-tuning",
        f"{score.title} and training loss per epoch of fine-tuning.",
        f"Best {score.words}: {score.write(best.accuracy)}, after epoch {best.epoch} "
        f"of {len(report.epochs)}.{taken if trained.get('epoch') == 0 else ''} "
        f"{heldout_note(report.metrics)}".strip(),
    )


_MEASURES = {
    "latency": "time",
    "estimated_latency": "time on the device of timing.table, estimated from its layers",
    "bytes": "bytes",
    "macs": "multiply-accumulates",
    "params": "parameters",
}


def measured_plans(metrics: Mapping[str, Any]) -> Table:
    """Return the table of plans that a search carried out and measured."""
    plans = (metrics.get("search") or {}).get("measured") or ()
    rows = [
        [
            str(plan["name"]) + (" (taken)" if plan["taken"] else ""),
            f"{plan['loss']:.4f}",
            f"{plan['cost']:.3f}",
            f"{plan['expected_cost']:.3f}",
        ]
        for plan in plans
    ]
    return Table(_choice(plans), ["Plan", "Loss of score", "Cost", "Expected cost"], rows)


def _choice(plans: Sequence[Mapping[str, Any]]) -> str:
    """Explain which plan was taken."""
    if not plans:
        return ""
    taken = next((plan["name"] for plan in plans if plan["taken"]), None)
    measure = plans[0]["measure"]
    done = "scored" if measure.startswith("estimated") else "measured"
    note = f"Each plan was carried out and {done}; the cost is the {_MEASURES[measure]}."
    if taken == "all dense":
        return f"{note} Nothing cheaper loses as little, so you get the original network."
    if taken is not None:
        note += (
            f" {taken[0].upper()}{taken[1:]} was taken: no other is better in one and as good in the other."
        )
    return note


def device_networks(metrics: Mapping[str, Any]) -> Table:
    """Return the table of finished networks that another device measured."""
    found = estimate(metrics)
    rows = [
        [
            str(each["title"]) + (" (this plan)" if each["taken"] else ""),
            "" if each["score"] is None else f"{each['score']:.4f}",
            f"{each['milliseconds']:.3g} ms",
            f"{each['share']:.3f}",
        ]
        for each in found.get("networks") or ()
    ]
    caption = (
        f"Measured on the other device ({found.get('conditions')}), whole; scores are of the machine that "
        "wrote their kit."
    )
    return Table(caption, ["Network", "Score", "Time there", "Of the dense one's"], rows)


_TIMED = {
    "baseline_": "the original",
    "": "the exported file",
    "dense_int8_": "the original in int8",
    "nncf_int8_": "the original in NNCF int8",
}
"""Titles of files, by the prefix of their numbers."""


def runtime_times(metrics: Mapping[str, Any]) -> Table:
    """Return the table of files in runtimes."""
    section = metrics.get("runtimes") or {}
    rows = []
    for before, title in _TIMED.items():
        times = {name: number(section, name, f"{before}latency_ms") for name in section}
        known = {name: time for name, time in times.items() if time is not None}
        if known:
            cells = [_cell(section, name, before) for name in section]
            name = title.removeprefix("the ")
            rows.append([name[0].upper() + name[1:], *cells, min(known, key=lambda name: known[name])])
    return Table(_runtime_note(section), ["File", *section, "Fastest in"], rows)


def _runtime_note(section: Mapping[str, Any]) -> str:
    """Explain the runtimes' relative speeds, clocks and checks."""
    sentences = ["All were timed in the same turns"]
    clocks = {name: entry["clock"] for name, entry in section.items() if "clock" in entry}
    if len(set(clocks.values())) > 1:
        walls = [name for name, clock in clocks.items() if clock == "wall"]
        sentences.append(f"{', '.join(walls)}: timed on the wall, the others in processor time")
    for name in section:
        sentences += [f"{name}: {fact}" for fact in _runtime_facts(section, name)]
    return " ".join(f"{sentence}." for sentence in sentences)


def _cell(section: Mapping[str, Any], runtime: str, before: str) -> str:
    """Format a file's time and score in a runtime."""
    time, score = (number(section, runtime, f"{before}{each}") for each in ("latency_ms", "score"))
    if time is None:
        return UNKNOWN
    return format_latency(time) + ("" if score is None else f", {format_accuracy(score)}")


def _runtime_facts(section: Mapping[str, Any], name: str) -> Iterator[str]:
    """Yield a runtime's speed relative to onnxruntime's, and how its outputs differ from PyTorch's."""
    changes = []
    for before, title in _TIMED.items():
        ends = ("", "_low", "_high")
        faster, low, high = (number(section, name, f"{before}latency_runtime_ratio{end}") for end in ends)
        if faster is not None:
            changes.append(f"{title} {format_speed(faster, low, high)}")
    if changes:
        yield f"against {DEFAULT_RUNTIME}, {', '.join(changes)}"
    difference, agreement = (number(section, name, key) for key in ("max_abs_difference", "agreement"))
    if difference is not None:
        yield f"outputs differ from PyTorch by at most {difference:.1e}"
    if agreement is not None and agreement < 1:
        share = format_accuracy(agreement)
        yield f"{_TIMED['']} gives the class of PyTorch on {share} of the held-out images"
    if "failed" in section[name]:
        yield f"not timed, since {section[name]['failed'].rstrip('.')}"


def _onnx_facts(metrics: Mapping[str, Any]) -> dict[str, str | None]:
    onnx = {key: number(metrics, "onnx", key) for key in _ONNX}
    rounded = ", before rounding" if onnx["agreement"] is not None else ""
    difference = onnx["max_abs_difference"]
    values = {
        f"Largest difference from PyTorch{rounded}": None if difference is None else f"{difference:.1e}",
        "Agreement with PyTorch, with rounding": format_accuracy(onnx["agreement"]),
        "Test accuracy measured from the file": format_accuracy(onnx["accuracy"]),
    }
    for name, prefix in (("Latency of the original", "baseline_latency"), ("Latency of the file", "latency")):
        low, high = onnx[f"{prefix}_low_ms"], onnx[f"{prefix}_high_ms"]
        if low and high:
            values[name] = f"10th to 90th percentile {low:.3g} to {high:.3g} ms"
    return {name: value for name, value in values.items() if value not in (None, UNKNOWN)}


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
