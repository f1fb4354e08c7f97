# SPDX-License-Identifier: Apache-2.0
"""A spec as the text of a program: one text, which one process and every rank run."""

from __future__ import annotations

import re
from textwrap import indent

from soak.gradients import GRADIENTS
from soak.models import MODELS
from soak.spec import Piece, Spec
from soak.statements import AFTER, BEFORE, SETUP, UPDATE

LOSSES = {
    "squared": "(output - y).square().sum(1)",
    "smooth": 'F.smooth_l1_loss(output, y, reduction="none").sum(1)',
    "cross": "-(y.softmax(1) * output.log_softmax(1)).sum(1)",
    "learned": "criterion(output, y)",
}

OPTIMIZERS = {
    "momentum": "torch.optim.SGD(ps, lr=0.05, momentum=0.9)",
    "decay": "torch.optim.SGD(ps, lr=0.05, momentum=0.9, weight_decay=0.1)",
    "sgd": "torch.optim.SGD(ps, lr=0.05)",
    "lbfgs": "torch.optim.LBFGS(ps, lr=0.1, max_iter=2)",
}

CLEARINGS = {
    "none": "optimizer.zero_grad()",
    "zeros": "optimizer.zero_grad(set_to_none=False)",
    "model": "model.zero_grad()",
    "never": "",
    "flat": "flat.zero_()",
}

_CRITERION = """class Criterion(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, output, y):
        return (output * self.scale.exp() - y).square().sum(1)"""


def has_judge(spec: Spec) -> bool:
    return any(step.gradients["kind"].startswith("two_players") for step in spec.steps)


def has_hooks(spec: Spec) -> bool:
    return any("hook" in piece["kind"] or "post" in piece["kind"] for piece in spec.setup)


def program(spec: Spec) -> str:
    """The text; it defines ``build()`` and ``train(world, modules)``."""
    model = MODELS[spec.model]
    definitions = [model.definition] if model.definition else []
    names, made = ["model"], [f"{model.expression}.double()"]
    if spec.loss == "learned":
        definitions.append(_CRITERION)
        names.append("criterion")
        made.append("Criterion().double()")
    if has_judge(spec):
        names.append("judge")
        made.append("nn.Linear(3, 3).double()")
    build = f"def build():\n    return [{', '.join(made)}]"
    train = "def train(world, modules):\n" + indent(_body(spec, names), "    ")
    return "\n\n\n".join([*definitions, build, train]) + "\n"


def _body(spec: Spec, names: list[str]) -> str:
    lines = [f"{', '.join(names)}, = modules"]
    more = " + list(criterion.parameters())" if "criterion" in names else ""
    listed = f"ps = list(model.parameters()){more}"
    optimizers = ["optimizer", *(["judge_optimizer"] if "judge" in names else [])]
    lines += [listed, f"optimizer = {OPTIMIZERS[spec.optimizer]}"]
    if "judge" in names:
        lines.append("judge_optimizer = torch.optim.SGD(judge.parameters(), lr=0.05)")
    lines += ["", *_loss(spec), ""]
    lines += [piece(SETUP, each) for each in spec.setup if each["when"] == "before"]
    lines.append(
        f"{', '.join(names)}, = world.attach([{', '.join(names)}], [{', '.join(optimizers)}])"
    )
    lines.append("sync = world.sync")
    if spec.sync == "fsdp":
        lines.append(listed)
    lines += [piece(SETUP, each) for each in spec.setup if each["when"] == "after"]
    lines += _loop(spec)
    return "\n".join(lines)


def _loss(spec: Spec) -> list[str]:
    each = LOSSES[spec.loss]
    mean = f"({each} * w).sum() / w.sum().clamp(min=1)"
    reduced = "sum" if spec.way == "sums" else "mean"
    return [
        "def loss(output, y, w):",
        f"    return {mean if spec.way == 'tokens' else f'({each}).{reduced}()'}",
    ]


def _loop(spec: Spec) -> list[str]:
    bodies = [_step(spec, number) for number in range(len(spec.steps))]
    if len(bodies) > 1 and len(set(bodies)) == 1:
        return [f"\nfor _ in range({len(bodies)}):", indent(bodies[0], "    ")]
    return [f"\n# step {number}\n{body}" for number, body in enumerate(bodies)]


def _step(spec: Spec, number: int) -> str:
    step = spec.steps[number]
    lines = [piece(BEFORE, each) for each in step.before]
    kind = step.gradients["kind"]
    if not kind.startswith("closure"):
        lines.append(CLEARINGS[spec.clearing])
    lines.append(gradient_text(spec, kind))
    lines += [piece(AFTER, each) for each in step.after]
    if not kind.startswith(("closure", "weights_by_hand_alone", "weights_by_hand_only")):
        lines.append(piece(UPDATE, {"kind": step.update, "rank": step.gradients.get("rank", 0)}))
    return "\n".join(line for line in lines if line)


def piece(table: dict[str, str], given: Piece) -> str:
    """The text of a piece, its placeholders filled in."""
    text = table[given["kind"]]
    for name, value in given.items():
        text = text.replace("{" + name + "}", str(value))
    return text.replace("ps[0 % len(ps)]", "ps[0]")


def gradient_text(spec: Spec, kind: str) -> str:
    """A piece of gradients in the spec's way to run a backward."""
    is_window = kind.startswith(("window", "forgotten"))
    return "\n".join(_line(spec, line, is_window) for line in GRADIENTS[kind].splitlines())


_BACKWARD = re.compile(r"^( *)BACKWARD\((.*)\)$")
_OPTIONS = re.compile(r"^(.*), (KEEPING|gradient=.*)$")


def _line(spec: Spec, line: str, is_window: bool) -> str:
    line = line.replace("BATCH", "x, y, w = world.batch()")
    line = line.replace("WINDOW", "with sync.no_sync():")
    found = _BACKWARD.match(line)
    if not found:
        return line
    space, loss = found.groups()
    options = _OPTIONS.match(loss)
    extra = ""
    if options:
        loss, extra = options.group(1), options.group(2).replace("KEEPING", "retain_graph=True")
    return indent(_backward(spec, loss, extra, is_paused=is_window and space != ""), space)


def _backward(spec: Spec, loss: str, extra: str, *, is_paused: bool) -> str:
    more = f", {extra}" if extra else ""
    if spec.way in ("equal", "delivered", "sums"):
        windowed = any("window" in step.gradients["kind"] for step in spec.steps)
        driven = windowed and has_hooks(spec)
        text = f"sync.backward({loss}{more})" if driven else f"{loss}.backward({extra})"
    else:
        weight = "len(x)" if spec.way == "weighted" else "w.sum().item()"
        borrowed = spec.absent == "borrowed" and any(0 in split for split in spec.splits)
        weight = "world.weight" if borrowed else weight
        text = f"sync.backward({loss}, weight={weight}{more})"
    if spec.absent != "pending" or not any(0 in split for split in spec.splits):
        return text
    otherwise = "" if is_paused else "\nelse:\n    sync.reduce_pending()"
    return f"if len(x):\n    {text}{otherwise}"
