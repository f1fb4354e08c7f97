# SPDX-License-Identifier: Apache-2.0
"""Each mechanism taken out of a copy of the source: random programs have to notice.

PYTHONPATH=tests python -m soak.mutants [--seconds 120] [NAME ...]
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]


class Mutant(NamedTuple):
    """In `file` the old text becomes the new one. `only`: further options of the soak."""

    file: str
    old: str
    new: str
    only: tuple[str, ...] = ()


MUTANTS = {
    "memory_that_is_held_is_written": Mutant(
        "sync/buckets.py", "if self._references() != self._held_by_us:", "if False:"
    ),
    "a_gradient_of_the_users_is_replaced": Mutant(
        "sync/tensor_reference_counts.py",
        "        return not (\n            any(map(is_view, grads))",
        "        return None not in grads or not (\n            any(map(is_view, grads))",
    ),
    "hooks_are_run_by_autograd": Mutant(
        "sync/parameter_hooks.py",
        "        self.users[key] = hook\n",
        "        super().__setitem__(key, hook)\n",
    ),
    "weight_zero_is_unused": Mutant(
        "sync/zero_weight_backward.py",
        "is_used = slot.param.grad is not None and not is_borrowed",
        "is_used = False",
    ),
    "borrowed_rows_count": Mutant(
        "sync/accumulation_window.py", "is_borrowed=self.delivered == 0.0", "is_borrowed=False"
    ),
    "a_graph_of_gradients_is_let_through": Mutant(
        "sync/reduction_rounds.py",
        "        if torch.is_grad_enabled():\n",
        "        if False:\n",
    ),
    "earlier_gradients_are_not_compared": Mutant(
        "sync/round_checks.py", "    if sums.earlier != mine.earlier * group.size:", "    if False:"
    ),
    "earlier_gradients_are_reduced_again": Mutant(
        "sync/reduction_rounds.py",
        "        held = self._earlier.set_aside(self.transport.own_memory)\n",
        "        held: list[Slot] = []\n",
    ),
    "gradients_asked_for_are_not_suspected": Mutant(
        "sync/autograd_grad_watch.py",
        "        found = [(slot, self._before.pop(slot)) for",
        "        return False\n        found = [(slot, self._before.pop(slot)) for",
    ),
    "updates_by_hand_are_not_seen": Mutant(
        "sync/autograd_grad_watch.py",
        "        if last is not None and last[:2] == now[:2]",
        "        if False and last is not None",
    ),
    "rounds_of_other_steps_are_added_up": Mutant(
        "sync/reduction_rounds.py", "        self.step += number\n", ""
    ),
    "late_parameters_are_not_seen": Mutant(
        "sync/late_parameters.py", "        if id(module) in self._members:", "        if False:"
    ),
    "buffers_of_graphs_are_written": Mutant(
        "sync/buffer_broadcast.py",
        "        if (is_saved or has_aliases(tensor)) and same_bits(tensor, value):\n"
        "            return\n        if is_saved:\n",
        "        if False:\n",
    ),
    "buffers_travel_in_whatever_shape": Mutant(
        "sync/buffer_broadcast.py",
        "if held is None or _shape_of(held) != shape:",
        "if held is None:",
    ),
    "gradients_of_earlier_steps_are_not_kept": Mutant(
        "worker/loop_behaviour.py",
        "self.reuses_gradients or self._steps_to_learn > 0\n",
        "False\n",
        ("--ray", "1", "--processes", "0", "--clearing", "never"),
    ),
    "moved_parameters_are_not_named": Mutant(
        "sync/reducer.py",
        'found = {"sparse": sparse, "moved": moved}',
        'found = {"sparse": sparse}',
    ),
    "a_dropped_window_keeps_its_weight": Mutant(
        "sync/accumulation_window.py",
        "return all(map(_is_unchanged, self._remembered, (slot.param.grad for slot in slots)))",
        "return True",
    ),
    "a_failed_backward_leaves_nothing": Mutant(
        "sync/earlier_gradients.py",
        "            if slot.param.grad is None:\n                self._put_back(slot)\n",
        "            if slot.param.grad is None:\n                pass\n",
    ),
    "rows_are_not_exchanged": Mutant(
        "sync/fsdp.py", "        if not tensors:\n", "        if True:\n", ("--sync", "fsdp")
    ),
}


def found_after(mutant: Mutant, seconds: float) -> float | None:
    """Seconds until a program failed; None if none did."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "src"
        shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
        file = source / "lockstep" / mutant.file
        text = file.read_text(encoding="utf-8")
        assert text.count(mutant.old) == 1, f"{mutant.file}: {mutant.old!r} is not there once"
        file.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
        path = os.pathsep.join(map(str, (source, ROOT / "tests")))
        options = ["--seconds", str(seconds), "--first", "--no-shrink", "--ray", "0"]
        started = time.monotonic()
        ended = subprocess.run(
            [sys.executable, "-m", "soak", *options, *mutant.only, "--out", folder],
            env={**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        return time.monotonic() - started if ended.returncode == 1 else None


def main() -> int:
    """Returns the number of mutants that nothing noticed."""
    parser = argparse.ArgumentParser(prog="soak.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", default=[], help="default: all")
    parser.add_argument("--seconds", type=float, default=120.0, help="for each")
    options = parser.parse_args()
    missed = 0
    for name in options.names or MUTANTS:
        seconds = found_after(MUTANTS[name], options.seconds)
        missed += seconds is None
        print(f"{name:45} {'NOT FOUND' if seconds is None else f'{seconds:.0f} s'}", flush=True)
    return missed


if __name__ == "__main__":
    sys.exit(main())
