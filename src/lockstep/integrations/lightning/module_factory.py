# SPDX-License-Identifier: Apache-2.0
"""Makes a worker's LightningModule and datamodule from the arguments of `from_lightning`."""

from __future__ import annotations

import copy
import importlib.util
import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from lockstep.errors import ConfigurationError, NotAvailableError, WrongTypeError
from lockstep.keys import BATCH_SIZE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

PACKAGES: Final = ("lightning.pytorch", "pytorch_lightning")


@dataclass(frozen=True)
class ModuleFactory:
    """The arguments of `from_lightning`.

    Attributes:
        module: a LightningModule class or instance, or a function from the config to one.
        datamodule: a LightningDataModule class or instance, a function from the config to one, or
            None.
        train_dataloader, val_dataloader: loaders that replace those of module and datamodule.
        gradient_clip_val, gradient_clip_algorithm, max_epochs: as Lightning's trainer takes them.
    """

    module: Any
    datamodule: Any = None
    train_dataloader: Any = None
    val_dataloader: Any = None
    gradient_clip_val: float | None = None
    gradient_clip_algorithm: str | None = None
    max_epochs: int | None = None

    def make(self, config: Mapping[str, Any], *, copied: bool) -> tuple[Any, Any]:
        """Make the module and the datamodule (None without one).

        Args:
            config: its keys go to the constructors that have parameters of these names, or
                as a whole to those that have a parameter ``config``.
            copied: whether to copy an instance instead of using it.

        Raises:
            ConfigurationError: no constructor takes a key, or a parameter has no key.
            WrongTypeError: a function returned no LightningModule or LightningDataModule.
        """
        taken: set[str] = set()
        module = _make(self.module, "LightningModule", config, taken, copied=copied)
        data = None
        if self.datamodule is not None:
            data = _make(self.datamodule, "LightningDataModule", config, taken, copied=copied)
        unused = [key for key in config if key not in taken and key != BATCH_SIZE]
        if unused:
            raise ConfigurationError(
                "the config has keys that nobody takes",
                got=", ".join(map(repr, unused)),
                expected=f"parameters of {_name_of(self.module)}"
                + (f" or {_name_of(self.datamodule)}" if self.datamodule is not None else ""),
                fix="name the parameter as the key, or give from_lightning a function:"
                " from_lightning(lambda config: MyModule(...))",
            )
        return module, data


def check_module_argument(given: Any) -> None:
    """Refuse an argument that is neither a LightningModule nor a function that may return one."""
    if is_lightning(given, "LightningModule") or (
        callable(given) and not inspect.isclass(given) and not hasattr(given, "forward")
    ):
        return
    if not any(_is_installed(package) for package in PACKAGES):
        raise NotAvailableError(
            "from_lightning needs Lightning, which is not installed",
            fix='pip install "lockstep-train[lightning]"',
        )
    raise WrongTypeError(
        "from_lightning was given something else than a LightningModule",
        expected="a LightningModule class, an instance, or a function from the config to one",
        got=f"{given!r:.80}",
        fix="class MyModule(lightning.LightningModule): ...",
    )


def is_lightning(given: Any, name: str) -> bool:
    """Whether `given` is a `name` (a class or an instance) of one of Lightning's two packages.

    The class is compared by name, so that lockstep imports no package that the user's own code
    has not imported.
    """
    kind = given if inspect.isclass(given) else type(given)
    return any(
        base.__name__ == name and base.__module__.startswith(PACKAGES) for base in kind.__mro__
    )


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package.split(".")[0]) is not None
    except ValueError:  # a program set sys.modules[package] to None
        return False


def _name_of(given: Any) -> str:
    return getattr(given, "__name__", type(given).__name__)


def _make(
    given: Any, kind: str, config: Mapping[str, Any], taken: set[str], *, copied: bool
) -> Any:
    if inspect.isclass(given):
        return _construct(given, config, taken)
    if is_lightning(given, kind):
        # An instance has its hyperparameters already, so that every key of the config is allowed.
        taken.update(config)
        return copy.deepcopy(given) if copied else given
    taken.update(config)
    made = given(config)
    if not is_lightning(made, kind):
        raise WrongTypeError(
            f"a function given to from_lightning did not return a {kind}",
            where=_name_of(given),
            got=f"{type(made).__name__}: {made!r:.60}",
        )
    return made


def _construct(cls: Callable[..., Any], config: Mapping[str, Any], taken: set[str]) -> Any:
    signature = inspect.signature(cls)
    parameters = signature.parameters
    if "config" in parameters and "config" not in config:
        taken.update(config)
        arguments: dict[str, Any] = {"config": config}
    else:
        arguments = {key: value for key, value in config.items() if key in parameters}
        if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()):
            arguments |= {key: config[key] for key in config if key != BATCH_SIZE}
        taken.update(arguments)
    # `config[BATCH_SIZE]` is a `ShardBatchSize` here, which carries the global batch size.
    if "batch_size" in parameters and "batch_size" not in config and BATCH_SIZE in config:
        arguments["batch_size"] = config[BATCH_SIZE]
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise ConfigurationError(
            f"{_name_of(cls)} cannot be made from the config: {error}",
            expected=f"{_name_of(cls)}{signature}",
            got=f"config keys {sorted(map(str, config))}",
            fix="TorchTrainer(..., config={parameter: value}), or give from_lightning a function:"
            f" from_lightning(lambda config: {_name_of(cls)}(...))",
        ) from None
    return cls(**arguments)


def single_loader(loader: Any, purpose: str) -> Any:
    """`loader`, or the only loader in it; Lightning allows several, which are refused."""
    several = isinstance(loader, list | tuple | dict) or type(loader).__name__ == "CombinedLoader"
    if not several:
        return loader
    if isinstance(loader, list | tuple) and len(loader) == 1:
        return loader[0]
    if isinstance(loader, list | tuple) and not loader:
        return None
    raise NotAvailableError(
        f"several {purpose} loaders are not supported",
        got=f"a {type(loader).__name__} of them",
        fix="one loader over torch.utils.data.ConcatDataset([...])",
    )
