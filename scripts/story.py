"""A compression from the first look at a network to its ONNX file, told as a page with pictures.

    python scripts/story.py
    RANKRL_DATA=data python scripts/story.py --dataset cifar10 --checkpoint cifar10-resnet20.th \
        --images 10000 --heldout 1000 --epochs 2 --folder story

Meant to be read from top to bottom, as an example: a function is a chapter, its docstring the chapter's text,
and it uses only what the packages export. Without a checkpoint the network is trained first. Images held out
of the training set make every choice; test images are read for numbers on the page and decide nothing.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import inspect
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from story_page import Curve, Page, epochs_figure, kept_figure, latency_figure, search_figure, shares_figure
from torch import Tensor, nn

import decomposition
import pruning
import rankrl
from decomposition import CompressionPlan, count_macs, count_parameters, inspect_layers
from rankrl.data import ImageData, TestImages, augmented_copy, batches, load_dataset
from rankrl.models import create_model, load_checkpoint
from rankrl.onnx.export import export_onnx, onnx_accuracy, verify_onnx
from rankrl.report.markdown import shown_command
from rankrl.report.provenance import hardware_line
from rankrl.timing import compare_latency
from rankrl.training import TrainingRecipe, accuracy, report_accuracy, train

CURVE_IMAGES = 2000  # test images behind the curves of chapter 3; the summary's numbers are of all
BUDGETS = (0.6, 0.4, 0.25)  # of chapter 3: kept parameters
UNMASKED_MACS = 0.75  # the share that pruning leaves, before the rest is decomposed


@dataclasses.dataclass(frozen=True)
class Story:
    """What the chapters share.

    Attributes:
        options: The command line.
        data: The dataset.
        model: The dense network.
        calibration: Batches of normalised training images, without labels: what layers are fitted to.
        unseen: Normalised held-out images, (N, C, H, W).
        page: What is told.
        stages: The networks on the way, by name.
    """

    options: argparse.Namespace
    data: ImageData
    model: nn.Module
    calibration: Sequence[Tensor]
    unseen: Tensor
    page: Page
    stages: dict[str, nn.Module]

    def heldout_accuracy(self, network: nn.Module) -> float:
        """Return the accuracy by which choices are made."""
        return accuracy(network, self.data.heldout, mean=self.data.mean, std=self.data.std)

    def plan(self, network: nn.Module, heuristic: str, fraction: float) -> CompressionPlan:
        """Return the plan that keeps a fraction of a network's parameters by a rule, without a search."""
        return decomposition.plan_by_heuristic(
            network,
            self.data.input_shape,
            self.options.decomposition,
            heuristic,
            fraction,
            calibration=self.calibration,
            folder=self.options.folder / "fits",
        )

    def fine_tuned(self, network: nn.Module) -> tuple[nn.Module, list[float]]:
        """Return a fine-tuned copy and its held-out accuracies, before and after each epoch."""
        recipe = TrainingRecipe(self.options.epochs, lr=3e-4, optimizer="onnx_adam", distillation=0.9)
        tuned = copy.deepcopy(network)
        result = train(tuned, self.data, recipe, teacher=self.model)
        self.model.cpu()
        return tuned.cpu(), [self.heldout_accuracy(network), *(row.accuracy for row in result.history)]


def begin(options: argparse.Namespace) -> Story:
    """Load the dataset, and load or train the dense network."""
    data = load_dataset(options.dataset, heldout=options.heldout, train_images=options.images)
    # A published checkpoint may have been trained on the held-out images, but not on these copies of them.
    data = dataclasses.replace(data, heldout=augmented_copy(data.heldout, data.augmentation, seed=0))
    torch.manual_seed(0)
    model = create_model(options.model, input_shape=data.input_shape, num_classes=data.classes)
    if options.checkpoint is not None:
        load_checkpoint(model, options.checkpoint)
    else:
        train(model, data, TrainingRecipe(epochs=20, lr=3e-3))
    model = model.cpu().eval()
    order = torch.randperm(len(data.train))[:256]
    calibration = [x for x, _ in batches(data.train.subset(order), 128, mean=data.mean, std=data.std)]
    unseen, _ = next(batches(data.heldout, 200, mean=data.mean, std=data.std))
    return Story(options, data, model, calibration, unseen, Page(options.output), {"dense": model})


