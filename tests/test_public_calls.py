"""Public calls compute the same in whatever modes of torch, and thread, they are called."""

import inspect
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

import decomposition
import pruning
import rankrl
from decomposition import DecompositionError
from decomposition.public_calls import ProcessSetting, PublicCalls
from pruning import PruningError

IMAGES = torch.randn(16, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def network() -> nn.Sequential:
    """A small trained network with batch norm."""
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU())
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)).eval()


PLAN = decomposition.make_plan(network(), IMAGES[:2], "tucker", 2)


@contextmanager
def switched(switch: Callable[[Any], None], on: Any, off: Any) -> Iterator[None]:
    switch(on)
    try:
        yield
    finally:
        switch(off)


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "default float64": lambda: switched(torch.set_default_dtype, torch.float64, torch.float32),
    "default bfloat16": lambda: switched(torch.set_default_dtype, torch.bfloat16, torch.float32),
    "device meta": lambda: torch.device("meta"),
    "default device meta": lambda: switched(torch.set_default_device, "meta", None),
    "deterministic": lambda: switched(torch.use_deterministic_algorithms, True, False),
}


def modes() -> tuple[object, ...]:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.mha.get_fastpath_enabled(),
    )


def _fitted(model: nn.Module) -> object:
    return decomposition.apply_plan(model, PLAN, IMAGES)


def _candidates(model: nn.Module) -> object:
    library = decomposition.FitLibrary.calibrated(model, (3, 8, 8), "tucker", IMAGES)
    return [each.error for name in library.specs for each in library.candidates(name).candidates]


def _settled(model: nn.Module) -> object:
    decomposition.reestimate_batch_norm(model, IMAGES)
    return model


def _kept(model: nn.Module) -> object:
    groups = pruning.removable_groups(pruning.channel_groups(model, IMAGES[:2]))
    scores = [
        pruning.get_pruner(name).definition(model, groups, IMAGES, torch.Generator().manual_seed(0))
        for name in ("magnitude", "random", "reconstruction")
    ]
    return [pruning.keep_share(groups, each, 0.5) for each in scores]


def _masked(model: nn.Module) -> object:
    return pruning.MaskedNetwork(model, IMAGES[:2], pruning.HardConcreteMask).folded()


def _exported(model: nn.Module, folder: Path) -> object:
    path = folder / "net.onnx"
    rankrl.export_onnx(model, path, IMAGES[:2])
    session = onnxruntime.InferenceSession(path)
    return torch.from_numpy(session.run(None, {session.get_inputs()[0].name: IMAGES.numpy()})[0])


CALLS: dict[str, Callable[..., object]] = {
    "inspect_layers": lambda model: decomposition.inspect_layers(model, (3, 8, 8)),
    "count_macs": lambda model: decomposition.count_macs(model, (3, 8, 8)),
    "make_plan": lambda model: decomposition.make_plan(model, IMAGES[:2], "tucker", 2),
    "apply_plan": lambda model: decomposition.apply_plan(model, PLAN),
    "apply_plan, fitted": _fitted,
    "contracted": lambda model: decomposition.contracted(decomposition.apply_plan(model, PLAN)),
    "FitLibrary": _candidates,
    "reestimate_batch_norm": _settled,
    "keep_share": _kept,
    "remove_channels": lambda model: pruning.remove_channels(model, {"0": [0, 1, 2]}, IMAGES[:2]),
    "untrained_copy": pruning.untrained_copy,
    "MaskedNetwork": _masked,
    "export_onnx": _exported,
}
EXPECTED: dict[str, object] = {}


def called(name: str, folder: Path, mode: AbstractContextManager[Any]) -> object:
    """Call in a mode, which is to be the same afterwards, and return what can be compared."""
    model, call = network(), CALLS[name]
    with mode:
        before = modes()
        result = call(model, folder) if call is _exported else call(model)
        assert modes() == before
    if not isinstance(result, nn.Module):
        return result
    assert not any(parameter.is_inference() for parameter in result.parameters())
    return result.eval()(IMAGES).detach()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CALLS)
def test_a_call_computes_as_ever_in_any_mode_and_leaves_it_as_it_was(
    name: str, mode: str, tmp_path: Path
) -> None:
    if name not in EXPECTED:
        EXPECTED[name] = called(name, tmp_path, nullcontext())
    got = called(name, tmp_path, MODES[mode]())
    if isinstance(got, torch.Tensor):
        torch.testing.assert_close(got, EXPECTED[name])
    else:
        assert got == (pytest.approx(EXPECTED[name]) if name == "FitLibrary" else EXPECTED[name])


@pytest.mark.parametrize("mode", MODES)
def test_modes_come_back_when_a_call_raises(mode: str, tmp_path: Path) -> None:
    model, images = network(), torch.zeros(2, 5, 8, 8)
    with MODES[mode]():
        before = modes()
        with pytest.raises(DecompositionError):
            decomposition.apply_plan(nn.Sequential(nn.ReLU()), PLAN)
        with pytest.raises(PruningError):
            pruning.channel_groups(model, images)
        with pytest.raises(rankrl.errors.ExportError):
            rankrl.export_onnx(model, tmp_path / "net.onnx", (5, 8, 8))
        assert modes() == before


