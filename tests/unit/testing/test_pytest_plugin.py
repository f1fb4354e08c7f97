# SPDX-License-Identifier: Apache-2.0
"""The fixture fails a project's test with the audit's report; see docs/how-to/audit-in-ci.md."""

import subprocess
import sys

import pytest

HEALTHY = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    torch.manual_seed(10 * step + dist.get_rank())
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= 2
    optimizer.step()
"""
TESTS = """
def test_healthy(lockstep_audit):
    assert lockstep_audit("healthy.py")["findings"] == []

def test_broken(lockstep_audit):
    lockstep_audit("broken.py")
"""


@pytest.mark.slow
def test_a_broken_script_fails_its_test_with_the_report(tmp_path):
    """A pytest that launches two scripts on two ranks each."""
    (tmp_path / "healthy.py").write_text(HEALTHY)
    (tmp_path / "broken.py").write_text(HEALTHY.replace("dist.all_reduce(parameter.grad)", "pass"))
    (tmp_path / "test_scripts.py").write_text(TESTS)
    plugin = ["-p", "lockstep.testing.pytest_plugin", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *plugin, "test_scripts.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "1 failed, 1 passed" in done.stdout
    assert "FAILED test_scripts.py::test_broken" in done.stdout
    assert "error [LS101] gradients passed no reduction" in done.stdout
