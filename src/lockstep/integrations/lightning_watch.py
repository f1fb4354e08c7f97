# SPDX-License-Identifier: Apache-2.0
"""The audit's watch as a callback of Lightning's Trainer.

`setup` is the first hook of a callback: the process group is there, and the Trainer has neither
wrapped the module nor made its optimizers. `teardown` ends a fit, or else `on_exception` does.
"""

from __future__ import annotations

from typing import Any

from lockstep.audit.watched_block import watching
from lockstep.integrations.optional_packages import import_optional

_lightning: Any = import_optional("lightning.pytorch", extra="audited", by="LightningWatch")


class LightningWatch(watching, _lightning.Callback):  # type: ignore[misc]
    """Watches each `fit` of a Trainer: ``Trainer(callbacks=[LightningWatch()])``.

    Arguments, attributes and errors are those of `lockstep.audit.watching`; what ends the watch
    there (the end of the block, or an exception) is the end of `fit` here.

    Gradient:
        None: it reads.

    Collective:
        Every rank, at the end of `fit`; see `lockstep.audit.watching`.

    Raises:
        NotAvailableError: at its import: Lightning is not installed.
    """

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage == "fit":
            self.__enter__()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.__exit__(None, None, None)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.__exit__(type(exception), exception, None)
