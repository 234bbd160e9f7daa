"""The step in which a processor's time falls with a rank is found from a few times."""

import math
from pathlib import Path

import numpy as np
import pytest

from rankrl.timing import fast_multiple, form
from rankrl.timing.form import STEPS, step_of
from rankrl.timing.layer_latency import LayerTimer


@pytest.mark.parametrize("width", STEPS)
def test_stairs_are_seen(width: int) -> None:
    times = {rank: 1.0 + math.ceil(rank / width) for rank in range(1, 100)}
    assert step_of(times) == width


def test_where_every_channel_counts_the_narrowest_step_is_taken() -> None:
    assert step_of({rank: float(rank) for rank in range(1, 100)}) == min(STEPS)


def test_the_answer_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def alone(timer: LayerTimer, layers: list[object], shape: tuple[int, ...]) -> np.ndarray:
        asked.append(len(layers))
        ranks = [layer.out_channels for layer in layers]  # type: ignore[attr-defined]
        return np.array([1.0 + math.ceil(rank / 16) for rank in ranks])

    monkeypatch.setattr(LayerTimer, "alone", alone)
    fast_multiple.cache_clear()
    assert fast_multiple(tmp_path) == 16
    fast_multiple.cache_clear()
    assert fast_multiple(tmp_path) == 16
    assert len(asked) == 1
    monkeypatch.setattr(form, "measuring_conditions", lambda *_: "another machine")
    fast_multiple.cache_clear()
    assert fast_multiple(tmp_path) == 16
    assert len(asked) == 2
    fast_multiple.cache_clear()
