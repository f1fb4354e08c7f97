# SPDX-License-Identifier: Apache-2.0
"""Random specs: the same name gives the same program, for ever."""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from typing import Any

from soak.gradients import GRADIENTS
from soak.models import MODELS
from soak.on_ray import disturbed
from soak.operators import LOOPS
from soak.spec import Piece, Spec, Step
from soak.statements import AFTER, BEFORE, SETUP

SYNCS = {"replicate": 46, "fsdp": 4, "ddp": 15, "parameter_server": 20, "data_parallel": 15}
WORKERS = {1: 8, 2: 50, 3: 27, 4: 15}

RAW = frozenset(
    {
        "only_some", "threaded_backward", "autograd_backward", "by_hand", "added_before",
        "added_after", "added_after_functionally", "weights_by_hand", "weights_by_hand_alone",
        "weights_by_hand_only", "graph_of_gradients",
    }
)  # fmt: skip
"""Gradients that do not go through `sync.backward`: no weights, and every rank has rows."""

OUTSIDE = frozenset({"scaled", "input_penalty", "learning_to_learn", "threaded", "retained",
                     "shared_forward", "two_players", "two_players_sharing"})  # fmt: skip
"""Those whose forward does not stand within the backward: every rank has rows."""

FEW = frozenset(
    {
        "by_hand", "added_before", "added_after", "added_after_functionally", "weights_by_hand",
        "weights_by_hand_alone", "weights_by_hand_only", "graph_of_gradients",
        "window_left_open", "nothing", "closure", "extra_backward", "new_parameter", "untie",
        "replaced_parameter", "other_shape",
    }
)  # fmt: skip
"""Most of these end a program: drawn seldom, or little else would be seen."""

PLAIN = ("equal", "delivered", "sums")
"""Ways to run a backward that name no weight."""

WINDOWS = frozenset(kind for kind in GRADIENTS if kind.startswith(("window", "forgotten")))

_ON_ROWS = frozenset(
    {"evaluate", "evaluate_inference", "forward_only", "caught_forward", "caught_inside",
     "caught_inside_one", "caught_midway", "extra_backward"}
)  # fmt: skip
"""Statements that call the model with this rank's rows."""

# What loops may do there that know nothing of shards.
_IN_SHARDS_GRADIENTS = (
    "plain", "several", "retained", "shared_forward", "window", "window_of_three", "threaded",
    "window_closed_by_hand", "autograd_backward", "input_penalty", "two_players", "by_hand",
)  # fmt: skip
_IN_SHARDS_BEFORE = (
    "evaluate", "freeze", "unfreeze", "caught_before", "caught_forward", "load_optimizer",
    "extra_backward",
)  # fmt: skip
_IN_SHARDS_AFTER = ("scale_function", "scale_in_place", "decay", "drop_one", "zero_one")

_READING = ("hook_read", "hooks_read", "post_read")
_FOR_TRAINER = frozenset(kind for kind in SETUP if kind.startswith(("hook", "post"))) - {
    *_READING,
    "post_step",
}
_AFTER_FOR_TRAINER = frozenset(AFTER) - {
    "see_held", "see_hooked", "flat_scale", "flat_read"
}  # fmt: skip
_ASKING = (RAW | {"learning_to_learn"}) - {"only_some", "threaded_backward", "autograd_backward"}
"""Gradients asked for by ``torch.autograd.grad``, of parameters."""
_HEARD_LATER = frozenset({"one_rank_leaves_out", "extra_backward", "caught_inside_one"})
_OF_ONE_RANK = frozenset(
    {"update:one_rank_leaves_out", "before:extra_backward", "before:caught_inside_one"}
)
_ONCE_UNDER_DDP = frozenset({"retained", "shared_forward", "two_players_sharing", "two_players"})
_PLACED = frozenset({"hold", "remove_hook", "unfreeze", "tie", "untie"})
_SHOWN = frozenset({"see_held", "see_hooked", "flat_scale", "flat_read"})


