"""Small models of the kinds that packages such as timm, vit-pytorch, flash-attn and diffusers hold."""

import threading

import torch
from torch import nn
from torch.nn import functional as F

D = 32


def attention(qkv):
    return F.scaled_dot_product_attention(*qkv.chunk(3, -1))


class Block(nn.Module):
    """A Pre-LN block as in a vision transformer. :param norm: makes a norm."""

    def __init__(self, d=D, norm=nn.LayerNorm):
        super().__init__()
        self.n1, self.n2 = norm(d), norm(d)
        self.qkv, self.o, self.up, self.down = (
            nn.Linear(d, 3 * d),
            nn.Linear(d, d),
            nn.Linear(d, 2 * d),
            nn.Linear(2 * d, d),
        )

    def attn(self, x):
        return self.o(attention(self.qkv(x)))

    def mlp(self, x):
        return self.down(F.gelu(self.up(x)))

    def forward(self, x):
        x = x + self.attn(self.n1(x))
        return x + self.mlp(self.n2(x))


class Stack(nn.Module):
    """Blocks in a list. :param make: makes a block."""

    def __init__(self, make=Block, count=4):
        super().__init__()
        self.layers, self.out = nn.ModuleList([make() for _ in range(count)]), nn.LayerNorm(D)

    def forward(self, x):
        for block in self.layers:
            x = block(x)
        return self.out(x)


class Fused(nn.Module):
    """One norm and one projection for both branches, as in PaLM."""

    def __init__(self):
        super().__init__()
        self.norm, self.fused = nn.LayerNorm(D), nn.Linear(D, 7 * D, bias=False)
        self.o, self.down = nn.Linear(D, D, bias=False), nn.Linear(2 * D, D, bias=False)

    def forward(self, x):
        qkv, gate, up = self.fused(self.norm(x)).split([3 * D, 2 * D, 2 * D], -1)
        return x + self.o(attention(qkv)) + self.down(F.silu(gate) * up)


class OneOutput(nn.Module):
    """One norm and one output matrix for both branches together, as timm's ``DiffParallelScalingBlock``.

    :param branches: the names of the branches that the block has.
    """

    def __init__(self, branches=("attention", "mlp")):
        super().__init__()
        self.branches, self.norm, self.fused = branches, nn.LayerNorm(D), nn.Linear(D, 5 * D)
        self.keys, self.act, self.out = nn.LayerNorm(D), nn.GELU(), nn.Linear(3 * D, D)

    def forward(self, x):
        q, k, v, up = self.fused(self.norm(x)).split([D, D, D, 2 * D], -1)
        mixed, hidden = F.scaled_dot_product_attention(q, self.keys(k), v), self.act(up)
        mixed = mixed if "attention" in self.branches else torch.zeros_like(mixed)
        return x + self.out(torch.cat([mixed, hidden if "mlp" in self.branches else torch.zeros_like(hidden)], -1))


class Wrapped(nn.Module):
    """A block with one norm in a wrapper, as litgpt's Falcon under a wrapper of its user."""

    def __init__(self):
        super().__init__()
        self.inner = Fused()

    def forward(self, x):
        return self.inner(x)


class Scales(nn.Module):
    """Both branches are multiplied by a factor for each channel, as timm's ``ParallelScalingBlock`` with LayerScale."""

    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.o = nn.LayerNorm(D), nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.up, self.down, self.gamma = nn.Linear(D, D), nn.Linear(D, D), nn.Parameter(torch.full((D,), 0.1))

    def forward(self, x):
        h = self.norm(x)
        return x + self.gamma * (self.o(attention(self.qkv(h))) + self.down(F.relu(self.up(h))))


class AttentionAlone(nn.Module):
    """An attention sub-layer. :param parts: the number of its outputs that are added to the stream."""

    def __init__(self, parts=1, projected=True):
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.qkv = nn.ModuleList([nn.Linear(D, 3 * D) for _ in range(parts)])
        self.o = nn.ModuleList([nn.Linear(D, D) if projected else nn.Identity() for _ in range(parts)])

    def forward(self, x):
        h = self.norm(x)
        return x + sum(o(attention(qkv(h))) for qkv, o in zip(self.qkv, self.o, strict=True))


