"""Which names an iteration reads from the one before, and which are read after the loop."""

import ast

import pytest

from moefuse.frontend.liveness import live_names


@pytest.mark.parametrize(
    ("body", "after", "head"),
    [
        ("for i in n:\n    t = i\n    u = t\nreturn 0", set(), set()),
        ("for i in n:\n    t = i\nreturn t", {"t"}, set()),
        ("for i in n:\n    t += i\nreturn 0", set(), {"t"}),
        ("for i in n:\n    if i:\n        t = i\n    u = t\nreturn 0", set(), {"t"}),
        (
            "for i in n:\n    if i:\n        t = i\n    else:\n        t = 0\n    u = t\nreturn 0",
            set(),
            set(),
        ),
        ("for i in n:\n    t = i\nt = 0\nreturn t", set(), set()),
        ("for i in n:\n    t = i\nif n:\n    t = 0\nreturn t", {"t", "n"}, set()),
        ("for i in n:\n    t = i\nfor j in n:\n    t = j\n    u = t\nreturn 0", {"n"}, set()),
        ("for i in n:\n    t = i\nwhile n:\n    t = 0\nreturn t", {"t", "n"}, set()),
        ("for i in n:\n    with t:\n        u = i\n    v = u\nreturn 0", set(), {"t"}),
        ("for i in n:\n    (a, b), c = i\n    d = a\nreturn b", {"b"}, {"a"}),
        ("for i in n:\n    t[0] = i\nreturn 0", set(), {"t"}),
    ],
    ids=[
        *(
            "a temporary",
            "read after",
            "accumulated",
            "assigned in one branch",
            "assigned in both",
            "assigned again",
        ),
        *(
            "maybe assigned again",
            "another loop's",
            "in a while",
            "a context",
            "nested tuples err to live",
            "an element",
        ),
    ],
)
def test_live(body: str, after: set[str], head: set[str]) -> None:
    tree = ast.parse("def f(n):\n" + "\n".join("    " + line for line in body.splitlines()))
    statements = tree.body[0].body  # type: ignore[attr-defined]
    live = live_names(statements)[statements[0]]
    assert live.after == after
    assert live.head == head
