"""Finding the nodes of a network that onnxruntime cannot compute in 8-bit integers, and ranges for others."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from rankrl.errors import DefectError
from rankrl.onnx.errors import ExportError
from rankrl.onnx.export.int8 import choose_ranges, quantise_onnx
from rankrl.onnx.export.range_choice import RangeChoice
from rankrl.onnx.graph.errors import OnnxGraphError
from rankrl.onnx.graph.network import Feed, OnnxNetwork
from rankrl.onnx.graph.site import Site

log = logging.getLogger(__name__)


def without_integers(network: OnnxNetwork, sites: Sequence[Site], feed: Feed) -> list[str]:
    """Return the names of nodes that cannot compute in integers, so that all others can together.

    The quantiser takes every convolution and product, but onnxruntime refuses to load or to run some of the
    files that it writes, because its own rewriting around integer nodes is not always valid. Such nodes are
    found by trying all at once, then halves of those that fail.
    """
    feed = network.axes.one(feed)
    network = network.without_casts()
    weights = network.weight_inputs
    taken = [site for site in sites if not site.spread]  # onnxruntime has no such kernel
    spread = [site.name for site in sites if site.spread]
    with tempfile.TemporaryDirectory() as folder:
        plain, rounded = Path(folder) / "plain.onnx", Path(folder) / "rounded.onnx"
        network.save(plain)

        def fails(names: Sequence[str]) -> bool:
            try:
                own = {weights[name] for name in names}
                quantise_onnx(plain, rounded, [feed], weights=own, partly=True, fitted=False)
                OnnxNetwork.load(rounded).session().run(feed)
            except (DefectError, ExportError, OnnxGraphError) as error:
                log.debug("%s in integers: %s", ", ".join(names), error)
                return True
            return False

        return spread + failing_names(
            [site.name for site in taken],
            fails,
            lambda name: log.warning(
                "onnxruntime cannot compute %s in integers; it stays in floating point", name
            ),
        )


def failing_names(
    names: Sequence[str], fails: Callable[[Sequence[str]], bool], tell: Callable[[str], None]
) -> list[str]:
    """Return the names without which all others pass together.

    All are tried at once, then halves of those that fail.
    """
    passing: list[str] = []
    failing: list[str] = []
    waiting = [list(names)] if names else []
    while waiting:
        tried = waiting.pop()
        if not fails([*passing, *tried]):
            passing += tried
        elif len(tried) == 1:
            failing += tried
            tell(tried[0])
        else:
            middle = len(tried) // 2
            waiting += [tried[middle:], tried[:middle]]
    return failing


def chosen_ranges(
    network: OnnxNetwork, names: Sequence[str], batches: Sequence[Feed], reduce_range: bool | None
) -> RangeChoice:
    """Return how ranges are found best when all nodes that can compute in integers (`choose_ranges`)."""
    network = network.without_casts()
    weights = {network.weight_inputs[name] for name in names}
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / "plain.onnx"
        network.save(plain)
        return choose_ranges(
            plain, batches, weights=weights, partly=True, reduce_range=reduce_range, cut=network.axes.parts
        )
