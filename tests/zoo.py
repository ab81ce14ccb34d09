"""Small models that between them have what breaks data parallelism, and how to train them.

Every model is float64, deterministic and free of dropout, so that training on several ranks can be
compared with one process on the concatenated batch to rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS = 4  # per rank and step


class MLP(nn.Module):
    """Odd sizes, a scalar parameter, an empty one."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(13, 37)
        self.down = nn.Linear(37, 5)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x))) * self.scale + self.nothing.sum()


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(b, t, c))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class TiedGPT(nn.Module):
    """Tied embeddings; a vocabulary that no world size but 1 divides."""

    def __init__(self, vocabulary: int = 23, width: int = 16, layers: int = 2) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.place = nn.Embedding(12, width)
        self.blocks = nn.ModuleList(Block(width, 2) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.place.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class ConvNet(nn.Module):
    """BatchNorm buffers; the weights of one convolution are channels-last in memory.

    No biases before BatchNorm: their gradient is rounding noise, which Adam would amplify.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.conv2, self.norm2 = nn.Conv2d(6, 9, 3, stride=2, bias=False), nn.BatchNorm2d(9)
        self.head = nn.Linear(9, 5)
        self.conv2.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm1(self.conv1(x)))
        x = torch.relu(self.norm2(self.conv2(x)))
        return self.head(x.mean((2, 3)))


class PartlyUsed(nn.Module):
    """A frozen layer, and a layer and a parameter that no forward uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.frozen, self.last = nn.Linear(13, 21), nn.Linear(21, 21), nn.Linear(21, 5)
        self.frozen.requires_grad_(False)
        self.unused = nn.Linear(7, 3)
        self.spare = nn.Parameter(torch.ones(11))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.frozen(torch.tanh(self.first(x)))))


class ReusedModule(nn.Module):
    """One layer applied three times; use order is not registration order."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.shared, self.first = nn.Linear(17, 5), nn.Linear(17, 17), nn.Linear(13, 17)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(3):
            x = x + torch.tanh(self.shared(x))
        return self.last(x)


class Broken(nn.Module):
    """A graph break in the middle, with a parameter that only the eager part uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(13, 19), nn.Linear(19, 5)
        self.both = nn.Parameter(torch.ones(19))
        self.eager = nn.Parameter(torch.full((19,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x)) * self.both
        x = self._outside(x)
        return self.last(x * self.both)

    @torch._dynamo.disable
    def _outside(self, x: Tensor) -> Tensor:
        return x * self.eager + self.both


def _rows(seed: int, count: int) -> Tensor:
    return torch.randn(
        count, 13, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )


def _tokens(seed: int, count: int) -> Tensor:
    return torch.randint(0, 23, (count, 9), generator=torch.Generator().manual_seed(seed))


def _images(seed: int, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 3, 8, 8, dtype=torch.float64, generator=generator)


def _square_loss(output: Tensor, batch: Tensor) -> Tensor:
    target = batch.flatten(1)[:, :5].sin()
    return F.mse_loss(output, target)


def _next_token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


@dataclass(frozen=True)
class Case:
    """A model with its data (``batch(seed, rows)``) and loss."""

    build: Callable[[], nn.Module]
    batch: Callable[[int, int], Tensor]
    loss: Callable[[Tensor, Tensor], Tensor]
    per_rank_statistics: bool = False

    def model(self, seed: int = 0) -> nn.Module:
        """A freshly initialised model in float64."""
        torch.manual_seed(seed)
        return self.build().double()


ZOO: dict[str, Case] = {
    "mlp": Case(MLP, _rows, _square_loss),
    "gpt": Case(TiedGPT, _tokens, _next_token_loss),
    "conv": Case(ConvNet, _images, _square_loss, per_rank_statistics=True),
    "partly_used": Case(PartlyUsed, _rows, _square_loss),
    "reused": Case(ReusedModule, _rows, _square_loss),
    "broken": Case(Broken, _rows, _square_loss),
}
