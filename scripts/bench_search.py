"""What a search costs compared with the bare forward passes that it cannot do without.

    RANKRL_DATA=DIR python scripts/bench_search.py --checkpoints DIR [--models resnet20 resnet32 resnet56]

Measures, for each model, the wall time of a DDPG search (fitting, 300 episodes on 2,000 held-out images,
state written after every episode) and, in the same process right before and after it, the forward time of as
many images through the dense network in the same precision, at its best batch size. Prints a Markdown table;
the last line is `ratio N` for the first model.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rankrl.data import ImageData, batches, load_dataset
from rankrl.device import inference_precision
from rankrl.models import create_model, load_checkpoint
from rankrl.networks.module import ModuleNetwork
from rankrl.networks.network import CandidateOptions
from rankrl.plan_search.run import run_search
from rankrl.plan_search.scores.evaluators import PlanEvaluator, ScoredImages
from rankrl.plan_search.selectors import create_selector
from rankrl.plan_search.space.problem import SearchProblem
from rankrl.report.run_folder import hardware_line, shown_command, write_section

CALIBRATION_IMAGES = 768
# The fastest of these is the bare forward pass: a search is not to look good against a bad choice.
BATCH_SIZES = (125, 250, 500, 1000)
# Batches of the bare pass that are timed before and after the search, as a share of all.
SAMPLE = 20


@dataclass
class Costs:
    """Seconds of one search, by what they were spent on."""

    model: str
    params: int
    forward: float
    total: float = 0.0
    fitting: float = 0.0
    scoring: float = 0.0
    agent: float = 0.0
    first_reward: float = 0.0
    best_reward: float = 0.0

    @property
    def bookkeeping(self) -> float:
        """State, table and everything else."""
        return self.total - self.fitting - self.scoring - self.agent

    @property
    def ratio(self) -> float:
        """Wall time of the search / bare forward time."""
        return self.total / self.forward


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoints", type=Path, required=True, help="folder of cifar10-MODEL.th")
    parser.add_argument("--models", nargs="+", default=["resnet20"])
    parser.add_argument("--format", default="tensor_ring")
    parser.add_argument("--episodes", type=int, default=300)
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--params", type=float, default=0.25, help="kept fraction of the parameters")
    parser.add_argument("--output", type=Path, help="Markdown file whose section is replaced, or CSV file")
    arguments = parser.parse_args()
    rows = [measure(name, arguments) for name in arguments.models]
    text = report(rows, arguments)
    print(text)
    if arguments.output is not None:
        command = shown_command(sys.argv, shortened={str(arguments.checkpoints): "CHECKPOINTS"})
        section = f"`{command}`\n\n{hardware_line()}\n\n{text}"
        write_section(arguments.output, "bench_search", "What a search costs", section)
    print(f"ratio {rows[0].ratio:.2f}")


def report(rows: list[Costs], arguments: argparse.Namespace) -> str:
    """Return the table as Markdown."""
    precision = inference_precision()
    lines = [
        f"{arguments.episodes} DDPG episodes, {arguments.images} held-out CIFAR-10 images, "
        f"{arguments.format}, budget.params={arguments.params}, {precision.device.type} {precision.dtype}.",
        "",
        "| model | forward s | search s | ratio | fitting | forward passes | agent | bookkeeping "
        "| greedy | best |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        parts = (row.fitting, row.scoring, row.agent, row.bookkeeping)
        shares = " | ".join(f"{part:.1f} s ({part / row.total:.0%})" for part in parts)
        lines.append(
            f"| {row.model} | {row.forward:.1f} | {row.total:.1f} | {row.ratio:.2f} | {shares} "
            f"| {row.first_reward:.3f} | {row.best_reward:.3f} |"
        )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    lines += ["", f"Peak memory of the process: {peak:.2f} GiB."]
    return "\n".join(lines)


def measure(name: str, arguments: argparse.Namespace) -> Costs:
    """Return the costs of a search over one model."""
    data = load_dataset("cifar10", heldout=arguments.images)
    model = create_model(name, input_shape=data.input_shape, num_classes=data.classes)
    load_checkpoint(model, arguments.checkpoints / f"cifar10-{name}.th")
    model.eval()
    before = bare_forward(model, data)
    with tempfile.TemporaryDirectory() as folder:
        costs = search(name, model, data, arguments, Path(folder))
    per_image = (before + bare_forward(model, data)) / 2
    costs.forward = per_image * arguments.images * arguments.episodes
    return costs


def bare_forward(model: torch.nn.Module, data: ImageData) -> float:
    """Return the seconds that an image takes through the dense network, at the best batch size."""
    precision = inference_precision()
    network = model.to(precision.device).to(memory_format=torch.channels_last)
    best = float("inf")
    for size in BATCH_SIZES:
        x = next(iter(batches(data.heldout, size, mean=data.mean, std=data.std, device=precision.device)))[0]
        with torch.inference_mode(), precision.autocast():
            repeats = max(2, SAMPLE * BATCH_SIZES[0] * 4 // size)
            network(x)
            start = time.perf_counter()
            for _ in range(repeats):
                network(x)
            if precision.device.type == "cuda":
                torch.cuda.synchronize()
            best = min(best, (time.perf_counter() - start) / (repeats * len(x)))
    return best


def search(
    name: str, model: torch.nn.Module, data: ImageData, arguments: argparse.Namespace, folder: Path
) -> Costs:
    """Run the search with a clock on each of its parts."""
    costs = Costs(name, sum(p.numel() for p in model.parameters()), forward=0.0)
    start = time.perf_counter()
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randperm(len(data.train), generator=generator)[:CALIBRATION_IMAGES]
    calibration = [x for x, _ in batches(data.train.subset(drawn), 128, mean=data.mean, std=data.std)]
    network = ModuleNetwork(model, data.input_shape, calibration)
    library = network.library(CandidateOptions((arguments.format,)), cache=None, seed=0)
    sites = library.all_candidates()
    costs.fitting = time.perf_counter() - start
    problem = SearchProblem.from_model(
        model, sites, data.input_shape, params=arguments.params, library=library
    )
    images = ScoredImages(data.heldout, data.mean, data.std, data.augmentation)
    evaluator = PlanEvaluator(model, library, problem, images)
    selector = create_selector("ddpg", problem, seed=0, episodes=arguments.episodes)
    evaluator.evaluate = clocked(evaluator.evaluate, costs, "scoring")  # type: ignore[method-assign]
    selector.propose = clocked(selector.propose, costs, "agent")  # type: ignore[method-assign]
    selector.observe = clocked(selector.observe, costs, "agent")  # type: ignore[method-assign]
    result = run_search(problem, evaluator, selector, episodes=arguments.episodes, folder=folder)
    costs.total = time.perf_counter() - start
    costs.first_reward, costs.best_reward = result.rows[0].reward, result.best.reward
    return costs


def clocked(function: Callable[..., Any], costs: Costs, part: str) -> Callable[..., Any]:
    """Return the function with its time added to a part of the costs."""

    def timed(*arguments: Any) -> Any:
        start = time.perf_counter()
        try:
            return function(*arguments)
        finally:
            setattr(costs, part, getattr(costs, part) + time.perf_counter() - start)

    return timed


if __name__ == "__main__":
    main()