def chapter_network(story: Story) -> None:
    """The network.

    Parameters and multiply-accumulates (MACs) are two different budgets: a convolution uses each weight once
    for every position of its output, so that thin layers with large maps have few parameters and many MACs.
    """
    page, data, specs = story.page, story.data, inspect_layers(story.model, story.data.input_shape)
    params, macs = count_parameters(story.model), count_macs(story.model, data.input_shape)
    largest = max(specs, key=lambda spec: spec.params)
    busiest = max(specs, key=lambda spec: spec.macs)
    page.tell(
        f"{story.options.model} on {data.name}: {params:,} parameters and {macs / 1e6:.2f} M MACs an image. "
        f"No layer has more parameters than `{largest.name}` ({largest.params / params:.1%}), none more MACs "
        f"than `{busiest.name}` ({busiest.macs / macs:.1%})."
    )
    page.picture("layers", shares_figure(specs, params, macs), "Parameters and MACs of every layer")
    page.tell(
        f"There are {len(data.train):,} images to train on. {len(data.heldout):,} others are held out: they "
        "make every choice, as randomly augmented copies, since a checkpoint may have been trained on the "
        f"images themselves. The {len(data.test):,} test images are read for numbers on this page alone."
    )


def chapter_layer(story: Story) -> None:
    """One layer.

    A tensor format writes a layer's weight W as a product of small cores, V. That can be done for a small
    ‖W − V‖², or for a small E‖(W − V)x‖² with x the patches that the layer receives from training images.
    The picture shows the error of the layer's output on held-out images, which no fit has seen.
    """
    model, shape = story.model, story.data.input_shape
    convolutions = [spec for spec in inspect_layers(model, shape) if spec.kind == "conv2d"]
    spec = max(convolutions, key=lambda each: each.params)
    moments = decomposition.collect_moments(model, [spec], story.calibration)
    # E[x x'] over the layer's input patches x: a matrix, as a convolution has more patches than columns.
    second: Any = decomposition.collect_moments(model, [spec], [story.unseen])[spec.name].second_moment

    def output_norm(weight: Tensor) -> float:
        return float(((weight.flatten(1) @ second) * weight.flatten(1)).sum()) ** 0.5

    panels: dict[str, dict[str, Curve]] = {}
    for name in decomposition.list_formats():
        panels[name] = {}
        for label, known in (("weights", None), ("data", moments)):
            library = decomposition.FitLibrary(model, [spec], name, moments=known, centred=False)
            site = library.candidates(spec.name)
            dense = library.weights[spec.name]
            lost = [dense - library.weight(spec.name, each.operations) for each in site.candidates[:-1]]
            errors = [output_norm(each) / output_norm(dense) for each in lost]
            panels[name][f"fitted to {label}"] = (list(site.params[:-1] / spec.params), errors)
    size = " x ".join(map(str, spec.weight_shape))
    figure = kept_figure(panels, "relative output error")
    story.page.picture("formats", figure, f"Output error of `{spec.name}` ({size}) over its kept parameters")


def chapter_budgets(story: Story) -> None:
    """The whole network.

    Now every layer is decomposed, without training or labels. `uniform` keeps about the same share of every
    layer; `greedy` spends the budget where, by the layers' errors, the network's output loses least. Each
    plan is applied three times: fitted to the weights, to what each layer receives in the dense network,
    and layer after layer to what it receives in the network compressed so far.
    """
    model, data, page = story.model, story.data, story.page
    test = data.test.for_report()
    tested = TestImages(test.first(CURVE_IMAGES))
    labels = ("weights", "data", "data, layer after layer")
    panels, rows = {}, []
    for rule in ("uniform", "greedy"):
        points = []
        for fraction in BUDGETS:
            plan = story.plan(model, rule, fraction)
            networks = (
                decomposition.apply_plan(model, plan),
                decomposition.apply_plan(model, plan, story.calibration, sequential=False),
                decomposition.apply_plan(model, plan, story.calibration),
            )
            accuracies = [report_accuracy(each, tested, mean=data.mean, std=data.std) for each in networks]
            points.append((count_parameters(networks[0]) / count_parameters(model), *accuracies))
        kept, *curves = zip(*points, strict=True)
        fits = zip(labels, curves, strict=True)
        panels[f"{rule} ranks"] = {f"fitted to {label}": (kept, curve) for label, curve in fits}
        rows += [[rule, *(f"{value:.1%}" for value in point)] for point in points]
    dense = report_accuracy(model, tested, mean=data.mean, std=data.std)
    figure = kept_figure(panels, "test accuracy", dense=dense)
    page.picture("budgets", figure, f"Test accuracy over kept parameters, {story.options.decomposition}")
    page.tell(f"Accuracy on {len(tested):,} test images, of which the dense network has {dense:.1%} right:")
    page.table(f"ranks | parameters kept | {' | '.join(labels)}", rows)


