import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import separator

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "separator"
ORDER = [
    *("errors", "script", "settings", "attention", "naming", "inputs", "headers", "decoding"),
    *("audio", "formats", "writing", "results", "stems", "stft", "masks", "layers", "counting", "network"),
    *("checkpoint", "rendering", "segments", "separate", "plot", "cluster", "jobs"),
    *("metrics", "bsseval", "baselines"),
    *("losses", "peers", "objectives", "fuss", "fuss_protocol", "augmentation", "datasets", "fuss_mixing"),
    *(
        "training_recipe",
        "run_folder",
        "distributed",
        "training_data",
        "training",
        "training_command",
        "calibration",
    ),
    *("outputs", "evaluation", "report", "benchmarks", "downloads", "console", "cli"),
    *("web_pictures", "web_jobs", "web_mix", "web_style", "web", "web_server"),
]


def imported(path: Path) -> set[str]:
    """First-level modules of the package that a file imports, at its top or inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "separator":
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("separator."):
            found.add(node.module.split(".")[1])
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("separator.")}
    return found


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: path.relative_to(PACKAGE).as_posix()
)
def test_imports_go_one_way(path):
    module = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if module == "__init__":
        return
    assert module in ORDER, f"give {module} its place in ORDER"
    for name in imported(path) & set(ORDER):
        assert ORDER.index(name) < ORDER.index(module) or name == module, f"{module} imports {name}"


def test_importing_the_package_imports_nothing_heavy():
    code = "import sys, separator; print([m for m in ('torch', 'numpy', 'soundfile') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_public_names_are_there():
    from separator.separate import Separation, Separator

    assert (separator.Separator, separator.Separation) == (Separator, Separation)
    assert issubclass(separator.SeparatorError, ValueError)
    assert re.fullmatch(r"\d+\.\d+\.\d+", separator.__version__)


def test_an_unknown_name_is_an_attribute_error_that_lists_the_known():
    with pytest.raises(AttributeError, match=r"no attribute 'nope'; it has \['FileSeparation'"):
        separator.nope  # noqa: B018


def test_no_file_names_a_place_on_some_machine():
    """Paths of one machine make a checkout that works there only."""
    place = re.compile(r"(?<![\w.])/(?:home|root|work|Users|mnt|scratch)/\w")
    suffixes = {".py", ".toml", ".md", ".csv", ".json", ".jsonl", ".sh", ""}
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    paths = [ROOT / name for name in listed.stdout.splitlines()] or list(PACKAGE.rglob("*.py"))
    files = [p for p in paths if p.is_file() and p.suffix in suffixes and p != Path(__file__)]
    assert len(files) > 10
    found = [
        f"{p.relative_to(ROOT)}: {m[0]}" for p in files if (m := place.search(p.read_text(errors="ignore")))
    ]
    assert found == []


def test_every_command_line_refuses_a_wrong_call_in_one_line():
    folders = [PACKAGE, *(ROOT / name for name in ("recipes", "data", "demo"))]
    scripts = [path for folder in folders for path in folder.rglob("*.py")]
    own = [path.name for path in scripts if "argparse.ArgumentParser(" in path.read_text()]
    assert [name for name in own if name != "script.py"] == []
