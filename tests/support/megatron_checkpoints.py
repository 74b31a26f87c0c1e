"""Megatron's distributed checkpoints of a tiny model, written and read by Megatron Core itself."""

import argparse
import io
import json
import pickle
from pathlib import Path

import torch

from olmo_lns.export.torch_dist import COMMON, COMMON_OBJECT, read
from support import megatron_tiny as tiny

TOKENS = tiny.batch()[:, :-1]


def arguments(config, version="0.20", **changes):
    """The arguments that Megatron saves beside a model, as the parser of 0.15 or 0.20 read its command line."""
    from megatron.core.transformer.enums import AttnBackend

    recorded = json.loads(Path(__file__).with_name("megatron_arguments.json").read_text())[version]
    epsilon = "norm_epsilon" if "norm_epsilon" in recorded else "layernorm_epsilon"
    values = {
        "group_query_attention": config.num_query_groups != config.num_attention_heads,
        "num_query_groups": config.num_query_groups,
        epsilon: config.layernorm_epsilon,
        "attention_backend": AttnBackend.auto,
    }
    return argparse.Namespace(**recorded | values | changes)


def perturbed(config):
    model = tiny.build(config)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = 0.1 * torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise + parameter if parameter.dim() == 1 else noise)
    return model.eval()


def save(root, model, args, stacked=True):
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    folder = root / "iter_0000010"
    folder.mkdir(parents=True)
    metadata = None if stacked else {"non_homogeneous_layers": True, "singleton_local_shards": False}
    moment = ShardedTensor.from_rank_offsets("optimizer.state.exp_avg.decoder.final_layernorm.weight", torch.ones(32))
    state = {
        "args": args,
        "checkpoint_version": 3.0,
        "iteration": 10,
        "model": model.sharded_state_dict(metadata=metadata),
        "optimizer": {"state": moment, "param_groups": [{"lr": 1.0}]},
    }
    dist_checkpointing.save(state, str(folder))
    (root / "latest_checkpointed_iteration.txt").write_text("10")
    return root


def as_core_0_19(root):
    """Move the arguments from the file into the checkpoint, where Megatron Core 0.19 and newer put them."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

    folder = root / "iter_0000010"
    if not (folder / COMMON).exists():  # they are there already
        return
    content = io.BytesIO()
    torch.save([torch.load(folder / COMMON, weights_only=False)], content)
    (folder / COMMON).unlink()
    (folder / "common_state.distcp").write_bytes(content.getvalue())
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.state_dict_metadata[COMMON_OBJECT] = BytesStorageMetadata()
    place = _StorageInfo("common_state.distcp", 0, len(content.getvalue()))
    metadata.storage_data[MetadataIndex(COMMON_OBJECT)] = place
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def load(root, model):
    """Load with Megatron Core's own loader."""
    from megatron.core import __version__, dist_checkpointing

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    saved, file = read(root), root / "iter_0000010" / COMMON
    stacked = "decoder.layers.mlp.linear_fc2.weight" in saved.tensors
    metadata = None if stacked else {"non_homogeneous_layers": True, "singleton_local_shards": False}
    state = {"model": model.sharded_state_dict(metadata=metadata)}
    lacking = not file.exists() and tuple(map(int, __version__.split(".")[:2])) < (0, 19)
    if lacking:  # releases before 0.19 read only the file
        torch.save(saved.common, file)
    model.load_state_dict(dist_checkpointing.load(state, str(file.parent))["model"], strict=False)
    if lacking:
        file.unlink()
    return model


def run(model):
    with torch.no_grad():
        return model(*tiny.inputs(tiny.batch())).double()
