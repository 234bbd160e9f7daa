"""Damaged, hostile and senseless input for the command line, made from right input; see `fuzz_inputs.py`."""

from __future__ import annotations

import functools
import io
import json
import os
import pickle
import random
import struct
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from fuzz_modules import module_case, module_problems
from fuzz_onnx import onnx_case, onnx_problems
from omegaconf import OmegaConf

from decomposition import build_structure, make_plan, save_compressed
from rankrl.cli.config.schema import config_folder
from rankrl.data import load_dataset
from rankrl.models import create_model

KINDS = ("overrides", "plans", "checkpoints", "data", "weights", "onnx", "modules")
_SHAPE = (1, 8, 8)


@dataclass(frozen=True)
class Good:
    """Input that is right, from which cases are made.

    The network is small, for 8x8 grey images in 10 classes.
    """

    checkpoint: Path
    data: Path
    plan: Path
    weights: Path  # the network, compressed under the plan


@dataclass(frozen=True)
class Case:
    kind: str
    number: int
    what: str
    arguments: tuple[str, ...]
    folder: Path

    def wrong_results(self) -> list[str]:
        """List what is wrong with the files of a command that was accepted, as far as the kind can tell."""
        if self.kind == "modules":
            return module_problems(self.folder)
        return onnx_problems(self.folder) if self.kind == "onnx" else []

    @property
    def import_path(self) -> list[str]:
        return [str(self.folder)] if self.kind == "modules" else []

    @property
    def marker(self) -> Path:
        """The file that hostile code would make."""
        return self.folder / "marker"


class Code:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch '{self.marker}'",)


def make_good(folder: Path) -> Good:
    good = Good(*(folder / f"good.{ending}" for ending in ("th", "npz", "json", "safetensors")))
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    network = create_model("conv4", input_shape=_SHAPE, num_classes=10).eval()
    torch.save(network.state_dict(), good.checkpoint)
    digits = load_dataset("digits")
    x, y = digits.train.x[:120].permute(0, 2, 3, 1).numpy(), digits.train.y[:120].numpy()
    np.savez(good.data, x_train=x, y_train=y, x_test=x[:40], y_test=y[:40])
    plan = make_plan(network, _SHAPE, "tucker", ranks=4)
    plan.save(good.plan)
    save_compressed(build_structure(network, plan), plan, good.weights)
    return good


def make_case(kind: str, number: int, seed: int, good: Good, folder: Path) -> Case:
    """Make a case; the same arguments make the same one."""
    draw = random.Random(f"{kind} {number} {seed}")
    folder.mkdir(parents=True, exist_ok=True)
    what, arguments = _MAKERS[kind](draw, good, folder)
    return Case(kind, number, what, (*arguments, "tracking=none"), folder)


# What is done to any file.


def damaged(draw: random.Random, content: bytes) -> tuple[str, bytes]:
    way = draw.choice(("truncated", "flipped", "emptied", "zeroed", "extended", "length", "text", "shuffled"))
    if way == "truncated":
        return way, content[: draw.randrange(len(content))]
    if way == "emptied":
        return way, b""
    if way == "zeroed":
        start = draw.randrange(len(content))
        return way, content[:start] + bytes(min(64, len(content) - start)) + content[start + 64 :]
    if way == "extended":
        return way, content + draw.randbytes(draw.randrange(1, 4096))
    if way == "length":  # where a header says how long it is
        return way, struct.pack("<Q", draw.choice((0, 1, 2**31, 2**40, 2**63, 2**64 - 1))) + content[8:]
    if way == "text":
        return way, draw.choice(
            (b"{}", b"[]", b"null", b"\xff\xfe", "ä \u202e \U0001f600".encode(), b"[" * 100_000)
        )
    if way == "shuffled":
        middle = draw.randrange(len(content))
        return way, content[middle:] + content[:middle]
    changed = bytearray(content)
    for _ in range(draw.choice((1, 8, 200))):
        changed[draw.randrange(len(changed))] = draw.randrange(256)
    return way, bytes(changed)


