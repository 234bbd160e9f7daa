"""`rankrl.compress` in a folder that it worked in before, or works in now."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from call_options import grouped
from torch import nn

import rankrl
from decomposition import CompressionPlan, LatencyTable
from rankrl.cli.config.run_files import resumed_arguments
from rankrl.errors import CheckpointError, ConfigError, FolderInUseError
from rankrl.files import FILE_LIST, recording, write_atomically
from rankrl.plan_search.latency_budget import LatencyBudget
from rankrl.runs.run_folder import locked
from rankrl.timing.latency import RelativeTime
from rankrl.timing.network_timer import NetworkTimer

IMAGES = torch.randn(48, 3, 8, 8, generator=torch.Generator().manual_seed(0))
QUICK: dict[str, Any] = {
    "timing": rankrl.LatencyOptions(batch=4, runs=2),
    "candidates": 4,
    "rank_multiple": 1,
    "selector": "random",
    "episodes": 2,
    "progress": False,
}


def network(width: int = 12, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(width, width, 3),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(width, 3),
    ).eval()


def content(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module", autouse=True)
def staged_files() -> Iterator[None]:  # for the fixture `whole`, too
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "rankrl.verify.file_export.fastest_form", lambda network, *_, **__: (network, "staged", None)
        )
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of one call, for all tests to copy."""
    folder = tmp_path_factory.mktemp("whole")
    rankrl.compress(network(), IMAGES, folder, params=0.6, **grouped(**QUICK))
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    for path, data in content(whole).items():
        copied = tmp_path / path.relative_to(whole)
        copied.parent.mkdir(parents=True, exist_ok=True)
        copied.write_bytes(data)
    return tmp_path


@pytest.fixture
def noise(monkeypatch: pytest.MonkeyPatch) -> np.random.Generator:
    """Times that are others whenever they are measured."""
    drawn = np.random.default_rng(0)

    def table(_: object, sites: Any) -> LatencyTable:
        times = {
            site.name: tuple((site.params * drawn.uniform(0.9, 1.1, len(site))).tolist()) for site in sites
        }
        return LatencyTable(times, rest=1.0, conditions="drawn")

    monkeypatch.setattr(NetworkTimer, "measured", table)
    monkeypatch.setattr(LatencyBudget, "measured", lambda *_: RelativeTime(drawn.uniform(0.75, 0.85)))
    return drawn


@pytest.mark.parametrize("selector", ["greedy", "random"])
def test_the_same_call_with_a_budget_in_time_comes_to_the_same_plan(
    tmp_path: Path, noise: np.random.Generator, selector: str
) -> None:
    def call() -> tuple[CompressionPlan, list[float]]:
        options = {**QUICK, "latency": 0.8, "selector": selector, "episodes": 6}
        found = rankrl.compress(network(), IMAGES, tmp_path, **grouped(**options))
        return found.plan, [row.reward for row in getattr(found.search, "rows", ())]

    first = call()
    assert call() == first
    assert len(first[1]) == (0 if selector == "greedy" else 6)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"params": 0.5}, "params was 0.6, is now 0.5"),
        ({"network": network(16)}, "network was another one, with other layers or weights)"),
        ({"network": network(seed=1)}, "network was "),
        ({"selector": "greedy"}, "selector was random, is now greedy"),
        ({"decomposition": "cp"}, "candidates.formats was ['tucker'], is now ['cp']"),
    ],
)
def test_another_call_leaves_every_byte_alone(folder: Path, changes: dict[str, Any], named: str) -> None:
    before = content(folder)
    with pytest.raises(ConfigError, match="name another folder, or delete this one") as refused:
        rankrl.compress(
            **grouped(
                **{
                    "network": network(),
                    "inputs": IMAGES,
                    "target": folder,
                    "params": 0.6,
                    **QUICK,
                    **changes,
                }
            )
        )
    assert named in str(refused.value)
    assert content(folder) == before


def test_a_call_that_overwrites_begins_anew(folder: Path) -> None:
    (folder / "notes.txt").write_text("mine")
    with recording(folder):
        write_atomically(folder / "state" / "left.txt", "of the call before")
    with pytest.raises(ConfigError, match="there is no selector"):
        rankrl.compress(network(), IMAGES, folder, params=0.5, selector="nothing", overwrite=True)
    assert (folder / "metrics.json").is_file(), "a call that is refused removes nothing"
    with pytest.raises(ZeroDivisionError):
        rankrl.compress(network(16), IMAGES, folder, params=0.5, score=lambda _: 1 / 0, overwrite=True)
    assert (folder / "state" / "left.txt").is_file(), "a call that gets nowhere replaces nothing"
    for _ in range(2):  # the second one is the same call, which is no other
        found = rankrl.compress(network(16), IMAGES, folder, params=0.5, overwrite=True, **grouped(**QUICK))
        assert CompressionPlan.load(folder / "plan.json") == found.plan
        assert not (folder / "state" / "left.txt").exists()
        (folder / "state" / "kept.txt").write_text("of this call")
    assert (folder / "state" / "kept.txt").is_file()
    assert (folder / "notes.txt").read_text() == "mine"
    record = json.loads((folder / "state" / "configuration.json").read_text())
    assert record["config"]["params"] == 0.5


