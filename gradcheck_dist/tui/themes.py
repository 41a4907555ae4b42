"""Themes: dark, light, and one of high contrast."""

from __future__ import annotations

from textual.theme import Theme

DARK = Theme(
    name="gradcheck-dark",
    primary="#4285c8",
    secondary="#7aa7d6",
    accent="#fabe78",
    warning="#e5c07b",
    error="#ff8c42",
    success="#6cc0a0",
    foreground="#e6e6e6",
    background="#14171c",
    surface="#1b1f26",
    panel="#262c36",
    dark=True,
)
LIGHT = Theme(
    name="gradcheck-light",
    primary="#164e96",
    secondary="#38679f",
    accent="#8a4b00",
    warning="#7a5a00",
    error="#b24e00",
    success="#0b6b4f",
    foreground="#1a1a1a",
    background="#fbfbf9",
    surface="#f1f1ee",
    panel="#e2e4e8",
    dark=False,
)
CONTRAST = Theme(
    name="gradcheck-contrast",
    primary="#66b3ff",
    secondary="#99ccff",
    accent="#ffff00",
    warning="#ffff00",
    error="#ffb000",
    success="#80ffd0",
    foreground="#ffffff",
    background="#000000",
    surface="#000000",
    panel="#1c1c1c",
    dark=True,
    text_alpha=1.0,
)
THEMES = (DARK, LIGHT, CONTRAST)
