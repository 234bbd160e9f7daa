"""Cache values between runs in a folder, each under a hash of everything it depends on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from decomposition.errors import StorageError
from decomposition.files import cannot_write, replacing

_Value = TypeVar("_Value")
_Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Cache:
    """A folder of values that processes share, each written whole or not at all; nothing in it is pickled."""

    folder: Path | None

    def value(self, kind: str, key: str, compute: Callable[[], _Value]) -> _Value:
        """Return the cached value as JSON holds it, computing it on a miss."""

        def write(path: Path, value: _Value) -> None:
            path.write_text(json.dumps(value), encoding="utf-8")

        def read(path: Path) -> Any:
            return json.loads(path.read_text(encoding="utf-8"))

        def computed() -> Any:  # as the next run will read it
            return json.loads(json.dumps(compute(), allow_nan=False))

        return self._kept(f"{kind}-{key}.json", computed, read, write)

    def tensors(self, kind: str, key: str, compute: Callable[[], _Tensors]) -> _Tensors:
        """Return the cached tensors by name, on the CPU, computing them on a miss."""

        def write(path: Path, tensors: _Tensors) -> None:
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)

        return self._kept(f"{kind}-{key}.safetensors", compute, load_file, write)

    def file(self, kind: str, key: str, path: Path, write: Callable[[Path], object]) -> None:
        """Copy the cached file to a path, or write it there on a miss."""

        def written() -> bytes:
            write(path)
            return path.read_bytes()

        path.parent.mkdir(parents=True, exist_ok=True)
        if self.folder is None:
            write(path)
            return
        content = self._kept(f"{kind}-{key}{path.suffix}", written, Path.read_bytes, Path.write_bytes)
        with replacing(path) as temporary:
            temporary.write_bytes(content)

    def _kept(
        self,
        name: str,
        compute: Callable[[], _Value],
        read: Callable[[Path], _Value],
        write: Callable[[Path, _Value], object],
    ) -> _Value:
        if self.folder is None:
            return compute()
        path = self.folder / name
        known = _read(path, read)
        if known is not None:
            return known
        value = compute()
        known = _read(path, read)  # written first by another process, which may use it by now
        if known is not None:
            return known
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(cannot_write(path, error)) from error
        with replacing(path) as temporary:
            write(temporary, value)
        return value


def digest(*values: object) -> str:
    """Return a hash of values, 32 hexadecimal digits: dataclasses and containers by what they hold."""
    hasher = hashlib.sha256()
    _add(hasher, values)
    return hasher.hexdigest()[:32]


def _read(path: Path, read: Callable[[Path], _Value]) -> _Value | None:
    try:
        return read(path) if path.exists() else None
    except (SafetensorError, OSError, ValueError):
        return None


def _add(hasher: hashlib._Hash, value: object) -> None:
    if isinstance(value, np.generic):
        value = value.item()
    text, data, parts = type(value).__qualname__, memoryview(b""), tuple[object, ...]()
    if isinstance(value, torch.Tensor):
        plain = value.detach().cpu().contiguous().flatten()
        text, data = f"{value.dtype} {tuple(value.shape)}", plain.view(torch.uint8).numpy().data
    elif isinstance(value, np.ndarray):
        plain_bytes = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
        text, data = f"{value.dtype} {value.shape}", plain_bytes.data
    elif isinstance(value, bytes):
        data = memoryview(value)
    elif is_dataclass(value):
        parts = tuple((item.name, getattr(value, item.name)) for item in fields(value))
    elif isinstance(value, Mapping):
        text, parts = "mapping", tuple(value.items())
    elif isinstance(value, (list, tuple)):
        text, parts = "sequence", tuple(value)
    else:
        text = repr(value)
        if " at 0x" in text:
            raise TypeError(f"{text} cannot be part of a key; give what tells it from another one")
    # Each part goes in with its length: otherwise "ab", "c" and "a", "bc" would hash alike.
    hasher.update(f"{len(text)} {text} {data.nbytes} {len(parts)} ".encode())
    hasher.update(data)
    for part in parts:
        _add(hasher, part)
