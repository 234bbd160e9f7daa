"""Read the stages of a run from its metrics, and make tables and notes of their numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from textwrap import wrap
from typing import Any

from rich import table as terminal

from rankrl.errors import RankrlError, counted
from rankrl.timing import is_unchanged


class ReportError(RankrlError):
    """A run folder lacks a file that the report needs, or holds a damaged one."""


_SPACE = "\N{NO-BREAK SPACE}"

UNKNOWN = "–"
"""Stands where a number was not measured."""

UNCHANGED = "unchanged"
"""Stands where a time differs by no more than the noise."""

_CLOCKS = {"processor": "processor time", "wall": "time on the wall"}


_TERMINAL = 80
"""Characters that a usual terminal shows in a line."""


@dataclass(frozen=True)
class Table:
    """A table for pages, the terminal and Markdown; it is false without rows.

    The first cell of each row is the row's heading, which leads to one of `links`, if there are any.
    """

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    text_columns: Sequence[int] = (0,)
    links: Sequence[str | None] = ()
    is_wide: bool = False

    def __bool__(self) -> bool:
        """Tell whether the table has rows."""
        return bool(self.rows)

    def printed(self, title: str | None = None) -> terminal.Table:
        """Return the table for the terminal, with headings broken where it would be too wide."""
        shown = terminal.Table(title=title, title_style="bold", header_style="bold", caption=self.caption)
        cells = [
            max((len(line) for row in self.rows for line in row[index].splitlines()), default=0)
            for index in range(len(self.columns))
        ]
        is_broken = sum(map(max, cells, map(len, self.columns))) + 3 * len(cells) + 1 > _TERMINAL
        for index, (column, width) in enumerate(zip(self.columns, cells, strict=True)):
            heading = "\n".join(wrap(column, max(1, width), break_long_words=False)) if is_broken else column
            shown.add_column(heading, justify="right" if index else "left", overflow="fold")
        for row in self.rows:
            shown.add_row(*row)
        return shown

    def markdown(self) -> str:
        """Return the table in Markdown, without its caption."""
        lines = [self.columns, ["---", *["---:"] * (len(self.columns) - 1)], *self.rows]
        return "".join(f"| {' | '.join(line)} |\n" for line in lines)


@dataclass(frozen=True)
class Stage:
    """One state of the model; None where a number was not measured."""

    name: str
    accuracy: float | None = None
    params: float | None = None
    macs: float | None = None
    latency_ms: float | None = None
    agreement: float | None = None
    score: float | None = None
    file_bytes: float | None = None


def stages(metrics: Mapping[str, Any]) -> list[Stage]:
    """Return the stages that a run went through, read from its metrics."""
    found = [
        _stage(metrics, key, name)
        for name, key in (("Baseline", "baseline"), ("Compressed", "compressed"))
        if metrics.get(key)
    ]
    if metrics.get("finetuned"):
        last = found[-1] if found else Stage("")
        tuned = _stage(metrics, "finetuned", "Fine-tuned")
        if metrics.get("epochs") or tuned.accuracy != last.accuracy or "agreement" in metrics["finetuned"]:
            found.append(replace(tuned, params=last.params, macs=last.macs))
    if found:
        found[-1] = _with_file(metrics, found[-1], "")
    if found and found[0].name == "Baseline":
        found[0] = _with_file(metrics, found[0], "baseline_")
    return found


def _stage(metrics: Mapping[str, Any], section: str, name: str) -> Stage:
    keys = ("accuracy", "params", "macs", "agreement", "score")
    return Stage(name, **{key: number(metrics, section, key) for key in keys})


def _with_file(metrics: Mapping[str, Any], stage: Stage, prefix: str) -> Stage:
    latency, size = (number(metrics, "onnx", f"{prefix}{key}") for key in ("latency_ms", "file_bytes"))
    return replace(stage, latency_ms=latency, file_bytes=size)


def dense_int8(metrics: Mapping[str, Any]) -> Stage | None:
    """Return the stage of the dense network in 8-bit integers; None if it was not measured."""
    if not metrics.get("dense_int8"):
        return None
    latency, faster = (
        number(metrics, "onnx", "baseline_latency_ms"),
        number(metrics, "dense_int8", "latency_ratio"),
    )
    return Stage(
        "Dense, int8",
        params=number(metrics, "baseline", "params"),
        macs=number(metrics, "baseline", "macs"),
        latency_ms=None if latency is None or faster is None else latency / faster,
        **{
            key: number(metrics, "dense_int8", key)
            for key in ("accuracy", "agreement", "score", "file_bytes")
        },
    )


def number(metrics: Mapping[str, Any], section: str, key: str) -> float | None:
    """Return one number of the metrics, or None if it is missing."""
    value = (metrics.get(section) or {}).get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ReportError(f"metrics.json: {section}.{key} is {value!r}; it must be a finite number.")
    return value


def heldout_note(metrics: Mapping[str, Any]) -> str:
    """Return a sentence for readers of held-out accuracies; empty where the network has not seen the images.

    A checkpoint trained by rankrl records its held-out images; for others the training images are unknown.
    """
    if not metrics.get("checkpoint") or metrics.get("heldout_is_new"):
        return ""
    return (
        "The checkpoint may have been trained on these held-out images; accuracies on them can then lie "
        "above that on the test set."
    )


def format_accuracy(accuracy: float | None) -> str:
    """Write a fraction as percent with two decimals."""
    return UNKNOWN if accuracy is None else f"{100 * accuracy:.2f}{_SPACE}%"


def format_share(share: float) -> str:
    """Write a fraction as percent with one decimal."""
    return f"{round(100 * share, 1) + 0.0:.1f}{_SPACE}%"  # + 0.0 turns -0.0 into 0.0


def format_count(count: float | None) -> str:
    """Write a count in full."""
    return UNKNOWN if count is None else f"{count:,.0f}"


def format_large(count: float | None) -> str:
    """Write a count in thousands, millions or billions, to four digits."""
    if count is None:
        return UNKNOWN
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= unit:
            return f"{count / unit:#.4g}".rstrip(".") + _SPACE + name
    return f"{count:.0f}"


def format_bytes(count: float | None) -> str:
    """Write bytes in thousands, millions or billions, to four digits."""
    return UNKNOWN if count is None else f"{format_large(count)}B"


def format_latency(milliseconds: float | None) -> str:
    """Write milliseconds to three digits."""
    return UNKNOWN if milliseconds is None else f"{milliseconds:#.3g}".rstrip(".") + f"{_SPACE}ms"


def format_number(value: float | None) -> str:
    """Write a number to four digits."""
    return UNKNOWN if value is None else f"{value:.4g}".replace("-", "−")


def format_points(before: float | None, after: float | None) -> str:
    """Write the difference of two accuracies in percentage points, with its sign."""
    if before is None or after is None:
        return UNKNOWN
    points = round(100 * (after - before), 2)
    return "±0 points" if points == 0 else f"{points:+.2f} points".replace("-", "−")


def format_ratio(ratio: float | None, better: str, worse: str) -> str:
    """Write a ratio original ÷ compressed: `2.50× fewer` above 1, `1.20× more` below."""
    if ratio is None or ratio <= 0:
        return UNKNOWN
    return f"{ratio:.2f}× {better}" if ratio >= 1 else f"{1 / ratio:.2f}× {worse}"


def ratio(metrics: Mapping[str, Any], name: str, before: float | None, after: float | None) -> float | None:
    """Return the ratio original ÷ compressed: the metrics' own, or that of the two values."""
    recorded = number(metrics, "ratios", name)
    if recorded is not None or before is None or not after:
        return recorded
    return before / after


