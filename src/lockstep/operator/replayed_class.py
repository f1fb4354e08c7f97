# SPDX-License-Identifier: Apache-2.0
"""`replayed_class`: an operator class as a replay of a run trains it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.operator.training_parts import SyncOptions


def replayed_class(operator_cls: type[Any], *, on_copies: bool) -> type[Any]:
    """A subclass of the same name, whose training leaves the run as it is.

    Args:
        operator_cls: the run's.
        on_copies: the run goes on in this process, and holds what the class was made from: the
            model of `from_model`, or of `from_lightning`.
    """

    class Replayed(operator_cls):  # type: ignore[misc]
        _lockstep_trains_copies = on_copies

        def _lockstep_sync_options(self, ddp_args: Any, *further: Any) -> SyncOptions:
            # A replay in one process has no DDP that they could be for.
            given = ddp_args if self._lockstep.context.options.sync == "ddp" else None
            options: SyncOptions = super()._lockstep_sync_options(given, *further)
            return options

    for name in ("__module__", "__name__", "__qualname__", "__doc__"):
        setattr(Replayed, name, getattr(operator_cls, name))
    return Replayed
