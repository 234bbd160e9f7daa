"""Every registered optimizer behaves as torch's own do."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim import Optimizer

from optim import create_optimizer, list_optimizers

SHAPES = [(4, 3), (3,), (2, 1, 2), ()]

every_optimizer = pytest.mark.parametrize("name", list_optimizers())
onnx_optimizers = pytest.mark.parametrize("name", list_optimizers("onnx_*"))


def run(optimizer: Optimizer, steps: int, seed: int = 3) -> None:
    """Step with the same random gradients for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for group in optimizer.param_groups:
            for param in group["params"]:
                grad = torch.randn(param.shape, generator=generator, dtype=param.dtype)
                param.grad = grad.to(param.device)
        optimizer.step()


def assert_same(first: list[Tensor], second: list[Tensor]) -> None:
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


def assert_close(first: list[Tensor], second: list[Tensor]) -> None:
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@every_optimizer
def test_it_minimises_a_quadratic(name: str) -> None:
    param = nn.Parameter(torch.tensor([3.0, -2.0]))
    optimizer = create_optimizer(name, [param], lr=0.3)
    for _ in range(200):
        optimizer.zero_grad()
        (param - torch.tensor([1.0, 1.0])).square().sum().backward()
        optimizer.step()
    torch.testing.assert_close(param.detach(), torch.ones(2), atol=0.05, rtol=0)


@every_optimizer
def test_a_closure_is_run_with_gradients_and_its_loss_returned(name: str) -> None:
    param = nn.Parameter(torch.tensor([1.0]))
    optimizer = create_optimizer(name, [param], lr=0.1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = param.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 1.0
    assert param.item() < 1.0
    assert optimizer.step() is None


@every_optimizer
def test_state_dict_continues_bit_by_bit_through_a_weights_only_file(
    name: str, make_params: Callable, clone_params: Callable
) -> None:
    params = make_params(SHAPES)
    optimizer = create_optimizer(name, params, lr=0.1)
    run(optimizer, 3)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    copies = clone_params(params)
    restored = create_optimizer(name, copies, lr=0.7)
    restored.load_state_dict(torch.load(file, weights_only=True))
    run(optimizer, 3, seed=4)
    run(restored, 3, seed=4)
    assert_same(params, copies)


@onnx_optimizers
def test_a_loaded_state_shares_nothing_with_its_source(
    name: str, make_params: Callable, clone_params: Callable
) -> None:
    params = make_params(SHAPES)
    optimizer = create_optimizer(name, params)
    run(optimizer, 1)
    other = create_optimizer(name, clone_params(params))
    other.load_state_dict(optimizer.state_dict())
    before = copy.deepcopy(optimizer.state_dict()["state"])
    run(other, 2)
    for saved, now in zip(before.values(), optimizer.state_dict()["state"].values(), strict=True):
        assert all(torch.equal(saved[key], now[key]) for key in saved)


@every_optimizer
def test_a_deep_copy_goes_its_own_way(name: str, make_params: Callable) -> None:
    model = nn.ParameterList(make_params(SHAPES))
    optimizer = create_optimizer(name, model.parameters(), lr=0.1)
    run(optimizer, 2)
    model_copy, optimizer_copy = copy.deepcopy((model, optimizer))
    run(optimizer, 2, seed=5)
    run(optimizer_copy, 2, seed=5)
    assert_same(list(model), list(model_copy))
    run(optimizer_copy, 1)
    assert not torch.equal(model[0], model_copy[0])


@every_optimizer
def test_maximize_ascends_by_what_minimising_the_negative_descends(
    name: str, make_params: Callable, clone_params: Callable
) -> None:
    params = make_params(SHAPES)
    negated = clone_params(params)
    for param in negated:
        param.grad = -param.grad
    for foreach in (False, True):
        create_optimizer(name, params, lr=0.1, maximize=True, foreach=foreach).step()
        create_optimizer(name, negated, lr=0.1, foreach=foreach).step()
        assert_same(params, negated)


@every_optimizer
def test_parameters_without_a_gradient_are_left_alone(name: str, make_params: Callable) -> None:
    params = make_params([(2,), (3,)])
    params[0].grad = None
    before = params[0].detach().clone()
    optimizer = create_optimizer(name, params, lr=0.1)
    optimizer.step()
    assert torch.equal(params[0], before)
    assert params[0] not in optimizer.state
    optimizer.zero_grad()
    optimizer.step()  # none has a gradient


@onnx_optimizers
def test_a_parameter_that_joins_later_starts_its_own_update_count(
    name: str, make_params: Callable, clone_params: Callable
) -> None:
    options = {"decay_factor": 0.5} if name == "onnx_adagrad" else {}
    params = make_params([(2,), (3,)])
    late_gradient, params[1].grad = params[1].grad, None
    optimizer = create_optimizer(name, params, lr=0.1, **options)
    optimizer.step()
    optimizer.step()
    params[1].grad = late_gradient
    alone = clone_params([params[1]])
    optimizer.step()
    create_optimizer(name, alone, lr=0.1, **options).step()
    assert torch.equal(params[1], alone[0])


@every_optimizer
def test_groups_have_their_own_options_and_schedulers_change_them(
    name: str, make_params: Callable, clone_params: Callable
) -> None:
    params = make_params([(2,), (3,)])
    alone = clone_params(params)
    grouped = create_optimizer(name, [{"params": params[:1]}, {"params": params[1:], "lr": 0.5}], lr=0.1)
    single = [create_optimizer(name, [alone[0]], lr=0.1), create_optimizer(name, [alone[1]], lr=0.5)]
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.5) for o in (grouped, *single)]
    for _ in range(3):
        for optimizer in (grouped, *single):
            optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
    assert_close(params, alone)
    assert [group["lr"] for group in grouped.param_groups] == [0.1 / 8, 0.5 / 8]


