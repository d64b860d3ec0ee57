"""Colours of formats, on pages and in pictures.

Okabe and Ito's, which stay apart for every common kind of colour blindness.
"""

FORMAT_COLOURS = {
    "mxfp4": "#f0b429",
    "mxfp6_e2m3": "#56b4e9",
    "mxfp6_e3m2": "#009e73",
    "mxfp8_e4m3": "#0057a3",
    "mxfp8_e5m2": "#cc79a7",
    "nvfp4": "#d55e00",
    "fp8": "#0072b2",
    "bf16": "#5b6068",
}
UNKNOWN_COLOUR = "#c4c8ce"
INK, QUIET, GRID = "#22262b", "#6b727b", "#e3e6ea"
SERIES = ("#000000", "#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Of lines that have no colour of their own, the first for what others are compared with."""
