"""Runs what this package wraps in ``megatron.core``: the models' constructors and the loader of sharded checkpoints.

Usage: ``stock_core.py FOLDER``. With ONLY_SAVE=1 it only writes the checkpoints into FOLDER.
"""

# ruff: noqa: E402  Megatron is imported after the stand-ins for CUDA

import functools
import os
import sys
from pathlib import Path

import torch
from support import megatron_cpu, megatron_tiny, observing
from support.megatron_tiny import SEQUENCE, VOCAB, config

folder = Path(sys.argv[1])
megatron_cpu.initialize()

from megatron.core import dist_checkpointing
from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
from megatron.core.models.bert.bert_model import BertModel
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.T5 import t5_spec
from megatron.core.models.T5.t5_model import T5Model
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

try:
    from megatron.core.models.hybrid.hybrid_model import HybridModel
except ImportError:
    HybridModel = None
try:
    from megatron.core.models.mamba.mamba_model import MambaModel
except ImportError:
    MambaModel = None

from support.megatron_hybrid import hybrid_stack_spec


def gpt(**changes):
    return megatron_tiny.build(config(**changes))


def bert(**changes):
    cfg = config(**changes)
    return BertModel(cfg, 0, bert_layer_local_spec, VOCAB, SEQUENCE)


def t5():
    cfg = config(normalization="LayerNorm")
    encoder, decoder = t5_spec.encoder_model_with_local_spec(), t5_spec.decoder_model_with_local_spec()
    encoder, decoder = (
        TransformerBlockSubmodules([each] * 2, layer_norm=torch.nn.LayerNorm) for each in (encoder, decoder)
    )
    return T5Model(
        config=cfg,
        encoder_config=cfg,
        transformer_encoder_layer_spec=encoder.layer_specs[0],
        transformer_decoder_layer_spec=decoder.layer_specs[0],
        vocab_size=VOCAB,
        max_sequence_length=SEQUENCE,
    )


def hybrid(model_class, keyword, pattern="*-*-"):
    return model_class(config(num_layers=4), hybrid_stack_spec, VOCAB, SEQUENCE, **{keyword: pattern})


def sharded(kind):
    state = {"model": gpt().sharded_state_dict()}
    strict = dist_checkpointing.validation.StrictHandling.RETURN_ALL if kind == "mismatch" else "assume_ok_unexpected"
    return dist_checkpointing.load(state, str(folder / ("saved" if kind == "mismatch" else kind)), strict=strict)


FUNCTIONS = {
    "GPTModel": GPTModel.__init__,
    "BertModel": BertModel.__init__,
    "T5Model": T5Model.__init__,
    "dist_checkpointing.load": dist_checkpointing.load,
}
partial = functools.partial
cases = {
    "GPTModel: dense": gpt,
    "GPTModel: MoE": partial(gpt, num_moe_experts=4),
    "GPTModel: LayerNorm with bias": partial(gpt, normalization="LayerNorm", add_bias_linear=True),
    "GPTModel: initialization of one's own": partial(gpt, output_layer_init_method=torch.nn.init.ones_),
    "GPTModel: no arguments": lambda: GPTModel(),
    "GPTModel: another name": lambda: GPTModel(configuration=config()),
    "GPTModel: no config": lambda: GPTModel(None, megatron_tiny.local_spec(config()), VOCAB, SEQUENCE),
    "GPTModel: no spec": lambda: GPTModel(config(), None, VOCAB, SEQUENCE),
    "BertModel: dense": partial(bert, normalization="LayerNorm"),
    "BertModel: no arguments": lambda: BertModel(),
    "T5Model: dense": t5,
    "T5Model: no arguments": lambda: T5Model(),
    "dist_checkpointing.load: saved": partial(sharded, "saved"),
    "dist_checkpointing.load: mismatch": partial(sharded, "mismatch"),
    "dist_checkpointing.load: missing": partial(sharded, "missing"),
    "dist_checkpointing.load: damaged": partial(sharded, "damaged"),
}
for name, model_class, keyword in (
    ("HybridModel", HybridModel, "hybrid_layer_pattern"), ("MambaModel", MambaModel, "hybrid_override_pattern")
):  # fmt: skip
    if model_class is not None:
        FUNCTIONS[name] = model_class.__init__
        cases[f"{name}: attention and MLP in turn"] = partial(hybrid, model_class, keyword)
        cases[f"{name}: no arguments"] = lambda model_class=model_class: model_class()
if os.environ.get("ONLY_SAVE"):
    for kind in ("saved", "damaged"):
        (folder / kind).mkdir()
        dist_checkpointing.save({"model": gpt().sharded_state_dict(), "step": 3}, str(folder / kind))
    (damaged,) = (folder / "damaged").glob("*0.distcp")
    damaged.write_bytes(damaged.read_bytes()[:100])
else:
    observing.main(cases, FUNCTIONS, folder, "megatron")