def chapter_search(story: Story) -> None:
    """The search.

    A budget says how many of the parameters may stay. An agent (DDPG) proposes a plan an episode, greedy's at
    first; its reward is the plan's accuracy on the held-out images. Its best plan is then applied.
    """
    options, page = story.options, story.page
    search = partial(
        rankrl.search,
        story.model,
        story.calibration,
        score=story.heldout_accuracy,
        decomposition=options.decomposition,
        params=options.budget,
        search=rankrl.SearchOptions(episodes=options.episodes),
        cache=options.folder / "fits",
    )
    greedy, random, agent = (search(selector=name) for name in ("greedy", "random", "ddpg"))
    draws = f"best of {len(random.rows)} random plans"
    others = {"greedy's plan": greedy.best.reward, draws: random.best.reward}
    figure = search_figure([row.reward for row in agent.rows], others)
    page.picture("search", figure, "Reward of every episode")
    page.tell(
        f"Rewards at {options.budget:.0%} of the parameters: greedy's plan {greedy.best.reward:.2%}, {draws} "
        f"{random.best.reward:.2%}, the agent's best plan {agent.best.reward:.2%} (episode "
        f"{agent.best.episode}). The agent's {len(agent.rows)} episodes took {agent.seconds:.0f} s."
    )
    story.stages["decomposed"] = decomposition.apply_plan(story.model, agent.plan, story.calibration)


def chapter_finetuning(story: Story) -> None:
    """Fine-tuning.

    The cores are ordinary parameters. `OnnxAdam` trains them on the labels and, for nine tenths of the loss,
    the class scores of the dense network. The weights of the best epoch are kept.
    """
    story.stages["decomposed, fine-tuned"], accuracies = story.fine_tuned(story.stages["decomposed"])
    figure = epochs_figure(accuracies, story.heldout_accuracy(story.model))
    story.page.picture("finetuning", figure, "Held-out accuracy over the epochs of fine-tuning")
    story.page.tell(f"Held-out accuracy: {accuracies[0]:.2%} before, {max(accuracies[1:]):.2%} after.")


def chapter_pruning(story: Story) -> None:
    """Prune, then decompose.

    Channels can go before the rest is decomposed. Masks (group LASSO) learn together with the weights until
    the MACs are down to a target; greedy's plan decomposes what is left; the same fine-tuning follows. One
    plan holds both steps: the channels that stay in each layer, and the ranks of the rest. The network is
    saved with it and loaded again, and what follows is measured on the loaded one.
    """
    model, data, options, shape = story.model, story.data, story.options, story.data.input_shape
    order, macs = torch.Generator().manual_seed(0), partial(count_macs, input_shape=shape)
    walk = list(batches(data.train, 128, mean=data.mean, std=data.std, generator=order, shuffle=True))
    example = decomposition.example_batch(model, shape, 2)
    masked = pruning.MaskedNetwork(model, example, pruning.GroupLassoMask)
    steps = pruning.MaskTrainingOptions(epochs=options.epochs)
    pruning.train_masks(masked, walk, F.cross_entropy, steps, cost=macs, target=UNMASKED_MACS)
    pruned = masked.removed().eval()
    same_budget = options.budget * count_parameters(model) / count_parameters(pruned)
    plan = story.plan(pruned, "greedy", min(1.0, same_budget))
    network = decomposition.apply_plan(pruned, plan, story.calibration)
    tuned, accuracies = story.fine_tuned(network)
    kept = {name: rankrl.KeepChannels(tuple(each)) for name, each in masked.kept_channels().items()}
    both, file = plan.with_operations(model, kept), options.folder / "small.safetensors"
    decomposition.save_compressed(tuned, both, file)
    loaded, _ = rankrl.load_compressed(model, file)
    story.stages.update({"pruned, decomposed": network, "pruned, decomposed, fine-tuned": loaded})
    channels = [sum(spec.out_channels for spec in inspect_layers(each, shape)) for each in (model, pruned)]
    story.page.tell(
        f"With at most {UNMASKED_MACS:.0%} of the MACs, {channels[1]:,} of {channels[0]:,} output channels "
        f"and {count_parameters(pruned):,} parameters stay; the budget of chapter 4 brings the parameters to "
        f"{count_parameters(network):,}. Held-out accuracy: {accuracies[0]:.2%} before fine-tuning, "
        f"{max(accuracies[1:]):.2%} after."
    )


