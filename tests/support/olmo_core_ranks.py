"""The checks that each of several gloo ranks runs; the processes start once for all of them."""

import copy
import functools
import logging

import torch
import torch.distributed as dist
from olmo_core.distributed.utils import get_full_tensor
from olmo_core.nn.attention import UlyssesContextParallelStyle
from olmo_core.nn.transformer import TransformerDataParallelWrappingStrategy as Wrapping
from torch.distributed import init_device_mesh

from olmo_lns import sites
from support import olmo_core_models as small


def everything(blocks):
    logging.disable(logging.INFO)
    torch.set_num_threads(1)
    for block in blocks:
        config = small.with_scheme(small.config(block))
        reference = small.model(config, seed=None)
        small.loss_of(reference(small.TOKENS)).backward()
        for name, check in CHECKS.items():
            print(block, name, flush=True)  # shown beside an error
            check(config, reference)
            dist.barrier()


def _mesh(*shape, **names):
    return init_device_mesh("cpu", shape, **names)


def _drawn(built):
    built.init_weights(device=torch.device("cpu"), max_seq_len=16)
    return built


def _tensor_parallel_and_fsdp(built):
    mesh = _mesh(2, 2, mesh_dim_names=("dp", "tp"))
    built.apply_tp(mesh["tp"])
    built.apply_fsdp(mesh["dp"])


#: Name -> the wrapper that a model gets before its weights are drawn; every rank sees the whole batch.
WRAPPED = {
    "ddp": lambda built: built.apply_ddp(_mesh(4)),
    "fsdp": lambda built: built.apply_fsdp(_mesh(4), prefetch_factor=1),
    "fsdp, fine grained": lambda built: built.apply_fsdp(_mesh(4), wrapping_strategy=Wrapping.fine_grained),
    "hsdp": lambda built: built.apply_fsdp(_mesh(2, 2, mesh_dim_names=("dp_replicate", "dp_shard"))),
    "tensor parallel": lambda built: built.apply_tp(_mesh(4, mesh_dim_names=("tp",))["tp"]),
    "tensor parallel and fsdp": _tensor_parallel_and_fsdp,
}


def _wrapped(name, config, reference):
    """Drawn weights, logits and gradients equal those of one process."""
    built = config.build(**({} if name == "ddp" else {"init_device": "meta"}))
    WRAPPED[name](built)
    _drawn(built)
    wanted = dict(reference.named_parameters())
    for name, parameter in built.named_parameters():
        torch.testing.assert_close(get_full_tensor(parameter.detach()), wanted[name].detach(), rtol=0, atol=0)
    sites.require_complete(built, config.block.resolved_scheme, small.LAYERS)
    logits = get_full_tensor(built(small.TOKENS))
    torch.testing.assert_close(logits, reference(small.TOKENS), rtol=1e-5, atol=1e-6)
    small.loss_of(logits).backward()
    for name, parameter in built.named_parameters():
        torch.testing.assert_close(get_full_tensor(parameter.grad), wanted[name].grad, rtol=1e-4, atol=1e-6)


def _pipeline(config, reference):
    """A stage as OLMo-core makes it: a copy of the model without the blocks of the other stages."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    part = copy.deepcopy(config.build(init_device="meta"))
    for index in range(config.n_layers):
        if index != rank:
            del part.blocks[str(index)]
    if rank > 0:
        part.embeddings = None
    if rank < last:
        part.lm_head = None
    whole = reference.state_dict()
    part.load_state_dict({name: whole[name] for name in _drawn(part).state_dict()})
    sites.require_complete(part, config.block.resolved_scheme, config.n_layers, layer_numbers=[rank + 1])
    h = torch.empty(*small.TOKENS.shape, small.WIDTH)
    if rank:
        dist.recv(h, rank - 1)
    with torch.no_grad():
        out = part(h if rank else small.TOKENS)
    if rank < last:
        dist.send(out.contiguous(), rank + 1)
    else:
        torch.testing.assert_close(out, reference(small.TOKENS), rtol=1e-6, atol=1e-6)


def _context_parallel(config, reference):
    """Ulysses: each rank has a part of the sequence outside attention, and a part of the heads inside."""
    built = config.build(init_device="meta")
    built.apply_cp(_mesh(4, mesh_dim_names=("cp",))["cp"], uly=UlyssesContextParallelStyle())
    sites.require_complete(_drawn(built), config.block.resolved_scheme, small.LAYERS)
    rank, length = dist.get_rank(), small.TOKENS.shape[1] // 4
    part = slice(rank * length, (rank + 1) * length)
    expected = reference(small.TOKENS)
    logits = built(small.TOKENS)
    torch.testing.assert_close(logits, expected[:, part], rtol=1e-5, atol=1e-6)
    # The loss is a sum over the sequence, so the ranks' gradients add up to the whole one.
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(5))
    (logits * weight[:, part]).sum().backward()
    gradients = torch.autograd.grad((expected * weight).sum(), list(reference.parameters()))
    wanted = dict(zip(dict(reference.named_parameters()), gradients, strict=True))
    for name, parameter in built.named_parameters():
        dist.all_reduce(parameter.grad)
        torch.testing.assert_close(parameter.grad, wanted[name], rtol=1e-4, atol=1e-5)


CHECKS = {
    **{name: functools.partial(_wrapped, name) for name in WRAPPED},
    "pipeline": _pipeline,
    "context parallel": _context_parallel,
}
