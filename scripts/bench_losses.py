"""How well predicted losses of plans for files tell which plan loses less.

    OMP_NUM_THREADS=1 python scripts/bench_losses.py resnet20.onnx inputs.npz --plans 20 --rows losses.csv

Draws plans of three kinds: nodes factorised at random ranks of the upper half; all nodes in 8-bit integers
but some; and both, in one plan. Every plan's loss is predicted as the sum of its nodes' losses, without a
sensitivity, with it, and with measured losses of single nodes too (what searches do), and measured: what the
outputs of the file that it becomes lose (`OutputScore.loss`), on inputs that nothing was fitted to.
Prints Spearman's correlation of predictions and measurements for each kind, and over all plans. Plans are
carried out without a refit of their nodes.
"""

from __future__ import annotations

import argparse
import csv
import resource
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import torch
from scipy.stats import spearmanr

from decomposition import CandidateSet, Quantise
from rankrl.networks.candidates import CandidateOptions
from rankrl.networks.graph import fit_library
from rankrl.networks.graph_losses import GraphLibrary
from rankrl.networks.graph_scoring import constants_of
from rankrl.onnx.export.int8 import quantise_onnx
from rankrl.onnx.graph import OnnxNetwork, PreparedFile
from rankrl.onnx.graph.dynamic_lstm import quantise_lstms
from rankrl.onnx.graph.rewrite import open_constants
from rankrl.onnx.output_scores import mean_loss
from rankrl.onnx.protobuf import save_model
from rankrl.verify.agreement import output_scores

KINDS = ("factorised", "int8 but some", "mixed")
PREDICTIONS = ("unweighted", "sensitivity", "measured")
Choices = tuple[int, ...]