def test_what_a_message_says_of_a_damaged_file_helps(folder: Path) -> None:
    """A search's setup is removed, as it says; a damaged record is overwritten; a list is not needed."""

    def again(**changes: Any) -> CompressionPlan:
        return rankrl.compress(network(), IMAGES, folder, params=0.6, **grouped(**QUICK), **changes).plan

    plan = CompressionPlan.load(folder / "plan.json")
    for name, error, says in (
        ("search.json", CheckpointError, r"search\.json is damaged .* remove that file"),
        ("state/configuration.json", ConfigError, r"json is damaged; begin anew with overwrite=True"),
    ):
        for half in (True, False):
            path = folder / name
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2] if half else b"")
            with pytest.raises(error, match=says):
                again()
            if error is CheckpointError:
                path.unlink()
            assert again(overwrite=error is ConfigError) == plan
    (folder / FILE_LIST).write_text('{"fil')
    assert again() == plan
    with pytest.raises(ConfigError, match=r"files\.json, is missing or damaged"):
        rankrl.compress(network(), IMAGES, folder, params=0.4, overwrite=True, **grouped(**QUICK))
    assert again() == plan


def test_a_folder_with_the_network_itself_in_a_runs_way_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "model.onnx"
    rankrl.export_onnx(network(), source, IMAGES[:2])
    before = source.read_bytes()
    for overwrite in (False, True):
        with pytest.raises(ConfigError, match=r"holds model\.onnx, which no run wrote"):
            rankrl.compress(source, IMAGES.numpy(), tmp_path, params=0.5, overwrite=overwrite)
    assert source.read_bytes() == before


def test_a_file_needs_no_overwriting(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is written anew by every call"):
        rankrl.compress(network(), IMAGES, tmp_path / "net.onnx", params=0.5, overwrite=True)


def test_a_run_of_the_command_line_is_left_alone(folder: Path) -> None:
    record = folder / "state" / "configuration.json"
    record.write_text(json.dumps({"config": {"task": "pipeline", "seed": 0}, "overrides": []}))
    with pytest.raises(ConfigError, match="task was pipeline, is now rankrl"):
        rankrl.compress(network(), IMAGES, folder, params=0.6, **grouped(**QUICK))


def test_the_command_line_does_not_take_a_call_for_a_run_of_its_own(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"the folder of a call of rankrl\.compress; the same call goes on"):
        resumed_arguments([f"resume={folder}", "seed=1"])


def test_a_result_stays_until_the_next_one_is_there(folder: Path) -> None:
    def fails(_: nn.Module) -> None:
        raise KeyboardInterrupt

    names = ("metrics.json", "plan.json", "model.safetensors", "model.onnx", "report.html")
    before = {name: (folder / name).read_bytes() for name in names}
    with pytest.raises(KeyboardInterrupt):
        rankrl.compress(network(), IMAGES, folder, params=0.6, finetune=fails, **grouped(**QUICK))
    assert {name: (folder / name).read_bytes() for name in names} == before


def test_a_result_of_another_score_goes_before_the_search_begins_anew(folder: Path) -> None:
    def score(_: nn.Module) -> float:
        seen.append((folder / "metrics.json").exists())
        if len(seen) == 2:
            raise KeyboardInterrupt
        return 0.5

    seen: list[bool] = []
    with pytest.raises(KeyboardInterrupt):
        rankrl.compress(network(), IMAGES, folder, params=0.6, score=score, **grouped(**QUICK))
    assert seen == [True, False], "the original, the first plan"
    assert not {"metrics.json", "plan.json", "model.onnx", "plots"} & {path.name for path in folder.iterdir()}
    assert (folder / "old-search.json").exists()


def _search(folder: Path) -> object:
    return rankrl.search(network(), score=lambda _: 0.0, inputs=IMAGES, params=0.6, folder=folder)


def _compress(folder: Path) -> object:
    return rankrl.compress(network(), IMAGES, folder, params=0.6, **grouped(**QUICK))


def _compress_file(folder: Path) -> object:
    return rankrl.compress(
        folder / "none.onnx", folder / "none.npz", folder / "small.onnx", folder=folder, params=0.6
    )


@pytest.mark.parametrize("call", [_search, _compress, _compress_file])
def test_a_call_beside_another_is_refused_at_once(tmp_path: Path, call: Callable[[Path], object]) -> None:
    with locked(tmp_path):
        before = content(tmp_path)
        with pytest.raises(FolderInUseError, match="is in use by process"):
            call(tmp_path)
        assert content(tmp_path) == before


def test_a_folder_is_held_from_the_first_moment_to_the_last(tmp_path: Path) -> None:
    def beside(_: nn.Module) -> float:
        with pytest.raises(FolderInUseError):
            _compress(tmp_path)
        return 0.5

    rankrl.compress(network(), IMAGES, tmp_path, params=0.6, score=beside, **grouped(**QUICK))
    assert not (tmp_path / "run.lock").exists()
    with pytest.raises(ConfigError):  # and one that is refused leaves no folder behind
        rankrl.compress(network(), IMAGES, tmp_path / "new", **grouped(**QUICK))
    assert not (tmp_path / "new").exists()
