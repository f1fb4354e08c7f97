# SPDX-License-Identifier: Apache-2.0
"""Install what `make release` has built into empty environments, and use it as a user would.

``python -m release.try_distributions dist``: each file without extras, and the wheel with Ray. The
programs run in a folder of their own, with a home of their own: nothing of the checkout is found.
An environment is deleted after its trial (torch is large).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tests.programs.blocks import ROOT, files_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class Environment:
    """An empty environment, and a folder in which its programs run."""

    def __init__(self, place: Path) -> None:
        self.folder = place / "work"
        self._home, self._venv = place / "home", place / "venv"
        self.folder.mkdir()
        self._home.mkdir()
        subprocess.run([sys.executable, "-m", "venv", self._venv], check=True)

    def install(self, *requirements: str) -> None:
        """With the versions of constraints.txt."""
        quiet = ["--quiet", "--disable-pip-version-check", "-c", str(ROOT / "constraints.txt")]
        self.run("python", "-m", "pip", "install", *quiet, *requirements)

    def run(self, program: str, *arguments: str, exit_code: int = 0) -> str:
        """What a program of the environment prints, standard error included."""
        passed_on = ("PIP_", "LANG", "TMPDIR", "SSL_", "REQUESTS_")
        done = subprocess.run(
            [str(self._venv / "bin" / program), *arguments],
            cwd=self.folder,
            env={
                **{name: value for name, value in os.environ.items() if name.startswith(passed_on)},
                "HOME": str(self._home),
                "PATH": f"{self._venv / 'bin'}:/usr/bin:/bin",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode != exit_code:
            words = " ".join([program, *arguments])
            raise SystemExit(f"{words}: exit code {done.returncode}\n{done.stdout}")
        return done.stdout


@contextmanager
def new_environment() -> Iterator[Environment]:
    """Deleted in the end."""
    with tempfile.TemporaryDirectory(prefix="lockstep-release-") as place:
        yield Environment(Path(place))


def try_audit(environment: Environment) -> str:
    """The audit names what is wrong in the documentation's first program."""
    shutil.copy(ROOT / "docs" / "programs" / "bypassed.py", environment.folder)
    said = environment.run("lockstep", "audit", "bypassed.py", exit_code=65)
    explained = environment.run("lockstep", "explain", "LS101").splitlines()[0]
    version = environment.run("lockstep", "--version").strip()
    (finding,) = [line for line in said.splitlines() if line.startswith("error [")]
    return f"{version}: {finding}; {explained}"


def try_training(environment: Environment) -> str:
    """The README's program."""
    (environment.folder / "classify.py").write_text(files_of(ROOT / "README.md")["classify.py"])
    environment.install("scikit-learn")
    return environment.run("python", "classify.py").splitlines()[-1]


def main(arguments: Sequence[str]) -> int:
    (folder,) = map(Path, arguments)
    (wheel,), (sdist,) = folder.resolve().glob("*.whl"), folder.resolve().glob("*.tar.gz")
    trials = [(wheel, "", try_audit), (sdist, "", try_audit), (wheel, "[ray]", try_training)]
    for file, extras, trial in trials:
        print(f"{file.name}{extras} in an empty environment", flush=True)
        with new_environment() as environment:
            environment.install(f"lockstep-train{extras} @ {file.as_uri()}")
            print(f"  {trial(environment)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