@pytest.mark.slow
def test_a_network_is_compressed_and_trained_within_all_modes_at_once(tmp_path: Path) -> None:
    labels = torch.arange(16) % 5

    def compressed(name: str) -> tuple[object, float]:
        options = rankrl.DecompositionOptions(format="tucker", candidates=3, precisions=("float32",))
        timing = rankrl.LatencyOptions(batch=2, runs=2, int8=False)
        result = rankrl.compress(
            model,
            [(images, labels)],
            tmp_path / name,
            params=0.6,
            finetune=1,
            decomposition=options,
            timing=timing,
            progress=False,
        )
        return [layer.operations for layer in result.plan], result.score

    images, model = IMAGES, network()
    plain = compressed("plain")
    with torch.inference_mode():
        images, model = IMAGES.clone(), network()
    with ExitStack() as stack:
        for mode in MODES.values():
            stack.enter_context(mode())
        before = modes()
        assert compressed("modes") == plain
        assert modes() == before


def lazy() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.LazyBatchNorm2d(), nn.Flatten(), nn.LazyLinear(5)).eval()


def half_on_meta() -> nn.Sequential:
    model = network()
    model[7] = nn.Linear(8, 5, device="meta")
    return model


@pytest.mark.parametrize("name", sorted({*CALLS} - {"contracted", "FitLibrary", "keep_share"}))
@pytest.mark.parametrize(
    ("make", "message"), [(lazy, "1.weight .* call the network once"), (half_on_meta, "7.weight .* meta")]
)
def test_networks_without_values_are_refused_by_the_name_of_a_tensor(
    name: str, make: Callable[[], nn.Module], message: str, tmp_path: Path
) -> None:
    call = CALLS[name]
    with pytest.raises((DecompositionError, PruningError), match=message):
        call(make(), tmp_path) if call is _exported else call(make())


def test_a_verb_refuses_networks_without_values(tmp_path: Path) -> None:
    for make, message in ((lazy, "1.weight .* no shape"), (half_on_meta, "7.weight .* meta")):
        with pytest.raises(DecompositionError, match=message):
            rankrl.compress(make(), IMAGES, tmp_path / "run", params=0.5)
        with pytest.raises(DecompositionError, match=message):
            rankrl.search(make(), IMAGES, score=lambda model: 0.0, params=0.5)


def test_shapes_and_costs_of_a_network_wholly_on_meta_are_those_of_the_real_one() -> None:
    with torch.device("meta"):
        model = network()
    for name in ("inspect_layers", "count_macs"):
        assert CALLS[name](model) == CALLS[name](network())


def test_exports_in_threads_at_once_compute_what_their_networks_do(tmp_path: Path) -> None:
    def exported(number: int) -> None:
        torch.manual_seed(number)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, number + 2)).eval()
        path = tmp_path / f"{number}.onnx"
        with torch.inference_mode(number == 1):
            rankrl.export_onnx(model, path, (3, 8, 8))
            assert torch.is_inference_mode_enabled() == (number == 1)
        session = onnxruntime.InferenceSession(path)
        (got,) = session.run(None, {session.get_inputs()[0].name: IMAGES.numpy()})
        np.testing.assert_allclose(got, model(IMAGES).detach().numpy(), atol=1e-5)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(exported, range(3)))


def test_calls_on_one_network_in_threads_at_once_do_not_see_one_another() -> None:
    model = network()
    specs = decomposition.compressible_layers(model, (3, 8, 8))
    expected = decomposition.collect_moments(model, specs, IMAGES)
    model.train()
    with ThreadPoolExecutor(4) as pool:
        several = [pool.submit(decomposition.collect_moments, model, specs, IMAGES) for _ in range(8)]
    for each in several:
        for name, moments in each.result().items():
            torch.testing.assert_close(moments.metric(centred=True), expected[name].metric(centred=True))
    assert model.training


def test_overlapping_holders_of_a_setting_put_back_what_was_there_before_the_first() -> None:
    state = ["own"]
    setting = ProcessSetting(lambda: state[0], lambda value: state.__setitem__(0, value), "held")
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with setting.held():
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    with setting.held():
        thread.start()
        assert entered.wait(10)
    assert state == ["held"]  # the other still needs it
    leave.set()
    thread.join(10)
    assert state == ["own"]


def test_a_call_that_waits_for_another_says_so(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("decomposition.public_calls._SECONDS", 0.01)
    entered, leave = threading.Event(), threading.Event()

    public_call = PublicCalls()

    @public_call()
    def slow() -> None:
        entered.set()
        leave.wait(10)

    @public_call()
    def fast() -> None:
        pass

    with ThreadPoolExecutor(2) as pool:
        pool.submit(slow)
        assert entered.wait(10)
        waiting = pool.submit(fast)
        with suppress(TimeoutError):
            waiting.result(0.2)
        leave.set()
    assert caplog.messages == ["fast waits until a call in another thread is done"]


WITHOUT_COMPUTING = {"count_parameters", "decay_groups", "example_batch", "factorised_layers", "fingerprint"}
WITHOUT_COMPUTING |= {"integer_layers", "rounded_parameters", "run_model"}


@pytest.mark.parametrize("package", [decomposition, pruning, rankrl], ids=lambda each: each.__name__)
def test_every_exported_function_that_takes_a_network_is_a_public_call(package: Any) -> None:
    for name in sorted(set(package.__all__) - WITHOUT_COMPUTING):
        function = getattr(package, name)
        if not inspect.isfunction(function):
            continue
        annotations = " ".join(
            str(parameter.annotation) for parameter in inspect.signature(function).parameters.values()
        )
        if "Module" in annotations or "FitLibrary" in annotations:
            assert hasattr(function, "__wrapped__"), f"{package.__name__}.{name} keeps its caller's modes"
