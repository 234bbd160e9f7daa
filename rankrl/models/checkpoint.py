"""Weights in and out of files, without ever running code from them."""

from __future__ import annotations

import pickle
import re
from collections.abc import Mapping
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from rankrl.errors import CheckpointError
from rankrl.files import write_atomically

_HELDOUT = "heldout"
# What keys begin with in files of DataParallel, of a Lightning module's `model` and of torch.compile.
_PREFIXES = ("module.", "model.", "_orig_mod.")
_STATE_DICTS = ("state_dict", "model_state_dict")
_LIGHTNING = "pytorch-lightning_version"


def load_checkpoint(model: nn.Module, path: str | Path) -> None:
    """Load the weights of a network, all of them or none.

    Reads PyTorch files (.th, .pt, .pth, ...) with `weights_only=True`, holding a state_dict or a dict with a
    "state_dict" or "model_state_dict", and .safetensors. A prefix `module.`, `model.` or `_orig_mod.` on
    every key is removed, where the model's own names have none; of a Lightning checkpoint what lies beside
    `model.` (a loss, metrics) is left out. `num_batches_tracked` may be missing, as old files lack it.
    Floating-point types are converted to the model's own.

    Args:
        model: The network to fill; untouched when an error is raised.
        path: The file.

    Raises:
        CheckpointError: The file is missing, damaged, no state_dict, holds anything but tensors and plain
            values, is for another architecture or class count, or holds NaN or infinite weights.
    """
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"there is no checkpoint file {path}")
    expected: dict[str, Tensor] = model.state_dict()
    tensors = _without_prefixes(_state_dict(_read(path), path), expected)
    _check_fit(tensors, expected, path)
    _check_values(tensors, expected, path)
    model.load_state_dict(tensors, strict=False)


def save_checkpoint(model: nn.Module, path: str | Path, *, heldout: str | None = None) -> None:
    """Write the weights of a network as .safetensors, atomically.

    Args:
        model: The network; its tensors are copied to the CPU and to contiguous memory, not moved.
        path: The file to create or replace.
        heldout: Which images it was not trained on (`Images.digest`), for `checkpoint_heldout`.

    Raises:
        StorageError: The file cannot be written.
    """
    tensors = {key: value.detach().cpu().contiguous().clone() for key, value in model.state_dict().items()}
    metadata = None if heldout is None else {_HELDOUT: heldout}
    write_atomically(path, safetensors.torch.save(tensors, metadata))


def checkpoint_heldout(path: str | Path) -> str | None:
    """Return which images the network in a file of `save_checkpoint` was not trained on, if it says so."""
    try:
        with safe_open(path, framework="pt") as file:
            return (file.metadata() or {}).get(_HELDOUT)
    except (SafetensorError, OSError):
        return None


def _read(path: Path) -> object:
    if path.suffix == ".safetensors":
        try:
            return safetensors.torch.load_file(path, device="cpu")
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} is damaged or no safetensors file: {error}") from error
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL (\S+)", str(error))
        if found is None:
            raise CheckpointError(f"{path} is damaged or no PyTorch checkpoint") from error
        raise CheckpointError(
            f"{path} holds more than tensors and plain values ({found[1].rstrip('.,')}); loading that could "
            "run code from the file, so it is refused. Save only model.state_dict(), or a .safetensors file."
        ) from error
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    except Exception as error:
        # Arbitrary bytes make torch's readers fail with almost any exception (RuntimeError, EOFError,
        # KeyError, UnicodeDecodeError, struct.error, ...); all of them mean the same to the user.
        raise CheckpointError(
            f"{path} is damaged or no PyTorch checkpoint ({type(error).__name__})"
        ) from error


def _state_dict(content: object, path: Path) -> dict[str, Tensor]:
    lightning = isinstance(content, Mapping) and _LIGHTNING in content
    if isinstance(content, Mapping):
        content = next((content[k] for k in _STATE_DICTS if isinstance(content.get(k), Mapping)), content)
    if lightning and isinstance(content, Mapping):
        of_model = {key: value for key, value in content.items() if str(key).startswith("model.")}
        content = of_model or content
    if not isinstance(content, Mapping):
        raise CheckpointError(
            f"{path} holds a {type(content).__name__}, not a state_dict (a dict of tensors)"
        )
    others = [
        key for key, value in content.items() if not (isinstance(key, str) and isinstance(value, Tensor))
    ]
    if others or not content:
        raise CheckpointError(
            f"{path} holds no state_dict: a dict of names and tensors, alone or under the key 'state_dict' "
            "or 'model_state_dict'; "
            f"it holds {', '.join(repr(key) for key in list(content)[:5]) or 'nothing'}"
        )
    return dict(content)


def _without_prefixes(tensors: dict[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors without what wrappers put in front of every name."""
    for _ in _PREFIXES:  # one wrapper may lie in another
        for prefix in _PREFIXES:
            wrapped = all(key.startswith(prefix) for key in tensors)
            if wrapped and not all(key.startswith(prefix) for key in expected):
                tensors = {key.removeprefix(prefix): value for key, value in tensors.items()}
    return tensors


def _check_fit(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor], path: Path) -> None:
    missing = [key for key in expected if key not in tensors and not key.endswith("num_batches_tracked")]
    unexpected = [key for key in tensors if key not in expected]
    reshaped = [key for key in tensors if key in expected and tensors[key].shape != expected[key].shape]
    if not missing and not unexpected and not reshaped:
        return
    if not missing and not unexpected:
        classes = _class_counts(tensors, expected, reshaped)
        if classes is not None:
            raise CheckpointError(
                f"{path} is for {classes[0]} classes, but the model has {classes[1]}. "
                "Choose the dataset that the checkpoint was trained on, or a checkpoint for this one."
            )
    problems = []
    if missing:
        problems.append(f"the file lacks {_some(missing)}")
    if unexpected:
        problems.append(f"the model lacks {_some(unexpected)}")
    if reshaped:
        shapes = [f"{key} {tuple(tensors[key].shape)} for {tuple(expected[key].shape)}" for key in reshaped]
        problems.append(f"shapes differ (file for model): {_some(shapes)}")
    raise CheckpointError(
        f"{path} is for another architecture: {'; '.join(problems)}. Choose the matching model."
    )


def _class_counts(
    tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor], reshaped: list[str]
) -> tuple[int, int] | None:
    """Return the classes of file and model when only the rows of the last layer differ."""
    last = list(expected)[-1].rpartition(".")[0]
    for key in reshaped:
        same_columns = tensors[key].ndim > 0 and tensors[key].shape[1:] == expected[key].shape[1:]
        if key.rpartition(".")[0] != last or not same_columns:
            return None
    return len(tensors[reshaped[0]]), len(expected[reshaped[0]])


def _check_values(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor], path: Path) -> None:
    for key, value in tensors.items():
        if value.layout != torch.strided or value.is_quantized or value.is_meta:
            kind = "quantized" if value.is_quantized else "without values" if value.is_meta else "sparse"
            raise CheckpointError(f"{path}: {key} is {kind}; save a plain tensor of {expected[key].dtype}")
        if value.is_floating_point() != expected[key].is_floating_point() or value.is_complex():
            raise CheckpointError(
                f"{path}: {key} is {value.dtype}, but the model needs {expected[key].dtype}"
            )
        if not torch.isfinite(value).all():
            raise CheckpointError(
                f"{path}: {key} holds NaN or infinite values; the training that wrote it diverged"
            )


def _some(names: list[str], limit: int = 4) -> str:
    rest = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {rest} more" if rest > 0 else "")
