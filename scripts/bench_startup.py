"""How long the command line and the packages take to answer: start-up, and the message for each mistake.

    OMP_NUM_THREADS=1 python scripts/bench_startup.py --output scripts/results/bench_startup.csv
    OMP_NUM_THREADS=1 python scripts/bench_startup.py --before ../earlier

Each case is a fresh process in an empty folder; medians of its wall time and its processor time. `--before`
names another checkout, measured in turns with this one.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rankrl.report.markdown import shown_command, write_section
from rankrl.report.provenance import hardware_line

HERE = Path(__file__).resolve().parents[1]
LIMIT = 120
"""Seconds after which a command that should have been refused has begun to work."""

IMPORTS = ("torch", "optim", "pruning", "decomposition", "rankrl")
COMMANDS: Mapping[str, tuple[str, ...]] = {
    "rankrl --version": ("--version",),
    "rankrl --help": ("--help",),
    "rankrl --cfg job": ("--cfg", "job"),
    "rankrl selector=ba⇥": ("-sc", "query=bash"),
    "rankrl serch.episodes=3": ("serch.episodes=3",),
}
COMPLETED = {"COMP_LINE": "rankrl selector=ba", "COMP_POINT": "18"}
MISTAKES: tuple[tuple[str, ...], ...] = (
    ("serch.episodes=3",),
    ("selector=ddgp",),
    ("selector=bayes", "selector.candidats=1"),
    ("search.episodes=few",),
    ("search.episodes=0",),
    ("search.seconds=0",),
    ("decomposition.format=foo",),
    ("decomposition.candidates=0",),
    ("budget.params=1.5",),
    ("budget.params=0.5", "budget.macs=0.5", "budget.bytes=0.5"),
    ("budget.params=0.5", "budget.macs=0.5", "selector=ddpg", "selector.action=rank"),
    ("reward=amc", "reward.measure=time"),
    ("finetune.epochs=-1",),
    ("optim.options={lr: 1}",),
    ("train.batch_size=0",),
    ("calibration.images=0",),
    ("export.batch=0",),
    ("task=pipline",),
    ("task=search", "finetune.epochs=1"),
    ("task=prune", "pruner=random", "budget.macs=2"),
    ("task=apply",),
    ("task=evaluate",),
    ("model.checkpoint=missing.th",),
    ("dataset=npz",),
    ("resume=nowhere",),
)


@dataclass(frozen=True)
class Timing:
    """How long a process took.

    Attributes:
        wall: Seconds until it ended.
        processor: Seconds of processor time, of the user and the system together.
        said: The last line that it wrote to standard error.
        left: Names of the files and folders that it left behind.
    """

    wall: float
    processor: float
    said: str
    left: tuple[str, ...]


def timed(code: str, arguments: Sequence[str], checkout: Path, **environment: str) -> Timing:
    """Run Python code in a fresh process and an empty folder.

    Args:
        code: The program.
        arguments: Its arguments.
        checkout: Where the packages are imported from.
        **environment: Further environment variables.
    """
    command = [sys.executable, "-c", code, *arguments]
    variables = {**os.environ, "PYTHONPATH": str(checkout), **environment}
    variables.pop("RANKRL_DATA", None)
    with tempfile.TemporaryDirectory() as folder:
        variables["RANKRL_CACHE"] = str(Path(folder).with_suffix(".cache"))
        before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        try:
            done = subprocess.run(
                command, cwd=folder, env=variables, capture_output=True, text=True, check=False, timeout=LIMIT
            )
            said = (done.stderr.strip().splitlines() or [""])[-1]
        except subprocess.TimeoutExpired:
            said = "worked on"
        wall = time.perf_counter() - start
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        left = tuple(sorted(path.name for path in Path(folder).iterdir()))
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Timing(wall, processor, said, left)


def called(arguments: Sequence[str], checkout: Path) -> Timing:
    """Call the command line."""
    return timed("from rankrl.cli.app import main; main()", arguments, checkout, **COMPLETED)


def startup_table(checkouts: Mapping[str, Path], runs: int) -> str:
    """Return the table of start-up times: a row a case, two columns a checkout."""
    cases = {f"import {name}": (f"import {name}", ()) for name in IMPORTS}
    cases |= {name: ("from rankrl.cli.app import main; main()", args) for name, args in COMMANDS.items()}
    heads = [f"{name}, {kind}" for name in checkouts for kind in ("wall", "processor")]
    lines = [f"| | {' | '.join(heads)} |", f"|---|{'---:|' * len(heads)}"]
    for name, (code, arguments) in cases.items():
        timings: dict[str, list[Timing]] = {label: [] for label in checkouts}
        for _ in range(runs):
            for label, checkout in checkouts.items():
                timings[label].append(timed(code, arguments, checkout, **COMPLETED))
        cells = [_medians(each) for each in timings.values()]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def mistakes_table(checkouts: Mapping[str, Path], runs: int) -> str:
    """Return the table of mistakes: seconds until the message, and what it says."""
    heads = " | ".join(f"{name}, wall" for name in checkouts)
    lines = [f"| mistake | {heads} | message | left behind |", f"|---|{'---:|' * len(checkouts)}---|---|"]
    for arguments in MISTAKES:
        cells = []
        for checkout in checkouts.values():
            timings = [called(arguments, checkout) for _ in range(runs)]
            wall = statistics.median(each.wall for each in timings)
            cells.append("worked on" if timings[0].said == "worked on" else f"{wall:.1f}")
        said = timings[0].said.removeprefix("rankrl: ").replace("|", "\\|")
        left = ", ".join(timings[0].left) or "nothing"
        lines.append(f"| `{' '.join(arguments)}` | {' | '.join(cells)} | {said} | {left} |")
    return "\n".join(lines)


def _medians(timings: Sequence[Timing]) -> str:
    wall = statistics.median(each.wall for each in timings)
    processor = statistics.median(each.processor for each in timings)
    return f"{wall:.2f} | {processor:.2f}"


def main() -> None:
    """Read the command line, run, print and perhaps save the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--before", type=Path, help="another checkout to measure along with this one")
    parser.add_argument("--runs", type=int, default=5, help="processes a case (default 5)")
    parser.add_argument("--mistake-runs", type=int, default=1, help="processes a mistake (default 1)")
    parser.add_argument("--output", type=Path, help="Markdown file whose section is replaced, or CSV file")
    options = parser.parse_args()
    if min(options.runs, options.mistake_runs) < 1:
        parser.error("--runs and --mistake-runs must be at least 1")
    checkouts = {} if options.before is None else {"before": options.before.resolve()}
    checkouts["now" if checkouts else "seconds"] = HERE
    command = shown_command(sys.argv, shortened={str(options.before): "../earlier"})
    text = "\n\n".join(
        [
            f"`{command}`",
            f"{hardware_line()}. Seconds, medians; load {os.getloadavg()[0]:.1f} before.",
            startup_table(checkouts, options.runs),
            "Until the message of a mistake, from a command that otherwise works:",
            mistakes_table({"seconds": HERE}, options.mistake_runs),
        ]
    )
    print(text)
    if options.output:
        write_section(options.output, "bench_startup", "Start-up and mistakes", text)


if __name__ == "__main__":
    main()
