"""Train DDPG on RankBench's tasks but those of one family, and judge its plans for these; family by family.

    OMP_NUM_THREADS=1 python scripts/train_agent.py --steps 20000 --output docs/rankbench.md

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
_SCALE = 0.7  # log-importance of action 1
_POINTS = 0.03  # gains beyond are worth little more, or one task would be all that counts
_EQUAL = 0.1  # points; less is noise


class WithSummary(gymnasium.ObservationWrapper[np.ndarray, np.ndarray, np.ndarray]):
    """Add mean and deviation over the network's layers of what describes a layer."""

    def __init__(self, env: RankSelectionEnv) -> None:
        super().__init__(env)
        self._ranks = env
        size = int(env.observation_space.shape[0]) + 2 * env.encoder.static.shape[1]  # type: ignore[index]
        self.observation_space = spaces.Box(0.0, 1.0, (size,), dtype=np.float32)

    def observation(self, observation: np.ndarray) -> np.ndarray:
        """Append the summary."""
        static = self._ranks.encoder.static
        return np.concatenate([observation, static.mean(0), static.std(0)]).astype(np.float32)


@cache
def reward(task: BenchTask, plan: Choices) -> float:
    """Score a plan against greedy's; a surrogate's answer counts less the more its trees disagree."""
    return math.tanh((task.reward(plan) - task.uncertainty(plan)) / _POINTS)


def environment(tasks: list[BenchTask], agent: str) -> gymnasium.Env[np.ndarray, np.ndarray]:
    """Make the environment whose episodes are of these tasks."""
    features, summary = AGENTS[agent]
    env = RankSelectionEnv(
        [task.problem for task in tasks],
        [partial(reward, task) for task in tasks],
        features=(*features, "budget"),  # type: ignore[arg-type]
        importance_scale=_SCALE,
    )
    return WithSummary(env) if summary else env


def trained(tasks: list[BenchTask], agent: str, steps: int, seed: int) -> DDPG:
    """Train an agent on these tasks."""
    env = make_vec_env(partial(environment, tasks, agent), n_envs=_ENVIRONMENTS, seed=seed)
    return DDPG(
        "MlpPolicy",
        env,
        gamma=1.0,
        n_steps=max(len(task.problem.sites) for task in tasks),
        learning_starts=steps // 5,
        batch_size=128,
        train_freq=1,
        action_noise=NormalActionNoise(np.zeros(1), np.full(1, 0.3)),
        policy_kwargs={"net_arch": [64, 64]},
        seed=seed,
        device="cpu",
    ).learn(steps)


def plan_of(model: DDPG, task: BenchTask, agent: str) -> Choices:
    """Choose a plan for a task."""
    env = environment([task], agent)
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
    """Judge greedy's and the agents' plans on the networks themselves."""
    names = {row["task"] for row in plans.rows}
    for task in read_tasks(TASKS, "*", ("tasks", "bench")):
        if task.name not in names:
            continue
        chosen = {row["choices"] for row in plans.rows if row["task"] == task.name}
        chosen.add(" ".join(map(str, bench_task(task.name).greedy)))
        missing = [plan for plan in sorted(chosen) if not rows.find({"task": task.name, "choices": plan})]
        if missing:
            with opened(task, folder, images) as ready:
                for plan in missing:
                    judged, _ = ready.judge(tuple(map(int, plan.split())))
                    rows.add({"task": task.name, "choices": plan}, {"judged": f"{judged:.6f}"})


def summary(plans: ResultRows, real: ResultRows) -> str:
    """Show the gain over greedy in points, predicted and measured, of each family left out and of all."""
    lines = []
    found = {(row["task"], row["choices"]): float(row["judged"]) for row in real.rows}
    for agent in AGENTS:
        own = [row for row in plans.rows if row["agent"] == agent]
        gains = np.array([100 * float(row["gain"]) for row in own if row["gain"]])
        measured = [_real_gain(row, found) for row in own]
        known = 100 * np.array([gain for gain in measured if gain is not None])
        shown = [f"{known.mean():+.2f}", _won(known)] if len(known) else ["", ""]
        if not own:
            continue
        lines.append([agent, str(len(own)), f"{gains.mean():+.2f}", _won(gains), *shown])
    return markdown(["agent", "plans", "gain", "better / worse", "gain, measured", "better / worse"], lines)


def _won(gains: np.ndarray) -> str:
    return f"{(gains > _EQUAL).sum()} / {(gains < -_EQUAL).sum()}"


def _real_gain(row: dict[str, str], found: dict[tuple[str, str], float]) -> float | None:
    greedy = " ".join(map(str, bench_task(row["task"]).greedy))
    pair = [found.get((row["task"], choices)) for choices in (row["choices"], greedy)]
    return None if None in pair else pair[0] - pair[1]  # type: ignore[operator]


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
