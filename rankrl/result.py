"""Export, verify, time and score a compressed network, and write its metrics; modules and files alike."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from torch import nn

from decomposition import CompressionPlan
from decomposition.progress import logged_seconds
from rankrl.networks.network import Network
from rankrl.onnx.output_scores import SCORES
from rankrl.options.search import BudgetOptions
from rankrl.plan_search.run import ChosenPlan, search_numbers
from rankrl.report import LayerRow, collect_setup, conclusion, write_report
from rankrl.request import Request
from rankrl.runs.run_folder import RunFolder
from rankrl.timing.latency import LatencyComparison
from rankrl.training import EpochRow
from rankrl.verify.agreement import OutputAgreement, agreement_score
from rankrl.verify.certificate import Certificate, certify, uncertified

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Costs and score of a compressed network."""

    before: Mapping[str, int]
    after: Mapping[str, int]
    baseline_score: float
    compressed_score: float
    score: float


@dataclass(frozen=True, kw_only=True)
class MeasuredNetwork(Measurement):
    """A compressed network, its measurements and its plan, without an ONNX file."""

    plan: CompressionPlan
    layers: tuple[LayerRow, ...] = field(repr=False)
    heldout: int
    rewritten: Mapping[str, str] = field(default_factory=dict)
    collapsed: str | None = None
    certificate: Certificate | None = None
    uncertified: str | None = None

    @property
    def errors(self) -> dict[str, float]:
        """Relative output error of each layer that was touched, by name."""
        return {row.name: row.error for row in self.layers if row.error}

    @property
    def untouched(self) -> dict[str, str]:
        """The reason for each layer that stays as it is, by name."""
        return {layer.name: layer.reason or "" for layer in self.plan if not layer.operations}


@dataclass(frozen=True, kw_only=True)
class Compression(MeasuredNetwork):
    """A compressed network as an ONNX file, with its measurements.

    Attributes:
        path: The file.
        outputs: How far each output agrees with the original's on the held-out inputs.
        verified: Largest difference between the file and the network that it was made from; of a graph,
            relative to the largest number at the outputs.
        latency: Its time next to the original's.
        search: How the plan was chosen, a `SearchResult` where plans were scored; None where it was given.
        missed: What to tell a reader if the budget in time is missed, else None.
        numbers: What else the section `onnx` of metrics.json says of the file.
        runtimes: Times and scores in every runtime, as the section `runtimes` of metrics.json; None for one.
        dense_int8: What the original in 8-bit integers costs and is worth, as that section of metrics.json.
    """

    path: Path
    outputs: tuple[OutputAgreement, ...]
    verified: float
    latency: LatencyComparison
    search: ChosenPlan | None = field(default=None, repr=False)
    missed: str | None = None
    numbers: Mapping[str, Any] = field(default_factory=dict, repr=False)
    runtimes: Mapping[str, Any] | None = field(default=None, repr=False)
    dense_int8: Mapping[str, Any] | None = field(default=None, repr=False)


@dataclass(frozen=True, kw_only=True)
class ModuleCompression(Compression):
    """A compressed PyTorch module, its file and what is known of it.

    Attributes:
        model: The network: an ordinary module on the original's device, in evaluation mode.
        dense: The network that the plan was made for: the original, rewritten where `rankrl.compress` says
            so. `decomposition.load_compressed(original, folder / "model.safetensors")` loads `model`.
        folder: Holds `plan.json`, `model.safetensors`, `model.onnx`, `metrics.json`, `report.html` and, of a
            search, `episodes.csv`; None where the file alone was asked for.
        epochs: The epochs of fine-tuning by a recipe.
        test: Score of the original (`baseline`) and of the compressed network (`compressed`) on the test
            inputs, if there are any.
    """

    model: nn.Module
    dense: nn.Module
    folder: Path | None
    epochs: tuple[EpochRow, ...] = ()
    test: Mapping[str, float] | None = None


def shallow(known: Any) -> dict[str, Any]:
    """Return a dataclass's fields by name, as arguments of a class that extends it."""
    return {each.name: getattr(known, each.name) for each in fields(known)}


