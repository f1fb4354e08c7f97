# SPDX-License-Identifier: Apache-2.0
"""Parameters in whose place a model has got others: whoever still holds them is told, and why.

When a model is cut into shards its parameters become other objects. A list of parameters from
before, a closure, or an optimizer that was not registered would compute with the first weights,
clip nothing, and train nothing. So the class of such a parameter is changed, as torch's
``swap_tensors`` does, to one whose operations raise. Its memory is freed.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from lockstep.errors import UnknownParameterError

_ATTRIBUTES: Final = (
    *("shape", "ndim", "dtype", "device", "layout", "itemsize", "requires_grad", "is_leaf"),
    *("is_meta", "is_cpu", "is_cuda", "is_sparse", "is_nested", "is_quantized"),
)
_METHODS: Final = ("size", "dim", "numel", "nelement", "is_floating_point", "is_complex")

_DESCRIBE: Final = frozenset(
    [getattr(torch.Tensor, name).__get__ for name in _ATTRIBUTES]
    + [getattr(torch.Tensor, name) for name in (*_METHODS, "element_size", "__len__")]
)
"""What says the same of a parameter and of the one in its place."""

_SHOW: Final = (torch.Tensor.__repr__, torch.Tensor.__format__)


class ReplacedParameter(torch.nn.Parameter):
    """A parameter that belongs to no model any more."""

    @classmethod
    def __torch_function__(
        cls,
        function: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Torch's hook into each operation on the parameter.

        Raises:
            UnknownParameterError: but for those that only describe it.
        """
        if function in _DESCRIBE:
            of_a_tensor: Any = super().__torch_function__
            return of_a_tensor(function, types, args, kwargs or {})
        names = dict.fromkeys(_names_in((args, kwargs)))
        if function in _SHOW:
            return f"`{next(iter(names))}` from before register(), shape {tuple(args[0].shape)}"
        name = getattr(function, "__name__", str(function))
        if name in ("__get__", "__set__"):
            name = function.__self__.__name__  # the attribute
        raise UnknownParameterError(
            "this is a parameter from before register(), which no worker trains",
            where=", ".join(f"`{name}`" for name in names) or None,
            got=f"`{name}` of it",
            cause="a list, a closure or another optimizer has kept it; a model in shards has"
            " others in its place",
            fix="take it from the model again, after register: list(self.model.parameters())",
        )


def free(param: torch.nn.Parameter) -> None:
    """Free the memory of a parameter, which keeps its shape.

    Views and detached tensors that share its memory stay as they are.
    """
    # Memory of one element, because `data` takes nothing of another device or dtype.
    param.data = param.data.new_empty(()).expand(param.shape)


def replace(old: torch.nn.Parameter, new: torch.Tensor, name: str) -> None:
    """Let `new` be the parameter in the place of `old`, of which nothing is left but its shape."""
    free(old)
    old.grad = None
    vars(old).update(_lockstep_name=name, _lockstep_successor=new)
    old.__class__ = ReplacedParameter


def successor_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The parameter in the place of one that was replaced; None for any other tensor."""
    if not isinstance(tensor, ReplacedParameter):
        return None
    found: torch.Tensor = vars(tensor)["_lockstep_successor"]
    return found


def _names_in(value: Any) -> list[str]:
    """The names of the replaced parameters among the arguments of an operation."""
    if isinstance(value, ReplacedParameter):
        return [vars(value)["_lockstep_name"]]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [name for each in value for name in _names_in(each)]
    return []
