"""How the page looks, light and dark, on a desk and on a telephone; nothing is fetched from elsewhere."""

import gradio as gr

from separator.web_pictures import COLOURS, RESIDUAL_COLOUR

CSS = """
.gradio-container { max-width: 1180px !important; margin: 0 auto !important; }
.intro h1 { font-size: 2rem; line-height: 1.15; margin: .75rem 0 .4rem; letter-spacing: -.02em; }
.intro p { font-size: 1.05rem; max-width: 44rem; margin: 0 0 .5rem; color: var(--body-text-color-subdued); }
.html-container { padding: 0 !important; }
.dark { --color-accent: #38bdf8; }
.timestamps time { color: var(--body-text-color-subdued) !important; }
.small p { font-size: .85rem; margin: 0; color: var(--body-text-color-subdued); }
.status { min-height: 7rem; border-radius: var(--radius-lg); }
.status .hint { padding: 2rem 1rem; text-align: center; color: var(--body-text-color-subdued);
  border: 1px dashed var(--border-color-primary); border-radius: var(--radius-lg); }
.status .alert { padding: 1rem 1.2rem; border: 1px solid #dc2626; border-left-width: 5px;
  border-radius: var(--radius-lg); overflow-wrap: anywhere; }
.result h2 { font-size: 1.4rem; margin: 0 0 .2rem; overflow-wrap: anywhere; }
.result h3 { font-size: 1.05rem; margin: .5rem 0 .2rem; }
.result p { margin: 0 0 .4rem; color: var(--body-text-color-subdued); }
.spectrogram { display: grid; grid-template-columns: 2.6rem 1fr; gap: .2rem .4rem; margin: .4rem 0; }
.spectrogram figcaption, .spectrogram .legend { grid-column: 1 / -1; }
.spectrogram figcaption { font-weight: 600; }
.spectrogram img { width: 100%; height: clamp(9rem, 24vw, 15rem); border-radius: 6px; background: #000; }
.axes { display: flex; flex-direction: column; justify-content: space-between; text-align: right;
  font-size: .75rem; color: var(--body-text-color-subdued); }
.axes.time { grid-column: 2; flex-direction: row; }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1rem; list-style: none; margin: 0; padding: 0;
  font-size: .85rem; }
.legend li { margin: 0; }
.chip { display: inline-block; width: .8rem; height: .8rem; border-radius: 3px; margin-right: .35rem;
  vertical-align: -1px; }
.evidence { display: grid; grid-template-columns: repeat(auto-fill, minmax(7.2rem, 1fr)); gap: .6rem; }
.evidence figure { margin: 0; }
.evidence img { width: 100%; height: 5.5rem; border-radius: 6px; }
.evidence figcaption { font-size: .8rem; color: var(--body-text-color-subdued); }
.scores { overflow-x: auto; }
.scores table { width: 100%; border-collapse: collapse; border: 0 !important;
  font-variant-numeric: tabular-nums; }
.scores tr { border: 0 !important; }
.scores caption { text-align: left; font-weight: 600; padding-bottom: .3rem; }
.scores th, .scores td { text-align: left; padding: .3rem .6rem .3rem 0 !important; border: 0 !important;
  border-bottom: 1px solid var(--border-color-primary) !important; }
footer .divider { display: none; }
.player { border-left: 5px solid var(--part) !important; }
:focus-visible { outline: 3px solid #56b4e9 !important; outline-offset: 2px; }
""" + "\n".join(
    f".part-{k + 1} {{ --part: {colour}; }}" for k, colour in enumerate([*COLOURS.values(), RESIDUAL_COLOUR])
)


def page_theme() -> gr.themes.Base:
    """Light and dark, in fonts that every machine has."""
    return gr.themes.Default(
        primary_hue="sky",
        neutral_hue="slate",
        font=("system-ui", "Segoe UI", "Roboto", "sans-serif"),
        font_mono=("ui-monospace", "Consolas", "monospace"),
    ).set(  # text and buttons with a contrast of at least 4.5 to 1
        body_text_color_subdued="*neutral_600",
        body_text_color_subdued_dark="*neutral_300",
        block_label_text_color="*neutral_700",
        block_label_text_color_dark="*neutral_200",
        block_title_text_color="*neutral_700",
        block_title_text_color_dark="*neutral_200",
        block_info_text_color="*neutral_600",
        block_info_text_color_dark="*neutral_300",
        button_primary_background_fill="*primary_700",
        button_primary_background_fill_hover="*primary_800",
        button_primary_background_fill_dark="*primary_700",
        button_primary_background_fill_hover_dark="*primary_800",
        color_accent="*primary_700",
    )
