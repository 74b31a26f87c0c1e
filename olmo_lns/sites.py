"""Record on modules which factors of a scheme they apply, and read the scheme of a built model from these records.

Such a record is a :class:`SubLayer`, which names a sub-layer of a block. It is stored on the module that applies the
factors of this sub-layer. Under LayerNorm Scaling that is a norm, and the record is a :class:`Site`. Under a scheme
that replaces the forward of OLMo's blocks it is the block, which has a record for each of its sub-layers. This package
never remembers the scheme of a model elsewhere. It reads the records, and compares them with what the modules compute.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, fields
from typing import Any, Iterable, Iterator, NamedTuple

from olmo_lns import initialization
from olmo_lns.errors import LNSConfigError, MeasurementError
from olmo_lns.scaled import restore_class
from olmo_lns.schemes import PRE_LN, SUB_LAYERS, Plan, Scheme


@dataclass(frozen=True)
class SubLayer:
    """One sub-layer of one block under a scheme.

    :param scheme: the scheme of the model.
    :param layer_number: number of the block in the whole model, from 1.
    :param n_layers: number of blocks of the whole model.
    :param sub_layer: ``attn`` or ``ff``.
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


@dataclass(frozen=True)
class Site(SubLayer):
    """A norm that gets the factor of a sub-layer. A norm that both sub-layers read, in a parallel block, has two sites.

    :param branch: ``""`` in most blocks, where each sub-layer has one norm. If a sub-layer has a second branch with its
        own norm, this is the name of that branch. In a hybrid block of OLMo-core, for example, the experts are a branch
        of ``ff`` beside the dense feed-forward.
    """

    branch: str = ""


def store(module: Any, *new: SubLayer) -> None:
    """Store sites on a norm, or sub-layers on a block. The module has to compute their plans.

    :raises LNSConfigError: if the module has a scheme already.
    """
    if present := _of_module(module):
        raise LNSConfigError(
            f"{type(module).__name__} of {present[0]} has the scheme {present[0].scheme} already. A block gets its "
            "scheme once, when it is built."
        )
    module.lns_sub_layers = new


def _of_module(module: Any) -> tuple[SubLayer, ...]:
    # __dict__ is read because wrappers of FSDP and torch.compile forward attribute access to the wrapped module, whose
    # records would then be found twice.
    return tuple(module.__dict__.get("lns_sub_layers", ()))


class SiteInModel(NamedTuple):
    """A record with the module that has it.

    :param name: name of the module in the model.
    :param module: the module.
    :param site: the record, which is a :class:`Site` for a norm, and a :class:`SubLayer` for a block.
    """

    name: str
    module: Any
    site: SubLayer


def in_model(model: Any) -> Iterator[SiteInModel]:
    """Yield all records of a model in the order of its modules. A module may have several."""
    for name, module in model.named_modules():
        for each in _of_module(module):
            yield SiteInModel(name, module, each)


def read_back(model: Any) -> Scheme:
    """Return the scheme of a built model, which is Pre-LN if no module has a record.

    :raises MeasurementError: if the model has several schemes, or a module does not compute the plan of its record.
    """
    records = list(in_model(model))
    if not records:
        return PRE_LN
    schemes = {each.site.scheme for each in records}
    if len(schemes) > 1:
        raise MeasurementError(f"The model has the schemes {', '.join(sorted(map(str, schemes)))}. Expected one.")
    for name, module, site in records:
        computed = module.lns_plan(site.sub_layer) if hasattr(module, "lns_plan") else Plan()
        if computed != site.plan:
            differing = (f.name for f in fields(Plan) if getattr(computed, f.name) != getattr(site.plan, f.name))
            found_instead = (f"{n}={getattr(computed, n)!r}, expected {getattr(site.plan, n)!r}" for n in differing)
            raise MeasurementError(
                f"{name} ({site}): found {'; '.join(found_instead)} under {site.scheme}. The module or "
                "its forward was replaced after the block was built. Apply the scheme after the replacement."
            )
    return records[0].site.scheme


def require_complete(model: Any, scheme: Scheme, n_layers: int, *, layer_numbers: Iterable[int] | None = None) -> None:
    """Check that every sub-layer of every block has exactly one record under ``scheme``, and that there are no others.

    A further branch of a sub-layer may have one, too.

    :param n_layers: number of blocks of the whole model.
    :param layer_numbers: numbers of the blocks in ``model`` if it is a part of the whole. The default is 1 to
        ``n_layers``.
    :raises MeasurementError: if a record is missing, superfluous or under another scheme. The message lists the found
        and the expected sub-layers.
    """
    numbers = range(1, n_layers + 1) if layer_numbers is None else layer_numbers
    expected = [(number, sub_layer) for number in numbers for sub_layer in SUB_LAYERS if not scheme.is_pre_ln]
    branches = [(site.layer_number, site.sub_layer, getattr(site, "branch", "")) for _, _, site in in_model(model)]
    actual = [(number, sub_layer) for number, sub_layer, branch in branches if not branch]
    others = {(number, sub_layer) for number, sub_layer, branch in branches if branch}
    is_complete = sorted(actual) == sorted(expected) and others <= {*expected} and len({*branches}) == len(branches)
    if not is_complete or read_back(model) != scheme:
        raise MeasurementError(
            f"{scheme.definition.title} was selected ({scheme}). Expected it on {expected}, but found "
            f"{read_back(model)} on {len(actual)} sub-layers {actual}. This version of the framework builds its blocks "
            "in a way that olmo-lns does not know. Report this error, or run without a scheme."
        )


def remove_scheme(model: Any) -> None:
    """Remove the scheme from a model. Its modules get back the classes that they had before.

    :raises LNSConfigError: if other code has changed the class of a scaled module since. The model is left unchanged.
    """
    stock = stock_classes(model)
    for module in model.modules():
        _remove_from_module(module, stock.get(module))


def _remove_from_module(module: Any, stock: type | None) -> None:
    if stock is not None:
        restore_class(module, stock)
    vars(module).pop("lns_sub_layers", None)
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
def undo_on_failure(model: Any) -> Iterator[None]:
    """Remove the scheme from a model if the ``with`` block, which attaches and measures it, raises or is interrupted.

    Modules that had a scheme before the block, such as those of another tower, keep it.
    """
    stock = [module for module in model.modules() if not _of_module(module) and "lns_scale" not in vars(module)]
    with initialization.marks_restored_on_failure(model):
        try:
            yield
        except BaseException:
            for module in stock:
                bases = type(module).__dict__.get("lns_bases") if "lns_scale" in vars(module) else None
                _remove_from_module(module, bases[1] if bases else None)
            raise
