# SPDX-License-Identifier: Apache-2.0
"""A logger that writes curves for TensorBoard."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from lockstep.integrations.loggers.base import Logger, Row, flatten
from lockstep.integrations.optional_packages import import_optional
from lockstep.keys import BATCH_COUNT

if TYPE_CHECKING:
    from lockstep.trainer import TorchTrainer


class TensorBoardLogger(Logger):
    """A curve ``train/<metric>`` or ``validation/<metric>`` for each number, over the steps.

    A run that resumes from a checkpoint may use the same folder: TensorBoard then hides the values
    that an earlier program wrote for the steps that are computed again.

    Args:
        folder: the folder of the run's event files, for ``tensorboard --logdir``.
        every: see `Logger`; curves ``step/<metric>``.

    Raises:
        NotAvailableError: tensorboard is not installed.
    """

    def __init__(self, folder: str | os.PathLike[str], *, every: int | None = None) -> None:
        super().__init__(every)
        self.folder = os.fspath(folder)
        # Imported here: a missing package must not show after the run's first epoch.
        import_optional("tensorboard", extra="loggers", by="TensorBoardLogger")
        self._writer: Any = None

    def on_start(self, trainer: TorchTrainer) -> None:
        super().on_start(trainer)
        self._close()  # an earlier trainer may not have been shut down

    def write(self, trainer: TorchTrainer, row: Row) -> None:
        if self._writer is None:
            self._writer = self._make_writer(trainer, row)
        for name, value in row.numbers.items():
            self._writer.add_scalar(f"{row.phase}/{name}", value, row.step, walltime=row.time)
        self._writer.flush()

    def _make_writer(self, trainer: TorchTrainer, row: Row) -> Any:
        from torch.utils.tensorboard import SummaryWriter

        done_before = row.step - int(
            row.numbers.get(BATCH_COUNT, 0) if row.phase != "validation" else 0
        )
        # Typed as Any: torch's writer has no annotations.
        writer: Any = SummaryWriter(self.folder, purge_step=done_before + 1)
        table = "".join(f"|{key}|{value}|\n" for key, value in flatten(trainer.config).items())
        writer.add_text("config", f"|name|value|\n|-|-|\n{table}", done_before + 1)
        return writer

    def on_failure(self, trainer: TorchTrainer, error: BaseException) -> None:
        self._close()

    def on_shutdown(self, trainer: TorchTrainer) -> None:
        self._close()

    def _close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
