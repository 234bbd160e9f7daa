"""Kills searches at random moments, resumes them, and compares with one that nothing disturbed.

    OMP_NUM_THREADS=1 python scripts/check_resume.py --runs 20
    python scripts/check_resume.py --runs 5 -- model=resnet20 dataset=cifar10 model.checkpoint=resnet20.th

Every run is `rankrl task=search` in a process of its own, killed with SIGKILL one to `--kills` times and
continued with `resume=RUN`. Equal must be: plan.json; episodes.csv but for its column `seconds`; every array
in the final state, bit for bit; and the state's plain values but for the clock's. What follows `--` are the
options of the search; without any, a small network on the embedded digits is trained and searched. The last
line is `N of M identical`.
"""

from __future__ import annotations

import argparse
import csv
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rankrl.plan_search.scores.history import EPISODES_FILE
from rankrl.plan_search.state import STATE_FILE, SearchState

# A ResNet whose plans differ in reward, with an agent that learns within a few episodes.
SMALL = (
    "model=resnet20",
    "dataset=digits",
    "decomposition=tucker",
    "decomposition.candidates=6",
    "decomposition.iterations=5",
    "calibration.images=64",
    "budget.params=0.3",
    "search.episodes=40",
    "search.images=100",
    "search.term=soft_agreement",
    "selector.warmup_episodes=8",
)
POLL_SECONDS = 0.005
LONGEST_PAUSE = 0.3  # seconds between the episode that a kill waits for and the kill


@dataclass(frozen=True)
class Trial:
    """What came of one run.

    Attributes:
        kills: The number of episodes that were on disk at each kill.
        differences: What differed from the undisturbed run; empty when nothing did.
    """

    kills: tuple[int, ...]
    differences: tuple[str, ...]


def start(folder: Path, options: list[str]) -> subprocess.Popen[bytes]:
    """Begin a search in a folder, or go on with the one that is there."""
    # A run killed before it recorded its options has nothing to go on with.
    recorded = (folder / ".hydra" / "overrides.yaml").exists()
    arguments = [f"resume={folder}"] if recorded else ["task=search", *options, f"hydra.run.dir={folder}"]
    if not recorded:
        shutil.rmtree(folder, ignore_errors=True)
    command = [sys.executable, "-m", "rankrl.cli.app", *arguments]
    with folder.with_suffix(".log").open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log)


def finish(process: subprocess.Popen[bytes], folder: Path) -> None:
    """Wait for a search's end.

    Raises:
        RuntimeError: It failed.
    """
    if process.wait() != 0:
        text = folder.with_suffix(".log").read_text(errors="replace")
        raise RuntimeError(f"rankrl ended with code {process.returncode}:\n{text[-2000:]}")


def rows_on_disk(folder: Path) -> int:
    """Return how many episodes the table holds."""
    table = folder / EPISODES_FILE
    return max(0, table.read_bytes().count(b"\n") - 1) if table.exists() else 0


def kill_at_random(process: subprocess.Popen[bytes], folder: Path, episode: int, pause: float) -> int | None:
    """Kill a search a moment after an episode; return the episodes on disk, or None if it had ended."""
    while rows_on_disk(folder) < episode:
        if process.poll() is not None:
            finish(process, folder)
            return None
        time.sleep(POLL_SECONDS)
    time.sleep(pause)
    if process.poll() is not None:
        finish(process, folder)
        return None
    process.kill()
    process.wait()
    return rows_on_disk(folder)


def disturbed(
    folder: Path, options: list[str], moments: list[int], startup: float, chance: random.Random
) -> list[int]:
    """Run a search to its end through kills; return the episodes on disk at each.

    Args:
        folder: The run's folder.
        options: Options of the search.
        moments: The episodes after which it is killed; 0 for a moment before the first one.
        startup: Seconds until the first episode, about.
        chance: Where the pause between an episode and the kill comes from.
    """
    kills = []
    for episode in moments:
        pause = chance.uniform(0, LONGEST_PAUSE if episode else startup)
        killed = kill_at_random(start(folder, options), folder, episode, pause)
        if killed is None:
            return kills
        kills.append(killed)
    finish(start(folder, options), folder)
    return kills


