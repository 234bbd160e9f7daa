"""The state of a search between two episodes, in one file, so that a killed search goes on exactly.

One .safetensors file holds the selector's arrays and, as JSON in its metadata, everything else: the rows, the
states of the random generators, and a description of the search that it belongs to. It is replaced
atomically, so that it always holds whole episodes; nothing in it is pickled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from rankrl.errors import CheckpointError
from rankrl.plan_search.scores.history import EpisodeRow
from rankrl.state_file import damaged_state, read_state, write_state

STATE_FILE = "search.safetensors"
_VERSION = 1


@dataclass(frozen=True)
class SearchState:
    """How far a search has come."""

    identity: Mapping[str, Any]
    rows: tuple[EpisodeRow, ...]
    seconds: float
    tensors: Mapping[str, Tensor]
    values: Mapping[str, Any]

    def save(self, path: Path) -> None:
        """Write the state, atomically."""
        content = {
            "identity": dict(self.identity),
            "rows": [vars(row) for row in self.rows],
            "seconds": self.seconds,
            "values": dict(self.values),
        }
        write_state(path, self.tensors, content, _VERSION)

    @classmethod
    def load(cls, path: Path) -> SearchState:
        """Read a state."""
        tensors, content = read_state(path, _VERSION, "search state")
        try:
            return cls(
                content["identity"],
                tuple(EpisodeRow(**row) for row in content["rows"]),
                float(content["seconds"]),
                tensors,
                content["values"],
            )
        except (KeyError, ValueError, TypeError) as error:
            raise damaged_state(path, "search state", error) from error

    def check(self, identity: Mapping[str, Any], path: Path) -> None:
        """Refuse to go on with a search that is not the one of `identity`."""
        for key in self.differing(identity):
            raise CheckpointError(
                f"{path} belongs to another search: {key} was {self.identity.get(key)!r}, is now "
                f"{dict(identity).get(key)!r}. Use the same settings to resume, the number of threads too "
                "(OMP_NUM_THREADS: sums, and so fits, differ in their last bits), with a budget in time the "
                "machine and the cache too (RANKRL_CACHE: it keeps the times), or name another folder."
            )

    def differing(self, identity: Mapping[str, Any]) -> list[str]:
        """Return the names of values in which the state's search differs from the one of `identity`."""
        now = json.loads(json.dumps(dict(identity)))
        return [key for key in sorted({*now, *self.identity}) if now.get(key) != self.identity.get(key)]
