# SPDX-License-Identifier: Apache-2.0
"""The exceptions that lockstep raises.

::

    LockstepError
    ├── ConfigurationError        ValueError    LS001  an argument or a config that cannot be right
    ├── WrongTypeError            TypeError     LS002  an argument of the wrong kind
    ├── NotAvailableError         RuntimeError  LS003  a feature or a package that is not there
    ├── TrainerClosedError        RuntimeError  LS004  a call after shutdown or after a failure
    ├── NotEnoughResourcesError   TimeoutError  LS005  the cluster has not got what was asked for
    ├── CheckpointError           ValueError    LS006  a file that is truncated, foreign, newer ...
    │   └── CheckpointNotFoundError   FileNotFoundError   there is no such file
    ├── CheckpointWriteError      OSError       LS009  a full disk, a directory that is read-only
    ├── NotPicklableError         TypeError     LS007  something that cannot travel to a worker
    ├── WorkerFailedError         RuntimeError  LS008  a user's error that cannot travel back
    ├── WrongUseError             RuntimeError  LS010  a call at a moment when it cannot be right
    ├── NotOverriddenError        NotImplementedError   LS011  a method that the user has to write
    ├── GradientNotReducedError   RuntimeError  LS101  an optimizer is about to use a local gradient
    ├── UnknownParameterError     RuntimeError  LS102  an optimizer holds what nobody synchronises
    ├── SparseGradientError       TypeError     LS103  a sparse gradient
    ├── RowsDifferError           ValueError    LS111  ranks bring rows that do not fit together
    ├── PerShardLossError         RuntimeError  LS112  a joint function on one shard alone
    ├── LossesDifferError         RuntimeError  LS113  ranks' losses differ where one is needed
    ├── ParityError               AssertionError  LS114  a step that is not the one of one process
    ├── NonFiniteError            FloatingPointError  LS115  a step with NaN or infinity
    ├── UnitOrderError            RuntimeError  LS117  ranks' forwards go through other layers
    ├── MixedWeightsError         RuntimeError  LS201  weighted and plain backwards in one window
    ├── WeightError               ValueError    LS202  a weight that is negative, NaN or infinite
    ├── CrossedWeightsError       RuntimeError  LS213  a weight that cannot follow its gradient
    ├── ReplicasDifferError       ValueError    LS301  ranks built different models
    ├── LostUpdateError           RuntimeError  LS310  a write to a replica that would be lost
    ├── SilentDataCorruptionError RuntimeError  LS313  workers computed other bits from the same
    ├── DataOrderError            ValueError    LS501  ranks would read different data plans
    ├── NotShardableError         TypeError     LS502  data that cannot be shared out exactly
    ├── AuditError                RuntimeError  (any)  what the watch over a run found
    ├── PeerLostError             RuntimeError  LS601  a collective failed: another rank went away
    ├── WorkerDiedError           RuntimeError  LS602  a worker process died
    └── PoisonedStepError         RuntimeError  LS603  samples that end every worker that gets them

Each derives from the builtin that fits, so that ``except ValueError`` works as well. What is no
error is a warning: `UnequalRowsWarning` (LS212). A code means one thing, here and in the audit;
``lockstep explain CODE`` says which.
"""

from __future__ import annotations

from typing import Any, ClassVar, Final

_LABELS: Final = ("where", "expected", "got", "cause", "fix")


class LockstepError(Exception):
    """The root: what went wrong, and as far as known where, why, and what to type.

    Args:
        what: one sentence, no full stop needed.
        where: rank, step, parameter, file.
        expected: what would have been right.
        got: the value that was there instead.
        cause: the likely reason.
        fix: what to type.
    """

    code: ClassVar[str] = "LS000"

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        expected: str | None = None,
        got: str | None = None,
        cause: str | None = None,
        fix: str | None = None,
    ) -> None:
        self.what = what
        self.details = dict(zip(_LABELS, (where, expected, got, cause, fix), strict=True))
        lines = [f"[{self.code}] {what}"]
        lines += [f"  {label:<8} {text}" for label, text in self.details.items() if text]
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[Any, ...]:
        # The default would call the class with the rendered message as `what`.
        return _rebuild, (type(self), self.what, self.details), self.__dict__


def _rebuild(cls: type[LockstepError], what: str, details: dict[str, Any]) -> LockstepError:
    return cls(what, **details)


class ConfigurationError(LockstepError, ValueError):
    """An argument or a configuration that cannot be right."""

    code = "LS001"


class WrongTypeError(LockstepError, TypeError):
    """An argument of the wrong kind."""

    code = "LS002"


class NotAvailableError(LockstepError, RuntimeError):
    """A feature that this version has not got, or an optional package that is missing."""

    code = "LS003"


class TrainerClosedError(LockstepError, RuntimeError):
    """A call to a trainer that was shut down, or whose workers ended after a failure."""

    code = "LS004"


class NotEnoughResourcesError(LockstepError, TimeoutError):
    """The cluster has not got, within the start timeout, the resources that the workers need."""

    code = "LS005"