def placed(draw: random.Random, path: Path) -> tuple[str, Path]:
    """Put something else in place of a file, and return what, and a path to it."""
    way = draw.choice(("missing", "folder", "loop", "dangling", "fifo", "device", "long", "unicode", "dots"))
    if way == "folder":
        path.mkdir()
    elif way == "loop":
        path.symlink_to(path)
    elif way == "dangling":
        path.symlink_to(path.with_name("nowhere"))
    elif way == "fifo":
        os.mkfifo(path)
    elif way == "device":
        path.symlink_to("/dev/zero")
    elif way == "long":
        path = path.with_name("n" * 400)
    elif way == "unicode":
        path = path.with_name("ä\u202e\U0001f600" + path.suffix)
    elif way == "dots":
        path = path.parent / ".." / ".." / "etc" / "passwd"
    return way, path


def hostile(draw: random.Random, marker: Path) -> tuple[str, bytes]:
    """Make a file that would run code if it were unpickled."""
    protocol = draw.randrange(5)
    plain = pickle.dumps({"state_dict": Code(marker)}, protocol)
    way = draw.choice(("pickle", "torch", "archive", "array"))
    buffer = io.BytesIO()
    if way == "torch":
        torch.save({"weight": torch.zeros(2), "more": Code(marker)}, buffer)
    elif way == "archive":
        with zipfile.ZipFile(buffer, "w") as archive:
            archive.writestr("archive/data.pkl", plain)
            archive.writestr("archive/version", "3")
    elif way == "array":
        objects = np.empty(2, dtype=object)
        objects[:] = [Code(marker), 1]
        np.savez(buffer, x_train=objects, y_train=objects, x_test=objects, y_test=objects)
    else:
        return way, plain
    return f"code in a {way}", buffer.getvalue()


def _spoil(draw: random.Random, way: str, content: bytes, path: Path) -> str:
    """Write code, or a right file damaged, and say how."""
    what, data = hostile(draw, path.with_name("marker")) if way == "code" else damaged(draw, content)
    path.write_bytes(data)
    return what


def odd(draw: random.Random) -> Any:
    """Draw a value that JSON can hold and hardly any option wants."""
    lists = [[], [[]], [None], [-1], [1e308], [1] * 1000, [10**9, 10**9], _nested(60), {}, {"a": 1}]
    numbers = [0, -1, 1, 2, 3, 1.5, -0.5, 1e308, float("nan"), float("inf"), 10**30, -(2**63)]
    texts = ["", "abc", "nan", "ä\u202e", "../../etc/passwd", "a\0b", "x" * 5000]
    return draw.choice([None, True, False, *numbers, *texts, *lists])


def _nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def changed_json(draw: random.Random, content: Any) -> tuple[str, Any]:
    places = list(_places(content))
    parent, key, name = draw.choice(places)
    way = draw.choice(("set", "set", "set", "removed", "doubled"))
    if way == "removed":
        del parent[key]
    elif way == "doubled" and isinstance(parent, list):
        parent.append(parent[key])
    elif way == "doubled":
        parent[f"{key}2"] = parent[key]
    else:
        parent[key] = odd(draw)
    return f"{way} {name}", content


def _places(value: Any, name: str = "") -> Iterator[tuple[Any, Any, str]]:
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in list(items):
        yield value, key, f"{name}/{key}"
        if isinstance(inner, dict | list) and inner:
            yield from _places(inner, f"{name}/{key}")


# The seven kinds.


def _evaluate(good: Good, *more: str) -> tuple[str, ...]:
    return ("task=evaluate", "model=conv4", *more)


@functools.cache
def _options() -> list[tuple[tuple[str, ...], str]]:
    cases: list[tuple[tuple[str, ...], str]] = []
    root = OmegaConf.load(config_folder() / "config.yaml")
    for name, _ in _leaves(
        {key: value for key, value in root.items() if key not in ("defaults", "hydra")}, ""
    ):
        cases.append(((), name))
    for path in sorted(config_folder().glob("*/*.yaml")):
        group = path.parent.name
        if group != "experiment":
            for name, _ in _leaves(OmegaConf.load(path), f"{group}."):
                cases.append(((f"{group}={path.stem}",), name))
    return cases


