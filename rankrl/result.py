"""Export, verify, time and score a compressed network, and write its metrics; modules and files alike."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from torch import nn

from decomposition import CompressionPlan
from decomposition.progress import logged_seconds, progress_bar
from rankrl.networks.network import Network
from rankrl.onnx.output_scores import SCORES
from rankrl.options.search import BudgetOptions
from rankrl.plan_search.run import ChosenPlan, search_numbers
from rankrl.report import LayerRow, collect_setup, conclusion, write_report
from rankrl.request import Request
from rankrl.runs.run_folder import RunFolder
from rankrl.timing.latency import LatencyComparison
from rankrl.training import EpochRow
from rankrl.verify.agreement import Certificate, OutputAgreement, agreement_score, certify, uncertified

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Measurement:
    before: Mapping[str, int]
    after: Mapping[str, int]
    baseline_score: float
    compressed_score: float
    score: float
    unit: str = "score"
    finetuned: bool = False

    def stages(self) -> dict[str, dict[str, Any]]:
        """Return the entries of metrics.json for the networks of a run."""
        found: dict[str, dict[str, Any]] = {
            "baseline": {self.unit: self.baseline_score, **self.before},
            "compressed": {self.unit: self.compressed_score, **self.after},
        }
        return {**found, "finetuned": {self.unit: self.score}} if self.finetuned else found


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
class MeasuredModule(MeasuredNetwork):
    """A compressed PyTorch module and what is known of it, without an ONNX file.

    Attributes:
        search: How the plan was chosen.
        model: The network: an ordinary module on the original's device, in evaluation mode.
        dense: The network that the plan was made for: the original, rewritten where `rankrl.compress` says
            so. `decomposition.load_compressed(original, folder / "model.safetensors")` loads `model`.
        folder: Holds `plan.json`, `model.safetensors`, `model.onnx`, `metrics.json`, `report.html` and, of a
            search, `episodes.csv`; None where the file alone was asked for.
        epochs: The epochs of fine-tuning by a recipe.
        test: Score of the original (`baseline`) and of the compressed network (`compressed`) on the test
            inputs, if there are any.
    """

    search: ChosenPlan | None = field(default=None, repr=False)
    model: nn.Module
    dense: nn.Module
    folder: Path | None
    epochs: tuple[EpochRow, ...] = ()
    test: Mapping[str, float] | None = None


@dataclass(frozen=True, kw_only=True)
class ModuleCompression(MeasuredModule, Compression):
    """A compressed PyTorch module, its file and what is known of it."""


def shallow(known: Any) -> dict[str, Any]:
    """Return a dataclass's fields by name, as arguments of a class that extends it."""
    return {each.name: getattr(known, each.name) for each in fields(known)}


def missed_latency(
    budget: float, times: LatencyComparison, search: str | None, dense_int8: Mapping[str, Any] | None
) -> str | None:
    """Return the message that a finished file misses its latency budget, if its whole interval does."""
    if 1 / times.ratio_high <= budget:
        return None
    if search is not None:
        return search
    kept = f"{1 / times.ratio:.3f} of the original's time"
    if dense_int8 is not None:
        kept += f", the original in 8-bit integers {1 / dense_int8['latency_ratio']:.3f}"
    return (
        f"budget.latency={budget} is missed: the finished file keeps {kept}. Measure on a quiet machine, or "
        "ask for a little less"
    )


def missed_memory(budget: float | None, before: Mapping[str, int], after: Mapping[str, int]) -> str | None:
    """Return the message that a finished file misses its limit of memory, else None."""
    if budget is None:
        return None
    kept = after["activation_bytes"] / max(1, before["activation_bytes"])
    if kept <= budget:
        return None
    return (
        f"budget.memory={budget} is missed: the finished file holds {kept:.3f} of the original's bytes of "
        "activations, more than its layers were expected to. Ask for a little less"
    )


def run_numbers(result: MeasuredNetwork) -> dict[str, Any]:
    numbers: dict[str, Any] = result.stages()
    shared = [name for name in result.before if name in result.after]
    numbers["ratios"] = {name: result.before[name] / max(1, result.after[name]) for name in shared}
    numbers |= {
        "untouched": result.untouched,
        "errors": result.errors,
        "rewritten": dict(result.rewritten),
        **({"heldout_inputs": result.heldout} if result.unit == "score" else {}),
        **_certificate_numbers(result),
    }
    return numbers | _file_numbers(result, numbers) if isinstance(result, Compression) else numbers


