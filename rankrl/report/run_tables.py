"""Read the stages of a run from its metrics, and format their numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rankrl.errors import RankrlError, counted
from rankrl.onnx.runtimes import DEFAULT_RUNTIME
from rankrl.timing import is_unchanged


class ReportError(RankrlError):
    """A run folder lacks a file that the report needs, or holds a damaged one."""


_SPACE = "\N{NO-BREAK SPACE}"

UNKNOWN = "–"
"""Stands where a number was not measured."""

UNCHANGED = "unchanged"
"""Stands where a time differs by no more than the noise."""

_SECTIONS = {"Baseline": "baseline", "Compressed": "compressed", "Fine-tuned": "finetuned"}
_CLOCKS = {"processor": "processor time", "wall": "time on the wall"}


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
    run_stages = [
        Stage(name, *(number(metrics, key, field) for field in ("accuracy", "params", "macs")))
        for name, key in (("Baseline", "baseline"), ("Compressed", "compressed"))
        if metrics.get(key)
    ]
    if metrics.get("finetuned"):
        last, accuracy = run_stages[-1] if run_stages else Stage(""), number(metrics, "finetuned", "accuracy")
        if metrics.get("epochs") or accuracy != last.accuracy or "agreement" in metrics["finetuned"]:
            run_stages.append(Stage("Fine-tuned", accuracy, last.params, last.macs))
    latencies, sizes = {}, {}
    if run_stages:
        last_index = len(run_stages) - 1
        latencies[last_index] = number(metrics, "onnx", "latency_ms")
        sizes[last_index] = number(metrics, "onnx", "file_bytes")
        if run_stages[0].name == "Baseline":
            latencies[0] = number(metrics, "onnx", "baseline_latency_ms")
            sizes[0] = number(metrics, "onnx", "baseline_file_bytes")
    return [
        replace(
            stage,
            latency_ms=latencies.get(index),
            file_bytes=sizes.get(index),
            agreement=number(metrics, _SECTIONS[stage.name], "agreement"),
            score=number(metrics, _SECTIONS[stage.name], "score"),
        )
        for index, stage in enumerate(run_stages)
    ]


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
    """Write `1.70× faster`, `1.25× slower`, or `unchanged` where two times differ by no more than the noise.

    Args:
        metrics: The content of `metrics.json`, with the ratio and its interval as far as they were measured.
        before: Milliseconds of the original.
        after: Milliseconds of the compressed model.
    """
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
class Quality:
    """One measure of how good networks are, higher is better."""

    title: str
    values: tuple[float | None, ...]
    is_share: bool = True

    @property
    def words(self) -> str:
        """Its name within a sentence: "test accuracy", "mean IoU"."""
        return self.title.lower() if self.title[1:].islower() else self.title

    @property
    def before(self) -> float | None:
        """The original's value."""
        return self.values[0]

    @property
    def after(self) -> float | None:
        """The last network's value."""
        return self.values[-1]

    @property
    def change(self) -> str:
        """The difference, with its sign: in points for fractions."""
        if self.is_share or self.before is None or self.after is None:
            return format_points(self.before, self.after)
        return f"{self.after - self.before:+.4g}".replace("-", "−")

    def write(self, value: float | None) -> str:
        """Write a value: fractions as percent, others to four digits."""
        if self.is_share or value is None:
            return format_accuracy(value)
        return f"{value:.4g}".replace("-", "−")


HELDOUT_ACCURACY = Quality("Held-out accuracy", ())
"""The score that chooses the best epoch, unless the run names another one."""


def score_quality(metrics: Mapping[str, Any]) -> Quality | None:
    """Return the score that plans were chosen by, if the run names it (`score_name`)."""
    name, values = metrics.get("score_name"), tuple(stage.score for stage in stages(metrics))
    known = [value for value in values if value is not None]
    if not name or not known:
        return None
    return Quality(str(name), values, all(0 <= value <= 1 for value in known))


