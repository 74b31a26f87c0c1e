"""Find the transformer blocks of a model."""

from __future__ import annotations

from torch import nn

from olmo_lns.errors import LNSError

_LISTS = (nn.ModuleList, nn.ModuleDict)


def find_blocks(model: nn.Module, path: str | None = None) -> list[nn.Module]:
    """Return the transformer blocks of ``model`` in order; block ``l`` of the papers is element ``l - 1``.

    The model must have exactly one outermost list of at least two modules of one class. OLMo's block groups are
    resolved to their blocks, also under FSDP.

    :param path: dotted path of the list in ``model``; None detects it.
    :raises LNSError: no list, or several candidates, which the message names.
    """
    lists: dict[str, list[nn.Module]] = {}
    for name, module in model.named_modules():
        members = list(module.children()) if isinstance(module, _LISTS) else []
        outermost = not any(name.startswith(f"{outer}.") for outer in lists)
        if name == path or (outermost and len(members) > 1 and len(set(map(type, members))) == 1):
            lists[name] = members
    selected = path or next(iter(lists), None)
    is_ambiguous = path is None and len(lists) > 1
    if selected not in lists or is_ambiguous:
        candidates = ", ".join(f"{name} ({len(blocks)} x {type(blocks[0]).__name__})" for name, blocks in lists.items())
        raise LNSError(
            f"The blocks of {type(model).__name__} were not found{f' at {path!r}' if path else ''}. Expected exactly "
            f"one list of two or more modules of one class. The model has {candidates or 'none'}. Name the list with "
            "--blocks."
        )
    members = lists[selected]
    inner = [getattr(block, "_fsdp_wrapped_module", block) for block in members]
    if any(isinstance(block, _LISTS) for block in inner):
        members = [block for group in inner for block in group.children()]
    return members
