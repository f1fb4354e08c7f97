# SPDX-License-Identifier: Apache-2.0
"""The audit's watch as a callback of the Trainer of transformers.

The Trainer makes its optimizer and wraps its model in `train()`, before `on_train_begin`, and tells
its callbacks of no exception. So the watch stands around `train()` itself: the callback puts it
there in `on_init_end`, the only event before. That event does not say which Trainer it is of; the
Trainer's constructor, which is under way then, does.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from lockstep.audit.probe.frames import outwards
from lockstep.audit.watched_block import watching
from lockstep.errors import WrongUseError
from lockstep.integrations.optional_packages import import_optional

_transformers: Any = import_optional("transformers", extra="audited", by="TransformersWatch")


class TransformersWatch(watching, _transformers.TrainerCallback):  # type: ignore[misc]
    """Watches each `train()` of the Trainer whose constructor it is given to.

    Arguments, attributes and errors are those of `lockstep.audit.watching`; what ends the watch
    there (the end of the block, or an exception) is the end of `train()` here.

    Gradient:
        None: it reads.

    Collective:
        Every rank, at the end of `train()`; see `lockstep.audit.watching`.

    Raises:
        NotAvailableError: at its import: transformers is not installed.
        WrongUseError: in `train()`: it was added when the Trainer was there already.
    """

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        made = (frame.f_locals.get("self") for frame in outwards(sys._getframe(1)))
        trainer = next((one for one in made if isinstance(one, _transformers.Trainer)), None)
        if trainer is None:
            return  # `on_train_begin` says so
        train = trainer.train

        @functools.wraps(train)
        def watched(*args: Any, **kwargs: Any) -> Any:
            with self:
                return train(*args, **kwargs)

        trainer.train = watched

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self._is_entered:
            raise WrongUseError(
                "the watch was added to a Trainer that was there already",
                cause="it has to be there before the Trainer makes its optimizer",
                fix="Trainer(..., callbacks=[TransformersWatch()])",
            )
