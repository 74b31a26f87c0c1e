"""Find the modules outside of a model's blocks that may be further blocks.

A module looks like a block if one of three things is true:

* It has the class of a block.
* It has a norm before a branch. In ``x + mlp(norm(x))`` the input x of the norm reaches the sum in two ways, through
  the norm and past it. :func:`similar_modules` runs the model with gradients, which show the way past the norm.
* It has no norms as modules, but it normalizes its input by a function, as ``x + mlp(F.layer_norm(x, …))`` does.
  :func:`functional_blocks` runs a copy of the module alone, once on x and once on 4·x. A module looks like a block if
  it adds the same to both streams.
"""

from __future__ import annotations

import functools
import math
from typing import Any, Callable, Iterable, Mapping, Sequence

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from olmo_lns import probe
from olmo_lns.errors import LNSConfigError
from olmo_lns.response import first_output, replace_first
from olmo_lns.whole_model.names import is_inside
from olmo_lns.whole_model.trace import Trace, replace_stream, trace_forward

#: A stream of standard normal numbers is multiplied by these two numbers. Both are so large that the eps of a norm has
#: no effect. The second norm of a block reads the stream plus the output of the first branch. Beside a stream of this
#: size, that output is small.
_LARGE, _LARGER = 64.0, 256.0
#: The stream is also multiplied by this smaller number. A function that saturates, such as tanh, is then still far from
#: its limit, so its output differs from that for a large stream. The output of a norm does not.
_ORDINARY = 4.0
#: Two results are different if their difference is more than this share of their size. What a block with norms adds to
#: the stream changes by less than this share between the two large sizes. It is not exactly the same, because its
#: second branch also reads the output of the first branch, which is a larger part of the smaller stream.
_OTHER = 0.2
#: A difference below this share of the size is rounding, or the effect of the eps of a norm.
_NOTHING = 1e-3
#: All rows that a norm without gain returns have the same size. Rounding and eps change their sizes by less than this
#: share.
_EQUAL_ROWS = 3e-3


def stream_widths(blocks: Sequence[nn.Module], trace: Trace) -> set[int]:
    """Return the widths of the blocks' streams.

    They include the last dimension of the inputs of norms that read the stream in another order of its dimensions.
    """
    widths: set[int] = set()
    for block in blocks:
        if (call := trace.calls[block]) is not None:
            shapes = [trace.shapes[part] for part in block.modules() if part in trace.norm_calls]
            sizes = [shape[-1] for shape in shapes if math.prod(shape) == call.stream.numel()]
            widths |= {call.stream.shape[-1], *(size for size in sizes if size in call.stream.shape)}
    return widths


def similar_modules(
    model: nn.Module, blocks: Iterable[nn.Module], trace: Trace, widths: set[int], run: Callable[[], Any]
) -> dict[str, nn.Module]:
    """Return the modules outside of the blocks that ran and may be further blocks or parts of them.

    The result has three kinds of modules. The first kind has the class of a block. The second has two or more norms of
    the blocks' width, and at least one of them is before a branch. The third kind is a single norm before a branch.
    """
    blocks = list(blocks)
    kinds, inner = {type(block) for block in blocks}, {module for block in blocks for module in block.modules()}
    similar: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        parts = set(module.modules())
        if module in inner or any(is_inside(name, outer) for outer in similar):
            continue
        if type(module) in kinds - {nn.Sequential} and module in trace.runs:
            similar[name] = module
            continue
        if parts & inner:  # a module around the blocks
            continue
        norms = [part for part in parts if part in trace.runs and trace.is_norm(part)]
        if sum(trace.shapes.get(norm, (0,))[-1] in widths for norm in norms) > 1:
            similar[name] = module
    around = _norms_on_branches(model, blocks, trace, widths, run)
    if around is None:
        return similar
    kinds = kinds - {nn.Sequential}
    similar = {
        name: module
        for name, module in similar.items()
        if around.intersection(module.modules()) or any(type(part) in kinds for part in module.modules())
    }
    named = {part for module in similar.values() for part in module.modules()}
    rest = around - named
    if len(rest) == 1 and not similar and all(map(_runs_after(blocks, trace), rest)):  # of a head
        rest = set()
    return similar | {name: module for name, module in model.named_modules() if module in rest}


