# SPDX-License-Identifier: Apache-2.0
"""Models with parametrizations (`weight_norm`, `orthogonal`), in a pickle.

torch gives such a module a class of its own, made on the spot, and refuses to pickle it. What
travels is the class that it had before, what the module holds, and which tensors are computed.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any, cast

import cloudpickle
from torch import nn
from torch.nn.utils import parametrize

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Any cloudpickle, but for modules that torch has parametrized."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, nn.Module) and parametrize.is_parametrized(obj):
            plain = type(obj).__bases__[0]
            names = list(cast("nn.ModuleDict", obj.parametrizations))
            return _bare, (plain, names), vars(obj), None, None, _fill
        return super().reducer_override(obj)


def dumps(value: Any) -> bytes:
    """As `cloudpickle.dumps`."""
    with io.BytesIO() as file:
        Pickler(file).dump(value)
        return file.getvalue()


def _bare(plain: type[nn.Module], names: Sequence[str]) -> nn.Module:
    """A module of the class that torch makes, with nothing in it."""
    module = plain.__new__(plain)
    # What `register_parametrization` calls; by itself it would compute other values.
    parametrize._inject_new_class(module)
    for name in names:
        parametrize._inject_property(module, name)
    return module


def _fill(module: nn.Module, attributes: Mapping[str, Any]) -> None:
    vars(module).update(attributes)
