"""Run the console command `rankrl`, a Hydra application."""

from __future__ import annotations

import logging
import math
import os
import secrets
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from traceback import walk_tb
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig
from safetensors import SafetensorError

from decomposition.errors import DecompositionError
from pruning.errors import PruningError
from rankrl.cli.config import checks, compose, run_files, schema
from rankrl.errors import ConfigError, RankrlError, StorageError, counted
from rankrl.files import write_json
from rankrl.runs.run_folder import RunFolder, RunNotes
from rankrl.runs.sweeps.jobs import SWEEP_FILE, SweepWatch, failures, run_sweep_job, runs_in_pool
from rankrl.runs.tracking import start_tracking

FIRST_RUN = "experiment=first_run"
USER_ERROR = 2
BUDGET_MISSED = 3
COLLAPSED = 4
FAILED_JOBS = 1  # of a sweep
INTERRUPTED = 130  # 128 + SIGINT, as shells do
log = logging.getLogger(__name__)
_SWEEP_FOLDER = "hydra.sweep.dir"
_COMPLETION_FLAGS = {"-sc", "--shell-completion"}
COMPLETE_ERRORS = "HYDRA_FULL_ERROR"
"""The environment variable with which Hydra raises errors, instead of printing them and leaving with 1."""


def _run(config: DictConfig) -> None:
    hydra_config = HydraConfig.get()
    folder = RunFolder(Path(hydra_config.runtime.output_dir))
    overrides = [str(each) for each in hydra_config.overrides.task if not str(each).startswith("resume=")]
    plain = compose.plain_values(config)
    sources = hydra_config.runtime.config_sources
    choices = [each.path for each in sources if each.provider == "command-line"]  # folders of further ones
    try:
        if hydra_config.mode == RunMode.MULTIRUN:
            run_sweep_job(
                lambda folder: _run_task(plain, folder),
                folder,
                number=int(hydra_config.job.num),
                config=plain,
                overrides=overrides,
                choices=choices,
                record=lambda folder: run_files.write_record(config, folder.path),
                sweep_folder=Path(hydra_config.sweep.dir),
                explain=lambda error: str(_for_users(error, folder) or f"{type(error).__name__}: {error}"),
            )
        else:
            with folder.held():
                notes = _run_alone(config, plain, overrides, choices, folder)
            if notes.collapsed is not None:
                _leave(RankrlError(f"the run is finished, but {notes.collapsed}."), COLLAPSED)
            if notes.missed is not None:
                _leave(ConfigError(f"the run is finished, but {notes.missed}."), BUDGET_MISSED)
    except KeyboardInterrupt:  # a search finishes its episode first
        if hydra_config.mode == RunMode.MULTIRUN and not runs_in_pool():
            raise  # `main` says how the sweep goes on
        _leave(RankrlError(f"stopped; `rankrl resume={folder.path}` goes on from here"), INTERRUPTED)
    except Exception as error:
        explained = _for_users(error, folder)
        if explained is None:
            raise
        _leave(explained, USER_ERROR)


def _run_alone(
    config: DictConfig, plain: dict[str, Any], overrides: list[str], choices: list[str], folder: RunFolder
) -> RunNotes:
    """Run the task with its folder locked; return the notes of its steps."""
    try:
        if plain["resume"] is None and plain["overwrite"]:
            folder.begin_anew()
        elif plain["resume"] is None:
            checks.refuse_used_folder(folder, plain)
        folder.prepare()
        folder.claim(plain, overrides, choices)
        run_files.write_record(config, folder.path)
        notes = _run_task(plain, folder)
    except Exception as error:
        if plain["resume"] is None and _for_users(error, folder) is not None:
            folder.discard()
        raise
    folder.error.unlink(missing_ok=True)  # of an earlier attempt, as the job of a sweep
    return notes


