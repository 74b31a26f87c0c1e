"""For launches of torchtitan on a CPU: what torchtitan takes from CUDA.

``TORCHTITAN_SITE`` is a folder that ``site`` reads like site-packages, in which this package is installed.
With ``TORCHTITAN_HOOKS`` in the environment, llama3 is the reference of LayerNorm Scaling, by hooks on the stock model.
``TORCHTITAN_LOSSES`` is a file for the losses of each step, which torchtitan's log rounds.
torchtitan's device is the CPU, its memory monitor reads nothing, and its flex attention, which has no backward on a CPU,
is PyTorch's scaled dot-product attention. The block mask of a text is causal; the tests' texts are one document.
"""

import inspect
import os
import site
from functools import partial
from types import SimpleNamespace

import torch
import torch._utils
import torch.nn.functional as F
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining.schedules import PipelineScheduleMulti
from torch.nn.attention.flex_attention import AuxOutput, create_block_mask

if "TORCHTITAN_SITE" in os.environ:
    site.addsitedir(os.environ["TORCHTITAN_SITE"])

torch._utils._get_available_device_type = lambda: "cpu"
torch.cpu.get_device_name = lambda device: "CPU"
torch.cpu.current_device = lambda: 0
torch.cpu.get_device_properties = lambda device: SimpleNamespace(total_memory=1, name="CPU")
torch.cpu.memory_stats = lambda device: {}
torch.cpu.reset_peak_memory_stats = torch.cpu.empty_cache = lambda: None


def _attention(q, k, v, *, score_mod, block_mask, scale, enable_gqa, return_aux, kernel_options):
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=enable_gqa)
    return out, AuxOutput(lse=torch.zeros_like(out[..., 0]))


import torchtitan.models.common.attention as attention  # noqa: E402

attention.FlexAttention._compiled_flex_attn = _attention
attention._compiled_create_block_mask = create_block_mask  # compiling it takes minutes
_divide = FSDPModule.set_gradient_divide_factor


def _divide_by_sum(self, factor):
    self.set_force_sum_reduction_for_comms(True)  # gloo cannot multiply while it adds
    return _divide(self, factor)


FSDPModule.set_gradient_divide_factor = _divide_by_sum
# Newer than torch 2.13; torchtitan calls it after the first step.
torch.distributed.set_timeout = getattr(torch.distributed, "set_timeout", lambda timeout, group: None)


def _step(self, *, arg_mbs, kwarg_mbs, target_mbs, losses, loss_kwargs, return_outputs):
    for stage in self._stages:
        stage.has_backward = self._has_backward
        stage.clear_runtime_states()
    self._step_microbatches(arg_mbs, kwarg_mbs, target_mbs, losses, return_outputs, loss_kwargs=loss_kwargs)


if "arg_mbs" not in inspect.signature(PipelineScheduleMulti.step).parameters:
    PipelineScheduleMulti.step = _step  # newer than torch 2.13: torchtitan divides its batch into microbatches


def _with_hooks(init):
    def wrapped(self, config):
        init(self, config)
        for index, block in enumerate(self.layers.values()):
            for norm in (block.attention_norm, block.ffn_norm):
                norm.register_forward_hook(lambda module, args, output, s=(index + 1) ** -0.5: output * s)
            for linear in (block.attention.wo, block.feed_forward.w2, block.feed_forward.w3):
                linear._param_init = {"weight": partial(torch.nn.init.trunc_normal_, std=0.02)}

    return wrapped


if os.environ.get("TORCHTITAN_HOOKS"):
    import torch._dynamo
    from torchtitan.models.common.decoder import Decoder

    # A compiled block has its own factor. torch 2.13 cannot make it an input of the regions that torchtitan's main
    # compiles with Inductor.
    torch._dynamo.config.specialize_float = True
    Decoder.__init__ = _with_hooks(Decoder.__init__)


def _with_losses(log):
    def wrapped(self, step, global_avg_loss, *args, **kwargs):
        with open(os.environ["TORCHTITAN_LOSSES"], "a") as file:
            print(repr(float(global_avg_loss)), file=file)
        return log(self, step, global_avg_loss, *args, **kwargs)

    return wrapped


if os.environ.get("TORCHTITAN_LOSSES"):
    from torchtitan.components.metrics import MetricsProcessor

    MetricsProcessor.log = _with_losses(MetricsProcessor.log)
