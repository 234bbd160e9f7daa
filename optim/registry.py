"""Register optimizers by name, so that configurations and tests draw on one list."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.optim.optimizer import ParamsT

Factory = TypeVar("Factory", bound="Callable[..., Optimizer]")


@dataclass(frozen=True)
class OptimizerRecord:
    """Name, description and factory of a registered optimizer.

    Attributes:
        name: The name it is chosen by.
        description: One line for lists.
        factory: A class or function of the parameters and keyword options.
    """

    name: str
    description: str
    factory: Callable[..., Optimizer]

    @property
    def options(self) -> dict[str, Any]:
        """The options it takes, with their defaults."""
        parameters = list(inspect.signature(self.factory).parameters.values())[1:]
        return {parameter.name: parameter.default for parameter in parameters}


_records: dict[str, OptimizerRecord] = {}


def register_optimizer(name: str, description: str) -> Callable[[Factory], Factory]:
    """Return a decorator that registers an optimizer class, or a function that makes an optimizer.

    Args:
        name: The name it is chosen by.
        description: One line for lists.

    Returns:
        A decorator that leaves the class or function as it is. Its first parameter takes the model's
        parameters, all others are options with defaults.

    Raises:
        ValueError: If the name is taken.
    """
    _refuse_taken(name)

    def register(factory: Factory) -> Factory:
        if not str(factory.__module__).startswith(f"{__package__}."):
            _register_ours()  # so that their names count as taken
        _refuse_taken(name)
        _records[name] = OptimizerRecord(name, description, factory)
        return factory

    return register


def list_optimizers(pattern: str = "*") -> list[str]:
    """Return the sorted names of the registered optimizers.

    Args:
        pattern: A shell-style pattern such as `"onnx_*"`.
    """
    _register_ours()
    return sorted(name for name in _records if fnmatchcase(name, pattern))


def registered_optimizers() -> list[str]:
    """Return the names of the optimizers that are registered by now, sorted; nothing is imported."""
    return sorted(_records)


def optimizer_record(name: str) -> OptimizerRecord:
    """Return the record of a registered optimizer.

    Args:
        name: One of `list_optimizers()`.

    Raises:
        ValueError: If there is none of this name.
    """
    _register_ours()
    if name not in _records:
        raise ValueError(f"no optimizer is named {name!r}: choose one of {', '.join(list_optimizers())}")
    return _records[name]


def create_optimizer(name: str, params: ParamsT, **options: Any) -> Optimizer:
    """Make an optimizer by name.

    Args:
        name: One of `list_optimizers()`.
        params: Parameters, named parameters or param groups.
        **options: Options of that optimizer, see `optimizer_record(name).options`.

    Raises:
        ValueError: If there is none of this name, or an option is outside its range.
        TypeError: If it has no such option, or an option or parameter is of a wrong type.
    """
    record = optimizer_record(name)
    unknown = [option for option in options if option not in record.options]
    if unknown:
        raise TypeError(
            f"optimizer {name!r} has no option {', '.join(unknown)}: "
            f"its options are {', '.join(record.options)}"
        )
    return record.factory(params, **options)


def _refuse_taken(name: str) -> None:
    if name in _records:
        raise ValueError(f"an optimizer named {name!r} is registered already ({_records[name].description})")


def _register_ours() -> None:
    importlib.import_module("optim.optimizers")