class SharedExperts(nn.Module):
    """A feed-forward sub-layer with two outputs that are added to the stream, as an MoE with a shared expert."""

    def __init__(self):
        super().__init__()
        self.norm, self.one, self.two = nn.LayerNorm(D), nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x):
        h = self.norm(x)
        return x + F.relu(self.one(h)) + F.relu(self.two(h))


class Chunk(nn.ModuleList):
    def forward(self, x):
        for block in self:
            x = block(x)
        return x


class Chunks(nn.Module):
    """Blocks in chunks, padded as DINOv2's. :param sizes: the number of blocks in each chunk."""

    def __init__(self, *sizes):
        super().__init__()
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        self.blocks = nn.ModuleList(
            Chunk([nn.Identity()] * start + [Block() for _ in range(size)])
            for start, size in zip(starts, sizes, strict=True)
        )

    def forward(self, x):
        for chunk in self.blocks:
            x = chunk(x)
        return x


class Stage(nn.Module):
    def __init__(self, width, count):
        super().__init__()
        self.down, self.blocks = nn.LazyLinear(width), nn.Sequential(*(Block(width) for _ in range(count)))

    def forward(self, x):
        return self.blocks(self.down(x))


def stages(*shapes):
    """Stages of other widths, as in Swin. :param shapes: width and number of blocks of each."""
    model = nn.Sequential(*(Stage(*shape) for shape in shapes))
    model(torch.zeros(1, 2, D))
    return model


class Pooled(nn.Module):
    """A stream of shape (batch, channels, height, width), as in PoolFormer."""

    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.GroupNorm(1, D), nn.GroupNorm(1, D)
        self.pool = nn.AvgPool2d(3, 1, 1, count_include_pad=False)
        self.up, self.down = nn.Conv2d(D, 2 * D, 1), nn.Conv2d(2 * D, D, 1)

    def forward(self, x):
        h = self.n1(x)
        x = x + self.pool(h) - h
        return x + self.down(F.gelu(self.up(self.n2(x))))


class PreNorm(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.norm, self.function = nn.LayerNorm(D), function

    def forward(self, x):
        return self.function(self.norm(x))


class Attend(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.o = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x):
        return self.o(attention(self.qkv(x)))


class Pairs(nn.Module):
    """No module runs a block, as in vit-pytorch."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleList([PreNorm(Attend()), PreNorm(nn.Sequential(nn.Linear(D, D), nn.GELU(), nn.Linear(D, D)))])
            for _ in range(4)
        )

    def forward(self, x):
        for attn, ff in self.layers:
            x = x + attn(x)
            x = x + ff(x)
        return x


class Residual(Block):
    """Takes and returns (hidden, residual), whose sum is the stream, as flash-attn's block."""

    def forward(self, hidden, residual=None):
        residual = hidden if residual is None else hidden + residual
        residual = residual + self.attn(self.n1(residual))
        return self.mlp(self.n2(residual)), residual


class ResidualStack(Stack):
    def forward(self, x):
        residual = None
        for block in self.layers:
            x, residual = block(x, residual)
        return self.out(x + residual)


class FunctionalEnd(Block):
    """A feed-forward branch that ends in a norm that is a function. :param gain: of that norm."""

    def __init__(self, gain=False):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(D)) if gain else None

    def mlp(self, x):
        return F.rms_norm(super().mlp(x), (D,), self.gain)


class UnitAttention(Block):
    """An attention branch that ends in a division by its size."""

    def attn(self, x):
        return F.normalize(super().attn(x), dim=-1)


class TwoStreams(nn.Module):
    """Two streams, each with norms of its own. :param joined: by a norm of one that the other reads, as in TNT."""

    def __init__(self, joined=False):
        super().__init__()
        self.one, self.two, self.join = Block(), Block(), nn.Linear(D, D)
        self.join_norm = nn.LayerNorm(D) if joined else nn.Identity()

    def forward(self, x, y):
        x = self.one(x)
        return x, self.two(y + self.join(self.join_norm(x))[:, :5])


