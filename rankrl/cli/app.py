"""Run the console command `rankrl`, a Hydra application."""

from __future__ import annotations

import logging
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from traceback import walk_tb
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from safetensors import SafetensorError

from decomposition.errors import DecompositionError
from rankrl.cli.config.choices import TASKS, config_folder, store_groups
from rankrl.cli.config.composition import (
    composing,
    in_words,
    parsed_flags,
    readable_arguments,
    sweep_arguments,
)
from rankrl.cli.config.help import (
    HELP_FLAGS,
    VERSION_FLAGS,
    help_page,
    load_plugins,
    named_plugins,
    version_line,
)
from rankrl.cli.config.overrides import COMPLETE_ERRORS, check_overrides, check_values, raised_errors
from rankrl.cli.config.run_files import (
    check_folders,
    check_input_files,
    check_resumed,
    finished_run,
    named_paths,
    options_of_run,
    refuse_used_folder,
    resumed_arguments,
    write_record,
)
from rankrl.cli.config.schema import AppConfig, built
from rankrl.errors import ConfigError, RankrlError, RunStoppedError, StorageError
from rankrl.runs.run_folder import RunFolder, RunNotes
from rankrl.runs.sweeps import run_sweep_job
from rankrl.runs.sweeps.job import runs_in_pool
from rankrl.runs.tracking import start_tracking

FIRST_RUN = "experiment=first_run"
USER_ERROR = 2
BUDGET_MISSED = 3
COLLAPSED = 4
INTERRUPTED = 130  # 128 + SIGINT, as shells do
log = logging.getLogger(__name__)
_SWEEP_FOLDER = "hydra.sweep.dir"
_COMPLETION_FLAGS = {"-sc", "--shell-completion"}


def _run(config: DictConfig) -> None:
    hydra_config = HydraConfig.get()
    folder = RunFolder(Path(hydra_config.runtime.output_dir))
    overrides = [str(each) for each in hydra_config.overrides.task if not str(each).startswith("resume=")]
    plain: dict[str, Any] = OmegaConf.to_container(config, resolve=True)  # type: ignore[assignment]
    try:
        if hydra_config.mode == RunMode.MULTIRUN:
            run_sweep_job(
                lambda folder: _run_task(plain, folder),
                folder,
                number=int(hydra_config.job.num),
                config=plain,
                overrides=overrides,
                paths=lambda: _paths(plain),
                record=lambda folder: write_record(config, folder.path),
                sweep_folder=Path(hydra_config.sweep.dir),
                explain=lambda error: str(_for_users(error, folder) or f"{type(error).__name__}: {error}"),
            )
        else:
            with folder.held():
                notes = _run_alone(config, plain, overrides, folder)
            if notes.collapsed is not None:
                _leave(RankrlError(f"the run is finished, but {notes.collapsed}."), COLLAPSED)
            if notes.missed is not None:
                _leave(ConfigError(f"the run is finished, but {notes.missed}."), BUDGET_MISSED)
    except (RunStoppedError, KeyboardInterrupt) as error:  # a search finishes its episode first
        if hydra_config.mode == RunMode.MULTIRUN and not runs_in_pool():
            raise KeyboardInterrupt from error  # `main` says how the sweep goes on
        stopped = error if isinstance(error, RunStoppedError) else RunStoppedError(folder.path)
        _leave(stopped, INTERRUPTED)
    except Exception as error:
        explained = _for_users(error, folder)
        if explained is None:
            raise
        _leave(explained, USER_ERROR)


def _run_alone(
    config: DictConfig,
    plain: dict[str, Any],
    overrides: list[str],
    folder: RunFolder,
) -> RunNotes:
    """Run the task with its folder locked; return the notes of its steps."""
    try:
        if plain["resume"] is None and plain["overwrite"]:
            folder.begin_anew()
        elif plain["resume"] is None:
            refuse_used_folder(folder, plain)
        elif folder.finished:  # by another `resume`, since the command line was checked
            _show_finished(folder.path)
            return RunNotes()
        folder.prepare()
        folder.claim(plain, overrides, resume=True, paths=_paths(plain))
        write_record(config, folder.path)
        notes = _run_task(plain, folder)
    except Exception as error:
        if plain["resume"] is None and _for_users(error, folder) is not None:
            folder.discard()
        raise
    folder.error.unlink(missing_ok=True)  # of an earlier attempt, as the job of a sweep
    return notes


