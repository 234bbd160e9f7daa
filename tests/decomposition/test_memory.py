"""What is free is what the system and its limits leave; more than half of it is not asked for."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from decomposition import (
    DecompositionError,
    FitLibrary,
    apply_plan,
    collect_moments,
    compressible_layers,
    make_plan,
    memory,
    plan_by_heuristic,
)

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems do not tell")


@linux
def test_a_limit_on_the_process_counts() -> None:
    code = (
        "import resource; from decomposition.memory import free_memory\n"
        "before = free_memory()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (20 << 30, 20 << 30))\n"
        "held = next(int(l.split()[1]) for l in open('/proc/self/status') if l.startswith('VmSize'))\n"
        "assert free_memory() <= min(before * 1.5, (20 << 30) - held * 1024 + (1 << 20))\n"
        "resource.setrlimit(resource.RLIMIT_AS, (held * 1024 + (64 << 20), 20 << 30))\n"
        "assert free_memory() <= 64 << 20\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_moments_that_would_take_too_much_are_refused_before_they_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda: 1_000_000)
    model = nn.Sequential(nn.Linear(300, 4))
    with pytest.raises(DecompositionError, match=r"of 1 layers take 0\.0 GB, more than half .* \(skip\)"):
        collect_moments(model, compressible_layers(model, (300,)), torch.randn(1000, 300))
    monkeypatch.setattr(memory, "free_memory", lambda: None)
    assert collect_moments(model, compressible_layers(model, (300,)), torch.randn(1000, 300))


def wide_and_narrow() -> tuple[nn.Module, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 300), nn.ReLU(), nn.Linear(300, 200), nn.ReLU(), nn.Linear(200, 6))
    return model, torch.randn(64, 20, generator=generator)


def free(monkeypatch: pytest.MonkeyPatch, megabytes: float) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda: int(megabytes * 1e6))


def test_a_layer_whose_fit_would_take_too_much_stays_dense_and_the_plan_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, x = wide_and_narrow()
    fit = memory.fit_bytes(200, 300, 64)
    free(monkeypatch, 2 * fit / 1e6)  # just too little: the weights of all layers are held, too
    plan = plan_by_heuristic(model, (20,), "tucker", "greedy", 0.97, calibration=x)
    assert plan["2"].operations == ()
    assert plan["2"].reason is not None
    assert "its fit takes 0.0 GB, more than half of the" in plan["2"].reason
    assert "2: its fit takes" in caplog.text
    assert any(layer.operations for layer in plan)
    with pytest.raises(DecompositionError, match=r"cannot be reached.* stays dense is '2': its fit takes"):
        plan_by_heuristic(model, (20,), "tucker", "greedy", 0.5, calibration=x)
    library = FitLibrary.calibrated(model, (20,), "tucker", x)
    assert len(library.candidates("2")) == 1
    assert len(library.candidates("0")) > 1


def test_what_fits_into_half_of_the_free_memory_is_not_left(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"large": (200, 300, 64), "small": (20, 30, 64)}
    held = sum(memory.fit_bytes(*each) for each in sizes.values()) * 3 // 4
    needed = memory.fit_bytes(200, 300, 64) + held
    free(monkeypatch, 2.01 * needed / 1e6)
    assert memory.without_room(sizes) == {}
    free(monkeypatch, 1.99 * needed / 1e6)
    assert list(memory.without_room(sizes)) == ["large"]
    free(monkeypatch, 1e-6)
    assert list(memory.without_room(sizes)) == ["large", "small"]
    monkeypatch.setattr(memory, "free_memory", lambda: None)
    assert memory.without_room(sizes) == {}


def test_a_refit_of_a_factorised_layer_without_room_names_it_before_it_allocates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, x = wide_and_narrow()
    plan = make_plan(model, (20,), "tucker", 4)
    free(monkeypatch, 1.5 * memory.fit_bytes(200, 300, 64) / 1e6)
    with pytest.raises(DecompositionError, match=r"layer '2': its fit takes .* leave it dense \(skip\)"):
        apply_plan(model, plan, x)


def test_a_dense_layer_without_room_for_its_refit_keeps_its_weight(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Sequential(nn.Linear(40, 30), nn.ReLU(), nn.Linear(30, 200), nn.ReLU(), nn.Linear(200, 6))
    x = torch.randn(400, 40, generator=torch.Generator().manual_seed(0))
    plan = make_plan(model, (40,), "tucker", {"0": 4})
    free(monkeypatch, 1e3)
    refitted: nn.Module = apply_plan(model, plan, x)
    assert not torch.equal(refitted[2].weight, model[2].weight)
    free(monkeypatch, 1.9 * memory.fit_bytes(200, 30, 400) / 1e6)
    kept = apply_plan(model, plan, x)
    assert torch.equal(kept[2].weight, model[2].weight)
    assert "2: its fit takes" in caplog.text
    assert "so this dense layer keeps its weight" in caplog.text


@pytest.mark.parametrize(
    ("text", "expected"), [("3GB", 3e9), ("1.5 g", 1.5e9), ("800MB", 8e8), ("4096", 4096)]
)
def test_a_limit_of_memory_is_a_number_with_a_unit(
    text: str, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANKRL_MEMORY", text)
    assert memory.memory_limit() == expected


@pytest.mark.parametrize("text", ["plenty", "0", "-3GB", "3 bananas"])
def test_what_is_no_size_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANKRL_MEMORY", text)
    with pytest.raises(DecompositionError, match=rf"RANKRL_MEMORY='{text}' is no size; give .* 3GB"):
        memory.room()


def test_stages_keep_the_limit_with_a_word(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    free(monkeypatch, 10_000)
    monkeypatch.setattr(memory, "held_memory", lambda: 10**9)
    monkeypatch.setattr(memory, "_said", set())
    assert memory.room() == 5 * 10**9
    assert memory.within_room(10**9, "values") == 10**9
    assert not caplog.records
    monkeypatch.setenv("RANKRL_MEMORY", "2GB")
    assert memory.room() == 10**9
    with caplog.at_level("INFO"):
        assert memory.within_room(10**9, "values") == 25 * 10**7
    assert "values: 250 MB at a time in place of 1000" in caplog.text
    lack = memory.shortage(2e9)
    assert lack == "2.0 GB, more than the 1.0 GB that RANKRL_MEMORY=2GB leaves"
    assert memory.shortage(1e9) is None
    monkeypatch.setattr(memory, "held_memory", lambda: 3 * 10**9)
    assert memory.room() == 2**27
    assert memory.within_room(10**9, "values") == 2**25


@linux
def test_memory_that_was_freed_goes_back_to_the_system() -> None:
    code = (
        "from decomposition.memory import held_memory, release_memory\n"
        "held = held_memory()\n"
        "parts = [bytearray(50_000) for _ in range(8_000)]\n"  # from the heap, 400 MB
        "last = bytearray(50_000)\n"
        "del parts\n"
        "release_memory()\n"
        "assert held_memory() - held < 10**8, held_memory() - held\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
