# SPDX-License-Identifier: Apache-2.0
"""`RunLog`: one file beside a run's checkpoints, with what each step can be computed again from.

JSON lines, only ever appended to. A line is written at once, and read only if it is whole, so that
a kill at any byte costs the line that was being written. Each program that goes on with the run
adds a line ``{"run": ...}``, and another one where it loads a state, with which another seed may
come; what stands below such a line supersedes earlier lines of the same steps.

- ``{"run": {...}}``: versions, processor, and the arguments of the trainer.
- ``{"step": 17, "at": [1, 5], ...}``: the step is global batch 5 of epoch 1. ``n`` is its number of
  samples, ``metrics`` their means, ``lr`` the learning rates where they have changed, ``shards`` a
  checksum of each shard's loss, ``w`` hashes of parts of the weights after the step
  (`lockstep.weight_hashes`): the part's number, its bits and its norm.
- ``{"changed": 17, "by": "load_state_dict"}``: after step 17 something else than training may have
  changed the state.
- ``{"recovery": {...}}``, ``{"shadow": {...}}``: as in ``trainer.status()``.
"""

from __future__ import annotations

import ast
import json
import logging
import os
import platform
import socket
import struct
import sys
import time
import zlib
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

import torch

from lockstep._version import __version__
from lockstep.hardware import describe_hardware
from lockstep.installed_versions import version_of
from lockstep.trainer.ray_dataset_feed import ON_RAY_DATASET
from lockstep.trainer.record_listener import ON_LOAD, RecordListener

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from lockstep.metrics.step_log import StepRecord
    from lockstep.worker import WorkerSpec

FILE_NAME: Final = "run.jsonl"
FORMAT: Final = 1

MOST_CHECKSUMS: Final = 16
"""Shards beyond have none: a line is to stay below 200 bytes."""
_UNKNOWN: Final = 0
"""In place of a checksum: the worker died before it told."""
_MOST_METRICS: Final = 3
_PACKAGES: Final = ("torch", "numpy", "ray")

_log = logging.getLogger("lockstep.run_log")


class RunLog(RecordListener):
    """Appends what happens in a run to the log in `folder`.

    A log that cannot be written (a full disk) is given up with one warning; training goes on.

    Args:
        folder: the run's `checkpoint_dir`.
    """

    def __init__(self, folder: str) -> None:
        self._path = os.path.join(folder, FILE_NAME)
        self._workers: Any = None
        self._is_on = False
        self._rates: Sequence[float] = ()
        self._num_recoveries = self._num_wrong = 0
        self._wrong: Sequence[Mapping[str, Any]] = ()

    def on_start(self, trainer: Any) -> None:
        self._workers = trainer._workers
        self._wrong = self._workers.shadow.wrong
        self._is_on = True
        self._end_torn_line()
        for limit in _limits_of_replays(self._write_run(trainer._steps.written)):
            _log.info("a replay of this run's steps %s", limit)

    def on_record(
        self, step: int, metrics: Mapping[str, Any], records: Sequence[StepRecord | None]
    ) -> None:
        line = step_line(step, metrics, [each for each in records if each is not None])
        if line["lr"] is None or line["lr"] == self._rates:
            del line["lr"]
        else:
            self._rates = line["lr"]
        self._write(line)
        self._write_wrong()

    def on_change(self, step: int, what: str) -> None:
        self._rates = ()
        self._write({"changed": step, "by": what})
        if what == ON_LOAD and self._is_on:
            self._write_run(step)
        if what == ON_RAY_DATASET:
            _log.info("the steps after %d are on a Ray dataset, and cannot be replayed", step)

    def on_train_end(self, trainer: Any, result: dict[str, Any]) -> None:
        recoveries = trainer._workers.open_engine().status().recoveries
        for each in recoveries[self._num_recoveries :]:
            self._write({"recovery": each})
        self._num_recoveries = len(recoveries)
        self._write_wrong()

    def on_failure(self, trainer: Any, error: BaseException) -> None:
        self._write_wrong()

    def _write_run(self, step: int) -> Mapping[str, Any]:
        device = self._workers.start_reports[0].device
        run = describe_run(self._workers.spec, device, step)
        self._write({"run": run})
        return run

    def _write_wrong(self) -> None:
        for each in self._wrong[self._num_wrong :]:
            self._write({"shadow": each})
        self._num_wrong = len(self._wrong)

    def _end_torn_line(self) -> None:
        """Begin a new line where a killed program has left half of one."""
        with suppress(OSError), open(self._path, "rb+") as file:
            if file.seek(0, os.SEEK_END):
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    file.write(b"\n")

    def _write(self, line: Mapping[str, Any]) -> None:
        if not self._is_on:
            return
        text = json.dumps(line, separators=(",", ":"), default=str) + "\n"
        try:
            # Opened for each line: the log belongs to no process that would have to close it.
            with open(self._path, "ab", buffering=0) as file:
                file.write(text.encode())
        except OSError as error:
            self._is_on = False
            _log.warning(
                "%s is not continued, and its steps cannot be replayed: %s", FILE_NAME, error
            )


