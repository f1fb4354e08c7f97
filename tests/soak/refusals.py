# SPDX-License-Identifier: Apache-2.0
"""What may be refused, with which code, and why. `docs/refusals.md` shows this table."""

from __future__ import annotations

from dataclasses import dataclass

from soak.spec import Spec

ALL = ("replicate", "ddp", "parameter_server", "fsdp")


@dataclass(frozen=True)
class Refusal:
    """One kind.

    Attributes:
        piece: of a spec; see `Spec.pieces`.
        codes: that its refusal may have.
        why: no way to be exact, in a sentence.
        syncs: the ways that refuse it.
        ranks: the least number of ranks.
        beside: what the program does as well; None: anything.
    """

    piece: str
    codes: tuple[str, ...]
    why: str
    syncs: tuple[str, ...] = ALL
    ranks: int = 2
    beside: str | None = None

    @property
    def words(self) -> str:
        beside = "" if self.beside is None else f", and {WORDS[self.beside]}"
        return WORDS[self.piece] + beside


_HAND = "The gradient is this rank's own: nothing has reduced it."

REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        "model:embedding_sparse",
        ("LS103",),
        "A sparse gradient does not fit into a flat bucket.",
        ranks=1,
    ),
    Refusal(
        "model:embedding_sparse",
        ("LS103",),
        "The trainer holds its gradients in flat buckets, as with several workers.",
        ("data_parallel",),
        ranks=1,
    ),
    Refusal(
        "model:checkpointed_twice",
        ("LS101",),
        "A gradient comes more often than in the first step, and its bucket has left.",
        ranks=1,
    ),
    Refusal("gradients:by_hand", ("LS101",), _HAND),
    Refusal("gradients:added_before", ("LS101",), _HAND),
    *(
        Refusal(
            piece,
            ("LS101", "LS601"),
            f"{_HAND} A peer that added nothing may take its steps up to the next round before it"
            " hears of it.",
        )
        for piece in ("gradients:added_after", "gradients:added_after_functionally")
    ),
    *(
        Refusal(
            piece,
            ("LS101",),
            "Nobody reduced them since the last step, and they are not the round's tensors.",
            beside=beside,
        )
        for piece in ("gradients:nothing", "gradients:idle")
        for beside in (
            "after:scale_function",
            "gradients:conflicting",
            "setup:flat",
            "setup:post_replace",
        )
    ),
    *(
        Refusal(
            piece,
            ("LS101",),
            "Weights were changed by a rank's own gradient; seen when the next one is asked for.",
            ranks=ranks,
        )
        for piece, ranks in (
            ("gradients:weights_by_hand", 2),
            ("gradients:weights_by_hand_only", 1),
        )
    ),
    Refusal(
        "gradients:graph_of_gradients",
        ("LS101",),
        "The graph of a reduced gradient would have to cross the reduction.",
        ranks=1,
    ),
    Refusal(
        "gradients:window_left_open",
        ("LS101",),
        "Every backward since the last step ran under no_sync.",
        ranks=1,
    ),
    Refusal(
        "gradients:forgotten_window",
        ("LS101",),
        "Gradients that the window had not reached are out of sight in it: nobody can tell"
        " whether they were to be zeroed as well.",
        ranks=1,
    ),
    Refusal(
        "update:twice",
        ("LS101",),
        "The second step uses a gradient that was put in the place of the reduced one.",
    ),
    Refusal(
        "update:one_rank_leaves_out",
        ("LS101", "LS301"),
        "The ranks' weights are not the same any more.",
    ),
    Refusal(
        "before:extra_backward",
        ("LS101", "LS201"),
        "One rank runs a backward that its peers do not run. They hear of it in their next round,"
        " which may be a step later.",
    ),
    *(
        Refusal(
            piece,
            ("LS101",),
            "Part of a backward's gradients had been sent when it failed.",
            ranks=1,
        )
        for piece in ("before:caught_inside", "before:caught_midway")
    ),
    Refusal(
        "before:caught_inside_one",
        ("LS101", "LS201"),
        "One rank's backward failed, and its peers' did not.",
    ),
    Refusal(
        "before:new_parameter",
        ("LS102",),
        "Nobody synchronises a parameter that was added after attaching.",
        ranks=1,
    ),
    Refusal(
        "before:replaced_parameter",
        ("LS102",),
        "Nobody synchronises a parameter that was put in after attaching.",
        ranks=1,
    ),
    Refusal(
        "before:untie",
        ("LS102",),
        "Nobody synchronises a parameter that was added after attaching.",
        ranks=1,
    ),
    Refusal(
        "before:other_shape",
        ("LS101",),
        "A bucket has room for the shape that the parameter had.",
        ranks=1,
    ),
    Refusal(
        "before:through_float",
        ("LS101",),
        "The parameter is another one to autograd after it had another dtype.",
        ranks=1,
    ),
    *(
        Refusal(
            piece,
            ("LS101",),
            "DDP knows the parameters that the model had when it was wrapped.",
            ("ddp",),
        )
        for piece in ("before:replaced_parameter", "before:tie", "before:untie")
    ),
    *(
        Refusal(
            piece,
            ("LS101",),
            "A backward that reaches nothing but what came later says nothing to the peers.",
            beside="gradients:only_some",
        )
        for piece in ("before:replaced_parameter", "before:untie")
    ),
    *(
        Refusal(
            piece,
            ("LS003",),
            "The server does not know a parameter that was added after attaching.",
            ("parameter_server",),
            ranks=1,
        )
        for piece in ("before:new_parameter", "before:replaced_parameter", "before:untie")
    ),
    Refusal(
        "optimizer:lbfgs",
        ("LS003",),
        "An optimizer that asks for the loss again cannot step at the server.",
        ("parameter_server",),
        ranks=1,
    ),
    *(
        Refusal(
            piece,
            ("LS310",),
            "What a replica's forward writes into the model would be lost.",
            ("data_parallel",),
        )
        for piece in ("model:norm_training", "model:buffer_of_rows")
    ),
    *(
        Refusal(
            piece,
            ("LS101",),
            "DDP reduces what comes out of one forward of the wrapper, once.",
            ("ddp",),
            ranks=1,
        )
        for piece in (
            "gradients:retained",
            "gradients:shared_forward",
            "gradients:two_players_sharing",
            "gradients:two_players",
            "gradients:learning_to_learn",
            "gradients:only_some",
            "gradients:nothing",
            "gradients:idle",
            "model:branches",
            "model:raw_weights",
            "model:checkpointed_reentrant",
            "model:checkpointed_twice",
            "setup:frozen",
            "before:freeze",
            "before:unfreeze",
            "before:forward_only",
            "before:tie",
            "absent:pending",
        )
    ),
)


