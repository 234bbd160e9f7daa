"""What is unusual in a network changes no result: types, frozen and shared parameters, subclasses."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import decomposition
from decomposition import (
    CompressionPlan,
    DecompositionError,
    Factorise,
    FitOptions,
    LayerPlan,
    Quantise,
    apply_plan,
    collect_sensitivities,
    compressible_layers,
    count_macs,
    fingerprint,
    inspect_layers,
    make_plan,
    plain_attention,
    plain_transposed,
    plan_by_heuristic,
    reestimate_batch_norm,
)
from decomposition.network.surgery import unwrapped


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def made(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return build().eval()


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1),
    )


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.float() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize(("kind", "count"), [(torch.bfloat16, 64), (torch.float16, 300)])
def test_a_network_in_half_precision_is_refitted_like_one_in_full(kind: torch.dtype, count: int) -> None:
    network = made(lambda: nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 6, 3)))
    x, others = draw(count, 3, 16, 16) + 1, draw(16, 3, 16, 16, seed=1) + 1  # 300 have more than 65,504 rows
    plan = make_plan(network, (3, 16, 16), "tucker", 3)
    wanted = network(others)
    full = relative_error(apply_plan(network, plan, x)(others), wanted)
    half = network.to(kind)
    found = relative_error(apply_plan(half, plan, x.to(kind))(others.to(kind)), wanted)
    assert found < full + 0.03


def test_transposed_convolutions_under_weight_norm_stay() -> None:
    def build() -> nn.Module:
        layer = nn.ConvTranspose1d(8, 6, 4, stride=2, padding=1)
        return nn.Sequential(nn.utils.parametrizations.weight_norm(layer), nn.ReLU(), nn.Conv1d(6, 6, 3))

    network = made(build, 1)
    network.load_state_dict(made(build, 2).state_dict())
    x = draw(4, 8, 10)
    torch.testing.assert_close(plain_transposed(network)(x), network(x))


def test_the_old_weight_norm_is_not_read_before_it_is_computed() -> None:
    def build() -> nn.Module:
        with pytest.warns(FutureWarning):
            return nn.Sequential(nn.utils.weight_norm(nn.ConvTranspose1d(8, 6, 4, stride=2)))

    network = made(build, 1)
    network.load_state_dict(made(build, 2).state_dict())
    x = draw(4, 8, 10)
    torch.testing.assert_close(plain_transposed(network)(x), network(x))
    refusal = inspect_layers(network, (8, 10))[0].refusal
    assert refusal is not None
    assert "computed anew at every call" in refusal


class Text(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 8)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 20, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.second(torch.relu(self.first(self.words(words))))))


@pytest.mark.parametrize("frozen", [("",), ("words", "first")])
def test_frozen_parameters_change_no_sensitivity_and_stay_frozen(frozen: tuple[str, ...]) -> None:
    network, words = made(Text), torch.arange(40).reshape(8, 5) % 20
    layers = compressible_layers(network, words)
    free = collect_sensitivities(network, layers, words)
    for name in frozen:
        network.get_submodule(name).requires_grad_(False)
    flags = [each.requires_grad for each in network.parameters()]
    found = collect_sensitivities(network, layers, words)
    assert sorted(found) == sorted(free) == ["first", "head", "second"]
    for name, matrix in found.items():
        torch.testing.assert_close(matrix, free[name])
    assert [each.requires_grad for each in network.parameters()] == flags
    assert all(each.grad is None for each in network.parameters())


def test_a_layer_tied_to_an_embedding_stays_and_the_budget_counts() -> None:
    network, words = made(Text), torch.arange(40).reshape(8, 5) % 20
    network.head.weight = network.words.weight
    refusals = {spec.name: spec.refusal for spec in inspect_layers(network, words)}
    assert refusals == {
        "first": None,
        "second": None,
        "head": "its weight tensor belongs to another layer too",
    }
    plan = plan_by_heuristic(network, words, "cp", "greedy", 0.8, calibration=words)
    assert apply_plan(network, plan, words).head.weight.shape == (20, 8)


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("tensor_train", (6, 3)),
        ("tensor_train", (4, 1)),
        ("tensor_ring", (1, 6, 3)),
        ("tensor_ring", (2, 4, 1)),
        ("tensor_ring", (4, 2, 1)),
        ("tensor_ring", (5, 2, 1)),
        ("tucker", (6, 6)),
        ("cp", (6,)),
    ],
)
def test_every_shape_of_a_format_computes_in_integers(name: str, ranks: tuple[int, ...]) -> None:
    network, x = made(convolutions), draw(16, 3, 8, 8)
    wanted, specs = network(x), inspect_layers(network, (3, 8, 8))
    errors = []
    for operations in ((Factorise(name, ranks),), (Factorise(name, ranks), Quantise())):
        layers = tuple(LayerPlan(each.name, operations if each.name == "2" else ()) for each in specs)
        plan = CompressionPlan(layers, fingerprint(specs), (3, 8, 8))
        small = apply_plan(network, plan, x, options=FitOptions(iterations=10))
        errors.append(relative_error(small(x), wanted))
    assert errors[1] < errors[0] + 0.03


@pytest.mark.parametrize("sizes", [(256, 1), (7, 3, 2)])
def test_statistics_are_those_of_all_inputs_whatever_the_batches(sizes: tuple[int, ...]) -> None:
    network, x = made(lambda: nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))), draw(sum(sizes), 3, 2, 2)
    x[-1] += 30  # an outlier
    reestimate_batch_norm(network, list(x.split(sizes)))
    torch.testing.assert_close(network[1].running_mean, network[0](x).mean((0, 2, 3)), rtol=1e-4, atol=1e-4)
    assert network[1].momentum == 0.1
    assert not network[1]._forward_pre_hooks


def test_statistics_of_a_norm_without_maps_need_no_luck_with_the_number_of_inputs() -> None:
    network = made(lambda: nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Linear(12, 4)))
    x = draw(257, 6)
    plan = make_plan(network, (6,), "cp", 3)
    small = apply_plan(network, plan, x, batch_norm="reestimate")
    mean = small[0](x).mean(0)
    torch.testing.assert_close(small[1].running_mean, mean, rtol=1e-3, atol=1e-3)


def test_attention_that_computes_something_else_stays() -> None:
    class Doubled(nn.MultiheadAttention):
        def forward(
            self, *inputs: torch.Tensor, **options: object
        ) -> tuple[torch.Tensor, torch.Tensor | None]:
            outputs, weights = super().forward(*inputs, **options)
            return 2 * outputs, weights

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = Doubled(8, 2, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.attention(x, x, x)[0]

    network, x = made(Network), draw(2, 5, 8)
    torch.testing.assert_close(plain_attention(network)(x), network(x))
    refusal = inspect_layers(network, (5, 8))[0].refusal
    assert refusal is not None
    assert "Doubled, which may compute something else" in refusal


def test_an_auxiliary_loss_beside_the_output_is_left_alone() -> None:
    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = nn.Linear(6, 12), nn.Linear(12, 4)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = torch.relu(self.layer(x))
            return self.head(y), y.square().mean()

    network, x = made(Network), draw(32, 6)
    small = apply_plan(network, make_plan(network, (6,), "cp", 2), x)
    assert small(x)[0].shape == (32, 4)


def test_two_convolutions_over_frames_are_counted_in_every_frame() -> None:
    class Frames(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Conv2d(3, 8, (3, 5), stride=(2, 1), padding=(1, 2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x.flatten(0, 1)).mean((1, 2, 3)).reshape(len(x), -1)

    network, shape = made(Frames), (4, 3, 12, 10)
    plan = make_plan(network, shape, "spatial_svd", 4)
    small = apply_plan(network, plan, draw(8, *shape))
    (spec,) = compressible_layers(network, shape)
    assert plan["layer"].cost(spec).macs == count_macs(small, shape)


@pytest.mark.parametrize("bias", [True, False])
def test_one_calibration_input_takes_no_linear_layer_away(bias: bool) -> None:
    sizes = ((24, 32), (32, 10))
    network = made(lambda: nn.Sequential(*(nn.Linear(*each, bias=bias) for each in sizes)))
    plan = make_plan(network, (24,), "tucker", 10)
    x = draw(64, 24, seed=1)
    wanted = network(x)
    found = relative_error(apply_plan(network, plan, draw(1, 24))(x), wanted)
    by_weights = relative_error(apply_plan(network, plan)(x), wanted)
    assert found < 1.5 * by_weights


class OfCategories(nn.Module):
    """Reads two categories an input, each a number."""

    def __init__(self) -> None:
        super().__init__()
        self.colour, self.size = nn.Embedding(5, 16), nn.Embedding(7, 16)
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, colour: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.first(self.colour(colour) + self.size(size))))


def test_inputs_of_one_number_each_calibrate() -> None:
    network = made(OfCategories)
    generator = torch.Generator().manual_seed(0)
    inputs = {
        "colour": torch.randint(5, (60,), generator=generator),
        "size": torch.randint(7, (60,), generator=generator),
    }
    plan = make_plan(network, inputs, "tucker", {"first": 12})
    compressed = apply_plan(network, plan, inputs)
    assert relative_error(compressed(**inputs), network(**inputs)) < 0.2


X = torch.randn(16, 3, 8, 8)
QUICK = decomposition.FitOptions(iterations=3)


def network(norm: type[nn.Module] = nn.BatchNorm2d) -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3), norm(8), nn.ReLU(), nn.Conv2d(8, 8, 3)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128, 4)).eval()


def _compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")  # type: ignore[return-value]


def _compiled_in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="eager")
    return model


def _inner(model: nn.Module) -> nn.Module:
    return nn.Sequential(_compiled(model), nn.Softmax(1)).eval()


@pytest.fixture
def distributed() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "compiled": _compiled,
    "compiled in place": _compiled_in_place,
    "data parallel": nn.DataParallel,
    "distributed": nn.parallel.DistributedDataParallel,
    "averaged": AveragedModel,
    "compiled, then data parallel": lambda model: nn.DataParallel(_compiled(model)),
    "average of a compiled one": lambda model: AveragedModel(_compiled(model)),
}


SHAPE = (3, 8, 8)


def planned(model: nn.Module) -> decomposition.CompressionPlan:
    return decomposition.plan_by_heuristic(
        model, SHAPE, "tucker", "greedy", 0.5, calibration=X, candidates=3, options=QUICK
    )


@pytest.fixture(scope="module")
def plain_plan() -> decomposition.CompressionPlan:
    """What the network itself gets."""
    return planned(network())


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS.keys())
@pytest.mark.usefixtures("distributed")
def test_a_wrapped_network_becomes_what_the_plain_one_becomes(
    wrap: Callable[[nn.Module], nn.Module], plain_plan: decomposition.CompressionPlan, tmp_path: Path
) -> None:
    plain, wrapped = network(), wrap(network()).eval()
    assert decomposition.inspect_layers(wrapped, X) == decomposition.inspect_layers(plain, X)
    assert decomposition.count_macs(wrapped, SHAPE) == decomposition.count_macs(plain, SHAPE)
    assert planned(wrapped) == plain_plan
    small, other = (decomposition.apply_plan(each, plain_plan, X, options=QUICK) for each in (plain, wrapped))
    assert type(other) is nn.Sequential
    torch.testing.assert_close(other(X), small(X), rtol=0, atol=0)
    # A compressed network that was trained inside of a wrapper is saved as the one inside.
    decomposition.save_compressed(
        nn.DataParallel(other), plain_plan, tmp_path / "small.safetensors", dense=wrapped
    )
    loaded, _ = decomposition.load_compressed(wrapped, tmp_path / "small.safetensors")
    torch.testing.assert_close(loaded.eval()(X), small(X), rtol=0, atol=0)


def test_parts_are_unwrapped_in_a_copy_that_keeps_its_names(caplog: pytest.LogCaptureFixture) -> None:
    model = _inner(network())
    with caplog.at_level(logging.WARNING):
        plain, again = unwrapped(model), unwrapped(model)
    assert [name for name, _ in plain.named_parameters()] == [
        f"0.{n}" for n, _ in network().named_parameters()
    ]
    assert len(caplog.messages) == 1
    assert "OptimizedModule (0) taken off" in caplog.text
    torch.testing.assert_close(again(X), model(X), rtol=0, atol=0)
    assert type(model[0]).__name__ == "OptimizedModule"  # type: ignore[index]
    assert unwrapped(plain) is plain


def test_norms_that_processes_share_are_batch_norms() -> None:
    plain, shared = network(), nn.DataParallel(network(nn.SyncBatchNorm))
    assert decomposition.inspect_layers(shared, X) == decomposition.inspect_layers(plain, X)
    plan = decomposition.make_plan(plain, X, "tucker", 4)
    small, other = (decomposition.apply_plan(each, plan, X) for each in (plain, shared))
    torch.testing.assert_close(other(X), small(X))


def _quantised() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), torch.ao.nn.quantized.Linear(4, 4))


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "scripted": (lambda: torch.jit.script(network()), "RecursiveScriptModule, a program of TorchScript"),
    "traced": (lambda: torch.jit.trace(network(), X), "TopLevelTracedModule, a program of TorchScript"),
    "scripted part": (lambda: nn.Sequential(torch.jit.script(network())), r"layer '0' is a Recursive"),
    "exported": (lambda: torch.export.export(network(), (X,)).module(), "GraphModule, an exported program"),
    "exported program": (lambda: torch.export.export(network(), (X,)), "got a ExportedProgram"),
    "quantised": (_quantised, r"layer '1' is a Linear, quantised by torch.ao"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("make", "what"), REFUSED.values(), ids=REFUSED.keys())
def test_programs_and_integers_are_refused_by_name(make: Callable[[], nn.Module], what: str) -> None:
    model = make()
    for act in (
        lambda: decomposition.make_plan(model, X, "tucker", 4),
        lambda: decomposition.plan_by_heuristic(model, X, "tucker", "greedy", 0.5),
        lambda: decomposition.plain_attention(model),
    ):
        with pytest.raises(DecompositionError, match=f"{what}.*give the n"):
            act()


def test_a_traced_graph_that_keeps_its_layers_is_a_network() -> None:
    plain = network()
    graph = torch.fx.symbolic_trace(plain)
    assert decomposition.inspect_layers(graph, X) == decomposition.inspect_layers(plain, X)
