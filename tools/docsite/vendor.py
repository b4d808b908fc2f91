"""Two JavaScript files that the site, or its check, needs: fetched once by npm, then kept. Pinned to one version each."""

from __future__ import annotations

import shutil
import subprocess
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

from repo import ROOT

__all__ = ["AXE", "IFRAME_WORKER", "MERMAID", "Script", "VendorError", "script"]

FOLDER = ROOT / ".cache" / "docsite"


class VendorError(RuntimeError):
    """npm is missing, or did not bring the file."""


@dataclass(frozen=True, slots=True)
class Script:
    """One file of one version of an npm package."""

    package: str
    version: str
    member: str


MERMAID = Script("mermaid", "11.17.2", "dist/mermaid.min.js")
IFRAME_WORKER = Script("iframe-worker", "1.0.4", "shim/index.js")  # lets the search work from file://
AXE = Script("axe-core", "4.14.1", "axe.min.js")


def script(wanted: Script) -> Path:
    """The file on this machine.

    Raises:
        VendorError: it is not here yet and cannot be fetched.
    """
    file = FOLDER / f"{wanted.package}-{wanted.version}.js"
    if file.is_file():
        return file
    npm = shutil.which("npm")
    if npm is None:
        raise VendorError(
            f"the site needs {wanted.package} {wanted.version}, which npm fetches, and there is no npm here.\n"
            "  Install Node.js (Debian: apt-get install npm)."
        )
    with tempfile.TemporaryDirectory() as folder:
        name = f"{wanted.package}@{wanted.version}"
        done = subprocess.run([npm, "pack", "--silent", name], cwd=folder, capture_output=True, text=True, check=False)
        archives = list(Path(folder).glob("*.tgz"))
        if done.returncode or not archives:
            raise VendorError(f"npm could not fetch {name}:\n{done.stderr.strip()}")
        with tarfile.open(archives[0]) as archive:
            member = archive.extractfile(f"package/{wanted.member}")
            if member is None:
                raise VendorError(f"{name} has no file {wanted.member}")
            FOLDER.mkdir(parents=True, exist_ok=True)
            file.write_bytes(member.read())
    return file
