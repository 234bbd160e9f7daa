"""Compress PyTorch modules and ONNX files: `compress`, `search`, `make_task`, `apply_plan`, `timing_kit`."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from torch import nn

import decomposition as tensors
from decomposition import CompressionPlan, load_compressed
from decomposition.calibration.calibration_set import CalibrationInputs
from decomposition.network.surgery import copied, unwrapped
from decomposition.progress import Progress, whole_call
from rankrl.data import ImageData
from rankrl.errors import ConfigError
from rankrl.file_compression import FileSearch, FileSource, apply_to_file, compress_file_in, write_file_kit
from rankrl.files import storage_errors, write_atomically
from rankrl.kits.kit import TIMES_FILE, WrittenKit
from rankrl.module_compression import (
    compress_module,
    dataset_session,
    image_classifier,
    scored_session,
    search_dataset,
    write_module_kit,
)
from rankrl.networks.graph_scoring import FileMetric, OnnxScoring, SessionScore
from rankrl.onnx.graph.inputs import HELDOUT, ImagePreprocessing
from rankrl.onnx.graph.network import Axes
from rankrl.option_types import checked_arguments
from rankrl.options.decomposition import DecompositionOptions
from rankrl.options.search import BudgetOptions, SearchOptions
from rankrl.options.selectors import DEFAULT_SELECTOR
from rankrl.options.timing import LatencyOptions
from rankrl.plan_search.run import SearchResult
from rankrl.plan_search.scores.evaluators import Score
from rankrl.plan_search.session import SearchGoal, SearchSession
from rankrl.request import Request
from rankrl.result import Compression, ModuleCompression
from rankrl.runs.run_folder import RunFolder, cache_folder
from rankrl.task import SearchTask
from rankrl.training import Loss
from rankrl.training.networks import FineTuner, FineTuning, Teacher
from rankrl.verbs import verb

__all__ = ["apply_plan", "compress", "load_compressed", "make_task", "search", "timing_kit"]

FILE_BATCH = 16
"""Inputs of a timed pass of a file, unless another number is given."""


def _file(network: Any, verb: str) -> Path | None:
    if isinstance(network, str | Path):
        return Path(network)
    if isinstance(network, nn.Module):
        return None
    raise ConfigError(
        f"{verb} takes a torch.nn.Module or the path of an ONNX file, got a {type(network).__name__}"
    )


def _decomposition(
    network: Any, names: str | Sequence[str] | DecompositionOptions | None
) -> DecompositionOptions:
    """Return the decomposition options; formats named alone stay in float32."""
    if names is None:
        names = DecompositionOptions()
    elif not isinstance(names, DecompositionOptions):
        listed = [names] if isinstance(names, str) else list(names)
        formats: dict[str, Any] = {"format": listed[0]} if len(listed) == 1 else {"formats": tuple(listed)}
        names = DecompositionOptions(**formats, precisions=("float32",))
    return names.of_file() if isinstance(network, str | Path) else names


@checked_arguments(
    without=("network", "inputs", "score", "heldout", "test", "finetune", "teacher", "batch_axes")
)
@storage_errors()
@verb()
def compress(
    network: nn.Module | str | Path,
    inputs: Any,
    target: str | Path | RunFolder,
    *,
    drop: float | None = None,
    minimise: str = "latency",
    params: float | None = None,
    macs: float | None = None,
    bytes: float | None = None,
    latency: float | None = None,
    memory: float | None = None,
    decomposition: str | Sequence[str] | DecompositionOptions | None = None,
    selector: str = DEFAULT_SELECTOR,
    selector_options: Mapping[str, Any] | None = None,
    reward: str = "accuracy",
    reward_options: Mapping[str, Any] | None = None,
    search: SearchOptions | None = None,
    timing: LatencyOptions | None = None,
    score: Score | SessionScore | None = None,
    score_name: str | None = None,
    heldout: float | CalibrationInputs = HELDOUT,
    test: CalibrationInputs | None = None,
    finetune: FineTuning | None = None,
    loss: Loss | None = None,
    teacher: nn.Module | Sequence[nn.Module] | Teacher | None = None,
    calibration: int | None = None,
    images: ImagePreprocessing | None = None,
    batch_axes: Axes | None = None,
    folder: str | Path | None = None,
    cache: str | Path | None = None,
    seed: int = 0,
    overwrite: bool = False,
    progress: Progress = None,
) -> Compression:
    """Compress a network: choose a plan for its layers, apply it, verify the file and time it.

    A module comes back as one, fitted and, if that is asked for, fine-tuned; a file's nodes become several
    smaller ones, without any PyTorch code, labels or gradients. Ranks are chosen within a budget by what the
    network's outputs lose (Lagrangian allocation), or by a search that scores plans.

    Args:
        network: A module, which is left as it was, or the path of an ONNX file, which is only read. In a copy
            of a module, attention becomes plain layers (`decomposition.plain_attention`), transposed
            convolutions become ordinary ones (`decomposition.plain_transposed`), and weights computed at
            every call become parameters (`decomposition.plain_weights`).
        inputs: What the network is used on, a few hundred to some thousands; they are fitted to. Of a module
            one batch (a tensor, a tuple of tensors that the forward takes in order, or a dict of those it
            takes by name), batches of such, such as a data loader, or a dataset; alone or in pairs with
            labels, or in a dict that holds `labels` or `targets` too; or a data set of
            `rankrl.data.load_dataset`, whose held-out images score plans and whose test images the result.
            Of a file a .npz or .npy file, one
            array for each input by name, batches of such, where a list of batches is a sequence that stays
            together, or a folder of images.
        target: A folder for the plan, the network, its file, the numbers and the report; or the ONNX file to
            write alone, with a name that ends in .onnx. The same call into the same folder again goes on with
            the search in it, also after it was killed, to the same plan; another network, budget or selector
            is refused, unless `overwrite` is on. No two calls may work in a folder at once. Whoever gives the
            `RunFolder` of a run that is claimed already also writes its metrics and report.
        drop: How much of the score may be lost, in [0, 1): the result is the fastest network found that loses
            no more, 0.005 for half a point of accuracy or agreement.
        minimise: With `drop`, what is to be as little as possible: `latency`, `bytes`, `macs` or `params`.
        params: Fraction of the parameters to keep at most, in (0, 1].
        macs: Fraction of the multiply-accumulates to keep at most.
        bytes: Fraction of the parameters' bytes to keep at most.
        latency: Fraction of the original's time in onnxruntime to keep at most. Give `drop` alone, or one of
            the four fractions, or two to be kept at once.
        memory: Fraction of the original's peak memory of activations to keep at most, for one input, alone or
            besides any of the others. Integers lower it, and factorised layers where they are what is large.
        decomposition: Name of a tensor format, names of several that every layer chooses from, or everything
            that may become of layers (`DecompositionOptions`). When omitted, layers of a module choose from
            CP, Tucker and tensor ring, nodes of a file from all formats that plain nodes can compute, in
            integers too where time or bytes count; formats named alone stay in float32.
        selector: Name of what chooses. `greedy`, `energy`, `uniform` and `vbmf` need no search; `bayes`,
            `ddpg`, `tpe` and others score plans.
        selector_options: Its options.
        reward: Name of the reward of a search, made from the score and what a plan costs.
        reward_options: Its options.
        search: How long plans are searched, and by how many processes.
        timing: How time is measured: batches of 64 for a module, of 16 for a file, in one thread.
        score: From a network to a number, higher is better; it must not read test data. A module is given as
            one, a file as an onnxruntime session. When omitted, the accuracy on the held-out inputs if they
            have labels of classes (from 0; -100 for inputs without one), else the agreement of the outputs
            with the original's there.
        score_name: What the report calls `score`, such as `IoU`; `Score` when omitted. Scores from 0 to 1 are
            written as percent.
        heldout: Share of `inputs` that plans are scored on and results compared on, and nothing is fitted to,
            or how many; for a module also other inputs for that.
        test: Inputs of a module that choose nothing: they are scored once, at the end, for the report.
        finetune: Of a module: epochs or a `TrainingRecipe` for our own training, or a function that trains
            the network which it is given, in place or returning another of the same parameters; None leaves
            it as it was fitted. Our training minimises `loss` on the labels, cross-entropy without `loss`;
            without labels it lets the network imitate the dense one. The epoch with the best score is kept.
        loss: From the network's outputs and the labels of a batch to a scalar.
        teacher: The network that ours learns from in our training, usually a larger one for the same inputs
            and outputs, or several, whose outputs are averaged; None for the dense one. With labels it has
            the recipe's share `distillation` of the loss: for epochs alone 0.9, without a teacher none.
        calibration: Training images of a data set that layers are fitted to; 768 when omitted.
        images: How image files become inputs of a file, where `inputs` is a folder of them.
        batch_axes: The axis of every input of a file that counts the inputs of a batch, by name; None for an
            input that goes with every batch as it is, such as a rate. Axes that are left out are detected.
        folder: Where the search keeps its record, for a killed one to go on, if `target` is a file; None
            keeps nothing.
        cache: Where fits, sensitivities and times are kept for later calls; None for the environment's
            RANKRL_CACHE, and without that for the folder, which keeps times for this call.
        seed: Seed of everything random.
        overwrite: Whether to begin anew in a folder with results of another call, which are removed at the
            end, instead of refusing it. The same call goes on all the same.
        progress: Where progress goes: None draws a bar over the whole call on a terminal, with the time left
            once it is known, and logs the same elsewhere; False shows nothing; a function is called with the
            stage, the number of its steps that are done and of all.

    Returns:
        The compressed network and what is known of it; a `ModuleCompression` for a module.

    Raises:
        ConfigError: No budget or more than two are given, an option is unknown, out of range or contradicts
            another, or the folder holds the results of another call.
        DataError: There are too few inputs, labels for some of them alone or out of range, or the module's
            own outputs are not finite.
        OnnxGraphError: The file or its inputs cannot be used, or no node can be compressed.
        DecompositionError: No layer can be decomposed, no plan reaches the budget, or the inputs cannot be
            used.
        ExportError: The network cannot be exported, quantised or timed, or its file computes something else.
        NonFiniteError: A score or a loss is NaN or infinite.
        KeyboardInterrupt: The search was interrupted; the same call goes on with it.
        StorageError: The folder cannot be written, another call works in it (`FolderInUseError`), or the
            disk is full.
    """
    file = _file(network, "compress")
    if not (score is None or callable(score)):
        raise ConfigError(f"score must be a function or None, got {score!r}")
    goal = SearchGoal(
        BudgetOptions(drop, minimise, params, macs, bytes, latency, memory),
        search or SearchOptions(),
        _timing(timing, file),
        reward,
        reward_options or {},
    )
    request = Request(
        goal,
        _decomposition(network, decomposition),
        selector,
        selector_options or {},
        seed,
        _cache(cache),
        progress,
        _score_name(score, score_name),
        overwrite,
    ).fitted_to(calibration)
    if file is not None:
        names = ("input_names", "output_names", "dynamic_axes", "opset")  # a file keeps its own
        own = {f"timing.{name}": getattr(request.timing, name) or None for name in names}
        own |= {"test": test, "finetune": finetune, "loss": loss, "teacher": teacher}
        _refuse("ONNX files", calibration=calibration, **own)
        source = FileSource(file, inputs, images, batch_axes, _share(heldout), score, _metric(search))
        with whole_call(request.stages(file=True), progress=progress):
            if isinstance(target, RunFolder):
                return compress_file_in(source, target.path, request, target.onnx, target)
            with _run_folder(Path(target), _path(folder), overwrite=overwrite) as where:
                return compress_file_in(source, where, request, Path(target))
    assert isinstance(network, nn.Module)
    _refuse("PyTorch modules", images=images, batch_axes=batch_axes)
    tuner = FineTuner(finetune, loss, teacher)
    told: dict[str, Any] = {"score": score, "heldout": heldout, "test": test}
    if isinstance(inputs, ImageData):
        given = None if isinstance(heldout, float) and heldout == HELDOUT else heldout
        _refuse("a data set, which has its own", score=score, heldout=given, test=test, loss=loss)
    else:
        _refuse("inputs that are no data set", calibration=calibration)
    stages = request.stages(file=False, tuned=finetune is not None)
    if isinstance(target, RunFolder):
        with whole_call(stages, progress=progress):
            module = compress_module(network, inputs, target, request, tuner, claimed=True, **told)
        return cast(Compression, module)  # without a file where the run wants none
    with (
        whole_call(stages, progress=progress),
        _run_folder(Path(target), _path(folder), overwrite=overwrite) as where,
        _scratch(where) as run,
    ):
        module = compress_module(network, inputs, RunFolder(run), request, tuner, **told)
        assert isinstance(module, ModuleCompression)
        return _copied(module, Path(target), where)


@checked_arguments(without=("network", "inputs", "score", "batch_axes"))
@storage_errors()
@verb()
def search(
    network: nn.Module | str | Path,
    inputs: Any,
    *,
    score: Score | SessionScore | None = None,
    drop: float | None = None,
    minimise: str = "latency",
    params: float | None = None,
    macs: float | None = None,
    bytes: float | None = None,
    latency: float | None = None,
    memory: float | None = None,
    decomposition: str | Sequence[str] | DecompositionOptions | None = None,
    selector: str = "bayes",
    selector_options: Mapping[str, Any] | None = None,
    reward: str = "accuracy",
    reward_options: Mapping[str, Any] | None = None,
    search: SearchOptions | None = None,
    timing: LatencyOptions | None = None,
    heldout: float = HELDOUT,
    images: ImagePreprocessing | None = None,
    batch_axes: Axes | None = None,
    calibration: int | None = None,
    folder: str | Path | RunFolder | None = None,
    cache: str | Path | None = None,
    seed: int = 0,
    progress: Progress = None,
) -> SearchResult:
    """Search the operation of every layer for the best score within a budget.

    Arguments mean what they mean for `compress`, but for these. All of a module's `inputs` are fitted to, and
    their labels left away; it may take several tensors and return anything that the score understands. It
    needs a `score`, unless `inputs` is a data set of `rankrl.data.load_dataset`, which has its own; a file is
    compared with the original on the held-out inputs without one. The score is
    known by its source and what that names, or by its attribute `identity` (a text): one that was edited
    since begins a search in `folder` anew. A `reward` that weighs size needs no budget. The selector option
    `plans_per_step` says how many plans a step has. The plans do not depend on the processes of
    `search`; `network` and `score` must be importable by name for them, and the call stand under
    `if __name__ == "__main__":`.

    Returns:
        The best plan, for `apply_plan`, and the record of the search.

    Raises:
        RankrlError: As `compress`.
        WorkerError: A worker process died.
    """
    file, of_data_set = _file(network, "search"), isinstance(inputs, ImageData)
    _check_score("search", score, optional=file is not None or of_data_set)
    budget, time = BudgetOptions(drop, minimise, params, macs, bytes, latency, memory), _timing(timing, file)
    goal = SearchGoal(budget, search or SearchOptions(), time, reward, reward_options or {})
    options = _decomposition(network, decomposition)
    request = Request(goal, options, selector, selector_options or {}, seed, _cache(cache), progress)
    request = request.fitted_to(calibration)
    stages = request.stages(file=file is not None, applied=False)
    if isinstance(folder, RunFolder):  # claimed by a run, which a rule may choose for, too
        assert isinstance(network, nn.Module)
        with whole_call(stages, progress=progress):
            return cast(SearchResult, search_dataset(network, inputs, request, folder))
    request = request.timed_in(request.cache, _path(folder))
    with (
        whole_call(stages, progress=progress),
        nullcontext() if folder is None else RunFolder(Path(folder)).held(),
        _scratch(None) as scratch,
    ):
        if file is not None:
            source = FileSource(file, inputs, images, batch_axes, heldout, score, _metric(search))
            session = FileSearch.of(source, request).session()
        else:
            _refuse("PyTorch modules", images=images, batch_axes=batch_axes)
            request.check()
            assert isinstance(network, nn.Module)
            session = _module_session(unwrapped(network), inputs, score, request, scratch)
        with session:
            return session.search(request.search_call(_path(folder), anew_for_other_scores=True))


@checked_arguments(without=("network", "inputs", "score", "batch_axes"))
@storage_errors()
@verb()
def make_task(
    network: nn.Module | str | Path,
    inputs: Any,
    *,
    score: Score | SessionScore | None = None,
    params: float | None = None,
    macs: float | None = None,
    bytes: float | None = None,
    latency: float | None = None,
    memory: float | None = None,
    decomposition: str | Sequence[str] | DecompositionOptions | None = None,
    reward: str = "accuracy",
    reward_options: Mapping[str, Any] | None = None,
    search: SearchOptions | None = None,
    timing: LatencyOptions | None = None,
    heldout: float = HELDOUT,
    images: ImagePreprocessing | None = None,
    batch_axes: Axes | None = None,
    cache: str | Path | None = None,
    seed: int = 0,
    progress: Progress = None,
) -> SearchTask:
    """Prepare a search for an agent of your own: candidates, fits, score and environments of a network.

    The arguments are those of `search`, without the selector. `inputs` may also be a data set of
    `rankrl.data.load_dataset`, which has a score of its own: the task is then what the command line searches.
    A module is copied.

    Returns:
        The task, its layers fitted.

    Raises:
        RankrlError: As `search`.
    """
    file = _file(network, "make_task")
    budget, time = (
        BudgetOptions(params=params, macs=macs, bytes=bytes, latency=latency, memory=memory),
        _timing(timing, file),
    )
    goal = SearchGoal(budget, search or SearchOptions(), time, reward, reward_options or {})
    options = _decomposition(network, decomposition)
    request = Request(goal, options, "bayes", seed=seed, cache=_cache(cache), progress=progress)
    request = request.timed_in(request.cache, None)
    of_data_set = isinstance(inputs, ImageData)
    _check_score("make_task", score, optional=file is not None or of_data_set)
    if file is not None:
        source = FileSource(file, inputs, images, batch_axes, heldout, score, _metric(search))
        begun = FileSearch.of(source, request)
        return SearchTask(begun.session(), begun.write)
    _refuse("PyTorch modules", images=images, batch_axes=batch_axes)
    request.check()
    assert isinstance(network, nn.Module)
    module = copied(unwrapped(network)).eval()
    scratch = tempfile.TemporaryDirectory()
    session = _module_session(module, inputs, score, request, Path(scratch.name))
    return SearchTask(session, scratch=scratch)


@verb()
def apply_plan(
    network: nn.Module | str | Path,
    plan: CompressionPlan,
    inputs: Any = None,
    target: str | Path | None = None,
    **options: Any,
) -> Any:
    """Apply a plan to a network.

    Args:
        network: A module or the path of an ONNX file: what the plan was made for, or one with the same
            layers.
        plan: The operations of every layer.
        inputs: What the network is used on, as for `compress`; a module's layers are fitted to their weights
            alone without any, which keeps far less accuracy.
        target: The ONNX file to write, for a file.
        **options: For a module those of `decomposition.apply_plan`, with a data set `decomposition` (how its
            layers are fitted), `calibration` and `seed` of `compress`; for a file `decomposition`, `timing`,
            `score`, `heldout`, `images`, `batch_axes`, `cache` and `seed`.

    Returns:
        The compressed module, or the `Compression` of the file.

    Raises:
        PlanError: The plan was made for another network, or does something that a layer cannot become.
        RankrlError: As `compress`.
    """
    file = _file(network, "apply_plan")
    if file is None:
        assert isinstance(network, nn.Module)
        if target is not None:
            raise ConfigError(
                "apply_plan returns a module; export it with rankrl.export_onnx, without target="
            )
        if isinstance(inputs, ImageData):
            return _applied_to_classifier(network, plan, inputs, **options)
        return tensors.apply_plan(network, plan, inputs, **options)
    if inputs is None or target is None:
        raise ConfigError(
            "apply_plan carries a plan out on a file with inputs and a target: "
            'rankrl.apply_plan("net.onnx", plan, "inputs.npz", "small.onnx")'
        )
    return _applied_to_file(file, plan, inputs, Path(target), **options)


@checked_arguments(without=("network", "inputs"))
def _applied_to_classifier(
    network: nn.Module,
    plan: CompressionPlan,
    inputs: ImageData,
    *,
    decomposition: DecompositionOptions | None = None,
    calibration: int | None = None,
    seed: int = 0,
) -> nn.Module:
    request = Request(SearchGoal(), decomposition or DecompositionOptions(), seed=seed).fitted_to(calibration)
    with _scratch(None) as folder:
        return image_classifier(unwrapped(network), inputs, request, folder).applied(plan)


@checked_arguments(without=("inputs", "score", "batch_axes"))
@storage_errors()
def _applied_to_file(
    network: Path,
    plan: CompressionPlan,
    inputs: Any,
    target: Path,
    *,
    decomposition: DecompositionOptions | None = None,
    timing: LatencyOptions | None = None,
    score: SessionScore | None = None,
    heldout: float = HELDOUT,
    images: ImagePreprocessing | None = None,
    batch_axes: Axes | None = None,
    cache: str | Path | None = None,
    seed: int = 0,
) -> Compression:
    goal = SearchGoal(timing=_timing(timing, network))
    request = Request(goal, decomposition or DecompositionOptions(), seed=seed, cache=_cache(cache))
    return apply_to_file(
        FileSource(network, inputs, images, batch_axes, heldout, score), plan, target, request
    )


@checked_arguments(without=("network", "inputs", "heldout", "batch_axes"))
@storage_errors()
@verb()
def timing_kit(
    network: nn.Module | str | Path,
    inputs: Any,
    folder: str | Path,
    *,
    decomposition: str | Sequence[str] | DecompositionOptions | None = None,
    timing: LatencyOptions | None = None,
    heldout: float | CalibrationInputs = HELDOUT,
    calibration: int | None = None,
    images: ImagePreprocessing | None = None,
    batch_axes: Axes | None = None,
    cache: str | Path | None = None,
    seed: int = 0,
) -> WrittenKit:
    """Write the files that a latency budget times into a folder, to time them on another device.

    There `python measure.py` in the folder writes times.json, which needs numpy and onnxruntime alone;
    `compress(..., latency=0.5, timing=LatencyOptions(table="times.json"))` with the same arguments searches
    for that device.

    Arguments mean what they mean for `compress`; `folder` is written.

    Raises:
        RankrlError: As `compress`.
    """
    file, folder = _file(network, "timing_kit"), Path(folder)
    how = replace(_timing(timing, file), table=folder / TIMES_FILE)
    goal = SearchGoal(BudgetOptions(latency=1.0), timing=how)
    request = Request(goal, _decomposition(network, decomposition), seed=seed, cache=_cache(cache))
    if file is None:
        assert isinstance(network, nn.Module)
        _refuse("PyTorch modules", images=images, batch_axes=batch_axes)
        return write_module_kit(network, inputs, folder, request.fitted_to(calibration), heldout)
    return write_file_kit(FileSource(file, inputs, images, batch_axes, _share(heldout)), request, folder)


def _module_session(
    model: nn.Module, inputs: Any, score: Score | SessionScore | None, request: Request, scratch: Path
) -> SearchSession:
    if isinstance(inputs, ImageData):
        _refuse("a data set, which has its own", score=score)
        return dataset_session(model, inputs, request, scratch)
    assert score is not None
    return scored_session(model, inputs, score, request)


def _check_score(verb: str, score: object, *, optional: bool) -> None:
    if not callable(score) and not (optional and score is None):
        raise ConfigError(
            f"{verb} takes a score, a function from the network to a number; got a {type(score).__name__}"
        )


def _path(path: str | Path | None) -> Path | None:
    return None if path is None else Path(path)


def _cache(path: str | Path | None) -> Path | None:
    """Return the folder of fits and times: RANKRL_CACHE, if it is set, where a call names none."""
    named = os.environ.get("RANKRL_CACHE")
    return cache_folder() if path is None and named else _path(path)


def _timing(timing: LatencyOptions | None, file: Path | None) -> LatencyOptions:
    if timing is not None:
        return timing
    return LatencyOptions() if file is None else LatencyOptions(batch=FILE_BATCH)


def _metric(search: SearchOptions | None) -> FileMetric:
    """Return the metric that scores plans of a file: the default of `search` needs labelled images."""
    if search is None or search.metric == SearchOptions.metric:
        return OnnxScoring.metric
    return search.metric  # type: ignore[return-value]  # checked there, with a message for users


def _score_name(score: Score | SessionScore | None, name: str | None) -> str | None:
    """Return the user's score's name in the report; None without a score."""
    if score is None and name is not None:
        raise ConfigError(
            f"score_name={name!r} names the function in score=; give that too, or leave both out"
        )
    if name is not None and not name.strip():
        raise ConfigError("score_name is empty; give the name of your score, such as 'IoU', or leave it out")
    return name if score is None or name is not None else "Score"


def _share(heldout: Any) -> float:
    """Return the share (or number) of a file's inputs that are held out."""
    if isinstance(heldout, float | int):
        return heldout
    raise ConfigError(
        f"heldout is the share of a file's inputs that results are compared on, such as {HELDOUT}, or their "
        "number; got a "
        f"{type(heldout).__name__}"
    )


