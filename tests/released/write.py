# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.released.write`: leave this version's files in a folder of its own.

Once for a release, before its tag. A folder of a release is never written again: that later
versions read what it wrote is what its files are for.
"""

import json
import shutil
from itertools import islice
from pathlib import Path

from tests.released.program import STEPS_BEFORE, rank_loader, train_on, trainer

import lockstep

FOLDER = Path(__file__).parent


def main():
    folder = FOLDER / lockstep.__version__
    if folder.exists() and ".dev" not in lockstep.__version__:
        raise SystemExit(f"{folder} is there already: a release writes its files once")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    expected = {}
    with trainer(use_local=True, checkpoint_dir=folder / "log") as run:
        run.train(num_steps=STEPS_BEFORE)
        run.save(folder / "file.pt")
    first, *steps = (folder / "log" / "run.jsonl").read_text().splitlines()
    shutil.rmtree(folder / "log")
    head = json.loads(first)
    head["run"] |= {"host": "a machine", "folder": "a folder"}  # where it was is nobody's business
    (folder / "run.jsonl").write_text("\n".join([json.dumps(head), *steps, ""]))
    with trainer(use_local=True) as run:
        run.load(folder / "file.pt")
        expected["file"] = train_on(run)
    with trainer(in_shards=True, sync="fsdp", num_workers=2) as run:
        run.train(num_steps=STEPS_BEFORE)
        run.save(folder / "directory")
        expected["directory"] = train_on(run)
    loader = rank_loader()
    list(loader)
    batches = iter(loader)
    list(islice(batches, 3))
    (folder / "loader.json").write_text(json.dumps(loader.state_dict()))
    expected["loader"] = [batch.tolist() for batch in batches]
    (folder / "expected.json").write_text(json.dumps(expected))


if __name__ == "__main__":
    main()
