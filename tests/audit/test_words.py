# SPDX-License-Identifier: Apache-2.0
"""What a program's text calls the number of ranks."""

import pytest

from lockstep.audit.finding import Place
from lockstep.audit.program_text.rank_factors import line_with_factor

TEXT = """\
import os
import torch.distributed as dist

{given}
for x in batches:
    loss = model(x).mean() / {name}
    loss.backward()
"""


@pytest.mark.parametrize(
    ("name", "given", "is_found"),
    [
        ("world_size", "", True),
        ("args.world_size", "", True),
        ("n", "n = dist.get_world_size()", True),
        ("n", "rank, n = dist.get_rank(), dist.get_world_size()", True),
        ("W", "W = int(os.environ['WORLD_SIZE'])", True),
        ("w", "w = int(os.environ.get('WORLD_SIZE', 1))", True),
        ("n", "n = len(views)", False),
        ("w", "w = weights.sum()", False),
        ("n", "", False),
    ],
)
def test_a_short_name_is_the_number_of_ranks_where_the_program_says_so(
    tmp_path, name, given, is_found
):
    program = tmp_path / "program.py"
    program.write_text(TEXT.format(name=name, given=given))
    found = line_with_factor([Place(str(program), 7, "<module>", "")], divides=True)
    assert (found is not None and found.line == 6) is is_found


def test_a_place_below_the_working_directory_is_short(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert str(Place(str(tmp_path / "src" / "train.py"), 3, "main", "")) == "src/train.py:3 main"
    assert Place(f"{tmp_path}s/train.py", 3, "main", "").at == f"{tmp_path}s/train.py:3"
