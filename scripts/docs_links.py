"""MkDocs hook that replaces links to files outside docs/ by links to the repository, or by the file's path.

Pages link to results, presets and READMEs in the repository. The site contains only docs/, and a strict build refuses
links that leave it. Links to missing files are unchanged, so that they fail the build.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")


def outside(page: str, target: str) -> str | None:
    """Return the repository path of a link from a page if it is an existing file or folder outside docs/."""
    if "://" in target:
        return None
    path = os.path.normpath(os.path.join("docs", os.path.dirname(page), target))
    return None if path.startswith(("docs/", "..")) or not (ROOT / path).exists() else path


def rewrite(markdown: str, page: str, repository: str | None) -> str:
    """Return the text of a page with the links that leave docs/ replaced."""

    def replace(match: re.Match[str]) -> str:
        text, path = match[1], outside(page, match[2])
        if path is None:
            return match[0]
        if repository:
            return f"[{text}]({repository.rstrip('/')}/blob/main/{path}{match[3] or ''})"
        return f"`{path}`" if text.strip("`") in (path, Path(path).name) else f"{text} (`{path}`)"

    return LINK.sub(replace, markdown)


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Rewrite one page; MkDocs calls this before it renders the page."""
    return rewrite(markdown, page.file.src_uri, config.repo_url)
