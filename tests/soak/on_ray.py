# SPDX-License-Identifier: Apache-2.0
"""Programs for the trainer on real Ray, whose workers die, and which are saved and loaded.

Seconds each. What they end with is compared with one process that nobody disturbed; gradients
cannot be seen from here.
"""

from __future__ import annotations

import logging
import os
import random
import secrets
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep import TorchTrainer, TrainingOperator
from lockstep.keys import BATCH_SIZE, WEIGHT
from lockstep.testing import Strike, struck
from soak import operators
from soak.judging import Trace
from soak.spec import Spec

PHASES = ("data", "forward", "backward", "buckets", "optimizer", "applied")
SYNCS = ("replicate", "replicate", "ddp", "parameter_server")


def disturbed(spec: Spec, source: random.Random) -> Spec:
    """The same program, for two or three workers, with deaths, saves and loads."""
    workers, sync = source.choice((2, 2, 3)), source.choice(SYNCS)
    steps = operators.EPOCHS * -(-spec.options["rows"] // spec.options["batch"])
    strikes = [
        ["kill", source.randrange(workers), source.randrange(steps), source.choice(PHASES)]
        for _ in range(min(source.choice((0, 1, 1, 2)), workers - 1))  # somebody has the state
    ]
    # Gradients that a program adds up over epochs are in no checkpoint, in one process either.
    is_cleared = spec.clearing != "never" and (spec.clearing, spec.loss) != ("model", "learned")
    options = {
        **spec.options,
        "reproducible": spec.options["reproducible"] and sync == "replicate",
        "strikes": strikes,
        "reload": source.random() < 0.4 and is_cleared,
        "spares": source.choice((0, 1)) if strikes else 0,
    }
    model = spec.model if not spec.model.startswith(("buffer", "embedding_s")) else "mlp"
    return spec.but(sync=sync, workers=workers, model=model, setup=(), options=options)


def on_ray(spec: Spec, source: str, names: dict[str, Any]) -> list[Trace]:
    """One trace: the weights at the end, or what the trainer raised."""
    _start()
    made = _operator(spec, source, names)
    given = spec.options
    made = struck(made, *(Strike(*strike) for strike in given["strikes"]))
    arguments = {
        "num_workers": spec.workers,
        "num_shards": spec.workers + given["more_shards"],
        "config": {BATCH_SIZE: given["batch"]},
        "sync": spec.sync,
        "spare_workers": given["spares"],
        "reproducible": given["reproducible"],
        **{name: given[key] for name, key in _ARGUMENTS.items() if given[key] not in (None, 1)},
    }
    error: BaseException | None = None
    final: list[torch.Tensor] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            final = _trained(made, arguments, Path(folder), reloads=given["reload"])
        except Exception as raised:
            error = raised
    return [Trace([], [], final, error)]


_ARGUMENTS = {"accumulate": "accumulate", "clip_grad_norm": "clip"}


def _trained(made: type, arguments: dict[str, Any], folder: Path, *, reloads: bool) -> Any:
    trainer = TorchTrainer(training_operator_cls=made, **arguments)
    try:
        for epoch in range(operators.EPOCHS):
            trainer.train()
            if reloads and epoch == 0:
                path = trainer.save(folder / "saved")
                trainer.train()  # what is lost with this trainer
                trainer.shutdown()
                trainer = TorchTrainer(training_operator_cls=made, **arguments)
                trainer.load(path)
        models = trainer.get_model()
    finally:
        trainer.shutdown()
    models = models if isinstance(models, list) else [models]
    return [p.detach().clone() for model in models for p in model.parameters()]


def _operator(spec: Spec, source: str, names: dict[str, Any]) -> type:
    """As `operators._operator`, of what travels to other processes by its value."""
    columns, seed = operators.columns(spec), spec.seed

    def loader(config: Any) -> DataLoader[Any]:
        return DataLoader(TensorDataset(*columns), config[BATCH_SIZE])

    def build() -> Any:
        torch.manual_seed(seed)
        return made()

    found = {
        **names, "__name__": "soak_program", "TrainingOperator": TrainingOperator,
        "WEIGHT": WEIGHT, "loader": loader, "gather": lockstep.gather,
    }  # fmt: skip
    exec(compile(source, "<program>", "exec"), found)
    made = found["build"]
    found["build"] = build
    return found["Program"]


def stop() -> None:
    """Let go of Ray, if it was started."""
    import ray

    if ray.is_initialized():
        ray.shutdown()


def _start() -> None:
    import ray

    if ray.is_initialized():
        return
    os.environ.update({"RAY_worker_niceness": "0"})  # this and the token as in tests/conftest.py
    if not any(name.startswith("RAY_AUTH") for name in os.environ):
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    ray.init(num_cpus=8, logging_level=logging.ERROR, include_dashboard=False, log_to_driver=False)
    lockstep.prestart(num_workers=2, keep=True)
