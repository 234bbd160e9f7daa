"""Score plans by a user's function, identified by a hash of its source and of the values that it uses."""

from __future__ import annotations

import ast
import copyreg
import functools
import inspect
import logging
import math
import os
import sys
import types
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, SupportsFloat, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from decomposition.cache import digest
from decomposition.choose.library import FitLibrary
from decomposition.network.inputs import Inputs
from decomposition.network.surgery import copied
from rankrl.device import Precision, model_device
from rankrl.errors import ConfigError, NonFiniteError
from rankrl.plan_search.scores.evaluation import RememberingEvaluator
from rankrl.plan_search.scores.scoring_network import ScoringNetwork
from rankrl.plan_search.space.problem import Choices, SearchProblem

log = logging.getLogger(__name__)

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_OURS = {"rankrl", "decomposition", "pruning", "optim"}
_PACKAGES = {"site-packages", "dist-packages"}


def score_identity(score: Callable[..., Any]) -> str:
    """Return 16 hexadecimal digits that are equal for equal scores, in other processes too.

    An attribute `identity`, a string, identifies a score by itself. Any other score is identified by its
    source, without comments, docstrings and formatting, and by the values that the source names or the object
    holds: functions and classes of the user's files count by their own sources, tensors, arrays and networks
    by their content, other objects by what pickle would store of them, and installed ones by their names.
    What cannot be read counts by its type's name, with a warning.
    """
    identity = getattr(score, "identity", None)
    if isinstance(identity, str):
        return digest(identity.encode())[:16]
    reader = _Reader()
    reader.read(score)
    if reader.opaque:
        log.warning(
            "the score holds what cannot be read and counts by its type alone: %s. A search that goes on in "
            "its folder does not notice an edit of that; give the score an attribute `identity`, a string "
            "that you change with it",
            ", ".join(sorted(reader.opaque)),
        )
    return reader.content[:16]


class _Reader:
    """Hashes a score and everything that it refers to."""

    def __init__(self) -> None:
        self.content = ""
        self.opaque: set[str] = set()
        self._objects: dict[int, tuple[int, Any]] = {}
        self._definitions: list[Any] = []

    def read(self, score: Any) -> None:
        """Hash a score and all that it names."""
        self._add(score)
        for definition in self._definitions:  # grows meanwhile; a loop, as recursion could be too deep
            self._try(self._add_source, definition)

    def _add(self, value: Any) -> None:
        """Hash a value; an object that was read before is hashed as its number."""
        if isinstance(value, _PLAIN):
            self._note(type(value).__name__, value)
        elif id(value) in self._objects:
            self._note("again", self._objects[id(value)][0])
        else:
            self._objects[id(value)] = len(self._objects), value  # kept alive, or another could get its id
            self._note(type(value).__name__)
            self._try(self._add_object, value)

    def _try(self, add: Callable[[Any], None], value: Any) -> None:
        try:
            add(value)
        except Exception:  # attributes of foreign objects may raise anything
            self._note("opaque", _name(value))
            self.opaque.add(_name(value))

    def _note(self, *words: object) -> None:
        self.content = digest(self.content, *(repr(word).encode() for word in words))

    def _add_object(self, value: Any) -> None:
        if isinstance(value, types.ModuleType):
            self._note(value.__name__)
        elif isinstance(value, type | types.FunctionType):
            self._definitions.append(value)
        elif isinstance(value, torch.Tensor):
            self._note(digest(value))
        elif isinstance(value, nn.Module):
            self._add_network(value)
        elif isinstance(value, dict | list | tuple | set | frozenset):
            self._add_items(value)
        else:
            self._add_stored(value)

    def _add_items(self, values: Any) -> None:
        self._note(len(values))
        if isinstance(values, set | frozenset):
            values = sorted(values, key=repr)
        for item in values.items() if isinstance(values, dict) else values:
            self._add(item)

    def _add_network(self, network: nn.Module) -> None:
        for name, module in network.named_modules():
            own = {key: held for key, held in vars(module).items() if key[0] != "_" and key != "training"}
            self._add((name, type(module), own))
        self._add(dict(network.state_dict()))

    def _add_stored(self, value: Any) -> None:
        reduce = copyreg.dispatch_table.get(type(value))
        stored: Any = reduce(value) if reduce else value.__reduce_ex__(4)
        if isinstance(stored, tuple):  # function, arguments, state, items of a list, items of a dict
            self._add([*stored[:3], *(list(items or ()) for items in stored[3:5])])
        else:  # a global's name; functools.lru_cache keeps the function in __wrapped__
            self._add((stored, getattr(value, "__wrapped__", None)))

    def _add_source(self, value: Any) -> None:
        if not _is_users(value):
            self._note(_name(value))
            self._add(vars(value).get("__wrapped__"))  # the user's function inside torch.no_grad and the like
            return
        node = _node_of(value)
        self._note(ast.unparse(node))
        scope = _scope_of(value)
        for name in sorted(_names_in(node)):
            self._add((name, _resolved(name, scope)))
        if isinstance(value, types.FunctionType):
            self._add((value.__defaults__, value.__kwdefaults__, vars(value)))


def _name(value: Any) -> str:
    named = value if isinstance(value, type | types.FunctionType) else type(value)
    return f"{named.__module__}.{named.__qualname__}"


def _is_users(value: Any) -> bool:
    """Whether a function or class is in a file of the user's: not Python's, ours or installed."""
    try:
        file = Path(inspect.getfile(value))
    except TypeError:  # written in C
        return False
    ours = str(value.__module__).partition(".")[0] in _OURS
    installed = _PACKAGES & set(file.parts) or Path(os.__file__).parent in file.parents
    return not (ours or installed or file.name.startswith("<frozen"))