@every_optimizer
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_foreach_and_one_by_one_agree(
    name: str, dtype: torch.dtype, make_params: Callable, clone_params: Callable
) -> None:
    params = make_params(SHAPES, dtype)
    copies = clone_params(params)
    run(create_optimizer(name, params, lr=0.1, foreach=True), 5)
    run(create_optimizer(name, copies, lr=0.1, foreach=False), 5)
    assert_close(params, copies)


@every_optimizer
def test_grad_scaler_and_autocast_train_and_skip_overflowing_steps(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = create_optimizer(name, model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    inputs = torch.randn(16, 4)
    losses = []
    for i in range(20):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = (model(inputs).float() - inputs.sum(1, keepdim=True)).square().mean()
        scaler.scale(loss).backward()
        before = model.weight.detach().clone()
        if i == 3:
            model.weight.grad[0, 0] = torch.inf
        scaler.step(optimizer)
        assert torch.equal(model.weight, before) == (i == 3)
        scaler.update()
        losses.append(loss.item())
    assert model.weight.dtype == torch.float32
    assert losses[-1] < losses[0] / 2


@pytest.mark.parametrize(
    ("name", "foreach"),
    [
        pytest.param(name, foreach, marks=[] if foreach == (row % 2 == 0) else pytest.mark.slow)
        for row, name in enumerate(list_optimizers("onnx_*"))
        for foreach in (False, True)
    ],
)
def test_a_compiled_step_is_one_graph_that_is_not_compiled_again(
    name: str, foreach: bool, make_params: Callable, clone_params: Callable
) -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    params = make_params(SHAPES)
    copies = clone_params(params)
    # a tensor of a learning rate, because a float is compiled into the graph
    eager = create_optimizer(name, params, lr=torch.tensor(0.1))
    compiled = create_optimizer(name, copies, lr=torch.tensor(0.1), foreach=foreach)
    step = torch.compile(compiled.step, backend=counter, fullgraph=True)
    for rate in (0.1, 0.1, 0.05, 0.2):
        for optimizer in (eager, compiled):
            optimizer.param_groups[0]["lr"].fill_(rate)
        eager.step()
        step()
    assert_close(params, copies)
    assert (
        counter.frame_count <= 2
    )  # the first step makes SGD's momentum, the ONNX optimizers' state before it


@onnx_optimizers
@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("first_update_count", [0, 1])
def test_capturable_counts_in_tensors_to_the_same_end(
    name: str, foreach: bool, first_update_count: int, make_params: Callable, clone_params: Callable
) -> None:
    params = make_params(SHAPES)
    copies = clone_params(params)
    options = {"foreach": foreach, "first_update_count": first_update_count}
    run(create_optimizer(name, params, lr=0.1, **options), 4)
    captured = create_optimizer(name, copies, lr=torch.tensor(0.1), capturable=True, **options)
    run(captured, 4)
    assert_close(params, copies)


@onnx_optimizers
def test_a_capturable_state_is_restored_as_it_was(
    name: str, make_params: Callable, clone_params: Callable
) -> None:
    params = make_params(SHAPES)
    optimizer = create_optimizer(name, params, lr=0.1, capturable=True)
    run(optimizer, 2)
    copies = clone_params(params)
    restored = create_optimizer(name, copies, lr=0.1, capturable=True)
    restored.load_state_dict(optimizer.state_dict())
    assert restored.state[copies[0]]["step"].dtype == torch.int32  # torch would count in float32
    run(optimizer, 2)
    run(restored, 2)
    assert_same(params, copies)


def taught(name: str, **options: Any) -> tuple[nn.Linear, Optimizer]:
    """A layer and its optimizer, with coefficients that act without a gradient."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    coefficients = {"norm_coefficient": 0.1}
    if name == "onnx_adam":
        coefficients["norm_coefficient_post"] = 0.1
    return model, create_optimizer(name, model.parameters(), **{"lr": 0.1, **coefficients, **options})


@onnx_optimizers
@pytest.mark.parametrize("options", [{}, {"lr": torch.tensor(0.1)}, {"capturable": True}], ids=str)
def test_torchs_checkpoint_helpers_change_neither_parameters_nor_later_steps(
    name: str, options: dict[str, Any]
) -> None:
    asked, optimizer = taught(name, **options)
    untouched, other = taught(name, **options)
    state = get_optimizer_state_dict(asked, optimizer)
    assert_same(list(asked.parameters()), list(untouched.parameters()))
    set_optimizer_state_dict(untouched, other, copy.deepcopy(state))
    assert_same(list(asked.parameters()), list(untouched.parameters()))
    plain, alone = taught(name, **options)
    for each in (optimizer, other, alone):
        run(each, 3)
    assert_same(list(asked.parameters()), list(plain.parameters()))
    assert_same(list(untouched.parameters()), list(plain.parameters()))


@pytest.mark.parametrize("lr", [0.0, 0.1])
def test_coefficients_act_as_defined_in_a_step_of_zero_gradients(lr: float) -> None:
    """But for the first step at a rate of zero: here a first one at another, or a second."""
    model, optimizer = taught("onnx_adam", lr=lr, norm_coefficient=0.0)
    if lr == 0:
        run(optimizer, 1)
    before = [param.detach().clone() for param in model.parameters()]
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    assert_close([x * 0.9 for x in before], list(model.parameters()))


@onnx_optimizers
def test_groups_share_no_tensor_of_a_rate(name: str, make_params: Callable, clone_params: Callable) -> None:
    params, rate = make_params(SHAPES), torch.tensor(0.1)
    optimizer = create_optimizer(name, [{"params": [param]} for param in params[:3]], lr=rate)
    optimizer.add_param_group({"params": params[3:], "lr": rate})
    expected = create_optimizer(name, [{"params": [param]} for param in clone_params(params)], lr=0.1)
    factors: list[Callable[[int], float]] = [
        lambda step, factor=factor: factor**step for factor in (1.0, 0.5, 0.1, 0.9)
    ]
    scheduler, wanted = (torch.optim.lr_scheduler.LambdaLR(each, factors) for each in (optimizer, expected))
    for _ in range(3):
        run(optimizer, 1)
        run(expected, 1)
        scheduler.step()
        wanted.step()
        rates = [[float(group["lr"]) for group in each.param_groups] for each in (optimizer, expected)]
        assert rates[0] == pytest.approx(rates[1])
    again = create_optimizer(name, [{"params": [param]} for param in params], lr=rate)
    again.load_state_dict({**optimizer.state_dict(), "param_groups": [
        {**group, "lr": rate} for group in optimizer.state_dict()["param_groups"]
    ]})  # fmt: skip
    assert len({id(group["lr"]) for group in again.param_groups} | {id(rate)}) == len(params) + 1
    assert rate == 0.1


@onnx_optimizers
@pytest.mark.parametrize("option", [{"maximize": True}, {"foreach": False}, {"capturable": True}], ids=str)
@pytest.mark.parametrize("whole", [False, True], ids=["state", "optimizer"])
def test_a_state_saved_before_an_option_existed_is_continued(
    name: str, option: dict[str, Any], whole: bool, make_params: Callable, clone_params: Callable
) -> None:
    params = make_params(SHAPES)
    options = {} if whole else option  # an optimizer pickled whole says nothing of what it did not know
    optimizer = create_optimizer(name, params, lr=0.1, **options)
    run(optimizer, 3)
    saved = optimizer.__getstate__() if whole else optimizer.state_dict()
    saved = copy.deepcopy(saved)
    for group in saved["param_groups"]:
        for added in option:
            del group[added]
    if whole:
        restored = type(optimizer).__new__(type(optimizer))
        restored.__setstate__(saved)
        copies = [param for group in restored.param_groups for param in group["params"]]
    else:
        copies = clone_params(params)
        restored = create_optimizer(name, copies, lr=0.7, **option)
        restored.load_state_dict(saved)
    run(optimizer, 3, seed=4)
    run(restored, 3, seed=4)
    assert_same(params, copies)


@onnx_optimizers
def test_a_group_may_mix_dtypes(name: str, make_params: Callable, clone_params: Callable) -> None:
    mixed = [*make_params([(3,), (2, 2)]), *make_params([(3,)], torch.float64), *make_params([(4,)], seed=1)]
    copies = clone_params(mixed)
    create_optimizer(name, mixed, lr=0.1, foreach=True).step()
    for copy_ in copies:
        create_optimizer(name, [copy_], lr=0.1, foreach=True).step()
    assert_same(mixed, copies)


@onnx_optimizers
@pytest.mark.parametrize("elements", [1, 5, 12])
def test_the_size_of_the_buckets_changes_nothing(
    name: str, elements: int, make_params: Callable, clone_params: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = make_params(SHAPES)
    copies = clone_params(params)
    run(create_optimizer(name, params, lr=0.1, norm_coefficient=0.1), 2)
    monkeypatch.setattr("optim.kernels.CPU_BUCKET_ELEMENTS", elements)
    run(create_optimizer(name, copies, lr=0.1, norm_coefficient=0.1), 2)
    assert_same(params, copies)


def test_adagrad_agrees_with_torch(make_params: Callable, clone_params: Callable) -> None:
    params = make_params(SHAPES, torch.float64)
    copies = clone_params(params)
    options = {"lr": 0.1, "decay_factor": 0.25, "norm_coefficient": 0.5, "epsilon": 2.0**-20}
    run(create_optimizer("onnx_adagrad", params, **options), 5)
    theirs = torch.optim.Adagrad(copies, lr=0.1, lr_decay=0.25, weight_decay=0.5, eps=2.0**-20)
    run(theirs, 5)
    for a, b in zip(params, copies, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)


def test_adam_agrees_with_torch_where_epsilon_is_zero(make_params: Callable, clone_params: Callable) -> None:
    params = make_params(SHAPES, torch.float64)
    copies = clone_params(params)
    ours = create_optimizer(
        "onnx_adam", params, lr=0.1, alpha=0.875, beta=0.9375, epsilon=0, norm_coefficient=0.5
    )
    run(ours, 5)
    run(torch.optim.Adam(copies, lr=0.1, betas=(0.875, 0.9375), eps=0, weight_decay=0.5), 5)
    for a, b in zip(params, copies, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@onnx_optimizers
@pytest.mark.parametrize("options", [{}, {"foreach": False}, {"capturable": True}])
def test_cuda_agrees_with_the_cpu(
    name: str, options: dict[str, bool], make_params: Callable, clone_params: Callable
) -> None:
    params = make_params(SHAPES)
    copies = [nn.Parameter(param.detach().cuda()) for param in params]
    run(create_optimizer(name, params, lr=0.1), 5)
    run(create_optimizer(name, copies, lr=0.1, **options), 5)
    assert_close(params, [param.cpu() for param in copies])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@onnx_optimizers
def test_a_cuda_graph_replays_the_step(name: str, make_params: Callable, clone_params: Callable) -> None:
    params = [nn.Parameter(param.detach().cuda()) for param in make_params(SHAPES)]
    for param in params:
        param.grad = torch.ones_like(param)
    copies = clone_params(params)
    eager = create_optimizer(name, params, lr=0.1)
    captured = create_optimizer(name, copies, lr=0.1, capturable=True)
    eager.step()
    captured.step()  # makes the state
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.step()
    for _ in range(3):
        eager.step()
        graph.replay()
    assert_close(params, copies)
