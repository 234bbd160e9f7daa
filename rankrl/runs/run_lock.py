"""Lock a run folder with a lock of the operating system, on a file that names its holder.

The lock ends with the process that holds it, even if that is killed; the file it leaves then locks nothing.
Otherwise the file is removed with the lock. On a network file system that supports locks, such as NFS and
Lustre (mounted with `flock`), the lock holds across machines; on one without locks, only processes of the
same machine are noticed.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shlex
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from rankrl.errors import FolderInUseError, StorageError

_P = ParamSpec("_P")
_R = TypeVar("_R")

log = logging.getLogger(__name__)

LOCK_FILE = "run.lock"
_HELD_BY_OTHERS = {errno.EACCES, errno.EAGAIN, errno.EWOULDBLOCK, errno.EDEADLK}
_NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL}
_BEYOND_THE_WORDS = 1 << 30  # Windows forbids others to read a locked byte, so one past the text is locked
_LONGEST_COMMAND = 200  # characters
_MOST_TURNS = 1000
_TURNS, _TURN = 20, 0.01
_held: set[int] = set()


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a folder against every other run, runs in other threads included.

    Processes that this one starts do not hold the lock.
    """
    path, process = folder / LOCK_FILE, os.getpid()
    try:
        made = [place for place in (folder, *folder.parents) if not place.exists()]
        descriptor = _acquired(path)
    except OSError as error:
        raise StorageError(
            f"the folder {folder} cannot be written ({error.strerror}); choose another one"
        ) from error
    _held.add(descriptor)
    try:
        _write_words(descriptor)
        yield
    finally:
        if os.getpid() == process:  # a forked child leaves the block, too, but must not release the lock
            _held.discard(descriptor)
            _release(path, descriptor)
            with suppress(OSError):  # a folder with results is not empty
                for place in made:
                    place.rmdir()


def check_free(folder: Path) -> None:
    """Refuse a folder that a run uses; nothing is written."""
    path = folder / LOCK_FILE
    try:
        descriptor = os.open(path, os.O_RDWR)
    except OSError:
        return
    try:
        if not _lock(descriptor):
            raise _in_use(folder, descriptor)
    finally:
        os.close(descriptor)


def _acquired(path: Path) -> int:
    """Return the descriptor of the locked file; create the folder if necessary.

    The loop is needed as the previous holder may remove file and folder between any two of these calls.
    """
    for _ in range(_MOST_TURNS):
        with suppress(FileNotFoundError):
            _make(path.parent)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                if not _lock(descriptor):
                    raise _in_use(path.parent, descriptor)
                if os.path.samestat(os.fstat(descriptor), path.stat()):
                    return descriptor
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)
    raise _in_use(path.parent)


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        if folder.exists():  # it is a file; a folder may have been removed in the meantime
            raise


def _release(path: Path, descriptor: int) -> None:
    if sys.platform == "win32":  # Windows removes no open file
        os.close(descriptor)
        with suppress(OSError):  # the next holder has opened it already
            path.unlink()
    else:
        with suppress(OSError):
            path.unlink()
        os.close(descriptor)


def _lock(descriptor: int) -> bool:
    """Lock an open file until it is closed; return False if another process holds it."""
    try:
        if sys.platform == "win32":
            import msvcrt

            os.lseek(descriptor, _BEYOND_THE_WORDS, os.SEEK_SET)
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
            os.lseek(descriptor, 0, os.SEEK_SET)
        else:
            import fcntl

            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _HELD_BY_OTHERS:
            return False
        if error.errno in _NO_LOCKS:
            return _nobody_here(descriptor)
        raise
    return True


def _write_words(descriptor: int) -> None:
    path = Path(sys.argv[0])
    program = path.parent.name if path.name == "__main__.py" else path.name  # the former for python -m rankrl
    words = {
        "process": os.getpid(),
        "host": socket.gethostname(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
        "command": shlex.join([program, *sys.argv[1:]])[:_LONGEST_COMMAND],
    }
    with suppress(OSError), os.fdopen(descriptor, "r+b", closefd=False) as file:  # the disk may be full
        file.truncate(0)
        file.write(json.dumps(words).encode())


def _read_words(descriptor: int) -> dict[str, Any]:
    """Return the holder's description; empty if it is not written yet, or only in part."""
    try:
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            file.seek(0)
            words: dict[str, Any] = json.loads(file.read())
            return {name: words[name] for name in ("process", "host", "since", "command")}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _in_use(folder: Path, descriptor: int | None = None) -> FolderInUseError:
    words = dict[str, Any]()
    for _ in range(_TURNS):
        words = {} if descriptor is None else _read_words(descriptor)
        if words:
            break
        time.sleep(_TURN)  # a new holder of the lock is about to write its description
    owner = "another run"
    if words:
        owner = "process {process} on {host}, since {since} (`{command}`)".format(**words)
    return FolderInUseError(
        f"{folder} is in use by {owner}; wait until that has ended, or stop it. A run at the same time "
        "needs a folder of its own"
    )


def _nobody_here(descriptor: int) -> bool:
    """Tell whether no process of this machine holds a file on a file system without locks."""
    words = _read_words(descriptor)
    if words and words["host"] == socket.gethostname() and _lives(int(words["process"])):
        return False
    log.warning("the file system has no locks: a run on another machine in the same folder is not noticed")
    return True


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # a process of another user
        pass
    return True


def _close_in_child() -> None:
    """Close the locked files in a forked process, or the lock would outlive the parent."""
    for descriptor in _held:
        with suppress(OSError):
            os.close(descriptor)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)