def epoch_score(metrics: Mapping[str, Any]) -> Quality:
    """Return the score that chooses among the epochs of fine-tuning."""
    return score_quality(metrics) or HELDOUT_ACCURACY


def qualities(metrics: Mapping[str, Any]) -> list[Quality]:
    """Return the measures of quality, the most important first.

    They are the score that plans were chosen by, test accuracy, and the agreement with the original.
    """
    score, run_stages = score_quality(metrics), stages(metrics)
    measured = [
        Quality("Test accuracy", tuple(stage.accuracy for stage in run_stages)),
        Quality(AGREEMENT, tuple(stage.agreement for stage in run_stages)),
    ]
    return [
        *([] if score is None else [score]),
        *(each for each in measured if any(value is not None for value in each.values)),
    ]


def certificate_note(metrics: Mapping[str, Any]) -> str:
    """Return a note on the loss, its interval and the verdict, or on why there is none; else empty."""
    loss, low, high = (number(metrics, "certificate", key) for key in ("loss", "low", "high"))
    if loss is None or low is None or high is None:
        reason = metrics.get("uncertified")
        return f"Nothing certifies its loss: {reason}." if reason else ""
    certificate = metrics["certificate"]
    unit, inputs = certificate["unit"], f"{certificate['inputs']:,} {certificate['what']}"
    lost = (
        f"loses {_amount(loss, unit)} of {unit}" if loss >= 0 else f"gains {_amount(-loss, unit)} of {unit}"
    )
    ends = " to ".join(_amount(end, unit, named=False) for end in (low, high))
    return f"On {inputs} it {lost} (95 % interval of the loss: {ends}){_verdict(metrics)}."


