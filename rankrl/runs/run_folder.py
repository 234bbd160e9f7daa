"""Manage run folders: their files, the recorded configuration, and its differences from another."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import shlex
import shutil
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout

from rankrl.errors import ConfigError, FolderInUseError, StorageError
from rankrl.files import (
    METRICS,
    PREVIOUS,
    RECORD,
    RESULTS,
    bring_back,
    check_own,
    read_object,
    recording,
    remove_previous,
    remove_written,
    set_aside,
    write_json,
    written_files,
)
from rankrl.runs.tracking import NOT_TRACKED, Tracking

log = logging.getLogger(__name__)

_MISSING = "not set"
_NETWORK = "network"  # recorded as a hash, which is not shown to readers
_LONGEST_SHOWN = 60
_MOST_NAMED = 3
# Options without effect on a run's results.
_WITHOUT_EFFECT = (
    "resume",
    "reuse",
    "overwrite",
    "plugins",
    "tracking",
    *(f"search.{name}" for name in ("workers", "cluster", "worker_cpus", "worker_gpus")),
)


def with_effect(config: Mapping[str, Any], within: str = "") -> dict[str, Any]:
    """Return the options of a configuration that a run's results depend on."""
    return {
        name: with_effect(value, f"{within}{name}.") if isinstance(value, Mapping) else value
        for name, value in config.items()
        if f"{within}{name}" not in _WITHOUT_EFFECT
    }


