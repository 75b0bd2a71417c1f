"""Every recipe runs, for seconds, and learns; READMEs say what the results say."""

import importlib.util
import json
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from test_datasets import write_bank
from test_distributed import write_fuss

from separator import Separator
from separator.counting import CounterConfig, SourceCounter
from separator.errors import SeparatorError
from separator.fuss import Example
from separator.network import NetworkConfig, SeparationNetwork
from separator.report import stale_tables
from separator.training_recipe import TrainingConfig

ROOT = Path(__file__).parents[1]
SOUNDSCAPES = ROOT / "recipes/soundscapes"
SMALL = """
[network]
widths = [4, 6, 8, 16]
n_context = 1
embedding = 8
mechanism = "{mechanism}"

[training]
learning_rate = 3e-3
warmup_steps = 2
decay_steps = 2
log_every = 10
validate_every = 1000
save_every = 20
n_validation = 4
workers = 0
bfloat16 = false

[calibration]
epochs = 2
n_mixtures = 4
mixing = {{ counts = [0.0, 1.0], scene_share = 0.0 }}

[[stages]]
until = 40
batch_size = 4
mixing = {{ seconds = 0.5, counts = [0.0, 1.0], scene_share = 0.0, reverberant = 0.0 }}
"""


def run(script: str, *arguments: object) -> str:
    return run_of(SOUNDSCAPES / script, *arguments)


