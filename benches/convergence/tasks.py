"""The two tasks: their data, their networks, and what a rank sees of them.

Both need nothing that a machine with Python and scikit-learn lacks. Networks are smooth and have no buffers, so that a
rounded bit does not send two trainings different ways, and all that ranks exchange is gradients.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

Pair = tuple[Tensor, Tensor]  # what a network is given, and what it should say

# Modules of the standard library that every Python since 3.11 has as one long source file.
TRAINED_ON = (
    "argparse ast bdb calendar cmd codecs configparser contextlib copy csv dataclasses difflib dis doctest enum"
    " fractions ftplib functools getopt gettext gzip heapq imaplib ipaddress locale mailbox mimetypes netrc optparse"
    " os pdb pickle platform plistlib poplib pprint queue random selectors shlex shutil smtplib socket socketserver"
    " ssl statistics string subprocess tarfile tempfile textwrap threading timeit tokenize trace traceback typing"
    " uuid warnings weakref"
)
HELD_OUT = "inspect bisect cProfile fileinput filecmp glob pyclbr sched stat tabnanny pickletools"
PRINTED = "\n" + "".join(map(chr, range(32, 127)))
CONTEXT = 64


class Digits:
    """Handwritten digits of 8 × 8 pixels, for a small convolutional network."""

    held = 360

    def __init__(self) -> None:
        from sklearn.datasets import load_digits

        images, labels = load_digits(return_X_y=True)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        self.x = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8)[order] / 8 - 1
        self.y = torch.tensor(labels)[order]

    def network(self) -> nn.Module:
        convolutions = [nn.Conv2d(1, 16, 3, padding=1), nn.GELU(), nn.Conv2d(16, 32, 3, padding=1), nn.GELU()]
        return nn.Sequential(
            *convolutions, nn.AvgPool2d(2), nn.Flatten(), nn.Linear(512, 64), nn.GELU(), nn.Linear(64, 10)
        )

    def shard(self, rank: int, world: int) -> Tensor:
        """What a rank has where shards are unequal: larger ones for later ranks, half of each sorted by digit."""
        known = torch.arange(self.held, len(self.y))
        by_digit = known[::2][self.y[known[::2]].argsort(stable=True)]
        return torch.cat([uneven_part(by_digit, rank, world), uneven_part(known[1::2], rank, world)])

    def batch(self, size: int, lot: torch.Generator, shard: Tensor | None) -> Pair:
        known = torch.arange(self.held, len(self.y)) if shard is None else shard
        chosen = known[torch.randint(0, len(known), (size,), generator=lot)]
        return self.x[chosen], self.y[chosen]

    def held_out(self, part: int, parts: int) -> Pair:
        mine = slice(part, self.held, parts)
        return self.x[mine], self.y[mine]


class Block(nn.Module):
    """Attention that looks back only, and a small network for each place."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.join = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.think = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        many, long, width = x.shape
        parts = self.attend(self.before(x)).view(many, long, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        x = x + self.join(seen.transpose(1, 2).reshape(x.shape))
        return x + self.think(self.between(x))


class Transformer(nn.Module):
    """Says the next character after each one."""

    def __init__(self, symbols: int, width: int = 64, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.symbols = nn.Embedding(symbols, width)
        self.places = nn.Parameter(torch.randn(CONTEXT, width) / 10)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)), nn.LayerNorm(width))
        self.head = nn.Linear(width, symbols)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.symbols(x) + self.places)).transpose(1, 2)


class Characters:
    """The standard library's sources, character by character, for a small transformer. Other modules are held out."""

    held = 128

    def __init__(self) -> None:
        self.known, unknown = read_sources(TRAINED_ON), read_sources(HELD_OUT)
        starts = torch.linspace(0, len(unknown) - CONTEXT - 1, self.held).long()
        self.unknown = windows(unknown, starts)

    def network(self) -> nn.Module:
        return Transformer(len(PRINTED))

    def shard(self, rank: int, world: int) -> Tensor:
        """What a rank has where shards are unequal: modules of its own, more of them for later ranks."""
        return uneven_part(self.known, rank, world)

    def batch(self, size: int, lot: torch.Generator, shard: Tensor | None) -> Pair:
        known = self.known if shard is None else shard
        return windows(known, torch.randint(0, len(known) - CONTEXT - 1, (size,), generator=lot))

    def held_out(self, part: int, parts: int) -> Pair:
        x, y = self.unknown
        return x[part::parts], y[part::parts]


def uneven_part(values: Tensor, rank: int, world: int) -> Tensor:
    """A piece of some values, r + 1 times as long for rank r as for rank 0."""
    ends = [len(values) * part * (part + 1) // (world * (world + 1)) for part in range(world + 1)]
    return values[ends[rank] : ends[rank + 1]]


def read_sources(modules: str) -> Tensor:
    """The sources of these modules, one after the other, as numbers of characters."""
    number = {character: index for index, character in enumerate(PRINTED)}
    text = []
    for name in modules.split():
        found = importlib.util.find_spec(name)
        if found is None or not found.origin or not found.origin.endswith(".py"):
            continue  # a Python without this source; the others are enough
        text.append(Path(found.origin).read_text(encoding="utf-8"))
    return torch.tensor([number.get(character, number["?"]) for character in "\n".join(text)], dtype=torch.uint8)


def windows(text: Tensor, starts: Tensor) -> Pair:
    places = starts[:, None] + torch.arange(CONTEXT + 1)
    both = text[places].long()
    return both[:, :-1], both[:, 1:]


KINDS = {"digits": Digits, "characters": Characters}


def loss(model: nn.Module, pair: Pair) -> Tensor:
    return functional.cross_entropy(model(pair[0]), pair[1])


def held_out_loss(model: nn.Module, pair: Pair) -> float:
    model.eval()
    with torch.no_grad():
        value = loss(model, pair).item()
    model.train()
    return value