def latency_change(metrics: Mapping[str, Any], before: float | None, after: float | None) -> str:
    """Write `1.70× faster`, `1.25× slower`, or `unchanged` where times differ by no more than the noise."""
    faster = ratio(metrics, "latency", before, after)
    if faster is None or faster <= 0:
        return UNKNOWN
    return format_speed(faster, *_latency_interval(metrics))


def format_speed(faster: float, low: float | None, high: float | None) -> str:
    """Write a ratio of times with its interval: `1.70× faster`, `1.25× slower` or `unchanged`."""
    return UNCHANGED if is_unchanged(faster, low, high) else format_ratio(faster, "faster", "slower")


def latency_note(metrics: Mapping[str, Any]) -> str:
    """Return a paragraph on the conditions and the uncertainty of the latency."""
    onnx = metrics.get("onnx") or {}
    parts = [f"Latency is the median {_CLOCKS.get(str(onnx.get('clock')), 'time')}"]
    batch, threads = number(metrics, "onnx", "batch"), number(metrics, "onnx", "threads")
    if batch:
        parts.append(f"per batch of {batch:.0f}")
    if threads:
        parts.append(f"on {counted(int(threads), 'thread')}")
    sentences = [" ".join(parts)]
    low, high = _latency_interval(metrics)
    if low is not None and high is not None:
        sentences.append(
            f"The original takes {low:.2f} to {high:.2f} times as long (95{_SPACE}% interval of the ratio of "
            "their times)"
        )
    sentences += filter(None, [rival_note(metrics)])
    if onnx.get("busy"):
        sentences.append(f"The machine was busy: {onnx['busy']}")
    return "".join(f"{sentence}. " for sentence in sentences).rstrip()


