"""Language models of repositories that are read, copied and changed: nanoGPT and its kin, llama2.c, lingua, open_lm."""

from __future__ import annotations

import sys
import types

import torch
from expectation import ACCEPTED, REFUSED, checkout, load, load_part, on_path, row, sites
from torch import nn

IDS = torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(0))
NANO = "karpathy/nanoGPT"
GPT2 = "transformer.h.{}.ln_1 transformer.h.{}.ln_2"
LLAMA = "layers.{}.attention_norm layers.{}.ffn_norm"


def every_logit(model):
    """Run with targets, so that the logits of all positions are returned."""
    return model(IDS, IDS)[0]


def nanogpt(**keywords) -> nn.Module:
    """Build nanoGPT with four blocks."""
    code = load(NANO, "model.py")
    config = {"block_size": 16, "vocab_size": 64, "n_layer": 4, "n_head": 4, "n_embd": 32, "dropout": 0.0}
    return code.GPT(code.GPTConfig(**(config | keywords)))


@row(
    "nanoGPT",
    f"repository:{NANO}",
    ACCEPTED,
    sites=sites(GPT2, 4),
    why="The attention reads ln_1 of the stream and the MLP reads ln_2 of it.",
    code=("model.py", "x = x + self.attn(self.ln_1(x))"),
)
def _():
    return nanogpt(), every_logit


@row(
    "nanoGPT without biases",
    f"repository:{NANO}",
    ACCEPTED,
    sites=sites(GPT2, 4),
    why="The norms have a gain and no bias.",
    code=("model.py", "x = x + self.attn(self.ln_1(x))"),
)
def _():
    return nanogpt(bias=False), every_logit


@row(
    "nanoGPT with rms at the end of the MLP branch",
    f"repository:{NANO}",
    REFUSED,
    why="Sandwich-LN: the one changed line normalizes the branch's output, whatever ln_2 gives.",
    code=("model.py", "x = x + self.mlp(self.ln_2(x))"),
)
def _():
    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + nn.functional.rms_norm(self.mlp(self.ln_2(x)), x.shape[-1:])

    model = nanogpt()
    type(model.transformer.h[0]).forward = forward
    return model, every_logit


@row(
    "nanoGPT with rms at the end of both branches",
    f"repository:{NANO}",
    REFUSED,
    why="Sandwich-LN: the two changed lines normalize what the branches return.",
    code=("model.py", "x = x + self.attn(self.ln_1(x))"),
)
def _():
    def forward(self, x):
        x = x + nn.functional.rms_norm(self.attn(self.ln_1(x)), x.shape[-1:])
        return x + nn.functional.rms_norm(self.mlp(self.ln_2(x)), x.shape[-1:])

    model = nanogpt()
    type(model.transformer.h[0]).forward = forward
    return model, every_logit


@row(
    "nanoGPT with a cosine norm at the end of the attention branch",
    f"repository:{NANO}",
    REFUSED,
    why="Sandwich-LN: F.normalize gives the branch's rows one length, whatever ln_1 gives.",
    code=("model.py", "x = x + self.attn(self.ln_1(x))"),
)
def _():
    def forward(self, x):
        x = x + nn.functional.normalize(self.attn(self.ln_1(x)), dim=-1) * 3.0
        return x + self.mlp(self.ln_2(x))

    model = nanogpt()
    type(model.transformer.h[0]).forward = forward
    return model, every_logit


@row(
    "nanoGPT, three of four blocks given",
    f"repository:{NANO}",
    REFUSED,
    blocks=["transformer.h.1", "transformer.h.2", "transformer.h.3"],
    why="Part of the depth: the first block ran before the given ones.",
    code=("model.py", "for block in self.transformer.h:"),
)
def _():
    return nanogpt(), every_logit


@row(
    "nanoGPT, an example that generates",
    f"repository:{NANO}",
    REFUSED,
    why="The stack runs once for each generated token, in one forward of the example.",
    code=("model.py", "logits, _ = self(idx_cond)"),
)
def _():
    return nanogpt(), lambda model: torch.stack([model(IDS[:, :4])[0], model(IDS[:, 1:5])[0], model(IDS[:, 2:6])[0]])