def is_fair(spec: Spec) -> bool:
    """Whether one process computes what the ranks have to: the rules that drawing keeps."""
    kinds = {step.gradients["kind"] for step in spec.steps}
    some = _leaves_out_a_rank(spec)
    frozen = {piece["kind"] for step in spec.steps for piece in step.before} | {
        piece["kind"] for piece in spec.setup
    }
    if "loop" in spec.options and spec.model.startswith("norm"):
        return False  # the trainer puts models into training mode
    if not _is_same_arithmetic(spec, kinds):
        return False
    if "unused" in MODELS[spec.model].tags and frozen & {"frozen", "freeze"}:
        return False  # a rank whose rows take a frozen branch has nothing to differentiate
    if not _is_closed(spec, kinds) or not _is_heard(spec):
        return False
    hooked = {piece["kind"] for piece in spec.setup} & _FOR_TRAINER
    if hooked and spec.model.startswith("checkpointed_"):
        return False  # in one process they run as often as the engine does
    if "joint" in MODELS[spec.model].tags:
        return (
            spec.sync != "data_parallel"
            and all(not any(split[1:]) for split in spec.splits)
            and not kinds & (RAW | OUTSIDE)
        )
    if spec.way == "equal" and any(len(set(split)) > 1 for split in spec.splits):
        return False
    if spec.way in PLAIN and kinds & WINDOWS and len(set(spec.splits)) > 1:
        return False
    if kinds & RAW and spec.way not in PLAIN:
        return False
    calls = {piece["kind"] for step in spec.steps for piece in step.before} & _ON_ROWS
    return not (some and (calls or kinds & (RAW | OUTSIDE)))


def _is_same_arithmetic(spec: Spec, kinds: set[str]) -> bool:
    before = {piece["kind"] for step in spec.steps for piece in step.before}
    if "other_shape" in before and spec.clearing != "none":
        return False  # torch adds what comes to what is left, of another shape, if it can
    if spec.model == "orthogonal":
        # What shows how far torch.matrix_exp's own roundings go is too little for a float.
        return "through_float" not in before
    if spec.model != "embedding_sparse":
        return True
    after = {piece["kind"] for step in spec.steps for piece in step.after}
    if "noise" in after or "weights_by_hand_alone" in kinds:
        return False  # torch adds neither noise nor the user's dense mean to a sparse gradient
    # Entries are rounded one by one, and how many make up a row is not part of the value.
    return not ("through_float" in before and spec.clearing == "never")


def _is_heard(spec: Spec) -> bool:
    """Whether what one rank does in another way than its peers can be heard of by them."""
    ends = {spec.steps[-1].update, *(piece["kind"] for piece in spec.steps[-1].before)}
    if ends & _HEARD_LATER:
        return False
    kinds = {step.gradients["kind"] for step in spec.steps}
    leaves_open = "window_left_open" in kinds and _leaves_out_a_rank(spec)
    if leaves_open and any(step.update == "none" for step in spec.steps):
        # A rank without rows has no window: it steps with what a round since its last step left.
        return False
    if not spec.pieces() & _OF_ONE_RANK:
        return True
    if spec.sync == "parameter_server" and "before:broadcast_buffers" in spec.pieces():
        return False  # one rank waits for the others in the broadcast, they for it in their step
    # Peers hear of it when the step is over: until then they compute what they would have
    # computed, because the rank that is ahead, or behind, has the same rows.
    shown = {piece["kind"] for step in spec.steps for piece in step.after} & _SHOWN
    for step in spec.steps:
        is_extra = any(piece["kind"] == "extra_backward" for piece in step.before)
        if is_extra and step.gradients["kind"] != "plain":
            return False  # the peers' first round is of another loss than the extra one
        alone = [f"before:{piece['kind']}" for piece in step.before] + [f"update:{step.update}"]
        if sum(each in _OF_ONE_RANK for each in alone) > 1:
            # One rank ahead by a backward, its peer behind by a step: both then run the same
            # backwards and steps, on rows of different steps, and nobody compares rows.
            return False
    return (
        spec.workers > 1
        and spec.way == "equal"
        and not shown
        and all(step.update in ("step", "one_rank_leaves_out") for step in spec.steps)
    )


