"""The pages under docs/: their Python runs, prints what they say, and names everything that exists.

A page's blocks are run in order in one namespace. A ```text block straight after a ```python block is what that
block prints; `...` in it stands for whatever differs between machines.
"""

import ast
import contextlib
import doctest
import io
import linecache
import re
import sys
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from types import ModuleType

import pytest

from moefuse import policy, targets
from moefuse.inner import INNER_COMPILERS
from moefuse.ops import kernels
from moefuse.ops.activations import ACTIVATIONS, CUSTOM
from moefuse.options import Options
from moefuse.policy.npu import IDENTITY, checks_of_row
from moefuse.policy.npu_limits import rows as limits
from moefuse.policy.npu_limits import table

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
ALL = sorted([*DOCS.rglob("*.md"), *ROOT.glob("*.md")])
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
REGISTRIES = (
    (targets, "_TARGETS"),
    (kernels, "_KERNELS"),
    (policy, "_CHECKS"),
    (policy, "_DEVICE_TARGETS"),
)
PRINTED = doctest.OutputChecker()
HOW = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@dataclass
class Block:
    """One ```python block: its code, the line where it starts, and what it must print (None: anything)."""

    code: str
    line: int
    prints: str | None = None


def blocks(text: str) -> list[Block]:
    found: list[Block] = []
    end = -1
    for fence in FENCE.finditer(text):
        if fence[1] == "python":
            found.append(Block(fence[2], text.count("\n", 0, fence.start(2))))
        elif fence[1] == "text" and found and end >= 0 and not text[end : fence.start()].strip():
            found[-1].prints = fence[2]
        end = fence.end() if fence[1] == "python" else -1
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_code_of_a_page_runs_and_prints_what_the_page_says(page, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # a page may write files
    for room, registry in REGISTRIES:  # and add targets
        monkeypatch.setattr(room, registry, dict(getattr(room, registry)))
    module = ModuleType("page_" + page.stem.replace("-", "_"))
    monkeypatch.setitem(sys.modules, module.__name__, module)  # Dynamo looks up the module of what it inlines
    for block in blocks(page.read_text(encoding="utf-8")):
        source = "\n" * block.line + block.code  # so that a traceback names the page's own line
        # What reads a function's source finds what ran, not a page.
        monkeypatch.setitem(
            linecache.cache, str(page), (len(source), None, source.splitlines(True), str(page))
        )
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(source, str(page), "exec"), vars(module))
        wanted, got = block.prints, printed.getvalue()
        assert wanted is None or PRINTED.check_output(wanted, got, HOW), (
            f"{page.name}:{block.line + 1} printed\n{got}\nand the page says\n{wanted}"
        )


def test_blocks_are_found_with_their_output():
    text = "a\n```python\nx = 1\n```\n\n```text\n1\n```\nb\n```python\ny\n```\nmore\n```text\n2\n```\n"
    assert blocks(text) == [Block("x = 1\n", 2, "1\n"), Block("y\n", 10, None)]


@pytest.mark.parametrize("page", ALL, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    prose = FENCE.sub("", page.read_text(encoding="utf-8"))
    for link in LINK.findall(prose):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name} links to {link}"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{page.name} links to {link}"


def anchors(page: Path) -> set[str]:
    """The anchors that a site makes of the headings."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def rows(page: str) -> dict[str, str]:
    """The table rows of a page whose first cell is one code span: {its text: the rest}; the first of a name counts."""
    text = (DOCS / page).read_text(encoding="utf-8")
    return dict(reversed(re.findall(r"^\| `([^`]+)` \|(.*)\|$", text, re.MULTILINE)))


def test_every_page_is_linked_from_the_first():
    linked = LINK.findall((DOCS / "index.md").read_text(encoding="utf-8"))
    assert {page.name for page in PAGES} - {"index.md"} <= set(linked)


def test_every_option_has_its_row_with_its_default():
    table = rows("options.md")
    for option in fields(Options):
        default = option.default_factory() if option.default is MISSING else option.default
        shown = repr(list(default) if isinstance(default, tuple) else default)
        assert f"`{shown}`".replace("'", '"') in table[option.name].split("|")[0]


def test_every_target_and_inner_compiler_is_named_with_the_options():
    table = rows("options.md")
    assert all(f"`{name}`" in table["target"] for name in ("auto", *targets.names()))
    assert all(f"`{name}`" in table["inner"] for name in ("auto", *INNER_COMPILERS))


def test_every_activation_has_its_row_with_its_formula():
    table = rows("node.md")
    assert CUSTOM in table
    for name, activation in ACTIVATIONS.items():
        kind, formula, params = (cell.strip() for cell in table[name].split("|"))
        assert kind == ("gated" if activation.gated else "plain")
        assert formula == f"`{activation.formula}`"
        assert params.replace(" (optional)", "").strip("`") == ", ".join(activation.params)
        assert ("(optional)" in params) == bool(activation.optional)


def test_every_policy_check_has_its_row():
    table = rows("why-not-fused.md")
    names = {check.name for target in targets.names() for check in policy.checks_of(target)}
    assert names <= set(table), f"docs/why-not-fused.md has no row for {sorted(names - set(table))}"


def test_every_reason_on_the_page_exists_in_the_code():
    texts = "\n".join(text for path in (ROOT / "moefuse").rglob("*.py") for text in strings(path))
    listed = (DOCS / "why-not-fused.md").read_text(encoding="utf-8").partition("## The reasons")[2]
    reasons = re.findall(r"^\| (?!-|reason)(.+?) \|", listed, re.MULTILINE)
    assert len(reasons) > 40
    gone = [r for r in reasons if any(part.strip(" `") not in texts for part in r.strip("`").split("..."))]
    assert not gone, f"nothing in moefuse says {gone}; docs/why-not-fused.md has to follow"


def strings(path: Path) -> list[str]:
    """The literal parts of all strings in a file, docstrings included."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)]


def test_every_benchmark_is_described():
    text = (DOCS / "performance.md").read_text(encoding="utf-8")
    for script in (ROOT / "benchmarks").glob("*.py"):
        assert f"benchmarks/{script.name}" in text


def test_the_page_on_ascend_shows_the_limits_as_they_are():
    text = (DOCS / "ascend.md").read_text(encoding="utf-8")
    assert text.partition("<!-- limits -->\n")[2].partition("\n<!-- /limits -->")[0] == table()


def test_the_page_on_ascend_names_every_check():
    text = (DOCS / "ascend.md").read_text(encoding="utf-8")
    names = [check.name for check in (*IDENTITY, *checks_of_row(limits()[0]))]
    assert [n for n in names if f"`{n}`" not in text and f"| {n.replace('_', ' ')} |" not in text] == []
