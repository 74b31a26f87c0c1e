"""Small OLMo models, and an independent fp64 re-computation of them from the state dict."""

import copy
import functools

TINY = dict(
    d_model=32,
    n_heads=4,
    n_layers=4,
    mlp_hidden_size=96,
    activation_type="swiglu",
    rope=True,
    vocab_size=64,
    embedding_size=128,
    max_sequence_length=16,
    include_bias=False,
    bias_for_layer_norm=False,
    layer_norm_eps=1e-6,
    attention_dropout=0.0,
    residual_dropout=0.0,
    embedding_dropout=0.0,
    weight_tying=False,
    init_device="cpu",
    init_fn="normal",
    init_std=0.02,
)


@functools.cache
def _parsed(changes):
    from olmo.config import ModelConfig

    return ModelConfig.new(**{**TINY, **dict(changes)})


def model_config(**changes):
    """A tiny ``ModelConfig``, which OLMo parses once for the same changes."""
    return copy.deepcopy(_parsed(tuple(sorted(changes.items()))))


def build(seed=0, perturb=True, **changes):
    """An OLMo model with reproducible weights; ``perturb`` moves gains and biases off 1 and 0."""
    import torch
    from olmo.model import OLMo

    torch.manual_seed(seed)
    model = OLMo(model_config(**changes))
    if perturb:
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(0.1 * torch.randn_like(parameter))
                else:
                    parameter.mul_(4.0)  # away from the near-identity of the initial state
    return model.eval()


def tokens(batch=2, length=12, vocabulary=64, seed=1):
    import torch

    return torch.randint(0, vocabulary, (batch, length), generator=torch.Generator().manual_seed(seed))


def reference_states(model, ids, *, lns=True):
    """The fp64 stream before each block and after the last."""
    from support import scheme_reference as reference

    base = "rms" if str(model.config.layer_norm_type).removeprefix("lns_") in ("rms", "lns") else "default"
    states = reference.states_of(reference.weights_of(model), model.config, "lns" if lns else "preln", base, ids)
    return [state.numpy() for state in states]
