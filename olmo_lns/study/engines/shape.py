"""The numbers of one model and its budget, and what they cost: parameters, FLOPs, memory, disk.

Closed forms only, no framework: ``tests/study`` compares the parameter count with OLMo's and
Megatron's own models and the FLOPs with OLMo's own counter.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["GPUS", "Gpu", "Machine", "Shape"]

ADAM_BYTES = 16  # per parameter, mixed precision: fp32 weight, fp32 gradient, two fp32 moments
CHECKPOINT_BYTES = 12  # per parameter: fp32 weight and two moments
BF16 = 2


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
    def block(self) -> int:
        """Parameters of a block, without its norms."""
        kv = self.width * self.kv_heads // self.heads
        return 2 * self.width**2 + 2 * self.width * kv + 3 * self.width * self.inner

    @property
    def parameters(self) -> int:
        """All parameters, the output projection counted unless tied."""
        norms = (2 * self.layers + 1) * self.width if self.gain else 0
        return self.embedding * (1 if self.tied else 2) + self.layers * self.block + norms

    @property
    def tokens_per_step(self) -> int:
        return self.sequence * self.batch

    @property
    def tokens(self) -> int:
        return self.tokens_per_step * self.steps

    @property
    def flops(self) -> float:
        """``6 N D`` plus attention ``12 L d s D``, N without the input embedding (a lookup) but with the head,
        the full (non-causal) attention matrix: the convention of most published MFU figures.
        """
        n = self.parameters if self.tied else self.parameters - self.embedding
        return (6 * n + 12 * self.layers * self.width * self.sequence) * float(self.tokens)

    @property
    def checkpoint_bytes(self) -> float:
        """One checkpoint with optimizer state."""
        return float(CHECKPOINT_BYTES * self.parameters)


@dataclass(frozen=True)
class Machine:
    """How a run is laid over its GPUs.

    :param strategy: how weights and optimizer state are split: ``ddp``, ``fsdp``, or ``distributed_optimizer``
        (Megatron's: bf16 weights and fp32 gradients on every GPU, the fp32 weights and moments divided).
    :param micro_batch: sequences a GPU takes at once.
    :param split: GPUs that share one model, by the setting ``split_by``.
    :param recompute: activations are computed again in the backward pass.
    """

    strategy: str
    micro_batch: int
    split: int = 1
    split_by: str = ""
    recompute: bool = False

    def memory(self, shape: Shape, gpus: int) -> float | None:
        """Estimated bytes on each of ``gpus``; None for a strategy without an estimate.

        States are 16 bytes a parameter, divided by the GPUs under fsdp, to which one gathered block and the
        embedding are added. Activations are the bf16 tensors autograd keeps in a block (with a fused attention
        kernel): 34 s b d with a 4 d MLP, in SwiGLU's terms 10 d + 4 inner per token times two bytes, plus norms in
        fp32; ``recompute`` keeps a block's input only. An estimate: allow 20 % for fragmentation and buffers.
        """
        copies, tokens = max(1, gpus // self.split), self.micro_batch * shape.sequence
        states = {
            "ddp": ADAM_BYTES * shape.parameters,
            "fsdp": ADAM_BYTES * shape.parameters / copies + BF16 * (2 * shape.block + shape.embedding),
            "distributed_optimizer": shape.parameters * (BF16 + 4 + CHECKPOINT_BYTES / copies),
        }.get(self.strategy)
        if states is None:
            return None
        kept = shape.width if self.recompute else 10 * shape.width + 4 * shape.inner + 4 * shape.width
        activations = BF16 * tokens * kept * shape.layers
        logits = tokens * shape.vocabulary * (BF16 + 4 + 4)  # bf16 logits, fp32 copy, fp32 gradient
        return (states + activations + logits) / self.split

    def problem(self, shape: Shape, gpus: int, *, even: bool) -> str | None:
        """Why the batch cannot be laid over the GPUs; None when it can.

        :param even: each GPU takes whole micro-batches.
        """
        if gpus % self.split:
            return f"{self.split_by} is more than {gpus} GPUs, or does not divide them"
        if even and shape.batch % self.micro_batch:
            return f"the batch of {shape.batch} is not a multiple of the micro-batch of {self.micro_batch}"
        copies, each = gpus // self.split, self.micro_batch if even else 1
        if shape.batch % (copies * each):
            by = f" with {self.split_by}" if self.split > 1 else ""
            times = f" × micro-batch {each}" if even else ""
            return f"{gpus} GPUs{by}{times} do not divide the batch of {shape.batch}: take another number of GPUs" + (
                " or a smaller micro-batch" if even else ""
            )
        return None
