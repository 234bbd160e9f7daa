"""Random crops and flips for a whole batch at once, without any work per image."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from rankrl.errors import ConfigError


@dataclass(frozen=True)
class Augmentation:
    """Random crop of the zero-padded image and random horizontal flip (He et al. 2016, section 4.2)."""

    padding: int = 4
    flip: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.padding, bool) or not isinstance(self.padding, int) or self.padding < 0:
            raise ConfigError(
                f"augmentation padding must be a whole number of pixels >= 0, got {self.padding!r}"
            )

    def draw(self, count: int, generator: torch.Generator) -> Crops:
        """Draw what happens to each of `count` images, from a CPU generator."""
        return Crops(
            top=torch.randint(2 * self.padding + 1, (count,), generator=generator),
            left=torch.randint(2 * self.padding + 1, (count,), generator=generator),
            mirrored=torch.rand(count, generator=generator) < (0.5 if self.flip else 0.0),
            padding=self.padding,
        )


@dataclass(frozen=True, eq=False)
class Crops:
    """What happens to each image of a batch.

    Shapes: top (N,), left (N,), mirrored (N,).
    """

    top: Tensor
    left: Tensor
    mirrored: Tensor
    padding: int

    def to(self, device: torch.device) -> Crops:
        """Return the same draws on `device`."""
        return Crops(self.top.to(device), self.left.to(device), self.mirrored.to(device), self.padding)

    def part(self, start: int, stop: int) -> Crops:
        """Return the draws of images `start` to `stop` (excluded)."""
        return Crops(self.top[start:stop], self.left[start:stop], self.mirrored[start:stop], self.padding)

    def apply(self, x: Tensor) -> Tensor:
        """Crop and mirror a batch.

        Shapes: x (N, C, H, W); returns (N, C, H, W).
        """
        count, channels, height, width = x.shape
        padded = F.pad(x.permute(0, 2, 3, 1), (0, 0, *([self.padding] * 4)))
        rows = self.top[:, None] + torch.arange(height, device=x.device)
        columns = torch.arange(width, device=x.device).expand(count, width)
        columns = torch.where(self.mirrored[:, None], width - 1 - columns, columns) + self.left[:, None]
        # One gather of whole pixels by their flat index is 2-4 times as fast as indexing with three tensors.
        image = torch.arange(count, device=x.device)[:, None, None]
        pixel = (image * padded.shape[1] + rows[:, :, None]) * padded.shape[2] + columns[:, None, :]
        cropped = padded.reshape(-1, channels).index_select(0, pixel.flatten())
        return cropped.view(count, height, width, channels).permute(0, 3, 1, 2)