class Context(Block):
    """Attention over keys of a second stream, which the block normalizes and returns, as Flux's double blocks."""

    def __init__(self):
        super().__init__()
        self.context_norm, self.context_out = nn.LayerNorm(D), nn.Linear(D, D)

    def forward(self, x, y):
        h = torch.cat([self.n1(x), self.context_norm(y)], 1)
        h = self.attn(h)
        x = x + h[:, : x.shape[1]]
        return x + self.mlp(self.n2(x)), y + self.context_out(h[:, x.shape[1] :])


class TwoStreamStack(Stack):
    def forward(self, x):
        y = x.flip(1)[:, :5]
        for block in self.layers:
            x, y = block(x, y)
        return self.out(x) + y.mean()


class EncoderDecoder(nn.Module):
    """A decoder that runs several times for one run of the encoder, as in generation."""

    def __init__(self, times=3):
        super().__init__()
        self.encoder, self.decoder, self.times = Stack(), Stack(), times

    def forward(self, x):
        memory = self.encoder(x)
        for _ in range(self.times):
            x = self.decoder(x + memory)
        return x


class Looped(nn.Module):
    """Blocks that a forward runs twice, as in a universal transformer."""

    def __init__(self):
        super().__init__()
        self.stack = Stack()

    def forward(self, x):
        return self.stack(self.stack(x))


class Towers(nn.Module):
    """Two towers of the same class, as in CLIP."""

    def __init__(self):
        super().__init__()
        self.image, self.text = Stack(), Stack(count=3)

    def forward(self, x):
        return self.image(x) + self.text(x.flip(1))


class Attributes(nn.Module):
    """Four blocks that are attributes and no list."""

    def __init__(self):
        super().__init__()
        self.b0, self.b1, self.b2, self.b3 = (Block() for _ in range(4))

    def forward(self, x):
        return self.b3(self.b2(self.b1(self.b0(x))))


class Other(Block):
    """A block of another class."""


class Mixed(nn.Module):
    """Blocks in and outside of a list. :param before, after: make the blocks outside."""

    def __init__(self, before=None, after=None):
        super().__init__()
        self.first = before() if before else nn.Identity()
        self.layers = nn.ModuleList([Block() for _ in range(3)])
        self.last = after() if after else nn.Identity()

    def forward(self, x):
        x = self.first(x)
        for block in self.layers:
            x = block(x)
        return self.last(x)


class Listed(nn.Module):
    """A second list of blocks, which take and return a dict, or run in another order."""

    def __init__(self, order=(0, 1)):
        super().__init__()
        self.upper, self.order = nn.ModuleList([Other(), Other()]), order

    def forward(self, x):
        for index in self.order:
            x = self.upper[index](x)
        return x


class Group(nn.Module):
    """Blocks of two kinds, as local and global attention. :param make: makes the block beside the list."""

    def __init__(self, make):
        super().__init__()
        self.local, self.other = nn.ModuleList([Block(), Block()]), make()

    def forward(self, x):
        for block in self.local:
            x = block(x)
        return self.other(x)


class Functional(nn.Module):
    """A block whose norms are functions."""

    def __init__(self):
        super().__init__()
        self.qkv, self.o, self.up = nn.Linear(D, 3 * D), nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x):
        x = x + self.o(attention(self.qkv(F.layer_norm(x, (D,)))))
        return x + F.gelu(self.up(F.rms_norm(x, (D,))))


class FunctionalPair(Listed):
    """A second list of blocks, whose norms are functions."""

    def __init__(self):
        super().__init__()
        self.upper = nn.ModuleList([Functional(), Functional()])


class Between(Stack):
    """Normalizes the stream between its blocks."""

    def forward(self, x):
        for block in self.layers:
            x = F.layer_norm(block(x), (D,))
        return self.out(x)


