import pytest

from separator.script import Parser


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The line on stderr that refuses a call."""
    parser = Parser(prog="tool")
    parser.add_argument("inputs", nargs="+")
    parser.add_argument("-q", "--quiet", action="store_true")
    parser.add_argument("--count", type=int)
    with pytest.raises(SystemExit) as ended:
        parser.parse_args(arguments)
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    return err.rstrip("\n")


def test_a_wrong_call_is_one_line_that_says_where_the_options_are_told(capsys):
    assert said(capsys) == ("tool: error: the following arguments are required: inputs; see tool --help")
    assert said(capsys, "a", "--no\nsuch") == (
        "tool: error: unrecognized arguments: --no such; see tool --help"
    )
