"""Register the environment with Gymnasium and the operations with `decomposition`, on import."""

from __future__ import annotations

import gymnasium
from gymnasium.envs.registration import EnvSpec

from decomposition.registry import announce
from rankrl.errors import ConfigError

ENVIRONMENT_ID = "rankrl/RankSelection-v0"
BENCH_ID = "rankrl/RankBench-v0"


class RankSelectionSpec(EnvSpec):
    """Gymnasium's spec of the environment; refuses to write a network as JSON."""

    def to_json(self) -> str:
        if "problem" in self.kwargs:
            raise ConfigError(
                f"the spec of {self.id} holds problem=, a network and its fits, which JSON cannot; keep what "
                f'the problem was made from, take gymnasium.spec("{self.id}").to_json(), and give '
                "gymnasium.make the problem again"
            )
        return super().to_json()


def register() -> None:
    """Register the environments with Gymnasium, and announce the operations to `decomposition`."""
    announce("operation", "rankrl.operations")
    if ENVIRONMENT_ID not in gymnasium.registry:
        gymnasium.registry[ENVIRONMENT_ID] = RankSelectionSpec(
            ENVIRONMENT_ID, entry_point="rankrl.plan_search.envs.rank_selection:RankSelectionEnv"
        )
    if BENCH_ID not in gymnasium.registry:
        gymnasium.register(BENCH_ID, entry_point="rankrl.bench.task:BenchEnv")
