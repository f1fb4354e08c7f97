# SPDX-License-Identifier: Apache-2.0
"""Beside the line that was measured stands the one that leads to it."""

from pathlib import Path

import pytest

from lockstep.audit.finding import Finding, Place
from lockstep.audit.probe.frames import lines_through_a_library
from lockstep.audit.program_text.causes import with_causes

BUGS = Path(__file__).parent / "bugs"

PROGRAM = """
class Share(Function):
    @staticmethod
    def forward(ctx, rows):
        dist.all_gather(out, rows)  # measured LS208
        return out

    @staticmethod
    def backward(ctx, grad):
        return grad[0]  # leads LS208


def reader(rank):
    sampler = OwnSampler(data, seed=rank)  # leads LS503
    return DataLoader(data, sampler=sampler)


def adapt(optimizer, loss):
    for group in optimizer.param_groups:
        group["lr"] = 1 / loss  # leads LS305


def refresh(model):
    model.codebook[unused] = samples  # leads LS303


def main():
    model = Net()  # leads LS302
    wrapped = DDP(model)
    wrapped.eval()  # leads LS311
    optimizer = SGD(model.parameters())
    loader = reader(rank)
    for x, y in loader:  # measured LS503
        out = wrapped(x)  # measured LS311
        loss = criterion(out, y)
        loss = loss / len(x)  # leads LS203
        if y.sum() > 0:
            loss.backward()  # measured LS203
        if loss < 3:  # leads LS308
            adapt(optimizer, loss)
            optimizer.step()  # measured LS302 LS303 LS305 LS308
"""


def _line(word, code):
    lines = PROGRAM.splitlines()
    return next(n for n, text in enumerate(lines, 1) if f"# {word}" in text and code in text)


@pytest.mark.parametrize(
    "code", ["LS203", "LS208", "LS302", "LS303", "LS305", "LS308", "LS311", "LS503"]
)
def test_the_line_that_leads_there_comes_next(tmp_path, code):
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    measured = Place(str(program), _line("measured", code), "main", "")
    outer = Place(str(program), 1, "<module>", "")
    found = with_causes(
        Finding(
            code,
            "",
            "error",
            "",
            "",
            parameters=["net.codebook"],
            evidence={"lr": {}},
            where=[measured, outer],
        )
    )
    lines = [place.line for place in found.where]
    assert lines[0] == measured.line
    assert _line("leads", code) in lines[1:3]
    assert lines[-1] == 1
    assert all(place.text for place in found.where[:-1])
    leads = next(p for p in found.where if p.line == _line("leads", code))
    elsewhere = {"LS208": "backward", "LS303": "refresh", "LS305": "adapt", "LS503": "reader"}
    assert leads.function == elsewhere.get(code, "main")


def test_a_line_of_the_same_number_in_another_file_is_another_line(tmp_path):
    measured, other = tmp_path / "loop.py", tmp_path / "adapt.py"
    measured.write_text("\noptimizer.step()\n")
    other.write_text('def adapt(group, loss):\n    group["lr"] = 1 / loss\n')
    places = [Place(str(measured), 2, "main", ""), Place(str(other), 1, "adapt", "")]
    found = with_causes(Finding("LS305", "", "error", "", "", evidence={"lr": {}}, where=places))
    assert (str(other), 2) in {(place.file, place.line) for place in found.where}


def test_text_that_is_nested_too_deeply_leads_nowhere(tmp_path):
    program = tmp_path / "train.py"
    program.write_text("x = " + "-" * 100_000 + "1\n")
    places = [Place(str(program), 1, "main", "")]
    assert with_causes(Finding("LS308", "", "error", "", "", where=places)).where


@pytest.mark.parametrize("text", ["", "def broken(:\n    x.step()\n"])
def test_a_file_that_cannot_be_read_leads_nowhere(tmp_path, text):
    program = tmp_path / "train.py"
    program.write_text(text)
    places = [Place(str(program), 2, "main", ""), Place(str(tmp_path / "gone.py"), 1, "f", "")]
    found = with_causes(Finding("LS308", "", "error", "", "", where=places))
    assert [place.line for place in found.where] == [2, 1]


def test_what_only_ends_like_a_schedule_is_none(tmp_path):
    program = tmp_path / "train.py"
    program.write_text("t = TransformsSimCLR(32)\ns = CosineAnnealingLR(o, 9)\no.step()\n")
    measured = [Place(str(program), 3, "<module>", "")]
    found = with_causes(Finding("LS305", "", "error", "", "", where=measured))
    assert [place.line for place in found.where] == [3, 2]


@pytest.mark.slow
def test_a_state_is_loaded_where_a_line_ran(pool):
    program = BUGS / "i_state_loaded_by_rank_0.py"
    (found,) = [f for f in pool.findings(program) if f.code == "LS306"]
    loads = [place.text for place in found.where if "load_state_dict" in place.text]
    assert loads == ["optimizer.load_state_dict(saved)  # here LS306"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["e_moments_through_data", "e_cross_correlation"])
def test_a_sum_outside_autograd_says_what_is_left_of_the_gradient(pool, name):
    (found,) = [f for f in pool.findings(BUGS / f"{name}.py") if f.code == "LS211"]
    assert found.evidence["ratio"] == pytest.approx(0.5)
    assert "gets 0.5 of its gradient" in found.message


def test_a_call_inside_a_library_has_its_line_and_the_users(tmp_path):
    library = tmp_path / "site-packages" / "metrics.py"
    names = {"lines": lines_through_a_library}
    exec(compile("\ndef total(): return lines()", str(library), "exec"), names)
    found = names["total"]()
    assert found[0].function == "test_a_call_inside_a_library_has_its_line_and_the_users"
    assert (found[-1].file, found[-1].line) == (str(library), 2)
    alone = lines_through_a_library()
    assert str(library) not in {place.file for place in alone}
