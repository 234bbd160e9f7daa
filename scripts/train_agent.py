"""Train DDPG on RankBench's tasks but those of one family, and judge its plans for these; family by family.

    OMP_NUM_THREADS=1 python scripts/train_agent.py --steps 20000 --output docs/leaderboard.md

The agent is stable-baselines3's own, by its own `learn`, on `rankrl/RankBench-v0`'s episodes: its reward is
what a plan scores more than greedy's, less the surrogate's uncertainty. It chooses one plan for each task
that is left out, without an evaluation. `--folder TABLES` then scores these plans on the networks themselves,
as `rankbench.py` does; a killed run goes on with what has no row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from bench_frame import ResultRows, command_line, markdown, publish, say
from gymnasium import spaces
from leaderboard_tasks import TASKS, opened, read_tasks
from stable_baselines3 import DDPG
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.noise import NormalActionNoise

from rankrl.bench import BenchTask, bench_task, bench_tasks
from rankrl.plan_search.envs import RankSelectionEnv
from rankrl.plan_search.space.problem import Choices

KEY = ("task", "agent", "seed")
VALUES = ("choices", "gain")
DESCRIBING = ("macs", "curve", "descriptors")
AGENTS: dict[str, tuple[tuple[str, ...], bool]] = {
    "whole": (DESCRIBING, True),
    "no summary": (DESCRIBING, False),
    "no losses": (("macs",), True),
}
"""Features of the observation, and whether it holds the network's mean and deviation of them."""
_ENVIRONMENTS = 4
_SCALE = 1.0  # log-importance of action 1
_NOISE, _PRICE = 0.3, 0.05
_POINTS = 0.03  # gains beyond are worth little more, or one task would be all that counts
_EQUAL = 0.1  # points; less is noise


class WithSummary(gymnasium.ObservationWrapper[np.ndarray, np.ndarray, np.ndarray]):
    """Add mean and deviation over the network's layers of what describes a layer."""

    def __init__(self, env: RankSelectionEnv) -> None:
        super().__init__(env)
        self._ranks = env
        size = int(env.observation_space.shape[0]) + 2 * env.encoder.static.shape[1]
        self.observation_space = spaces.Box(0.0, 1.0, (size,), dtype=np.float32)

    def observation(self, observation: np.ndarray) -> np.ndarray:
        """Append the summary."""
        static = self._ranks.encoder.static
        return np.concatenate([observation, static.mean(0), static.std(0)]).astype(np.float32)


@cache
def reward(task: BenchTask, plan: Choices) -> float:
    """Score a plan against greedy's; a surrogate's answer counts less the more its trees disagree."""
    return math.tanh((task.reward(plan) - task.uncertainty(plan)) / _POINTS)


def environment(
    tasks: list[BenchTask], agent: str, *, scored: bool = True
) -> gymnasium.Env[np.ndarray, np.ndarray]:
    """Make the environment whose episodes are of these tasks; plans may have no score."""
    features, summary = AGENTS[agent]
    env = RankSelectionEnv(
        [task.problem for task in tasks],
        [partial(reward, task) for task in tasks] if scored else None,
        features=(*features, "budget"),
        importance_scale=_SCALE,
    )
    return Anchored(WithSummary(env) if summary else env)


