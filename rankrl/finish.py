"""The end of every road: from a compressed network to its file and what is known of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from decomposition import CompressionPlan
from rankrl.networks.base import Network
from rankrl.onnx.output_scores import SCORES
from rankrl.options.budget import BudgetOptions
from rankrl.plan_search.run import SearchResult
from rankrl.progress import logged_seconds
from rankrl.result import Compression, MeasuredNetwork, Measurement, missed_latency, shallow
from rankrl.verify.certificate import Certificate, certify, uncertified

log = logging.getLogger(__name__)

Notes = Callable[[CompressionPlan, Measurement], Mapping[str, str]]
"""From a plan and what the network costs and is worth to the text that its file holds besides the graph."""


_NO_BUDGET = BudgetOptions()


def _plan_alone(plan: CompressionPlan, measurement: Measurement) -> Mapping[str, str]:
    del measurement
    return {"plan": plan.to_json()}


def measurement(network: Network, plan: CompressionPlan, compressed: Any, tuned: Any = None) -> Measurement:
    """Return what a compressed network costs and is worth; `finish` explains the arguments."""
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


def judged(
    network: Network,
    plan: CompressionPlan,
    compressed: Any,
    measured: Measurement,
    *,
    tuned: Any = None,
    budget: BudgetOptions = _NO_BUDGET,
) -> MeasuredNetwork:
    """Return all that is known of a compressed network without its file; `finish` explains the arguments."""
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
    search: SearchResult | None = None,
    budget: BudgetOptions = _NO_BUDGET,
    notes: Notes = _plan_alone,
) -> Compression:
    """Measure a compressed network and write it as a file, verified and timed."""
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
    known = judged(network, plan, compressed, measured, tuned=tuned, budget=budget)
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
    """Return what the inputs that chose nothing say of the loss, or None where they do not tell."""
    after = network.values(compressed)
    before = None if after is None else network.values(None)
    if after is None or before is None:
        return None
    if before.shape != after.shape:
        log.warning("no certificate: the score tells of %d inputs, then of %d", len(before), len(after))
        return None
    return certify(before, after, drop, network.basis)