def draw_plan(sites: Sequence[CandidateSet], kind: str, generator: np.random.Generator) -> Choices:
    """Return a random plan of a kind, the index of a candidate for every node."""
    share = generator.uniform(0.1, 0.9)
    plan = []
    for site in sites:
        factorised = sorted(
            (index for index, each in enumerate(site.candidates) if not each.integer and each.operations),
            key=lambda index: -site.candidates[index].cost.params,
        )
        factorised = factorised[: max(1, len(factorised) // 2)]  # losses of lower ranks are near 1
        rounded = [index for index, each in enumerate(site.candidates) if each.only_integers]
        options = {KINDS[0]: factorised, KINDS[1]: rounded, KINDS[2]: factorised}[kind]
        if kind == KINDS[2] and generator.random() < 0.5:
            options = rounded
        compressed = options and generator.random() < share
        plan.append(int(generator.choice(options)) if compressed else site.dense)
    return tuple(plan)


class Measured:
    """Measures the loss of plans on held-out inputs.

    Args:
        file: The network and its inputs.
        library: The fits of its nodes.
        sites: Their candidates.
    """

    def __init__(self, file: PreparedFile, library: GraphLibrary, sites: Sequence[CandidateSet]) -> None:
        self._file, self._library, self._sites = file, library, sites
        session, heldout = file.network.session(), file.split.heldout
        self._before = [session.run(feed) for feed in heldout]
        self._scores = output_scores(session, heldout)

    def __call__(self, plan: Choices) -> float:
        """Return what the outputs lose (`OutputScore.loss`), averaged over them."""
        model = self._file.network.graph_model()
        nodes = {node.name: node for node in self._file.changing}
        integers, lstms = [], []
        for site, choice in zip(self._sites, plan, strict=True):
            node, candidate = nodes[site.name], site.candidates[choice]
            opened = open_constants(model, node)
            weight = self._library.weight(site.name, candidate.operations)
            for name, array in constants_of(self._library, node, opened, weight).items():
                model.graph.initializers[name].const_value = ir.tensor(array, name=name)
            if candidate.only_integers and node.hidden:
                lstms += [
                    (node, each.weight_bits) for each in candidate.operations if isinstance(each, Quantise)
                ]
            elif candidate.only_integers:
                integers.append(opened.weight)
        with tempfile.TemporaryDirectory() as folder:
            plain, rounded = Path(folder) / "plain.onnx", Path(folder) / "rounded.onnx"
            save_model(model, plain)
            path = plain
            if integers:
                quantise_onnx(plain, rounded, self._file.split.calibration[:1], weights=integers, partly=True)
                path = rounded
            network = OnnxNetwork.load(path)
            quantise_lstms(network.model, lstms)
            session = network.session()
            after = [session.run(feed) for feed in self._file.split.heldout]
        return mean_loss(self._scores, zip(self._before, after, strict=True))


def correlations(rows: Sequence[dict[str, object]]) -> list[str]:
    """Return a table of Spearman's correlations, a row for each kind of plan and one for all."""
    lines = [f"| plans | {' | '.join(PREDICTIONS)} |", "|---|" + "---:|" * len(PREDICTIONS)]
    for kind in (*KINDS, "all"):
        some = [row for row in rows if kind in ("all", row["kind"])]
        measured = [row["loss"] for row in some]
        cells = [f"{spearmanr([row[name] for row in some], measured).statistic:.3f}" for name in PREDICTIONS]
        lines.append(f"| {kind} ({len(some)}) | {' | '.join(cells)} |")
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    """Draw plans, predict and measure them, and print the correlations."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("file", type=Path, help="the ONNX file")
    parser.add_argument("inputs", type=Path, help="a .npz or .npy file of inputs")
    parser.add_argument("--plans", type=int, default=20, help="of each kind")
    parser.add_argument("--formats", nargs="+", default=["tucker", "spatial_svd"])
    parser.add_argument("--candidates", type=int, default=5, help="ranks of each node and format")
    parser.add_argument("--rows", type=Path, help="a CSV file of all plans")
    parser.add_argument("--cache", type=Path, help="a folder of fits that later runs reuse")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args(argv)
    torch.set_num_threads(1)
    file = PreparedFile.read(asked.file, asked.inputs, heldout=0.3, seed=asked.seed)
    options = CandidateOptions(
        tuple(asked.formats), ("float32", "int8"), candidates=asked.candidates, iterations=20
    )
    sites: dict[str, list[CandidateSet]] = {}
    seconds = {}
    for name, weigh in ((PREDICTIONS[0], False), (PREDICTIONS[2], True)):
        start = time.process_time()
        library = fit_library(
            file, replace(options, weigh_outputs=weigh), folder=asked.cache, seed=asked.seed
        )
        sites[name] = library.all_candidates(limit=asked.candidates)
        seconds[name] = time.process_time() - start
    assert isinstance(library, GraphLibrary)
    predicting = fit_library(
        file, replace(options, weigh_outputs=True), folder=asked.cache, seed=asked.seed, measure=False
    )
    sites[PREDICTIONS[1]] = predicting.all_candidates(limit=asked.candidates)
    measured, generator = Measured(file, library, sites["measured"]), np.random.default_rng(asked.seed)
    rows: list[dict[str, object]] = []
    for kind in KINDS:
        for _ in range(asked.plans):
            plan = draw_plan(sites["measured"], kind, generator)
            predicted = {
                name: sum(float(site.losses[choice]) for site, choice in zip(each, plan, strict=True))
                for name, each in sites.items()
            }
            rows.append({"kind": kind, "loss": measured(plan), **predicted})
    if asked.rows is not None:
        with asked.rows.open("w", newline="", encoding="utf-8") as stream:
            writer = csv.DictWriter(stream, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    print("\n".join(correlations(rows)))
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    spent = ", ".join(f"{name} {value:.0f} s" for name, value in seconds.items())
    print(f"calibrated and fitted: {spent} of processor time; {memory:.0f} MB at most")


if __name__ == "__main__":
    main()