def digest(config: Mapping[str, Any]) -> str:
    """Return a hash of the options that a run's results depend on."""
    text = json.dumps(with_effect(as_recorded(config)), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def changed_options(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """Return the options in which two configurations differ, in words; empty if there are none."""
    changes = list(_changes(before, after))
    return "; ".join(changes[:_MOST_NAMED]) + ("; ..." if len(changes) > _MOST_NAMED else "")


def as_recorded(config: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a configuration to the form of its record."""
    plain: dict[str, Any] = json.loads(json.dumps(config))
    return plain


def _changes(before: Any, after: Any, name: str = "") -> Iterator[str]:
    """Yield `option was A, is now B` for every option in which two configurations differ."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in {**before, **after}:
            inner = f"{name}.{key}" if name else str(key)
            yield from _changes(before.get(key, _MISSING), after.get(key, _MISSING), inner)
    elif before != after and name == _NETWORK:
        yield f"{name} was another one, with other layers or weights"
    elif before != after:
        yield f"{name} was {_brief(before)}, is now {_brief(after)}"


def _brief(value: Any) -> str:
    text = str(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


COMPRESS = "rankrl.compress"
"""The task in the record of a call of it."""
SAME_CALL = (
    "the same call goes on with it; for another one name another folder, or delete this one (overwrite=True)"
)
_ANOTHER_FOLDER = (
    "`rankrl resume=FOLDER` goes on with it; choose another folder for a new run, or overwrite=true"
)
_BEGIN_ANEW = "begin anew with overwrite=True (overwrite=true at the command line), or choose another folder"
_LONGEST_NAME = 200
_BEGAN = time.time()  # start of this process, roughly


@dataclass
class RunNotes:
    """Notes of a run's steps for its `metrics.json`; `about` are the entries on the run itself."""

    about: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    trainings: dict[str, dict[str, Any]] = field(default_factory=dict)
    missed: str | None = None
    collapsed: str | None = None


class _Inside:
    """The path of a file in a run folder."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, folder: RunFolder, owner: type[RunFolder]) -> Path:
        return folder.path / self._name


@dataclass(frozen=True)
class RunFolder:
    """The folder of a run's results; `metrics.json` is written last, so a folder with it is complete."""

    plan = _Inside("plan.json")
    metrics = _Inside(METRICS)
    model = _Inside("model.safetensors")  # the compressed network with its plan
    kit = _Inside("kit")  # what another device times
    onnx = _Inside("model.onnx")
    optimizer_step = _Inside("optimizer_step.onnx")
    dense = _Inside("dense.safetensors")  # trained by the run itself
    state = _Inside("state")  # everything that resuming needs
    searches = _Inside("searches")  # of a comparison, a folder each
    error = _Inside("error.json")  # of a sweep's job that failed
    record = _Inside(RECORD)  # the configuration that the results belong to, and its overrides
    progress = _Inside("state/progress.json")  # of a sweep's job

    path: Path
    tracking: Tracking = field(default=NOT_TRACKED, compare=False)
    notes: RunNotes = field(default_factory=RunNotes, compare=False)

    def warn(self, text: str) -> None:
        """Log a warning, and keep it for `metrics.json`, the report and the end of the run."""
        log.warning(text)
        self.notes.warnings.append(text)

    def miss(self, text: str) -> None:
        """Keep the warning that the budget is missed, for the same places and the exit code."""
        self.notes.warnings.append(text)
        self.notes.missed = text

    def collapse(self, text: str) -> None:
        """Keep the warning that the network is no better than a constant, for the same places."""
        self.notes.warnings.append(text)
        self.notes.collapsed = text

    @property
    def finished(self) -> bool:
        """Whether a run has ended here; damaged metrics do not count, so that they are written again."""
        try:
            return isinstance(json.loads(self.metrics.read_text(encoding="utf-8")), dict)
        except (OSError, ValueError):
            return False

    @property
    def holds_results(self) -> bool:
        """Whether a run has ended here, or has kept a state to resume from."""
        files = (self.metrics, self.plan, self.path / "episodes.csv")
        states = (*self.state.rglob("*.safetensors"), *self.searches.rglob("*"))
        return any(file.is_file() and self._wrote(file) for file in (*files, *states))

    def _wrote(self, file: Path) -> bool:
        """Whether a run wrote a file; assumed for runs without a list."""
        written = written_files(self.path)
        return written is None or file.relative_to(self.path).as_posix() in written

    @contextmanager
    def held(self) -> Iterator[None]:
        """Lock the folder against other runs, and record the files written into it."""
        with locked(self.path), recording(self.path):
            yield

    def claim(
        self, config: Mapping[str, Any], overrides: Sequence[str] = (), choices: Sequence[str] = ()
    ) -> None:
        """Record a run's configuration, where it starts, and its folders of choices."""
        record = {
            "config": with_effect(as_recorded(config)),
            "overrides": list(overrides),
            "folder": [os.getcwd(), _relative(os.curdir, self.path)],
            "choices": [_relative(each, Path.cwd()) for each in choices],
        }
        write_json(self.record, record)

    def check(self, config: Mapping[str, Any], *, advice: str = _ANOTHER_FOLDER) -> None:
        """Refuse a folder with results of another configuration, or files of others; nothing is written."""
        check_own(self.path)
        difference = self.difference(config)
        if difference is not None:
            known = self.recorded() is not None
            raise ConfigError(f"{self.path} holds a run {difference}; {advice if known else _BEGIN_ANEW}")

    def replace(self, config: Mapping[str, Any]) -> None:
        """Start over if the folder holds results of another configuration; those of the same one stay."""
        difference = self.difference(config)
        if difference is not None:
            log.warning("%s held a run %s; it is overwritten", self.path, difference)
            self.begin_anew()
        check_own(self.path)

    def begin(self, config: Mapping[str, Any]) -> None:
        """Begin a run of a checked configuration, or go on with the same one."""
        self.replace(config)
        self.prepare()
        self.claim(config)

    def begin_anew(self) -> None:
        """Set aside a run's files, and no others, until the next run here has ended."""
        check_own(self.path)
        set_aside(self.path)

    def bring_back(self) -> bool:
        """Restore what `begin_anew` set aside, unless there are new results; tell whether it did."""
        return not self.holds_results and bring_back(self.path)

    def finish(self, metrics: Mapping[str, Any]) -> None:
        """Write `metrics.json`, the mark that the run has ended, and remove what it replaces."""
        write_json(self.metrics, metrics)
        remove_previous(self.path)

    def training_state(self, stage: str) -> Path:
        """Return the state file of a training, by stage, such as `finetune`."""
        return self.state / f"{stage}.safetensors"

    @classmethod
    def below(cls, folder: Path) -> Iterator[RunFolder]:
        for record in sorted(folder.rglob("state/configuration.json")):
            if record.parents[1].name != PREVIOUS:
                yield cls(record.parents[1])

    def difference(self, config: Mapping[str, Any]) -> str | None:
        """Describe how the configuration of the results in the folder differs, or return None."""
        if not self.holds_results:
            return None
        before = self.recorded()
        if before is None:
            damaged = self.record.is_file()
            return f"whose record {self.record} is damaged" if damaged else "of unknown configuration"
        changes = changed_options(with_effect(before), with_effect(as_recorded(config)))
        return f"with another configuration ({changes})" if changes else None

    def remove_results(self) -> None:
        """Remove the files that a run ends with, `metrics.json` first, before another run writes its own.

        Without `metrics.json` an interrupted removal leaves an unfinished run.
        """
        remove_written(self.path, [name for name in RESULTS if self._wrote(self.path / name)])

    def recorded(self) -> dict[str, Any] | None:
        """Return the recorded configuration, or None if there is no readable one."""
        config = read_object(self.record).get("config")
        return config if isinstance(config, dict) else None

    def discard(self) -> None:
        """Remove the files of a refused run unless the folder holds results, and the folder if empty then.

        Files older than this process belong to others and stay. Empty parent folders are removed, too, up to
        the current one.
        """
        if self.holds_results or not self.path.is_dir() or self.bring_back():
            return
        remove_written(self.path)
        for path in self.path.rglob("*"):
            known = path.name == LOCK_FILE or (path.suffix == ".log" and path.stat().st_mtime >= _BEGAN)
            if path.is_file() and not known:
                return
        shutil.rmtree(self.path, ignore_errors=True)
        here = Path.cwd()
        for folder in self.path.absolute().parents:
            if folder == here or here not in folder.parents:
                break
            try:
                folder.rmdir()
            except OSError:  # not empty: other runs are in it
                break

    def prepare(self) -> None:
        try:
            self.state.mkdir(parents=True, exist_ok=True)
            _probe(self.state)
        except OSError as error:
            raise StorageError(
                f"the run folder {self.path} cannot be written ({error.strerror}); "
                "choose another one with hydra.run.dir=FOLDER"
            ) from error


def _relative(text: str, folder: Path) -> str:
    """Return the path relative to a folder, or the absolute one where there is none, as between drives."""
    try:
        return os.path.relpath(text, folder)
    except ValueError:
        return os.path.abspath(text)


def _probe(folder: Path) -> None:
    """Write and remove a file."""
    probe = folder / f".probe-{os.getpid()}"
    probe.write_bytes(b"writable")
    probe.unlink()


def check_writable(folder: Path, option: str) -> None:
    """Refuse a folder that cannot be created or written; folders made for this check are removed again."""
    made: list[Path] = []
    try:
        for place in (*reversed(folder.parents), folder):
            if not place.exists():
                place.mkdir(exist_ok=True)
                made.append(place)
        _probe(folder)
    except OSError as error:
        name = str(folder) if len(str(folder)) <= _LONGEST_NAME else f"{str(folder)[:_LONGEST_NAME]}..."
        raise StorageError(
            f"{option}={name}: that folder cannot be written ({error.strerror}); choose another one with "
            f"{option}=FOLDER"
        ) from error
    finally:
        for place in reversed(made):
            with suppress(OSError):
                place.rmdir()


def cache_folder() -> Path:
    """Return the cache folder, whose fits later runs reuse: RANKRL_CACHE, or `rankrl` in the user's cache."""
    named = os.environ.get("RANKRL_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(named) if named else Path(base) / "rankrl"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(
            f"the cache folder {folder} cannot be created ({error.strerror}); "
            "set the environment variable RANKRL_CACHE to a writable folder"
        ) from error
    return folder


LOCK_FILE = "run.lock"
_NO_LOCKS = {errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL}  # filelock knows ENOSYS itself
_PATIENCE = 0.2  # seconds: a holder that ends removes its file before it releases the lock
_LONGEST_COMMAND = 200  # characters
_MOST_TURNS = 1000


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a folder against other runs, in threads too; processes that start here do not hold the lock."""
    path = folder / LOCK_FILE
    try:
        made = [place for place in (folder, *folder.parents) if not place.exists()]
        lock = _acquired(path)
    except OSError as error:
        raise StorageError(
            f"the folder {folder} cannot be written ({error.strerror}); choose another one"
        ) from error
    try:
        if not isinstance(lock, SoftFileLock):  # whose file holds its own words
            _write_words(path)
        yield
    finally:
        if lock.is_locked:  # a forked child leaves the block, too, but does not hold the lock
            with suppress(OSError):
                path.unlink()
            lock.release()
            with suppress(OSError):  # a folder with results is not empty
                for place in made:
                    place.rmdir()


def check_free(folder: Path) -> None:
    """Refuse a folder that a run uses; nothing is written."""
    path = folder / LOCK_FILE
    if path.is_file():
        with suppress(OSError):
            _lock(path).release()


def _acquired(path: Path) -> BaseFileLock:
    """Return the lock on a file; create the folder if necessary.

    The loop is needed as the previous holder may remove the folder at any time.
    """
    for _ in range(_MOST_TURNS):
        with suppress(FileNotFoundError):
            return _lock(path)
    raise _in_use(path)


def _lock(path: Path) -> BaseFileLock:
    """Lock a file; on a file system without locks, its existence is the lock."""
    lock: BaseFileLock = FileLock(path, _PATIENCE, thread_local=False)
    try:
        try:
            lock.acquire()
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            if path.stat().st_size == 0:  # the first attempt's; a held one is not empty
                path.unlink()
            lock = SoftFileLock(path, _PATIENCE, thread_local=False)
            lock.acquire()
    except Timeout as error:
        raise _in_use(path) from error
    return lock


def _write_words(path: Path) -> None:
    program = Path(sys.argv[0])
    name = program.parent.name if program.name == "__main__.py" else program.name  # for python -m rankrl
    words = {
        "process": os.getpid(),
        "host": socket.gethostname(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
        "command": shlex.join([name, *sys.argv[1:]])[:_LONGEST_COMMAND],
    }
    with suppress(OSError):  # the disk may be full
        path.write_text(json.dumps(words), encoding="utf-8")


def _in_use(path: Path) -> FolderInUseError:
    owner = f"another run, which wrote {path}"
    with suppress(OSError, ValueError, KeyError, TypeError):
        words = json.loads(path.read_text(encoding="utf-8"))
        owner = "process {process} on {host}, since {since} (`{command}`)".format(**words)
    return FolderInUseError(
        f"{path.parent} is in use by {owner}; wait until that has ended, or stop it. A run at the same time "
        "needs a folder of its own"
    )
