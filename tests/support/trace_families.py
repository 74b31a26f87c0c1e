"""Where each causal-LM family of transformers has its norms, read off the additions of a real forward.

The tracer knows no family and shares no code with the package. It reads autograd's graph from a block's input, the stream, to
its output; a norm is one node of it. A stream plus something that depends on it is the stream again, and what was added is a
branch. The label of a block says how its branches read the
stream, and what they end in:

    pre        each branch reads the stream through a norm; two branches, one after the other
    parallel   the same, and the branches read one stream
    sandwich   each branch reads the stream through a norm, and one ends in another norm
    branch     each branch reads the stream itself and ends in a norm
    post       a norm's output is the stream that goes on
    other      anything else, with a note

``python tests/support/trace_families.py`` writes families.json anew: label, list of blocks, and the sites in a block.
"""

import json
import sys
from pathlib import Path

import torch
from torch.utils._pytree import tree_leaves, tree_map

FILE = Path(__file__).with_name("families.json")
VOCABULARY, WIDTH, LAYERS, LENGTH = 96, 32, 3, 6

#: Value -> the fields of a config that get it. What a family does not have is left out.
_SIZES = {
    WIDTH: "hidden_size d_model n_embd dim embedding_size word_embed_proj_dim lru_width attention_hidden_size dim_model "
    "embedding_dim hidden_dim decoder_hidden_size",
    64: "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim n_inner ffn_hidden_size d_inner dim_ff d_ff dff "
    "feed_forward_size moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size max_seq_len "
    "max_position_embeddings n_positions n_ctx max_target_positions block_ff_dim intermediate_size_mlp expert_ffn_hidden_size "
    "moe_shared_expert_intermediate_size mamba_intermediate feedforward_size dense_intermediate_size",
    VOCABULARY: "vocab_size vocab_size_per_layer_input decoder_vocab_size",
    LAYERS: "num_hidden_layers num_layers n_layer n_layers decoder_layers encoder_layers num_decoder_layers "
    "num_encoder_layers num_blocks",
    4: "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads num_experts "
    "num_local_experts n_routed_experts num_decoder_attention_heads num_encoder_attention_heads "
    "index_n_heads mamba_n_heads moe_num_experts",
    2: "num_key_value_heads num_experts_per_tok moe_topk moe_k top_k_experts first_k_dense_replace_limit n_groups",
    8: "head_dim kv_channels attention_head_size v_head_dim qk_rope_head_dim qk_nope_head_dim rotary_dim",
    16: "index_head_dim kv_lora_rank q_lora_rank sliding_window chunk_size state_size mamba_d_state ssm_state_size",
    1: "n_group topk_group n_shared_experts moe_num_shared_experts mamba_n_groups pad_token_id bos_token_id eos_token_id "
    "decoder_start_token_id",
}  # fmt: skip
SIZES = {name: value for value, names in _SIZES.items() for name in names.split()}
#: Family -> fields that the table above gets wrong or does not know.
OVERRIDES: dict[str, dict] = {
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "dbrx": {
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8},
    },
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "gemma3n_text": {
        "intermediate_size": [64] * LAYERS,
        "num_kv_shared_layers": 0,
        "activation_sparsity_pattern": [0.0] * LAYERS,
    },
    "gpt_neo": {"attention_types": [[["global", "local", "global"], 1]]},
    "dots3_note_text": {"per_layer_config": {}, "num_key_value_heads": 4, "head_dim": 16},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "musicgen": {"decoder": {"num_codebooks": 1}},
    "musicgen_melody": {"decoder": {"num_codebooks": 1}},
    "longcat_flash": {"head_dim": 8},
    "zamba": {
        "layers_block_type": ["hybrid", "mamba", "hybrid"],
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"]},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1},
    "nemotron": {"num_key_value_heads": 2},
    "reformer": {"axial_pos_shape": [2, 3], "axial_pos_embds_dim": [16, 16], "attn_layers": ["local", "lsh", "local"]},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
    "zamba2": {
        "layer_types": ["mamba", "hybrid", "mamba"],
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "n_mamba_heads": 4,
        "mamba_headdim": 16,
    },
}
#: Lists with one entry a layer, made anew by the config for another depth.
PER_LAYER = (
    "layer_types",
    "mlp_layer_types",
    "layers_block_type",
    "no_rope_layers",
    "moe_layers",
    "block_types",
    "attn_types",
)


def shrink(config, overrides=None):
    """A config of the same class whose sizes are tiny."""
    found = {
        **config.to_dict(),
        **{name: getattr(config, name) for name in config.attribute_map if hasattr(config, name)},
    }
    changes = {}
    for name, value in found.items():
        if name in getattr(config, "sub_configs", {}) and value is not None:
            sub = getattr(config, name)
            changes[name] = shrink(sub, (overrides or {}).get(name)).to_dict()
        elif name in PER_LAYER or name not in SIZES:
            continue
        elif (isinstance(value, int) and not isinstance(value, bool)) or (value is None and name == "head_dim"):
            changes[name] = SIZES[name]
    if "kv_lora_rank" in found:  # latent attention: as many heads of keys as of queries
        changes |= {"num_key_value_heads": 4}
        changes.pop("head_dim", None)
    changes |= {
        name: value for name, value in (overrides or {}).items() if name not in getattr(config, "sub_configs", {})
    }
    mapped = getattr(config, "attribute_map", {})
    changes = {name: value for name, value in changes.items() if mapped.get(name) not in changes}
    return type(config)(**changes)


