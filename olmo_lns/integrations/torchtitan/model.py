"""Scale the marked norms of a built decoder, measure them, and check that an override had an effect."""

from __future__ import annotations

import logging
from typing import Any, Callable, Iterator

from olmo_lns import scaled, sites, start_up_line
from olmo_lns.errors import LNSConfigError, MeasurementError
from olmo_lns.hook import require_wrapped
from olmo_lns.integrations.torchtitan.blocks import NORMS, check_block
from olmo_lns.integrations.torchtitan.initializers import remove_depth_factors
from olmo_lns.integrations.torchtitan.norms import arithmetic_of, keep_argument_names
from olmo_lns.integrations.torchtitan.request import Request, take_request
from olmo_lns.measured import Measured
from olmo_lns.schemes import PRE_LN, SUB_LAYERS, Scheme

log = logging.getLogger("olmo_lns")

#: The override that users name in ``--override.imports``.
LNS_OVERRIDE = "olmo_lns.torchtitan.lns"


def wrap_init(init: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``Decoder.__init__``: apply the scheme to a decoder whose norms an override has marked."""

    def wrapped(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        init(self, config, *args, **kwargs)
        requests = [take_request(norm) for _, _, norm in _norms(self)]
        final = take_request(self.norm)
        if any(requests):
            _attach_to_decoder(self, requests)
        elif final is not None:
            require_wrapped("torchtitan")
            remove_depth_factors(self)
            start_up_line.write("Plain initialization on: the initializers have no depth factor")

    return wrapped


def _norms(decoder: Any) -> Iterator[tuple[int, str, Any]]:
    """Yield the number of the block, the sub-layer and its norm for each block. The norm is None if it is missing."""
    for key, block in decoder.layers.items():
        for sub_layer in SUB_LAYERS:
            yield int(key) + 1, sub_layer, getattr(block, NORMS[sub_layer], None)


def _attach_to_decoder(decoder: Any, requests: list[Request | None]) -> None:
    """Scale and measure the norms of a decoder, set its initializers and write the start-up line.

    :param requests: what the override requests from each norm, None for a norm that it did not mark.
    :raises LNSConfigError: if the scheme or the decoder is not supported.
    :raises MeasurementError: if a norm does not apply its factor. The model is left unchanged.
    """
    require_wrapped("torchtitan")
    name, n_layers, dim = type(decoder).__name__, len(decoder.layers), decoder.config.dim
    if (request := requests[0]) is None or any(other != request for other in requests):
        missing = [number for (number, _, _), other in zip(_norms(decoder), requests, strict=True) if other is None]
        raise LNSConfigError(
            f"{name}: blocks {sorted(set(missing))} have no {' or '.join(NORMS.values())} that "
            f"{LNS_OVERRIDE} could mark. A scheme needs both norms, of class RMSNorm, in every block."
        )
    if getattr(decoder.config, "mtp_layers", None):
        raise LNSConfigError(
            f"{name} has modules for multi-token prediction, which no paper has combined with LayerNorm Scaling. "
            "A scheme expects a decoder without them. Leave mtp_layers empty, or remove the override."
        )
    scheme = request.scheme
    scheme.require_only_scales_norms(n_layers, framework="torchtitan")
    measured: set[Measured] = set()
    with sites.undo_on_failure(decoder):
        for number, sub_layer, norm in _norms(decoder):
            site = sites.Site(scheme, number, n_layers, sub_layer)
            keep_argument_names(norm)
            measured |= scaled.scale(norm, site.plan.norm_scale, where=site, width=dim, arithmetic=arithmetic_of(norm))
            sites.store(norm, site)
        sites.require_complete(decoder, scheme, n_layers)
        _check_blocks(decoder, dim)
        measured.add(Measured.SITES)
        if request.plain:
            remove_depth_factors(decoder)
    line = start_up_line.compose(
        decoder,
        n_layers,
        measured=measured,
        norm=", ".join(dict.fromkeys(type(norm).__name__ for _, _, norm in _norms(decoder))),
        initialization="scaled initialization " + ("off" if request.plain else "kept"),
    )
    start_up_line.write(line)


def _check_blocks(decoder: Any, dim: int) -> None:
    """Check one block of each structure with :func:`check_block`."""
    seen = set()
    for key, block in decoder.layers.items():
        structure = (type(block), tuple((name, type(child)) for name, child in block.named_children()))
        if structure not in seen:
            seen.add(structure)
            check_block(block, dim, number=int(key) + 1)


def wrap_train(train: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``Trainer.train``: check that the override had an effect, and that each block still has its scheme."""

    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        imports = self.config.override.imports
        targets = {entry if isinstance(entry, str) else entry[0] for entry in imports}
        if LNS_OVERRIDE in targets and scheme_of(self.model_parts).is_pre_ln:
            raise LNSConfigError(
                f"{LNS_OVERRIDE} had no effect on {self.config.model_spec.name}. It marks norms of class RMSNorm that "
                f"are called {' and '.join(NORMS.values())} in the layers of a decoder. This model has none. Remove "
                "the override."
            )
        for part in self.model_parts:
            check_part(part)
        return train(self, *args, **kwargs)

    return wrapped


def check_part(part: Any) -> None:
    """Check the blocks of a model, or of a pipeline stage, after torchtitan has divided and wrapped it.

    :raises MeasurementError: if a block has lost its scheme, or has another number than its place in the whole model.
    """
    found = sorted((each.site.layer_number, each.site.sub_layer) for each in sites.in_model(part))
    expected = [(int(key) + 1, sub_layer) for key in getattr(part, "layers", {}) for sub_layer in SUB_LAYERS]
    if found and found != sorted(expected):
        raise MeasurementError(
            f"{type(part).__name__}: found a scheme on the sub-layers {found}, expected {sorted(expected)}. A "
            "module was replaced or moved after the model was built. Report this error with the command that you ran."
        )


def scheme_of(parts: Any) -> Scheme:
    """Return the scheme of a model's parts in this process, which is Pre-LN if they have no site.

    :raises MeasurementError: if the parts have different schemes.
    """
    # sites.read_back cannot be used, because torchtitan wraps the forward of a norm that it shards.
    schemes = {each.site.scheme for part in parts for each in sites.in_model(part)}
    if len(schemes) > 1:
        raise MeasurementError(f"The model has the schemes {', '.join(sorted(map(str, schemes)))}. Expected one.")
    return schemes.pop() if schemes else PRE_LN
