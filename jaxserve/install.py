"""How to install an extra, in words that work where jaxserve runs.

The name `jaxserve` on the package registry belongs to another project, so no message may name it for
pip: jaxserve is installed from a checkout, a wheel or a git URL, and its distribution has a name of
its own.
"""

from __future__ import annotations

import json
import re
from importlib.metadata import Distribution, distributions
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

DISTRIBUTION = "jaxserve-llm"


def needs(extra: str) -> str:
    """Return the command that installs an extra from where jaxserve came, or else the packages of the extra."""
    checkout = Path(__file__).resolve().parent.parent
    if (checkout / "pyproject.toml").is_file():
        return f"pip install -e '{checkout}[{extra}]'"
    # In the folder of the package, as the metadata of a checkout may come first on sys.path.
    distribution = next(iter(distributions(name=DISTRIBUTION, path=[str(checkout)])), None)
    if distribution is None:
        return f"pip install -e 'CHECKOUT[{extra}]'"
    what = _source(json.loads(distribution.read_text("direct_url.json") or "{}"), extra)
    return f"pip install {what or ' '.join(map(repr, _packages(distribution, extra)))}"


def _source(told: dict[str, Any], extra: str) -> str | None:
    """Return pip's argument for what PEP 610 recorded at the installation, or None if that is gone."""
    url = str(told.get("url", ""))
    if vcs := told.get("vcs_info"):
        commit = vcs.get("requested_revision") or vcs["commit_id"]
        return f"'{DISTRIBUTION}[{extra}] @ {vcs['vcs']}+{url}@{commit}'"
    if url.startswith("file:"):
        path = Path(unquote(urlsplit(url).path))
        return f"'{path}[{extra}]'" if path.exists() else None
    return f"'{DISTRIBUTION}[{extra}] @ {url}'" if url else None


def _packages(distribution: Distribution, extra: str) -> list[str]:
    """Return the requirements of an extra, those of other extras of ours written out."""
    packages: list[str] = []
    for required in distribution.requires or ():
        requirement, _, marker = required.partition(";")
        if not re.search(rf"extra == ['\"]{extra}['\"]", marker):
            continue
        own = re.match(rf"{DISTRIBUTION}\[(.*)\]", requirement)
        packages += (
            chain(*(_packages(distribution, part) for part in own[1].split(","))) if own else [requirement.strip()]
        )
    return packages
