"""Write the start-up line for any model."""

from __future__ import annotations

from typing import Collection

from torch import nn

from olmo_lns import shadow, start_up_line
from olmo_lns.integrations.any_model.located import Located
from olmo_lns.measured import Measured
from olmo_lns.processes import is_first_process


def write_start_up_line(
    model: nn.Module, located: Located, measured: Collection[Measured], initialization: str = ""
) -> None:
    """Write the start-up line in the first process.

    :param measured: what was measured, from :func:`scale_norms`.
    :param initialization: what the line says about the initialization.
    """
    if not is_first_process():
        return
    norms = nn.ModuleList(model.get_submodule(name) for names in located.norms for name in names)
    if initialization and not any(map(shadow.has_no_values, model.parameters())):
        measured = {*measured, Measured.INITIALIZATION}
    kinds = dict.fromkeys(type(module).__name__ for module in norms)
    line = start_up_line.compose(
        norms, len(located.norms), measured=measured, norm=", ".join(kinds), initialization=initialization
    )
    if located.sites_from != "probe":
        line += f"; sites from {located.sites_from}, not measured"
    if located.cancelled:
        line += f"; a later norm cancels the factor of {', '.join(located.cancelled)}"
    if located.partly_cancelled:
        line += f"; a later norm cancels the factor of {', '.join(located.partly_cancelled)} in a part of its branch"
    for name, module in model.named_modules():
        is_inner = name and "transformers.modeling_utils" in [base.__module__ for base in type(module).__mro__]
        if is_inner and all(norm.startswith(f"{name}.") for names in located.norms for norm in names):
            line += f"; the config of {name} does not name the scheme: to save this part alone, apply the scheme to it"
            break
    if located.not_run:
        line += f"; left as it is, since the example does not run it: {', '.join(located.not_run)}"
    start_up_line.write(line)
