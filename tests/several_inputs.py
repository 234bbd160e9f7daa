"""Networks whose inputs are no images, for tests."""

import torch
from torch import Tensor, nn

WORDS, LENGTH = 40, 9


class TextClassifier(nn.Module):
    """Takes integer tokens (N, LENGTH)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 12)
        self.head = WordHead()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens))


class WordHead(nn.Module):
    """What follows the embedding: takes (N, LENGTH, 12)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(12, 24), nn.Linear(24, 24), nn.Linear(24, 3)

    def forward(self, words: Tensor) -> Tensor:
        return self.last(torch.relu(self.second(torch.relu(self.first(words)))).mean(1))


class TwoInputs(nn.Module):
    """Takes images (N, 3, 8, 8) and numbers (N, 5)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.table = nn.Conv2d(3, 16, 3), nn.Linear(5, 16)
        self.mix, self.last = nn.Linear(32, 24), nn.Linear(24, 3)

    def forward(self, image: Tensor, numbers: Tensor) -> Tensor:
        seen = torch.relu(self.conv(image)).mean((2, 3))
        return self.last(torch.relu(self.mix(torch.cat([seen, torch.relu(self.table(numbers))], 1))))


class OneInput(nn.Module):
    """The same network behind one flat tensor that holds both inputs."""

    def __init__(self, network: TwoInputs) -> None:
        super().__init__()
        self.network = network

    def forward(self, flat: Tensor) -> Tensor:
        return self.network(flat[:, :192].reshape(-1, 3, 8, 8), flat[:, 192:])
