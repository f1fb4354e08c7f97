# SPDX-License-Identifier: Apache-2.0
"""What the probe writes down and the rules read: a class for each kind of fact."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from lockstep.audit.finding import Place
    from lockstep.audit.prints import Fingerprint, Sketch


@dataclass
class Term:
    """A reduction at the end of a loss: `count` elements, each with weight `weight` in the loss.

    `kind` is ``mean`` or ``sum``, of a sum that the program divided itself by `count` as well a
    ``mean``; `op` is the operation. `may_be_masked`: elements may have been made zero before they
    were added up. `images`: how many of them the elements are of; None if they are of none.
    `divisors` and `factors` are all numbers by which a sum was divided and multiplied; empty where
    one of them is how many elements it has.
    """

    kind: str
    weight: float
    count: float
    op: str
    may_be_masked: bool
    images: int | None = None
    divisors: list[float] = field(default_factory=list)
    factors: list[float] = field(default_factory=list)


@dataclass
class ReducerUse:
    """How a DistributedDataParallel took part in a backward.

    `armed`: a forward had gone through it, and gradients were to be reduced (not under `no_sync`).
    `issued` counts the collectives of its group of `group` ranks.
    """

    armed: bool
    no_sync: bool
    issued: int
    group: int


@dataclass
class Alias:
    """How a tensor was used that a collective had changed through ``.data``.

    `is_nonlinear`: by something else than sums and products with numbers, the `factors`.
    """

    is_nonlinear: bool
    factors: list[float]


@dataclass
class Gathered:
    """A tensor of `shape` that was communicated and entered a loss.

    `differentiable`: in the forward of an autograd Function; `adjoint`: of torch's own, whose
    backward adds up; `of_input`: of the shape of what that Function was given. `weight` is what it
    counts in the loss. `given` and `given_back` are the norms of the gradients that backward gave
    to the Function and got back.
    """

    op: str
    where: list[Place]
    group: int
    shape: list[int]
    differentiable: bool
    reduction: str | None = None
    of_input: bool = False
    adjoint: bool = False
    weight: float | None = None
    alias: Alias | None = None
    given: float | None = None
    given_back: float | None = None


@dataclass
class Backward:
    """One ``backward()`` or ``autograd.grad()``.

    `factor` is what the whole loss was multiplied by in the end, and `terms` what it consists of;
    `heads` are the parameters that it was computed with last.
    By optimizer: `local` is what it brought to each parameter, as autograd delivered it; `before`
    and `gradients` are what its parameters' gradients were when it began and when it returned.
    `touched` are the optimizers some of whose gradients it wrote. `left` are the norms of all
    gradients of each model, and of all together, when it returned; only in programs that scatter
    sums of gradients.
    """

    kind: str
    where: list[Place]
    loss: float | None = None
    terms: list[Term] = field(default_factory=list)
    factor: float | None = None
    heads: list[str] = field(default_factory=list)
    wrappers: dict[str, ReducerUse] = field(default_factory=dict)
    gathered: list[Gathered] = field(default_factory=list)
    local: dict[str, Sketch] = field(default_factory=dict)
    before: dict[str, Fingerprint] = field(default_factory=dict)
    touched: list[str] = field(default_factory=list)
    left: list[float] = field(default_factory=list)
    gradients: dict[str, Fingerprint] = field(default_factory=dict)

    def rename(self, key: str, new: str) -> None:
        """What is of the optimizer `key` is of `new`."""
        prints: tuple[dict[str, Any], ...] = (self.local, self.before, self.gradients)
        for of_optimizer in prints:
            if key in of_optimizer:
                of_optimizer[new] = of_optimizer.pop(key)
        self.touched = [new if touched == key else touched for touched in self.touched]


@dataclass
class Collective:
    """One call of a function of ``torch.distributed``.

    `parameter` is the one whose gradient was communicated, `weights` the one that was itself.
    """

    op: str
    where: list[Place]
    group: list[int]
    shape: list[int] = field(default_factory=list)
    reduction: str | None = None
    parameter: str | None = None
    weights: str | None = None
    before: float | None = None
    after: float | None = None
    in_backward: bool = False


@dataclass
class Clip:
    """One call that clips the gradients of the optimizers `of`; `used` have stepped with them.

    Where the `norm` was 0, `missed` are the parameters given: [] of an iterator at its end.
    """

    norm: float
    is_clipped: bool
    factor: float
    where: list[Place]
    of: list[str]
    used: list[str] = field(default_factory=list)
    missed: list[str] | None = None


@dataclass
class Forward:
    """What the forward of a wrapper, or of a fully sharded model, was given, and when."""

    hash: int
    numpy_state: int
    where: list[Place]
    shapes: list[list[int]] = field(default_factory=list)


@dataclass
class Mode:
    """How many `parts` of a module were in `training` mode; `flags` stands for which."""

    module: str
    parts: int
    training: int
    flags: int
    where: list[Place]


@dataclass
class FrozenModule:
    """A module without a trained parameter that was called; `key` stands for its kind.

    `held` are the names of those that an optimizer holds or held.
    """

    module: str
    key: int
    names: list[str]
    held: list[str]
    counts: list[int]
    prints: Fingerprint
    where: list[Place]


@dataclass
class KeptBack:
    """Gradients that ``fully_shard`` had not reduced, and how many backwards had left them."""

    names: list[str]
    backwards: int
    where: list[Place]


@dataclass
class Beside:
    """All parameters of modules that have gradients, where no optimizer holds some of them.

    `left_out` are those of models that are held otherwise; `within` are the collectives that the
    step called itself, `is_all` tells whether all are there, and `issued` how many there had been.
    """

    names: list[str]
    sizes: list[int]
    weights: Fingerprint
    gradients: Fingerprint
    left_out: list[str]
    issued: int
    within: list[Collective] = field(default_factory=list)
    is_all: bool = False


@dataclass
class Draws:
    """What one line drew between two steps: `count` tensors, the first of `shape`.

    `when`: "within" the forward of a model that is trained, "after" it, where its backward has not
    run yet, or "before" it.
    """

    where: list[Place]
    shape: list[int]
    dtype: str
    when: str = "before"
    count: int = 0
    hash: int = 0


@dataclass
class Permutation:
    """An order of `size` things that was drawn after so many steps; `hash` stands for it."""

    where: list[Place]
    size: int
    hash: int
    step: int


@dataclass
class Step:
    """One optimizer step.

    `hyper` are the settings of each param group that are numbers, and `state` is the optimizer's
    own. `mode` is that of the module that was trained, `frozen` are those that were only called,
    and `kept_back` the gradients that the step had to do without.
    `numpy_state` stands for the state of numpy's default generator. `inputs` are the forwards of
    wrappers and of fully sharded models; `fed` and `fed_shapes` stand for what the first module
    that was called was given; `fed_rows` has a number for each row, in all tensors together, that
    the first call of each micro-batch was given, where no data loader gave it. `unowned` are
    parameters that have gradients and no optimizer; where there are any, `beside` tells of all.
    `not_finite` are the parameters whose gradients held NaN or infinity. `scale` is what a
    GradScaler had divided the gradients by.
    """

    number: int
    where: list[Place]
    entry: Fingerprint | None = None
    gradients: Fingerprint | None = None
    not_finite: list[str] = field(default_factory=list)
    exit: Fingerprint | None = None
    hyper: list[dict[str, float]] = field(default_factory=list)
    state: Fingerprint | None = None
    scale: float | None = None
    backwards: list[Backward] = field(default_factory=list)
    collectives: list[Collective] = field(default_factory=list)
    clips: list[Clip] = field(default_factory=list)
    bypasses: list[list[Place]] = field(default_factory=list)
    unowned: list[str] = field(default_factory=list)
    beside: Beside | None = None
    inside_backward: bool = False
    has_closure: bool = False
    numpy_state: int | None = None
    draws: list[Draws] = field(default_factory=list)
    inputs: list[Forward] = field(default_factory=list)
    fed: int | None = None
    fed_shapes: list[list[int]] = field(default_factory=list)
    fed_rows: list[int] = field(default_factory=list)
    mode: Mode | None = None
    frozen: list[FrozenModule] = field(default_factory=list)
    kept_back: KeptBack | None = None


@dataclass
class Parameter:
    """A parameter that an optimizer holds, as it was when the optimizer was first seen.

    `group` are the ranks that hold it, or the same piece of it, as replicas; None: all of them, or
    none if it is `sharded`. `weighed`: lockstep reduces its gradient, by the weights of batches.
    """

    name: str
    shape: list[int]
    dtype: str
    wrapper: str | None = None
    group: list[int] | None = None
    sharded: bool = False
    weighed: bool = False
    local: bool = False
    in_module: bool = True
    samples: int = 0


@dataclass
class Track:
    """One optimizer: what it holds, and its steps.

    An optimizer that comes to hold other parameters has another track for its steps until then,
    whose key says so behind a space.
    `meetings` are steps that followed more collectives than usual: the step's number, then the
    hashes of its weights. See `lockstep.audit.probe.meetings`.
    """

    key: str
    optimizer: str
    where: list[Place]
    parameters: list[Parameter] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    count: int = 0
    meetings: list[list[int]] = field(default_factory=list)
    state_names: list[str] = field(default_factory=list)

    @property
    def key_of_all(self) -> str:
        """The same for all tracks of one optimizer."""
        return self.key.partition(" ")[0]


@dataclass
class WorkerDraws:
    """What a loader's worker's generators `began` with, by kind, and which of them a function of
    the program's had `changed`; what they were `after` its first samples were read. `held` is the
    same, before and after, of all generators that the dataset holds; 0 if there are none."""

    changed: list[str]
    began: dict[str, int]
    after: dict[str, int] = field(default_factory=dict)
    held: list[int] = field(default_factory=list)


MOST_INDICES: Final = 20_000
"""The probe keeps so many indices of one iteration over a loader."""


@dataclass
class Loading:
    """One iteration over a data loader: which samples, or what the batches held.

    `part` stands for the samples that a ``Subset`` has, and `samples` are the `indices` in the
    dataset that it was taken from. `contents` has a number for each list of names in a dataset that
    a sampler shares out, and `dataset` stands for all that the dataset holds (of a ``Subset``, the
    one that it was taken from); see `lockstep.dataset_contents`. `rows` tells, for each tensor of a
    batch, what the samples of the first `indices` held, or of a stream the first samples, and
    `shapes` are those of the first batch. What a sampler says of
    itself are its `replicas` and whether it `shuffles`; `step` says how many steps there had been.
    `used` are the places of the batches that a backward followed, and `has_ended` tells whether the
    program read on until there were no more. `drawn` tells of each worker what
    its generators began with, as the loader or a ``worker_init_fn``, at `seeded_at`, left them, and
    what its first samples drew; see `lockstep.audit.probe.worker_draws`.
    """

    key: str
    where: list[Place]
    indices: list[int] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    batch_sizes: list[int] = field(default_factory=list)
    used: list[int] = field(default_factory=list)
    rows: list[list[int]] = field(default_factory=list)
    shapes: list[list[int]] = field(default_factory=list)
    sampler: str = ""
    replicas: int | None = None
    shuffles: bool | None = None
    part: int | None = None
    contents: list[int] = field(default_factory=list)
    dataset: int | None = None
    size: int | None = None
    training: bool = False
    has_ended: bool = False
    step: int = 0
    worker_seed: int | None = None
    drawn: list[WorkerDraws | None] = field(default_factory=list)
    seeded_at: list[Place] = field(default_factory=list)


@dataclass
class Evaluation:
    """The buffers with which a module was evaluated after step `step`."""

    step: int
    module: str
    names: list[str]
    counts: list[int]
    buffers: Fingerprint
    where: list[Place]


@dataclass
class UsedBuffers:
    """What a module's saved buffers held before forwards that have a gradient.

    `prints` are theirs after so many `steps`: of the first such forward, and then of the first of
    each step before which one of them was written to. `used` are those that results with a gradient
    followed from; None where that was not seen. `trains`: the module has parameters that train.
    """

    module: str
    names: list[str]
    counts: list[int]
    where: list[Place]
    steps: list[int] = field(default_factory=list)
    prints: list[Fingerprint] = field(default_factory=list)
    used: list[str] | None = None
    trains: bool = False


@dataclass
class ModelSent:
    """A message as large as what an optimizer holds (`size` numbers), after so many steps.

    `weights`: it is what the optimizer holds, or a multiple; `detailed`: its step is written down.
    """

    size: int
    op: str
    weights: bool
    detailed: bool
    steps: int


@dataclass
class ScheduleSteps:
    """How often the `schedules` of an optimizer have stepped since its first step, together."""

    count: int
    schedules: int
    where: list[Place]


@dataclass
class Unwatched:
    """Python was started, by a call at `where` that is not watched."""

    by: str
    where: list[Place]


@dataclass
class ProcessFacts:
    """What is known of a rank's process as a whole.

    `blind` says why its training could not be seen, and `died` by which signal it ended; `alone`:
    it was audited by itself, and what other ranks saw cannot be asked for. `scales` are those of
    the k-th steps of GradScalers, and `subgroups` the ranks of groups smaller than the world, None
    where a mesh made them. `unseen` are errors of the audit's own, and `failed_rules` the codes of
    rules that raised one. `accelerate` is the number of processes that it counts, and `fsdp_ranks`
    that of the ranks over which `fully_shard` shards and copies models; `looked`: a step was
    written down in the last call of a trainer.
    """

    accelerate: int | None = None
    all_to_all: bool = False
    alone: bool = False
    backwards: int = 0
    blind: str | None = None
    blind_at: list[Place] = field(default_factory=list)
    cpu_s: float = 0.0
    died: str | None = None
    failed_rules: list[str] = field(default_factory=list)
    fsdp: bool = False
    fsdp_ranks: int | None = None
    fullgraph: bool = False
    joins: bool = False
    leaves_out_padding: bool = False
    lightning: bool = False
    lockstep: bool = False
    looked: bool = False
    models_sent: list[ModelSent] = field(default_factory=list)
    scaled_at: list[Place] = field(default_factory=list)
    scales: dict[str, float] = field(default_factory=dict)
    schedules: dict[str, ScheduleSteps] = field(default_factory=dict)
    sends: bool = False
    shares_memory: bool = False
    states_loaded: list[Place] = field(default_factory=list)
    subgroups: list[list[int] | None] = field(default_factory=list)
    unseen: list[str] = field(default_factory=list)
    unwatched: list[Unwatched] = field(default_factory=list)


@dataclass
class Failure:
    """The exception that ended the script."""

    type: str
    message: str
