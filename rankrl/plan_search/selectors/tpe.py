"""Select plans by tree-structured Parzen estimators (Bergstra et al., NeurIPS 2011) with Optuna."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from decomposition.files import announce_write
from rankrl.errors import StorageError
from rankrl.options.selectors import StepOptions
from rankrl.plan_search.envs.actions import ImportanceMap, check_action
from rankrl.plan_search.selectors.selector import Proposal, Selector, import_package, register_selector
from rankrl.plan_search.space.problem import SearchProblem, SearchSetting

STUDY_NAME = "rankrl"
STUDY_FILE = "tpe.sqlite3"


@register_selector
class TPESelector(Selector):
    """Optuna's TPE sampler (extra `tpe`) over the agent's own actions, with greedy's plan as its first trial.

    Every trial draws with a seed derived from the search's seed and the trial's number. The study on disk is
    a copy for Optuna's dashboards, made anew when a search is resumed.
    """

    name = "tpe"
    description = "tree-structured Parzen estimators (Optuna) over the agent's actions"
    own_options: ClassVar[type[StepOptions]] = StepOptions

    def __init__(self, problem: SearchProblem, *, seed: int, episodes: int, **options: Any) -> None:
        super().__init__(problem, seed=seed, episodes=episodes)
        self._optuna = import_package("optuna", self.name, "Optuna")
        self._optuna.logging.set_verbosity(self._optuna.logging.WARNING)
        self.plans_per_step = self.own_options(**options).plans_per_step
        self._map = ImportanceMap(problem)
        self.action_kind = self._map.action
        self._ranges = {f"importance_{name}": (-1.0, 1.0) for name in problem.names}
        self._folder: Path | None = None
        self._study = self._optuna.create_study(direction="maximize")
        self._mirror: Any = None

    @classmethod
    def check_setting(cls, options: Mapping[str, Any], setting: SearchSetting) -> None:
        import_package("optuna", cls.name, "Optuna")
        check_action("importance", setting=setting)

    def use_folder(self, folder: Path) -> None:
        """Keep a copy of the study in the folder, an SQLite file for Optuna's own tools."""
        self._folder = folder

    def propose(self) -> list[Proposal]:
        proposals = []
        for number in range(self.observed, self.observed + (self.plans_per_step if self.observed else 1)):
            actions = np.zeros(len(self._ranges))
            if number:
                self._study.sampler = self._sampler(number)
                trial = self._study.ask()
                actions = np.array([trial.suggest_float(name, *ends) for name, ends in self._ranges.items()])
                # The sampler ignores it so; `observe` adds the scored one, of this process or another.
                self._study.tell(trial, state=self._optuna.trial.TrialState.FAIL)
            choices = self._map.choices_of(actions)
            proposals.append(Proposal(choices, self.name if number else "preset", tuple(actions.tolist())))
        return proposals

    def observe(self, proposals: Sequence[Proposal], rewards: Sequence[float]) -> None:
        super().observe(proposals, rewards)
        if self._mirror is None and self._folder is not None:
            self._mirror = self._make_mirror(self._folder / STUDY_FILE)
        for proposal, reward in zip(proposals, rewards, strict=True):
            trial = self._finished(proposal.actions, reward)
            self._study.add_trial(trial)
            if self._mirror is not None:
                self._mirror.add_trial(trial)

    def _sampler(self, number: int) -> Any:
        seed = int(np.random.SeedSequence([self.seed, number]).generate_state(1)[0])
        return self._optuna.samplers.TPESampler(seed=seed, n_startup_trials=10, multivariate=False)

    def _make_mirror(self, path: Path) -> Any:
        """Make the study on disk, with the trials finished so far; replace an existing one."""
        announce_write(path)
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise StorageError(
                f"cannot replace {path}: {error.strerror or error}; check that the folder is writable"
            ) from error
        study = self._optuna.create_study(
            study_name=STUDY_NAME, storage=f"sqlite:///{path}", direction="maximize"
        )
        complete = (self._optuna.trial.TrialState.COMPLETE,)
        study.add_trials(self._study.get_trials(deepcopy=False, states=complete))
        return study

    def _finished(self, actions: Sequence[float], reward: float) -> Any:
        uniform = self._optuna.distributions.FloatDistribution
        return self._optuna.trial.create_trial(
            params=dict(zip(self._ranges, actions, strict=True)),
            distributions={name: uniform(*ends) for name, ends in self._ranges.items()},
            value=reward,
        )