def rival_note(metrics: Mapping[str, Any]) -> str:
    """Return a paragraph on the dense network in 8-bit integers, which needs no compression or training."""
    accuracy, faster = (number(metrics, "dense_int8", key) for key in ("accuracy", "latency_ratio"))
    if accuracy is None or faster is None:
        return ""
    speed = format_speed(faster, *_latency_interval(metrics, "dense_int8"))
    return f"For comparison, the dense network in 8-bit integers: {format_accuracy(accuracy)}, {speed}"


def _latency_interval(metrics: Mapping[str, Any], section: str = "onnx") -> tuple[float | None, float | None]:
    return number(metrics, section, "latency_ratio_low"), number(metrics, section, "latency_ratio_high")


AGREEMENT = "Agreement"
"""Title of how far outputs agree with the original's."""


@dataclass(frozen=True)
class Measure:
    """A quality of a run's networks, higher is better, or a cost.

    `values` has one for each stage, `rival` is that of the dense network in 8-bit integers, `kept` the share
    of the original's value that is left, and `cost` names a cost within a sentence.
    """

    title: str
    values: tuple[float | None, ...] = ()
    write: Callable[[float | None], str] = format_accuracy
    change: str = UNKNOWN
    kept: float | None = None
    rival: float | None = None
    cost: str = ""

    @property
    def words(self) -> str:
        """Its name within a sentence: "test accuracy", "mean IoU"."""
        return self.title.lower() if self.title[1:].islower() else self.title

    @property
    def is_share(self) -> bool:
        """Whether values are fractions that are written as percent."""
        return self.write is format_accuracy

    @property
    def before(self) -> float | None:
        """The original's value."""
        return self.values[0]

    @property
    def after(self) -> float | None:
        """The last network's value."""
        return self.values[-1]

    @property
    def share(self) -> str:
        """The share that is left, as text."""
        return UNKNOWN if self.kept is None else format_share(self.kept)

    @property
    def width(self) -> float:
        """Length of its bar in percent."""
        return round(100 * min(1.0, max(0.0, self.kept or 0.0)), 2)

    @property
    def look(self) -> str:
        """The CSS class of its bar: a quality, a cost that has fallen, or one that has grown."""
        if not self.cost:
            return "good"
        has_grown = self.kept is not None and self.kept > 1 and self.change != UNCHANGED
        return "more" if has_grown else "kept"


HELDOUT_ACCURACY = Measure("Held-out accuracy")
"""The score that chooses the best epoch, unless the run names another one."""


def score_measure(metrics: Mapping[str, Any]) -> Measure | None:
    """Return the score that plans were chosen by, if the run names it (`score_name`)."""
    name, values = metrics.get("score_name"), [stage.score for stage in stages(metrics)]
    known = [value for value in values if value is not None]
    if not name or not known:
        return None
    is_share = all(0 <= value <= 1 for value in known)
    return _quality(metrics, str(name), "score", format_accuracy if is_share else format_number)


def epoch_score(metrics: Mapping[str, Any]) -> Measure:
    """Return the score that chooses among the epochs of fine-tuning."""
    return score_measure(metrics) or HELDOUT_ACCURACY