class Anchored(gymnasium.Wrapper[np.ndarray, np.ndarray, np.ndarray, np.ndarray]):
    """Charge for actions far from 0.

    The mean is taken off the actions, and noise at the ends of their range is cut: without a price a policy
    learns to stay there, where every plan is greedy's.
    """

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Take the action, and pay for it."""
        observation, reward, *others = self.env.step(action)
        return observation, float(reward) - _PRICE * float(np.square(action).mean()), *others


def trained(tasks: list[BenchTask], agent: str, steps: int, seed: int) -> DDPG:
    """Train an agent on these tasks."""
    env = make_vec_env(partial(environment, tasks, agent), n_envs=_ENVIRONMENTS, seed=seed)
    return DDPG(
        "MlpPolicy",
        env,
        gamma=1.0,
        n_steps=max(len(task.problem.sites) for task in tasks),
        learning_starts=steps // 5,
        learning_rate=2e-3,
        gradient_steps=_ENVIRONMENTS,
        action_noise=NormalActionNoise(np.zeros(1), np.full(1, _NOISE)),
        policy_kwargs={"net_arch": [64, 64]},
        seed=seed,
        device="cpu",
    ).learn(steps)


def plan_of(model: DDPG, task: BenchTask, agent: str) -> Choices:
    """Choose a plan for a task."""
    env = environment([task], agent, scored=False)
    observation, info = env.reset()
    while "choices" not in info:
        observation, _, _, _, info = env.step(model.predict(observation, deterministic=True)[0])
    choices: Choices = info["choices"]
    return choices


def fill(
    rows: ResultRows, names: list[str], steps: int, seeds: int, agents: Sequence[str] = tuple(AGENTS)
) -> None:
    """Train what has no rows, and add one for each task that is left out."""
    tasks = [bench_task(name) for name in names]
    wanted = [(agent, seed) for agent in agents for seed in range(seeds)]
    for agent, seed in wanted:
        for family in sorted({task.table.family for task in tasks}):
            left_out = [task for task in tasks if task.table.family == family]
            if rows.find({"task": left_out[-1].name, "agent": agent, "seed": seed}):
                continue
            others = [task for task in tasks if task not in left_out]
            model = trained([task for task in others if task.answers], agent, steps, seed)
            for task in left_out:
                plan = plan_of(model, task, agent)
                known = task.measured(plan) or task.answers
                gain = f"{task.judged(plan) - task.judged(task.greedy):.6f}" if known else ""
                key = {"task": task.name, "agent": agent, "seed": seed}
                rows.add(key, {"choices": " ".join(map(str, plan)), "gain": gain})
                say(f"{task.name}, {agent}, seed {seed}: {gain or 'the table does not know'}")


def measure(rows: ResultRows, plans: ResultRows, folder: Path, images: int) -> None:
    """Judge the agents' plans that no table holds on the networks themselves."""
    names = {row["task"] for row in plans.rows}
    for task in read_tasks(TASKS, "*", ("tasks", "bench")):
        if task.name not in names:
            continue
        known = bench_task(task.name)
        chosen = {row["choices"] for row in plans.rows if row["task"] == task.name}
        missing = [plan for plan in sorted(chosen) if _judged(known, plan, rows) is None]
        if missing:
            with opened(task, folder, images) as ready:
                for plan in missing:
                    judged, _ = ready.judge(_choices(plan))
                    rows.add({"task": task.name, "choices": plan}, {"judged": f"{judged:.6f}"})


def _choices(text: str) -> Choices:
    return tuple(map(int, text.split()))


def _judged(task: BenchTask, plan: str, rows: ResultRows) -> float | None:
    """Look up the measured score of a plan, in the table or the rows."""
    if task.measured(_choices(plan)):
        return task.judged(_choices(plan))
    row = rows.find({"task": task.name, "choices": plan})
    return None if row is None else float(row["judged"])


def summary(plans: ResultRows, real: ResultRows) -> str:
    """Show each agent's gain over greedy in points, predicted and measured."""
    lines = []
    for agent in AGENTS:
        own = [row for row in plans.rows if row["agent"] == agent]
        if not own:
            continue
        gains = 100 * np.array([float(row["gain"]) for row in own if row["gain"]])
        tasks = [bench_task(row["task"]) for row in own]
        found = [_judged(task, row["choices"], real) for task, row in zip(tasks, own, strict=True)]
        pairs = [(task, judged) for task, judged in zip(tasks, found, strict=True) if judged is not None]
        measured = 100 * np.array([judged - task.judged(task.greedy) for task, judged in pairs])
        same = sum(_choices(row["choices"]) == task.greedy for task, row in zip(tasks, own, strict=True))
        lines.append([agent, len(own), same, *_shown(gains), len(measured), *_shown(measured)])
    head = ["agent", "plans", "greedy's own", "gain", "better / worse", "measured", "gain", "better / worse"]
    return markdown(head, lines)


def _shown(gains: np.ndarray) -> tuple[str, str]:
    mean = f"{gains.mean():+.2f}" if len(gains) else ""
    return mean, f"{(gains > _EQUAL).sum()} / {(gains < -_EQUAL).sum()}"


def main() -> None:
    """Train, judge, and print the table."""
    parser = command_line(__doc__)
    parser.add_argument("--rows", type=Path, required=True, help="folder of the rows")
    parser.add_argument("--steps", type=int, default=20000, help="of the environment, an agent")
    parser.add_argument("--agents", nargs="+", choices=AGENTS, default=tuple(AGENTS))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="networks of rankbench.py; measure plans on them")
    parser.add_argument("--images", type=int, default=1000, help="held-out images, or inputs, of a search")
    options = parser.parse_args()
    plans = ResultRows(options.rows / "train_agent.csv", KEY, VALUES)
    real = ResultRows(options.rows / "train_agent_real.csv", ("task", "choices"), ("judged",))
    fill(plans, bench_tasks(), options.steps, options.seeds, options.agents)
    if options.folder:
        measure(real, plans, options.folder, options.images)
    short = {options.rows: "ROWS", options.folder: "TABLES"}
    publish(summary(plans, real), options.output, section="agent", title="An agent", shortened=short)


if __name__ == "__main__":
    main()
