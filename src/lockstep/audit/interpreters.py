# SPDX-License-Identifier: Apache-2.0
"""Is it Python that a command starts?"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from typing import Any, Final

_NAME: Final = re.compile(r"(python|pypy)[\d.]*(\.exe)?|torchrun|accelerate|deepspeed|mpirun")
_COMPILERS: Final = "_inductor"
"""Workers of torch's compiler train nothing."""
_IN_FRONT: Final = re.compile(r"env|nohup|nice|\w+=.*")


def starts_python(command: Any) -> bool:
    """Does a command start a Python program, or a launcher of some?

    Args:
        command: what ``subprocess.Popen`` and its like take: a list of words, or as a shell reads.
    """
    if isinstance(command, str | bytes | os.PathLike):
        return any(map(_is_python, shlex.split(os.fsdecode(command))))
    words = [os.fsdecode(word) for word in command]
    if any(_COMPILERS in word for word in words):
        return False
    program = next((word for word in words if not _IN_FRONT.fullmatch(word)), "")
    return _is_python(program)


def _is_python(word: str) -> bool:
    if _NAME.fullmatch(os.path.basename(word)):
        return True
    path = shutil.which(word)
    if path is None:
        return False
    with open(path, "rb") as file:
        first = file.readline(200)
    return first.startswith(b"#!") and b"python" in first