def qualities(metrics: Mapping[str, Any]) -> list[Measure]:
    """Return the measures of quality, the most important first.

    They are the score that plans were chosen by, test accuracy, and the agreement with the original.
    """
    found = [
        score_measure(metrics),
        _quality(metrics, "Test accuracy", "accuracy"),
        _quality(metrics, AGREEMENT, "agreement"),
    ]
    return [each for each in found if each and any(value is not None for value in each.values)]


def _quality(
    metrics: Mapping[str, Any],
    title: str,
    attribute: str,
    write: Callable[[float | None], str] = format_accuracy,
) -> Measure:
    values, rival = _values(metrics, attribute)
    before, after = (values[0], values[-1]) if values else (None, None)
    if write is format_accuracy or before is None or after is None:
        change = format_points(before, after)
    else:
        change = f"{after - before:+.4g}".replace("-", "−")
    kept = after / before if before is not None and before > 0 and after is not None else None
    return Measure(title, values, write, change, kept, rival)


def costs(metrics: Mapping[str, Any]) -> list[Measure]:
    """Return the measured costs: parameters, MACs, latency and bytes of the file."""
    found = []
    for title, key, attribute, write, better, worse, words in (
        ("Parameters", "params", "params", format_count, "fewer", "more", "parameters"),
        ("MACs", "macs", "macs", format_large, "fewer", "more", "MACs"),
        ("Latency", "latency", "latency_ms", format_latency, "", "", "time"),
        ("File", "file_bytes", "file_bytes", format_bytes, "smaller", "larger", "bytes"),
    ):
        values, rival = _values(metrics, attribute)
        if all(value is None for value in values):
            continue
        before, after = values[0], values[-1]
        reduction = ratio(metrics, key, before, after)
        if attribute == "latency_ms":
            change = latency_change(metrics, before, after)
        else:
            change = format_ratio(reduction, better, worse)
        kept = None
        if before and after is not None:
            kept = 1 / reduction if reduction else after / before
        found.append(Measure(title, values, write, change, kept, rival, words))
    return found


def _values(metrics: Mapping[str, Any], attribute: str) -> tuple[tuple[float | None, ...], float | None]:
    """Return a number of every stage, and that of the dense network in integers."""
    rival = dense_int8(metrics)
    values = tuple(getattr(stage, attribute) for stage in stages(metrics))
    return values, None if rival is None else getattr(rival, attribute)


def remains(metrics: Mapping[str, Any]) -> list[Measure]:
    """Return the measures of which a known share is left after compression."""
    if len(stages(metrics)) < 2:
        return []
    return [each for each in (*qualities(metrics), *costs(metrics)) if each.kept is not None]


def before_after(metrics: Mapping[str, Any]) -> Table:
    """Return the table of qualities and costs of every stage, and of the dense network in integers."""
    run_stages, rival = stages(metrics), dense_int8(metrics)
    several = len(run_stages) > 1
    columns = [
        *("", *(stage.name for stage in run_stages)),
        *(["Change"] if several else []),
        *([] if rival is None else [rival.name]),
    ]
    rows = [
        [
            *(each.title, *map(each.write, each.values)),
            *([each.change] if several else []),
            *([] if rival is None else [each.write(each.rival)]),
        ]
        for each in (*qualities(metrics), *costs(metrics))
    ]
    return Table(_measured_how(metrics), columns, rows)


def _measured_how(metrics: Mapping[str, Any]) -> str:
    """Explain the numbers of a run: on which inputs, how certain, under which conditions."""
    sentences = ["Accuracy is measured on the test set, which chose nothing."]
    if is_unlabelled(metrics):
        sentences = [
            "Agreement with the original is measured on held-out inputs, which nothing was fitted to."
        ]
        sentences += agreement_notes(metrics)
    score = score_measure(metrics)
    if score is not None:
        sentences.insert(0, f"{score.title} is what plans were chosen by.")
    sentences += [certificate_note(metrics), estimate_note(metrics)]
    if number(metrics, "onnx", "latency_ms") is not None:
        sentences.append(latency_note(metrics))
    return " ".join(filter(None, sentences))


def is_unlabelled(metrics: Mapping[str, Any]) -> bool:
    """Tell whether the network was compared with its original, without labels."""
    return number(metrics, "compressed", "agreement") is not None


