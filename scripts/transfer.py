"""What a pretrained policy's plan is worth on tasks that it was not trained on, before any evaluation.

    RANKRL_DATA=data python scripts/transfer.py --tasks \
        resnet56:cifar10-resnet56.th:cifar10:tucker:params:0.25 --output scripts/results/transfer.csv

For each task MODEL:CHECKPOINT:DATASET:FORMAT:MEASURE:FRACTION the policy's plan, which cost no evaluation,
and greedy's are scored on held-out images, augmented, that came after those on which policies are trained;
the difference has its standard error over batches of images. With `--refit` both plans are applied, layer by
layer, and the networks scored on the same images; with `--finetune EPOCHS` both are then fine-tuned by the
recipe of `finetune=full`, and their last epochs tested. A task that the policy's card names is refused.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from bench_finetuning import FULL
from torch import Tensor, nn

from decomposition import apply_plan
from decomposition.operations.quantise import PRECISIONS
from rankrl import reuse_memory
from rankrl.data import ImageData, Images, augmented_copy, load_dataset
from rankrl.data.calibration import CALIBRATION_BATCH, calibration_images
from rankrl.errors import RankrlError
from rankrl.models import create_model, load_checkpoint
from rankrl.networks.candidates import CandidateOptions
from rankrl.networks.module import ModuleNetwork
from rankrl.plan_search.agents.policy_file import PRETRAINED_REFITTED, PolicyFile, PolicyTask, read_policy
from rankrl.plan_search.pretraining.episodes import task_of
from rankrl.plan_search.scores.evaluator import EvaluatorOptions, PlanEvaluator, ScoredImages
from rankrl.plan_search.scores.scoring import ImageScoring
from rankrl.plan_search.selectors import create_selector
from rankrl.plan_search.space.problem import Choices, SearchProblem
from rankrl.report.markdown import shown_command, write_section
from rankrl.report.provenance import hardware_line
from rankrl.runs.run_folder import cache_folder
from rankrl.training import predict_logits, report_accuracy, train

CALIBRATION_IMAGES = 768
MEASURES = ("params", "macs", "bytes")
KEPT_CHANNELS = (0.75, 0.5, 0.25)


@dataclass(frozen=True)
class Asked:
    """A task of the command line: MODEL:CHECKPOINT:DATASET:FORMAT:MEASURE:FRACTION.

    Where layers choose among several kinds of operation, FORMAT joins them: `cp+tucker`,
    `cp+int8_weights+int4_weights`; `cp+channels` may take channels away as well, and
    `tensor_ring+tensorised` splits them into small factors.
    """

    model: str
    checkpoint: Path
    dataset: str
    tensor_format: str
    measure: str
    fraction: float

    @classmethod
    def parse(cls, text: str) -> Asked:
        """Read one.

        Raises:
            argparse.ArgumentTypeError: It has other parts.
        """
        parts = text.split(":")
        try:
            model, checkpoint, dataset, tensor_format, measure, fraction = parts
            asked = cls(model, Path(checkpoint), dataset, tensor_format, measure, float(fraction))
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not MODEL:CHECKPOINT:DATASET:FORMAT:MEASURE:FRACTION"
            ) from None
        if measure not in MEASURES:
            raise argparse.ArgumentTypeError(f"{text!r}: MEASURE is one of {', '.join(MEASURES)}")
        return asked

    @property
    def candidates(self) -> CandidateOptions:
        """What layers choose from."""
        words = self.tensor_format.split("+")
        stored = [word for word in words if word in PRECISIONS and word != "float32"]
        formats = tuple(word for word in words if word not in {*PRECISIONS, "channels", "tensorised"})
        return CandidateOptions(
            formats,
            ("float32", *stored),
            tensorised="tensorised" in words,
            channels=KEPT_CHANNELS if "channels" in words else (),
        )

    def kept(self, measure: str) -> float | None:
        """Return the fraction of a measure that may be kept, or None where the budget counts another."""
        return self.fraction if measure == self.measure else None


@dataclass(frozen=True)
class Row:
    """What the plans of a task scored.

    Attributes:
        task: The task.
        new: What of it the policy has not seen.
        greedy: Reward of greedy's plan.
        gain: What the policy's plan scores more.
        error: Standard error of the gain over batches of images.
        refit: Accuracies of both plans after the sequential refit, greedy's first; None without.
        finetuned: Test accuracies of both after fine-tuning; None without.
    """

    task: PolicyTask
    new: str
    greedy: float
    gain: float
    error: float
    refit: tuple[float, float] | None
    finetuned: tuple[float, float] | None = None


def what_is_new(policy: PolicyFile, task: PolicyTask) -> str:
    """Return what of a task the policy was not trained on.

    Raises:
        ConfigError: Nothing is.
    """
    policy.card.check_held_out(task)
    known = policy.card.tasks
    parts = {
        "network": task.network not in {each.network for each in known},
        "dataset": task.dataset not in {each.dataset for each in known},
        "format": task.formats not in {each.formats for each in known},
        "budget": task.budgets not in [each.budgets for each in known],
    }
    return ", ".join(name for name, new in parts.items() if new) or "combination"


def scored(evaluator: PlanEvaluator, choices: Choices) -> np.ndarray:
    """Return the accuracy of a plan on every batch of images, (batches,)."""
    return np.array(
        [
            evaluator.term(evaluator.forward(choices, batch, batch + 1), "accuracy", batch)
            for batch in range(evaluator.batches)
        ]
    )


@dataclass(frozen=True)
class Prepared:
    """A task, fitted: `data`, the dense `model`, calibration `inputs` (N, C, H, W) and the `problem`."""

    data: ImageData
    model: nn.Module
    inputs: Tensor
    problem: SearchProblem

    @classmethod
    def of(cls, asked: Asked, *, seed: int) -> Prepared:
        """Load the network and fit the candidates."""
        data = load_dataset(asked.dataset, seed=seed)
        model = create_model(asked.model, input_shape=data.input_shape, num_classes=data.classes)
        load_checkpoint(model, asked.checkpoint)
        model.eval()
        inputs = calibration_images(data, CALIBRATION_IMAGES, seed=seed)
        candidates = asked.candidates
        network = ModuleNetwork(model, data.input_shape, inputs.split(CALIBRATION_BATCH))
        library = network.library(candidates, cache=cache_folder() / "fits", seed=seed)
        problem = SearchProblem.from_model(
            model,
            library.all_candidates(limit=candidates.candidates),
            data.input_shape,
            params=asked.kept("params"),
            macs=asked.kept("macs"),
            bytes=asked.kept("bytes"),
            library=library,
        )
        options = EvaluatorOptions(seed=seed)
        weighed = ImageScoring(model, data, options, images=1000).weighed(library, problem)
        return cls(data, model, inputs, replace(problem, sites=tuple(weighed)))

    def evaluator(self, images: Images, options: EvaluatorOptions | None = None) -> PlanEvaluator:
        """Return what scores plans on held-out images."""
        data, library = self.data, self.problem.library
        assert library is not None
        scored = ScoredImages(images, data.mean, data.std, data.augmentation, self.inputs)
        return PlanEvaluator(self.model, library, self.problem, scored, options=options)


def measured(asked: Asked, policy_file: Path, *, skip: int, refit: bool, seed: int, finetune: int = 0) -> Row:
    """Score greedy's and the policy's plan for a task."""
    prepared = Prepared.of(asked, seed=seed)
    data, problem = prepared.data, prepared.problem
    task = task_of(problem, model=asked.model, dataset=asked.dataset)
    new = what_is_new(read_policy(policy_file), task)
    images = data.heldout.subset(torch.arange(skip, len(data.heldout)))
    evaluator = prepared.evaluator(images)
    selector = create_selector("ddpg", problem, seed=seed, episodes=1, policy=str(policy_file))
    plans: list[Choices] = [tuple(problem.preset.tolist()), selector.propose()[0].choices]
    right = [scored(evaluator, choices) for choices in plans]
    difference = right[1] - right[0]
    refitted = finetuned = None
    if refit or finetune:
        networks = [
            apply_plan(prepared.model, problem.plan(each, "transfer"), prepared.inputs) for each in plans
        ]
        refitted = _both([augmented_accuracy(network, data, images) for network in networks])
    if finetune:
        finetuned = _both([finetuned_accuracy(each, prepared, finetune, seed) for each in networks])
    return Row(
        task,
        new,
        float(right[0].mean()),
        float(difference.mean()),
        float(difference.std(ddof=1) / len(difference) ** 0.5),
        refitted,
        finetuned,
    )


def augmented_accuracy(network: nn.Module, data: ImageData, images: Images) -> float:
    """Return the accuracy of a network on images, augmented."""
    shown = augmented_copy(images, data.augmentation, 0)
    logits = predict_logits(network, shown, mean=data.mean, std=data.std)
    return float((logits.argmax(1).cpu() == shown.y).float().mean())


def finetuned_accuracy(network: nn.Module, prepared: Prepared, epochs: int, seed: int) -> float:
    """Return the accuracy of a network on the test set after fine-tuning, of its last epoch."""
    data = prepared.data
    train(network, data, replace(FULL, epochs=epochs, seed=seed), teacher=prepared.model)
    return report_accuracy(network, data.test, mean=data.mean, std=data.std)


def _both(values: Sequence[float]) -> tuple[float, float]:
    greedy, policy = values
    return greedy, policy


def report(rows: Sequence[Row], policy: PolicyFile) -> str:
    """Return the table, and what the policy was trained on."""
    further = {
        "refit": [row.refit for row in rows],
        "fine-tuned, test": [row.finetuned for row in rows],
    }
    shown = {name: pairs for name, pairs in further.items() if any(pairs)}
    head = ["task", "new to the policy", "greedy", "policy", "gain"]
    head += [column for name in shown for column in (f"{name}: greedy", "policy")]
    lines = [f"| {' | '.join(head)} |", f"|---|---|{'---:|' * (len(head) - 2)}"]
    for number, row in enumerate(rows):
        cells = [
            str(row.task),
            row.new,
            f"{row.greedy:.3f}",
            f"{row.greedy + row.gain:.3f}",
            f"{row.gain:+.3f} ± {row.error:.3f}",
        ]
        for pairs in shown.values():
            cells += [f"{each:.4f}" for each in pairs[number] or ()] or ["–", "–"]
        lines.append(f"| {' | '.join(cells)} |")
    gains = np.array([row.gain for row in rows])
    lines += ["", f"Mean gain {gains.mean():+.4f}; better on {int((gains > 0).sum())} of {len(rows)} tasks."]
    tasks = "; ".join(sorted(map(str, policy.card.tasks)))
    return "\n".join([*lines, "", f"The policy was trained on {len(policy.card.tasks)} tasks: {tasks}."])


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--policy",
        type=Path,
        default=Path(PRETRAINED_REFITTED),
        help=f"its file, or the name of the one that comes with rankrl (default: {PRETRAINED_REFITTED})",
    )
    parser.add_argument("--tasks", nargs="+", type=Asked.parse, required=True)
    parser.add_argument("--skip", type=int, default=2000, help="held-out images that trained the policy")
    parser.add_argument("--refit", action="store_true", help="apply the plans too")
    parser.add_argument("--finetune", type=int, default=0, help="epochs of fine-tuning after that")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="Markdown file whose section is replaced, or CSV file")
    return parser.parse_args(arguments)


def main() -> None:
    """Measure, print and perhaps save the table."""
    options = parse()
    rows = []
    try:
        for asked in options.tasks:
            rows.append(
                measured(
                    asked,
                    options.policy,
                    skip=options.skip,
                    refit=options.refit,
                    seed=options.seed,
                    finetune=options.finetune,
                )
            )
            print(rows[-1], file=sys.stderr, flush=True)
        policy = read_policy(options.policy)
    except RankrlError as error:
        sys.exit(f"transfer.py: {error}")
    shortened = {word: re.sub(r"[^:]*/", "", word) for word in sys.argv[1:] if word.count(":") == 5}
    shortened[str(options.policy)] = options.policy.name
    command = shown_command(sys.argv, shortened=shortened)
    text = "\n\n".join([f"`{command}`", hardware_line(), report(rows, policy)])
    print(text)
    if options.output:
        write_section(options.output, "transfer", "Transfer of the pretrained policy", text)


if __name__ == "__main__":
    reuse_memory()
    main()