def _refuse(kind: str, **options: Any) -> None:
    """Refuse options that have no meaning for a kind of network (module or file)."""
    for name, value in options.items():
        if value is not None:
            raise ConfigError(f"{name}= means nothing for {kind}; leave it out")


@contextmanager
def _run_folder(target: Path, folder: Path | None, *, overwrite: bool) -> Iterator[Path | None]:
    """Lock the working folder of a call: the target, or `folder` where the target is a file."""
    if overwrite and target.suffix == ".onnx":
        raise ConfigError(
            f"overwrite=True is for a folder; the file target={target} is written anew by every call"
        )
    if target.suffix != ".onnx":
        if folder is not None:
            raise ConfigError(f"target={target} is the folder of the run already; leave folder= out")
        folder = target
    with nullcontext() if folder is None else RunFolder(folder).held():
        try:
            yield folder
        except Exception:
            if folder is not None:
                RunFolder(folder).bring_back()
            raise


@contextmanager
def _scratch(folder: Path | None) -> Iterator[Path]:
    """Yield the folder, or a temporary one where there is none."""
    if folder is not None:
        yield folder
        return
    with tempfile.TemporaryDirectory() as scratch:
        yield Path(scratch)


def _copied(result: ModuleCompression, target: Path, folder: Path | None) -> ModuleCompression:
    if target.suffix != ".onnx":
        return result
    write_atomically(target, result.path.read_bytes())
    return replace(result, path=target, folder=folder)
