"""Record on modules which factors of a scheme they apply, and read the scheme of a built model from these records.

Such a record is a :class:`Site`. It names a sub-layer of a block, and is stored on the module that applies the factors
of this sub-layer. Under LayerNorm Scaling that is the norm. This package never remembers the scheme of a model
elsewhere. It reads the sites of the model, and compares them with what the modules compute.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, fields
from typing import Any, Iterable, Iterator

from olmo_lns import initialization
from olmo_lns.errors import LNSConfigError, MeasurementError
from olmo_lns.scaled import restore_class
from olmo_lns.schemes import PRE_LN, SUB_LAYERS, Plan, Scheme


@dataclass(frozen=True)
class Site:
    """One sub-layer of one block under a scheme.

    :param scheme: the scheme of the model.
    :param layer_number: number of the block in the whole model, from 1.
    :param n_layers: number of blocks of the whole model.
    :param sub_layer: ``attn`` or ``ff``. The norm of a parallel block, which both read, has two sites.
    """

    scheme: Scheme
    layer_number: int
    n_layers: int
    sub_layer: str

    @property
    def plan(self) -> Plan:
        return self.scheme.plan(self.layer_number, self.n_layers, self.sub_layer)

    def __str__(self) -> str:
        return f"block {self.layer_number}, {self.sub_layer}"


def mark(module: Any, *new_sites: Site) -> None:
    """Store sites on ``module``, which has to compute the plans of these sites.

    :raises LNSConfigError: if the module has a scheme already.
    """
    if present_sites := _sites_of(module):
        raise LNSConfigError(
            f"{type(module).__name__} of {present_sites[0]} has the scheme {present_sites[0].scheme} already. A block "
            "gets its scheme once, when it is built."
        )
    module.lns_sites = new_sites


def _sites_of(module: Any) -> tuple[Site, ...]:
    # __dict__ is read because wrappers of FSDP and torch.compile forward attribute access to the wrapped module, whose
    # sites would then be found twice.
    return tuple(module.__dict__.get("lns_sites", ()))


def in_model(model: Any) -> Iterator[tuple[str, Any, Site]]:
    """Yield ``(name of the module, module, site)`` for each site of ``model``, in the order of its modules."""
    for name, module in model.named_modules():
        for site in _sites_of(module):
            yield name, module, site


def read_back(model: Any) -> Scheme:
    """Return the scheme of a built model, which is Pre-LN if the model has no site.

    :raises MeasurementError: if the model has several schemes, or a module does not compute the plan of its site.
    """
    model_sites = list(in_model(model))
    if not model_sites:
        return PRE_LN
    schemes = {site.scheme for _, _, site in model_sites}
    if len(schemes) > 1:
        raise MeasurementError(f"The model has the schemes {', '.join(sorted(map(str, schemes)))}. Expected one.")
    for name, module, site in model_sites:
        computed = module.lns_plan(site.sub_layer) if hasattr(module, "lns_plan") else Plan()
        if computed != site.plan:
            differing = (f.name for f in fields(Plan) if getattr(computed, f.name) != getattr(site.plan, f.name))
            found_instead = (f"{n}={getattr(computed, n)!r}, expected {getattr(site.plan, n)!r}" for n in differing)
            raise MeasurementError(
                f"{name} ({site}): found {'; '.join(found_instead)} under {site.scheme}. The module or "
                "its forward was replaced after the block was built; apply the scheme after the replacement."
            )
    return model_sites[0][2].scheme


def require_complete(model: Any, scheme: Scheme, n_layers: int, *, layer_numbers: Iterable[int] | None = None) -> None:
    """Check that every sub-layer of every block has exactly one site under ``scheme``, and that there are no others.

    :param n_layers: number of blocks of the whole model.
    :param layer_numbers: numbers of the blocks in ``model`` if it is a part of the whole; by default 1 to ``n_layers``.
    :raises MeasurementError: if a site is missing, superfluous or under another scheme. The message lists the found and
        the expected sub-layers.
    """
    numbers = range(1, n_layers + 1) if layer_numbers is None else layer_numbers
    expected = [(number, sub_layer) for number in numbers for sub_layer in SUB_LAYERS if not scheme.is_pre_ln]
    actual = [(site.layer_number, site.sub_layer) for _, _, site in in_model(model)]
    if sorted(actual) != sorted(expected) or read_back(model) != scheme:
        raise MeasurementError(
            f"{scheme.definition.title} was selected ({scheme}). Expected it on {expected}, but found "
            f"{read_back(model)} on {len(actual)} sub-layers {actual}. This version of the framework builds its blocks "
            "in a way that olmo-lns does not know. Report this error, or run without a scheme."
        )


def restore(model: Any) -> None:
    """Remove the scheme from a model. Its modules get back the classes that they had before.

    :raises LNSConfigError: if other code has changed the class of a scaled module since. The model is left unchanged.
    """
    stock = stock_classes(model)
    for module in model.modules():
        _restore_module(module, stock.get(module))


def _restore_module(module: Any, stock: type | None) -> None:
    if stock is not None:
        restore_class(module, stock)
    vars(module).pop("lns_sites", None)
    initialization.unmark(module)


def stock_classes(model: Any) -> dict[Any, type]:
    """Return the class that each scaled module had before the scheme was applied.

    :raises LNSConfigError: if other code has changed the class of a scaled module since.
    """
    stock: dict[Any, type] = {}
    for name, module in model.named_modules():
        if "lns_scale" not in vars(module):
            continue
        bases = type(module).__dict__.get("lns_bases")
        if bases is None:
            raise LNSConfigError(
                f"Other code has changed the class of {name or 'the norm'} to {type(module).__name__} after the scheme "
                "was applied. A parametrization and fully_shard do this. Expected the class that the scheme had set. "
                "Undo that change first, for example with torch.nn.utils.parametrize.remove_parametrizations."
            )
        stock[module] = bases[1]
    return stock


@contextlib.contextmanager
def stock_on_failure(model: Any) -> Iterator[None]:
    """Remove the scheme from a model if the ``with`` block, which attaches and measures it, raises or is interrupted.

    Modules that had a scheme before the block, such as those of another tower, keep it.
    """
    stock = [module for module in model.modules() if not _sites_of(module) and "lns_scale" not in vars(module)]
    with initialization.marks_restored_on_failure(model):
        try:
            yield
        except BaseException:
            for module in stock:
                bases = type(module).__dict__.get("lns_bases") if "lns_scale" in vars(module) else None
                _restore_module(module, bases[1] if bases else None)
            raise