@row(
    "nanoGPT, pairs with the final norm",
    f"repository:{NANO}",
    REFUSED,
    given=[("transformer.h.0.ln_1", "transformer.h.0.ln_2"), ("transformer.h.1.ln_1", "transformer.ln_f")],
    why="ln_f is before the output and not before a branch of block 2, whose ln_2 would be left.",
    code=("model.py", "x = self.transformer.ln_f(x)"),
)
def _():
    return nanogpt(n_layer=2), every_logit


@row(
    "minGPT",
    "repository:karpathy/minGPT",
    ACCEPTED,
    sites=sites(GPT2, 4),
    why="The attention reads ln_1 of the stream and the MLP, called by a lambda of the block, reads ln_2 of it.",
    code=("mingpt/model.py", "x = x + self.mlpf(self.ln_2(x))"),
)
def _():
    on_path("karpathy/minGPT")
    from mingpt.model import GPT

    config = GPT.get_default_config()
    config.model_type, config.vocab_size, config.block_size = None, 64, 16
    config.n_layer, config.n_head, config.n_embd = 4, 4, 32
    config.embd_pdrop = config.resid_pdrop = config.attn_pdrop = 0.0
    return GPT(config), IDS


@row(
    "llm.c GPT-2",
    "repository:karpathy/llm.c",
    ACCEPTED,
    sites=sites(GPT2, 4),
    why="The attention reads ln_1 of the stream and the MLP reads ln_2 of it.",
    code=("train_gpt2.py", "x = x + self.attn(self.ln_1(x))"),
)
def _():
    code = load_part(
        "karpathy/llm.c",
        "train_gpt2.py",
        "# -----------------------------------------------------------------------------\n# Our own simple Distributed",
    )
    code.FLASH = 0
    return code.GPT(code.GPTConfig(16, 64, 4, 4, 32)), every_logit


@row(
    "llm.c Llama 3",
    "repository:karpathy/llm.c",
    ACCEPTED,
    sites=sites(GPT2, 4),
    why="The attention reads ln_1 of the stream and the MLP reads ln_2 of it.",
    code=("train_llama3.py", "x = x + self.attn(self.ln_1(x), freqs_cis, start_pos, mask)"),
)
def _():
    code = load("karpathy/llm.c", "train_llama3.py")
    config = code.LlamaConfig(
        block_size=16, vocab_size=64, n_layer=4, n_head=4, n_kv_head=2, n_embd=32, multiple_of=16, flash=False
    )
    return code.LLaMA(config), every_logit


@row(
    "llama2.c",
    "repository:karpathy/llama2.c",
    ACCEPTED,
    sites=sites(LLAMA, 4),
    why="The block calls attention.forward on attention_norm of the stream and feed_forward.forward on ffn_norm of it.",
    code=("model.py", "h = x + self.attention.forward(self.attention_norm(x), freqs_cos, freqs_sin)"),
)
def _():
    code = load("karpathy/llama2.c", "model.py")
    args = code.ModelArgs(dim=32, n_layers=4, n_heads=4, n_kv_heads=2, vocab_size=64, multiple_of=16, max_seq_len=16)
    return code.Transformer(args), lambda model: model(IDS, IDS)


@row(
    "gpt-fast",
    "repository:pytorch-labs/gpt-fast",
    ACCEPTED,
    sites=sites(LLAMA, 4),
    why="The attention reads attention_norm of the stream, and the feed-forward, made first, reads ffn_norm of it.",
    code=("model.py", "h = x + self.attention(self.attention_norm(x), freqs_cis, mask, input_pos)"),
)
def _():
    code = load("pytorch-labs/gpt-fast", "model.py")
    model = code.Transformer(code.ModelArgs(block_size=16, vocab_size=64, n_layer=4, n_head=4, dim=32))
    model.setup_caches(2, 16)
    for layer in model.layers:
        layer.attention.kv_cache = None
    model.causal_mask = model.causal_mask[:8, :8]
    return model, (IDS, torch.arange(8))


@row(
    "nanochat",
    "repository:karpathy/nanochat",
    REFUSED,
    why="The norms are calls of F.rms_norm, so there is no module to scale.",
    code=("nanochat/gpt.py", "x = x + self.mlp(norm(x))"),
)
def _():
    import os

    os.environ["NANOCHAT_DTYPE"] = "float32"
    on_path("karpathy/nanochat")
    from nanochat.gpt import GPT, GPTConfig

    config = GPTConfig(sequence_len=16, vocab_size=64, n_layer=4, n_head=4, n_kv_head=4, n_embd=32, window_pattern="L")
    model = GPT(config)
    model.init_weights()
    return model, IDS


