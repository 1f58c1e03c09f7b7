"""What the site needs besides the pages under docs/: pages of the repository's root, and links into the code."""

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}


def on_files(files: Files, config: Any, **_: Any) -> Files:
    """CONTRIBUTING.md is a page of the site, too."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    files.append(File.generated(config, "contributing.md", content=_relinked(text)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """On the site, that page lies among the others."""
    return markdown.replace("](../CONTRIBUTING.md", "](contributing.md")


def _relinked(text: str) -> str:
    return text.replace("](docs/", "](")
