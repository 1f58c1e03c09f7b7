"""What the commands share: lists of words, errors on one line, the width of tables."""

import pytest

from moefuse.terminal import console, one_line, words


@pytest.mark.parametrize("text", ["", ",", "float32,floaty"])
def test_unknown_words_are_errors(text):
    with pytest.raises(ValueError, match="--dtype must be from float32, bfloat16, got"):
        words("--dtype", text, ("float32", "bfloat16"))


def test_words_keep_their_order_and_come_once():
    assert words("--only", " b, a,,b ") == ("b", "a")
    with pytest.raises(ValueError, match="--only must be words with commas in between, got ''"):
        words("--only", "")


def test_an_error_without_words_says_so():
    assert one_line(ValueError("two\n  lines")) == "two lines"
    assert one_line(ValueError()) == "no message"


def test_a_table_in_a_pipe_is_as_wide_as_asked(capsys):
    console(33).rule()
    assert len(capsys.readouterr().out.rstrip("\n")) == 33