def families():
    """model_type -> class of the causal LM."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def config_of(model_type):
    """A tiny config of a family, of the class that its causal LM takes."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = shrink(CONFIG_MAPPING[model_type](), OVERRIDES.get(model_type))
    config._attn_implementation = "eager"
    if not isinstance(config, getattr(transformers, families()[model_type]).config_class):
        config = config.get_text_config(decoder=True)
    if hasattr(config, "is_decoder"):
        config.is_decoder = True
    return config


def tiny(model_type, seed=0):
    """A tiny random model of a family in evaluation mode, and ids of shape (1, 6) that it takes."""
    import transformers

    torch.manual_seed(seed)
    model = getattr(transformers, families()[model_type])(config_of(model_type)).eval().float()
    with torch.no_grad():  # away from the near-identity of the initial state
        for parameter in model.parameters():
            parameter.mul_(4.0) if parameter.dim() > 1 else parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model, torch.randint(3, VOCABULARY, (1, LENGTH), generator=torch.Generator().manual_seed(1))


def forward(model, ids):
    """Logits of shape (1, 6, vocabulary)."""
    cache = {"use_cache": False} if "use_cache" in model.config.get_text_config(decoder=True).to_dict() else {}
    return model(input_ids=ids, **cache).logits


# ---------------------------------------------------------------------------------------------------- the trace

#: Operators that hand a tensor on as it is, as autograd names them.
_SAME = "View UnsafeView ReshapeAlias Alias Clone ToCopy Unsqueeze Squeeze Transpose T Permute Expand NativeDropout Slice Select"
SAME = {*_SAME.split(), "CopyBackwards"}
ADD, FACTOR = {"Add"}, {"Mul", "Div"}


def is_norm(module):
    """A module that is called a norm and has no matrix."""
    return "norm" in type(module).__name__.lower() and all(p.dim() < 2 for p in module.parameters())


class Norm(torch.autograd.Function):
    """One node for a whole norm."""

    @staticmethod
    def forward(ctx, source, output, path):
        ctx.path = path
        return output.detach().clone()


def operator(node):
    return "norm" if hasattr(node, "path") else node.name().split("Backward")[0]


def parents(node):
    return [parent for parent, _ in node.next_functions if parent is not None]


def floating(value):
    """The floating tensors of a module's arguments or of its result."""
    leaves = tree_leaves(list(value.values()) if isinstance(value, dict) else value)
    return [leaf for leaf in leaves if torch.is_tensor(leaf) and leaf.is_floating_point()]


def stream(args, kwargs):
    return next((t for t in floating((args, list(kwargs.values()))) if t.dim() >= 2), None)


def blocks_of(model, run):
    """Path of the outermost list whose elements each ran once; of several, the one with most parameters."""
    calls, handles = {}, []
    holders = {path: m for path, m in model.named_modules() if isinstance(m, torch.nn.ModuleList) and len(m)}
    for block in {block for holder in holders.values() for block in holder}:

        def note(module, args, kwargs, output):
            calls.setdefault(module, []).append(stream(args, kwargs) is not None and bool(floating(output)))

        handles.append(block.register_forward_hook(note, with_kwargs=True))
    with torch.no_grad():
        run()
    for handle in handles:
        handle.remove()
    good = [path for path, holder in holders.items() if all(calls.get(block) == [True] for block in holder)]
    outer = [p for p in good if not any(p.startswith(q + ".") for q in good if q != p)]
    return max(outer, key=lambda p: sum(q.numel() for q in holders[p].parameters()), default=None)


def trace(model, blocks, run):
    """Run ``run()``; return (block, node of its input, node of its output) in order of calls."""
    calls, inside, handles = [], [], []

    def before(module, args, kwargs):
        x = stream(args, kwargs)
        leaf = x.detach().requires_grad_().clone()  # a block may add in place
        calls.append([module, leaf.grad_fn, None])
        return tree_map(lambda value: leaf if value is x else value, (args, kwargs))

    def after(module, args, output):
        calls[-1][2] = floating(output)[0].grad_fn

    for path, module in model.named_modules():
        if is_norm(module):

            def leave(module, args, kwargs, output, path=path):
                inside.pop()
                source = floating((args, list(kwargs.values())))[:1]
                if not inside and source and source[0].requires_grad:
                    return tree_map(lambda value: Norm.apply(source[0], value, path), output)

            handles.append(module.register_forward_pre_hook(lambda module, args: inside.append(module)))
            handles.append(module.register_forward_hook(leave, with_kwargs=True))
    for block in blocks:
        handles += [block.register_forward_pre_hook(before, with_kwargs=True), block.register_forward_hook(after)]
    model.requires_grad_(False)
    with torch.enable_grad():
        run()
    for handle in handles:
        handle.remove()
    return calls


