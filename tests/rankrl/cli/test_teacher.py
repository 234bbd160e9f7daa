"""Teachers other than the dense network: they are checked, and their accuracy is logged first."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from command_line import QUICK, SmallNetwork, read_json, refusal, settings, task_refusal, task_run
from torch import nn

from rankrl.data import ImageData, load_dataset
from rankrl.models import create_model, save_checkpoint
from rankrl.training import TrainingRecipe, accuracy, train
from rankrl.training.networks import read_teacher

Command = Callable[..., None]
CUSTOM = ("finetune.teacher_model=custom", "+finetune.teacher_options._target_=command_line.SmallNetwork")


@pytest.fixture(scope="module")
def digits() -> ImageData:
    return load_dataset("digits")


@pytest.fixture(scope="module")
def teachers(digits: ImageData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the weights of a trained `SmallNetwork`, an untrained one and one for other classes."""
    folder = tmp_path_factory.mktemp("teachers")
    torch.manual_seed(0)
    network, notes = SmallNetwork(10), digits.preprocessing.to_dict()
    save_checkpoint(network, folder / "untrained.safetensors")
    save_checkpoint(SmallNetwork(7), folder / "seven.safetensors")
    train(network, digits, TrainingRecipe(epochs=4, lr=1e-2, batch_size=64))
    save_checkpoint(network, folder / "trained.safetensors", preprocessing=notes)
    save_checkpoint(network, folder / "shifted.safetensors", preprocessing={**notes, "mean": [0.9]})
    return folder


@pytest.fixture
def run(rankrl: Command, whole_run: Path, tmp_path: Path) -> Callable[..., Path]:
    """Fine-tune a compressed network for an epoch; return the run's folder."""

    def finetune(name: str, *arguments: str) -> Path:
        folder = tmp_path / name
        where = (f"weights={whole_run / 'model.safetensors'}", f"hydra.run.dir={folder}")
        rankrl(*QUICK, "task=finetune", *where, *arguments)
        return folder

    return finetune


def test_a_run_is_taught_by_the_network_that_it_names(
    run: Callable[..., Path], dense: str, teachers: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = teachers / "trained.safetensors"
    taught, usual = run("taught", dense, f"finetune.teacher={path}", *CUSTOM), run("usual", dense)
    teacher = read_json(taught / "metrics.json")["trainings"]["finetune"]["teacher"]
    assert teacher["name"] == "custom (trained.safetensors)"
    assert 0.8 < teacher["accuracy"] <= 1
    said = capsys.readouterr().out
    assert said.count("fine-tune: the teacher, custom (trained.safetensors): held-out accuracy") == 1
    assert said.index("fine-tune: the teacher") < said.index("fine-tune: 1 epoch")
    assert "teacher" not in read_json(usual / "metrics.json")["trainings"]["finetune"]
    one, other = (read_json(each / "metrics.json")["epochs"][0]["loss"] for each in (taught, usual))
    assert one != other


def test_a_compressed_network_without_its_dense_one_has_another_teacher(
    run: Callable[..., Path], teachers: Path
) -> None:
    folder = run("run", f"finetune.teacher={teachers / 'trained.safetensors'}", *CUSTOM)
    assert read_json(folder / "metrics.json")["trainings"]["finetune"]["teacher"]["accuracy"] > 0.8


@pytest.mark.slow
@pytest.mark.parametrize(
    "task",
    [
        ("task=pipeline", "selector=greedy", "budget.params=0.5"),
        ("task=prune", "pruner=first_k", "budget.params=0.5"),
        ("task=compare", "compare.selectors=[greedy]", "budget.params=0.5"),
    ],
)
def test_every_task_that_fine_tunes_asks_the_teacher(
    rankrl: Command, dense: str, teachers: Path, tmp_path: Path, task: tuple[str, ...]
) -> None:
    def loss(name: str, *arguments: str) -> object:
        folder = tmp_path / name
        rankrl(*QUICK, dense, *task, "export.int8=false", f"hydra.run.dir={folder}", *arguments)
        metrics = read_json(folder / "metrics.json")
        return metrics["compare"] if "compare" in metrics else metrics["epochs"][0]["loss"]

    options = ("finetune.epochs=3",)
    path = teachers / "trained.safetensors"
    assert loss("taught", *options, f"finetune.teacher={path}", *CUSTOM) != loss("usual", *options)


def test_several_teachers_are_one_whose_class_scores_are_their_mean(
    digits: ImageData, tmp_path: Path
) -> None:
    paths = [tmp_path / f"{seed}.safetensors" for seed in range(2)]
    networks: list[nn.Module] = []
    for seed, path in enumerate(paths):
        torch.manual_seed(seed)
        networks.append(create_model("conv4", input_shape=digits.input_shape, num_classes=10))
        train(networks[-1], digits, TrainingRecipe(epochs=4, lr=3e-3, batch_size=64))
        save_checkpoint(networks[-1], path)
    given = settings(
        "model=lenet5", f"finetune.teacher=[{paths[0]},{paths[1]}]", "finetune.teacher_model=conv4"
    )
    read = read_teacher(given.finetune, given.model, digits, seed=0)
    x = torch.randn(3, *digits.input_shape)
    expected = (networks[0](x) + networks[1](x)) / 2
    torch.testing.assert_close(read.network(x), expected)
    found = accuracy(read.network, digits.heldout, mean=digits.mean, std=digits.std)
    assert read.accuracy == pytest.approx(found, abs=0.01)


def test_a_teacher_without_a_network_of_its_own_has_that_of_the_model(
    digits: ImageData, teachers: Path
) -> None:
    model = ("model=custom", "model._target_=command_line.SmallNetwork")
    given = settings(*model, f"finetune.teacher={teachers / 'trained.safetensors'}")
    assert isinstance(read_teacher(given.finetune, given.model, digits, seed=0).network, SmallNetwork)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("seven", CUSTOM, r"seven\.safetensors with finetune\.teacher_model=custom .* is for 7 classes"),
        ("untrained", CUSTOM, r"untrained.* hardly better than guessing.* classes in this order"),
        ("shifted", CUSTOM, r"trained on images of mean \[0\.9\], .* set dataset\.mean"),
        ("trained", ("finetune.teacher_model=conv4",), r"is for another architecture"),
        ("trained", ("finetune.teacher_model=resnet20x",), r"resnet20x.* Did you mean"),
        (
            "trained",
            ("finetune.teacher_model=[conv4,lenet5]",),
            r"names 2 networks and finetune\.teacher 1 file",
        ),
    ],
)
def test_a_teacher_that_cannot_teach_is_refused(
    teachers: Path, name: str, arguments: tuple[str, ...], message: str
) -> None:
    path = teachers / f"{name}.safetensors"
    said = task_refusal("model=conv4", f"finetune.teacher={path}", "+budget.params=0.5", *arguments)
    assert re.search(message, said), said


def test_a_teacher_is_a_file_or_a_list_of_them() -> None:
    assert "finetune.teacher must be text, a list of paths or null" in refusal("finetune.teacher=7")


def test_a_missing_file_is_refused_before_anything_takes_time(tmp_path: Path) -> None:
    assert "there is no file" in task_refusal("finetune.teacher=[missing.pt]")
    said = task_refusal(f"finetune.teacher={tmp_path}")
    assert "finetune.teacher" in said
    assert "is a folder" in said


def test_the_recipe_knows_nothing_of_the_teacher() -> None:
    assert task_run("finetune.teacher=a.pt").finetuning_recipe() == task_run().finetuning_recipe()
