"""LayerNorm Scaling by hooks on a stock model: slow, independent of the package, and right because autograd does it.

``hooked(model)`` knows the stock OLMo, Megatron Core and OLMo-core models; any other model is given its list of blocks and
the names of the two norms in a block: ``hooked(model, model.model.layers, ("input_layernorm", "post_attention_layernorm"))``.
"""

import torch

#: Class of the model -> (its blocks, the two norms of one, its residual output projections).
_KNOWN = {
    "OLMo": (
        lambda m: (
            m.transformer.blocks if "blocks" in m.transformer else [b for g in m.transformer.block_groups for b in g]
        ),
        ("attn_norm", "ff_norm"),
        ("attn_out", "ff_out"),
    ),
    "GPTModel": (
        lambda m: m.decoder.layers,
        ("input_layernorm", "pre_mlp_layernorm"),
        ("self_attention.linear_proj", "mlp.linear_fc2"),
    ),
    "Transformer": (
        lambda m: list(m.blocks.values()),
        ("attention_norm", "feed_forward_norm"),
        ("attention.w_out", "feed_forward.w2"),
    ),
}


def known(model):
    """The row of ``_KNOWN`` for a model, or for the class that it is a subclass of."""
    return next((_KNOWN[kind.__name__] for kind in type(model).__mro__ if kind.__name__ in _KNOWN), None)


def scaled(output, factor):
    """The output of a norm times a factor; of a tuple the first element is the norm's output."""
    if isinstance(output, tuple):
        return (output[0] * factor, *output[1:])
    return output * factor


def hooked(model, blocks=None, names=None, exponent=0.5, numbers=None):
    """Multiply what both norms of block l return by ``l ** -exponent``, from outside. Returns the model.

    :param names: attribute paths in a block; one name for a parallel block; a list of names for each block where the blocks
        differ, as in families.json. A name that a block does not have is an error.
    :param numbers: of the blocks, from 1; by default their places in the list.
    """
    find, usual, _ = known(model) or (None, None, None)
    blocks = list(find(model) if blocks is None else blocks)
    for number, block in zip(numbers or range(1, len(blocks) + 1), blocks, strict=True):
        factor = float(torch.tensor(number, dtype=torch.float64) ** -exponent)
        own = usual if names is None else names
        for name in own if isinstance(own[0], str) else own[number - 1]:
            norm = block.get_submodule(name)
            norm.register_forward_hook(lambda module, args, output, factor=factor: scaled(output, factor))
    return model


def drawn_plain(model, depth, blocks=None, projections=None):
    """Take the depth factor off the freshly drawn residual output projections of a stock model. Returns the model.

    :param depth: ``"all"`` where they were drawn at std / sqrt(2 L), ``"each"`` at std / sqrt(2 l), else a function of
        (l, L) that gives the divisor of std.
    """
    find, _, usual = known(model) or (None, None, None)
    blocks = list(find(model) if blocks is None else blocks)
    divisor = {"all": lambda number, count: (2 * count) ** 0.5, "each": lambda number, count: (2 * number) ** 0.5}
    count = getattr(getattr(model, "config", None), "num_layers", len(blocks))  # of all pipeline stages
    with torch.no_grad():
        for number, block in enumerate(blocks, start=1):
            for path in usual if projections is None else projections:
                block.get_submodule(path).weight.mul_(divisor.get(depth, depth)(number, count))
    return model
