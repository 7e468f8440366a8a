"""Texts that others wrote, made harmless for terminals and for the logs of CI runners."""

from __future__ import annotations

import re


def safe(text: object) -> str:
    """The text with everything escaped that could move a cursor or hide: control, bidi, newline.

    Names come from files and directories that others wrote; a report is read in terminals.
    """
    shown = []
    for char in str(text):
        code = ord(char)
        if char.isprintable():
            shown.append(char)
        else:
            shown.append(
                f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" if code < 65536
                else f"\\U{code:08x}"
            )  # fmt: skip
    return "".join(shown)


def for_logs(text: str) -> str:
    """Lines that a terminal shows as they are and in which no CI runner finds a command.

    GitHub's runner, which reads both streams, takes `::name::` at the start of a line for one, and
    `##[name]` anywhere.
    """
    lines = "\n".join(safe(line) for line in text.split("\n"))
    return re.sub(r"(?m)^( *)::", r"\1\\x3a:", lines).replace("##[", "\\x23#[")