def _leaves_out_a_rank(spec: Spec) -> bool:
    return any(0 in split for split in spec.splits)


def _is_closed(spec: Spec, kinds: set[str]) -> bool:
    """Whether what one process leaves out of a window, or ranks do by hand, is seen nowhere."""
    setup = {piece["kind"] for piece in spec.setup}
    if kinds & _ASKING and any(kind.startswith("hook") for kind in setup):
        return False  # torch.autograd.grad runs them, on what it returns here
    if not _is_same_backward(spec, kinds):
        return False
    if kinds & (RAW | _ASKING) and spec.pieces() & _OF_ONE_RANK:
        return False  # where peers compare before their step, they wait for it
    if kinds & {"idle", "nothing"} and spec.pieces() & _OF_ONE_RANK:
        return False  # a rank that steps without a gradient stands for one without rows
    if "closure" in kinds and spec.way == "sums" and _leaves_out_a_rank(spec):
        return False  # the user's own sum holds the loss of borrowed rows
    if "weights_by_hand_alone" in kinds and "unused" in MODELS[spec.model].tags:
        return False  # the user's own mean needs a gradient from everybody
    # One process adds an open window to its next one; ranks give up a window whose every
    # gradient is dropped.
    return not any(
        step.gradients["kind"] == "window_left_open"
        and (step.update == "none" or any(piece["kind"] == "drop_one" for piece in step.after))
        for step in spec.steps
    )


def _is_same_backward(spec: Spec, kinds: set[str]) -> bool:
    """Whether one process can run the same backwards, and each with the same end."""
    setup = {piece["kind"] for piece in spec.setup}
    before = {piece["kind"] for step in spec.steps for piece in step.before}
    shown = {piece["kind"] for step in spec.steps for piece in step.after} & _SHOWN
    if "forgotten_window" in kinds and (before & {"hold"} or setup & {"flat"}):
        return False  # one process leaves the window's backwards out altogether
    # One process's window is one backward, which leaves its gradients in tensors of its own;
    # a rank without rows, or without tokens, has no second backward that would add to what it
    # holds.
    counts_nothing = _leaves_out_a_rank(spec) or spec.way == "tokens"
    is_other = spec.clearing != "none" or bool(setup) or counts_nothing
    if "window_held" in kinds and is_other:
        return False
    if "hold" in before and any(
        step.update == "none" and step.gradients["kind"] in RAW for step in spec.steps
    ):
        return False  # a share that was asked for: refused by a step with it, and there is none
    is_caught = bool(before & {"caught_inside", "caught_inside_one", "caught_midway"})
    # In one process hooks have run on what came before the exception, and so much of its
    # gradients lies in memory of the user's, from where `zero_grad` takes none of them away.
    is_left = shown & {"flat_read", "flat_scale"}
    if is_caught and ("post_step" in setup or "see_hooked" in shown or is_left):
        return False
    if spec.sync == "ddp" and shown and kinds & _ONCE_UNDER_DDP:
        return False  # it leaves the second backward with this rank: no rank may step with it
    if "only_some" in kinds and "unused" in MODELS[spec.model].tags:
        return False  # a backward that reaches no synchronised parameter says nothing to anybody
    if "only_some" in kinds and spec.model.startswith("checkpointed_"):
        return False  # reentrant ones take no `inputs`
    # The compiler gives away what a second backward would need.
    return not (
        spec.model == "compiled" and kinds & {"retained", "shared_forward", "two_players_sharing"}
    )


