"""The benchmark of files in pip packages: every method has its row, made by a process of its own."""

import csv
import subprocess
import sys
from pathlib import Path

import bench_files as bench
import made_inputs
import numpy as np
import onnx
import pytest
import real_files
from small_graphs import convolutions, images

pytestmark = pytest.mark.slow


@pytest.fixture
def net(tmp_path: Path) -> Path:
    """A small network in a file, with its inputs beside it."""
    path = tmp_path / "net.onnx"
    onnx.save(convolutions(), path)
    np.savez(tmp_path / "net.npz", **{onnx.load(path).graph.input[0].name: images(60)})
    return path


def _run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_files.py", *map(str, arguments)])
    bench.main()


def _rows(path: Path) -> dict[str, dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return {row["method"]: row for row in csv.DictReader(file)}


def test_every_method_has_a_row_and_finished_ones_are_kept(
    net: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rows, page = tmp_path / "rows.csv", tmp_path / "page.md"
    options = ["--files", net, "--quick", "--runs", 2, "--rows", rows, "--folder", tmp_path / "made"]
    methods = ["original", "int8", "int8, convolutions", "int8, tuned"]
    _run(monkeypatch, *options, "--methods", *methods[:2])
    first = _rows(rows)
    _run(monkeypatch, *options, "--methods", *methods, "--output", page)
    found = _rows(rows)
    assert set(found) == set(methods)
    assert float(found["original"]["score"]) == pytest.approx(1)
    assert float(found["original"]["size"]) == 1
    for method in methods[1:]:
        assert 0.9 < float(found[method]["score"]) <= 1
        assert float(found[method]["size"]) < 1
    assert all(float(row["time"]) > 0 and float(row["minutes"]) >= 0 for row in found.values())
    kept = ("score", "size", "minutes", "memory_mb")
    assert all(first[method][column] == found[method][column] for method in first for column in kept)
    (line,) = [line for line in page.read_text().splitlines() if line.startswith("| net |")]
    shown = [f"{found[name]['score']} / {found[name]['time']} / {found[name]['size']}" for name in methods]
    assert [each in line for each in shown] == [True, True, False, True]


def test_what_is_missing_is_named_and_the_others_go_on(
    net: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = real_files.Source("no-such-package", "no_such_package", "net.onnx")
    monkeypatch.setitem(real_files.SOURCES, "opennsfw", source)
    rows = tmp_path / "rows.csv"
    _run(
        monkeypatch,
        "--files",
        "opennsfw",
        net,
        "--methods",
        "original",
        "--quick",
        "--runs",
        2,
        "--rows",
        rows,
    )
    assert "pip install no-such-package" in capsys.readouterr().err
    assert set(_rows(rows)) == {"original"}


FAILING = """
import sys
import bench_files as bench, real_files
from pathlib import Path

net, target = sys.argv[1], Path(sys.argv[2])

def failing(file, target):
    raise RuntimeError(f"{target} cannot be read")

def endless(file, target):
    while True:
        pass

find = lambda counts: real_files.find_file(net, counts)
options = bench.parse(["--quick"])
for write, options.limit in ((failing, 5), (endless, 0.01)):
    made = bench.make(find, bench.Rival(write), target, options)
    print(made.score, made.words, sep="|")
"""


def test_a_method_that_fails_or_takes_too_long_has_a_row_that_says_so(net: Path, tmp_path: Path) -> None:
    rows = _in_a_process(FAILING, net, tmp_path / "a.onnx")
    assert rows == ["None|RuntimeError: cannot be read", "None|not finished in 0.01 minutes"]


def _in_a_process(program: str, *arguments: Path) -> list[str]:
    """Run a program that limits its process, which must not be that of other tests; return its lines."""
    command = [sys.executable, "-c", program, *map(str, arguments)]
    scripts = Path(bench.__file__).parent
    return subprocess.run(
        command, cwd=scripts, capture_output=True, text=True, check=True
    ).stdout.splitlines()


def test_ours_writes_a_file_that_is_scored(net: Path, tmp_path: Path) -> None:
    file = real_files.find_file(str(net), (40, 20))
    words = bench.ours(file, tmp_path / "small.onnx", drop=0.5, minimise="bytes")
    assert "layers factorised" in words
    assert (tmp_path / "small.onnx").is_file()


LIMITED = """
import numpy as np
from limited import LimitError, Limits

with Limits(5, 100) as limits:
    held = np.ones(50_000_000)
    del held
print(limits.memory)
before = np.zeros(300_000_000)
with Limits(5, 1):
    np.ones(50_000_000)
try:
    with Limits(5, 1):
        np.ones(200_000_000)
except LimitError as error:
    print(error)
"""


def test_memory_is_that_of_the_block_alone() -> None:
    memory, message = _in_a_process(LIMITED)
    assert 350 < float(memory) < 600
    assert message == "not finished in 1 GB"


@pytest.mark.parametrize(
    ("name", "worth"), [("voice", 1.0), ("direction", 1.0), ("detector", 0.85), ("recogniser", 0.9)]
)
def test_originals_are_good_at_the_inputs_that_are_made(name: str, worth: float) -> None:
    try:
        file = real_files.packaged(name, (1, 12))
    except made_inputs.MissingFileError as error:
        pytest.skip(str(error))
    outputs = bench.outputs_of(bench.open_session(file.path, threads=1), file.tested.feeds)
    assert file.score(outputs, file.tested.known, outputs) >= worth - 1e-9


def test_boxes_are_those_of_the_patches() -> None:
    scores = np.zeros((1, 1, 60, 80), np.float32)
    scores[..., 20:30, 10:60] = 0.9
    scores[..., 50, 70] = 1.0
    border = 1.6 * 10 * 50 / (2 * 60)
    place = (10 - border, 20 - border, 60 + border, 30 + border)
    assert real_files.boxes([[scores]], [[place]], []) == 1
    assert real_files.boxes([[scores]], [[place, (70, 50, 80, 60)]], []) == pytest.approx(2 / 3)
    assert real_files.boxes([[scores]], [[]], []) == 0


def test_strings_are_decoded_as_ctc_has_it() -> None:
    scores = np.eye(4, dtype=np.float32)[[0, 1, 1, 0, 1, 2, 2, 3, 0]][None]
    assert real_files.strings("ab ", [[scores]], ["aab"], []) == 1
    assert real_files.strings("ab ", [[scores]], ["ab"], []) == 0


def test_correlation_sees_what_differs_between_inputs() -> None:
    generator = np.random.default_rng(0)
    old = [[generator.normal(size=(1, 5)) + 100 * np.arange(5)] for _ in range(300)]
    other = [[generator.normal(size=(1, 5)) + 100 * np.arange(5)] for _ in range(300)]
    assert real_files.correlation(old, [], old) == pytest.approx(1)
    assert abs(real_files.correlation(other, [], old)) < 0.15