WORDS = {
    "model:embedding_sparse": "an embedding with `sparse=True`",
    "model:norm_training": "batch norm in training mode",
    "model:buffer_of_rows": "a buffer that the forward replaces",
    "model:branches": "layers that not every rank uses",
    "model:raw_weights": "weights used without the forward of their module",
    "model:checkpointed_reentrant": "reentrant checkpoints",
    "model:checkpointed_twice": "reentrant checkpoints of one layer, twice",
    "gradients:by_hand": "`p.grad = ` what `torch.autograd.grad` gave",
    "gradients:added_before": "`p.grad` from `torch.autograd.grad`, then a backward",
    "gradients:added_after": "`p.grad += ` what `torch.autograd.grad` gave",
    "gradients:added_after_functionally": "`p.grad = p.grad + ` what `torch.autograd.grad` gave",
    "gradients:weights_by_hand": "weights updated by hand from `torch.autograd.grad`",
    "gradients:weights_by_hand_only": "weights updated by hand, twice, and no optimizer",
    "gradients:graph_of_gradients": "`backward(create_graph=True)`, and a loss of `p.grad`",
    "gradients:window_left_open": "`no_sync` around the last backward of a step",
    "gradients:forgotten_window": (
        "`zero_grad` inside an accumulation window, beside gradients from before it"
    ),
    "gradients:nothing": "a step without a backward, with gradients left from before",
    "gradients:idle": "`reduce_pending` on all ranks, with gradients left from before",
    "gradients:retained": "a second backward through one loss",
    "gradients:shared_forward": "two backwards through one forward",
    "gradients:two_players": "a generator and a discriminator that share a forward",
    "gradients:two_players_sharing": "two backwards through a discriminator's one forward",
    "gradients:learning_to_learn": "`functional_call` with weights of an inner step",
    "gradients:only_some": "`backward(inputs=...)`",
    "update:twice": "two steps on one gradient",
    "update:one_rank_leaves_out": "a step that one rank leaves out",
    "before:extra_backward": "a backward that one rank alone runs",
    "before:caught_inside": "an exception inside backward, caught on all ranks",
    "before:caught_midway": "an exception in a layer's backward, caught on all ranks",
    "before:caught_inside_one": "an exception inside backward on one rank, caught",
    "before:new_parameter": "a parameter that is new",
    "before:replaced_parameter": "a parameter in the place of another one",
    "before:untie": "weights that are no longer tied",
    "before:tie": "weights tied meanwhile",
    "before:other_shape": "`p.data` of another shape",
    "setup:post_replace": "a post-accumulate hook that replaces `p.grad`",
    "before:through_float": "`model.float().double()` after attaching",
    "after:scale_function": "`p.grad = p.grad * 0.5`",
    "gradients:conflicting": "gradients of two losses, put together by hand",
    "setup:flat": "`p.grad` in a flat tensor of one's own",
    "before:freeze": "a parameter frozen meanwhile",
    "before:unfreeze": "a parameter unfrozen meanwhile",
    "before:forward_only": "a forward without a backward",
    "setup:frozen": "a frozen parameter",
    "optimizer:lbfgs": "LBFGS",
    "absent:pending": "a rank without rows that calls `reduce_pending`",
}
"""The pieces, for a reader of the page."""


def page() -> str:
    """The table as Markdown."""
    lines = ["| what a program does | under | refused as | why |", "|---|---|---|---|"]
    grouped: dict[tuple[str, ...], list[str]] = {}
    for refusal in REFUSALS:
        syncs = (
            "every `sync`, on 2 or more ranks"
            if refusal.syncs == ALL
            else ", ".join(map("`{}`".format, refusal.syncs))
        )
        key = (syncs, ", ".join(refusal.codes), refusal.why)
        grouped.setdefault(key, []).append(refusal.words)
    for (syncs, codes, why), pieces in grouped.items():
        lines.append(f"| {'; '.join(pieces)} | {syncs} | {codes} | {why} |")
    return "\n".join(lines)


def is_explained(spec: Spec, code: str) -> bool:
    """Whether a piece of the program may be refused with `code`."""
    pieces = spec.pieces()
    return any(
        {refusal.piece, refusal.beside or refusal.piece} <= pieces
        and code in refusal.codes
        and spec.sync in refusal.syncs
        and spec.workers >= refusal.ranks
        for refusal in REFUSALS
    )
