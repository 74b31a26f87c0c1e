"""For launches on a CPU: replace NCCL and CUDA's memory counters, which OLMo-core's scripts need, and nothing else.

In processes of OLMo-core's own tests (support/olmo_core_under_schemes.py) its models get a scheme.
"""

import importlib
import os

from olmo_lns.hook import on_import


def _without_cuda(module):
    for name in ("pre_train", "post_step"):
        setattr(module.GPUMemoryMonitorCallback, name, lambda self: None)


on_import("olmo_core.train", lambda module: module.prepare_training_environment.__kwdefaults__.update(backend="gloo"))
on_import("olmo_core.train.callbacks.gpu_memory_monitor", _without_cuda)

if os.environ.get("OLMO_CORE_UNDER_SCHEMES"):
    on_import("olmo_core.nn.transformer", lambda module: importlib.import_module("support.olmo_core_under_schemes"))
