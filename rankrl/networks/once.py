"""What is found out of a network once, however often it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar
from weakref import WeakKeyDictionary

_Network = TypeVar("_Network")
_Answer = TypeVar("_Answer")


def once_per_network(function: Callable[[_Network], _Answer]) -> Callable[[_Network], _Answer]:
    """Return a function that calls another one once for every network and remembers its answer.

    Networks are told apart as objects and not kept alive. A network must not change between calls.
    """
    answers: WeakKeyDictionary[_Network, _Answer] = WeakKeyDictionary()

    def answer(network: _Network) -> _Answer:
        if network not in answers:
            answers[network] = function(network)
        return answers[network]

    return answer