class _WithoutDocstrings(ast.NodeTransformer):
    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        return None if isinstance(node.value, ast.Constant) else node


_Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


@functools.lru_cache(maxsize=16)
def _definitions_in(source: str) -> dict[int, list[_Definition]]:
    """Return the functions and classes of a file by their first lines."""
    by_line: dict[int, list[_Definition]] = {}
    for node in ast.walk(_WithoutDocstrings().visit(ast.parse(source))):
        if isinstance(node, _Definition):
            first = min(part.lineno for part in (node, *getattr(node, "decorator_list", ())))
            by_line.setdefault(first, []).append(node)
    return by_line


def _node_of(value: Any) -> _Definition:
    """Return the definition of a function or class in its file."""
    lines, before = inspect.findsource(value)
    name = value.__name__ if isinstance(value, type) else value.__code__.co_name
    for node in _definitions_in("".join(lines)).get(before + 1, ()):
        if isinstance(node, ast.Lambda):
            body = (node.body.lineno, node.body.end_lineno, node.body.col_offset, node.body.end_col_offset)
            if name == "<lambda>" and body in value.__code__.co_positions():
                return node
        elif node.name == name:
            return node
    raise OSError(f"there is no source of {_name(value)}")


def _scope_of(value: Any) -> Mapping[str, Any]:
    if isinstance(value, type):
        return vars(sys.modules[value.__module__])
    closed = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
    return {**value.__globals__, **{name: cell.cell_contents for name, cell in closed}}


def _names_in(node: ast.AST) -> set[str]:
    """Return the names that a definition uses and does not assign, with attributes: `x`, `x.y`."""
    nodes = list(ast.walk(node))
    own = {node.arg for node in nodes if isinstance(node, ast.arg)}
    own |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    used = {ast.unparse(node) for node in nodes if isinstance(node, ast.Name | ast.Attribute)}
    return {name for name in used if name.replace(".", "").isidentifier() and name.split(".")[0] not in own}


def _resolved(name: str, scope: Mapping[str, Any]) -> Any:
    """Return the value of a name; attributes are looked up in modules alone."""
    first, *rest = name.split(".")
    value = scope.get(first)
    for attribute in rest:
        value = getattr(value, attribute, None) if isinstance(value, types.ModuleType) else None
    return value


Score = Callable[[nn.Module], Any]
"""From a network to a number, higher is better, or to one for each input, whose mean is the score."""


class ScoreEvaluator(RememberingEvaluator):
    """Scores plans by a function from a network to a number; equal plans are scored once.

    The function gets one static network with the plan's weights written into it, in evaluation mode; it must
    neither change nor keep the network.
    """

    def __init__(
        self, model: nn.Module, library: FitLibrary, problem: SearchProblem, score: Score, example: Inputs
    ) -> None:
        super().__init__(problem)
        self.score = score
        self.network = ScoringNetwork(
            model, library, problem.sites, Precision(model_device(model), torch.float32), example
        )
        self.network.model.register_forward_hook(_contiguous)

    @cached_property
    def fingerprint(self) -> str:
        """The function's identity; equal for searches that score alike."""
        return score_identity(self.score)

    def value(self, choices: Choices) -> float:
        """Return the score of the network under a plan; see `evaluate` for the errors."""
        self.network.write(choices)
        return scored(self.score, self.network.model, f"the plan with candidates {list(choices)}")


def check_score(score: Score, model: nn.Module) -> None:
    """Call a score on a copy of the dense network, so that it fails before layers are fitted."""
    scored(score, copied(model).requires_grad_(False), "the dense network")


def scored(score: Score, network: nn.Module, what: str) -> float:
    """Return a network's score as one number."""
    return checked_score(answer(score, network), what)


def answer(score: Score, network: nn.Module) -> Any:
    """Call a score on a network; return its answer, a number or one for each input."""
    network.eval()  # a score may have left it in training mode
    handle = network.register_forward_pre_hook(_copied, with_kwargs=True)
    try:
        with torch.no_grad():
            return score(network)
    finally:
        handle.remove()


def values_of_inputs(value: object) -> np.ndarray | None:
    """Return the scores of single inputs, shape (N,) float64; None where a score is one number."""
    values = value.detach().cpu().numpy() if isinstance(value, Tensor) else value
    if not isinstance(values, np.ndarray) or values.ndim != 1 or len(values) < 2:
        return None
    return values.astype(np.float64) if values.dtype.kind in "fiub" else None


def checked_score(value: object, what: str) -> float:
    """Return a score as a finite float; `what` names the network in errors."""
    refusal = (
        f"score returned a {type(value).__name__} for {what}; it must return one number, or an array of "
        "one for each input"
    )
    values = values_of_inputs(value)
    if values is not None:
        value = float(values.mean())
    if isinstance(value, str):  # float() would read "0.5"
        raise ConfigError(refusal)
    try:
        number = float(cast(SupportsFloat, value))
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(refusal) from error
    if not math.isfinite(number):
        raise NonFiniteError(f"score returned {number} for {what}; it must return a finite number")
    return number


def _copied(_: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Copy a network's inputs, since it may change them in place and the next plan needs the same ones."""
    return tree_map_only(Tensor, torch.clone, (inputs, keywords))


def _contiguous(_: nn.Module, __: object, output: object) -> object:
    """Return outputs in the memory order of the dense network's, on which `view` works."""
    return tree_map_only(Tensor, Tensor.contiguous, output)
