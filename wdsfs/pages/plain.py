"""Texts, labels and hex: the previews that need no decoder, so the server makes them itself."""

from __future__ import annotations

from wdsfs.errors import counted
from wdsfs.pages.kinds import ACTIVE
from wdsfs.pages.preview import DOCUMENT, HEX, TEXT, Detail, Preview

PDF_NOTE = "PDF can hold active content, so it is not opened here; extract the member to read it."
HEX_BYTES = 512  # of a member that a hex dump shows
LABEL_CHARACTERS = 200  # of what counts as a label
UTF_16 = (b"\xff\xfe", b"\xfe\xff")  # the marks at the beginning of such a text
_CONTROLS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"} | {0x7F: 0x2421}
# Marks that turn the direction of what follows: a text could look like another one.
_CONTROLS |= dict.fromkeys([*range(0x202A, 0x202F), *range(0x2066, 0x206A)], 0xFFFD)


def readable(text: str) -> str:
    """Text in which every control character is visible, and line ends are newlines."""
    return text.replace("\r\n", "\n").translate(_CONTROLS)


def error_text(error: Exception) -> str:
    """The text of a decoder's exception, for the middle of a sentence."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    text = readable(" ".join(str(error).split())[:200]).rstrip(".")
    return text or f"it is cut off or damaged ({type(error).__name__})"


def bytes_needed(detail: Detail) -> int:
    """How many first bytes of a member a text preview of this detail needs."""
    return detail.characters * 4 + 4


def decoded(data: bytes, is_whole: bool) -> tuple[str, str]:
    """Bytes as text, and what is odd about them. UTF-16 is known by its mark; other bytes get U+FFFD."""
    encoding = "utf-16" if data[:2] in UTF_16 else "utf-8-sig"
    try:
        return data.decode(encoding), ""
    except UnicodeDecodeError as error:
        if not is_whole and error.end == len(data):  # cut in a character
            return data[: error.start].decode(encoding), ""
    return data.decode(encoding, "replace"), "Not all of it is UTF-8: other bytes are shown as \ufffd."


def text_preview(data: bytes, size: int, detail: Detail, extension: str = "") -> Preview:
    """A text of `size` bytes, by its first bytes."""
    text, note = decoded(data, len(data) >= size)
    is_cut = len(data) < size or len(text) > detail.characters
    lines = text.count("\n") + (not text.endswith("\n")) if text else 0
    summary = "the beginning" if is_cut else f"{counted(len(text), 'character')} in {counted(lines, 'line')}"
    if extension in ACTIVE:
        summary += "; shown as text: nothing in it is run or loaded"
    return Preview(TEXT, summary, text=readable(text[: detail.characters]), is_cut=is_cut, problem=note)


def label_preview(data: bytes, size: int, detail: Detail) -> Preview:
    """The preview of a class or a number; a long one, or one of several lines, is shown as a text."""
    text = text_preview(data, size, detail)
    label = text.text.strip()
    if text.is_cut or len(label) > LABEL_CHARACTERS or "\n" in label:
        return text
    return Preview(TEXT, "label" if label else "empty", text=label, problem=text.problem)


def hex_preview(data: bytes, size: int, problem: str = "") -> Preview:
    """The first bytes, sixteen a line, in hex and as ASCII."""
    shown = data[:HEX_BYTES]
    lines = []
    for at in range(0, len(shown), 16):
        part = shown[at : at + 16]
        letters = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in part)
        lines.append(f"{at:08x}  {part[:8].hex(' '):<23}  {part[8:].hex(' '):<23}  {letters}")
    summary = counted(size, "byte") if size else "empty"
    return Preview(HEX, summary, text="\n".join(lines), is_cut=len(shown) < size, problem=problem)


def pdf_preview(data: bytes, size: int) -> Preview:
    """A PDF file, which is not opened."""
    return hex_preview(data, size, PDF_NOTE)._replace(kind=DOCUMENT)
