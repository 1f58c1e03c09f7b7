"""Reports give the advice of docs/why-not-fused.md."""

import pytest

from moefuse.report.advice import advice


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("`mean`: expert rows are reduced by mean, not by a sum", "sum, with the factor"),
        ("slot indices are divided by 4, which is not the number of slots per token", "divide by K"),
        ("the expert rows `a` are also read by `b`, outside of the layer", "router's logits"),
        ("a view to [3] cuts through an index of 8 elements", "reshape along the boundaries"),
    ],
)
def test_the_row_that_fits(reason, words):
    assert words in advice(reason)


def test_links_become_words_and_the_unknown_gets_none():
    assert "](" not in advice("no rule says what amax of expert outputs (`x`) means")
    assert "add a rule" in advice("no rule says what amax of expert outputs (`x`) means")
    assert advice("something else") == ""


def test_a_row_is_not_found_in_the_middle_of_a_word():
    """`sets ...` is a row."""
    assert advice("offsets count the rows of somebody else") == ""
    assert advice("`forward` sets self.calls") == "nothing outside of the loop may change"
