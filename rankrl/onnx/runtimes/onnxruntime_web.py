"""onnxruntime-web's WASM backend, in node."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any, ClassVar, overload

import numpy as np

from rankrl.onnx.runtimes.base import Runtime, Session
from rankrl.onnx.runtimes.registry import register_runtime

_PROGRAM = "web_sessions.cjs"
_PACKAGE = "onnxruntime-web"
_FIND = f"console.log(require('module').createRequire(process.cwd() + '/').resolve('{_PACKAGE}'))"
_DTYPES: dict[str, np.dtype[Any]] = {"float32": np.dtype(np.float32), "uint8": np.dtype(np.uint8)}
_NUMBERS = itertools.count()

Array = np.ndarray[Any, Any]


class NodeProcess:
    """A process of node that holds open files; it ends with this one.

    Args:
        threads: Threads of every file.
    """

    def __init__(self, threads: int) -> None:
        program = str(resources.files("rankrl.onnx.runtimes") / _PROGRAM)
        self._process = subprocess.Popen(
            ["node", program, str(_package()), str(threads)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def ask(
        self, command: str, number: int, *arrays: Array, **values: Any
    ) -> tuple[dict[str, Any], list[Array]]:
        """Send a command, and return its answer with the arrays behind it.

        Raises:
            RuntimeError: It failed, or the process has ended.
        """
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps({"do": command, "id": number, **values}).encode() + b"\n")
            for array in arrays:
                process.stdin.write(array.data.cast("B"))
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError as error:
            raise RuntimeError(f"node has ended: {error}") from error
        if not line:
            raise RuntimeError(f"node has ended with exit code {process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        read = [
            np.frombuffer(process.stdout.read(each["size"]), each["dtype"]).reshape(each["shape"])
            for each in answer.get("arrays", ())
        ]
        return answer, read


class WebOutputs(Sequence[Array]):
    """The outputs of a pass, which leave node when they are looked at: timed passes do not wait for it.

    Args:
        ask: Asks the session for them.
    """

    def __init__(self, ask: Callable[[], list[Array]]) -> None:
        self._ask: Callable[[], list[Array]] | None = ask  # holds the session open
        self._arrays: list[Array] = []

    def fetch(self) -> list[Array]:
        """Return the arrays."""
        if self._ask is not None:
            self._arrays, self._ask = self._ask(), None
        return self._arrays

    def __len__(self) -> int:
        return len(self.fetch())

    def __iter__(self) -> Iterator[Array]:
        return iter(self.fetch())

    @overload
    def __getitem__(self, index: int) -> Array: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Array]: ...

    def __getitem__(self, index: int | slice) -> Array | Sequence[Array]:
        return self.fetch()[index]


class WebSession(Session):
    """An ONNX file, open in node."""

    def __init__(self, process: NodeProcess, path: str) -> None:
        self._process, self._number = process, next(_NUMBERS)
        entry = process.ask("open", self._number, path=path)[0]["inputs"][0]
        sizes = [size if isinstance(size, int) else None for size in entry["shape"]]
        super().__init__(entry["name"], entry["type"], _DTYPES.get(entry["type"]), sizes)
        weakref.finalize(self, _close, process, self._number)
        self._fed: dict[str, Array] = {}
        self._last: weakref.ref[WebOutputs] | None = None

    def outputs(self, feed: dict[str, Array]) -> Sequence[Array]:
        """Return the outputs for contiguous arrays; the same arrays again are not sent again."""
        last = None if self._last is None else self._last()
        if last is not None:  # somebody may still look at them
            last.fetch()
        if feed.keys() != self._fed.keys() or any(feed[name] is not self._fed[name] for name in feed):
            arrays = [
                {"name": name, "dtype": str(array.dtype), "shape": array.shape, "size": array.nbytes}
                for name, array in feed.items()
            ]
            self._fed = {}
            self._process.ask("feed", self._number, *feed.values(), arrays=arrays)
            self._fed = dict(feed)
        self._process.ask("run", self._number)
        outputs = WebOutputs(self._fetched)
        self._last = weakref.ref(outputs)
        return outputs

    def _fetched(self) -> list[Array]:
        return self._process.ask("fetch", self._number)[1]


@register_runtime
class OnnxRuntimeWeb(Runtime):
    """onnxruntime-web's WASM backend as browsers run it, in node; times are on the wall, call to answer."""

    name: ClassVar[str] = "onnxruntime_web"
    description: ClassVar[str] = "onnxruntime-web's WASM backend, in node"
    in_calling_thread: ClassVar[bool] = False

    def obstacle(self) -> str | None:
        """Return what is missing: node, or the package where this process works."""
        if shutil.which("node") is None:
            return "it needs node 18 or later; install that, and run `npm install onnxruntime-web` here"
        if _package() is None:
            return f"node finds no {_PACKAGE} in {Path.cwd()}; run `npm install onnxruntime-web` there"
        return None

    @property
    def version(self) -> str:
        """The version of the package."""
        package = _package()
        assert package is not None
        return str(json.loads((package.parents[1] / "package.json").read_text(encoding="utf-8"))["version"])

    def load(self, path: str, threads: int | None) -> Session:
        """Open the file in the process of so many threads."""
        return WebSession(_process(threads or os.cpu_count() or 1), os.path.abspath(path))


@lru_cache(maxsize=4)
def _process(threads: int) -> NodeProcess:
    return NodeProcess(threads)


def _package() -> Path | None:
    return _package_seen_from(Path.cwd())


@lru_cache(maxsize=16)
def _package_seen_from(folder: Path) -> Path | None:
    """Return the package's file that node loads in a folder, None where there is none."""
    run = subprocess.run(["node", "-e", _FIND], cwd=folder, capture_output=True, text=True, check=False)
    return Path(run.stdout.strip()) if run.returncode == 0 else None


def _close(process: NodeProcess, number: int) -> None:
    """Close a file, where node still runs."""
    try:
        process.ask("close", number)
    except RuntimeError:
        return