def named(name: str, **fixed: Any) -> Spec:
    """The spec of this name, with some of its fields given; on Ray, if the name says so."""
    if "ray" in name:
        source = random.Random(f"disturbed {name}")
        peaceful = named(name.replace("ray", "trainer"), trainer=1.0, sync="replicate")
        return disturbed(peaceful.but(clearing=fixed.get("clearing", peaceful.clearing)), source)
    return Drawing(random.Random(f"program {name}"), fixed).spec(zlib.crc32(name.encode()) % 10**6)


class Drawing:
    """The choices of one spec."""

    def __init__(self, source: random.Random, fixed: dict[str, Any]) -> None:
        self._source = source
        self._fixed = fixed

    def spec(self, seed: int) -> Spec:
        """A program around a sync of its own, or now and then one for the trainer."""
        drawn = self._drawn(seed)
        while not is_fair(drawn):
            drawn = self._drawn(seed)
        return drawn

    def _drawn(self, seed: int) -> Spec:
        loose = self._loose(seed)
        if loose.sync == "fsdp":
            return loose
        return self._for_trainer(loose) if self._chance(self._fixed.get("trainer", 0.2)) else loose

    def _for_trainer(self, loose: Spec) -> Spec:
        loop = self._source.choice(LOOPS)
        batch = self._source.choice((4, 6, 7, 12))
        whole = loop in ("default", "joint")
        many = whole and loop != "joint" and loose.sync == "replicate"
        options = {
            "loop": loop,
            "rows": batch * self._source.choice((2, 3)) + self._source.choice((0, 1, 2)),
            "batch": batch,
            "accumulate": self._source.choice((1, 1, 2, 3)) if loop == "default" else 1,
            "clip": self._source.choice((None, 0.05)) if whole else None,
            "reproducible": many and self._chance(0.4),
            "more_shards": self._source.choice((0, 0, 1, 3)) if loop == "default" else 0,
        }
        setup = [] if loop != "plain" else [p for p in loose.setup if p["kind"] in _FOR_TRAINER]
        after = tuple(p for p in loose.steps[0].after if p["kind"] in _AFTER_FOR_TRAINER)
        model = "mlp" if loose.model.startswith("norm") else loose.model
        return loose.but(
            model=model,
            options=options,
            way="tokens" if loop == "default" and self._chance(0.3) else "delivered",
            optimizer="momentum" if loose.optimizer == "lbfgs" else loose.optimizer,
            clearing=loose.clearing if loose.clearing != "flat" else "none",
            setup=tuple(setup),
            steps=(Step({"kind": "plain"}, after=() if whole else after),),
            splits=((2,) * loose.workers,),
        )

    def _loose(self, seed: int) -> Spec:
        sync = self._fixed.get("sync") or self._weighted(SYNCS)
        workers = self._fixed.get("workers") or self._weighted(WORKERS)
        model = self._fixed.get("model") or self._model(sync)
        steps = [self._kind(model, sync) for _ in range(self._source.choice((1, 2, 2, 3, 3, 4)))]
        if self._chance(0.4):
            steps = steps[:1] * len(steps)
        is_raw = bool(RAW.intersection(steps))
        is_joint = "joint" in MODELS[model].tags
        if is_joint:
            is_raw, steps = True, ["plain" if k in RAW | OUTSIDE else k for k in steps]
        way = self._source.choice(PLAIN if is_raw else _WAYS)
        way = "delivered" if is_joint else way
        setup = () if sync == "fsdp" else self._setup(model)
        is_flat = any(piece["kind"] == "flat" for piece in setup)
        spec = Spec(
            # An odd seed means small buckets, which the compiler does not take from DDP.
            seed=seed - seed % 2 if "slow" in MODELS[model].tags else seed,
            sync=sync,
            workers=workers,
            model=model,
            loss=self._weighted({"squared": 6, "smooth": 2, "cross": 2, "learned": 3}),
            way=way,
            optimizer="lbfgs" if "closure" in steps else self._weighted(_OPTIMIZERS),
            clearing=self._weighted({"zeros": 2, "flat": 1} if is_flat else _CLEARINGS),
            setup=setup,
            absent="pending" if is_joint else self._source.choice(("pending", "borrowed")),
        )
        if "closure" in steps:
            steps = ["closure"] * min(2, len(steps))
        if not _is_closed(
            spec.but(steps=tuple(Step({"kind": kind}) for kind in steps)), set(steps)
        ):
            steps = ["plain"] * len(steps)
        spec = spec.but(splits=self._splits(spec, steps))
        return spec.but(
            steps=tuple(self._step(spec, kind, n, steps) for n, kind in enumerate(steps))
        )

    # ------------------------------------------------------------------ parts

    def _chance(self, probability: float) -> bool:
        return self._source.random() < probability

    def _weighted(self, table: dict[Any, int]) -> Any:
        return self._source.choices(list(table), list(table.values()))[0]

    def _model(self, sync: str) -> str:
        usual = {"mlp": 8, "deep": 3, "tied": 3, "branches": 8, "linear": 2}
        weights = {name: usual.get(name, 1.0) for name in MODELS}
        for name, model in MODELS.items():
            if "slow" in model.tags:
                weights[name] = 0.03
            if "joint" in model.tags and sync == "data_parallel":
                weights[name] = 0.0
            if "sparse" in model.tags:
                weights[name] = 0.5
        return self._weighted(weights)

    def _kind(self, model: str, sync: str) -> str:
        weights = {kind: 0.15 if kind in FEW else 1.0 for kind in GRADIENTS}
        weights |= {"plain": 10.0, "window": 2.0, "several": 2.0}
        if sync == "data_parallel":
            weights |= dict.fromkeys(WINDOWS | {"idle"}, 0.0)
        if sync == "fsdp":
            weights = {kind: weights[kind] for kind in _IN_SHARDS_GRADIENTS}
        return self._weighted(weights)

    def _setup(self, model: str) -> tuple[Piece, ...]:
        if self._chance(0.6):
            return ()
        weights = dict.fromkeys(SETUP, 1.0)
        weights |= {"flat": 2.0, "post_step": 0.4, "frozen": 2.0}
        if "unused" in MODELS[model].tags:
            weights["frozen"] = 0.0
        if model.startswith("checkpointed_"):
            weights |= dict.fromkeys([*_FOR_TRAINER, *_READING, "post_step"], 0.0)
        return (
            {
                "kind": self._weighted(weights),
                "when": self._source.choice(("before", "after")),
                "i": self._source.randrange(4),
            },
        )

    def _splits(self, spec: Spec, kinds: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        size = spec.workers
        if "joint" in MODELS[spec.model].tags:
            return ((4, *[0] * (size - 1)),)
        if spec.way == "equal":
            return ((self._source.choice((1, 2, 3)),) * size,)
        full = bool((RAW | OUTSIDE).intersection(kinds)) or spec.sync == "data_parallel"
        least = 1 if full or self._chance(0.5) else 0
        windowed = spec.way in PLAIN and WINDOWS.intersection(kinds)
        splits = []
        for _ in range(1 if windowed else self._source.choice((1, 2, 3))):
            split = [self._source.randint(least, 4) for _ in range(size)]
            if not any(split):
                split[self._source.randrange(size)] = 2
            splits.append(tuple(split))
        return tuple(splits)

    def _step(self, spec: Spec, kind: str, number: int, kinds: Sequence[str]) -> Step:
        gradients: Piece = {"kind": kind, "rank": self._source.randrange(spec.workers)}
        if kind.startswith("closure"):
            return Step(gradients)
        is_last = number == len(kinds) - 1
        before, after = self._before(spec, number, kinds), self._after(spec)
        held = [piece for piece in before if piece["kind"] == "hold"]
        after += [{"kind": "see_held"} for _ in held]
        if any(piece["kind"] in _READING for piece in spec.setup):
            after.append({"kind": "see_hooked"})
        weights = {"step": 90, "none": 0 if is_last else 5, "twice": 1 if is_last else 4}
        update = self._weighted(weights)
        if kind == "window_left_open":
            update = "step"
        # Drawn often, because `is_fair` drops most programs in which a rank leaves a step out.
        if spec.workers > 1 and not is_last and self._chance(0.06):
            update = "one_rank_leaves_out"
        if any(piece["kind"] == "post_step" for piece in spec.setup):
            update = "none"
        return Step(gradients, tuple(before), tuple(after), update)

    def _before(self, spec: Spec, number: int, kinds: Sequence[str]) -> list[Piece]:
        if self._chance(0.65):
            return []
        weights = {kind: 0.15 if kind in FEW else 1.0 for kind in BEFORE}
        weights |= dict.fromkeys(_PLACED, 0.0)
        # A broken backward must keep the gradients of an earlier step: break it where there are.
        weights["caught_midway"] = 4.0 if number else 1.0
        weights["caught_inside"] = 1.0
        weights["caught_inside_one"] = weights["extra_backward"] = 0.5
        weights["unfreeze"] = 1.0 if number else 0.0
        weights["hold"] = 2.0 if number and "forgotten_window" not in kinds else 0.0
        if any(SETUP[piece["kind"]].startswith(("handle", "seen", "def")) for piece in spec.setup):
            weights["remove_hook"] = 2.0
        weights["tie"] = 2.0 * (spec.model == "deep")
        weights["untie"] = 0.5 * (spec.model == "tied")
        weights |= dict.fromkeys(self._out_of_place(spec, number == len(kinds) - 1), 0.0)
        if spec.sync == "fsdp":
            weights = {kind: weights[kind] for kind in _IN_SHARDS_BEFORE}
        return [self._piece(self._weighted(weights), spec)]

    def _out_of_place(self, spec: Spec, is_last: bool) -> set[str]:
        found: set[str] = set()
        if "unused" in MODELS[spec.model].tags:
            # Where a layer that one rank leaves out fails, its peers' backward does not.
            found |= {"freeze", "caught_midway"}
        if spec.model == "compiled":
            # Compiled code knows the hooks of the moment in which it was compiled: a rank that
            # compiles anew, for another number of rows, has a failure that its peers do not have.
            found.add("caught_midway")
        if is_last or spec.workers == 1 or spec.sync == "data_parallel":
            found |= _HEARD_LATER & set(BEFORE)
        if any(0 in split for split in spec.splits):
            found |= _ON_ROWS
        return found

    def _after(self, spec: Spec) -> list[Piece]:
        if self._chance(0.65):
            return []
        weights = {kind: 0.0 if kind in _SHOWN else 1.0 for kind in AFTER}
        if spec.sync == "fsdp":
            weights = {kind: weights[kind] for kind in _IN_SHARDS_AFTER}
        if any(piece["kind"] == "flat" for piece in spec.setup):
            weights |= {"flat_scale": 6.0, "flat_read": 3.0}
        return [self._piece(self._weighted(weights), spec)]

    def _piece(self, kind: str, spec: Spec) -> Piece:
        found: Piece = {"kind": kind}
        text = {**BEFORE, **AFTER}[kind]
        if "{i}" in text:
            # Layers 1 and 2 lie in the middle: some parameters have their gradient by then.
            found["i"] = self._source.choice((1, 2) if kind == "caught_midway" else range(4))
        if "{rank}" in text:
            found["rank"] = self._source.randrange(spec.workers)
        if "{to_none}" in text:
            # Zeros show whether a parameter had a gradient before; None does not.
            found["to_none"] = self._chance(0.25 if kind.startswith("caught") else 0.5)
        return found


_WAYS = ("equal", "delivered", "sums", "weighted", "weighted", "tokens", "tokens")
_OPTIMIZERS = {"momentum": 6, "decay": 3, "sgd": 1}
_CLEARINGS = {"none": 10, "zeros": 4, "model": 2, "never": 2}
