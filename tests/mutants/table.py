"""Mutants of upstream: what each changes, in which frameworks, and how the reference takes it into account.

For a harmful mutant the plugin must either compute the mutated model or raise an error. For a harmless mutant it must compute
the mutated model, and may not raise. A harmful mutant that is marked ``followed`` has to be computed, too.

The row of a mutant lists the frameworks in which it is tested. In the others it has no meaning or cannot be detected. Megatron's
layers cannot run alone, so the plugin does not measure what they compute between the norms. In transformers the plugin does not
build the blocks. That a moved module of Megatron is refused is tested in tests/integrations/megatron/test_flags.py.
"""

import dataclasses
import functools
import importlib
import sys
from dataclasses import dataclass, field
from typing import Any, Callable

import torch
from mutants import source
from mutants.source import around, edit

OLMO, MEGATRON, TE, HF, GPT2, CORE = "olmo", "megatron", "megatron_te", "transformers", "gpt2", "olmo_core"
TITAN = "torchtitan"
ALL = (OLMO, MEGATRON, HF, CORE)


@dataclass
class Mutant:
    """
    :param apply: framework -> a function of its row in routes.py that changes upstream.
    :param names: framework -> the norms' names afterwards.
    :param depth: framework -> the depth factor of the residual projections afterwards, as in hooked.drawn_plain.
    :param folded: upstream reads only the gain: the reference has the factor there, not in hooks.
    :param gain: the name of that gain, where it is another one.
    :param refused: the plugin must raise an error, because what the mutant breaks is not in the model's output.
    :param visible: stock computes or draws something else than before.
    """

    name: str
    apply: dict[str, Callable[[Any], None]]
    harmless: bool = False
    followed: bool = False
    refused: bool = False
    names: dict[str, tuple[str, ...]] = field(default_factory=dict)
    depth: dict[str, Any] = field(default_factory=dict)
    projections: dict[str, tuple[str, ...]] = field(default_factory=dict)
    folded: bool = False
    gain: str = ""
    visible: bool = True
    ranks: int = 1


def rms(x):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def norm_forward(change):
    """Every framework, by the forward of its norm's class. :param change: (stock forward, norm, x) -> output."""

    def apply(row):
        def make(forward):
            def changed(self, x):
                return change(forward, self, x)

            return changed

        around(f"{row.norm}.forward", make)

    return apply


def another_gain(row, name):
    """Norms have a second gain of the shape of the one that ``name`` names."""

    def make(init):
        @functools.wraps(init)
        def changed(self, *args, **kwargs):
            init(self, *args, **kwargs)
            self.gain_elsewhere = torch.nn.Parameter(torch.ones_like(getattr(self, name)))

        return changed

    around(f"{row.norm}.__init__", make)


def gain_elsewhere(row):
    another_gain(row, "weight")
    norm_forward(lambda forward, self, x: rms(x) * self.gain_elsewhere)(row)


def fused_gain_elsewhere(row):
    another_gain(row, "layer_norm_weight")
    path = "transformer_engine.pytorch.module.layernorm_linear:LayerNormLinear.forward"
    edit(path, ("self.layer_norm_weight", "self.gain_elsewhere"))


def times_7(forward, self, x):
    """Seven times what a norm, or a fused norm and linear, returns."""
    out = forward(self, x)
    return (7 * out[0], *out[1:]) if isinstance(out, tuple) else 7 * out


def plain(config):
    """Upstream's own config of a block, without what a subclass added."""
    from olmo_core.nn.transformer.config import TransformerBlockConfig

    names = [each.name for each in dataclasses.fields(TransformerBlockConfig)]
    return TransformerBlockConfig(**{name: getattr(config, name) for name in names})


def text(path, *pairs):
    """An edit of one function, below the row's block or by its full path."""
    return lambda row: edit(path if ":" in path else f"{row.block}.{path}", *pairs)


def several(*changes):
    return lambda row: [change(row) for change in changes] and None


def renamed(old, new, *functions):
    return several(*(text(name, (old, new)) for name in functions))


def past(norm):
    return f"torch.nn.functional.rms_norm({{0}}, {{0}}.shape[-1:], self.{norm}.weight, 1e-6)"


def drawn_with_depth(row):
    """OLMo-core's init_method normal with a depth factor on the attention's output projection."""

    def make(init):
        @functools.wraps(init)
        def changed(self, m, *, num_blocks, **kwargs):
            init(self, m, num_blocks=num_blocks, **kwargs)
            with torch.no_grad():
                m.w_out.weight.div_((2 * num_blocks) ** 0.5)

        return changed

    around("olmo_core.nn.transformer.init:InitMethod.init_attention", make)


