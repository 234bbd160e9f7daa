"""Budgets: the fractions of the original's cost that a plan keeps at most."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from rankrl.argument_types import check_fields
from rankrl.errors import ConfigError


@dataclass(frozen=True)
class BudgetOptions:
    """The fraction of the dense network's cost that every plan keeps at most; set one, or two at once.

    With none, rewards that ignore size keep 0.4 of the parameters, the others have no limit.

    Attributes:
        params: Fraction of the parameters to keep at most, or None.
        macs: Fraction of the multiply-accumulates to keep at most, or None.
        bytes: Fraction of the bytes of the parameters in a file to keep at most, or None.
        latency: Fraction of the dense network's time in onnxruntime on this machine to keep at most, or None.
    """

    params: float | None = None
    macs: float | None = None
    bytes: float | None = None
    latency: float | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        check_budgets({each.name: getattr(self, each.name) for each in fields(self)})

    @property
    def fractions(self) -> dict[str, float]:
        """The fractions that are set, by measure."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def counted(self) -> dict[str, float | None]:
        """The fractions of what is counted, not timed, by measure."""
        return {"params": self.params, "macs": self.macs, "bytes": self.bytes}


def check_budgets(fractions: Mapping[str, float | None]) -> None:
    """Refuse fractions that are none, and more than two budgets.

    Args:
        fractions: Fractions to keep by what is counted; None sets no budget.

    Raises:
        ConfigError: One is outside (0, 1], or more than two are set.
    """
    for name, value in fractions.items():
        if value is not None and not 0 < value <= 1:
            raise ConfigError(
                f"budget.{name}={value} is outside (0, 1]; it is the fraction to keep, for example 0.4"
            )
    check_number_of_budgets(fractions)


def check_number_of_budgets(fractions: Mapping[str, float | None]) -> None:
    """Refuse more than two budgets.

    Raises:
        ConfigError: More than two are set.
    """
    asked = [f"budget.{name}={value}" for name, value in fractions.items() if value is not None]
    if len(asked) > 2:
        raise ConfigError(
            f"{', '.join(asked[:-1])} and {asked[-1]} are all set; a search keeps at most two budgets: set "
            "the others to null"
        )
