# SPDX-License-Identifier: Apache-2.0
"""Take the picture of an audit's report: a real run, in a real browser.

python docs/pictures/audit_report.py

Needs Chromium (Debian: apt-get install chromium), under one of its usual names or as $CHROMIUM.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
WIDTH, HEIGHT = 760, 1832
"""Of the window: the finding, the mixing of gradients, the gradients and the drift."""


def main() -> None:
    found = [shutil.which(name) for name in (os.environ.get("CHROMIUM", ""), *NAMES) if name]
    browser = next(filter(None, found))
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "report.html"
        audited = HERE.parent / "programs" / "audited.py"
        subprocess.run([sys.executable, str(audited), "--html", str(page)], check=True)
        subprocess.run(
            [
                browser,
                "--headless",
                "--no-sandbox",
                "--hide-scrollbars",
                f"--window-size={WIDTH},{HEIGHT}",
                f"--user-data-dir={folder}/profile",
                f"--screenshot={HERE / 'audit-report.png'}",
                page.as_uri(),
            ],
            check=True,
        )


if __name__ == "__main__":
    main()
