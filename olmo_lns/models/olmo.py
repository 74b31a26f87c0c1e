"""An OLMo checkpoint as the model it was trained as."""

from __future__ import annotations

import os
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Iterator
from unittest import mock

from torch import nn

from olmo_lns import environment
from olmo_lns.errors import LNSConfigError, one_line
from olmo_lns.record import Record

__all__ = ["open_olmo"]


def open_olmo(folder: Path) -> nn.Module:
    """OLMo's model on the CPU, in fp32 and evaluation mode; what was trained says its record, not this process.

    :raises CheckpointMismatchError: the record is lost, and the config alone does not say the scheme's parameters.
    :raises LNSConfigError: weights that are damaged or of another model.
    """
    from olmo_lns.integrations.olmo import register

    register()  # first: the integration's other modules import OLMo, which would load the plugin from inside one
    from olmo.config import ModelConfig
    from olmo.exceptions import OLMoConfigurationError
    from olmo.model import OLMo

    from olmo_lns.integrations.olmo.checkpoint import saved_record
    from olmo_lns.integrations.olmo.config import check_sizes

    path = folder / "config.yaml"
    with _selected(saved_record(folder) or Record()):
        try:
            check_sizes(ModelConfig.load(path, key="model", validate_paths=False))
        except OLMoConfigurationError as error:
            raise LNSConfigError(f"{path}: {one_line(error)}") from None
        model = OLMo.from_checkpoint(str(folder), device="cpu") if (folder / "model.pt").is_file() else _sharded(folder)
    return model.float().eval()


@contextmanager
def _selected(record: Record) -> Iterator[None]:
    """The record's scheme in place of what the environment selects."""
    with mock.patch.dict(os.environ):
        for name in (environment.SCHEME, environment.INITIALIZATION):
            os.environ.pop(name, None)
        if record.active:
            os.environ[environment.SCHEME] = str(record.scheme)
        yield


def _sharded(folder: Path) -> Any:
    """A ``torch_new`` checkpoint, read by our own reader: OLMo 0.6.0's cannot be made under torch >= 2.6."""
    from olmo.config import ModelConfig
    from olmo.model import OLMo

    from olmo_lns.checkpoints.olmo import OLMoCheckpoint

    config = ModelConfig.load(folder / "config.yaml", key="model", validate_paths=False)
    config.init_device = "cpu"
    model = OLMo(config, init_params=False)
    state = {name: tensor.load() for name, tensor in OLMoCheckpoint.open(folder).tensors.items()}
    model.load_state_dict(model._make_state_dict_compatible(state)[0])
    return model