def between(start, end):
    """The nodes from the input of a block to its output, in the order in which they were made."""
    seen, todo = {start}, [end]
    while todo:
        if (node := todo.pop()) not in seen and node is not None:
            seen.add(node)
            todo += parents(node)
    return sorted(seen, key=lambda node: node._sequence_nr())


def stream_of(ordered, start, through_norms):
    """Node -> version of the stream that it is, and for each addition the branch."""
    version, added = {start: 0}, []
    for node in ordered:
        mine = [p for p in parents(node) if p in version]
        others = [p for p in parents(node) if p not in version]
        if node is start or not mine:
            continue
        if operator(node) in ADD and others:
            added.append(others[0])
            version[node] = len(added)
        elif (through_norms and operator(node) == "norm") or (
            operator(node) in SAME | FACTOR | ADD and not others and len(mine) == 1
        ):
            version[node] = version[mine[0]]
    return version, added


def multiplied(start, end, version):
    """Whether the stream is multiplied on its way through a block."""
    return any(operator(node) in FACTOR for node in between(start, end) if node in version and node is not start)


def reads(branch, version):
    """What a branch reads: {(path of a norm or None, version of the stream)}."""
    found, todo, seen = set(), [branch], set()
    while todo:
        if (node := todo.pop()) in seen:
            continue
        seen.add(node)
        mine = [version[p] for p in parents(node) if p in version]
        if node in version:
            found.add((None, version[node]))
        elif operator(node) == "norm" and mine:
            found.add((node.path, mine[0]))
        else:
            todo += parents(node)
    return found


def parts(node):
    """The summands of a branch, without what only scales or reshapes them."""
    while operator(node) in SAME | FACTOR | ADD and len(parents(node)) == 1:
        (node,) = parents(node)
    if operator(node) in ADD:
        return [part for parent in parents(node) for part in parts(parent)]
    return [node]


def label_of(start, end):
    """Label, paths of the sites in the order of the calls, and a note, of one block."""
    if start is None or end is None:  # in a function that has a backward of its own
        return "other", [], "the output is no sum with the input"
    ordered = between(start, end)
    version, added = stream_of(ordered, start, through_norms=False)
    if end not in version:
        version, added = stream_of(ordered, start, through_norms=True)
        if end not in version:
            return "other", [], "the output is no sum with the input"
        return "post", list(dict.fromkeys(n.path for n in ordered if operator(n) == "norm" and n in version)), ""
    found = [reads(branch, version) for branch in added]
    sites = list(dict.fromkeys(path for each in found for path in sorted({p for p, _ in each if p})))
    ends = [n.path for branch in added for n in parts(branch) if operator(n) == "norm"]
    versions = [{number for _, number in each} for each in found]
    if not added:
        return "other", sites, "nothing is added to the stream"
    if any(path is None for each in found for path, _ in each):
        return (
            ("branch", ends, "") if ends and not sites else ("other", sites + ends, "a branch reads the stream itself")
        )
    if ends:
        return "sandwich", sites + ends, ""
    if any(len(each) > 1 for each in versions):
        return "other", sites, "a branch reads two states of the stream"
    scaled = "the stream is multiplied" if multiplied(start, end, version) else ""
    if all(each == {0} for each in versions):
        one = len(added) == 1 == len(parts(added[0]))
        return ("other", sites, "one branch") if one else ("parallel", sites, scaled)
    if scaled:
        return "other", sites, scaled
    two = len(added) == 2 == len(sites)
    return ("pre", sites, "") if two else ("other", sites, f"{len(added)} branches, {len(sites)} norms")


def describe(model_type):
    """The row of a family in families.json. Where the blocks differ, ``sites`` has a list for each of them."""
    model, ids = tiny(model_type)
    if (path := blocks_of(model, lambda: forward(model, ids))) is None:
        return {"label": "other", "note": "no list whose elements each ran once"}
    names, rows = {module: name for name, module in model.named_modules()}, []
    for block, start, end in trace(model, model.get_submodule(path), lambda: forward(model, ids)):
        label, sites, note = label_of(start, end)
        rows.append((label, [site.removeprefix(names[block] + ".") for site in sites], note))
    labels, sites = {label for label, _, _ in rows}, [own for _, own, _ in rows]
    row = {"label": labels.pop() if len(labels) == 1 else "other", "blocks": path}
    row["sites"] = sites[0] if all(each == sites[0] for each in sites) else sites
    notes = dict.fromkeys(note or (label if label != row["label"] else "") for label, _, note in rows)
    note = "; ".join(filter(None, notes))
    return row | ({"note": note} if note else {})


def main(names):
    rows = json.loads(FILE.read_text()) if names else {}
    for name in names or families():
        try:
            rows[name] = describe(name)
        except Exception as error:
            text = str(error).strip().splitlines() or [""]
            rows[name] = {"label": "not built", "note": f"{type(error).__name__}: {text[0][:160]}"}
        print(f"{name:28} {json.dumps(rows[name])}", flush=True)
    FILE.write_text("{\n" + ",\n".join(f"{json.dumps(k)}: {json.dumps(rows[k])}" for k in sorted(rows)) + "\n}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
