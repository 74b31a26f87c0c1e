"""The numbers of one model and its budget, and what they cost: parameters, FLOPs, memory, disk.

Closed forms only, no framework: ``tests/study`` compares the parameter count with OLMo's and
Megatron's own models and the FLOPs with OLMo's own counter.
"""

from __future__ import annotations

from dataclasses import dataclass

from olmo_lns.errors import LNSConfigError

__all__ = ["GPUS", "STRATEGIES", "Gpu", "Shape"]

ADAM_BYTES = 16  # per parameter, mixed precision: fp32 weight, fp32 gradient, two fp32 moments
CHECKPOINT_BYTES = 12  # per parameter: fp32 weight and two moments
BF16 = 2
STRATEGIES = ("ddp", "fsdp", "distributed_optimizer")


@dataclass(frozen=True)
class Gpu:
    """:param peak: dense bf16 FLOP/s of the SXM part (vendor data sheet). :param memory: bytes."""

    peak: float
    memory: float


GPUS = {"A100": Gpu(312e12, 80e9), "H100": Gpu(989.5e12, 80e9), "H200": Gpu(989.5e12, 141e9)}


@dataclass(frozen=True)
class Shape:
    """A Pre-LN decoder with SwiGLU and no biases, and its training budget.

    :param inner: width of the SwiGLU product (OLMo's ``mlp_hidden_size`` is twice that).
    :param vocabulary: rows of the embedding table, padding included.
    :param sequence: tokens in a sequence. :param batch: sequences in an optimizer step.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    inner: int
    vocabulary: int
    tied: bool
    gain: bool
    sequence: int
    batch: int
    steps: int
    warmup: int
    learning_rate: float
    min_learning_rate: float

    @property
    def embedding(self) -> int:
        return self.vocabulary * self.width

    @property
    def parameters(self) -> int:
        """All parameters, the output projection counted unless tied."""
        kv = self.width * self.kv_heads // self.heads
        block = 2 * self.width**2 + 2 * self.width * kv + 3 * self.width * self.inner
        norms = (2 * self.layers + 1) * self.width if self.gain else 0
        return self.embedding * (1 if self.tied else 2) + self.layers * block + norms

    @property
    def tokens(self) -> int:
        return self.tokens_per_step * self.steps

    @property
    def tokens_per_step(self) -> int:
        return self.sequence * self.batch

    @property
    def warmup_share(self) -> float:
        return self.warmup / self.steps

    @property
    def flops(self) -> float:
        """``6 N D`` plus attention ``12 L d s D``, N without the input embedding (a lookup) but with the head,
        the full (non-causal) attention matrix: the convention of most published MFU figures.
        """
        n = self.parameters if self.tied else self.parameters - self.embedding
        return (6 * n + 12 * self.layers * self.width * self.sequence) * float(self.tokens)

    def gpu_hours(self, gpu: str, mfu: float) -> float:
        return self.flops / (GPUS[gpu].peak * mfu) / 3600

    @property
    def checkpoint_bytes(self) -> float:
        """One checkpoint with optimizer state."""
        return float(CHECKPOINT_BYTES * self.parameters)

    def memory(self, strategy: str, gpus: int, micro_batch: int, *, recompute: bool = False) -> dict[str, float]:
        """Estimated bytes per GPU: ``states``, ``activations``, ``logits`` and their ``total``.

        States are 16 bytes a parameter, divided by ``gpus`` under fsdp, to which one gathered block and the
        embedding are added. Activations are the bf16 tensors autograd keeps in a block (with a fused attention
        kernel): 34 s b d with a 4 d MLP, in SwiGLU's terms 10 d + 4 inner per token times two bytes, plus norms in
        fp32; ``recompute`` keeps a block's input only. An estimate: allow 20 % for fragmentation and buffers.

        :param strategy: ``ddp``, ``fsdp``, or ``distributed_optimizer`` (Megatron's: bf16 weights and fp32
            gradients on every GPU, the fp32 weights and moments divided by ``gpus``).
        """
        if strategy not in STRATEGIES:
            raise LNSConfigError(f"strategy {strategy!r}: expected ddp, fsdp or distributed_optimizer")
        tokens = micro_batch * self.sequence
        block = (self.parameters - self.embedding * (1 if self.tied else 2)) / self.layers
        states = float(ADAM_BYTES * self.parameters)
        if strategy == "fsdp":
            states = states / gpus + BF16 * (2 * block + self.embedding)
        elif strategy == "distributed_optimizer":
            states = self.parameters * (BF16 + 4 + CHECKPOINT_BYTES / gpus)
        kept = self.width if recompute else 10 * self.width + 4 * self.inner + 4 * self.width
        activations = float(BF16 * tokens * kept * self.layers)
        logits = float(tokens * self.vocabulary * (BF16 + 4 + 4))  # bf16 logits, fp32 copy, fp32 gradient
        return {
            "states": states,
            "activations": activations,
            "logits": logits,
            "total": states + activations + logits,
        }
