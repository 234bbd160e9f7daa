"""Draw what a pretrained policy learnt to give more and less: its actions beside the descriptors of layers.

    python scripts/policy_picture.py --policy pretrained --runs runs/a runs/b --output docs/images/policy.png

The folders are runs of `task=pretrain`, whose tasks tell what the policy sees of their layers. For each task
and descriptor the script computes Spearman's rank correlation between the descriptor and the policy's action
over the layers, and draws mean and range over the tasks for the descriptors that go with it most.
"""

from __future__ import annotations

import argparse
import io
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from scipy.stats import spearmanr

from rankrl.files import write_atomically
from rankrl.plan_search.agents.policy_file import PolicyFile, read_policy
from rankrl.plan_search.envs.descriptors import DESCRIPTOR_NAMES, OF_THE_TASK
from rankrl.plan_search.pretraining.episodes import TaskEpisodes, read_episodes
from rankrl.report.figures import FONT, PALETTE, style_axes

SHOWN = 14


def correlations(policy: PolicyFile, tasks: Sequence[TaskEpisodes]) -> dict[str, np.ndarray]:
    """Return the rank correlation of each descriptor with the actions, for each task in which it varies.

    Args:
        policy: The policy.
        tasks: Whose layers it sees.
    """
    found: dict[str, list[float]] = {name: [] for name in DESCRIPTOR_NAMES}
    for task in tasks:
        actions = policy.actions(torch.from_numpy(task.observations).float()).numpy()
        described = task.observations[:, -len(DESCRIPTOR_NAMES) :]
        for name, values in zip(DESCRIPTOR_NAMES, described.T, strict=True):
            if name not in OF_THE_TASK and np.ptp(values) > 0 and np.ptp(actions) > 0:
                found[name].append(float(spearmanr(values, actions).statistic))
    return {name: np.array(values) for name, values in found.items() if values}


def picture(found: Mapping[str, np.ndarray], tasks: int) -> Figure:
    """Draw mean and range of the correlations, the strongest first."""
    names = sorted(found, key=lambda name: -abs(float(found[name].mean())))[:SHOWN][::-1]
    figure = Figure(figsize=(7.2, 4.4), layout="constrained")
    axes = figure.subplots()
    for place, name in enumerate(names):
        values = found[name]
        axes.plot([values.min(), values.max()], [place, place], color=PALETTE["soft"], linewidth=5)
        axes.plot(values.mean(), place, "o", color=PALETTE["accent"], markersize=5)
    axes.axvline(0, color=PALETTE["muted"], linewidth=0.8)
    axes.set_yticks(range(len(names)), [name.replace("_", " ") for name in names])
    axes.set_xlim(-1, 1)
    style_axes(axes, "less than greedy gives  ←  rank correlation with the action  →  more", "")
    axes.set_title(
        f"What the policy goes by: mean and range over {tasks} tasks",
        fontsize=FONT + 1,
        color=PALETTE["ink"],
        loc="left",
    )
    return figure


def main() -> None:
    """Draw the picture and print its numbers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--policy", default="pretrained")
    parser.add_argument("--runs", type=Path, nargs="+", required=True)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    files = sorted(path for run in options.runs for path in run.glob("state/tasks/*.safetensors"))
    if not files:
        parser.error(f"{', '.join(map(str, options.runs))}: no tasks; give folders of task=pretrain")
    tasks = [read_episodes(path) for path in files]
    found = correlations(read_policy(options.policy), tasks)
    drawn = io.BytesIO()
    picture(found, len(tasks)).savefig(drawn, format="png", dpi=150, facecolor="white")
    write_atomically(options.output, drawn.getvalue())
    print("| descriptor | mean | least | most |\n|---|---:|---:|---:|")
    for name, values in sorted(found.items(), key=lambda each: -abs(float(each[1].mean()))):
        print(f"| {name} | {values.mean():+.2f} | {values.min():+.2f} | {values.max():+.2f} |")


if __name__ == "__main__":
    main()
