"""Register and build classifiers, check their outputs, hash them, and read and write their weights."""

from __future__ import annotations

import argparse
import inspect
import json
import logging
import pickle
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from decomposition.cache import digest
from decomposition.network.cost import evaluation_mode
from decomposition.network.inputs import Inputs, run_model, tensors_in
from decomposition.registry import Registry
from rankrl.device import model_device
from rankrl.errors import CheckpointError, ConfigError, ModelError, did_you_mean
from rankrl.files import write_atomically


def check_classifier(
    model: object, input_shape: tuple[int, int, int], num_classes: int, *, name: str = "model"
) -> None:
    """Run a network on two blank images and check that it returns class scores; it stays unchanged."""
    if not isinstance(model, nn.Module):
        raise ModelError(f"{name} is a {type(model).__name__}, not a torch.nn.Module")
    images = torch.zeros(2, *input_shape, device=model_device(model))
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            output = model(images)
    except Exception as error:  # whatever the network's own code raises
        raise ModelError(
            f"{name} fails on images of shape {input_shape} (channels, height, width): {_first_line(error)}. "
            "Choose a model for this input, or a dataset with other images."
        ) from error
    finally:
        for module, training in modes.items():
            module.training = training
    if not isinstance(output, torch.Tensor):
        raise ModelError(
            f"{name} returns a {type(output).__name__}, but must return one tensor of class scores, "
            f"shape (N, {num_classes})"
        )
    if output.shape != (2, num_classes) or not output.is_floating_point():
        raise ModelError(
            f"{name} returns a {output.dtype} tensor of shape {tuple(output.shape)} for 2 images, but the "
            f"dataset has {num_classes} classes: it must be floating-point of shape (2, {num_classes}). "
            "A network of your own is told their number by its parameter num_classes, or by "
            f"+model.num_classes={num_classes}"
        )


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def network_digest(model: nn.Module) -> str:
    """Return the hash of a network's modules and weights, 16 hexadecimal digits."""
    modules = [(name, type(module).__qualname__) for name, module in model.named_modules()]
    tensors = {
        name: value
        for name, value in model.state_dict().items()
        if isinstance(value, Tensor) and value.layout == torch.strided
    }
    return digest(modules, tensors)[:16]


def behaviour_digest(model: nn.Module, inputs: Inputs) -> str:
    """Return a hash of modules, weights and outputs, which tells equally named networks apart."""
    with evaluation_mode(model), torch.no_grad():
        answers = tensors_in(run_model(model, inputs))
    return digest(network_digest(model), list(answers), torch.__version__)


Builder = Callable[..., nn.Module]
"""`build(input_shape, num_classes, **options)` -> an initialised network."""


@dataclass(frozen=True)
class ModelSource:
    name: str
    description: str
    build: Builder
    lr: float | None = None


_MODELS: Registry[ModelSource] = Registry("model", ConfigError)


def register_model(name: str, description: str, *, lr: float | None = None) -> Callable[[Builder], Builder]:
    """Register the decorated function `build(input_shape, num_classes, **options)` as the model `name`."""

    def register(build: Builder) -> Builder:
        _MODELS.add(name, ModelSource(name, description, build, lr), description)
        return build

    return register


def list_models(pattern: str = "*") -> list[str]:
    """Return the names of the registered models that match a wildcard pattern, sorted."""
    return _MODELS.names(pattern)


def model_source(name: str) -> ModelSource:
    return _MODELS[name]


def default_lr(name: str, network: nn.Module) -> float:
    """Return the learning rate of SGD with momentum 0.9 for training a network from scratch.

    It is the rate registered with the model, else 0.1 for a network with batch normalisation and 0.01 for one
    without, where larger steps soon make ReLUs die.
    """
    stated = model_source(name).lr
    if stated is not None:
        return stated
    normalised = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in network.modules())
    return 0.1 if normalised else 0.01


def create_model(
    name: str, /, *, input_shape: tuple[int, int, int], num_classes: int, **options: Any
) -> nn.Module:
    """Build an initialised network and check that it classifies images of the given shape."""
    return build_model(name, input_shape, num_classes, options)


