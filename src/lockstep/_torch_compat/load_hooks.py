# SPDX-License-Identifier: Apache-2.0
"""Which modules convert a ``state_dict`` as they load it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

_KEEP_NAMES: Final = ("torch.distributed.", "torch.nn.modules.")
"""Packages whose hooks and methods load what has the names and shapes of the module."""


def converts_state(module: nn.Module) -> bool:
    """Whether code of a module's own takes part in a load of its state, submodules aside.

    Such code may rename what is in the state, leave it out, or give it another shape, as that of
    ``torch.nn.utils.parametrizations.weight_norm`` does with a state of its predecessor.
    """
    return any(
        not (getattr(each, "__module__", None) or "").startswith(_KEEP_NAMES)
        for each in _code_of_load(module)
    )


def _code_of_load(module: nn.Module) -> Iterator[Any]:
    for wrapped in module._load_state_dict_pre_hooks.values():
        yield getattr(wrapped, "hook", wrapped)
    yield from module._load_state_dict_post_hooks.values()
    yield type(module)._load_from_state_dict
    yield type(module).load_state_dict
