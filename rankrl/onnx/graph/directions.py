"""Random directions in place of all channels, and sketches instead of all outputs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from rankrl.onnx.graph_edits import Array

SKETCHED = 256
"""Numbers that are kept of the outputs for one input."""


@dataclass(frozen=True)
class Directions:
    """Directions in which the C channels of a node are moved: each channel by itself, or K random ones.

    With K orthonormal directions U, uniformly distributed, and a symmetric matrix G (C, C),

        E[U U' G U U'] = a G + b tr(G) I,    b = K (C - K) / ((C - 1) C (C + 2)),
                                             a = K (K + 2) / (C (C + 2)) - b,

    which follows from G = I, where both sides are K / C, and G = e e', for a unit vector e, where e'UU'e has
    a beta distribution with K / 2 and (C - K) / 2. So G is estimated from U' G U without bias, and exactly
    where K = C.
    """

    matrix: Array

    @classmethod
    def drawn(cls, channels: int, count: int, generator: np.random.Generator) -> Directions:
        """Draw directions; each channel by itself where there are as many as channels."""
        if count >= channels:
            return cls(np.eye(channels, dtype=np.float32))
        drawn = generator.standard_normal((channels, count), dtype=np.float32)
        matrix, triangle = np.linalg.qr(drawn)
        return cls(matrix * np.sign(np.diagonal(triangle)))  # uniform with these signs (Mezzadri 2007)

    def sensitivities(self, reactions: torch.Tensor) -> torch.Tensor:
        """Return an estimate of J'J for every input, shape (inputs, channels, channels), float64."""
        channels, count = self.matrix.shape
        if count == channels:
            return (reactions.mT @ reactions).double()
        rows = reactions @ torch.from_numpy(self.matrix).T
        products = (rows.mT @ rows).double()
        b = count * (channels - count) / ((channels - 1) * channels * (channels + 2))
        a = count * (count + 2) / (channels * (channels + 2)) - b
        traces = products.diagonal(dim1=1, dim2=2).sum(1) * channels / count
        products.diagonal(dim1=1, dim2=2).sub_(b * traces[:, None])
        return products / a


class Sketch:
    """A random projection S of the outputs for one input on few numbers, with E[S'S] = I.

    Every number is added, with a random sign, to one of 256 sums, equally many to each (Weinberger et al.,
    "Feature Hashing for Large Scale Multitask Learning", ICML 2009; a sparse case of the random signs of
    Achlioptas 2003). Products of rows keep their expectation, with a standard deviation of at most about
    sqrt(2 / 256) of the product of their lengths. Few numbers stay as they are.
    """

    def __init__(self, numbers: int, generator: np.random.Generator, kept: int = SKETCHED) -> None:
        self.kept = min(kept, numbers)
        self._order, self._signs = None, np.zeros(0, np.float32)
        if numbers > kept:
            self._order = generator.permutation(numbers)
            self._signs = generator.choice(np.array([-1, 1], np.float32), size=numbers)

    def of(self, rows: Array) -> Array:
        """Return the sketches of rows (inputs, numbers), shape (inputs, `kept`)."""
        if self._order is None:
            return rows
        signed = rows[:, self._order] * self._signs
        whole = np.pad(signed, ((0, 0), (0, -rows.shape[1] % self.kept)))
        return whole.reshape(len(rows), -1, self.kept).sum(1)
