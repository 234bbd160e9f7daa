"""Read and write state files: tensors and plain values in one .safetensors file, without pickle.

The values are JSON in the file's metadata. A single file, replaced atomically, never mixes two states.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rankrl.errors import CheckpointError
from rankrl.files import write_atomically


def write_state(path: Path, tensors: Mapping[str, Tensor], content: Mapping[str, Any], version: int) -> None:
    plain = {key: value.detach().cpu().contiguous().clone() for key, value in tensors.items()}
    text = json.dumps({"version": version, **content})
    write_atomically(path, safetensors.torch.save(plain, metadata={"rankrl": text}))


def check_setup(path: Path, what: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse a state that was written with another setup."""
    for key, value in json.loads(json.dumps(now)).items():
        if before.get(key) != value:
            raise CheckpointError(
                f"{path} belongs to another {what}: {key} was {before.get(key)!r}, is now {value!r}. Use the "
                "same settings to resume, or start without resuming."
            )


def damaged_state(path: Path, what: str, error: Exception) -> CheckpointError:
    """Return the error for an unreadable state; it advises to remove the file, so that this part restarts."""
    reason = f"{type(error).__name__}: {error}"
    return CheckpointError(
        f"{path} is damaged or no {what} ({reason}); remove that file: the same call, or `rankrl resume=`, "
        "then begins that part anew and goes on with the rest"
    )


def read_state(path: Path, version: int, what: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    if not path.is_file():
        raise CheckpointError(f"there is no {what} {path} to resume from")
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            metadata = file.metadata() or {}
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a dict)
        content: dict[str, Any] = json.loads(metadata["rankrl"])
        written = content["version"]
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise damaged_state(path, what, error) from error
    if written != version:
        raise CheckpointError(
            f"{path} has the version {written}, this program reads version {version}; start without resuming"
        )
    return tensors, content