def run_of(script: Path, *arguments: object) -> str:
    command = [sys.executable, str(script), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("mechanism", ["evidence_claim", "evidence_quadratic", "vanilla"])
def test_soundscapes_trains_and_its_loss_falls(tmp_path: Path, mechanism: str) -> None:
    (tmp_path / "small.toml").write_text(SMALL.format(mechanism=mechanism))
    bank = write_bank(tmp_path)
    run("train.py", tmp_path / "small.toml", "--data", bank, "--run-folder", tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run/log.jsonl").read_text().splitlines()]
    totals = [line["total"] for line in lines if "total" in line]
    assert totals[-1] < totals[0] - 0.5


def test_soundscapes_goes_from_training_to_scores(tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(SMALL.format(mechanism="evidence_claim"))
    bank = write_bank(tmp_path)
    run("train.py", tmp_path / "small.toml", "--data", bank, "--run-folder", tmp_path / "run")
    split = tmp_path / "mixtures/evaluation"
    write_example(split)
    (tmp_path / "mixtures/validation").symlink_to(split)
    places = ("--bank", bank, "--run-folder", tmp_path / "run", "--mixtures", tmp_path / "mixtures")
    said = json.loads(run("release.py", tmp_path / "small.toml", *places, "--model", tmp_path / "model"))
    assert said["steps"] == 40
    place = ("--mixtures", tmp_path / "mixtures", "--results", tmp_path / "results")
    run("evaluate.py", "--model", tmp_path / "model", *place)
    report = json.loads((tmp_path / "results/model.json").read_text())["reports"]["model"]["all"]
    assert report["by_count"]["3"]["known_count"]["count"] == 1
    assert report["sum_error_db"]["mean"] < -100


COUNTER = (
    SMALL[SMALL.index("[training]") : SMALL.index("[calibration]")]
    + """
[network]
kind = "counter"
widths = [4, 4, 6, 8]
joined = 8
hidden = 8

[[stages]]
until = 60
batch_size = 4
mixing = {{ seconds = 1.0, shortest_seconds = 0.5, counts = [0.5, 0.5], scene_share = 0.0 }}
"""
)


def test_a_counter_learns_and_has_its_say_in_the_released_model(tmp_path: Path) -> None:
    bank = write_bank(tmp_path)
    small = SMALL.replace("epochs = 2", 'epochs = 2\ncounter = "counter.toml"')
    (tmp_path / "small.toml").write_text(
        small.format(mechanism="evidence_claim").replace("until = 40", "until = 2")
    )
    (tmp_path / "counter.toml").write_text(COUNTER.format())
    for name in ("small", "counter"):
        run("train.py", tmp_path / f"{name}.toml", "--data", bank)
    log = (tmp_path / "runs/counter/log.jsonl").read_text().splitlines()
    totals = [line["total"] for line in map(json.loads, log) if "total" in line]
    assert totals[-1] < totals[0] - 0.1
    split = tmp_path / "mixtures/validation"
    write_example(split)
    places = ("--bank", bank, "--mixtures", tmp_path / "mixtures", "--model", tmp_path / "model")
    run("release.py", tmp_path / "small.toml", *places)
    network = Separator.load(tmp_path / "model", device="cpu").network
    assert network.counter is not None
    trained = load_file(tmp_path / "runs/counter/state-60.safetensors")
    for name, value in network.counter.state_dict().items():
        assert torch.equal(value, trained[f"average.{name}"])


def test_a_counter_of_other_spectrograms_is_not_released() -> None:
    script = load_script("soundscapes", "release")
    network = SeparationNetwork(NetworkConfig(widths=(4, 6, 8, 16), n_context=1, embedding=8))
    with pytest.raises(SeparatorError, match=r"the counter's sample_rate, n_fft, hop_length are"):
        script.with_counter(network, SourceCounter(CounterConfig(hop_length=128)))


def write_example(split: Path) -> None:
    """One example of FUSS layout, of the sample of three sources."""
    samples = ROOT / "data/samples"
    split.mkdir(parents=True)
    (split / "example0000.wav").symlink_to(samples / "mix3.wav")
    (split / "example0000_sources").mkdir()
    for k, source in enumerate(sorted((samples / "mix3_sources").glob("*.flac"))):
        name = "background0_sound.wav" if k == 0 else f"foreground{k - 1}_sound.wav"
        (split / "example0000_sources" / name).symlink_to(source)


@pytest.mark.parametrize("recipe", ["recipe", "ablation", "counter"])
def test_recipe_is_one_the_trainer_takes(recipe: str) -> None:
    values = tomllib.loads((SOUNDSCAPES / f"{recipe}.toml").read_text())
    config = TrainingConfig.from_dict(values)
    untils = [stage.until for stage in config.stages]
    assert untils == sorted(set(untils))
    assert config.steps >= 1500
    assert sum(config.stages[-1].mixing.counts) == pytest.approx(1)


def load_script(folder: str, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        f"{folder}_{name}", ROOT / "recipes" / folder / f"{name}.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_readme_tables_are_those_of_the_results() -> None:
    tables = load_script("soundscapes", "tables")
    assert stale_tables(SOUNDSCAPES / "README.md", tables.tables()) == []
    assert stale_tables(tables.CARD, tables.card_tables()) == []
    assert stale_tables(tables.README, {"all": tables.tables()["all"]}) == []


def test_speed_tables_are_those_of_the_results() -> None:
    script = load_script("separate_speed", "run")
    assert stale_tables(script.HERE / "README.md", script.tables()) == []


def test_a_long_file_is_measured() -> None:
    script = load_script("separate_speed", "long_files")
    found = script.measure("stereo", 0.05)
    assert found["whole"]
    assert 0 < found["peak_memory_mib"] < 1200


def test_a_whole_is_compared_with_its_parts() -> None:
    script = load_script("separate_speed", "whole_and_parts")
    rng = np.random.default_rng(0)
    silence = torch.zeros(2, 20_000)
    noise = torch.from_numpy(rng.normal(0, 0.1, (2, 30_000))).float() * torch.tensor([[1.0], [0.3]])
    audio = torch.cat([silence, noise, silence], 1)
    example = Example("a", audio.sum(0), audio, 16_000)
    sources = script.lengthen(example, rng, minutes=0.5)
    assert sources.shape == (2, 30 * 16_000)
    period = script.PART_SECONDS * 16_000
    assert (sources.unflatten(1, (-1, period)).square().sum(-1) > 0).all()
    found = script.compare(Separator.load(device="cpu"), sources, 16_000)
    assert found["n_sources"] == 2
    assert all(-30 <= found[name] < 60 for name in ("whole_db", "parts_db"))


def test_page_speed_table_is_that_of_the_results() -> None:
    script = load_script("web_speed", "run")
    record = json.loads((script.HERE / "results/speed.json").read_text())
    assert stale_tables(script.HERE / "README.md", {"speed": script.table(record)}) == []


def test_shipped_model_is_the_recipe_s() -> None:
    values = tomllib.loads((SOUNDSCAPES / "recipe.toml").read_text())
    config = TrainingConfig.from_dict(values)
    shipped = tomllib.loads((ROOT / "models/soundscapes/config.toml").read_text())
    assert shipped["training"]["steps"] == config.steps
    for name in ("widths", "n_context", "mechanism"):
        assert shipped["network"][name] == values["network"][name]
    counter = tomllib.loads((SOUNDSCAPES / values["calibration"]["counter"]).read_text())
    config = TrainingConfig.from_dict(counter).network
    assert CounterConfig.from_dict(shipped["network"]["counter"]) == config


def test_ways_to_separate_a_folder_give_the_same_stems(tmp_path: Path) -> None:
    script = load_script("batch_speed", "run")
    script.make_files(tmp_path / "in", 3)
    digests = set()
    for name in ("two jobs", script.STARTED[1]):
        (tmp_path / name).mkdir()
        assert script.WAYS[name](tmp_path / "in", tmp_path / name) > 0
        assert len(list((tmp_path / name).glob("*/residual.wav"))) == 3
        digests.add(script.digest(tmp_path / name))
    assert len(digests) == 1


def test_batch_speed_table_is_that_of_the_results() -> None:
    script = load_script("batch_speed", "run")
    results = script.HERE / "results/batch.json"
    if not results.exists():
        pytest.skip("not measured yet")
    record = json.loads(results.read_text())
    assert record["same_stems"]
    assert stale_tables(script.HERE / "README.md", {"batch": script.table(record)}) == []


@pytest.mark.parametrize("recipe", ["separator", "separator_hour", "conv_tasnet", "conv_tasnet_hour"])
def test_fuss_recipe_is_one_the_trainer_takes(recipe: str) -> None:
    config = TrainingConfig.from_dict(tomllib.loads((ROOT / f"recipes/fuss/{recipe}.toml").read_text()))
    assert config.data == "fuss"
    assert config.steps >= 60_000 or config.minutes
    assert config.accumulate == 1


@pytest.mark.parametrize(
    "command",
    [
        "soundscapes/train.py NOWHERE",
        "soundscapes/train.py --start-from NOWHERE --data DATA --run-folder RUN",
        "soundscapes/release.py --run-folder NOWHERE",
        "soundscapes/evaluate.py --mixtures NOWHERE",
        "fuss/train.py --data NOWHERE --run-folder RUN",
        "fuss/release.py NOWHERE --model RUN",
        "fuss/release.py --run-folder NOWHERE --model RUN",
        "fuss/compare.py --model soundscapes --ours-run NOWHERE",
        "fuss/cost.py NOWHERE",
        "fuss/evaluate.py --model soundscapes --data NOWHERE",
        "fuss/paper.py NOWHERE",
        "synthetic/run.py NOWHERE",
        "gravitational_waves/run.py NOWHERE",
        "gravitational_waves/pictures.py NOWHERE",
        "separate_speed/whole_and_parts.py --mixtures NOWHERE",
    ],
)
def test_what_a_recipe_cannot_use_is_one_line_of_its_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    write_bank(tmp_path)
    places = {"NOWHERE": str(tmp_path / "nowhere"), "RUN": str(tmp_path / "run"), "DATA": str(tmp_path)}
    script, *arguments = command.split()
    monkeypatch.setattr(sys, "argv", [script, *(places.get(word, word) for word in arguments)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "recipes" / script), run_name="__main__")
    assert ended.value.code == 1
    said = capsys.readouterr()
    assert said.out == ""
    (line,) = said.err.splitlines()
    assert line.startswith(f"{Path(script).name}: error: ")
    assert "nowhere" in line
    assert not (tmp_path / "run").exists()


def test_fuss_goes_from_training_to_a_comparison(tmp_path: Path) -> None:
    """Both networks train for seconds, are released or compared, and scored."""
    data = write_fuss(tmp_path / "data")
    (data / "eval").symlink_to(data / "validation")
    fuss = ROOT / "recipes/fuss"
    sizes = {"enc_num_feats": 16, "msk_num_feats": 8, "msk_num_hidden_feats": 8, "msk_num_layers": 2}
    peer = 'kind = "conv_tasnet"\n' + "".join(f"{name} = {size}\n" for name, size in sizes.items())
    head, network, rest = (SMALL.format(mechanism="evidence_claim")).partition("[training]")
    rest = rest.split("[calibration]")[0] + (
        "[calibration]\nepochs = 2\n[[stages]]\nuntil = 12\nbatch_size = 4\nmixing = { seconds = 0.5 }\n"
    )
    (tmp_path / "ours.toml").write_text('data = "fuss"\n' + head + network + rest)
    (tmp_path / "peer.toml").write_text('data = "fuss"\n[network]\n' + peer + network + rest)
    for name in ("ours", "peer"):
        run_of(fuss / "train.py", tmp_path / f"{name}.toml", "--data", data, "--run-folder", tmp_path / name)
    model = tmp_path / "model"
    run_of(
        fuss / "release.py",
        tmp_path / "ours.toml",
        "--run-folder",
        tmp_path / "ours",
        "--data",
        data,
        "--model",
        model,
    )
    run_of(
        fuss / "compare.py",
        "--model",
        model,
        "--ours",
        tmp_path / "ours.toml",
        "--ours-run",
        tmp_path / "ours",
        "--peer",
        tmp_path / "peer.toml",
        "--peer-run",
        tmp_path / "peer",
        "--data",
        data,
        "--stems",
        tmp_path / "stems",
        "--results",
        tmp_path,
    )
    compared = json.loads((tmp_path / "compare.json").read_text())["networks"]
    assert compared["separator"]["examples"] == compared["conv_tasnet"]["examples"] == 48
    assert all(row["real_time_factor"] > 0 and row["parameters"] > 1000 for row in compared.values())
    said = run_of(
        fuss / "evaluate.py", "--estimates", tmp_path / "stems", "--data", data, "--results", tmp_path
    )
    assert "count right" in said
    report = json.loads((tmp_path / "stems.json").read_text())["reports"]["stems"]["all"]
    assert report["sum_error_db"]["mean"] is None or report["sum_error_db"]["mean"] < -100
    run_of(fuss / "cost.py", tmp_path / "ours.toml", "--data", data, "--steps", "1", "--results", tmp_path)
    assert json.loads((tmp_path / "cost.json").read_text())["stages"][0]["flops_per_step"] > 1e6


def test_fuss_tables_are_those_of_the_results() -> None:
    script = load_script("fuss", "tables")
    assert stale_tables(script.HERE / "README.md", script.tables()) == []