def missed_latency(budget: float | None, times: LatencyComparison) -> str | None:
    """Return the message that a finished file misses its latency budget, else None."""
    kept = 1 / times.ratio
    if budget is None or 1 / times.ratio_high <= budget:  # within the interval of the timing
        return None
    return (
        f"budget.latency={budget} is missed: the finished file keeps {kept:.3f} of the original's time. "
        "Measure on a quiet machine, or ask for a little less"
    )


def summary(result: Compression) -> dict[str, Any]:
    """Return the entries of metrics.json for a compressed network."""
    times = result.latency
    return {
        "baseline": {**result.before, "score": result.baseline_score, "agreement": 1.0},
        "compressed": {
            **result.after,
            "score": result.score,
            "agreement": agreement_score(result.outputs),
        },
        "outputs": {
            each.name: {
                "error": each.error,
                **({} if each.top1 is None else {"top1": each.top1}),
                "score": each.score,
                "score_kind": each.kind,
                "scored_by": SCORES[each.kind],
                "reason": each.reason,
                **({} if each.worst is None else {"worst": f"{each.name}[{each.worst.channels}]"}),
                "units": {unit.channels: {"score": unit.score, "error": unit.error} for unit in each.units},
            }
            for each in result.outputs
        },
        "ratios": {
            **{
                name: result.before[name] / max(1, result.after[name])
                for name in ("params", "macs", "bytes", "file_bytes")
            },
            "latency": times.ratio,
        },
        "onnx": {
            "verified": result.verified,
            "latency_ms": times.compressed.median_ms,
            "baseline_latency_ms": times.baseline.median_ms,
            "latency_ratio_low": times.ratio_low,
            "latency_ratio_high": times.ratio_high,
            "batch": times.baseline.batch,
            "threads": times.baseline.threads,
            "runs": times.baseline.runs,
            "clock": times.baseline.clock,
            "busy": times.busy,
        },
        **certificate_numbers(result),
        **({} if result.runtimes is None else {"runtimes": dict(result.runtimes)}),
        "dense_int8": result.dense_int8,
        **({} if result.search is None else search_numbers(result.search)),
        "untouched": result.untouched,
        "errors": result.errors,
    }


def certificate_numbers(result: MeasuredNetwork) -> dict[str, Any]:
    """Return the entries of metrics.json on the loss of score: `certificate`, or why there is none."""
    if result.certificate is not None:
        return {"certificate": result.certificate.to_dict()}
    return {} if result.uncertified is None else {"uncertified": result.uncertified}


def run_numbers(result: Compression) -> dict[str, Any]:
    """Return the entries of metrics.json for a call from Python."""
    numbers = summary(result)
    if isinstance(result, ModuleCompression):
        last = numbers["compressed"]
        tuned = {"score": last["score"], "agreement": last["agreement"]}
        numbers["compressed"] = {**last, "score": result.compressed_score}
        numbers["finetuned"] = tuned
        if result.test is not None:
            numbers["baseline"]["accuracy"] = result.test["baseline"]
            tuned["accuracy"] = result.test["compressed"]
        numbers["epochs"] = [asdict(row) for row in result.epochs]
    else:
        numbers["rewritten"], numbers["heldout_inputs"] = dict(result.rewritten), result.heldout
    numbers["onnx"] = {**numbers["onnx"], **result.numbers}
    numbers["warnings"] = [text for text in (result.missed, result.collapsed) if text is not None]
    return numbers


def write_run(
    run: RunFolder, result: Compression, request: Request, model: str, numbers: Mapping[str, Any]
) -> None:
    """Write the report and, last, the metrics of a call from Python; log the warnings."""
    metrics = {
        "task": "compress",
        "model": model,
        "decomposition": request.decomposition.format,
        "selector": request.selector,
        "seed": request.seed,
        "budget": request.goal.budget.numbers,
        **({} if request.score_name is None else {"score_name": request.score_name}),
        **numbers,
    }
    epochs = result.epochs if isinstance(result, ModuleCompression) else ()
    setup = collect_setup(["rankrl.compress"], request.seed)
    write_report(run.path, metrics=metrics, layers=result.layers, epochs=epochs, setup=setup)
    run.finish(metrics)
    if conclusion(metrics):
        log.info(conclusion(metrics))
    if result.missed is not None:
        log.warning(result.missed)
    if result.collapsed is not None:
        log.error(result.collapsed)


