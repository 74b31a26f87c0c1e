"""The interface of an integration for models that are built already.

:class:`Integration` says what ``olmo_lns.apply``, ``olmo_lns.fold`` and ``olmo_lns.plain_initialization`` need of a
framework. It is complete by itself, as the integration of any PyTorch model. A framework that differs has a subclass in
its module ``integration``, whose instance is called ``INTEGRATION``, and overrides only what differs.
"""

from __future__ import annotations

from typing import Any, Callable, Sequence, Sized

from torch import nn

from olmo_lns import environment, initialization, sites
from olmo_lns.errors import LNSConfigError
from olmo_lns.folding import check_finite, fold_norms
from olmo_lns.integrations import any_model
from olmo_lns.integrations.any_model import Located
from olmo_lns.integrations.hints import Hints
from olmo_lns.norm import NormArithmetic, arithmetic_of_torch
from olmo_lns.processes import same_outcome_on_every_rank
from olmo_lns.schemes import Scheme
from olmo_lns.shadow import has_no_values

__all__ = ["Integration", "fold_model"]

#: Most models have at most this number of blocks.
_USUAL_DEPTH = 128


class Integration:
    """The methods that the public functions call for a framework. This class itself is for models of no framework."""

    # --- what is known about a framework's models

    def blocks_of(self, model: Any) -> Sequence[nn.Module] | None:
        """Return the blocks of a model in order. None means that they have to be found."""
        return None

    def arithmetic_of(self, norm: nn.Module) -> NormArithmetic | None:
        """Return the arithmetic of a norm, or None if it is unknown. The output of such a norm is multiplied."""
        return arithmetic_of_torch(norm)

    def forward(self, model: nn.Module, example: Any) -> Callable[[], Any]:
        """Return a function that runs one forward of a model on ``example`` or, if this is None, on a usual input."""
        return any_model.forward(model, example)

    def locate(
        self,
        model: nn.Module,
        hints: Hints,
        find: Callable[..., Located] = any_model.locate,
    ) -> Located:
        """Find the norms before the branches of a model.

        :param find: :func:`~olmo_lns.integrations.any_model.locate`, or the function that does so in the first process.
        """
        blocks = self.blocks_of(model) if hints.blocks is None and hints.norms is None else hints.blocks
        return find(model, hints.example, blocks, hints.norms, arithmetic_of=self.arithmetic_of)

    # --- apply

    def require_supported(self, model: nn.Module, scheme: Scheme, hints: Hints) -> None:
        """Check what can be checked before a model is run.

        Whether a scheme only multiplies norms may depend on the number of blocks, as with ``mixln``. If this number is
        not known before the model has run, :func:`~olmo_lns.integrations.any_model.scale_norms` makes this check. Here
        a scheme is then refused only if it does more at every usual depth.

        :raises LNSConfigError: if the integration does not support the scheme, the model or a hint.
        """
        environment.check()
        any_model.require_unwrapped(model)
        known: Any = hints.norms if hints.norms is not None else hints.blocks
        known = self.blocks_of(model) if known is None else known
        depths = [len(known)] if isinstance(known, Sized) else range(1, _USUAL_DEPTH + 1)
        n_layers = next(filter(scheme.only_scales_norms, depths), depths[-1])
        scheme.require_only_scales_norms(n_layers, framework="olmo_lns.apply")

    def apply(self, model: Any, scheme: Scheme, hints: Hints) -> None:
        """Apply a scheme to a built model. Every process of a launch must call this.

        If it raises in one process, it raises in all of them, and each leaves its model unchanged.
        """
        with same_outcome_on_every_rank():
            located = self.locate(model, hints, any_model.locate_on_first_rank)
        with sites.undo_on_failure(model):
            with same_outcome_on_every_rank():
                part = any_model.why_trained_of(model, located)
                measured = any_model.scale_norms(
                    model, located, scheme, self.arithmetic_of, why_trained=part, trained=hints.trained
                )
                any_model.check_without_hooks(model, located, hints.example)
                found = any_model.describe_initialization(model, located, part)
            self.record_scheme(model, scheme)  # no process has failed
        any_model.write_start_up_line(model, located, measured, found)

    def record_scheme(self, model: Any, scheme: Scheme) -> None:
        """Name the scheme in the config of a model, if the framework saves this config with a checkpoint."""

    # --- fold

    def require_foldable(self, model: Any) -> None:
        """Check that a scheme can be folded into the weights of a model.

        :raises LNSConfigError: if it cannot.
        """

    def remove_recorded_scheme(self, model: Any) -> None:
        """Remove the scheme from the config and the class of a model whose factors have been folded."""

    # --- plain initialization

    def plain_initialization(self, config: Any) -> None:
        """Mark a config, so that the model which is built from it is initialized without a depth factor.

        :raises LNSConfigError: if the framework has no such config.
        """
        raise LNSConfigError(
            f"plain_initialization found an object of the type {type(config).__name__}. It expects a built model, "
            "or the config of an OLMo or a Megatron model before it is built."
        )

    def make_plain(self, model: nn.Module, hints: Hints) -> str:
        """Remove the depth factor from the weights of a built model.

        :returns: a line that describes the change.
        :raises LNSConfigError: if the weights are trained or were drawn by another rule. Nothing is changed then.
        """
        is_marked = any(True for _ in initialization.marked_matrices(model))
        if is_marked and hints.blocks is None and hints.example is None:  # it may be sharded by now
            return initialization.make_plain(model)
        if not is_marked and any(sites.in_model(model)):
            raise LNSConfigError(
                f"{type(model).__name__}: its norms were passed as norms=, so its residual output projections are not "
                "known and cannot be measured. Draw these weights like all others, without a depth factor."
            )
        any_model.require_unwrapped(model)
        located = self.locate(model, hints)
        found = nn.ModuleList(located.blocks_of(model))
        with initialization.marks_restored_on_failure(model):
            initialization.mark_matrices(list(found), located.projections, located.norms_of(model))
            if any(map(has_no_values, model.parameters())):
                return (
                    "plain initialization: projections found; call it again in every process once the weights are drawn"
                )
            return initialization.make_plain(model if not is_marked else found)


