"""The release of transformers whose own tests are run: its source distribution, fetched once and kept.

One fixed release, code and tests together, put before the installed one on the path of a process of its own.
The tests reach into private parts of the library, so tests of one release against the code of another fail
for reasons that say nothing about a patch. The installed release has the tests of the patches; its tokenizers
and its hub client serve this one too.

``python -m tests.hf_suite.release`` fetches it ahead of time and prints where it lies.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from filelock import FileLock

RELEASE = "5.23.0"


class Unreachable(Exception):
    """pip could not get the source distribution; the message is pip's."""


def fetch() -> Path:
    """The unpacked source distribution, a folder with ``src`` and ``tests``, from the cache or by pip.

    Raises:
        Unreachable: pip can't get it: no network, no pip, or a Python too old for the release.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "streamattn"
    cache.mkdir(parents=True, exist_ok=True)
    target = cache / f"transformers-{RELEASE}"
    with FileLock(cache / f"{target.name}.lock"):
        if not target.exists():
            with tempfile.TemporaryDirectory(dir=cache) as temporary:
                unpacked = _download(Path(temporary))
                unpacked.rename(target)
    return target


def _download(folder: Path) -> Path:
    options = ["--quiet", "--disable-pip-version-check", "--retries", "1", "--timeout", "20"]
    wanted = ["--no-deps", "--no-binary", "transformers", requirement := f"transformers=={RELEASE}"]
    pip = subprocess.run(
        [sys.executable, "-m", "pip", "download", *options, "--dest", folder, *wanted],
        capture_output=True,
        text=True,
    )
    if pip.returncode != 0:
        raise Unreachable(f"pip can't download the source of {requirement}: {pip.stderr.strip()[-300:]}")
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    return folder / f"transformers-{RELEASE}"


if __name__ == "__main__":
    print(fetch())