def another_model_class(row):
    """A model that holds a TransformerBlock and never runs GPTModel's constructor."""
    from megatron.core.models.common.language_module.language_module import LanguageModule
    from megatron.core.models.gpt import gpt_model

    stock = gpt_model.GPTModel
    names = {n: v for n, v in vars(stock).items() if n not in ("__dict__", "__weakref__", "__classcell__")}
    # Its methods name the stock class in their class cell; the constructor alone calls super().
    source.edit(f"{row.model}.__init__", ("super().__init__(", "LanguageModule.__init__(self, "))
    names["__init__"] = stock.__init__
    gpt_model.GPTModel = type("GPTModel", (LanguageModule,), names)


def subclassed(row):
    module, _, name = row.model.partition(":")
    module = importlib.import_module(module)
    setattr(module, name, type(f"Own{name}", (getattr(module, name),), {"__module__": "somebody"}))


def wrapped_norms(row):
    """Somebody wraps the forward of each norm that is built, in the instance; the wrapper must still run."""

    def make(init):
        @functools.wraps(init)
        def changed(self, *args, **kwargs):
            init(self, *args, **kwargs)
            forward = self.forward
            self.forward = lambda *a, **k: forward(*a, **k) * 1.5

        return changed

    around(f"{row.norm}.__init__", make)


def moved(name):
    """A release moves a module, and imports it from its new place."""

    def apply(row):
        package, _, last = name.rpartition(".")
        module = importlib.import_module(name)
        sys.modules[f"{package}.moved_{last}"], sys.modules[name] = module, None

    return apply


def initializers_renamed(row):
    """torchtitan keeps its initializers in another attribute, and draws from there."""
    source.locate("torchtitan.protocols.module:Module")[0].Module._draws = None
    for function in ("Config.build", "_init_self_parameters", "_init_param"):
        edit(f"torchtitan.protocols.module:Module.{function}", ("._param_init", "._draws"))


def everywhere(change):
    """A harmless change of every function that a wrapper or a reading of the package has anything to do with."""
    return dict.fromkeys((*ALL, TITAN), lambda row: [change(path) for path in row.touched] and None)


