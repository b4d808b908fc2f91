"""Which of our distributions are installed, under whatever name: a checkout says `ds-zero`, the index another prefix."""

from __future__ import annotations

import importlib.metadata
from importlib.metadata import PackageNotFoundError

__all__ = ["distributions_of", "version_of"]


def version_of(module: str) -> str:
    """Return the version of the distribution that provides the import name `module` (`ds_zero`).

    Raises:
        PackageNotFoundError: `module` comes from no installed distribution.
    Cost: under another name than `ds-zero`, the metadata of every installed distribution is read once, some 50 ms.
    """
    try:
        return importlib.metadata.version(module.replace("_", "-"))
    except PackageNotFoundError:
        for name in importlib.metadata.packages_distributions().get(module, ()):
            return importlib.metadata.version(name)
        raise


def distributions_of(prefix: str = "ds_") -> dict[str, str]:
    """Return distribution name -> version of everything installed whose import name begins with `prefix`."""
    there = importlib.metadata.packages_distributions()
    names = {name for module, found in there.items() if module.startswith(prefix) for name in found}
    names |= {name for d in importlib.metadata.distributions() if (name := d.metadata["Name"] or "").startswith("ds-")}
    return {name.lower(): importlib.metadata.version(name) for name in sorted(names)}
