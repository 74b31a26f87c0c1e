"""Record the scheme in torchtitan's checkpoints, and compare it with the built model before weights are loaded.

torchtitan saves no config with a checkpoint. A run under a scheme therefore adds one entry to the state dict of the
checkpoint. The name of this entry contains the spelling of the scheme, so it can be read from the checkpoint's index.
torchtitan and PyTorch's converters ignore the entry, since they only load the entries that they request.
"""

from __future__ import annotations

import functools
import inspect
import logging
from typing import Any, Callable

from olmo_lns.errors import CheckpointMismatchError, one_line
from olmo_lns.integrations.torchtitan.model import LNS_OVERRIDE, scheme_of
from olmo_lns.processes import on_first_rank
from olmo_lns.records import require_same
from olmo_lns.schemes import PRE_LN, Scheme, parse

log = logging.getLogger("olmo_lns")

#: The name of the entry begins in this way. The spelling of the scheme follows.
SCHEME_ENTRY_PREFIX = "olmo_lns.scheme="


def wrap_save(save: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``CheckpointManager.dcp_save``: add the entry if the model has a scheme."""
    signature = inspect.signature(save)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        call = _bound(signature, *args, **kwargs)
        if call is None or (scheme := running_scheme(call.arguments["self"])).is_pre_ln:
            return save(*args, **kwargs)
        if call.arguments.get("to_hf"):
            folder = call.arguments["checkpoint_id"]
            log.warning(
                "%s: the Hugging Face format cannot name %s, and other software would run these weights as Pre-LN. "
                "Fold them first: olmo-lns export %s OUT --scheme %s",
                *(folder, scheme, folder, scheme),
            )
        else:
            call.arguments["state_dict"] = {
                **call.arguments["state_dict"],
                f"{SCHEME_ENTRY_PREFIX}{scheme}": str(scheme),
            }
        return save(*call.args, **call.kwargs)

    return wrapped


def wrap_load(load: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``CheckpointManager.dcp_load``: compare the checkpoint's scheme with the model's."""
    signature = inspect.signature(load)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if (call := _bound(signature, *args, **kwargs)) is not None:
            running, folder = running_scheme(call.arguments["self"]), call.arguments["checkpoint_id"]
            saved: Scheme | None
            if call.arguments.get("from_hf"):  # names no scheme; the weights are a stock model's
                saved, says = PRE_LN, "its format is Hugging Face's, which means"
            else:
                saved, says = on_first_rank(functools.partial(_saved_scheme, folder, running)), "its index says"
            require_same(saved, running, source=folder, setting=_setting, says=says)
        return load(*args, **kwargs)

    return wrapped


def _bound(signature: inspect.Signature, *args: Any, **kwargs: Any) -> inspect.BoundArguments | None:
    """Return the arguments by name, or None if torchtitan's function will refuse them."""
    try:
        return signature.bind(*args, **kwargs)
    except TypeError:
        return None


def running_scheme(manager: Any) -> Scheme:
    """Return the scheme of the model whose checkpoints ``manager`` saves."""
    return scheme_of(getattr(manager.states.get("model"), "model", ()))


def _saved_scheme(folder: str, running: Scheme) -> Scheme | None:
    """Return the scheme of a checkpoint, or None if its index cannot be read and the run is Pre-LN.

    :raises CheckpointMismatchError: if the index cannot be read under another scheme, or names two schemes.
    """
    try:
        return read_scheme(folder)
    except CheckpointMismatchError as error:
        if running.is_pre_ln and error.__cause__ is not None:
            return None  # torchtitan reports it
        raise


def read_scheme(folder: str) -> Scheme:
    """Return the scheme of a checkpoint of torchtitan, which is Pre-LN if the checkpoint has no entry.

    :param folder: folder of the checkpoint, local or remote.
    :raises CheckpointMismatchError: if the index cannot be read, or names two schemes or an unknown one.

    Example: ``str(read_scheme("outputs/checkpoint/step-500"))`` is ``"lns"``.
    """
    from torch.distributed.checkpoint._storage_utils import _storage_setup

    try:
        reader: Any = _storage_setup(None, folder, reader=True)
        names = [name for name in reader.read_metadata().state_dict_metadata if name.startswith(SCHEME_ENTRY_PREFIX)]
        schemes = {parse(name.removeprefix(SCHEME_ENTRY_PREFIX)) for name in names}
    except Exception as error:  # each store's client has its own errors
        raise CheckpointMismatchError(
            f"{folder}: the index of this checkpoint cannot be read ({one_line(error)}). It names the scheme of the "
            "weights. Check the path, or load another checkpoint."
        ) from error
    if len(schemes) > 1:
        raise CheckpointMismatchError(
            f"{folder} names the schemes {', '.join(sorted(map(str, schemes)))}. A checkpoint has one scheme."
        )
    return schemes.pop() if schemes else PRE_LN


def _setting(scheme: Scheme) -> str:
    if scheme.is_pre_ln:
        return f"no {LNS_OVERRIDE} in --override.imports"
    return f"""--override.imports '{LNS_OVERRIDE}={{"scheme": "{scheme}"}}'"""
