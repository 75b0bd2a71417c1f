"""Sums of stems against their files, at many rates, channels, depths and lengths; fills results/.

python recipes/file_checks/run.py

Every file is separated by the shipped model and by a network with random weights whose slots all count as
sources. Then its stems are read back and added up.
"""

import json
import math
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import soundfile
import torch

from separator import Separator
from separator.network import NetworkConfig, SeparationNetwork
from separator.script import exit_status
from separator.training import environment

HERE = Path(__file__).parent
SAMPLE = HERE.parents[1] / "data/samples/mix3.wav"
RATES = (8000, 11_025, 16_000, 22_050, 37_800, 44_100, 48_000, 96_000, 176_400, 192_000)
CASES = [  # rate, channels, container and coding, samples
    *(
        (rate, 1 + k % 2, "WAV", subtype, rate + 33)
        for k, rate in enumerate(RATES)
        for subtype in ("PCM_16", "FLOAT")
    ),
    *((rate, 2, "WAV", "PCM_24", 2 * rate // 3) for rate in RATES),
    *((44_100, channels, "WAV", "PCM_16", 40_000) for channels in (3, 4, 5, 6, 7, 8)),
    *((48_000, channels, "WAV", "FLOAT", 30_001) for channels in (6, 8)),
    *((16_000, 2, "WAV", subtype, 20_000) for subtype in ("PCM_U8", "PCM_32", "DOUBLE", "ULAW")),
    *((44_100, 2, container, "PCM_16", 44_100) for container in ("FLAC", "AIFF", "W64", "RF64")),
    *(
        (16_000, 1, "WAV", subtype, length)
        for length in (1, 2, 100, 48_000)
        for subtype in ("PCM_16", "FLOAT")
    ),
    *((16_000, 1, "WAV", "PCM_16", length) for length in (159_999, 160_001, 96_032, 288_000)),
    *((44_100, 2, "WAV", "FLOAT", length) for length in (1, 100, 441_000, 793_801)),
    (48_000, 1, "WAV", "PCM_16", 1_464_000),
    (48_000, 2, "WAV", "PCM_24", 1_464_000),
]


def main() -> None:
    """Measure all sums and write them down."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = NetworkConfig(widths=(4, 4, 4, 8), n_context=1, embedding=4, min_existence=0.0)
    separators = {
        "shipped": Separator.load(device="cpu"),
        "random": Separator(SeparationNetwork(config).eval()),
    }
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for case in CASES:
            row = dict(zip(("sample_rate", "channels", "container", "subtype", "length"), case, strict=True))
            row |= {model: sum_error(of, Path(folder), *case) for model, of in separators.items()}
            rows.append(row)
            print(json.dumps(row), flush=True)
    record = {"environment": environment(), "date": time.strftime("%Y-%m-%d"), "rows": rows}
    (HERE / "results").mkdir(exist_ok=True)
    (HERE / "results/sums.json").write_text(json.dumps(record, indent=1) + "\n")


def sum_error(
    separator: Separator,
    folder: Path,
    sample_rate: int,
    channels: int,
    container: str,
    subtype: str,
    length: int,
) -> dict[str, float | int | bool]:
    """Error of the sum of a file's stems: dB re the file, and in steps of its integers a stem."""
    path = folder / "mix.bin"
    soundfile.write(
        path, excerpt(sample_rate, channels, length), sample_rate, format=container, subtype=subtype
    )
    mixture = soundfile.read(path, always_2d=True)[0]
    said: list[str] = []
    result = separator.separate_file(path, folder / "out", overwrite=True, warn=said.append)
    stems = [soundfile.read(stem.file, always_2d=True) for stem in (*result.sources, result.residual)]
    alike = all(samples.shape == mixture.shape and rate == sample_rate for samples, rate in stems)
    error = sum(samples for samples, _ in stems) - 10 ** (result.gain_db / 20) * mixture
    largest = float(np.abs(error).max())
    power = float(np.square(error).sum() / max(np.square(mixture).sum(), 1e-30))
    bits = {"PCM_U8": 8, "PCM_16": 16, "PCM_24": 24, "PCM_32": 32, "ULAW": 16}.get(subtype)
    values: dict[str, float | int | bool] = {
        "warnings": len(said),
        "stems": len(stems),
        "same_shape_and_rate": alike,
        "error_db": round(10 * math.log10(max(power, 1e-30)), 1),
        "gain_db": round(result.gain_db, 3),
    }
    if bits is not None:
        values["lsb_a_stem"] = round(largest * 2 ** (bits - 1) / len(stems), 4)
    return values


def excerpt(sample_rate: int, channels: int, length: int) -> np.ndarray:
    """(time, channel) of the sample, read as if it had that rate, with sound up to the highest frequency."""
    mixture, _ = soundfile.read(SAMPLE)
    rng = np.random.default_rng(length)
    shifts = rng.integers(0, len(mixture), channels)
    columns = [np.resize(np.roll(mixture, -shift), length) for shift in shifts]
    return np.stack(columns, 1) + 0.001 * rng.standard_normal((length, channels))


if __name__ == "__main__":
    sys.exit(exit_status(main, __file__))
