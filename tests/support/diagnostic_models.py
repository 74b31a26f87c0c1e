"""Models for the diagnostics: every architecture of the table built offline, and toys with closed forms."""

import copy

import torch
from torch import nn

VOCABULARY = 97
LAYERS = 3
LLAMA_LIKE = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=1,
)
_GPT2 = dict(vocab_size=VOCABULARY, n_embd=32, n_layer=LAYERS, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=1)
#: model_type -> (class of the model, class of the config, its arguments).
ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", LLAMA_LIKE),
    "olmo": ("OlmoForCausalLM", "OlmoConfig", LLAMA_LIKE),
    "olmo2": ("Olmo2ForCausalLM", "Olmo2Config", LLAMA_LIKE),
    "olmo3": ("Olmo3ForCausalLM", "Olmo3Config", LLAMA_LIKE),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", LLAMA_LIKE),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", LLAMA_LIKE),
    "mistral": ("MistralForCausalLM", "MistralConfig", LLAMA_LIKE),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", _GPT2),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", LLAMA_LIKE),
    "bert": ("BertForMaskedLM", "BertConfig", LLAMA_LIKE),
}


def huggingface(kind, seed=0, **changes):
    """A random model of ``kind`` with weights large enough that its blocks do something."""
    import transformers

    model_class, config_class, arguments = ARCHITECTURES[kind]
    torch.manual_seed(seed)
    return grown(getattr(transformers, model_class)(getattr(transformers, config_class)(**{**arguments, **changes})))


def grown(model):
    """Weights large enough that the blocks do something."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)
    return model.eval()


def ids(batch=3, length=12, vocabulary=VOCABULARY, seed=1):
    return torch.randint(0, vocabulary, (batch, length), generator=torch.Generator().manual_seed(seed))


def projection(matrix):
    linear = nn.Linear(*matrix.shape, bias=False)
    linear.weight = nn.Parameter(matrix)
    return linear


class Linear(nn.Module):
    """x + x A^T: its Jacobian is I + A at every token."""

    def __init__(self, matrix):
        super().__init__()
        self.proj = projection(matrix)

    def forward(self, x):
        return x + self.proj(x), None


class Mixer(nn.Module):
    """x + tanh(cumulative mean of x over positions) A^T: not linear, and tokens see the past."""

    def __init__(self, matrix):
        super().__init__()
        self.proj = projection(matrix)

    def forward(self, x):
        count = torch.arange(1, x.shape[1] + 1, dtype=x.dtype).unsqueeze(1)
        return x + self.proj(torch.tanh(x.cumsum(1) / count))


class Toy(nn.Module):
    """An embedding, a list of blocks and a head: enough for the generic fallback to find them."""

    def __init__(self, blocks, width=8, vocabulary=VOCABULARY, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(vocabulary, width)
        self.stack = nn.ModuleList(blocks)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens, attention_mask=None):
        x = self.embed(tokens)
        for block in self.stack:
            x = block(x)
            x = x[0] if isinstance(x, tuple) else x
        return self.head(x)


def matrices(count, width=8, seed=0, size=0.3):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        yield size * torch.randn(width, width, generator=generator)


@torch.no_grad()
def states_of(model, tokens):
    """fp64 states of a Toy: the inputs of all blocks, then the last output."""
    model = copy.deepcopy(model).double()
    states = [model.embed(tokens)]
    for block in model.stack:
        x = block(states[-1])
        states.append(x[0] if isinstance(x, tuple) else x)
    return [state.numpy() for state in states]
