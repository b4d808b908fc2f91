"""Hooks of mkdocs: add the pages that are made at build time and the scripts that the site carries with it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from mkdocs.structure.files import File, Files

from docsite import generated, glossary, vendor

__all__ = ["on_config", "on_files", "on_page_markdown"]

_LINKED = ("tutorials/", "how-to/", "concepts/")


def on_config(config: Any) -> Any:
    """Without a repository there is nothing to link an edit button to."""
    if not config.repo_url:
        config.edit_uri = ""
        config.edit_uri_template = None
    if not (config.extra.get("version") or {}).get("provider"):
        config.extra.pop("version", None)  # an empty one would make every page ask for versions.json
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add generated pages and scripts."""
    source = f"{config.repo_url.rstrip('/')}/blob/main/" if config.repo_url else ""
    pages = {
        **generated.api_pages(source),
        **generated.readme_pages(source),
        "reference/cli.md": generated.cli_page(),
        "changelog.md": generated.changelog_page(source),
    }
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    for name, wanted in (("mermaid.min.js", vendor.MERMAID), ("iframe-worker.js", vendor.IFRAME_WORKER)):
        files.append(File.generated(config, f"assets/{name}", abs_src_path=str(vendor.script(wanted))))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Link words to the glossary."""
    path = page.file.src_uri
    if not path.startswith(_LINKED) or path == "concepts/glossary.md":
        return markdown
    words = glossary.words_of((Path(config.docs_dir) / "concepts" / "glossary.md").read_text())
    target = "glossary.md" if path.startswith("concepts/") else "../concepts/glossary.md"
    return glossary.link_words(markdown, words, target)