def chapter_export(story: Story) -> None:
    """Export.

    Every network becomes one ONNX file, which onnxruntime runs on one thread, in turns with the dense one.
    Decomposed layers run core after core; in a contracted network the cores are made a dense weight when the
    file is loaded. Fewer MACs need not be fewer milliseconds.
    """
    page, data, shape, folder = story.page, story.data, story.data.input_shape, story.options.folder
    networks = dict(story.stages)
    for name in [name for name in networks if "fine-tuned" in name]:
        networks[f"{name}, contracted"] = decomposition.contracted(networks[name])
    rows, differences, times = [], [], {}
    for name, network in networks.items():
        file = folder / f"{name.replace(', ', '-')}.onnx"
        size = export_onnx(network, file, shape).file_bytes
        differences.append(verify_onnx(network, file, story.unseen))
        right = onnx_accuracy(file, batches(data.test.for_report(), 500, mean=data.mean, std=data.std))
        timed = compare_latency(folder / "dense.onnx", file, batch=64)
        times[name] = each = timed.compressed
        costs = (f"{count_parameters(network):,}", f"{count_macs(network, shape) / 1e6:.2f} M")
        ratio = "unchanged" if timed.unchanged else f"{timed.ratio:.2f}"
        latency = (f"{each.median_ms:.3g} ({each.low_ms:.3g}–{each.high_ms:.3g})", ratio)
        rows.append([name, f"{right:.2%}", *costs, f"{size / 1000:,.0f} kB", *latency])
    page.picture("latency", latency_figure(times), "Latency: median, and 10th to 90th percentile")
    page.add("## Summary")
    page.tell(
        "Test accuracy is measured from the file, whose class scores differ from PyTorch's by "
        f"{max(differences):.0e} at most; latency is in ms for 64 images. What lies within the noise is "
        "called unchanged, as the dense network timed against itself should be."
    )
    page.table("stage | test accuracy | parameters | MACs | ONNX file | latency | dense ÷ this", rows)


def main(arguments: list[str] | None = None) -> None:
    """Tell the story."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dataset", default="digits")
    parser.add_argument("--model", default="resnet20")
    parser.add_argument("--checkpoint", type=Path, help="weights of the model; trained if not given")
    parser.add_argument("--images", type=int, help="training images; all if not given")
    parser.add_argument("--heldout", type=int, help="held-out images; the dataset's own number if not given")
    parser.add_argument("--decomposition", default="tucker", help="format, from chapter 3 on")
    parser.add_argument("--budget", type=float, default=0.25, help="parameters to keep, from chapter 4 on")
    parser.add_argument("--episodes", type=int, default=60, help="of the search")
    parser.add_argument("--epochs", type=int, default=10, help="of fine-tuning, and of learning masks")
    parser.add_argument("--folder", type=Path, default=Path("runs/story"), help="for networks and fits")
    parser.add_argument("--output", type=Path, help="Markdown file; story.md in the folder if not given")
    options = parser.parse_args(arguments)
    options.output = options.output or options.folder / "story.md"
    started = time.perf_counter()
    story = begin(options)
    story.page.add("# The whole story, with pictures")
    story.page.tell("A network is compressed, from the first look to the ONNX file. This page was written by")
    names = {str(options.checkpoint): Path(str(options.checkpoint)).name}
    story.page.add(f"```sh\n{shown_command(sys.argv, shortened=names, dropped=['--folder'])}\n```")
    chapters = [chapter_network, chapter_layer, chapter_budgets, chapter_search]
    chapters += [chapter_finetuning, chapter_pruning, chapter_export]
    for number, chapter in enumerate(chapters, 1):
        title, _, text = (inspect.getdoc(chapter) or "").partition(".\n\n")
        story.page.add(f"## {number}. {title}")
        story.page.tell(text)
        chapter(story)
    seconds = time.perf_counter() - started
    story.page.tell(f"{hardware_line('onnxruntime')}; {seconds:.0f} s for everything.")
    story.page.write()
    print(options.output)


if __name__ == "__main__":
    main()
