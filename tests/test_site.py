"""The documentation site: built without a warning, every link and anchor of its pages leads somewhere."""

import os
import runpy
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).resolve().parents[1]
pytest.importorskip("mkdocs")


class Page(HTMLParser):
    """The ids of a page, and what it links to and loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.ids |= {found[key] for key in ("id", "name") if found.get(key)}
        if tag == "a" and found.get("href"):
            self.links.append(found["href"])
        elif tag in ("script", "img", "link") and (found.get("src") or found.get("href")):
            self.loads.append(found.get("src") or found["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(out)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stdout + done.stderr
    return out


@pytest.fixture(scope="module")
def pages(site) -> dict[Path, Page]:
    return {path: Page(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}


def test_every_page_is_on_the_site(pages, site):
    wanted = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")}
    assert wanted <= {path.relative_to(site) for path in pages}


def test_links_and_anchors_lead_somewhere(pages, site):
    broken = []
    for path, page in pages.items():
        if path.name == "404.html":
            continue  # served from any depth, so its links are absolute
        for link in [*page.links, *page.loads]:
            parts = urlsplit(link)
            if parts.scheme in ("http", "https", "mailto"):
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            if not target.exists() or (parts.fragment and unquote(parts.fragment) not in pages[target].ids):
                broken.append(f"{path.relative_to(site)} -> {link}")
    assert broken == []


def test_nothing_is_loaded_from_elsewhere(pages):
    outside = {
        link for page in pages.values() for link in page.loads if urlsplit(link).scheme in ("http", "https")
    }
    assert outside == set()


def test_the_api_reference_has_the_public_names(site):
    import moefuse

    page = Page((site / "api.html").read_text(encoding="utf-8"))
    functions = ("explain", "compile", "fuse", "reports")
    assert {f"moefuse.{name}" for name in functions} <= page.ids
    assert set(functions) <= set(moefuse.__all__)


def test_the_policy_page_is_what_the_code_says():
    made = runpy.run_path(str(ROOT / "docs" / "policy_page.py"))["page"]()
    assert (ROOT / "docs" / "policy.md").read_text(encoding="utf-8") == made, (
        "run: python docs/policy_page.py"
    )
    assert "what the layer can't do" not in made, "a check without a reason needs a docstring on its test"