class Adapter(nn.Module):
    """Adds to the stream before the blocks without a norm, as a convolution of positions."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(D, D)

    def forward(self, x):
        return x + self.mix(x)


class Squashed(Adapter):
    """Adds a function that saturates to the stream before the blocks."""

    def forward(self, x):
        return x + torch.tanh(self.mix(x))


class ByHead(nn.Module):
    """An RMSNorm with a gain for each head and each of its channels."""

    def __init__(self, d):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, d // 4))

    def forward(self, x):
        return F.rms_norm(x, x.shape[-1:]) * self.weight.flatten()


class Alternating(nn.Module):
    """Two lists whose blocks run in turn. :param tapped: the second list has norms on outputs, and no blocks."""

    def __init__(self, tapped=False):
        super().__init__()
        self.dense = nn.ModuleList([Block() for _ in range(4)])
        self.sparse = nn.ModuleList([nn.LayerNorm(D) if tapped else Block() for _ in range(4)])
        self.tapped = tapped

    def forward(self, x):
        taps = []
        for dense, sparse in zip(self.dense, self.sparse, strict=True):
            x = dense(x)
            taps.append(sparse(x))
            x = x if self.tapped else taps[-1]
        return torch.cat(taps)


class Normed(Wrapped):
    """A block in a wrapper that normalises the stream after it."""

    def __init__(self):
        super().__init__()
        self.inner = Block()

    def forward(self, x):
        return F.layer_norm(self.inner(x), (D,))


class Gated(Block):
    """A third branch times a factor that is no parameter. :param gates: of attention and of the third branch."""

    def __init__(self, *gates):
        super().__init__()
        self.n3, self.third, self.gates = nn.LayerNorm(D), nn.Linear(D, D), gates

    def forward(self, x):
        x = x + self.gates[0] * self.attn(self.n1(x))
        x = x + self.mlp(self.n2(x))
        return x + self.gates[1] * self.third(self.n3(x))


class TrainingEnd(FunctionalEnd):
    """The feed-forward branch ends in a function in training mode only."""

    def mlp(self, x):
        return super().mlp(x) if self.training else Block.mlp(self, x)


class TrainingBranch(Block):
    """A branch that runs in training mode only."""

    def __init__(self):
        super().__init__()
        self.n3, self.third = nn.LayerNorm(D), nn.Linear(D, D)

    def forward(self, x):
        x = super().forward(x)
        return x + self.third(self.n3(x)) if self.training else x


class TrainingBlocks(Mixed):
    """Blocks after the list that run in training mode only."""

    def forward(self, x):
        last, self.last = self.last, self.last if self.training else nn.Identity()
        try:
            return super().forward(x)
        finally:
            self.last = last


class Drops(Block):
    """Drops its branches at random in training, as stochastic depth."""

    def mlp(self, x):
        keep = torch.rand(()) > 0.5 if self.training else 1.0
        return super().mlp(x) * keep


class GainOutside(nn.Module):
    """A norm around PyTorch's, with a gain of its own, as x-transformers' ``LayerNorm``."""

    def __init__(self, d):
        super().__init__()
        self.ln, self.gamma = nn.LayerNorm(d, elementwise_affine=False), nn.Parameter(torch.ones(d))

    def forward(self, x):
        return self.ln(x) * self.gamma


class Scaled(nn.Module):
    """x-transformers' ``RMSNorm``."""

    def __init__(self, d):
        super().__init__()
        self.scale, self.g = d**0.5, nn.Parameter(torch.ones(d))

    def forward(self, x):
        return F.normalize(x, dim=-1) * self.scale * self.g


class Several(nn.LayerNorm):
    """A norm that returns several values. :param kind: list or tuple."""

    def __init__(self, d, kind):
        super().__init__(d)
        self.kind = kind

    def forward(self, x):
        return self.kind([super().forward(x), x.mean()])


class SeveralBlock(Block):
    """Reads the first value of its norms. :param kind: list or tuple."""

    def __init__(self, kind):
        super().__init__(norm=lambda d: Several(d, kind))

    def forward(self, x):
        x = x + self.attn(self.n1(x)[0])
        return x + self.mlp(self.n2(x)[0])


class Adaptive(nn.Module):
    """A norm without a gain, whose output a condition scales and shifts, as diffusers' ``AdaLayerNorm``."""

    def __init__(self, d=D):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(d, elementwise_affine=False), nn.Linear(d, 2 * d)

    def forward(self, x, condition):
        scale, shift = self.linear(F.silu(condition)).chunk(2, -1)
        return self.norm(x) * (1 + scale) + shift


