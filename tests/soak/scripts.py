# SPDX-License-Identifier: Apache-2.0
"""A failing program as a script of its own: the program first, below it what runs it."""

from __future__ import annotations

import inspect
from pathlib import Path

from soak import worlds
from soak.judging import Outcome
from soak.running import source_of
from soak.spec import Spec

_HEAD = '''"""{kind}: {what}

{text}

    python {name}          # shows each optimizer step in one process and on every rank

spec: {spec}
"""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

SYNC, WORKERS, SEED = {sync!r}, {workers}, {seed}
SPLITS, WAY, ABSENT = {splits!r}, {way!r}, {absent!r}


'''

_MAIN = """

def made():
    torch.manual_seed(SEED)
    return build()


def shown(where, world, error=None):
    for number, steps in enumerate(world.seen):
        for place, (notes, _) in enumerate(steps):
            norms = [["None" if g is None else _norm(g) for g in note] for note in notes]
            print(f"{where}: optimizer {number}, step {place}: norms of gradients {norms}")
    print(f"{where}: norms of weights {[_norm(weight) for weight in world.weights()]}")
    for tensor in world.also:
        print(f"{where}: shown {tensor.tolist()}")
    if error is not None:
        print(f"{where}: {type(error).__name__}: {error}")


def _norm(tensor):
    tensor = tensor[1] if isinstance(tensor, tuple) else tensor
    return f"{tensor.abs().norm().item():.12g}"


def trained(world):
    try:
        train(world, made())
    except Exception as error:
        return error


if __name__ == "__main__":
    truth = World(SEED, SPLITS, WAY)
    shown("one process", truth, trained(truth))
    made_groups = groups(WORKERS, 8.0)
    with server_for(SYNC, WORKERS) as address:
        arguments = (SEED, SPLITS, WAY, SYNC, ABSENT)
        ranks = [RankWorld(group, address, *arguments) for group in made_groups]

        def one(rank):
            error = trained(ranks[rank])
            if error is not None:
                made_groups[rank].close()
            return error

        for rank, error in enumerate(side_by_side(one, WORKERS, 30.0)):
            shown(f"rank {rank}", ranks[rank], error)
"""


_ELSEWHERE = '''"""{kind}: {what}

{text}

Beside it lies its spec. With tests on the path, this runs it beside one process:

    python -m soak --program {spec}
"""

'''


def script(spec: Spec, outcome: Outcome, name: str) -> str:
    """The whole script; for workers of the trainer and for shards, the program and what runs it."""
    if "loop" in spec.options or spec.sync == "fsdp":
        what = {"kind": outcome.kind, "what": outcome.what, "text": _plain(outcome.text)}
        return _ELSEWHERE.format(**what, spec=name.replace(".py", ".json")) + source_of(spec)
    head = _HEAD.format(
        kind=outcome.kind,
        what=outcome.what,
        text=_plain(outcome.text),
        name=name,
        spec=spec.to_json(),
        sync=spec.sync,
        workers=spec.workers,
        seed=spec.seed,
        splits=spec.splits,
        way=spec.way,
        absent=spec.absent,
    )
    below = inspect.getsource(worlds)
    below = below[below.index("import threading") :]
    rest = "# " + "-" * 70 + " what runs it\n\n"
    return head + source_of(spec) + "\n\n" + rest + below + _MAIN


def _plain(words: str) -> str:
    return words.strip().replace("\\", "/").replace('"""', "'''")


def write(folder: Path, name: str, spec: Spec, outcome: Outcome) -> Path:
    """The script in `folder`; returns where."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.py"
    path.write_text(script(spec, outcome, path.name))
    path.with_suffix(".json").write_text(spec.to_json() + "\n")
    return path