def _file_numbers(result: Compression, numbers: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of metrics.json for a file; add its agreement and time to the known ones."""
    times = result.latency
    numbers["ratios"]["latency"] = times.ratio
    if result.outputs:
        numbers["baseline"]["agreement"] = 1.0
        for stage in {"compressed", "finetuned"} & numbers.keys():
            numbers[stage]["agreement"] = agreement_score(result.outputs)
    if isinstance(result, ModuleCompression):
        numbers["epochs"] = [asdict(row) for row in result.epochs]
        if result.test is not None:
            numbers["baseline"]["accuracy"] = result.test["baseline"]
            numbers["finetuned"]["accuracy"] = result.test["compressed"]
    return {
        "outputs": {each.name: _output_numbers(each) for each in result.outputs},
        "onnx": {
            "verified": result.verified,
            "latency_ms": times.compressed.ms,
            "baseline_latency_ms": times.baseline.ms,
            "latency_ratio_low": times.ratio_low,
            "latency_ratio_high": times.ratio_high,
            "batch": times.baseline.batch,
            "threads": times.baseline.threads,
            "runs": times.baseline.runs,
            "clock": times.baseline.clock,
            "busy": times.busy,
            **result.numbers,
        },
        **({} if result.runtimes is None else {"runtimes": dict(result.runtimes)}),
        "dense_int8": result.dense_int8,
        **({} if result.search is None else search_numbers(result.search)),
    }


def _output_numbers(output: OutputAgreement) -> dict[str, Any]:
    return {
        "error": output.error,
        **({} if output.top1 is None else {"top1": output.top1}),
        "score": output.score,
        "score_kind": output.kind,
        "scored_by": SCORES[output.kind],
        "reason": output.reason,
        **({} if output.worst is None else {"worst": f"{output.name}[{output.worst.channels}]"}),
        "units": {unit.channels: {"score": unit.score, "error": unit.error} for unit in output.units},
    }


def _certificate_numbers(result: MeasuredNetwork) -> dict[str, Any]:
    """Return the entries of metrics.json on the loss of score: `certificate`, or why there is none."""
    if result.certificate is not None:
        return {"certificate": result.certificate.to_dict()}
    return {} if result.uncertified is None else {"uncertified": result.uncertified}


def write_run(
    run: RunFolder,
    metrics: dict[str, Any],
    *,
    command: Sequence[str],
    layers: Sequence[LayerRow] = (),
    epochs: Sequence[EpochRow] = (),
) -> Path:
    """Write the report and, last, metrics.json, which marks the run as finished; return the page."""
    setup = collect_setup(command, metrics["seed"])
    page = write_report(run.path, metrics=metrics, layers=layers, epochs=epochs, setup=setup)
    run.finish(metrics)
    return page


def write_call(
    run: RunFolder, result: Compression, request: Request, model: str, numbers: Mapping[str, Any]
) -> None:
    """Write the report and the metrics of a call from Python; log the warnings."""
    texts = (*run.notes.warnings, result.missed, result.collapsed)
    warnings = [text for text in texts if text is not None]
    metrics = {
        "task": "compress",
        "model": model,
        "decomposition": request.decomposition.format,
        "selector": request.selector,
        "seed": request.seed,
        "budget": request.goal.budget.numbers,
        **({} if request.score_name is None else {"score_name": request.score_name}),
        **numbers,
        "warnings": warnings,
    }
    epochs = result.epochs if isinstance(result, ModuleCompression) else ()
    write_run(run, metrics, command=["rankrl.compress"], layers=result.layers, epochs=epochs)
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
        unit=network.unit,
        finetuned=isinstance(compressed, nn.Module),
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
    with progress_bar("finish", total=3) as bar:
        measured = measurement(network, plan, compressed, tuned)
        bar.advance()
        with logged_seconds(log, "the file, verified and timed"):
            file = network.write(last, path, notes(plan, measured))
        bar.advance()
        dense_int8 = network.dense_int8()
        bar.advance()
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
    if latency is not None:
        missed = missed_latency(latency, file.latency, missed, dense_int8)
    known = evaluate_compressed(network, plan, compressed, measured, tuned=tuned, budget=budget)
    before = {**measured.before, "activation_bytes": network.activation_bytes()}
    sizes = {"file_bytes": path.stat().st_size, "activation_bytes": network.activation_bytes(path)}
    after = {**measured.after, **sizes}
    return Compression(
        **shallow(replace(known, before=before, after=after)),
        path=path,
        outputs=file.outputs,
        verified=file.verified,
        latency=file.latency,
        search=search,
        missed=missed or missed_memory(budget.memory, before, after),
        numbers=file.numbers,
        runtimes=file.runtimes,
        dense_int8=dense_int8,
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