class CheckpointError(LockstepError, ValueError):
    """A checkpoint that is truncated, corrupted, foreign, newer, or of another model, optimizer."""

    code = "LS006"


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no file where a checkpoint should be."""


class CheckpointWriteError(LockstepError, OSError):
    """A checkpoint that could not be written; the earlier one is intact.

    Attributes:
        errno: the operating system's number, e.g. ``errno.ENOSPC``, or None.
        result: what `train` would have returned, if it is what raised this.
    """

    code = "LS009"
    result: Any = None

    def __reduce__(self) -> tuple[Any, ...]:
        rebuild, arguments, attributes = super().__reduce__()
        return rebuild, arguments, {**attributes, "errno": self.errno}


class NotPicklableError(LockstepError, TypeError):
    """Something that has to travel to a worker process and cannot."""

    code = "LS007"


class WorkerFailedError(LockstepError, RuntimeError):
    """A user's exception in a worker that could not be pickled; the message shows it."""

    code = "LS008"


class WrongUseError(LockstepError, RuntimeError):
    """A call that would be right, but not at this moment."""

    code = "LS010"


class NotOverriddenError(LockstepError, NotImplementedError):
    """A method that a subclass has to bring, and does not."""

    code = "LS011"


class GradientNotReducedError(LockstepError, RuntimeError):
    """An optimizer is about to use a gradient that passed no reduction since its last step."""

    code = "LS101"


class UnknownParameterError(LockstepError, RuntimeError):
    """An optimizer holds a parameter with a gradient that nobody synchronises."""

    code = "LS102"


class SparseGradientError(LockstepError, TypeError):
    """A parameter received a sparse gradient, which flat buckets cannot hold."""

    code = "LS103"


class RowsDifferError(LockstepError, ValueError):
    """The ranks bring tensors to one collective that do not fit together."""

    code = "LS111"


class PerShardLossError(LockstepError, RuntimeError):
    """A function that needs the whole global batch, where only one shard of it is computed."""

    code = "LS112"


class LossesDifferError(LockstepError, RuntimeError):
    """The ranks differentiate different losses where one and the same is needed."""

    code = "LS113"


class ParityError(LockstepError, AssertionError):
    """The ranks' gradients are not those of one process; the text holds the whole report."""

    code = "LS114"


class NonFiniteError(LockstepError, FloatingPointError):
    """A step would put the first NaN or infinity into the weights; they stay as they were.

    Buffers do as well, where the default step raised it; in a loop of one's own they keep what the
    forwards of this step changed.

    Attributes:
        found_on_all_ranks: every rank raises this error, because its reduced gradient is the same.
    """

    code = "LS115"
    found_on_all_ranks: bool = True


class UnitOrderError(LockstepError, RuntimeError):
    """The ranks' forwards or backwards go through the units of a sharded model in other orders.

    Raised on every rank before anything has moved: one rank's gather would meet another layer's.
    """

    code = "LS117"


class MixedWeightsError(LockstepError, RuntimeError):
    """Weighted and plain backwards in one accumulation window."""

    code = "LS201"


class WeightError(LockstepError, ValueError):
    """A weight that is negative, NaN or infinite, or weights that add up to zero."""

    code = "LS202"


class CrossedWeightsError(LockstepError, RuntimeError):
    """Gradients would travel between ranks before the ranks' unequal weights are applied."""

    code = "LS213"


class UnequalRowsWarning(UserWarning):
    """Ranks gathered unequal numbers of rows, have a loss each, and all count alike."""

    code: ClassVar[str] = "LS212"


class ReplicasDifferError(LockstepError, ValueError):
    """The ranks built models whose parameters differ in name, shape or dtype."""

    code = "LS301"


class LostUpdateError(LockstepError, RuntimeError):
    """A forward writes to the model what the other replicas, shards or ranks do not: it would be
    lost, or differ by rank."""

    code = "LS310"


class SilentDataCorruptionError(LockstepError, RuntimeError):
    """Workers computed other bits from the same weights, samples and random numbers.

    ``shadow_every`` has looked, and which of them was wrong cannot be told. Where it can, the step
    goes on with the right bits, and a warning with this code names the worker.
    """

    code = "LS313"


class DataOrderError(LockstepError, ValueError):
    """The ranks would read the data by different plans, or go on where its length says it ends.

    Or an epoch would go on in another order than that in which it began.
    """

    code = "LS501"


class NotShardableError(LockstepError, TypeError):
    """Data that cannot be shared out so that every sample is seen exactly once."""

    code = "LS502"


class AuditError(LockstepError, RuntimeError):
    """Findings of the audit that watches a run; the code is that of the gravest one.

    Attributes:
        findings: all that are errors, as `lockstep.audit` has them.
    """

    code = "LS100"

    def __init__(self, what: str, *, findings: tuple[Any, ...] = (), **details: str | None) -> None:
        self.findings = findings
        if findings:
            vars(self)["code"] = findings[0].code
        super().__init__(what, **details)

    def __reduce__(self) -> tuple[Any, ...]:
        _, (cls, what, details), attributes = super().__reduce__()
        return _rebuild, (cls, what, {**details, "findings": self.findings}), attributes


class PeerLostError(LockstepError, RuntimeError):
    """A collective failed because another rank went away or did not come."""

    code = "LS601"


class WorkerDiedError(LockstepError, RuntimeError):
    """A worker process died."""

    code = "LS602"


class PoisonedStepError(LockstepError, RuntimeError):
    """The same samples ended one worker after the other."""

    code = "LS603"
