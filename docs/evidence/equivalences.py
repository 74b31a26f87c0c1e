#!/usr/bin/env python
"""The exact statements of docs/what-lns-is.md, each as two runs that agree or do not.

    python docs/evidence/equivalences.py

Two models of 4 blocks (RMSNorm, attention, SwiGLU, fp64) see the same batches for 100 steps of AdamW with decay.
Printed is the largest difference of their losses. It ends with an error where a pair that must agree differs by more
than 1e-10, or one that must not agrees to 1e-6.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

WIDTH, BLOCKS, VOCABULARY, RATE, DECAY, EPS = 16, 4, 11, 1e-2, 0.1, 1e-8
#: Where block l multiplies by s(l): at what reads the norms (q and k, v, gate and up) or at the attention branch.
PLACES = {"lns": ("qk", "v", "ff"), "value": ("v", "ff"), "branch": ("branch", "ff"), "preln": ()}


class Block(nn.Module):
    def __init__(self, number: int, form: str, bias: bool, qk_norm: bool, undo: bool) -> None:
        super().__init__()
        s = number**-0.5
        self.at = {place: s if place in PLACES[form] else 1.0 for place in ("qk", "v", "ff", "branch")}
        self.s, self.qk_norm, self.scale = s, qk_norm, WIDTH**-0.5 * (number if undo else 1)
        self.gains = nn.ParameterList(nn.Parameter(torch.ones(WIDTH)) for _ in range(2))
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=bias) for _ in range(4))
        self.gate, self.up = (nn.Linear(WIDTH, 2 * WIDTH, bias=bias) for _ in range(2))
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.rms_norm(x, (WIDTH,), self.gains[0], 1e-6)
        q, k, v = self.q(self.at["qk"] * y), self.k(self.at["qk"] * y), self.v(self.at["v"] * y)
        if self.qk_norm:  # without an epsilon, as the statement has it
            q, k = (h / h.square().mean(-1, keepdim=True).sqrt() for h in (q, k))
        x = x + self.at["branch"] * self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale))
        y = self.at["ff"] * F.rms_norm(x, (WIDTH,), self.gains[1], 1e-6)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Model(nn.Module):
    def __init__(self, form: str, bias: bool = False, qk_norm: bool = False, undo: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.blocks = nn.ModuleList(Block(number, form, bias, qk_norm, undo) for number in range(1, BLOCKS + 1))
        self.double()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(F.rms_norm(x, (WIDTH,), eps=1e-6))


def train(model: Model, owned: str = "", rate: float = 1.0, sgd: bool = False) -> list[float]:
    """Losses of 100 steps; ``owned`` parameters (``gains`` or ``readers``) start at s and learn at rate s**rate."""
    groups = [{"params": [p for n, p in model.named_parameters() if not _is(owned, n)]}]
    for block in model.blocks if owned else ():
        mine = [p for n, p in block.named_parameters() if _is(owned, n)]
        with torch.no_grad():
            for parameter in mine:
                parameter *= block.s
        groups.append({"params": mine, "lr": RATE * block.s**rate})
        if not sgd:
            groups[-1] |= {"weight_decay": DECAY / block.s, "eps": EPS / block.s}
    optimizer = torch.optim.SGD(groups, RATE) if sgd else torch.optim.AdamW(groups, RATE, eps=EPS, weight_decay=DECAY)
    losses = []
    for step in range(100):
        ids = torch.randint(0, VOCABULARY, (4, 12), generator=torch.Generator().manual_seed(step)).sort(-1).values
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _is(owned: str, name: str) -> bool:
    parts = {"gains": ("gains",), "readers": ("q", "k", "v", "gate", "up"), "": ()}[owned]
    return any(part in parts for part in name.split("."))


#: statement, whether the two agree, first run, second run
STATEMENTS: list[tuple[str, bool, Callable[[], list[float]], Callable[[], list[float]]]] = [
    ("LNS = gains from s, rate s x lr", True, lambda: train(Model("lns")), lambda: train(Model("preln"), "gains")),
    ("LNS = q, k, v, gate, up from s, rate s x lr", True,
     lambda: train(Model("lns")), lambda: train(Model("preln"), "readers")),
    ("SGD: LNS = gains from s, rate s^2 x lr", True,
     lambda: train(Model("lns"), sgd=True), lambda: train(Model("preln"), "gains", 2.0, sgd=True)),
    ("SGD: rate s x lr is not enough", False,
     lambda: train(Model("lns"), sgd=True), lambda: train(Model("preln"), "gains", sgd=True)),
    ("lnsvalue = LNS with the softmax scale x l", True,
     lambda: train(Model("value")), lambda: train(Model("lns", undo=True))),
    ("lnsvalue = factor on v = factor on the attention branch", True,
     lambda: train(Model("value")), lambda: train(Model("branch"))),
    ("with biases v and the branch differ", False,
     lambda: train(Model("value", bias=True)), lambda: train(Model("branch", bias=True))),
    ("with QK-norm LNS = lnsvalue", True,
     lambda: train(Model("lns", qk_norm=True)), lambda: train(Model("value", qk_norm=True))),
    ("with QK-norm and biases they differ", False,
     lambda: train(Model("lns", True, True)), lambda: train(Model("value", True, True))),
]  # fmt: skip


def main() -> None:
    wrong = []
    for statement, agree, one, other in STATEMENTS:
        first, second = one(), other()
        gap = max(abs(a - b) for a, b in zip(first, second, strict=True))
        if not (gap < 1e-10 if agree else gap > 1e-6):
            wrong.append(statement)
        print(f"{statement:58}  {gap:.0e}  (loss {first[0]:.2f} -> {first[-1]:.2f})")
    x = torch.randn(2, 100_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for s in (0.5, 0.354, 0.204):
        ratio = (F.silu(s * x[0]) * s * x[1]).std() / (F.silu(x[0]) * x[1]).std()
        print(f"SwiGLU of normal gate and up x {s}: standard deviation x {ratio:.3f}; s^2 = {s * s:.3f}")
    print(f"mean of 1/sqrt(l) over 24 blocks: {sum(n**-0.5 for n in range(1, 25)) / 24:.3f}")
    if wrong:
        raise SystemExit(f"not as stated: {'; '.join(wrong)}")


if __name__ == "__main__":
    main()
