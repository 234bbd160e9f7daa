"""This package on the files of `bench_files`, whole and without its parts."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from int8_tuning import outputs_of
from real_files import RealFile

from decomposition import Factorise, Quantise
from rankrl import DecompositionOptions, compress
from rankrl.networks.graph import fit_library
from rankrl.onnx.runtimes import open_session
from rankrl.options.decomposition import FILE_FORMATS
from rankrl.options.timing import LatencyOptions
from rankrl.plan_search.space.problem import Choices, SearchProblem

CANDIDATES = 4


def _dense_alone(problem: SearchProblem) -> dict[str, Choices]:
    return {"all dense": tuple(site.dense for site in problem.sites)}


_BOUNDED = "rankrl.plan_search.bounded_loss"
PARTS: dict[str, dict[str, Any]] = {
    "standard plans": {
        f"{_BOUNDED}.standard_plans": _dense_alone,
        f"{_BOUNDED}._spared": lambda *_: 0,
    },
    "corrected times": {
        "rankrl.plan_search.latency_budget.LatencyBudget.recosted": lambda self, problem, plans: problem
    },
    "measured losses": {"rankrl.networks.graph.fit_library": partial(fit_library, measure=False)},
}
"""What stands in for a part when it is left out, by what it replaces."""


def ours(
    file: RealFile,
    target: Path,
    *,
    drop: float,
    minimise: str,
    by_score: bool = False,
    without: str | None = None,
) -> str:
    """Compress the file with this package, perhaps without one of its `PARTS`.

    It loses at most `drop` of its agreement, or of the score that the tuned rival is chosen by, which takes
    what is known of the inputs.
    """
    fitted = list(file.fitted.feeds)
    originals = outputs_of(open_session(file.path, threads=1), fitted) if by_score else ()

    def score(session: Any) -> float:
        answers = [session.run(None, feed) for feed in fitted]  # an onnxruntime session
        return file.tuned(answers, file.fitted.known, originals)

    decomposition = DecompositionOptions(
        format="auto",
        formats=FILE_FORMATS,
        precisions=("float32", "int8"),
        candidates=CANDIDATES,
        weigh_outputs=False,
    )
    with ExitStack() as stack:
        for name, other in PARTS.get(without or "", {}).items():
            stack.enter_context(patch(name, other))
        result = compress(
            file.path,
            file.inputs,
            target,
            drop=drop,
            minimise=minimise,
            decomposition=decomposition,
            timing=LatencyOptions(batch=1, int8=False),
            batch_axes=file.batch_axes,
            score=score if by_score else None,
            progress=False,
        )
    layers = result.plan.layers
    factorised, rounded = (
        sum(layer.operation(kind) is not None for layer in layers) for kind in (Factorise, Quantise)
    )
    assert result.search is not None
    taken = f"{result.plan.chosen_by}: {factorised} of {len(layers)} layers factorised, {rounded} in integers"
    loss = result.certificate
    return taken if loss is None else f"{taken}; loses {loss.loss:.4f} ({loss.low:.4f} to {loss.high:.4f})"
