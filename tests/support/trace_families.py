"""Where each causal-LM family of transformers has its norms, read off the additions of a real forward.

The tracer knows no family and shares no code with the package. A block's input is the stream. A stream plus something
that depends on it is the stream again, and what was added is a branch. The label of a block says how its branches read the
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
import os
import signal
import sys
import time
import warnings
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

FILE = Path(__file__).with_name("families.json")
VOCABULARY, WIDTH, LAYERS, LENGTH, SECONDS = 96, 32, 3, 6, 60

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

#: Operators that hand a tensor on as it is.
SAME = {
    "view", "_unsafe_view", "reshape", "alias", "detach", "clone", "_to_copy", "unsqueeze", "squeeze", "transpose", "t", "permute",
    "contiguous", "expand", "native_dropout", "dropout", "lift_fresh", "copy_", "slice", "select",
}  # fmt: skip
ADD = {"add", "add_"}
FACTOR = {"mul", "mul_", "div", "div_"}


def is_norm(module):
    """A module that is called a norm and has no matrix."""
    return "norm" in type(module).__name__.lower() and all(p.dim() < 2 for p in module.parameters())


class Node:
    """One result: the operator, what it was made from, and the norm that made it."""

    __slots__ = ("norm", "op", "parents", "time")

    def __init__(self, op, parents=(), norm=None, time=0):
        self.op, self.parents, self.norm, self.time = op, parents, norm, time


class Trace(TorchDispatchMode):
    """The graph of a forward. A norm is one node, whatever is inside."""

    def __init__(self):
        super().__init__()
        self.nodes, self.writes, self.alive, self.inside, self.time = {}, {}, [], 0, 0

    def node(self, tensor):
        """The node of a tensor; a later write through a view of the same memory counts."""
        found = self.nodes.get(id(tensor)) or self.put(tensor, Node("leaf"))
        written = self.writes.get(tensor.untyped_storage().data_ptr())
        if written is not None and written.time > found.time and tensor.numel():
            return self.put(tensor, Node("written", (found, written)))
        return found

    def put(self, tensor, node):
        self.time += 1
        node.time = self.time
        self.nodes[id(tensor)] = node
        self.alive.append(tensor)
        return node

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = function.overloadpacket.__name__
        if self.inside:
            return function(*args, **kwargs)
        parents = tuple(self.node(t) for t in tree_leaves((args, kwargs)) if torch.is_tensor(t))
        result = function(*args, **kwargs)
        for tensor in tree_leaves(result):
            if torch.is_tensor(tensor):
                node = self.put(tensor, Node(name, parents))
                if (name.endswith("_") and not name.startswith("_")) or name == "index_put_":
                    self.writes[tensor.untyped_storage().data_ptr()] = node
        return result


def tensors(value):
    """The floating tensors of a module's arguments or of its result."""
    leaves = tree_leaves(list(value.values()) if isinstance(value, dict) else value)
    return [leaf for leaf in leaves if torch.is_tensor(leaf) and leaf.is_floating_point()]


def trace(model, run):
    """Run ``run()``; return for each list of blocks its path and (block, input node, output node) in order of calls."""
    graph, calls, handles = Trace(), {}, []
    holders = [(path, m) for path, m in model.named_modules() if isinstance(m, torch.nn.ModuleList) and len(m)]
    for path, holder in holders:
        for block in holder:

            def before(module, args, kwargs, path=path):
                hidden = [t for t in tensors((args, list(kwargs.values()))) if t.dim() >= 2]
                calls.setdefault(path, []).append([module, graph.node(hidden[0]) if hidden else None, None])

            def after(module, args, output, path=path):
                hidden = tensors(output)
                next(c for c in reversed(calls[path]) if c[0] is module)[2] = graph.node(hidden[0]) if hidden else None

            handles += [block.register_forward_pre_hook(before, with_kwargs=True), block.register_forward_hook(after)]
    for path, module in model.named_modules():
        if not is_norm(module):
            continue

        def enter(module, args, kwargs):
            graph.inside += 1

        def leave(module, args, kwargs, output, path=path):
            graph.inside -= 1
            if not graph.inside:
                sources = tuple(graph.node(t) for t in tensors((args, list(kwargs.values()))))
                for tensor in tensors(output):
                    graph.put(tensor, Node("norm", sources[:1], (path, sources)))

        handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
        handles.append(module.register_forward_hook(leave, with_kwargs=True))
    with torch.no_grad(), graph:
        run()
    for handle in handles:
        handle.remove()
    return calls


def blocks_of(model, calls):
    """Path and calls of the outermost list whose elements each ran once; of several, the one with most parameters."""
    good = {}
    for path, found in calls.items():
        holder = model.get_submodule(path)
        if len(found) == len(holder) == len({id(c[0]) for c in found}) and all(c[1] and c[2] for c in found):
            good[path] = found
    outer = [p for p in good if not any(p.startswith(q + ".") for q in good if q != p)]
    if not outer:
        return None, []
    best = max(outer, key=lambda p: sum(q.numel() for q in model.get_submodule(p).parameters()))
    return best, good[best]


def ancestors(end, start):
    """The nodes between the input of a block and its output, in order, and those among them that depend on the input."""
    seen, todo = {}, [end]
    while todo:
        node = todo.pop()
        if id(node) not in seen:
            seen[id(node)] = node
            todo += [] if node is start else node.parents
    ordered = sorted(seen.values(), key=lambda n: n.time)
    depends = {id(start)}
    for node in ordered:
        if any(id(p) in depends for p in node.parents):
            depends.add(id(node))
    return ordered, depends