def fold_model(
    model: nn.Module,
    parts: Sequence[tuple[nn.Module, Integration]],
    forward: Callable[[], Callable[[], Any]],
    dtype: Any = None,
) -> None:
    """Fold the factors of a model into its weights, and remove the scheme from the configs of its parts.

    :param parts: the models of a framework in ``model``, which may be itself or a tower, with their integrations.
    :param forward: returns the function that runs one forward of the model.
    :param dtype: as in :func:`olmo_lns.fold`.
    :raises LNSConfigError: if the model has no scheme, or its factors cannot be folded. The model is left unchanged.
    :raises MeasurementError: if the output would change. The model is left unchanged.
    """
    model_sites = [each.site for each in sites.in_model(model)]
    if not model_sites:
        raise LNSConfigError(
            f"{type(model).__name__} has no scheme, so there is nothing to fold. It is a stock model already."
        )
    check_finite(model.named_parameters())  # outputs of NaN would prove nothing
    for part, integration in parts:
        integration.require_foldable(part)
    if not sites.read_back(model).only_scales_norms(max(site.n_layers for site in model_sites)):
        raise LNSConfigError(
            f"{type(model).__name__} has the scheme {sites.read_back(model)}, which replaces the forward of the "
            "blocks. Only schemes that multiply norms can be folded in memory. Save the model, and run olmo-lns "
            "export CHECKPOINT OUT."
        )
    with any_model.undisturbed(model):
        fold_norms(model, forward(), dtype)
    for part, integration in parts:
        integration.remove_recorded_scheme(part)
