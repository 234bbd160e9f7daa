"""Which candidates the layers of a network get."""

from __future__ import annotations

from dataclasses import dataclass, fields

from rankrl.onnx.export.weight_range import runnable
from rankrl.options.budget import BudgetOptions
from rankrl.options.decomposition import (
    DecompositionOptions,
    FittingOptions,
    default_precisions,
    differing_formats,
)


@dataclass(frozen=True)
class CandidateOptions(FittingOptions):
    """Which candidates there are and how they are fitted."""

    formats: tuple[str, ...]
    precisions: tuple[str, ...] = ("float32",)
    reduce_range: bool | None = None
    multiple: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        # Fits, scores and fine-tuning round as the finished file does, so nothing sees what was asked for.
        object.__setattr__(self, "precisions", runnable(self.precisions, self.reduce_range))

    @classmethod
    def of(
        cls,
        options: DecompositionOptions,
        budget: BudgetOptions,
        *,
        multiple: int | None = None,
        reduce_range: bool | None = None,
    ) -> CandidateOptions:
        """Return which candidates there are under a budget."""
        return cls(
            differing_formats(options.choices, budget),
            default_precisions(budget) if options.precisions is None else options.precisions,
            reduce_range,
            options.rank_multiple or multiple or 1,
            **{each.name: getattr(options, each.name) for each in fields(FittingOptions)},
        )