def agreement_notes(metrics: Mapping[str, Any]) -> list[str]:
    """Return sentences on the agreement of each output, and of the worst of several quantities in one."""
    outputs = metrics.get("outputs", {}).items()
    meanings: dict[str, list[str]] = {}
    for name, output in outputs:
        if "scored_by" in output:
            meanings.setdefault(f"{output['scored_by']}, since {output['reason']}", []).append(name)
    several = len(meanings) > 1
    notes = [
        f"That of {', '.join(names)} is {meaning}." if several else f"It is {meaning}."
        for meaning, names in meanings.items()
    ]
    worst = [(output["worst"], output["score"]) for _, output in outputs if "worst" in output]
    return [*notes, *(f"The worst quantity is {name}: {score:.4f}." for name, score in worst)]


def certificate_note(metrics: Mapping[str, Any]) -> str:
    """Return a note on the loss, its interval and the verdict, or on why there is none; else empty."""
    certificate = metrics.get("certificate")
    if not certificate:
        reason = metrics.get("uncertified")
        return f"Nothing certifies its loss: {reason}." if reason else ""
    loss, unit = certificate["loss"], certificate["unit"]
    lost = f"{'loses' if loss >= 0 else 'gains'} {_amount(abs(loss), unit)} of {unit}"
    inputs = f"{certificate['inputs']:,} {certificate['what']}"
    return (
        f"On {inputs} it {lost} (95 % interval of the loss: {_interval(certificate)}){_verdict(certificate)}."
    )


def certificate_card(metrics: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return the headline of the loss of score as (name, value, note); empty without a certificate."""
    certificate = metrics.get("certificate")
    if not certificate:
        return []
    unit, drop = certificate["unit"], certificate["drop"]
    inputs = f"{certificate['inputs']:,} {certificate['what']}"
    note = f"95 % interval of the loss on {inputs}: {_interval(certificate)}"
    if drop is not None:
        certified = "certified" if certificate["certified"] else "not certified"
        note += f"; at most {_amount(drop, unit)} is {certified}"
    return [(f"Loss of {unit}", _amount(certificate["loss"], unit), note)]


def _interval(certificate: Mapping[str, Any]) -> str:
    ends = (certificate["low"], certificate["high"])
    return " to ".join(_amount(end, certificate["unit"], named=False) for end in ends)


def _verdict(certificate: Mapping[str, Any]) -> str:
    """Return whether the interval certifies the accepted loss, in words."""
    drop, needed, unit = certificate["drop"], certificate["needed"], certificate["unit"]
    seen = "" if certificate["independent"] else ", by which the plan may have been chosen, too"
    if drop is None:
        return seen
    accepted = f"at most {_amount(drop, unit)}"
    if certificate["certified"]:
        return f": a loss of {accepted} is certified"
    if certificate["loss"] > drop:
        return f"{seen}: more than the {_amount(drop, unit)} that may be lost"
    if needed is None:
        return f"{seen}: no number of inputs certifies {accepted} at this loss"
    if needed <= certificate["inputs"]:
        return f"{seen}: {accepted} is not certified"
    return f"{seen}: {accepted} is not certified, which would take about {needed:,.0f} inputs at this loss"


def _amount(value: float, unit: str, *, named: bool = True) -> str:
    """Write a difference of scores, in percentage points if they are fractions."""
    points = f"{value:.3g}" if unit == "score" else f"{100 * value:.2f}"
    text = "0" if float(points) == 0 else points.replace("-", "−")
    return f"{text} points" if named and unit != "score" else text


def estimate_note(metrics: Mapping[str, Any]) -> str:
    """Return a sentence on the estimated time on the target device; empty without one."""
    found = estimate(metrics)
    if not found:
        return ""
    count = len(found.get("networks") or ())
    corrected = f", corrected by {counted(count, 'finished network')} measured there" if count else ""
    return (
        f"The plan is for another device: its layers' times there ({found['conditions']}) add up to an "
        f"estimated {found['share']:.3f} of the original's{corrected}. Times of files are of this machine."
    )


def estimate(metrics: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the search's estimate of the time on the target device; empty without one."""
    return (metrics.get("search") or {}).get("estimate") or {}