def _paths(plain: dict[str, Any]) -> dict[str, list[str]]:
    """Return the paths in a checked configuration, by option."""
    load_plugins(plain["plugins"])
    check_values(plain)
    return named_paths(plain)


def _run_task(plain: dict[str, Any], folder: RunFolder) -> RunNotes:
    """Run the task, tracked; return the notes of its steps."""
    load_plugins(plain["plugins"])  # the job of a sweep may have a process of its own
    check_values(plain)  # values drawn by a sweeper are known only now
    settings = built(AppConfig, plain)
    check_input_files(plain)
    for chatty in ("onnxscript", "onnx_ir", "torch.onnx", "alembic", "tensorboard"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    from rankrl.device import device_note, reuse_memory
    from rankrl.training.epochs import subnormals_as_zero

    reuse_memory()
    log.info(device_note())
    run = TASKS[settings.task].of(settings)
    kind, options = settings.tracking.name, settings.tracking.options
    with subnormals_as_zero(), start_tracking(kind, folder.path, plain, options) as tracking:
        tracked = RunFolder(folder.path, tracking)
        run(settings, tracked)
    return tracked.notes


def _for_users(error: Exception, folder: RunFolder) -> Exception | None:
    """Return the error that a user is shown in one paragraph, or None for a defect of ours."""
    if isinstance(error, (RankrlError, DecompositionError)):
        return error
    from pruning import PruningError  # imports torch

    if isinstance(error, PruningError):
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


_SHORT_FOR = {"export=false": "export.skip=true"}


def checked_arguments(arguments: Sequence[str]) -> list[str] | None:
    """Check a command line as far as possible without computing, and return the arguments for Hydra."""
    helping = not HELP_FLAGS.isdisjoint(arguments)
    arguments = [_SHORT_FOR.get(each, each) for each in readable_arguments(arguments)]
    finished = finished_run(arguments)
    if finished is not None:
        _show_finished(finished)
        return None
    arguments = resumed_arguments(arguments)
    known = options_of_run(arguments)
    if known:
        print(f"rankrl: {' '.join(known)}, as in that run")
    arguments = sweep_arguments([*known, *arguments])
    load_plugins(named_plugins(arguments))
    store_groups()  # after the plugins, which register choices
    flags = parsed_flags(arguments)
    if flags.experimental_rerun is not None:
        raise ConfigError(
            f"--experimental-rerun={flags.experimental_rerun}: a pickle can hold any program and is not run; "
            "resume=FOLDER goes on with the run in a folder, and .hydra/overrides.yaml there lists its "
            "options for a new one"
        )
    with composing(flags):
        check_overrides(arguments)
        if helping:
            _show(help_page(arguments))
            return None
        finished = check_resumed(arguments)
        if finished is not None:
            _show_finished(finished)
            return None
        sweep_folder = check_folders(arguments)
    if sweep_folder is None or _sweep_folders(arguments):
        return arguments
    # Fixed here, as the default name holds the time.
    return [*readable_arguments([f"{_SWEEP_FOLDER}={sweep_folder}"]), *arguments]


def _sweep_folders(arguments: Sequence[str]) -> list[str]:
    """Return the arguments that name a sweep's folder."""
    return [each for each in arguments if each.startswith(f"{_SWEEP_FOLDER}=")]


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
    flags = set(written)
    if flags & VERSION_FLAGS:
        print(version_line())
        return
    try:
        if _COMPLETION_FLAGS & flags:  # which has arguments of its own
            load_plugins()
            store_groups()
        else:
            checked = checked_arguments(written)
            if checked is None:
                return
            sys.argv[1:] = checked
    except RankrlError as error:
        _leave(error, USER_ERROR)
    try:
        with raised_errors():
            hydra.main(version_base="1.3", config_path=str(config_folder()), config_name="config")(_run)()
    except KeyboardInterrupt:
        folder = [] if _sweep_folders(written) else _sweep_folders(sys.argv)
        command = shlex.join(["rankrl", *written, *folder])
        _leave(ConfigError(f"stopped; `{command}` goes on"), INTERRUPTED)
    except Exception as error:  # of any type that Hydra and its plugins raise; a task's own defects pass
        if os.environ.get(COMPLETE_ERRORS) == "1" or any(
            frame.f_code is _run.__code__ for frame, _ in walk_tb(error.__traceback__)
        ):
            raise
        text = f"Hydra cannot carry the command out: {in_words(error)}. {COMPLETE_ERRORS}=1 shows where"
        _leave(ConfigError(text), USER_ERROR)


if __name__ == "__main__":
    main()
