"""Finding the network's tensors in a trainer's file: the dict that holds them and the prefix of their names.

Trainers keep a network's tensors in a dict of their own among optimizers, epochs and metrics, name them after
the wrapper or module that holds the network, and often keep a running average of them too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor

_DEPTH = 3
# What modules add to the names of what they wrap: data parallelism and averages, torch.compile, FSDP,
# activation checkpointing.
_WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
# Words of the names under which trainers keep running averages, which are what they evaluate, ...
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
        """The file's names that the network lacks."""
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
        """Whether it fills the network."""
        return not (self.missing or self.unexpected or self.reshaped)

    @property
    def distance(self) -> tuple[int, int, int]:
        """Rank among candidates: how far it is from fitting, then how unusual its name is for a network."""
        words = {word for part in (*self.place, *self.prefix.split(".")) for word in part.split("_") if word}
        unusual = 0 if words & _AVERAGES else 1 if words <= _NETWORKS else 2
        return len(self.missing) + len(self.reshaped), len(self.unexpected), unusual

    def __str__(self) -> str:
        parts = [f"its {'.'.join(self.place)!r}"] if self.place else []
        parts += [f"the names that begin with {self.prefix!r}"] if self.prefix else []
        return ", ".join(parts) or "its own names"


def state_dicts(content: object, expected: Mapping[str, Tensor]) -> list[StateDict]:
    """Return the parts of a file's content that may be a network's tensors, the best fit first."""
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
    """Yield every dict that holds tensors by name; other values in it are the trainer's notes."""
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
    """Return tensors without the wrappers' parts of their names, which a layer within may have, too."""
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
    # Names of one layer deep inside are found behind many prefixes; a network's are behind few.
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
    """Tell whether a tensor counts something for the trainer, as AveragedModel's `n_averaged` does."""
    return "." not in name and tensor.ndim == 0 and not tensor.is_floating_point()


def _tied(expected: Mapping[str, Tensor]) -> dict[str, frozenset[str]]:
    """Return the other names of each parameter that has several; some writers keep only one of them."""
    names: dict[tuple[int, tuple[int, ...], tuple[int, ...]], set[str]] = {}
    for name, tensor in expected.items():
        if tensor.numel() and not tensor.is_meta:
            names.setdefault((tensor.data_ptr(), tensor.shape, tensor.stride()), set()).add(name)
    return {name: frozenset(group - {name}) for group in names.values() if len(group) > 1 for name in group}
