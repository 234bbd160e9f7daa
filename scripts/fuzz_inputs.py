"""Feed the command line damaged, hostile and senseless input; count what is not refused as it should be.

Seven kinds of input, in turn: overrides, plans, checkpoints, data files, compressed weights, ONNX files, and
modules in integers that change tensors in place.
Whatever the input, a command must succeed or leave with exit code 2 and one paragraph; no traceback, no code
run from a file, no folder that looks finished after a refusal, and neither time nor memory without bound; a
file with a very wide layer is run under a limit of 6 GB.
What it makes of an ONNX file that it accepts must compute the same, or it must say that it does not; the file
that it writes of a module in integers must compute what the module simulates.

    python scripts/fuzz_inputs.py --cases 500 --seed 0

Nothing is trained or searched: the commands measure a small network, rewrite one under a plan, or are refused
before they begin. Cases run in this process; every 25th runs in one of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from bench_frame import markdown
from fuzz_cases import KINDS, Case, make_case, make_good
from hydra.core.global_hydra import GlobalHydra
from limited import Limits

from rankrl.cli.app import BUDGET_MISSED, COLLAPSED
from rankrl.cli.app import main as rankrl_main

LONGEST_SECONDS = 20.0
"""Processor time that a case may take."""
LARGEST_GROWTH = 600 * 2**20
"""Bytes of memory that a case may add to the most that was ever in use."""
WIDE_GIGABYTES = 6.0
"""Memory that a case with a very wide layer may ask for."""
WITH_A_WORD = (BUDGET_MISSED, COLLAPSED)
"""Exit codes of runs that are finished, but whose results say aloud what is wrong with them."""
_HANGS_AFTER = 180
_SUBPROCESS_EVERY = 25


@dataclass(frozen=True)
class Outcome:
    """Hold what came of a case: problems should be none; seconds are of processor time."""

    case: Case
    refused: bool
    problems: tuple[str, ...]
    message: str
    seconds: float


class Hung(BaseException):
    """A case that did not come to an end."""


def run_case(case: Case, *, alone: bool = False) -> Outcome:
    """Run a case, in a process of its own if `alone`, and look at what came of it."""
    most, begin = _most_memory(alone), time.process_time()
    wide = case.kind == "onnx" and "wide: " in case.what
    limit = Limits(_HANGS_AFTER / 60, WIDE_GIGABYTES)
    with limit if wide else contextlib.nullcontext():
        code, message = _run_alone(case) if alone else _run_here(case)
    seconds = time.process_time() - begin
    problems = []
    paragraphs = [line for line in message.splitlines() if line.startswith("rankrl: ")]
    swept = "-m" in case.arguments  # a job that fails is listed, and the others go on
    finished = any(case.folder.rglob("metrics.json"))
    if code not in ((0, 1, 2) if swept else (0, 2)) and not (code in WITH_A_WORD and finished):
        problems.append(f"exit code {code}")
    if "Traceback" in message or "HYDRA_FULL_ERROR" in message:
        problems.append("traceback")
    if code == 2 and len(paragraphs) != 1 and "usage:" not in message:
        problems.append(f"{len(paragraphs)} paragraphs")
    if case.marker.exists():
        problems.append("CODE WAS RUN")
    if code == 0:
        problems += case.wrong_results()
    if code not in (0, *WITH_A_WORD) and not swept and finished:
        problems.append("looks finished")
    if seconds > LONGEST_SECONDS:
        problems.append(f"took {seconds:.0f} s")
    if wide and (limit.memory > 1000 * WIDE_GIGABYTES or "alloc" in message):
        problems.append(f"asked for more than {WIDE_GIGABYTES:g} GB")
    growth = _most_memory(alone) - most
    if growth > LARGEST_GROWTH and not alone:
        problems.append(f"took {growth / 2**20:.0f} MB")
    return Outcome(case, code != 0, tuple(problems), message.strip(), seconds)


def _run_here(case: Case) -> tuple[int, str]:
    before = os.getcwd(), list(sys.argv), list(sys.path)
    handlers, level = list(logging.getLogger().handlers), logging.getLogger().level
    errors = io.StringIO()
    os.chdir(case.folder)
    sys.argv = ["rankrl", *case.arguments]
    sys.path[:0] = case.import_path
    previous = signal.signal(signal.SIGALRM, _hung)
    signal.alarm(_HANGS_AFTER)
    code = 0
    try:
        GlobalHydra.instance().clear()
        with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
            rankrl_main()
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else 0 if left.code is None else 1
    except Hung:
        code, _ = -1, errors.write("\nhung\n")
    except BaseException as error:  # whatever it is, it is what is looked for
        code, _ = -2, errors.write(f"\nTraceback: {type(error).__name__}: {error}\n")
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)
        GlobalHydra.instance().clear()
        os.chdir(before[0])
        sys.argv, sys.path[:] = before[1], before[2]
        for handler in set(logging.getLogger().handlers) - set(handlers):
            handler.close()
        logging.getLogger().handlers, logging.getLogger().level = handlers, level
    return code, errors.getvalue()


def _hung(*_: object) -> None:
    raise Hung


def _run_alone(case: Case) -> tuple[int, str]:
    paths = [*case.import_path, *filter(None, [os.environ.get("PYTHONPATH")])]
    words = [each for each in case.arguments if "\0" not in each]  # no process can be given those
    try:
        done = subprocess.run(
            [sys.executable, "-m", "rankrl.cli.app", *words],
            cwd=case.folder,
            capture_output=True,
            timeout=_HANGS_AFTER,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)},
            check=False,
        )
    except subprocess.TimeoutExpired:
        return -1, "hung"
    return done.returncode, done.stderr.decode("utf-8", "replace")


def _most_memory(alone: bool) -> int:
    whose = resource.RUSAGE_CHILDREN if alone else resource.RUSAGE_SELF
    return resource.getrusage(whose).ru_maxrss * 1024


def run_all(cases: int, seed: int, folder: Path) -> list[Outcome]:
    """Run as many cases, the kinds in turn, and print what goes wrong as it does."""
    good = make_good(folder / "good")
    outcomes = []
    for index in range(cases):
        kind, number = KINDS[index % len(KINDS)], index // len(KINDS)
        own = folder / f"{kind}-{number}"
        outcome = run_case(make_case(kind, number, seed, good, own), alone=index % _SUBPROCESS_EVERY == 24)
        outcomes.append(outcome)
        if outcome.problems:
            print(f"{kind} {number} ({outcome.case.what[:100]!r}): {', '.join(outcome.problems)}")
            print(
                f"    {' '.join(outcome.case.arguments)[:300]!r}\n    {outcome.message[-400:]!r}", flush=True
            )
        shutil.rmtree(own, ignore_errors=True)
    return outcomes


def table(outcomes: Sequence[Outcome]) -> str:
    rows = []
    for kind in (*KINDS, "all"):
        of_kind = [each for each in outcomes if kind in (each.case.kind, "all")]
        failures = sum(bool(each.problems) for each in of_kind)
        refused = sum(each.refused and not each.problems for each in of_kind)
        rows.append((kind, len(of_kind), refused, len(of_kind) - refused - failures, failures))
    return markdown(("kind", "cases", "refused", "accepted", "failures"), rows)


def main() -> None:
    """Run the cases and print the table; exit code 1 if one failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["RANKRL_CACHE"] = f"{folder}/cache"
        begin = time.perf_counter()
        outcomes = run_all(options.cases, options.seed, Path(folder))
        slowest = max(each.seconds for each in outcomes)
        print(table(outcomes))
        print(f"{time.perf_counter() - begin:.0f} s; the slowest case took {slowest:.1f} s of processor time")
    raise SystemExit(1 if any(each.problems for each in outcomes) else 0)


if __name__ == "__main__":
    main()
