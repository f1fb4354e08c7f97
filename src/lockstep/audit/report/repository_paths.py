# SPDX-License-Identifier: Apache-2.0
"""Where a file lies in its repository, as code hosts name it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

if TYPE_CHECKING:
    from lockstep.audit.finding import Finding, Place


@dataclass(frozen=True)
class Repository:
    """The folder that a code host shows.

    Attributes:
        root: absolute.
    """

    root: Path

    @classmethod
    def around(cls, folder: Path) -> Repository:
        """The checkout that `folder` lies in; `folder` itself outside of one."""
        above = (folder, *folder.parents)
        return cls(next((each for each in above if (each / ".git").exists()), folder))

    def relative(self, file: str) -> str | None:
        """The path below the root, with slashes; None for a file elsewhere, or for no file."""
        path = Path(os.path.abspath(file))
        if not (path.is_file() and path.is_relative_to(self.root)):
            return None
        return path.relative_to(self.root).as_posix()

    def uri(self, file: str) -> str:
        """`file` as a reference: relative where it lies below the root."""
        relative = self.relative(file)
        return Path(os.path.abspath(file)).as_uri() if relative is None else quote(relative)

    def shown_place(self, finding: Finding) -> Place | None:
        """The most telling line of a finding that the code host can show."""
        return next((at for at in finding.where if self.relative(at.file) is not None), None)