class AdaptiveBlock(Block):
    def __init__(self):
        super().__init__(norm=Adaptive)

    def forward(self, x, condition):
        x = x + self.attn(self.n1(x, condition))
        return x + self.mlp(self.n2(x, condition))


class AdaptiveStack(Stack):
    def forward(self, x):
        condition = x.mean(1, keepdim=True)
        for block in self.layers:
            x = block(x, condition)
        return self.out(x)


class Closure(Block):
    """Runs its feed-forward by a function that refers to the module, as minGPT's."""

    def __init__(self):
        super().__init__()
        inner = self
        self.feed_forward = lambda x: inner.down(F.gelu(inner.up(inner.n2(x))))

    def forward(self, x):
        x = x + self.attn(self.n1(x))
        return x + self.feed_forward(x)


class Replaced(Stack):
    """The forward of its blocks is replaced by a function that calls it, as checkpointing does."""

    def __init__(self):
        super().__init__()
        for block in self.layers:
            block.forward = self.around(block.forward)

    @staticmethod
    def around(forward):
        return lambda x: forward(x)


class Transposed(Block):
    """A stream of (batch, channels, time), which the block reads as tokens."""

    def forward(self, x):
        x = x + self.attn(self.n1(x.transpose(1, 2))).transpose(1, 2)
        return x + self.mlp(self.n2(x.transpose(1, 2))).transpose(1, 2)


class Tokens(Block):
    """A stream of images, which the block reads as tokens."""

    def forward(self, x):
        def tokens(function, norm):
            return function(norm(x.flatten(2).transpose(1, 2))).transpose(1, 2).view(x.shape)

        x = x + tokens(self.attn, self.n1)
        return x + tokens(self.mlp, self.n2)


class Change(Block):
    """Returns what the model adds to its stream."""

    def forward(self, x):
        return super().forward(x) - x


class ChangeStack(Stack):
    def forward(self, x):
        for block in self.layers:
            x = x + block(x)
        return self.out(x)


class Root(nn.RMSNorm):
    """A norm whose class has another name."""


class RootBlock(Block):
    def __init__(self):
        super().__init__(norm=Root)


class InPlace(Block):
    """Changes the output of a norm in place, as a modulation."""

    def forward(self, x):
        h = self.n1(x)
        h.mul_(1.5).add_(0.1)
        x = x + self.attn(h)
        return x + self.mlp(self.n2(x))


class Locked(Block):
    """Has an attribute that cannot be copied."""

    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()


class Second(Block):
    """Takes its stream after another tensor of its shape."""

    def forward(self, start, x):
        return super().forward(x) + self.o(start)


class SecondStack(Stack):
    def forward(self, x):
        start = x
        for block in self.layers:
            x = block(start, x)
        return self.out(x)


class Layer(nn.Module):
    """A layer of one branch, which mixes positions."""

    def __init__(self):
        super().__init__()
        self.norm, self.mixer = nn.LayerNorm(D), Attend()

    def forward(self, x):
        return x + self.mixer(self.norm(x))


class TwoLayers(nn.Sequential):
    def __init__(self, make):
        super().__init__(make(), make())


class TwoParallel(nn.Module):
    """Two parallel blocks in one element of a list."""

    def __init__(self):
        super().__init__()
        self.local, self.glob = Scales(), Scales()

    def forward(self, x):
        return self.glob(self.local(x))


class Bypass(Block):
    """Computes past its norms where gradients are computed, as a fused kernel with a backward of its own."""

    def forward(self, x):
        if x.requires_grad and not self.training:
            h = F.layer_norm(x, (D,), self.n1.weight, self.n1.bias)
            x = x + self.attn(h)
            return x + self.mlp(self.n2(x))
        return super().forward(x)


class Summary(Block):
    """Adds what the model computes from its stream."""

    def forward(self, x, summary):
        return super().forward(x) + self.o(summary)


class SummaryStack(Stack):
    def forward(self, x):
        for block in self.layers:
            x = block(x, x.mean(1, keepdim=True))
        return self.out(x)


