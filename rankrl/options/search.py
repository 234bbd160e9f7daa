"""What a search chooses from, and what it keeps to: its options as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from decomposition import FitOptions
from decomposition.operations.quantise import computes_in_integers
from rankrl.errors import ConfigError
from rankrl.onnx.export.int8 import runnable
from rankrl.options.timing import LatencyOptions
from rankrl.plan_search.run import check_limits
from rankrl.plan_search.scores.rewards import check_reward, reward_source
from rankrl.plan_search.space.problem import check_budgets
from rankrl.plan_search.space.setting import SearchSetting
from rankrl.workers.base import Cluster, check_workers

DEFAULT_KEPT_PARAMS = 0.4


@dataclass(frozen=True)
class CandidateOptions:
    """Which candidates there are and how they are fitted.

    Attributes:
        formats: Names of the tensor formats that every layer chooses from.
        precisions: Names of what every layer may compute with or be stored in (`PRECISIONS`); `int7` takes
            the place of `int8` where weights are to have 7 of 8 bits.
        reduce_range: Whether they are, as in `quantise_onnx`.
        tensorised: Whether channel counts are split into small factors (64 = 4x4x4), for very high
            compression; tensor ring and tensor train alone.
        candidates: Candidate ranks a layer and format at most.
        multiple: They are multiples of it.
        iterations: L-BFGS iterations of each fit.
        weigh_outputs: Whether channels and layers count by what the network's output makes of them (one
            backward pass, no labels).
        channels: Fractions of the channels between two layers that may be kept; empty keeps all.
        blocks: Whether whole residual blocks may be removed.
        skip: Layers that stay as they are: names of layers or of modules that hold some, or patterns of such
            names, for example [fc, layer1, "*.downsample.*"].
        only: Layers that alone may change, named likewise; empty for all.
    """

    formats: tuple[str, ...]
    precisions: tuple[str, ...] = ("float32",)
    reduce_range: bool | None = None
    tensorised: bool = False
    candidates: int = 16
    multiple: int = 1
    iterations: int = FitOptions.iterations
    weigh_outputs: bool = True
    channels: tuple[float, ...] = ()
    blocks: bool = False
    skip: tuple[str, ...] = ()
    only: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.candidates < 1:
            raise ConfigError(f"decomposition.candidates must be at least 1, got {self.candidates}")
        # Fits, scores and fine-tuning round as the finished file does, so nothing sees what was asked for.
        object.__setattr__(self, "precisions", runnable(self.precisions, self.reduce_range))


@dataclass(frozen=True)
class SearchOptions:
    """What all searches of a session keep to.

    Attributes:
        params: Fraction of the parameters to keep at most, or None.
        macs: Fraction of the multiply-accumulates to keep at most, or None.
        bytes: Fraction of the bytes of the parameters in a file to keep at most, or None.
        latency: Fraction of the dense network's time in onnxruntime on this machine to keep at most, or None.
        timing: How that time is measured.
        reward: Name of the reward.
        reward_options: Its options.
        finalists: How many of the best plans are applied, refit and all, and scored again, beside the first
            plan; the best of them is chosen. 1 takes the plan with the best reward. With `latency` they are
            the best plans that keep the time when they are exported and timed.
        episodes: Plans to score.
        seconds: Stop after so many seconds, or None.
        patience: Stop after so many episodes without a better plan, or None.
        workers: Processes that fit layers and score plans; None works in this one. They share out the layers,
            then the plans of a step (selector.plans_per_step) or the images of a plan.
        cluster: Where they are: `local`, or `ray` (extra `ray`) for a Ray cluster.
        worker_cpus: Processor cores of each worker: the threads that it computes with.
        worker_gpus: GPUs of each worker on a Ray cluster, on which it scores plans; 0.5 lets two share one.
    """

    params: float | None = None
    macs: float | None = None
    bytes: float | None = None
    latency: float | None = None
    timing: LatencyOptions = field(default_factory=LatencyOptions)
    reward: str = "accuracy"
    reward_options: Mapping[str, Any] = field(default_factory=dict)
    finalists: int = 1
    episodes: int = 100
    seconds: float | None = None
    patience: int | None = None
    workers: int | None = None
    cluster: Cluster = "local"
    worker_cpus: int = 1
    worker_gpus: float = 0.0

    def __post_init__(self) -> None:
        check_workers(self.workers, self.cluster, self.worker_cpus, self.worker_gpus)
        check_limits(self.episodes, self.seconds, self.patience)
        check_budgets({name: getattr(self, name) for name in ("params", "macs", "bytes", "latency")})
        if self.finalists < 1:
            raise ConfigError(f"search.finalists must be at least 1, got {self.finalists}")
        check_reward(self.reward, self.reward_options)

    @property
    def needs_budget(self) -> bool:
        """Whether there is no budget although the reward ignores size."""
        given = (self.params, self.macs, self.bytes, self.latency)
        return all(fraction is None for fraction in given) and reward_source(self.reward).needs_budget

    def setting(self, candidates: CandidateOptions) -> SearchSetting:
        """Return what is known of the search before there is a problem."""
        given = ("params", "macs", "bytes", "latency")
        measures = tuple(name for name in given if getattr(self, name) is not None)
        measures = ("params",) if self.needs_budget else measures
        return SearchSetting(
            measures,
            bool(candidates.channels) or candidates.blocks,
            self.latency is not None and computes_in_integers(candidates.precisions),
            self.workers is not None,
        )

    @property
    def further(self) -> dict[str, float | None]:
        """The fractions to keep beside a budget in time, by measure."""
        return {"params": self.params, "macs": self.macs, "bytes": self.bytes}

    @property
    def kept_params(self) -> float | None:
        """The parameter budget; a reward that ignores size needs one."""
        return DEFAULT_KEPT_PARAMS if self.needs_budget else self.params