@row(
    "modded-nanogpt, October 2024",
    "repository:KellerJordan/modded-nanogpt",
    REFUSED,
    why="The norms are calls of F.rms_norm, so there is no module to scale.",
    code=(
        "records/track_1_short/2024-10-14_ModernArch/train_gpt2.py",
        "x = x + self.attn(F.rms_norm(x, (x.size(-1),)))",
    ),
)
def _():
    sys.argv[0] = __file__  # the script reads itself
    code = load_part(
        "KellerJordan/modded-nanogpt",
        "records/track_1_short/2024-10-14_ModernArch/train_gpt2.py",
        "# -----------------------------------------------------------------------------\n# Our own simple Distributed",
    )
    return code.GPT(code.GPTConfig(vocab_size=64, n_layer=4, n_head=4, n_embd=32)), every_logit


def xformers() -> None:
    """Stand in for xformers where it is missing: the code below imports it for kernels that are not run."""
    try:
        import xformers.ops  # noqa: F401
    except ImportError:
        package, ops = types.ModuleType("xformers"), types.ModuleType("xformers.ops")
        package.ops, package.__path__ = ops, []
        ops.fmha = types.SimpleNamespace(attn_bias=types.SimpleNamespace())
        ops.AttentionBias = ops.SwiGLU = ops.LowerTriangularMask = type("Missing", (), {})
        ops.memory_efficient_attention, ops.unbind = None, torch.unbind
        sys.modules |= {"xformers": package, "xformers.ops": ops}


def lingua(app: str) -> tuple[types.ModuleType, dict]:
    """Load one of lingua's apps, and the arguments of a small model."""
    xformers()
    root = str(checkout("facebookresearch/lingua"))
    sys.path.insert(0, root)
    probe = types.ModuleType("lingua.probe")  # its module of activation logging needs xformers' kernels
    probe.log_stats = lambda x, name: x
    import lingua

    lingua.probe = sys.modules["lingua.probe"] = probe
    code = load("facebookresearch/lingua", f"apps/{app}/transformer.py", f"lingua_{app}")
    return code, {"dim": 32, "n_layers": 4, "n_heads": 4, "vocab_size": 64, "max_seqlen": 8, "multiple_of": 16}


@row(
    "lingua",
    "repository:facebookresearch/lingua",
    ACCEPTED,
    sites=sites(LLAMA, 4),
    why="The attention reads attention_norm of the stream and the feed-forward reads ffn_norm of it.",
    code=("lingua/transformer.py", "out = h + self.feed_forward(self.ffn_norm(h))"),
)
def _():
    code, args = lingua("main")
    model = code.LMTransformer(code.LMTransformerArgs(**args))
    model.init_weights()
    return model, IDS


@row(
    "lingua, several tokens predicted",
    "repository:facebookresearch/lingua",
    ACCEPTED,
    sites=sites(LLAMA, 4),
    why="The trunk is lingua's Pre-LN stack; the heads after it are linear.",
    code=("lingua/transformer.py", "out = h + self.feed_forward(self.ffn_norm(h))"),
)
def _():
    code, args = lingua("mtp")
    model = code.LMTransformer(code.LMMTPArgs(**args, n_future_head=3))
    model.init_weights()
    return model, IDS


def open_lm(**keywords) -> nn.Module:
    """Build open_lm's Transformer with four blocks."""
    xformers()
    on_path("mlfoundations/open_lm")
    from open_lm.attention import torch_attn
    from open_lm.model import Params, Transformer

    settings = {"dim": 32, "n_layers": 4, "n_heads": 4, "vocab_size": 64, "seq_len": 16, "attn_func": torch_attn}
    return Transformer(Params(**(settings | keywords)))


@row(
    "open_lm",
    "repository:mlfoundations/open_lm",
    ACCEPTED,
    sites=sites(LLAMA, 4),
    why="The attention reads attention_norm of the stream and the feed-forward reads ffn_norm of it.",
    code=("open_lm/model.py", "ffn_out = self.feed_forward(self.ffn_norm(h))"),
)
def _():
    return open_lm(ffn_type="swiglu_torch"), IDS


