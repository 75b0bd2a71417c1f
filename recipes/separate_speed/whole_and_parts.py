"""What is lost at seams: five-minute mixtures as a whole and in ten-second parts; fills results/parts.json.

python recipes/separate_speed/whole_and_parts.py [--mixtures DIR] [--count 24]; then run.py --tables

Every mixture is made of the sources of one evaluation example. Each source is repeated, without its silence
at either end, with a period of its own, so that no ten seconds are like others, and sounds in all of them.
"""

import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from separator import Separator
from separator.fuss import Example, read_fuss_examples
from separator.metrics import match_strict
from separator.script import Parser, exit_status, natural, positive
from separator.training import environment

HERE = Path(__file__).parent
MIXTURES = HERE.parents[1] / "data/soundscapes/mixtures"
SPLIT = "evaluation"
MINUTES = 5
PART_SECONDS = 10
N_SOURCES = (2, 3)
LONGEST_PERIOD = 0.9  # of a part: every source sounds in every part


def main() -> None:
    """Measure and write it down."""
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--mixtures", type=Path, default=MIXTURES)
    parser.add_argument("--count", type=positive, default=24, help="mixtures (default: %(default)s)")
    parser.add_argument("--seed", type=natural, default=0)
    arguments = parser.parse_args()
    rng = np.random.default_rng(arguments.seed)
    examples = choose(read_fuss_examples(arguments.mixtures, SPLIT), arguments.count, rng)
    separator = Separator.load(device="cpu")
    rows = []
    for example in examples:
        rows.append(
            {"example": example.name, **compare(separator, lengthen(example, rng), example.sample_rate)}
        )
        print(rows[-1], flush=True)
    record = {
        "environment": environment(),
        "date": time.strftime("%Y-%m-%d"),
        "split": SPLIT,
        "seed": arguments.seed,
        "minutes": MINUTES,
        "part_seconds": PART_SECONDS,
        "mixtures": rows,
    }
    (HERE / "results/parts.json").write_text(json.dumps(record, indent=1) + "\n")


def choose(examples, count: int, rng: np.random.Generator) -> list[Example]:
    """Draw examples, as many of each number of sources."""
    chosen: dict[int, list[Example]] = {n: [] for n in N_SOURCES}
    for index in rng.permutation(len(examples)):
        example = examples[int(index)]
        group = chosen.get(len(example.sources), [])
        if example.sources.square().sum(-1).gt(0).all() and len(group) < count / len(N_SOURCES):
            group.append(example)
        if sum(map(len, chosen.values())) >= count:
            break
    return [example for group in chosen.values() for example in group]


def lengthen(example: Example, rng: np.random.Generator, minutes: float = MINUTES) -> Tensor:
    """Sources (source, time) of many minutes."""
    length = round(60 * minutes * example.sample_rate)
    longest = round(LONGEST_PERIOD * PART_SECONDS * example.sample_rate)
    sources = []
    for source in example.sources:
        sounding = source.abs().gt(1e-3 * source.abs().max()).nonzero()[:, 0]
        loop = source[sounding[0] : sounding[-1] + 1][: round(longest * rng.uniform(0.7, 1))]
        period = max(len(loop), round(longest * rng.uniform(0.4, 1)))
        loop = torch.nn.functional.pad(loop, (0, period - len(loop)))
        sources.append(loop.repeat(-(-length // period))[:length])
    return torch.stack(sources)


def compare(separator: Separator, sources: Tensor, sample_rate: int) -> dict[str, float]:
    """Strict SI-SDR, dB, of the whole and the mean of its parts', with how many sources were called."""
    whole, n_called = strict(separator, sources, sample_rate)
    parts = [strict(separator, part, sample_rate) for part in sources.split(PART_SECONDS * sample_rate, -1)]
    scores, counts = zip(*parts, strict=True)
    return {
        "n_sources": len(sources),
        "whole_db": round(whole, 2),
        "parts_db": round(float(np.mean(scores)), 2),
        "whole_called": n_called,
        "parts_called": round(float(np.mean(counts)), 2),
    }


def strict(separator: Separator, sources: Tensor, sample_rate: int) -> tuple[float, int]:
    """Mean strict SI-SDR over the sources, and how many the separator has called."""
    mixture = sources.sum(0)
    estimates = separator.separate(mixture[None], sample_rate).estimates[:, 0]
    called = torch.ones(len(estimates), dtype=torch.bool)
    match = match_strict(estimates, sources, mixture, called, zero_mean=False)
    return float(match.si_sdr.mean()), len(estimates)


if __name__ == "__main__":
    sys.exit(exit_status(main, __file__))
