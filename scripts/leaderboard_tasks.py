"""Read and open the tasks of `leaderboard.yaml`: networks, searches of their plans, and judges of those."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import torch
import yaml
from made_inputs import MissingFileError
from real_files import find_file

from decomposition.operations import PRECISIONS
from rankrl import DecompositionOptions, SearchOptions
from rankrl.data import ImageData, load_dataset
from rankrl.data.sample import CALIBRATION_BATCH, calibration_images
from rankrl.file_compression import FileSearch, FileSource
from rankrl.models import create_model, load_checkpoint, save_checkpoint
from rankrl.module_compression import image_classifier
from rankrl.networks.graph import GraphNetwork
from rankrl.options.search import BudgetOptions
from rankrl.options.timing import LatencyOptions
from rankrl.plan_search.scores.evaluators import EvaluatorOptions
from rankrl.plan_search.scores.scoring import ImageScoring
from rankrl.plan_search.session import SearchGoal, SearchSession
from rankrl.plan_search.space.problem import Choices, SearchProblem
from rankrl.request import Request, opened_session
from rankrl.runs.run_folder import cache_folder
from rankrl.training import TrainingRecipe, accuracy, train
from rankrl.training.networks import DISTILLATION, heldout_accuracy

TASKS = Path(__file__).with_name("leaderboard.yaml")
_BATCH = 128


@dataclass(frozen=True)
class Network:
    """A network of the YAML file: in RANKRL_CHECKPOINTS, or trained by `recipe` to at least `accuracy`."""

    name: str
    family: str
    dataset: str = "file"
    model: str | None = None
    target: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    heldout: int | None = None
    train_images: int | None = None
    checkpoint: str | None = None
    recipe: Mapping[str, Any] = field(default_factory=dict)
    accuracy: float = 0.0
    file: str | None = None

    @property
    def path(self) -> Path | None:
        """Find the file of its weights or of the whole network; None where it is trained here."""
        named = self.checkpoint or self.file
        if named is None:
            return None
        path = Path(os.environ.get("RANKRL_CHECKPOINTS", ".")) / named
        if not path.is_file():
            raise MissingFileError(f"there is no {named} in the folder RANKRL_CHECKPOINTS")
        return path

    def load(self, folder: Path) -> tuple[torch.nn.Module, ImageData]:
        """Make the network and its images; it is trained here where it has no checkpoint, and kept."""
        data = load_dataset(self.dataset, heldout=self.heldout, train_images=self.train_images)
        options = dict(self.options) | ({"_target_": self.target} if self.target else {})
        name = "custom" if self.target else self.model or self.name
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = create_model(name, input_shape=data.input_shape, num_classes=data.classes, **options)
        path = self.path or folder / f"{self.name}.safetensors"
        if path.exists():
            load_checkpoint(model, path)
        else:
            train(model, data, TrainingRecipe(**{"restore_best": False, **self.recipe}))
            reached = accuracy(model, data.heldout, mean=data.mean, std=data.std)
            print(f"{self.name}: accuracy {reached:.4f} of held-out images", file=sys.stderr, flush=True)
            if reached < self.accuracy:
                raise SystemExit(f"{self.name} was trained to {reached:.4f}, not to {self.accuracy}")
            save_checkpoint(model, path)
        return model.eval(), data


@dataclass(frozen=True)
class Task:
    """A network, what its layers choose from, and what plans keep to: FORMAT MEASURE FRACTION [RUNTIME]."""

    network: Network
    layers: str
    measure: str
    fraction: float
    runtime: str

    @classmethod
    def parse(cls, network: Network, text: str) -> Task:
        """Read the text of the YAML file."""
        layers, measure, fraction, *runtime = text.split()
        timed = (runtime or ["onnxruntime"])[0] if measure == "latency" else "none"
        return cls(network, layers, measure, float(fraction), timed)

    @property
    def name(self) -> str:
        """The name of its rows."""
        words = [self.network.name, self.layers, self.measure, f"{self.fraction:g}"]
        return " ".join(words + [self.runtime] * (self.runtime != "none"))

    def request(self) -> Request:
        """Ask for the search, in the terms of the package."""
        kept = cache_folder()
        timing = LatencyOptions(runtime=self.runtime) if self.runtime != "none" else LatencyOptions()
        budget = BudgetOptions(**{self.measure: self.fraction})
        goal = SearchGoal(budget, SearchOptions(), timing.kept_in(kept, None))
        words = self.layers.split("+")  # formats and precisions, joined
        stored = [word for word in words if word in PRECISIONS and word != "float32"]
        formats = tuple(word for word in words if word not in PRECISIONS)
        layers = DecompositionOptions(format="auto", formats=formats, precisions=("float32", *stored))
        return Request(goal, layers, selector="bayes", cache=kept, progress=False)


Judge = Callable[[Choices], tuple[float, float | None]]
"""From a plan to its score and accuracy after the refit, on inputs that no search sees."""
Tune = Callable[[Choices, int], tuple[float, float]]
"""From a plan and a number of steps of fine-tuning to the accuracy there before and after them."""


@dataclass(frozen=True)
class Opened:
    """A task, fitted."""

    session: SearchSession
    judge: Judge
    tuned: Tune | None  # None for a file, which is not trained
    seconds: float

    def predicted(self) -> SearchProblem:
        """Make the problem with the losses that divergences did not weigh; those of files are measured."""
        problem, library = self.session.problem, self.session.library
        if self.tuned is None:
            return problem
        sites = [replace(each, importance=library.fitted(each).importance) for each in problem.sites]
        return replace(problem, sites=tuple(sites))


@contextmanager
def opened(task: Task, folder: Path, images: int) -> Iterator[Opened]:
    """Fit a task; searches see at most `images` held-out images or two fifths of all, others judge."""
    start = time.perf_counter()
    begin = _of_images if task.network.file is None else _of_file
    session, judging = begin(task, folder, images)
    with session:
        judge, tuned = judging(session)
        yield Opened(session, judge, tuned, time.perf_counter() - start)


Judging = Callable[[SearchSession], tuple[Judge, Tune | None]]


def _of_images(task: Task, folder: Path, images: int) -> tuple[SearchSession, Judging]:
    model, data = task.network.load(folder)
    request = task.request()
    inputs = calibration_images(data, 768 if len(data.train) >= 768 else len(data.train) // 128 * 128, seed=0)
    searched = min(images, 2 * len(data.heldout) // 5)
    how = EvaluatorOptions(metric="soft_agreement", statistics="refitted")
    searching = ImageScoring(model, data, how, searched)
    known = image_classifier(model, data, replace(request, calibration=len(inputs)), folder)
    network = replace(known, inputs=inputs.split(CALIBRATION_BATCH), scoring=searching)
    candidates = request.timed_candidates()
    judges = replace(data, heldout=data.heldout.subset(torch.arange(searched, len(data.heldout))))

    def judging(session: SearchSession) -> tuple[Judge, Tune | None]:
        scoring = replace(searching, data=judges, images=images * 2)
        evaluator = scoring.plan_evaluator(session.library, session.problem)

        def judge(plan: Choices) -> tuple[float, float | None]:
            evaluation = evaluator(plan)
            return evaluation.score, evaluation.accuracy

        def tuned(plan: Choices, steps: int) -> tuple[float, float]:
            compressed = session.applied(session.problem.plan(plan, "leaderboard"))
            recipe = TrainingRecipe(
                epochs=max(1, round(steps * _BATCH / len(data.train))),
                batch_size=_BATCH,
                distillation=DISTILLATION,
                restore_best=False,
            )
            before = heldout_accuracy(compressed, judges)
            train(compressed, judges, recipe, teacher=model)
            return before, heldout_accuracy(compressed, judges)

        return judge, tuned

    return opened_session(network, candidates, request), judging


def _of_file(task: Task, _: Path, images: int) -> tuple[SearchSession, Judging]:
    path = task.network.path
    assert path is not None
    file = find_file(str(path), (min(images, 240), 1))
    source = FileSource(file.path, file.inputs, batch_axes=file.batch_axes, heldout=0.3)
    begun = FileSearch.of(source, task.request())
    network: GraphNetwork = begun.network

    def judging(session: SearchSession) -> tuple[Judge, Tune | None]:
        score = replace(network.scoring, feeds=network.file.split.heldout).of_networks()

        @cache  # a plan is refitted for it
        def judge(plan: Choices) -> tuple[float, float | None]:
            compressed = network.applied(session.problem.plan(plan, "leaderboard"), session.library)
            return score(compressed), None

        return judge, None

    return begun.session(), judging


def read_tasks(path: Path = TASKS, pattern: str = "*", keys: Sequence[str] = ("tasks",)) -> list[Task]:
    """List the tasks below these keys of a YAML file whose names match a pattern, in order."""
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    networks = {name: Network(name, **entry) for name, entry in content["networks"].items()}
    tasks = [
        Task.parse(networks[name], text)
        for key in keys
        for name, texts in content[key].items()
        for text in texts
    ]
    return [task for task in tasks if fnmatchcase(task.name, pattern)]
