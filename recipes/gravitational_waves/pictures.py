"""Draw what a trained model makes of one mixture: data, slots, evidence, and the posterior of one source.

    python recipes/gravitational_waves/pictures.py

Reads the weights that run.py left in the cache for the method and seed, and writes results/mixture.png and
results/corner.png.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from separator.benchmarks.experiments import call_of, read_experiment
from separator.benchmarks.gw_data import GalacticMixtures
from separator.benchmarks.gw_model import INFERRED, BinaryModel, BinaryPrediction
from separator.benchmarks.gw_runs import setting_of
from separator.benchmarks.gw_scores import draw_posterior, predict, recover
from separator.benchmarks.gw_training import BinarySetting, inferred, load_trained, match_binaries
from separator.benchmarks.gw_waveforms import YEAR
from separator.benchmarks.kinds import KINDS
from separator.report import pyplot
from separator.script import Parser, exit_status, natural

HERE = Path(__file__).parent
N_SOURCES = 3
N_TEST = 200
LABELS = {
    "frequency": "frequency, bins",
    "drift": "drift, bins a year",
    "log_amplitude": "ln amplitude",
    "longitude": "longitude",
    "sin_latitude": "sin latitude",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw the first test mixture of three sources that is counted right; tell the exit status."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", type=Path, nargs="?", default=HERE / "recipe.toml")
    parser.add_argument("--method", default="evidence_quadratic")
    parser.add_argument("--seed", type=natural, default=0)
    parser.add_argument("--output", type=Path, default=HERE / "results", help="folder of the pictures")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    return exit_status(lambda: _draw_first(options), __file__)


def _draw_first(options: argparse.Namespace) -> None:
    """Read the experiment and draw a mixture of its test bank."""
    experiment = read_experiment(options.experiment, KINDS, methods=[options.method])
    (cell,) = experiment.cells(KINDS[experiment.kind])
    setting = setting_of(**call_of(cell, KINDS[experiment.kind]))
    model = load_trained(options.method, setting, options.seed)
    _, bank = setting.banks()
    test = setting.test_mixtures(bank, options.seed)
    draw(model, setting, test, options)


def draw(
    model: BinaryModel, setting: BinarySetting, test: GalacticMixtures, options: argparse.Namespace
) -> None:
    """Draw both pictures."""
    test = GalacticMixtures(*(values[:N_TEST] for values in test))
    found = predict(model, test.data, seed=options.seed)
    called = (found.exist_logits > 0).sum(1)
    fits = (test.counts == N_SOURCES) & (called == N_SOURCES)
    index = int((fits if bool(fits.any()) else test.counts == N_SOURCES).nonzero()[0])
    one = GalacticMixtures(*(values[index : index + 1] for values in test))
    steps = None if found.evidence is None else [step[index : index + 1] for step in found.evidence]
    seen = BinaryPrediction(*(values[index : index + 1] for values in found[:3]), steps)
    options.output.mkdir(parents=True, exist_ok=True)
    draw_mixture(model, setting, one, seen, options.seed, options.output / "mixture.png")
    draw_corner(model, one, seen, options.seed, options.output / "corner.png")


def draw_mixture(
    model: BinaryModel,
    setting: BinarySetting,
    one: GalacticMixtures,
    seen: BinaryPrediction,
    seed: int,
    path: Path,
) -> None:
    """Data and injected binaries; what the called slots explain; attention; evidence after each slot."""
    plt = pyplot()
    band = setting.population.band
    (recovered,) = recover(model, band, seen, one, seed)
    bins = np.arange(band.n_bins)
    figure, axes = plt.subplots(4, 1, figsize=(9, 8), sharex=True, layout="constrained")
    size = one.data[0].abs().square().sum(0).sqrt().numpy()
    sources = one.components[0, : int(one.counts[0])].abs().square().sum(1).sqrt().numpy()
    for axis, waves, name in (
        (axes[0], sources, "injected"),
        (axes[1], np.sqrt((np.abs(recovered.waveforms) ** 2).sum(1)), "of a slot"),
    ):
        axis.plot(bins, size, "0.7", linewidth=0.8, label="data")
        for number, wave in enumerate(waves):
            axis.plot(bins, wave, f"C{number}", linewidth=1.2, label=f"{name}, {number + 1}")
        axis.set_yscale("log")
        axis.set_ylim(0.3, 1.5 * size.max())
        axis.set_ylabel("|w|, A and E")
        axis.legend(fontsize=7, loc="upper right")
    overlaps = ", ".join(f"{value:.2f}" for value in recovered.overlaps)
    axes[0].set_title("data and injected binaries, noise 1 a part", fontsize=9)
    axes[1].set_title(f"what the called slots explain; overlap with the injected: {overlaps}", fontsize=9)
    centres = (np.arange(setting.n_tokens) + 0.5) * band.n_bins / setting.n_tokens
    attn = seen.attn[0] / seen.attn[0].sum(1, keepdim=True)
    for slot, weights in enumerate(attn):
        exists = torch.sigmoid(seen.exist_logits[0, slot])
        style = "-" if exists > 0.5 else ":"
        axes[2].step(centres, weights, style, where="mid", label=f"slot {slot}, existence {exists:.2f}")
    axes[2].set_title("attention over tokens", fontsize=9)
    axes[2].legend(fontsize=7, loc="upper right")
    for step, left in enumerate(seen.evidence or []):
        axes[3].step(centres, left[0], where="mid", label=f"after {step} slots", alpha=0.8)
    axes[3].set_title("evidence left" if seen.evidence else "no evidence in this method", fontsize=9)
    if seen.evidence:
        axes[3].set_ylim(0, 1.05)
        axes[3].legend(fontsize=7, loc="lower right")
    first = 1e3 * band.first_bin / YEAR
    axes[3].set_xlabel(f"frequency, bins of 1 / year above {first:.6f} mHz")
    figure.savefig(path, dpi=90)


def draw_corner(
    model: BinaryModel, one: GalacticMixtures, seen: BinaryPrediction, seed: int, path: Path
) -> None:
    """Posterior of the dominant source of a mixture, one- and two-dimensional; lines are the truth."""
    plt = pyplot()
    truth = inferred(one.params)
    pairs = match_binaries(model, seen, truth, one.counts)
    slot = pairs.slot[pairs.source == 0]
    posterior = draw_posterior(model, seen.slots[0, slot], seed=seed)[:, 0].numpy()  # [N, P]
    values = truth[0, 0].numpy()
    n = len(INFERRED)
    figure, axes = plt.subplots(n, n, figsize=(8, 8), layout="constrained")
    for row in range(n):
        for column in range(n):
            axis = axes[row, column]
            if column > row:
                axis.axis("off")
                continue
            if row == column:
                axis.hist(posterior[:, row], 30, color="0.6")
            else:
                axis.plot(posterior[:, column], posterior[:, row], "k.", markersize=2, alpha=0.4)
                axis.axhline(values[row], color="C3", linewidth=1)
            axis.axvline(values[column], color="C3", linewidth=1)
            axis.tick_params(labelsize=6)
            if row == n - 1:
                axis.set_xlabel(LABELS[INFERRED[column]], fontsize=8)
            if column == 0 and row:
                axis.set_ylabel(LABELS[INFERRED[row]], fontsize=8)
    figure.savefig(path, dpi=90)


if __name__ == "__main__":
    sys.exit(main())