def build_model(
    name: str, input_shape: tuple[int, int, int], num_classes: int, options: Mapping[str, Any]
) -> nn.Module:
    """Build a network like `create_model`, but with options of any name, even `num_classes`."""
    source = model_source(name)
    parameters = inspect.signature(source.build).parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        allowed = [parameter.name for parameter in parameters][2:]
        for option in options:
            if option not in allowed:
                raise ConfigError(
                    f"model {name!r} has no option {option!r}; it has {', '.join(allowed) or 'none'}."
                    f"{did_you_mean(option, allowed)}"
                )
    for parameter in parameters:
        required = parameter.kind is parameter.KEYWORD_ONLY and parameter.default is parameter.empty
        if required and parameter.name not in options:
            raise ConfigError(f"model {name!r} needs model.{parameter.name}=...")
    model = source.build(input_shape, num_classes, **options)
    check_classifier(model, input_shape, num_classes, name=name)
    return model


log = logging.getLogger(__name__)

_DEPTH = 3
# Name parts that wrapper modules add: data parallelism and averages, torch.compile, FSDP, activation
# checkpointing.
_WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
# Words in the names under which trainers keep running averages, which they evaluate, ...
_AVERAGES = frozenset({"ema", "swa", "averaged", "average"})
# ... and the network itself.
_NETWORKS = frozenset({"self", "model", "net", "network", "state", "dict", "params", "weights", "module"})


@dataclass(frozen=True)
class StateDict:
    """Tensors of a file under a network's names, and how far they fit that network."""

    place: tuple[str, ...]
    prefix: str
    tensors: Mapping[str, Tensor]
    expected: Mapping[str, Tensor]
    others: tuple[str, ...] = ()
    counters: tuple[str, ...] = ()
    tied: Mapping[str, frozenset[str]] = field(default_factory=dict)

    @cached_property
    def missing(self) -> list[str]:
        """The network's names that the file lacks; old files lack `num_batches_tracked`."""
        return [
            name
            for name in self.expected
            if name not in self.tensors
            and not name.endswith("num_batches_tracked")
            and self.tied.get(name, frozenset()).isdisjoint(self.tensors)
        ]

    @cached_property
    def unexpected(self) -> list[str]:
        return [name for name in self.tensors if name not in self.expected]

    @cached_property
    def reshaped(self) -> list[str]:
        """Names whose tensors have another shape in the network."""
        return [
            name
            for name, tensor in self.tensors.items()
            if name in self.expected and tensor.shape != self.expected[name].shape
        ]

    @property
    def fits(self) -> bool:
        return not (self.missing or self.unexpected or self.reshaped)

    @property
    def distance(self) -> tuple[int, int, int]:
        """Sort key among candidates: distance from fitting, then how unusual the name is for a network."""
        words = {word for part in (*self.place, *self.prefix.split(".")) for word in part.split("_") if word}
        unusual = 0 if words & _AVERAGES else 1 if words <= _NETWORKS else 2
        return len(self.missing) + len(self.reshaped), len(self.unexpected), unusual

    def __str__(self) -> str:
        parts = [f"its {'.'.join(self.place)!r}"] if self.place else []
        parts += [f"the names that begin with {self.prefix!r}"] if self.prefix else []
        return ", ".join(parts) or "its own names"


def state_dicts(content: object, expected: Mapping[str, Tensor]) -> list[StateDict]:
    """Find the parts of a file's content that may be a network's state_dict, the best fit first."""
    tied = _tied(expected)
    states = [
        state
        for place, tensors in _dicts(content)
        for state in _by_prefix(place, _unwrapped(tensors, expected), expected, tied)
    ]
    return sorted(states, key=lambda state: state.distance)


def _dicts(
    content: object, place: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], dict[str, Tensor]]]:
    """Yield every dict that holds tensors by name; its other values are ignored."""
    if not isinstance(content, Mapping):
        return
    named = {key: value for key, value in content.items() if isinstance(key, str)}
    tensors = {key: value for key, value in named.items() if isinstance(value, Tensor)}
    if tensors:
        yield place, tensors
    if len(place) < _DEPTH:
        for key, value in named.items():
            yield from _dicts(value, (*place, key))


