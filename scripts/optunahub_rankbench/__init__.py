"""RankBench for OptunaHub's registry (`benchmarks/rankbench`): choose ranks for a network's layers."""

from __future__ import annotations

from typing import Any

import optuna
import optunahub

from rankrl.bench import bench_task, bench_tasks


class Problem(optunahub.benchmarks.BaseProblem):
    """Maximise the score of a compressed network over the importances of its layers.

    Every plan spends the task's budget: what counts is how layers share it. At 0 it is greedy's plan.

    Args:
        task: One of `Problem.available_tasks()`.
    """

    def __init__(self, task: str = "separable tucker params 0.35") -> None:
        self.task = bench_task(task)

    @staticmethod
    def available_tasks() -> list[str]:
        """List the names of all tasks."""
        return bench_tasks()

    @property
    def search_space(self) -> dict[str, optuna.distributions.BaseDistribution]:
        """An importance for each layer."""
        return {name: optuna.distributions.FloatDistribution(-1.0, 1.0) for name in self.task.problem.names}

    @property
    def directions(self) -> list[optuna.study.StudyDirection]:
        """Scores are maximised."""
        return [optuna.study.StudyDirection.MAXIMIZE]

    def evaluate(self, params: dict[str, Any]) -> float:
        """Score the plan of these importances on the inputs that searches see."""
        return self.task.objective(optuna.trial.FixedTrial(params))

    def regret(self, params: dict[str, Any]) -> float:
        """Tell how much more the best known plan scores on other inputs."""
        return self.task.regret(self.task.suggested(optuna.trial.FixedTrial(params)))
