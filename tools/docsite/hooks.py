"""Hooks of mkdocs: pages that are made at build time, scripts that the site carries, what search finds, tables that fit."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from mkdocs.structure.files import File, Files

from docsite import api, generated, ranking, tables, vendor

__all__ = ["on_config", "on_files", "on_page_content", "on_page_markdown", "on_post_page"]


def on_config(config: Any) -> Any:
    """Leave out what needs a repository or several versions, where there are none."""
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
        **api.api_pages(source),
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
    """Say how the search ranks a page."""
    ranking.apply(page.file.src_uri, page.meta)
    return markdown


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """Make tables that fit into the column."""
    return tables.label_cells(html)


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Load the script for drawings, 3.5 MB, only where a page has one."""
    if 'class="mermaid"' not in output:
        return output
    script = page.file.url.count("/") * "../" + "assets/mermaid.min.js"
    return output.replace("</body>", f'<script src="{script}"></script></body>')