def stream_of(ordered, depends, start, through_norms):
    """Node -> version of the stream that it is, and for each addition its node and branch."""
    version, added = {id(start): 0}, []
    for node in ordered:
        if id(node) in version:
            continue
        mine = [p for p in node.parents if id(p) in version]
        others = [p for p in node.parents if id(p) in depends and id(p) not in version]
        if not mine:
            continue
        if node.op in ADD and others:
            added.append((node, others[0]))
            version[id(node)] = len(added)
        elif (node.op in SAME | FACTOR | ADD and not others and len(mine) == 1) or (
            node.op == "norm" and through_norms
        ):
            version[id(node)] = version[id(mine[0])]
    return version, added


def multiplied(start, end, version):
    """Whether the stream is multiplied on its way through a block."""
    todo, seen = [end], {id(start)}
    while todo:
        node = todo.pop()
        if id(node) not in seen and id(node) in version:
            seen.add(id(node))
            if node.op in FACTOR:
                return True
            todo += node.parents
    return False


def reads(branch, version, depends):
    """What a branch reads: {(path of a norm or None, version of the stream)}."""
    found, todo, seen = set(), [branch], set()
    while todo:
        node = todo.pop()
        if id(node) in seen or id(node) not in depends:
            continue
        seen.add(id(node))
        if id(node) in version:
            found.add((None, version[id(node)]))
        elif node.op == "norm" and any(id(p) in version for p in node.parents):
            found.add((node.norm[0], next(version[id(p)] for p in node.parents if id(p) in version)))
        else:
            todo += node.parents
    return found


def parts(branch, version, depends):
    """The summands of a branch, without what only scales or reshapes them."""
    node = branch
    while True:
        dependent = [p for p in node.parents if id(p) in depends]
        if node.op in SAME | FACTOR and len(dependent) == 1:
            node = dependent[0]
        elif node.op in ADD and len(dependent) == 2:
            return [part for p in dependent for part in parts(p, version, depends)]
        elif node.op in ADD and len(dependent) == 1:
            node = dependent[0]
        else:
            return [node]


def label_of(start, end):
    """Label, paths of the sites in the order of the calls, and a note, of one block."""
    ordered, depends = ancestors(end, start)
    version, added = stream_of(ordered, depends, start, through_norms=False)
    if id(end) not in version:
        version, added = stream_of(ordered, depends, start, through_norms=True)
        if id(end) not in version:
            return "other", [], "the output is no sum with the input"
        norms = [n.norm[0] for n in ordered if n.op == "norm" and id(n) in version and n is not start]
        return "post", list(dict.fromkeys(norms)), ""
    sites, raw, ends, versions = [], False, [], []
    for _, branch in added:
        found = reads(branch, version, depends)
        sites += sorted(path for path, _ in found if path and path not in sites)
        raw |= any(path is None for path, _ in found)
        versions.append({number for _, number in found})
        ends += [n.norm[0] for n in parts(branch, version, depends) if n.op == "norm"]
    summands = [len(parts(branch, version, depends)) for _, branch in added]
    if not added:
        return "other", sites, "nothing is added to the stream"
    if raw:
        return (
            ("branch", ends, "") if ends and not sites else ("other", sites + ends, "a branch reads the stream itself")
        )
    if ends:
        return "sandwich", sites + ends, ""
    if any(len(v) > 1 for v in versions):
        return "other", sites, "a branch reads two states of the stream"
    if all(v == {0} for v in versions):
        if len(added) == 1 and summands == [1]:
            return "other", sites, "one branch"
        return "parallel", sites, "the stream is multiplied" if multiplied(start, end, version) else ""
    if multiplied(start, end, version):
        return "other", sites, "the stream is multiplied"
    return (
        ("pre", sites, "")
        if len(added) == 2 == len(sites)
        else ("other", sites, f"{len(added)} branches, {len(sites)} norms")
    )


def describe(model_type):
    """The row of a family in families.json. Where the blocks differ, ``sites`` has a list for each of them."""
    model, ids = tiny(model_type)
    calls = trace(model, lambda: forward(model, ids))
    path, found = blocks_of(model, calls)
    if path is None:
        return {"label": "other", "note": "no list whose elements each ran once"}
    rows = []
    for block, start, end in found:
        name = next(n for n, m in model.named_modules() if m is block)
        label, sites, note = label_of(start, end)
        rows.append((label, tuple(s.removeprefix(name + ".") for s in sites), note))
    labels, sites = {row[0] for row in rows}, [list(row[1]) for row in rows]
    row = {"label": labels.pop() if len(labels) == 1 else "other", "blocks": path}
    row["sites"] = sites[0] if all(each == sites[0] for each in sites) else sites
    notes = dict.fromkeys(note or (label if label != row["label"] else "") for label, _, note in rows)
    note = "; ".join(filter(None, notes))
    return row | ({"note": note} if note else {})


def _row(model_type, seconds=SECONDS):
    def stop(*_):
        raise TimeoutError(f"more than {seconds} s")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        return describe(model_type)
    except Exception as error:
        text = str(error).strip().splitlines() or [""]
        return {"label": "not built", "note": f"{type(error).__name__}: {text[0][:160]}"}
    finally:
        signal.alarm(0)


def main(names):
    os.nice(10)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    import transformers

    transformers.utils.logging.set_verbosity_error()
    rows = json.loads(FILE.read_text()) if FILE.exists() and names else {}
    for name in names or families():
        began = time.time()
        rows[name] = _row(name)
        print(f"{name:28} {time.time() - began:5.1f} s  {json.dumps(rows[name])}", flush=True)
    FILE.write_text("{\n" + ",\n".join(f"{json.dumps(k)}: {json.dumps(rows[k])}" for k in sorted(rows)) + "\n}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