def _norms_on_branches(
    model: nn.Module, blocks: Iterable[nn.Module], trace: Trace, widths: set[int], run: Callable[[], Any]
) -> set[nn.Module] | None:
    """Return the norms outside of the blocks that are before a branch, so that their input also bypasses them.

    :returns: the norms, or None if the model has no gradients.
    """
    blocks = [block for block in blocks if trace.runs.get(block) == 1]
    inner = {module for block in blocks for module in block.modules()}
    dims = {call.stream.dim() for block in blocks if (call := trace.calls.get(block)) is not None}
    norms = {
        module
        for module in trace.runs
        if module not in inner
        and trace.is_norm(module)
        and (trace.shapes.get(module, (0,))[-1] in widths or len(trace.shapes.get(module, ())) in dims & {3})
    }
    order = list(trace.runs)
    last = max((order.index(block) for block in blocks), default=-1)
    if len(norms) < 2 and not any(order.index(norm) < last for norm in norms):  # only the final norm
        return set()
    leaves = [m for m in trace.runs if m not in inner and m not in norms and not list(m.children())]
    return _BypassedNorms().search(blocks, norms, leaves, run)


class _BypassedNorms:
    """A forward with gradients that finds the norms whose input also bypasses them.

    The search detaches the output of each norm, so that no gradient flows through the norm. It then looks at each
    tensor that the next block reads, or that the model returns. If this tensor still has a gradient with respect to the
    input of the norm, the input has bypassed the norm.

    This alone does not make the norm part of a block. Suppose that a model computes
    ``early_logits = head(norm(x))`` between two blocks. The stream x bypasses this norm on its way to the next block,
    but no block ever reads the output of the norm. The search therefore returns a norm only if a tensor that a later
    block reads, or the tensor that was reached past the norm, also has a gradient with respect to the norm's output.

    The blocks themselves run without gradients.
    """

    def __init__(self) -> None:
        self.found: set[nn.Module] = set()
        #: The norms since the last block, with their inputs and outputs.
        self._pending: list[tuple[nn.Module, torch.Tensor, torch.Tensor]] = []
        #: Norm that was bypassed -> its output, which has not arrived at a block yet.
        self._tapped: dict[nn.Module, torch.Tensor] = {}
        self._generator = torch.Generator().manual_seed(8)

    def search(
        self,
        blocks: Iterable[nn.Module],
        norms: Iterable[nn.Module],
        leaves: Iterable[nn.Module],
        run: Callable[[], Any],
    ) -> set[nn.Module] | None:
        """Run the model, and return the norms that are bypassed, or None if the model has no gradients.

        :param blocks: the blocks, which are no part of the search.
        :param norms: the norms outside of the blocks.
        :param leaves: the other modules outside of the blocks that have no children.
        """
        handles = [block.register_forward_pre_hook(self._before_block, with_kwargs=True) for block in blocks]
        handles += [block.register_forward_hook(self._after_block) for block in blocks]
        handles += [norm.register_forward_hook(self._after_norm, with_kwargs=True) for norm in norms]
        handles += [
            leaf.register_forward_hook(self._after_leaf)
            for leaf in leaves
            if not isinstance(leaf, torch.jit.ScriptModule)
        ]
        with probe.hooks(handles), torch.enable_grad():
            try:
                output = run()
                self._settle(dict(output) if isinstance(output, Mapping) else output, is_end=True)
            except (RuntimeError, LNSConfigError):  # a function without gradients
                return None
        return self.found

    def _settle(self, values: Any, *, is_end: bool = False) -> None:
        """Add those norms to the result whose inputs and outputs have an effect on one of these values.

        :param is_end: true for what the model returns, and false for the arguments of a block.
        """
        targets = [leaf for leaf in tree_leaves(values) if torch.is_tensor(leaf) and leaf.requires_grad]
        for target in targets if self._pending or self._tapped else []:
            direction = torch.randn(target.shape, generator=self._generator, device="cpu").to(target)
            gradients = functools.partial(
                torch.autograd.grad, target, grad_outputs=direction, retain_graph=True, allow_unused=True
            )
            for norm, value, output in self._pending:
                bypass, branch = gradients((value, output))
                if bypass is None or not bool(bypass.any()):
                    continue
                if branch is None:
                    self._tapped.setdefault(norm, output)
                else:
                    self.found.add(norm)
            for norm, output in [] if is_end else self._tapped.items():
                if gradients((output,))[0] is not None:
                    self.found.add(norm)
        self._pending.clear()

    def _before_block(self, block: nn.Module, args: Any, kwargs: Any) -> None:
        self._settle((args, dict(kwargs)))
        torch.set_grad_enabled(False)

    def _after_block(self, block: nn.Module, args: Any, output: Any) -> Any:
        torch.set_grad_enabled(True)
        stream = probe.stream_of(output)
        return output if stream is None else replace_stream(output, stream.detach().requires_grad_())

    def _after_norm(self, norm: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        value = next(iter((*args, *kwargs.values())), None)
        output = tree_map(lambda leaf: leaf.detach() if torch.is_tensor(leaf) else leaf, output)
        if torch.is_tensor(value) and value.requires_grad and torch.is_tensor(y := first_output(output)):
            self._pending.append((norm, value, y.requires_grad_()))
            return replace_first(output, y.clone())  # the model may change it in place, which a leaf forbids
        return output

    def _after_leaf(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Require gradients for an output that has none, since its module has no trainable weights."""
        y = first_output(output)
        is_start = torch.is_tensor(y) and y.is_floating_point() and torch.is_grad_enabled() and not y.requires_grad
        return replace_first(output, y.detach().requires_grad_()) if is_start else output


def functional_blocks(
    model: nn.Module, blocks: Iterable[nn.Module], trace: Trace, widths: set[int], run: Callable[[], Any]
) -> dict[str, nn.Module]:
    """Return the modules outside of the blocks that may be blocks although they contain no norm as a module.

    Such a module normalizes a stream of the blocks' width by a function or in its own code, and adds the result of a
    branch to the stream. The function runs the model once more to record the call of each candidate, and then tests a
    copy of the candidate on this call.
    """
    inner = {module for block in blocks for module in block.modules()}
    candidates = {
        name: module
        for name, module in model.named_modules()
        if trace.runs.get(module) == 1
        and trace.widths.get(module) in widths
        and not inner.intersection(module.modules())
        and not (trace.is_norm(module) or type(module).__module__.startswith("torch.nn."))
        and any(parameter.dim() > 1 for parameter in module.parameters())
    }
    if not candidates:
        return {}
    calls = trace_forward(model, run, candidates.values()).calls
    found: dict[str, nn.Module] = {}
    branches: dict[str, int] = {}
    for name, module in candidates.items():
        call = calls.get(module)
        inside = any(is_inside(name, outer) for outer in found)
        if call is not None and not inside and (count := _normed_branches(module, call)):
            found[name], branches[name] = module, count
    # One branch after the blocks that mixes no positions belongs to a head.
    is_head = sum(branches.values()) == 1 and all(map(_runs_after(blocks, trace), found.values()))
    return {} if is_head else found


def _normed_branches(module: nn.Module, call: probe.Call) -> int:
    """Return how many branches of a module read its stream through a norm.

    The function looks only at what the module adds to its stream, so it also finds norms that are functions. If each
    branch reads the stream through a norm, the module adds the same to x and to 4·x. With two branches, this is only
    almost so, because the second branch also reads the output of the first branch. A branch that ends in a norm does
    not count.

    :returns: 0 if no branch reads the stream through a norm, 1 if there is a single branch that does not mix positions,
        as in a head, and 2 for any other module.
    """
    try:
        with torch.no_grad(), torch.random.fork_rng([call.stream.device] if call.stream.is_cuda else []):
            copied, call = probe.random_copy(module), call.detached(torch.float32)
            generator = torch.Generator().manual_seed(5)
            x, another = torch.randn((2, *call.stream.shape), generator=generator, device="cpu").to(call.stream)

            def added(x: torch.Tensor) -> torch.Tensor:
                return call.replay(copied, x).double() - x.double()

            small, large, other = added(_LARGE * x), added(_LARGER * x), added(_LARGE * another)
            ordinary = added(_ORDINARY * x)
            first = x.clone().flatten(0, -2)
            first[0] = another.flatten(0, -2)[0]
            one_row = added(_LARGE * first.view(x.shape))
    except Exception:  # the module is not counted if its shapes depend on values or it needs half precision
        return 0
    size, moved = float(small.norm()), float((large - small).norm())
    depends = float((other - small).norm()) > _OTHER * size > _NOTHING * float(x.norm())
    rows = small.norm(dim=-1)
    saturates = float((ordinary - small).norm()) >= _OTHER * size
    ends_in_norm = float(rows.max()) < (1 + _EQUAL_ROWS) * float(rows.min())
    if not depends or saturates or moved >= _OTHER * size or ends_in_norm:
        return 0
    mixes = float((one_row - small).flatten(0, -2)[1:].norm()) > _NOTHING * size
    return 2 if mixes or moved > _NOTHING * size else 1


def _runs_after(blocks: Iterable[nn.Module], trace: Trace) -> Callable[[nn.Module], bool]:
    """Return a function that tells whether a module runs after all of these blocks."""
    order = {module: number for number, module in enumerate(trace.runs)}
    last = max((order[block] for block in blocks if block in order), default=-1)
    return lambda module: order[module] > last
