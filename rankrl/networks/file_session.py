"""A file in any runtime, for what takes a session of onnxruntime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnxruntime

from rankrl.onnx.runtimes import Session


class FileSession:
    """An open file that answers as onnxruntime's session of the same network would."""

    def __init__(self, session: Session, original: onnxruntime.InferenceSession) -> None:
        self._session = session
        self.get_inputs, self.get_outputs = original.get_inputs, original.get_outputs

    def run(
        self, names: Sequence[str] | None, feed: Mapping[str, Any], _options: Any = None, /
    ) -> list[np.ndarray[Any, Any]]:
        """Return outputs for one batch, all of them where none is named."""
        outputs = dict(
            zip((entry.name for entry in self.get_outputs()), self._session.run(feed), strict=True)
        )
        return [outputs[name] for name in names or outputs]
