"""What the page says and shows of a separation, as HTML: pictures with alternative text, words and tables.

The picture of the mixture gives every point the colour of the source that took it; those of the evidence show
what nobody had explained yet. Both are bare images with their axes written around them as text, so that they
stay readable on a telephone.
"""

import base64
import html
import io
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from separator.results import FileSeparation, FloatArray, Overview
from separator.writing import Stem

RANGE_DB = 60.0  # below the mixture's peak; quieter is black
# told apart by the colour-blind too (after Okabe and Ito, "Color universal design", 2008), on black and white
COLOURS = {
    "orange": "#e69f00",
    "sky blue": "#56b4e9",
    "green": "#1fa37a",
    "pink": "#d67fb0",
    "yellow": "#d9c92b",
    "vermilion": "#e2622b",
    "blue": "#5f7ff0",
    "lime": "#93c83e",
}
RESIDUAL_COLOUR = "#8b95a5"  # grey
MAX_SOURCES = len(COLOURS)

Picture = npt.NDArray[np.uint8]  # (height, width, 3)


def colour_mixture(overview: Overview) -> Picture:
    """Spectrogram of the mixture; hue says which sources took the power, brightness how much there is."""
    palette = np.array([_rgb(colour) for colour in [*COLOURS.values()][: len(overview.slots)]])
    palette = np.concatenate([palette.reshape(-1, 3), [_rgb(RESIDUAL_COLOUR)]])
    amplitude = np.sqrt(overview.slots)
    left = np.maximum(np.sqrt(overview.mixture) - amplitude.sum(0), 0)
    power = np.concatenate([amplitude, left[None]]) ** 2  # (source + 1, frequency, column)
    share = power / np.maximum(power.sum(0), 1e-30)
    hue = np.einsum("sft,sc->ftc", share, palette)
    peak = max(float(overview.mixture.max()), 1e-30)
    level_db = 10 * np.log10(np.maximum(overview.mixture, 1e-30) / peak)
    brightness = np.clip(1 + level_db / RANGE_DB, 0, 1)
    return _upright(hue * brightness[..., None])


def colour_evidence(evidence: FloatArray) -> Picture:
    """One map of evidence (band, token time): bright is unexplained, dark is explained."""
    from matplotlib import colormaps

    colours: FloatArray = colormaps["cividis"](np.clip(evidence, 0, 1))[..., :3]
    return _upright(colours)


def show_headline(result: FileSeparation) -> str:
    """How many sounds, in what, and whether the stems add up."""
    count = len(result.sources)
    found = {0: "No sound found", 1: "1 sound found"}.get(count, f"{count} sounds found")
    channels = {1: "mono", 2: "stereo"}.get(result.channels, f"{result.channels} channels")
    facts = f"{result.seconds:.1f} s, {result.sample_rate / 1000:g} kHz, {channels}"
    total = "The sounds and the residual add up to the recording."
    if result.gain_db:
        total = f"All stems are {-result.gain_db:.1f} dB quieter than the recording, so that none clips."
    if not count:
        total = "It is silent, or nothing in it stands out: all of it is in the residual."
    name = html.escape(result.input.name)
    return f'<div role="status"><h2>{found} in {name}</h2><p>{facts}. {total}</p></div>'


def show_mixture(overview: Overview, name: str) -> str:
    """Figure of `colour_mixture` with axes and legend."""
    names = [f"source {k + 1} {colour}" for k, colour in enumerate([*COLOURS][: len(overview.slots)])]
    top = f"{overview.sample_rate / 2000:g} kHz"
    alt = (
        f"Spectrogram of {name}: {overview.seconds:.1f} s from left to right, 0 to {top} from bottom to top. "
        f"Every point has the colour of the source that took it: {', '.join([*names, 'residual grey'])}."
    )
    keys = [*(f"source {k + 1}" for k in range(len(overview.slots))), "residual"]
    colours = [*[*COLOURS.values()][: len(overview.slots)], RESIDUAL_COLOUR]
    legend = "".join(
        f'<li><span class="chip" style="background:{colour}"></span>{key}</li>'
        for key, colour in zip(keys, colours, strict=True)
    )
    return (
        '<figure class="spectrogram">'
        "<figcaption>Who took what: the recording, coloured by source</figcaption>"
        f'<div class="axes" aria-hidden="true"><span>{top}</span><span>0</span></div>'
        f"{_image(colour_mixture(overview), alt)}"
        '<div class="axes time" aria-hidden="true">'
        f"<span>0 s</span><span>{overview.seconds:.1f} s</span></div>"
        f'<ul class="legend">{legend}</ul></figure>'
    )


def show_evidence(overview: Overview) -> str:
    """One small figure a slot; nothing for a model whose slots deplete no evidence."""
    if overview.evidence is None:
        return ""
    figures = []
    for step, values in enumerate(overview.evidence):
        when = f"after slot {step}" if step else "at first"
        left = f"{100 * float(values.mean()):.0f} %"
        alt = f"Map of the evidence left {when}: {left} on average; bright is unexplained, dark is explained."
        figures.append(
            f"<figure>{_image(colour_evidence(values), alt)}<figcaption>{when}: {left}</figcaption></figure>"
        )
    return (
        "<h3>The evidence that was left</h3><p>Slots listen one after another. What a slot explains (dark) "
        f'is taken away, so the next one hears what is left (bright).</p><div class="evidence">'
        f"{''.join(figures)}</div>"
    )


def show_table(caption: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Table whose first column names the rows; all cells are escaped."""
    top = "".join(f'<th scope="col">{html.escape(cell)}</th>' for cell in head)
    body = "".join(
        f'<tr><th scope="row">{html.escape(first)}</th>'
        + "".join(f"<td>{html.escape(cell)}</td>" for cell in rest)
        + "</tr>"
        for first, *rest in rows
    )
    return (
        f'<div class="scores"><table><caption>{html.escape(caption)}</caption>'
        f"<thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def duration_text(seconds: float) -> str:
    """Whole minutes as minutes.

    >>> duration_text(600), duration_text(90), duration_text(60)
    ('10 minutes', '90 s', '1 minute')
    """
    minutes, rest = divmod(seconds, 60)
    if rest or not minutes:
        return f"{seconds:g} s"
    return "1 minute" if minutes == 1 else f"{minutes:g} minutes"


def level_text(stem: Stem) -> str:
    """Level in dB re full scale."""
    return "silent" if stem.level_db is None else f"{stem.level_db:.1f} dB"


def _image(picture: Picture, alt: str) -> str:
    """The picture inside the page itself, so that no file of it is kept."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, "WEBP", quality=85)
    data = base64.b64encode(buffer.getvalue()).decode()
    return f'<img src="data:image/webp;base64,{data}" alt="{html.escape(alt)}">'


def _upright(colours: npt.NDArray[np.floating]) -> Picture:
    """(frequency, time, 3) in [0, 1] as an image whose first row is the highest frequency."""
    image: Picture = np.round(255 * np.clip(colours[::-1], 0, 1)).astype(np.uint8)
    return image


def _rgb(colour: str) -> list[float]:
    """Red, green and blue in [0, 1] of ``#rrggbb``."""
    return [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