def _run_task(plain: dict[str, Any], folder: RunFolder) -> RunNotes:
    """Run the task, tracked; return the notes of its steps."""
    compose.load_plugins(plain["plugins"])  # the job of a sweep may have a process of its own
    checks.check_values(plain)  # values drawn by a sweeper are known only now
    settings = schema.built(schema.AppConfig, plain)
    checks.check_files(plain)
    for chatty in ("onnxscript", "onnx_ir", "torch.onnx", "alembic", "tensorboard"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    from rankrl.cli.tasks.task_run import TaskRun
    from rankrl.device import device_note, reuse_memory
    from rankrl.training.epochs import subnormals_as_zero

    reuse_memory()
    log.info(device_note())
    run = schema.task_function(settings)
    kind, options = settings.tracking.name, settings.tracking.options
    with subnormals_as_zero(), start_tracking(kind, folder.path, plain, options) as tracking:
        tracked = RunFolder(folder.path, tracking)
        run(TaskRun(settings, tracked))
    return tracked.notes


def _for_users(error: Exception, folder: RunFolder) -> Exception | None:
    """Return the error that a user is shown in one paragraph, or None for a defect of ours."""
    if isinstance(error, (RankrlError, DecompositionError, PruningError)):
        return error
    if isinstance(error, (OSError, SafetensorError)):
        advice = "Check that the folder is writable and that the disk has room; then `rankrl resume=` goes on"
        return StorageError(f"a file could not be read or written: {error}. {advice} ({folder.path}).")
    return None


def _leave(error: Exception, code: int) -> None:
    """Print one paragraph and exit."""
    print(f"rankrl: {' '.join(str(error).split())}", file=sys.stderr)
    raise SystemExit(code)


def _show_finished(folder: Path) -> None:
    print(f"rankrl: {folder} is finished already; its report is {folder / 'report.html'}")


def _show(text: str) -> None:
    """Print a long text; its reader may close the pipe early, as `head` does."""
    try:
        print(text, flush=True)
    except BrokenPipeError:  # which Python would raise again when it closes its streams
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def checked_arguments(written: Sequence[str]) -> list[str] | None:
    """Check a command line before Hydra runs it; return the arguments, or None where nothing is to be run."""
    arguments = compose.readable_arguments(written)
    arguments = ["export.skip=true" if each == "export=false" else each for each in arguments]
    arguments = run_files.resumed_arguments(arguments)
    earlier = run_files.resumed_folder(arguments)
    known = run_files.options_of_run(arguments)
    if known:
        print(f"rankrl: {' '.join(known)}, as in that run")
    arguments = compose.sweep_arguments([*known, *arguments])
    flags = compose.parsed_flags(arguments)
    if flags.experimental_rerun is not None:
        raise ConfigError(
            f"--experimental-rerun={flags.experimental_rerun}: a pickle can hold any program and is not run; "
            "resume=FOLDER goes on with the run in a folder"
        )
    compose.load_plugins(compose.named_plugins(flags))
    sweep = None
    with compose.composing(flags) as composed:
        jobs = checks.check_command(flags, composed)
        config = composed(next(compose.tried_overrides(compose.parsed_overrides(flags.overrides))))
        if flags.help:
            _show(compose.help_page(config))
            return None
        if not (flags.hydra_help or flags.cfg or flags.info):
            if earlier is not None and run_files.check_resumed(earlier, flags.overrides, composed, jobs[0]):
                _show_finished(earlier)
                return None
            sweep = checks.check_folder(config, multirun=flags.multirun)
            if sweep is None:  # jobs of a sweep fail by themselves
                checks.check_files(jobs[0])
    if sweep is None or _sweep_folders(arguments):
        return arguments
    # Fixed here, as the default name holds the time.
    return [*compose.readable_arguments([f"{_SWEEP_FOLDER}={sweep}"]), *arguments]


def _sweep_folders(arguments: Sequence[str]) -> list[str]:
    """Return the arguments that name a sweep's folder."""
    return [each for each in arguments if each.startswith(f"{_SWEEP_FOLDER}=")]


_IN_THIS_PROCESS = "hydra._internal.core_plugins.basic_launcher.BasicLauncher"
_ALL_COMBINATIONS = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"


class SweepCallback(Callback):
    """Gives each sweep an identifier, shows how far it is, and ends with its table and its failed jobs.

    The identifier (`sweep.json` in the sweep's folder) tells this sweep's failures from those of an earlier
    one in the same folder. Configured under `hydra.callbacks`.
    """

    def __init__(self) -> None:
        self._watch: SweepWatch | None = None
        self._total: int | None = None

    def __reduce__(self) -> tuple[type[SweepCallback], tuple[()]]:
        """Pickle without the watching thread."""
        return SweepCallback, ()

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Write `sweep.json`; watch jobs that do not run in this process."""
        folder = Path(str(config.hydra.sweep.dir))
        write_json(folder / SWEEP_FILE, {"id": secrets.token_hex(8)})
        launcher, self._total = str(config.hydra.launcher._target_), number_of_jobs(config)
        if launcher != _IN_THIS_PROCESS:
            # joblib's processes write to this terminal themselves and would break a live line.
            live = "joblib" not in launcher
            self._watch = SweepWatch(folder, self._total, live=live)

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Print the table of the jobs, and list the failed ones."""
        if self._watch is not None:
            self._watch.stop()
            print(self._watch.line())
        folder = Path(str(config.hydra.sweep.dir))
        _show_results(folder)
        failed = failures(folder)
        if not failed:
            return
        lines = [
            f"rankrl: {counted(len(failed), 'job')} of the sweep failed:",
            *(f"  {each.folder.relative_to(folder)}: {each.error}" for each in failed),
            f"The same command with hydra.sweep.dir={folder} runs these again and skips the finished ones.",
        ]
        print("\n".join(lines), file=sys.stderr)
        raise SystemExit(FAILED_JOBS)


def _show_results(folder: Path) -> None:
    from rich.console import Console  # late, as help needs neither

    from rankrl.report import ReportError, results_table

    try:
        table = results_table(folder)
    except ReportError:  # jobs without results, as those of task=inspect
        return
    if table:
        Console().print(table)


def number_of_jobs(config: DictConfig) -> int | None:
    """Return the number of jobs of a sweep, or None if its sweeper chooses them on the way."""
    if str(config.hydra.sweeper._target_) != _ALL_COMBINATIONS:
        return None
    parsed = compose.with_swept(config, config.hydra.overrides.task)
    return math.prod(len(compose.override_values(each)) for each in parsed)


def main() -> None:
    """Run the command line; errors that a user can cure exit with code 2 and one paragraph.

    Without arguments it is that of `FIRST_RUN`.

    A run that is finished but misses its budget in time exits with code 3, one whose network is no better
    than a constant with 4, one that was stopped with 130.
    """
    # A user's own network (model._target_) is looked for in the current folder too, as `python -m` does.
    sys.path.insert(0, str(Path.cwd()))
    if len(sys.argv) == 1:
        print(f"rankrl {FIRST_RUN}")
        sys.argv.append(FIRST_RUN)
    written = sys.argv[1:]
    if "--version" in written:
        print(compose.version_line())
        return
    try:
        if _COMPLETION_FLAGS.intersection(written):  # which has arguments of its own
            compose.load_plugins()
            schema.store_groups()
        else:
            checked = checked_arguments(written)
            if checked is None:
                return
            sys.argv[1:] = checked
    except RankrlError as error:
        _leave(error, USER_ERROR)
    complete = os.environ.get(COMPLETE_ERRORS)
    os.environ[COMPLETE_ERRORS] = "1"
    try:
        hydra.main(version_base="1.3", config_path=str(schema.config_folder()), config_name="config")(_run)()
    except KeyboardInterrupt:
        folder = [] if _sweep_folders(written) else _sweep_folders(sys.argv)
        command = shlex.join(["rankrl", *written, *folder])
        _leave(ConfigError(f"stopped; `{command}` goes on"), INTERRUPTED)
    except Exception as error:  # of any type that Hydra and its plugins raise; a task's own defects pass
        in_task = any(frame.f_code is _run.__code__ for frame, _ in walk_tb(error.__traceback__))
        if complete == "1" or in_task:
            raise
        text = (
            f"Hydra cannot carry the command out: {compose.in_words(error)}. {COMPLETE_ERRORS}=1 shows where"
        )
        _leave(ConfigError(text), USER_ERROR)
    finally:
        del os.environ[COMPLETE_ERRORS]
        if complete is not None:
            os.environ[COMPLETE_ERRORS] = complete


if __name__ == "__main__":
    main()
