import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def build(tree: Path, to: Path) -> list[str]:
    """Names in the wheel built from ``tree``."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(to)]
    subprocess.run(command, cwd=tree, check=True, capture_output=True)
    (wheel,) = to.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of what a build reads, with one more model."""
    folder = tmp_path_factory.mktemp("tree")
    for name in ("pyproject.toml", "README.md", "LICENSE", ".gitignore"):
        shutil.copy(ROOT / name, folder)
    for name in ("separator", "models", "data/samples"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "models" / "planted").mkdir()
    (folder / "models" / "planted" / "model.safetensors").write_bytes(b"weights")
    return folder


@pytest.fixture(scope="module")
def names(tree, tmp_path_factory):
    return build(tree, tmp_path_factory.mktemp("wheel"))


def test_nothing_but_the_package_lands_in_site_packages(names):
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"separator"}


def test_every_file_of_the_models_is_in_the_wheel(tree, names):
    models = [
        path.relative_to(tree / "models").as_posix()
        for path in (tree / "models").rglob("*")
        if path.is_file()
    ]
    assert "planted/model.safetensors" in models
    assert {f"separator/_models/{name}" for name in models} <= set(names)


def test_the_samples_are_in_the_wheel(names):
    sources = (ROOT / "data/samples").glob("*_sources/*.flac")
    samples = [path.relative_to(ROOT / "data/samples").as_posix() for path in sources]
    assert {"separator/_samples/mix3.wav", *(f"separator/_samples/{name}" for name in samples)} <= set(names)


def test_the_type_marker_and_every_module_are_in_the_wheel(tree, names):
    modules = [path.relative_to(tree).as_posix() for path in (tree / "separator").rglob("*.py")]
    assert {"separator/py.typed", *modules} <= set(names)
