"""Budgets: the fractions of the original's cost that a plan keeps at most, or what it may lose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rankrl.argument_types import check_fields
from rankrl.errors import ConfigError

MEASURES = ("params", "macs", "bytes", "latency")
"""What budgets count, time last."""


@dataclass(frozen=True)
class BudgetOptions:
    """What plans keep to: a fraction of the dense network's cost, or two at once; or a bounded loss.

    With none, rewards that ignore size keep 0.4 of the parameters, the others have no limit.

    Attributes:
        drop: How much of the original's score may be lost, in [0, 1): of the accuracy where there are labels,
            of the agreement with the original where there are none, or of your own score. The result is then
            the fastest or smallest network found within it, and no fraction is given.
        minimise: What to minimise within `drop`: latency, bytes, macs or params.
        params: Fraction of the parameters to keep at most, or None.
        macs: Fraction of the multiply-accumulates to keep at most, or None.
        bytes: Fraction of the bytes of the parameters in a file to keep at most, or None.
        latency: Fraction of the dense network's time in onnxruntime on this machine to keep at most, or None.
    """

    drop: float | None = None
    minimise: str = "latency"
    params: float | None = None
    macs: float | None = None
    bytes: float | None = None
    latency: float | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        check_budgets(self._all)
        if self.minimise not in MEASURES:
            raise ConfigError(f"budget.minimise={self.minimise!r} is none of {', '.join(MEASURES)}")
        if self.drop is None:
            return
        if not 0 <= self.drop < 1:
            raise ConfigError(
                f"budget.drop={self.drop} is outside [0, 1); it is the loss of score that you accept, for "
                "example 0.005 for half a point of accuracy"
            )
        fixed = [name for name, value in self._all.items() if value not in (None, 1.0)]
        if fixed:
            raise ConfigError(
                f"budget.drop={self.drop} looks for the best fraction itself; leave budget.{fixed[0]} or "
                "budget.drop out"
            )
        object.__setattr__(self, self.minimise, 1.0)  # any fraction may be kept to begin with

    @property
    def _all(self) -> dict[str, float | None]:
        return {name: getattr(self, name) for name in MEASURES}

    @property
    def fractions(self) -> dict[str, float]:
        """The fractions that are set, by measure."""
        return {name: value for name, value in self._all.items() if value is not None}

    @property
    def numbers(self) -> dict[str, float | str]:
        """What was asked for, as metrics.json says it: `{"params": 0.5}`."""
        if self.drop is not None:
            return {"drop": self.drop, "minimise": self.minimise}
        return dict(self.fractions)

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
