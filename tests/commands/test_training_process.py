"""What a training in a process of its own leaves for the comparison to say."""

from mpt.commands.training_process import last_words


def test_the_error_is_what_is_said_and_not_the_warnings_before_it() -> None:
    text = "warning: rolled back (1 of 3)\nwarning: rolled back (2 of 3)\nerror: not finite.\n  Try a lower rate\n"
    assert last_words(text) == "not finite. Try a lower rate"


def test_without_an_error_the_last_lines_are_said() -> None:
    assert last_words("a\nb\nc\nd\nValueError: e\n") == "b c d ValueError: e"
    assert last_words("") == ""
