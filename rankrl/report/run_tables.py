"""Read the stages of a run from its metrics, and make tables and notes of their numbers."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from textwrap import wrap
from typing import Any, NamedTuple

from rich import table as terminal

from rankrl.errors import RankrlError, counted
from rankrl.onnx.runtimes import DEFAULT_RUNTIME
from rankrl.timing import is_unchanged


class ReportError(RankrlError):
    """A run folder lacks a file that the report needs, or holds a damaged one."""


SPACE = "\N{NO-BREAK SPACE}"
"""Stands between a number and its unit."""

UNKNOWN = "–"  # was not measured
UNCHANGED = "unchanged"  # differs by no more than the noise

BASELINE = "Baseline"  # the stage of the dense network

_CLOCKS = {"processor": "processor time", "wall": "time on the wall"}
_TERMINAL = 80  # characters of a line on a usual terminal


@dataclass(frozen=True)
class Table:
    """A table for pages, the terminal and Markdown; it is false without rows.

    The first cell of each row is the row's heading, which leads to one of `links`, if there are any. The
    title is shown on the terminal alone, where headings are broken if the table would be too wide.
    """

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    text_columns: Sequence[int] = (0,)
    links: Sequence[str | None] = ()
    is_wide: bool = False
    title: str | None = None

    def __bool__(self) -> bool:
        return bool(self.rows)

    def __rich__(self) -> terminal.Table:
        shown = terminal.Table(
            title=self.title, title_style="bold", header_style="bold", caption=self.caption
        )
        cells = [
            max((len(line) for row in self.rows for line in row[index].splitlines()), default=0)
            for index in range(len(self.columns))
        ]
        is_broken = sum(map(max, cells, map(len, self.columns))) + 3 * len(cells) + 1 > _TERMINAL
        for index, (column, width) in enumerate(zip(self.columns, cells, strict=True)):
            if index in self.text_columns:
                shown.add_column(column, overflow="fold")
                continue
            heading = "\n".join(wrap(column, max(1, width), break_long_words=False)) if is_broken else column
            shown.add_column(heading, justify="right", overflow="fold")
        for row in self.rows:
            shown.add_row(*row)
        return shown

    def markdown(self) -> str:
        """Return the table in Markdown, without its caption."""
        lines = [self.columns, ["---", *["---:"] * (len(self.columns) - 1)], *self.rows]
        return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def csv_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Write rows with the same keys as CSV, the keys first."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


class Card(NamedTuple):
    name: str
    value: str
    note: str


class Stage(NamedTuple):
    """One state of the model, and its numbers; None where one was not measured."""

    name: str
    numbers: dict[str, float | None]


_STAGES = {"baseline": BASELINE, "compressed": "Compressed", "finetuned": "Fine-tuned"}
_COUNTED = ("params", "macs", "activation_bytes")
_WORTH = ("accuracy", "agreement", "score")


def stages(metrics: Mapping[str, Any]) -> list[Stage]:
    found = [
        Stage(name, {key: number(metrics, section, key) for key in (*_WORTH, *_COUNTED)})
        for section, name in _STAGES.items()
        if metrics.get(section)
    ]
    if metrics.get("finetuned"):
        tuned = found.pop()
        last = found[-1].numbers if found else dict.fromkeys(tuned.numbers)
        differs = tuned.numbers["accuracy"] != last["accuracy"] or "agreement" in metrics["finetuned"]
        if differs or metrics.get("epochs"):
            found.append(Stage(tuned.name, tuned.numbers | {key: last[key] for key in _COUNTED}))
    for index, prefix in ((-1, ""), *([(0, "baseline_")] if metrics.get("baseline") else [])):
        for key in ("latency_ms", "file_bytes") if found else ():
            found[index].numbers[key] = number(metrics, "onnx", prefix + key)
    return found


def _dense_int8(metrics: Mapping[str, Any]) -> dict[str, float | None]:
    """Return the numbers of the dense network in 8-bit integers; empty if it was not measured."""
    if not metrics.get("dense_int8"):
        return {}
    latency = number(metrics, "onnx", "baseline_latency_ms")
    faster = number(metrics, "dense_int8", "latency_ratio")
    return {
        **{key: number(metrics, "baseline", key) for key in ("params", "macs")},
        **{key: number(metrics, "dense_int8", key) for key in (*_WORTH, "file_bytes")},
        "latency_ms": None if latency is None or faster is None else latency / faster,
    }


def number(metrics: Mapping[str, Any], section: str, key: str) -> float | None:
    value = (metrics.get(section) or {}).get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ReportError(f"metrics.json: {section}.{key} is {value!r}; it must be a finite number.")
    return value


def heldout_note(metrics: Mapping[str, Any]) -> str:
    """Return a note for held-out accuracies; empty where the network is known not to have seen the images."""
    if not metrics.get("checkpoint") or metrics.get("heldout_is_new"):
        return ""
    return (
        "The checkpoint may have been trained on these held-out images; accuracies on them can then lie "
        "above that on the test set."
    )


def format_accuracy(accuracy: float | None) -> str:
    return UNKNOWN if accuracy is None else f"{100 * accuracy:.2f}{SPACE}%"


def format_share(share: float) -> str:
    return f"{round(100 * share, 1) + 0.0:.1f}{SPACE}%"  # + 0.0 turns -0.0 into 0.0


def format_count(count: float | None) -> str:
    return UNKNOWN if count is None else f"{count:,.0f}"


def format_large(count: float | None) -> str:
    """Write a count in thousands, millions or billions, to four digits."""
    if count is None:
        return UNKNOWN
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= unit:
            return f"{count / unit:#.4g}".rstrip(".") + SPACE + name
    return f"{count:.0f}"


def format_bytes(count: float | None) -> str:
    return UNKNOWN if count is None else f"{format_large(count)}B"


def format_latency(milliseconds: float | None) -> str:
    return UNKNOWN if milliseconds is None else f"{milliseconds:#.3g}".rstrip(".") + f"{SPACE}ms"


def format_number(value: float | None) -> str:
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
    if round(max(ratio, 1 / ratio), 2) == 1:
        return UNCHANGED
    return f"{ratio:.2f}× {better}" if ratio >= 1 else f"{1 / ratio:.2f}× {worse}"


def format_speed(faster: float, low: float | None, high: float | None) -> str:
    """Write a ratio of times with its interval: `1.70× faster`, `1.25× slower` or `unchanged`."""
    return UNCHANGED if is_unchanged(faster, low, high) else format_ratio(faster, "faster", "slower")


def latency_note(metrics: Mapping[str, Any]) -> str:
    onnx = metrics.get("onnx") or {}
    parts = [f"Latency is the 10th percentile of the {_CLOCKS.get(str(onnx.get('clock')), 'time')}"]
    batch, threads = number(metrics, "onnx", "batch"), number(metrics, "onnx", "threads")
    if batch:
        parts.append(f"per batch of {batch:.0f}")
    if threads:
        parts.append(f"on {counted(int(threads), 'thread')}")
    sentences = [" ".join(parts)]
    low, high = _latency_interval(metrics)
    if low is not None and high is not None:
        sentences.append(
            f"The original takes {low:.2f} to {high:.2f} times as long (95{SPACE}% interval of the ratio of "
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


@dataclass(frozen=True)
class Measure:
    """A quality of a run's networks, higher is better, or a cost.

    `values` has one for each stage, `rival` is that of the dense network in 8-bit integers, `ratio` the
    original's cost over the last network's, `kept` the share of the original's value that is left, and `cost`
    names a cost within a sentence.
    """

    title: str
    values: tuple[float | None, ...] = ()
    write: Callable[[float | None], str] = format_accuracy
    change: str = UNKNOWN
    kept: float | None = None
    rival: float | None = None
    cost: str = ""
    key: str = ""
    ratio: float | None = None

    @property
    def words(self) -> str:
        return self.title.lower() if self.title[1:].islower() else self.title

    @property
    def before(self) -> float | None:
        return self.values[0]

    @property
    def after(self) -> float | None:
        return self.values[-1]


HELDOUT_ACCURACY = Measure("Held-out accuracy")
"""The score that chooses the best epoch, unless the run names another one."""


def score_measure(metrics: Mapping[str, Any]) -> Measure | None:
    """Return the score that plans were chosen by, if the run names it (`score_name`)."""
    name, (values, _) = metrics.get("score_name"), _values(metrics, "score")
    known = [value for value in values if value is not None]
    if not name or not known:
        return None
    is_share = all(0 <= value <= 1 for value in known)
    return _quality(metrics, str(name), "score", format_accuracy if is_share else format_number)


def epoch_score(metrics: Mapping[str, Any]) -> Measure:
    return score_measure(metrics) or HELDOUT_ACCURACY


def qualities(metrics: Mapping[str, Any]) -> list[Measure]:
    """List the score that plans were chosen by, test accuracy, and the agreement with the original."""
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
    return Measure(title, values, write, change, kept, rival, key=attribute)


def costs(metrics: Mapping[str, Any]) -> list[Measure]:
    """List the measured costs: parameters, MACs, latency, bytes of the file and of activations."""
    found = []
    for title, key, write, better, worse, words in (
        ("Parameters", "params", format_count, "fewer", "more", "parameters"),
        ("MACs", "macs", format_large, "fewer", "more", "MACs"),
        ("Latency", "latency_ms", format_latency, "faster", "slower", "time"),
        ("File", "file_bytes", format_bytes, "smaller", "larger", "bytes"),
        ("Activations", "activation_bytes", format_bytes, "smaller", "larger", "bytes of activations"),
    ):
        values, rival = _values(metrics, key)
        if all(value is None for value in values):
            continue
        before, after = values[0], values[-1]
        reduction = number(metrics, "ratios", key.removesuffix("_ms"))
        if reduction is None and before is not None and after:
            reduction = before / after
        if key == "latency_ms" and reduction is not None:
            change = format_speed(reduction, *_latency_interval(metrics))
        else:
            change = format_ratio(reduction, better, worse)
        kept = None
        if before and after is not None:
            kept = 1 / reduction if reduction else after / before
        found.append(Measure(title, values, write, change, kept, rival, words, key, reduction))
    return found


def _values(metrics: Mapping[str, Any], key: str) -> tuple[tuple[float | None, ...], float | None]:
    return tuple(stage.numbers.get(key) for stage in stages(metrics)), _dense_int8(metrics).get(key)


def before_after(metrics: Mapping[str, Any]) -> Table:
    names, rival = [stage.name for stage in stages(metrics)], bool(metrics.get("dense_int8"))
    several = len(names) > 1
    rows = [
        [
            *(each.title, *map(each.write, each.values)),
            *([each.change] if several else []),
            *([each.write(each.rival)] if rival else []),
        ]
        for each in (*qualities(metrics), *costs(metrics))
    ]
    columns = ["", *names, *(["Change"] if several else []), *(["Dense, int8"] if rival else [])]
    return Table(_measured_how(metrics), columns, rows)


def _measured_how(metrics: Mapping[str, Any]) -> str:
    sentences = ["Accuracy is measured on the test set, which chose nothing."]
    if is_unlabelled(metrics):
        sentences = [
            "Agreement with the original is measured on held-out inputs, which nothing was fitted to."
        ]
        sentences += agreement_notes(metrics)
    score = score_measure(metrics)
    if score is not None:
        sentences.insert(0, f"{score.title} is what plans were chosen by.")
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
    ends = (_amount(certificate[end], unit, named=False) for end in ("low", "high"))
    return (
        f"On {certificate['inputs']:,} {certificate['what']} it {lost} (95{SPACE}% interval of the loss: "
        f"{' to '.join(ends)}){_verdict(certificate)}."
    )


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
    return (metrics.get("search") or {}).get("estimate") or {}


def run_title(metrics: Mapping[str, Any], unnamed: str = "rankrl run") -> str:
    return " on ".join(str(metrics[key]) for key in ("model", "dataset") if metrics.get(key)) or unnamed


def summary_table(metrics: Mapping[str, Any]) -> Table:
    known = number(metrics, "onnx", "latency_ratio_low") is not None
    caption = latency_note(metrics) if known else ""
    return replace(before_after(metrics), caption=caption, title=run_title(metrics, unnamed=""))


def conclusion(metrics: Mapping[str, Any]) -> str:
    """Return the result of a run and the certified loss in words; empty if it compressed nothing."""
    known = costs(metrics) if len(stages(metrics)) > 1 else []
    known = [each for each in known if each.change != UNCHANGED] or known  # that stands in the table
    shares = [f"{format_share(each.kept)} of the {each.cost}" for each in known if each.kept is not None]
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
    known = [each for each in qualities(metrics) if each.before is not None and each.after is not None]
    if not known:
        return ""
    best = known[0]
    article = "an" if best.words[0].lower() in "aeiou" else "a"
    return f" for {article} {best.words} of {best.write(best.after)} instead of {best.write(best.before)}"


_MEASURES = {
    "latency": "time",
    "estimated_latency": "time on the device of timing.table, estimated from its layers",
    "bytes": "bytes",
    "macs": "multiply-accumulates",
    "params": "parameters",
}


def measured_table(metrics: Mapping[str, Any]) -> Table:
    plans = (metrics.get("search") or {}).get("measured") or ()
    rows = [
        [
            str(plan["name"]) + (" (taken)" if plan["taken"] else ""),
            f"{plan['loss']:.4f}",
            f"{plan['cost']:.3f}" if not plan.get("unsure_cost") else f"{plan['unsure_cost']:.3f} (unsure)",
            f"{plan['expected_cost']:.3f}",
        ]
        for plan in plans
    ]
    return Table(_choice(plans), ["Plan", "Loss of score", "Cost", "Expected cost"], rows)


def _choice(plans: Sequence[Mapping[str, Any]]) -> str:
    if not plans:
        return ""
    taken = next((plan["name"] for plan in plans if plan["taken"]), None)
    measure = plans[0]["measure"]
    done = "scored" if measure.startswith("estimated") else "measured"
    note = f"Each plan was carried out and {done}; the cost is the {_MEASURES[measure]}."
    if any(plan.get("unsure_cost") for plan in plans):
        note += " Other processes disturbed the timing where it is unsure; the expected cost was compared."
    if taken == "all dense":
        return f"{note} Nothing cheaper loses as little, so you get the original network."
    if taken is not None:
        note += (
            f" {taken[0].upper()}{taken[1:]} was taken: no other is better in one and as good in the other."
        )
    return note


def device_table(metrics: Mapping[str, Any]) -> Table:
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


def runtimes_table(metrics: Mapping[str, Any]) -> Table:
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
    sentences = ["All were timed in the same turns"]
    clocks = {name: entry["clock"] for name, entry in section.items() if "clock" in entry}
    if len(set(clocks.values())) > 1:
        walls = [name for name, clock in clocks.items() if clock == "wall"]
        sentences.append(f"{', '.join(walls)}: timed on the wall, the others in processor time")
    for name in section:
        sentences += [f"{name}: {fact}" for fact in _runtime_facts(section, name)]
    return " ".join(f"{sentence}." for sentence in sentences)


def _cell(section: Mapping[str, Any], runtime: str, before: str) -> str:
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