def step_line(
    step: int, metrics: Mapping[str, Any], records: Sequence[StepRecord]
) -> dict[str, Any]:
    """The line of a step, as JSON will give it back."""
    first = records[0] if records else None
    numbers = {
        name: value
        for name, value in metrics.items()
        if isinstance(value, float) and not name.startswith("last_")
    }
    losses = {shard: loss for record in records for shard, loss in record.losses.items()}
    return {
        "step": step,
        "at": None if first is None else [first.epoch, first.index],
        "n": metrics.get("num_samples"),
        "metrics": dict([*numbers.items()][:_MOST_METRICS]),
        "lr": None if first is None else list(first.rates),
        "shards": _checksums(losses),
        "w": [
            [part.part, f"{part.bits:016x}", part.norm]
            for record in records
            for part in record.weights
        ],
    }


def _checksums(losses: Mapping[int, float]) -> str:
    """Four hexadecimal digits for each shard, in order."""
    sums = [_UNKNOWN] * min(max(losses, default=-1) + 1, MOST_CHECKSUMS)
    for shard in losses.keys() & range(len(sums)):
        sums[shard] = zlib.crc32(struct.pack("<d", losses[shard])) & 0xFFFF or 1
    return "".join(f"{each:04x}" for each in sums)


def known_checksums(line: Mapping[str, Any]) -> dict[int, str]:
    """The checksums of a step's line, by shard."""
    digits = line["shards"]
    sums = [digits[place : place + 4] for place in range(0, len(digits), 4)]
    return {shard: each for shard, each in enumerate(sums) if int(each, 16) != _UNKNOWN}


def describe_run(spec: WorkerSpec, device: str, step: int) -> dict[str, Any]:
    """What a replay has to know of a run: its program, its arguments, and where it runs."""
    return {
        "format": FORMAT,
        "from": step,
        "time": time.time(),
        "host": socket.gethostname(),
        "machine": describe_machine(device, spec.threads),
        **_operator(spec.operator_cls),
        **_hook(spec.initialization_hook),
        **_config(spec.config),
        "arguments": {
            "num_workers": spec.num_workers * spec.options.replicas,
            "num_shards": spec.num_shards,
            "seed": spec.seed,
            "threads": spec.threads,
            "use_gpu": spec.use_gpu,
            **asdict(spec.options),
        },
    }


def describe_machine(device: str, threads: int | None) -> dict[str, Any]:
    """What the bits of a result may depend on, beside the program."""
    versions: dict[str, Any] = {"python": platform.python_version()}
    versions["lockstep-train"] = __version__
    for package in _PACKAGES:
        if (version := version_of(package)) is not None:
            versions[package] = version
    return {
        **versions,
        **describe_hardware(device),
        "threads": threads or torch.get_num_threads(),
    }


def _limits_of_replays(run: Mapping[str, Any]) -> Iterator[str]:
    """What a replay of the run's steps will need, or will not have."""
    if run["operator"] is None:
        yield f"needs --operator FILE:CLASS: {run['unnamed']}"
    if "hook" in run and "hook_folder" not in run:
        yield f"leaves out the initialization_hook: {run['hook']}"
    if run["lost"]:
        yield f"needs --set for {', '.join(run['lost'])}: the log keeps numbers and strings only"
    given = run["arguments"]
    if given["num_workers"] > given["replicas"] and not given["add_dist_sampler"]:
        yield f"needs --workers {given['num_workers']}: add_dist_sampler=False"
    if given["num_workers"] > 1 and not given["reproducible"]:
        yield "is equal to rounding; with reproducible=True to the bit"


def _operator(operator_cls: type) -> dict[str, Any]:
    name, place = _importable(operator_cls)
    return {"operator": name, "unnamed" if name is None else "folder": place}


def _hook(hook: Any) -> dict[str, Any]:
    """`hook` and `hook_folder` of a hook that can be imported; else `hook` says why it cannot.

    Empty without a hook.
    """
    if hook is None:
        return {}
    name, place = _importable(hook)
    return {"hook": place} if name is None else {"hook": name, "hook_folder": place}


def _importable(given: Any) -> tuple[str | None, str]:
    """``module:name`` of a class or function, and the folder to import it from; or None, and why.

    A function without a name (`functools.partial`, an object that can be called) is in no module.
    """
    package, name = given.__module__, getattr(given, "__qualname__", type(given).__qualname__)
    module = sys.modules.get(package)
    file = getattr(module, "__file__", None)
    if file is None or getattr(module, name, None) is not given:
        return None, f"{name} is in no file that can be imported"
    path = os.path.abspath(file)
    if package == "__main__":
        package = _name_of_main(module, path)
    folder = os.path.dirname(path)
    for _ in range(package.count(".") + path.endswith("__init__.py")):
        folder = os.path.dirname(folder)
    return f"{package}:{name}", folder


def _name_of_main(module: Any, path: str) -> str:
    """The program's own module, as another program imports it: after ``python -m`` by its spec."""
    name = getattr(getattr(module, "__spec__", None), "name", "__main__")
    # A profiler runs a script with a spec of that name.
    return os.path.splitext(os.path.basename(path))[0] if name == "__main__" else str(name)


def _config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config as a Python literal, and the keys of what is none."""
    kept = {key: value for key, value in config.items() if _is_literal(value)}
    return {"config": repr(kept), "lost": [str(key) for key in config if key not in kept]}


def _is_literal(value: Any) -> bool:
    try:
        return bool(ast.literal_eval(repr(value)) == value)
    # Whatever a value's own comparison raises, or a text that is no literal.
    except Exception:
        return False