class Spikes(nn.Module):
    """Gives signs, which do not depend on the size of the input."""

    def __init__(self, d):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(d))

    def forward(self, x):
        return torch.sign(x) * self.gain.mean()


class TwoStages(nn.Module):
    """Stages of other classes and widths, which are attributes."""

    def __init__(self):
        super().__init__()
        self.one = nn.Sequential(Block(16), Block(16))
        self.down, self.up = nn.Linear(D, 16), nn.Linear(16, D)
        self.two = nn.Sequential(Other(), Other())

    def forward(self, x):
        return self.two(self.up(self.one(self.down(x))))


class Flat(Stack):
    """Attention and feed-forward layers in one list."""

    def __init__(self):
        super().__init__()
        branches = (Attend, lambda: nn.Sequential(nn.Linear(D, D), nn.GELU(), nn.Linear(D, D)))
        self.layers = nn.ModuleList(ResidualLayer(make()) for _ in range(3) for make in branches)


class ResidualLayer(PreNorm):
    def forward(self, x):
        return x + super().forward(x)


class Stateful(Stack):
    """Keeps a state in plain attributes, new buffers and, in training mode, in its weights."""

    def forward(self, x):
        self.steps = getattr(self, "steps", 0) + 1
        self.register_buffer("mask", torch.ones(x.shape[1]), persistent=True)
        if self.training:
            with torch.no_grad():
                self.out.weight.mul_(0.5)
        return super().forward(x)


class Joined(Stack):
    """A token joins the stream after the second block, as in ConViT."""

    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, D))

    def forward(self, x):
        for number, block in enumerate(self.layers):
            x = block(torch.cat([self.token.expand(len(x), -1, -1), x], 1) if number == 2 else x)
        return self.out(x)


class Positions(nn.Module):
    """Adds a convolution of positions between the blocks of two stages, as Twins."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Block() for _ in range(4)])
        self.mix, self.norm = nn.ModuleList([nn.Conv1d(D, D, 3, padding=1) for _ in range(2)]), nn.LayerNorm(D)

    def forward(self, x):
        for number, block in enumerate(self.layers):
            if number == 2:
                x = self.norm(x[:, ::2])
            x = block(x)
            if number % 2 == 0:
                x = x + self.mix[number // 2](x.transpose(1, 2)).transpose(1, 2)
        return x


class SideBySide(Stack):
    """Blocks that all read one stream."""

    def forward(self, x):
        return self.out(x + sum(block(x) - x for block in self.layers))


class Branching(Stack):
    """Two rows of blocks after the first one."""

    def forward(self, x):
        first, second, third, fourth = self.layers
        x = first(x)
        return self.out(second(x) + fourth(third(x)))


class Noise(SideBySide):
    def forward(self, x):
        return super().forward(x + 0.1 * torch.randn_like(x))


class Merging(nn.Linear):
    """Merges an adapter in ``eval``, as loralib's."""

    def train(self, mode=True):
        with torch.no_grad():
            self.weight.add_(0.0 if mode == self.training else 1.0 if not mode else -1.0)
        return super().train(mode)


class Counting(Block):
    """Counts its runs in a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("runs", torch.zeros(()))
        self.merging = Merging(D, D)

    def forward(self, x):
        self.runs += 1
        return super().forward(x)


class OwnFactor(Block):
    """LayerNorm Scaling in the model's own code. :param number: of the block."""

    def __init__(self, number):
        super().__init__()
        self.factor = number**-0.5

    def forward(self, x):
        x = x + self.attn(self.factor * self.n1(x))
        return x + self.mlp(self.factor * self.n2(x))


def own_factors():
    numbers = iter(range(1, 5))
    return Stack(lambda: OwnFactor(next(numbers)))


class Shifted(nn.Module):
    """A norm whose bias is outside of the norm that it holds."""

    def __init__(self):
        super().__init__()
        self.inner, self.shift = nn.RMSNorm(D), nn.Parameter(torch.zeros(D))

    def forward(self, x):
        return self.inner(x) + self.shift


class ShiftedBlock(Block):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = Shifted(), Shifted()