@row(
    "open_lm with QK norms and a norm of the embedding",
    "repository:mlfoundations/open_lm",
    ACCEPTED,
    sites=sites(LLAMA, 4),
    why="The norms of queries and keys are inside the branch, the embedding's before the blocks.",
    code=("open_lm/model.py", "queries = self.q_norm(queries)"),
)
def _():
    on_path("mlfoundations/open_lm")
    from functools import partial

    xformers()
    from open_lm.norms import LayerNorm

    norm = partial(LayerNorm, elementwise_bias=False)
    return open_lm(ffn_type="gelu", apply_qk_norm=True, post_embed_norm=True, norm_type=norm), IDS


@row(
    "gemma_pytorch, Gemma 1",
    "repository:google/gemma_pytorch",
    ACCEPTED,
    sites=sites("layers.{}.input_layernorm layers.{}.post_attention_layernorm", 4),
    why="post_attention_layernorm, despite its name, is before the MLP; the gains are stored less one.",
    code=("gemma/model.py", "hidden_states = self.post_attention_layernorm(hidden_states)"),
)
def _():
    return gemma("V_1", "GEMMA_1")


@row(
    "gemma_pytorch, Gemma 2",
    "repository:google/gemma_pytorch",
    REFUSED,
    why="Sandwich-LN: each branch ends in a norm.",
    code=("gemma/model.py", "hidden_states = self.post_feedforward_layernorm(hidden_states)"),
)
def _():
    return gemma("V_2", "GEMMA_2")


def gemma(*versions: str):
    """Build the trunk of Gemma with four blocks, and an example with masks, tables and empty caches."""
    on_path("google/gemma_pytorch")
    from gemma import config as settings
    from gemma.model import GemmaModel, precompute_freqs_cis

    architecture = next(getattr(settings.Architecture, v) for v in versions if hasattr(settings.Architecture, v))
    kinds = [settings.AttentionType.GLOBAL] * 4 if "2" in architecture.name else None
    config = settings.GemmaConfig(
        architecture=architecture, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, hidden_size=32,
        intermediate_size=64, head_dim=8, vocab_size=64, attn_types=kinds, use_pre_ffw_norm=bool(kinds),
        use_post_ffw_norm=bool(kinds), dtype="float32",
    )  # fmt: skip
    model = GemmaModel(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.2)
    mask = torch.full((1, 1, 8, 8), -1e30).triu(1)
    table = precompute_freqs_cis(8, 8)

    def example(model):
        caches = [(torch.zeros(2, 8, 2, 8), torch.zeros(2, 8, 2, 8)) for _ in range(4)]
        hidden = nn.functional.one_hot(IDS, 64).float()[..., :32] + 0.1
        tables = dict.fromkeys(settings.AttentionType, table)
        return model(hidden, tables, torch.arange(8), caches, mask, mask)

    return model, example


@row(
    "RWKV v1",
    "repository:BlinkDL/RWKV-LM",
    ACCEPTED,
    sites=sites("blocks.{}.ln1 blocks.{}.ln2", 4),
    why="The time mix reads ln1 of the stream and the channel mix reads ln2 of it.",
    code=("RWKV-v1/src/model.py", "x = x + self.attn(self.ln1(x))"),
)
def _():
    return rwkv("RWKV")


@row(
    "RWKV v1, rotary attention with a time shift",
    "repository:BlinkDL/RWKV-LM",
    ACCEPTED,
    sites=sites("blocks.{}.ln1 blocks.{}.ln2", 4),
    why="The attention reads ln1 of the stream and the gated MLP reads ln2 of it.",
    code=("RWKV-v1/src/model.py", "x = x + self.mlp(self.ln2(x))"),
)
def _():
    return rwkv("MHA_shift")


def rwkv(kind: str):
    """Build RWKV's first model with four blocks."""
    code = load("BlinkDL/RWKV-LM", "RWKV-v1/src/model.py")
    config = code.GPTConfig(
        64, 8, n_layer=4, n_head=4, n_embd=32, n_attn=32, n_ffn=64, model_type=kind,
        rwkv_emb_scale=0.4, rwkv_tiny_attn=0, rwkv_tiny_head=0,
    )  # fmt: skip
    return code.GPT(config), every_logit
