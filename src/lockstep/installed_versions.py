# SPDX-License-Identifier: Apache-2.0
"""The versions of lockstep and of the packages that it works with. Imports none of them."""

from __future__ import annotations

import argparse
from importlib import metadata

from lockstep._version import __version__


def version_of(package: str) -> str | None:
    """The installed version of a distribution; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


class PrintVersions(argparse.Action):
    """An option that prints the versions, and leaves."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        versions = {"lockstep-train": __version__}
        versions |= {each: version for each in ("torch", "ray") if (version := version_of(each))}
        print(", ".join(f"{package} {version}" for package, version in versions.items()))
        parser.exit()