def certificate_card(metrics: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return the headline of the loss of score as (name, value, note); empty without a certificate."""
    loss, low, high = (number(metrics, "certificate", key) for key in ("loss", "low", "high"))
    if loss is None or low is None or high is None:
        return []
    certificate = metrics["certificate"]
    unit, drop = certificate["unit"], number(metrics, "certificate", "drop")
    ends = " to ".join(_amount(end, unit, named=False) for end in (low, high))
    note = f"95 % interval of the loss on {certificate['inputs']:,} {certificate['what']}: {ends}"
    if drop is not None:
        certified = "certified" if certificate["certified"] else "not certified"
        note += f"; at most {_amount(drop, unit)} is {certified}"
    return [(f"Loss of {unit}", _amount(loss, unit), note)]


def _verdict(metrics: Mapping[str, Any]) -> str:
    """Return whether the interval certifies the accepted loss, in words."""
    certificate, drop = metrics["certificate"], number(metrics, "certificate", "drop")
    seen = "" if certificate["independent"] else ", by which the plan may have been chosen, too"
    if drop is None:
        return seen
    accepted = f"at most {_amount(drop, certificate['unit'])}"
    needed = number(metrics, "certificate", "needed")
    if certificate["certified"]:
        return f": a loss of {accepted} is certified"
    if certificate["loss"] > drop:
        return f"{seen}: more than the {_amount(drop, certificate['unit'])} that may be lost"
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


_MEASURES = {
    "latency": "time",
    "estimated_latency": "time on the device of timing.table, estimated from its layers",
    "bytes": "bytes",
    "macs": "multiply-accumulates",
    "params": "parameters",
}
_COLUMNS = ["Plan", "Loss of score", "Cost", "Expected cost"]


def measured_rows(metrics: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return the table of measured plans as text, for the terminal and the page."""
    rows = [
        [
            str(plan["name"]) + (" (taken)" if plan["taken"] else ""),
            f"{plan['loss']:.4f}",
            f"{plan['cost']:.3f}",
            f"{plan['expected_cost']:.3f}",
        ]
        for plan in _plans(metrics)
    ]
    return _COLUMNS, rows


def measured_note(metrics: Mapping[str, Any]) -> str:
    """Return a paragraph on the chosen plan; empty if none was measured."""
    plans = _plans(metrics)
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


def estimate_note(metrics: Mapping[str, Any]) -> str:
    """Return a sentence on the estimated time on the target device; empty without one."""
    estimate = (metrics.get("search") or {}).get("estimate")
    if estimate is None:
        return ""
    return (
        f"The plan is for another device: its layers' times there ({estimate['conditions']}) add up to an "
        f"estimated {estimate['share']:.3f} of the original's{_corrected(estimate)}. Times of files are "
        "of this machine."
    )


def device_rows(metrics: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return the table of finished networks measured on another device; no rows without any."""
    rows = [
        [
            str(each["title"]) + (" (this plan)" if each["taken"] else ""),
            "" if each["score"] is None else f"{each['score']:.4f}",
            f"{each['milliseconds']:.3g} ms",
            f"{each['share']:.3f}",
        ]
        for each in _finished(metrics)
    ]
    return ["Network", "Score", "Time there", "Of the dense one's"], rows


def device_note(metrics: Mapping[str, Any]) -> str:
    """Return a sentence on the device that measured finished networks; empty without any."""
    if not _finished(metrics):
        return ""
    return (
        f"Measured on the other device ({metrics['search']['estimate']['conditions']}), whole; scores are of "
        "the machine that wrote their kit."
    )


def _corrected(estimate: Mapping[str, Any]) -> str:
    count = len(estimate.get("networks") or ())
    return f", corrected by {counted(count, 'finished network')} measured there" if count else ""


def _finished(metrics: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return list(((metrics.get("search") or {}).get("estimate") or {}).get("networks") or ())


def _plans(metrics: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return list((metrics.get("search") or {}).get("measured") or ())


_FILES = {
    "baseline_": "the original",
    "": "the exported file",
    "dense_int8_": "the original in int8",
    "nncf_int8_": "the original in NNCF int8",
}
"""Titles of files, by the prefix of their numbers."""


def runtime_rows(metrics: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return the table of files in runtimes as text, for the terminal and the page."""
    section = metrics.get("runtimes") or {}
    rows = []
    for before, title in _FILES.items():
        times = {name: number(section, name, f"{before}latency_ms") for name in section}
        known = {name: time for name, time in times.items() if time is not None}
        if known:
            cells = [_cell(section, name, before) for name in section]
            name = title.removeprefix("the ")
            rows.append([name[0].upper() + name[1:], *cells, min(known, key=lambda name: known[name])])
    return ["File", *section, "Fastest in"], rows


def runtime_note(metrics: Mapping[str, Any]) -> str:
    """Return a paragraph on the fastest file, the runtimes' relative speeds, and their checks."""
    section = metrics.get("runtimes") or {}
    sentences = [*_fastest(section), *_speeds(section), *_checks(section)]
    clocks = {name: entry["clock"] for name, entry in section.items() if "clock" in entry}
    if len(set(clocks.values())) > 1:
        walls = [name for name, clock in clocks.items() if clock == "wall"]
        sentences.append(f"{', '.join(walls)}: timed on the wall, the others in processor time")
    for name, entry in section.items():
        if "failed" in entry:
            sentences.append(f"{name}: not timed, since {entry['failed'].rstrip('.')}")
    return "".join(f"{sentence}. " for sentence in sentences).rstrip()


def _cell(section: Mapping[str, Any], runtime: str, before: str) -> str:
    """Format a file's time and score in a runtime."""
    time, score = (number(section, runtime, f"{before}{each}") for each in ("latency_ms", "score"))
    if time is None:
        return UNKNOWN
    return format_latency(time) + ("" if score is None else f", {format_accuracy(score)}")


def _fastest(section: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence on the fastest file and its runtime."""
    times = {
        (name, before): time
        for name in section
        for before in _FILES
        if (time := number(section, name, f"{before}latency_ms")) is not None
    }
    if times:
        runtime, before = min(times, key=lambda key: times[key])
        yield f"Fastest is {_FILES[before]} in {runtime}"


def _speeds(section: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each runtime on its times relative to onnxruntime's."""
    for name in section:
        changes = []
        for before, title in _FILES.items():
            ends = ("", "_low", "_high")
            faster, low, high = (number(section, name, f"{before}latency_runtime_ratio{end}") for end in ends)
            if faster is not None:
                changes.append(f"{title} {format_speed(faster, low, high)}")
        if changes:
            yield f"{name} against {DEFAULT_RUNTIME}: {', '.join(changes)}"


def _checks(section: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each runtime on the difference of its outputs from PyTorch's."""
    for name in section:
        difference, agreement = (number(section, name, key) for key in ("max_abs_difference", "agreement"))
        if difference is not None:
            yield f"{name}: outputs differ from PyTorch by at most {difference:.1e}"
        if agreement is not None and agreement < 1:
            share = format_accuracy(agreement)
            yield f"{name}: {_FILES['']} gives the class of PyTorch on {share} of the held-out images"


@dataclass(frozen=True)
class Remaining:
    """A bar: the share of a quality or cost that remains after compression."""

    name: str
    kept: float
    share: str
    note: str
    good_if_kept: bool = False

    @property
    def width(self) -> float:
        """Length of the bar in percent, clamped to 0 to 100."""
        return round(100 * min(1.0, max(0.0, self.kept)), 2)

    @property
    def is_more(self) -> bool:
        """Whether the cost has grown."""
        return self.kept > 1 and not self.good_if_kept


def remains(metrics: Mapping[str, Any]) -> list[Remaining]:
    """Return a bar for each measured one of quality, parameters, MACs, time and bytes."""
    run_stages = stages(metrics)
    if len(run_stages) < 2:
        return []
    first, last = run_stages[0], run_stages[-1]
    bars = []
    for quality in qualities(metrics):
        before, after = quality.before, quality.after
        if before is not None and before > 0 and after is not None:
            note, kept = f"{quality.write(after)} of {quality.write(before)}", after / before
            bars.append(Remaining(quality.title, kept, format_share(kept), note, good_if_kept=True))
    sizes = (number(metrics, "onnx", "baseline_file_bytes"), number(metrics, "onnx", "file_bytes"))
    for name, key, before, after, write in (
        ("Parameters", "params", first.params, last.params, format_count),
        ("MACs", "macs", first.macs, last.macs, format_large),
        ("Time", "latency", first.latency_ms, last.latency_ms, format_latency),
        ("Bytes of the file", "file_bytes", *sizes, format_bytes),
    ):
        if before and after is not None:
            fewer = ratio(metrics, key, before, after)
            kept = after / before if not fewer else 1 / fewer
            bars.append(Remaining(name, kept, format_share(kept), f"{write(after)} of {write(before)}"))
    return bars


LAYER_COSTS_NOTE = (
    "Layers by what their compression loses: shares of the sum of the losses at the network's output, as the "
    "search estimated them. A layer that loses much and saves little is one to leave as it is: "
    "decomposition.skip=[NAME]."
)


def layer_cost_rows(metrics: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return the table of layer costs as text; no rows if the metrics lack them."""
    layers = metrics.get("layers") or ()
    whole = sum(layer["loss"] for layer in layers) or 1.0
    timed = any(layer["saved_time"] is not None for layer in layers)
    columns = ["Layer", "Loss", "Parameters saved", "MACs saved", *(["Time saved"] if timed else [])]
    rows = [
        [
            layer["name"],
            format_share(layer["loss"] / whole),
            _signed(layer["saved_params"]),
            _signed(layer["saved_macs"]),
            *([_time(layer["saved_time"])] if timed else []),
        ]
        for layer in layers
    ]
    return columns, rows


def _signed(count: int) -> str:
    return format_large(count) if count >= 0 else f"−{format_large(-count)}"


def _time(share: float | None) -> str:
    return UNKNOWN if share is None else format_share(share).replace("-", "−")