def differences(whole: Path, resumed: Path) -> list[str]:
    """Return the names of everything that differs between two finished searches."""
    names = []
    if (whole / "plan.json").read_bytes() != (resumed / "plan.json").read_bytes():
        names.append("plan.json")
    if _table(whole) != _table(resumed):
        names.append(EPISODES_FILE)
    states = [SearchState.load(folder / STATE_FILE) for folder in (whole, resumed)]
    first, second = (state.tensors for state in states)
    names += [f"array {name}" for name in sorted(first.keys() ^ second.keys())]
    names += [
        f"array {name}"
        for name in sorted(first.keys() & second.keys())
        if first[name].dtype != second[name].dtype or not torch.equal(first[name], second[name])
    ]
    values = [_without_clock(state) for state in states]
    return names + [f"state: {name}" for name in values[0] if values[0][name] != values[1][name]]


def _table(folder: Path) -> list[dict[str, str]]:
    with (folder / EPISODES_FILE).open(newline="") as file:
        return [
            {key: value for key, value in row.items() if key != "seconds"} for row in csv.DictReader(file)
        ]


def _without_clock(state: SearchState) -> dict[str, Any]:
    rows = [{**vars(row), "seconds": None} for row in state.rows]
    return {
        "identity": state.identity,
        "rows": rows,
        "values": state.values,
    }


def small_checkpoint(folder: Path) -> str:
    """Train the small network for a few epochs; return its weights as an option."""
    options = ["model=resnet20", "dataset=digits", "train.epochs=3", f"hydra.run.dir={folder}"]
    command = [sys.executable, "-m", "rankrl.cli.app", "task=train", *options]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return f"model.checkpoint={folder / 'dense.safetensors'}"


def check(folder: Path, options: list[str], runs: int, most: int, seed: int) -> list[Trial]:
    """Run one search undisturbed and the others through kills.

    Args:
        folder: Where the runs go.
        options: Options of the search.
        runs: Searches to kill.
        most: Kills of one search at most.
        seed: Seed of the moments.
    """
    whole = folder / "whole"
    begin = time.monotonic()
    process = start(whole, options)
    while rows_on_disk(whole) == 0 and process.poll() is None:
        time.sleep(POLL_SECONDS)
    startup = time.monotonic() - begin
    finish(process, whole)
    episodes = rows_on_disk(whole)
    print(f"undisturbed: {episodes} episodes", flush=True)
    trials = []
    for number in range(1, runs + 1):
        run = folder / f"run-{number}"
        chance = random.Random(f"{seed} {number}")
        moments = sorted(chance.sample(range(episodes), min(chance.randint(1, most), episodes)))
        kills = disturbed(run, options, moments, startup, chance)
        trial = Trial(tuple(kills), tuple(differences(whole, run)))
        at = ", ".join(map(str, trial.kills)) or "no moment: it had ended"
        print(f"run {number}: killed at {at}; {', '.join(trial.differences) or 'identical'}", flush=True)
        trials.append(trial)
    return trials


def main() -> None:
    """Read the command line and check; the exit code is 1 when a run differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--runs", type=int, default=20, help="searches to kill (default 20)")
    parser.add_argument("--kills", type=int, default=3, help="kills of one search at most (default 3)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments (default 0)")
    parser.add_argument("--folder", type=Path, help="where to keep the runs (default: nowhere)")
    parser.add_argument("options", nargs="*", help="options of the search, after --")
    arguments = parser.parse_args()
    if min(arguments.runs, arguments.kills) < 1:
        parser.error("--runs and --kills must be at least 1")
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            parser.error(f"--folder {folder} is not empty; choose another one")
        os.environ.setdefault("RANKRL_CACHE", str(folder / "cache"))
        options = arguments.options or [*SMALL, small_checkpoint(folder / "dense")]
        trials = check(folder, options, arguments.runs, arguments.kills, arguments.seed)
    equal = sum(not trial.differences for trial in trials)
    print(f"{sum(len(trial.kills) for trial in trials)} kills")
    print(f"{equal} of {len(trials)} identical")
    sys.exit(0 if equal == len(trials) else 1)


if __name__ == "__main__":
    main()
