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
    """Which candidates there are and how they are fitted.

    Attributes:
        formats: Names of the tensor formats that every layer chooses from.
        precisions: Names of what every layer may compute with or be stored in (`PRECISIONS`); `int7` takes
            the place of `int8` where weights are to have 7 of 8 bits.
        reduce_range: Whether they are, as in `quantise_onnx`.
        multiple: Ranks are multiples of it.
    """

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
        """Return which candidates there are under a budget.

        Args:
            options: How layers are factorised.
            budget: What plans keep to, which says what precisions lower.
            multiple: What ranks are multiples of where the options say nothing.
            reduce_range: As in `quantise_onnx`.
        """
        return cls(
            differing_formats(options.choices, budget),
            default_precisions(budget) if options.precisions is None else options.precisions,
            reduce_range,
            options.rank_multiple or multiple or 1,
            **{each.name: getattr(options, each.name) for each in fields(FittingOptions)},
        )