def _leaves(values: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for key in values:
        value = None if OmegaConf.is_config(values) and OmegaConf.is_missing(values, key) else values[key]
        yield f"{prefix}{key}", value
        if OmegaConf.is_dict(value):
            yield from _leaves(value, f"{prefix}{key}.")


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_VALUES = _words("""
nan inf -inf 1e308 -1e308 1e999 0 -1 -0.0 1 3 0.5 1.5 true false null abc [] [1] [1,2] [a,b] [nan] [null] {}
{a:1} {a:nan} [[1]] 10000000000 1000000000000000000000000000000 -9223372036854775808 'quoted' ä
../../etc/passwd /dev/null /proc/self/mem ~ ${seed} ${nothing} ${oc.env:HOME} ${oc.env:NO} {a:{b:{c:1}}} a=b
1,2 range(1,3) [ } ' " \\ %s%n {}{} ??? int(3) sort(3,1) glob(*) 0x10 choice(a,b) interval(0,1) tag(a,b)
float(nan) str(5) 1_0
""")
_VALUES += ("", "'a b'", "'\u202e'", "'\0'", "'\udc80'", "x" * 300, "x" * 9000, "[" * 60 + "]" * 60)
_VALUES += ("[" * 900 + "]" * 900, "[" + ",".join(["7"] * 2000) + "]")
_FOLDERS = _words("""
/proc/x /proc/1/x /dev/null/x /dev/null null ${x} /sys/x a/../b ${task}/x [a] {a:1} true ..
""")
_FOLDERS += ("", "'\0'", "ä\u202e", "x" * 300, "a/" * 2500, "good.th/run")
_GROUPS = ("model", "dataset", "selector", "reward", "pruner", "optim", "tracking")


def _override_case(draw: random.Random, good: Good, folder: Path) -> tuple[str, tuple[str, ...]]:
    value = draw.choice(_VALUES)
    # The one is refused only for its values; the other once its ranges have been looked at.
    base = draw.choice(
        (
            _evaluate(good, f"model.checkpoint={good.checkpoint}"),
            ("task=search", "dataset=npz", "dataset.path=missing.npz", "model=conv4"),
            ("task=prune", "dataset=npz", "dataset.path=missing.npz", "model=conv4"),
        )
    )
    way = draw.choice(
        ("value",) * 12 + ("group", "unknown", "folder", "folder", "new", "deleted", "sweep", "bare")
    )
    choices, name = draw.choice(_options())
    group = name.partition(".")[0]
    if way == "folder":
        option = draw.choice(
            ("hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir", "hydra.output_subdir")
        )
        words = (f"{option}={draw.choice(_FOLDERS)}", *(("-m",) if "sweep" in option else ()))
    elif way == "group":
        words = (f"{draw.choice(_GROUPS)}={value}",)
    elif way == "unknown":
        letters = list(name)
        letters[draw.randrange(len(letters))] = draw.choice("abcxyz._-")
        words = (*choices, f"{''.join(letters)}={value}")
    elif way == "new":
        words = (*choices, f"+{group}.{draw.choice(('new', 'name', 'weights', '__class__', 'a b'))}={value}")
    elif way == "deleted":
        words = (*choices, f"~{draw.choice((name, group))}")
    elif way == "sweep":
        words = ("-m", *choices, f"{name}={value},{draw.choice(_VALUES[:30])}", "hydra.sweep.dir=sweep")
    elif way == "bare":
        words = (draw.choice((value, name, f"={value}", f"{name}", "--nothing", "-x", f"{name}==3")),)
    else:
        words = (*choices, f"{name}={value}")
    # What a base and a choice both set is set by the choice, which comes last.
    run = () if any(each.startswith("hydra.run.dir") for each in words) else ("hydra.run.dir=run",)
    return f"{way}: {' '.join(words)}", (*base, *run, *words)


def _plan_case(draw: random.Random, good: Good, folder: Path) -> tuple[str, tuple[str, ...]]:
    path = folder / "plan.json"
    way = draw.choice(("json", "json", "json", "json", "bytes", "place", "code", "deep"))
    if way == "place":
        what, path = placed(draw, path)
    elif way == "json":
        what, content = changed_json(draw, json.loads(good.plan.read_text()))
        path.write_text(json.dumps(content))
    elif way == "deep":
        what = "nested too deeply"
        path.write_text('{"layers": ' + draw.choice(("[", '{"a":')) * 200_000)
    else:
        what = _spoil(draw, way, good.plan.read_bytes(), path)
    quick = ("calibration.images=16", "decomposition.final_iterations=1", "decomposition.sequential=false")
    command = ("task=apply", "model=conv4", f"model.checkpoint={good.checkpoint}", f"plan='{path}'", *quick)
    return what, (*command, "hydra.run.dir=run")


def _checkpoint_case(draw: random.Random, good: Good, folder: Path) -> tuple[str, tuple[str, ...]]:
    path = folder / draw.choice(("weights.th", "weights.safetensors", "weights.pt"))
    way = draw.choice(("tensors", "tensors", "tensors", "bytes", "bytes", "place", "code", "content"))
    if way == "place":
        what, path = placed(draw, path)
    elif way == "tensors":
        what, state = _changed_state(draw, torch.load(good.checkpoint, weights_only=True))
        _write_state(path, state)
    elif way == "content":
        content = draw.choice(
            ([1, 2], {"state_dict": {"a": 1}}, {"state_dict": []}, {1: torch.ones(1)}, "text", None)
        )
        what = f"holds {content}"
        torch.save(content, path)
    else:
        what = _spoil(draw, way, good.checkpoint.read_bytes(), path)
    return f"{path.suffix}: {what}", (*_evaluate(good, f"model.checkpoint='{path}'"), "hydra.run.dir=run")


def _changed_state(draw: random.Random, state: dict[str, Any]) -> tuple[str, dict[Any, Any]]:
    name = draw.choice(list(state))
    tensor = state[name]
    replaced: dict[str, Callable[[], Any]] = {
        "nan": lambda: torch.full_like(tensor, float("nan")),
        "inf": lambda: torch.full_like(tensor, float("-inf")),
        "huge": lambda: torch.full_like(tensor, 3e38),
        "transposed": lambda: tensor.flatten(),
        "smaller": lambda: tensor[:-1],
        "empty": lambda: tensor[:0],
        "integers": lambda: tensor.long(),
        "complex": lambda: tensor.to(torch.complex64),
        "half": lambda: tensor.half(),
        "bool": lambda: tensor > 0,
        "number": lambda: 3,
        "text": lambda: "weights",
        "none": lambda: None,
        "nested": lambda: {"a": tensor},
        "sparse": lambda: tensor.to_sparse(),
        "scalar": lambda: torch.tensor(1.0),
    }
    way = draw.choice((*replaced, "missing", "renamed", "more", "prefix"))
    if way in replaced:
        state[name] = replaced[way]()
    elif way == "missing":
        del state[name]
    elif way == "renamed":
        state[draw.choice((f"{name}.", "ä", "", 3, None))] = state.pop(name)
    elif way == "more":
        state["another.weight"] = tensor.clone()
    else:
        state = {f"module.{key}" if draw.random() < 0.9 else key: value for key, value in state.items()}
    return f"{name} {way}", state


def _write_state(path: Path, state: dict[Any, Any]) -> None:
    plain = {
        key: value for key, value in state.items() if isinstance(key, str) and isinstance(value, torch.Tensor)
    }
    if path.suffix == ".safetensors" and not any(value.is_sparse for value in plain.values()):
        safetensors.torch.save_file({key: value.contiguous() for key, value in plain.items()}, path)
    else:
        torch.save(state, path)


def _data_case(draw: random.Random, good: Good, folder: Path) -> tuple[str, tuple[str, ...]]:
    path = folder / "data.npz"
    way = draw.choice(("arrays", "arrays", "arrays", "bytes", "place", "code", "header", "entries"))
    if way == "place":
        what, path = placed(draw, path)
    elif way in ("arrays", "entries"):
        with np.load(good.data) as file:
            arrays = dict(file)
        name = draw.choice(list(arrays))
        what = _change_array(draw, arrays, name) if way == "arrays" else _change_entries(draw, arrays, name)
        np.savez(path, **arrays)
    elif way == "header":
        what = "a header that claims more than there is"
        shape = draw.choice(
            ("(1000000000000, 8, 8, 1)", "(120, 8, 8)" * 9, "(-1, 8, 8, 1)", "(2, 8, 8, 1.5)", "()")
        )
        with zipfile.ZipFile(good.data) as source, zipfile.ZipFile(path, "w") as target:
            for entry in source.namelist():
                content = source.read(entry)
                target.writestr(entry, content.replace(b"(120, 8, 8, 1)", shape.encode()[:14].ljust(14)))
    else:
        what = _spoil(draw, way, good.data.read_bytes(), path)
    more = draw.choice(((), ("dataset.heldout=20",), ("dataset.train_images=30",), ("dataset.classes=10",)))
    command = _evaluate(
        good, f"model.checkpoint={good.checkpoint}", "dataset=npz", f"dataset.path='{path}'", *more
    )
    return what, (*command, "hydra.run.dir=run")


def _change_array(draw: random.Random, arrays: dict[str, Any], name: str) -> str:
    array = arrays[name]
    changes: dict[str, Callable[[], Any]] = {
        "float": lambda: array / 255,
        "nan": lambda: np.full(array.shape, np.nan),
        "negative": lambda: array.astype(np.int64) - 200,
        "large": lambda: array.astype(np.uint64) + np.uint64(2**63),
        "flat": lambda: array.reshape(-1),
        "few": lambda: array[: draw.choice((1, 2, 5))],
        "none": lambda: array[:0],
        "text": lambda: np.array(["a"] * len(array)),
        "wide": lambda: np.repeat(array, 3, axis=-1),
        "order": lambda: np.moveaxis(array, -1, 0),
        "complex": lambda: array.astype(np.complex64),
        "huge label": lambda: np.where(np.arange(array.size).reshape(array.shape) == 3, 2**31 - 1, array),
    }
    way = draw.choice(tuple(changes))
    arrays[name] = changes[way]()
    return f"{name} {way}"


def _change_entries(draw: random.Random, arrays: dict[str, Any], name: str) -> str:
    way = draw.choice(("missing", "renamed", "more"))
    if way != "more":
        array = arrays.pop(name)
        if way == "renamed":
            arrays[draw.choice(("x", "../x_train", "ä"))] = array
    else:
        arrays["more"] = np.zeros(3)
    return f"{name} {way}"


def _weights_case(draw: random.Random, good: Good, folder: Path) -> tuple[str, tuple[str, ...]]:
    path = folder / "model.safetensors"
    way = draw.choice(("plan", "plan", "tensors", "tensors", "header", "bytes", "place", "code"))
    content = good.weights.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + length])
    if way == "place":
        what, path = placed(draw, path)
    elif way in ("plan", "header"):
        if way == "plan":
            key = draw.choice(list(header["__metadata__"]))
            try:
                what, inner = changed_json(draw, json.loads(header["__metadata__"][key]))
                header["__metadata__"][key] = json.dumps(inner)
            except (ValueError, TypeError, AttributeError):
                what, header["__metadata__"][key] = f"metadata {key}", str(odd(draw))
        else:
            what, header = changed_json(draw, header)
        written = json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(written)) + written + content[8 + length :])
    elif way == "tensors":
        with safetensors.safe_open(good.weights, "pt") as file:
            state, metadata = {key: file.get_tensor(key) for key in file.keys()}, file.metadata()  # noqa: SIM118
        what, changed = _changed_state(draw, state)
        plain = {
            key: value.to_dense().contiguous()
            for key, value in changed.items()
            if isinstance(key, str) and isinstance(value, torch.Tensor)
        }
        safetensors.torch.save_file(plain, path, metadata)
    else:
        what = _spoil(draw, way, content, path)
    return what, (*_evaluate(good, f"weights='{path}'"), "hydra.run.dir=run")


_MAKERS: dict[str, Callable[[random.Random, Good, Path], tuple[str, tuple[str, ...]]]] = {
    "overrides": _override_case,
    "plans": _plan_case,
    "checkpoints": _checkpoint_case,
    "data": _data_case,
    "weights": _weights_case,
    "onnx": lambda draw, good, folder: onnx_case(draw, folder),
    "modules": lambda draw, good, folder: module_case(draw, good.data, folder),
}
