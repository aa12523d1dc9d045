"""Hooks of `mkdocs` for files outside of `docs/`: the README is the site's first page, results are pages of it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

_ROOT_PAGES = {
    "README.md": "index.md",
    **{name: name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "tests/README.md")},
}


def on_config(config: Any) -> Any:
    """Say of which version the site is."""
    source = Path(config.config_file_path).parent / "pygraph" / "version.py"
    (version,) = re.findall(r'^__version__ = "(.+)"', source.read_text(encoding="utf-8"), re.MULTILINE)
    config.copyright = f"PyGraph {version}, BSD-3-Clause"
    return config


def on_files(files: Files, *, config: Any) -> Files:
    """Add the root's pages and the kept results."""
    root = Path(config.config_file_path).parent
    for name, page in _ROOT_PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(root / name)))
    for path in sorted((root / "benchmarks" / "results").rglob("*")):
        if path.suffix in {".md", ".json", ".png"}:
            files.append(File.generated(config, str(path.relative_to(root)), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Make links between `docs/` and the root lead to the site's pages."""
    if page.file.src_uri in _ROOT_PAGES.values():
        return re.sub(r"\]\(docs/", "](", markdown)
    if "/" in page.file.src_uri:
        return markdown
    return re.sub(r"\]\(\.\./", "](", markdown).replace("](README.md", "](index.md")