Notes = Callable[[CompressionPlan, Measurement], Mapping[str, str]]
"""From a plan and what the network costs and is worth to the text that its file holds besides the graph."""


_NO_BUDGET = BudgetOptions()


def _plan_alone(plan: CompressionPlan, measurement: Measurement) -> Mapping[str, str]:
    del measurement
    return {"plan": plan.to_json()}


def measurement(network: Network, plan: CompressionPlan, compressed: Any, tuned: Any = None) -> Measurement:
    """Measure the costs and the score of a compressed network; for the arguments see `finish`."""
    last = compressed if tuned is None else tuned
    with logged_seconds(log, "the original's score"):
        baseline_score = network.score(None)
    with logged_seconds(log, "the compressed network's score"):
        compressed_score = network.score(compressed)
        score = compressed_score if tuned is None else network.score(tuned)
    return Measurement(
        before=network.costs_before(),
        after=network.costs_after(plan, last),
        baseline_score=baseline_score,
        compressed_score=compressed_score,
        score=score,
    )


def evaluate_compressed(
    network: Network,
    plan: CompressionPlan,
    compressed: Any,
    measured: Measurement,
    *,
    tuned: Any = None,
    budget: BudgetOptions = _NO_BUDGET,
) -> MeasuredNetwork:
    """Add plan, layer errors and certificate to a measurement; for the arguments see `finish`."""
    last = compressed if tuned is None else tuned
    drop = budget.drop
    certificate = _certified(network, last, drop)
    return MeasuredNetwork(
        **shallow(measured),
        plan=plan,
        layers=tuple(network.rows(plan, compressed)),
        heldout=network.compared_inputs,
        rewritten=network.rewritten,
        collapsed=network.collapsed(last, measured.score),
        certificate=certificate,
        uncertified=uncertified(network.basis) if certificate is None and drop is not None else None,
    )


def finish(
    network: Network,
    plan: CompressionPlan,
    compressed: Any,
    path: Path,
    *,
    tuned: Any = None,
    search: ChosenPlan | None = None,
    budget: BudgetOptions = _NO_BUDGET,
    notes: Notes = _plan_alone,
) -> Compression:
    """Measure a compressed network, export it, verify the file and time it."""
    last = compressed if tuned is None else tuned
    measured = measurement(network, plan, compressed, tuned)
    with logged_seconds(log, "the file, verified and timed"):
        file = network.write(last, path, notes(plan, measured))
    for output in file.outputs:
        log.info("agreement of %r is %s, since %s", output.name, SCORES[output.kind], output.reason)
        for unit in output.units:
            log.info("agreement of %s[%s]: %.4f", output.name, unit.channels, unit.score)
    estimate = None if search is None else search.estimate
    if estimate is not None:
        log.info("estimated at %.3f of the original's time on %s", estimate.share, estimate.conditions)
    elif file.latency.ratio_high < 1:
        log.warning(
            "the file takes %.3f of the original's time: it is slower. For a faster one set "
            "budget.latency, or budget.drop with budget.minimise=latency",
            1 / file.latency.ratio,
        )
    latency = budget.latency if budget.drop is None and estimate is None else None  # a time of this machine
    missed = None if search is None else search.missed
    known = evaluate_compressed(network, plan, compressed, measured, tuned=tuned, budget=budget)
    return Compression(
        **shallow(replace(known, after={**measured.after, "file_bytes": path.stat().st_size})),
        path=path,
        outputs=file.outputs,
        verified=file.verified,
        latency=file.latency,
        search=search,
        missed=missed or missed_latency(latency, file.latency),
        numbers=file.numbers,
        runtimes=file.runtimes,
        dense_int8=network.dense_int8(),
    )


def _certified(network: Network, compressed: Any, drop: float | None) -> Certificate | None:
    """Certify the loss of score on inputs that chose nothing; None without comparable scores of each."""
    after = network.values(compressed)
    before = None if after is None else network.values(None)
    if after is None or before is None:
        return None
    if before.shape != after.shape:
        log.warning("no certificate: the score tells of %d inputs, then of %d", len(before), len(after))
        return None
    return certify(before, after, drop, network.basis)
