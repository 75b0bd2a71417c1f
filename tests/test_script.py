from pathlib import Path

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


@pytest.mark.parametrize("name", ["-dash.wav", "-quiet.wav", "--two.wav"])
def test_a_file_that_looks_like_an_option_is_told_how_to_be_named(capsys, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    assert "write ./" not in said(capsys, "a", name)
    Path(name).touch()
    assert said(capsys, "a", name).endswith(f"; write ./{name} for the file of that name; see tool --help")


def test_no_file_is_made_of_an_option_or_of_a_name_without_a_dash(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("--quiet", "a"):
        Path(name).touch()
    assert "write ./" not in said(capsys, "a", "--quiet", "--count", "x")
