# SPDX-License-Identifier: Apache-2.0
"""A rank whose launcher asks where it stands, while the script does as it likes."""

import os
import sys
import threading
from types import FunctionType

from lockstep.audit.options import Options
from lockstep.audit.probe.frames import outwards, users_lines
from lockstep.audit.rank import DUMP, Rank


def test_a_file_that_got_the_number_of_the_pipe_is_not_read(tmp_path):
    """A script may close all files, and open others, while the first question is answered."""
    (tmp_path / "data").write_bytes(b"its own")
    reading, writing = os.pipe()

    class Meanwhile(Rank):
        def _write_where_it_stands(self):
            with (tmp_path / "data").open("rb") as file:
                os.dup2(file.fileno(), reading)

    rank = Meanwhile(Options(script="train.py", arguments=[]))
    listener = threading.Thread(target=rank._obey, args=(reading, os.fstat(reading)))
    listener.start()
    os.write(writing, DUMP)
    listener.join()
    assert os.read(reading, 100) == b"its own"
    os.close(reading)
    os.close(writing)


def _looks():
    return users_lines(outwards(sys._getframe()))


def test_a_frame_between_two_lines_stands_where_its_function_begins():
    """Python says None then, to whoever looks from another thread."""
    lineless = FunctionType(_looks.__code__.replace(co_linetable=b""), globals())
    first = lineless()[0]
    assert (first.file, first.line) == (__file__, _looks.__code__.co_firstlineno)