def _unwrapped(tensors: dict[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Strip wrappers' parts from the tensors' names, except where the network's own names have them."""
    added = _WRAPPERS.difference(*(name.split(".") for name in expected))
    plain = {
        ".".join(part for part in name.split(".") if part not in added): tensor
        for name, tensor in tensors.items()
    }
    return plain if len(plain) == len(tensors) else tensors


def _by_prefix(
    place: tuple[str, ...],
    tensors: dict[str, Tensor],
    expected: Mapping[str, Tensor],
    tied: Mapping[str, frozenset[str]],
) -> Iterator[StateDict]:
    prefixes: Counter[str] = Counter()
    for name in tensors:
        parts = name.split(".")
        for index in range(len(parts)):
            if ".".join(parts[index:]) in expected:
                prefixes[".".join([*parts[:index], ""])] += 1
    most = max(prefixes.values(), default=0)
    # A prefix of the whole network matches many names; one that matches a few layers by chance is dropped.
    likely = [prefix for prefix, count in prefixes.items() if 2 * count >= most] or [""]
    for prefix in likely:
        inside = {
            name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)
        }
        own = {
            name: tensor
            for name, tensor in inside.items()
            if name in expected or not _is_counter(name, tensor)
        }
        counters = tuple(
            name for name, tensor in tensors.items() if _is_counter(name, tensor) and name not in own
        )
        others = tuple(name for name in tensors if not name.startswith(prefix) and name not in counters)
        yield StateDict(place, prefix, own, expected, others, counters, tied)


def _is_counter(name: str, tensor: Tensor) -> bool:
    """Whether a tensor is a trainer's counter, such as AveragedModel's `n_averaged`."""
    return "." not in name and tensor.ndim == 0 and not tensor.is_floating_point()


def _tied(expected: Mapping[str, Tensor]) -> dict[str, frozenset[str]]:
    """Return the other names of each tied parameter; some writers save only one of them."""
    names: dict[tuple[int, tuple[int, ...], tuple[int, ...]], set[str]] = {}
    for name, tensor in expected.items():
        if tensor.numel() and not tensor.is_meta:
            names.setdefault((tensor.data_ptr(), tensor.shape, tensor.stride()), set()).add(name)
    return {name: frozenset(group - {name}) for group in names.values() if len(group) > 1 for name in group}


_NOTES = "rankrl"  # one metadata entry for all notes: safetensors writes several in any order
_PLAN = "rankrl.plan"  # the metadata entry of `decomposition.save_compressed`


def load_checkpoint(model: nn.Module, path: str | Path) -> None:
    """Load the weights of a network, all of them or none.

    Reads PyTorch files (.th, .pt, .pth, .ckpt, ...) with `weights_only=True`, and .safetensors: a state_dict,
    or a trainer's file with one in it, alone, under a key such as "state_dict", "model", "net" or "ema", or
    with a prefix such as `module.`, `model.` or `_orig_mod.`. Of several that fit, running averages come
    first, then those named like a network; the choice and the parts left out are logged.
    `num_batches_tracked` may be missing, as in old files, and so may all but one name of a tied parameter.
    Floating-point types are converted to the model's own.
    """
    path = Path(path)
    if not path.is_file():
        folder = "; it is a folder, give the file in it" if path.is_dir() else ""
        raise CheckpointError(f"there is no checkpoint file {path}{folder}")
    expected: dict[str, Tensor] = model.state_dict()
    taken = _fitting(_read(path), expected, path)
    _check_values(taken.tensors, expected, path)
    model.load_state_dict(dict(taken.tensors), strict=False)


def save_checkpoint(
    model: nn.Module,
    path: str | Path,
    *,
    heldout: str | None = None,
    preprocessing: Mapping[str, Any] | None = None,
) -> None:
    """Write the weights of a network as .safetensors, atomically."""
    tensors = {key: value.detach().cpu().contiguous().clone() for key, value in model.state_dict().items()}
    known = {"heldout": heldout, "preprocessing": preprocessing}
    notes = {name: value for name, value in known.items() if value is not None}
    metadata = {_NOTES: json.dumps(notes)} if notes else None
    write_atomically(path, safetensors.torch.save(tensors, metadata))


def checkpoint_heldout(path: str | Path) -> str | None:
    """Return the digest of the held-out images recorded by `save_checkpoint`, if any."""
    return _notes(path).get("heldout")


def checkpoint_preprocessing(path: str | Path) -> dict[str, Any] | None:
    """Return the preprocessing recorded by `save_checkpoint`, if any."""
    return _notes(path).get("preprocessing")


def _notes(path: str | Path) -> dict[str, Any]:
    """Return the notes that `save_checkpoint` wrote beside the tensors; empty for other files."""
    try:
        notes: dict[str, Any] = json.loads(_metadata(path).get(_NOTES, "{}"))
    except (SafetensorError, OSError, ValueError):
        return {}
    return notes


def _metadata(path: str | Path) -> dict[str, str]:
    with safe_open(path, framework="pt") as file:
        return file.metadata() or {}


def _read(path: Path) -> object:
    if path.suffix == ".safetensors":
        try:
            if _PLAN in _metadata(path):
                raise CheckpointError(
                    f"{path} holds a compressed network and its plan, not the dense network that is loaded "
                    f"here; give it as weights={path}, or in Python to load_compressed"
                )
            return safetensors.torch.load_file(path, device="cpu")
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} is damaged or no safetensors file: {error}") from error
    try:
        # timm and torchvision keep their options next to the weights; reading a Namespace runs no code.
        with torch.serialization.safe_globals([argparse.Namespace]):
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        match = re.search(r"GLOBAL (\S+)", str(error))
        if match is None:
            raise CheckpointError(f"{path} is damaged or no PyTorch checkpoint") from error
        raise CheckpointError(
            f"{path} holds more than tensors and plain values ({match[1].rstrip('.,')}); loading that could "
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


def _fitting(content: object, expected: Mapping[str, Tensor], path: Path) -> StateDict:
    """Return the part of a file's content that fills the network; log its name and the parts left out."""
    if not isinstance(content, Mapping):
        raise CheckpointError(
            f"{path} holds a {type(content).__name__}, not a state_dict (a dict of tensors)"
        )
    candidates = state_dicts(content, expected)
    if not candidates:
        held = ", ".join(repr(key) for key in list(content)[:5]) or "nothing"
        raise CheckpointError(
            f"{path} holds no state_dict: a dict of names and tensors, alone or under a key such as "
            f"'state_dict' or 'model'; it holds {held}"
        )
    taken = candidates[0]
    if not taken.fits:
        raise CheckpointError(_misfit(taken, path))
    fitting = [candidate for candidate in candidates if candidate.fits]
    if len(fitting) > 1:
        listed = " and ".join(map(str, fitting))
        if fitting[1].distance == taken.distance:
            raise CheckpointError(
                f"{path} holds several networks that fit: {listed}; save the state_dict of one of them alone"
            )
        log.warning(
            "%s holds several networks that fit, %s; taken: %s. For another, save its state_dict alone.",
            *(path, listed, taken),
        )
    elif taken.place or taken.prefix or taken.counters:
        without = f", without {_some(list(taken.counters))}" if taken.counters else ""
        log.info("%s: read %s%s", path, taken, without)
    else:
        log.info("weights: read %s", path)
    left = [
        name
        for name in taken.others
        if not any(name.startswith(candidate.prefix) for candidate in fitting if candidate.prefix)
    ]
    if left:
        log.warning("%s: left out what the model has no place for: %s", path, _some(left))
    return taken


def _misfit(state: StateDict, path: Path) -> str:
    """Describe why the nearest tensors do not fit."""
    if not state.missing and not state.unexpected:
        classes = _class_counts(state.tensors, state.expected, state.reshaped)
        if classes is not None:
            return (
                f"{path} is for {classes[0]} classes, but the model has {classes[1]}. "
                "Choose the dataset that the checkpoint was trained on, or a checkpoint for this one."
            )
    problems = []
    if state.missing:
        problems.append(f"the file lacks {_some(state.missing)}")
    if state.unexpected:
        problems.append(f"the model lacks {_some(state.unexpected)}")
    if state.reshaped:
        shapes = [
            f"{key} {tuple(state.tensors[key].shape)} for {tuple(state.expected[key].shape)}"
            for key in state.reshaped
        ]
        problems.append(f"shapes differ (file for model): {_some(shapes)}")
    read = f" (read: {state})" if state.place or state.prefix else ""
    return f"{path} is for another architecture{read}: {'; '.join(problems)}. Choose the matching model."


def _class_counts(
    tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor], reshaped: list[str]
) -> tuple[int, int] | None:
    """Return the numbers of classes of file and model if only the last layer's rows differ."""
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
