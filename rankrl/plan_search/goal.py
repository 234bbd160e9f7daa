"""The goal of a search: budget, limits, reward, and how time is measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from decomposition.operations.quantise import computes_in_integers
from rankrl.networks.candidates import CandidateOptions
from rankrl.options.budget import BudgetOptions
from rankrl.options.search import SearchOptions
from rankrl.options.timing import LatencyOptions
from rankrl.plan_search.scores.rewards import check_reward, reward_source
from rankrl.plan_search.space.setting import SearchSetting

DEFAULT_KEPT_PARAMS = 0.4


@dataclass(frozen=True)
class SearchGoal:
    """The common goal of all searches of a session."""

    budget: BudgetOptions = field(default_factory=BudgetOptions)
    search: SearchOptions = field(default_factory=SearchOptions)
    timing: LatencyOptions = field(default_factory=LatencyOptions)
    reward: str = "accuracy"
    reward_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_reward(self.reward, self.reward_options)

    @property
    def needs_budget(self) -> bool:
        """Whether there is no budget although the reward ignores size."""
        return not self.budget.fractions and reward_source(self.reward).needs_budget

    def setting(self, candidates: CandidateOptions) -> SearchSetting:
        """Return the part of the search that its options decide."""
        return SearchSetting(
            ("params",) if self.needs_budget else tuple(self.budget.fractions),
            bool(candidates.channels) or candidates.blocks,
            self.budget.latency is not None and computes_in_integers(candidates.precisions),
            self.search.workers is not None,
        )

    @property
    def counted(self) -> dict[str, float | None]:
        """Fractions of counted costs to keep; a reward that ignores size gets a default budget."""
        return {**self.budget.counted, **({"params": DEFAULT_KEPT_PARAMS} if self.needs_budget else {})}