LLAMA = "transformers.models.llama.modeling_llama"
STAGE = "megatron.core.transformer.transformer_layer:get_transformer_layer_offset"
_MUTANTS = [
    Mutant("norm_times_7", dict.fromkeys((*ALL, TE, TITAN), norm_forward(times_7)), followed=True),
    Mutant("norm_ignores_its_gain", dict.fromkeys((*ALL, TITAN), norm_forward(lambda f, self, x: rms(x)))),
    Mutant("norm_adds_the_residual", dict.fromkeys(ALL, norm_forward(lambda f, self, x: f(self, x) + x))),
    Mutant("norm_reads_its_gain_elsewhere", dict.fromkeys(ALL, gain_elsewhere)),
    Mutant("fused_forward_reads_its_gain_elsewhere", {TE: fused_gain_elsewhere}, gain="gain_elsewhere"),
    Mutant("norm_on_the_branch", {
        OLMO: text("forward", ("if not self.config.norm_after:", "if False:"), ("if self.config.norm_after:", "if True:")),
        HF: text("forward", ("self.input_layernorm(hidden_states)\n", "hidden_states\n"),
                 ("residual + hidden_states\n\n", "residual + self.input_layernorm(hidden_states)\n\n")),
        CORE: text("forward", ("self.attention(self.attention_norm(x), **kwargs)", "self.attention_norm(self.attention(x, **kwargs))")),
    }),
    Mutant("mlp_reads_the_raw_stream", {
        OLMO: text("forward", ("self.ff_proj(x)", "self.ff_proj(og_x)")),
        HF: text("forward", ("self.mlp(hidden_states)", "self.mlp(residual)")),
        CORE: text("forward", ("self.feed_forward(self.feed_forward_norm(h))", "self.feed_forward(h)")),
    }),
    Mutant("blocks_numbered_otherwise", {
        OLMO: text("olmo.model:OLMo.__init__", ("OLMoBlock.build(i, config", "OLMoBlock.build(i + 1, config")),
        MEGATRON: text("__init__", ("self.layer_number = layer_number +", "self.layer_number = layer_number - 1 +")),
        HF: text(f"{LLAMA}:LlamaModel.__init__", ("LlamaDecoderLayer(config, layer_idx)", "LlamaDecoderLayer(config, layer_idx + 1)")),
        CORE: text("olmo_core.nn.transformer.model:Transformer.__init__", ("block_idx=block_idx,", "block_idx=block_idx + 1,")),
    }, depth={OLMO: lambda number, count: (2 * (number + 1)) ** 0.5}, visible=False),
    Mutant("numbers_local_to_a_stage", {MEGATRON: text(STAGE, ("    return offset", "    return 0"))}, ranks=2, visible=False),
    Mutant("reset_with_another_depth_factor", {
        OLMO: text("olmo.model:OLMoBlock.reset_parameters", ("2 * self.config.d_model", "3 * self.config.d_model"),
                   ("2 * self.ff_out.in_features", "3 * self.ff_out.in_features")),
        GPT2: text("transformers.models.gpt2.modeling_gpt2:GPT2PreTrainedModel._init_weights",
                   ("math.sqrt(2 * self.config.n_layer)", "math.sqrt(9 * self.config.n_layer)")),
        CORE: drawn_with_depth,
    }, depth={OLMO: lambda number, count: (3 * number) ** 0.5, GPT2: lambda number, count: (9 * count) ** 0.5, CORE: "all"},
       projections={CORE: ("attention.w_out",)}),
    Mutant("output_layer_init_method_ignored", {
        MEGATRON: text("megatron.core.transformer.mlp:MLP.__init__", (
            "init_method=self.config.output_layer_init_method",
            "init_method=__import__('megatron.core.utils').core.utils.scaled_init_method_normal(0.02, self.config.num_layers)",
        )),
    }, visible=False),
    Mutant("layer_computes_past_the_norms_forward", {
        OLMO: text("forward", ("self.attn_norm(x)", past("attn_norm").format("x")), ("self.ff_norm(x)", past("ff_norm").format("x"))),
        HF: text("forward", *((f"self.{n}(hidden_states)", past(n).format("hidden_states")) for n in ("input_layernorm", "post_attention_layernorm"))),
        CORE: text("forward", ("self.attention_norm(x)", past("attention_norm").format("x")),
                   ("self.feed_forward_norm(h)", past("feed_forward_norm").format("h"))),
    }, folded=True, visible=False),
    Mutant("attribute_renamed", {
        OLMO: renamed(".attn_norm", ".norm_1", "__init__", "forward", "reset_parameters"),
        MEGATRON: renamed("self.input_layernorm", "self.norm_1", "__init__", "_forward_attention"),
        HF: renamed("input_layernorm", "norm_1", "__init__", "forward"),
        CORE: renamed("attention_norm", "norm_1", "__init__", "forward"),
        TITAN: renamed("self.attention_norm", "self.norm_1", "__init__", "forward"),
    }, names={OLMO: ("norm_1", "ff_norm"), MEGATRON: ("norm_1", "pre_mlp_layernorm"), HF: ("norm_1", "post_attention_layernorm"),
              CORE: ("norm_1", "feed_forward_norm")}, visible=False),
    Mutant("initializers_renamed", {TITAN: initializers_renamed}, visible=False),
    Mutant("checkpoint_module_moved", {
        OLMO: moved("olmo.train"),
        HF: moved("transformers.trainer"),
        CORE: moved("olmo_core.train.checkpoint"),
        TITAN: moved("torchtitan.components.checkpointer.dcp"),
    }, refused=True, visible=False),
    Mutant("builder_never_calls_what_is_wrapped", {
        OLMO: text("__init__", ("LayerNorm.build(", "RMSLayerNorm(")),
        MEGATRON: another_model_class,
        CORE: text("olmo_core.nn.transformer.model:Transformer.__init__", (
            "block_configs[block_idx].build(",
            "__import__('mutants.table').table.plain(block_configs[block_idx]).build(",
        )),
    }, visible=False),
    Mutant("edited", everywhere(lambda path: source.rewrite(path, source.edited)), harmless=True, visible=False),
    Mutant("decorator", everywhere(lambda path: around(path, source.decorated)), harmless=True, visible=False),
    Mutant("subclass_of_the_model", dict.fromkeys(ALL, subclassed), harmless=True, visible=False),
    Mutant("wrapper_around_a_norms_forward", dict.fromkeys(ALL, wrapped_norms), harmless=True),
]  # fmt: skip
MUTANTS = {mutant.name: mutant for mutant in _MUTANTS}
