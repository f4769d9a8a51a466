"""A page as a list of blocks, and its two forms: Markdown beside its pictures, and one HTML file that needs nothing else.

Text may hold **bold** and `code`; everything else in it is shown as it is.
"""

import base64
import html
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.experiment.style import STYLE


@dataclass(frozen=True, slots=True)
class Heading:
    text: str
    level: int = 2


@dataclass(frozen=True, slots=True)
class Text:
    text: str
    is_lead: bool = False


@dataclass(frozen=True, slots=True)
class Bullets:
    items: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Card:
    """One figure that matters: large, with what it is and what it is to be held against."""

    value: str
    label: str
    note: str


@dataclass(frozen=True, slots=True)
class Cards:
    cards: tuple[Card, ...]


@dataclass(frozen=True, slots=True)
class Table:
    """The first columns are words, the others figures. A load is named in the first of its rows alone: see grouped()."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str = ""
    num_word_columns: int = 1


def grouped(rows: Sequence[tuple[str, ...]]) -> tuple[tuple[str, ...], ...]:
    """`rows` with the first cell left empty where it is that of the row above."""
    above = ["", *(row[0] for row in rows)]
    return tuple(("" if row[0] == before else row[0], *row[1:]) for row, before in zip(rows, above))


@dataclass(frozen=True, slots=True)
class Picture:
    """`file` lies in the page's folder."""

    file: str
    alt: str
    caption: str = ""


@dataclass(frozen=True, slots=True)
class Code:
    text: str


Block = Heading | Text | Bullets | Cards | Table | Picture | Code


def to_markdown(blocks: Sequence[Block]) -> str:
    return "\n\n".join(map(_markdown, blocks)) + "\n"


def _markdown(block: Block) -> str:
    match block:
        case Heading(text, level):
            return f"{'#' * level} {text}"
        case Text(text):
            return text
        case Bullets(items):
            return "\n".join(f"- {item}" for item in items)
        case Cards(cards):
            return "\n".join(f"- **{card.value}** {card.label}: {card.note}" for card in cards)
        case Table():
            return _markdown_table(block)
        case Picture(file, alt, caption):
            return f"![{alt}]({file})" + (f"\n\n*{caption}*" if caption else "")
        case Code(text):
            return f"```\n{text}\n```"


def _markdown_table(table: Table) -> str:
    words = table.num_word_columns
    rule = ["---"] * words + ["---:"] * (len(table.head) - words)
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in (table.head, tuple(rule), *table.rows)]
    return "\n".join(lines) + (f"\n\n*{table.caption}*" if table.caption else "")


def to_html(blocks: Sequence[Block], title: str, folder: Path) -> str:
    """Pictures are read from `folder` and become part of the text."""
    body = "\n".join(_html(block, folder) for block in blocks)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _html(block: Block, folder: Path) -> str:
    match block:
        case Heading(text, level):
            return f"<h{level}>{_inline(text)}</h{level}>"
        case Text(text, is_lead):
            return f"<p{_class('lead', is_lead)}>{_inline(text)}</p>"
        case Bullets(items):
            return "<ul>" + "".join(f"<li>{_inline(item)}</li>" for item in items) + "</ul>"
        case Cards(cards):
            return '<div class="cards">' + "".join(map(_html_card, cards)) + "</div>"
        case Table():
            return _html_table(block)
        case Picture(file, alt, caption):
            data = base64.b64encode((folder / file).read_bytes()).decode()
            note = f"<figcaption>{_inline(caption)}</figcaption>" if caption else ""
            return f'<figure><img src="data:image/png;base64,{data}" alt="{html.escape(alt)}">{note}</figure>'
        case Code(text):
            return f"<pre>{html.escape(text)}</pre>"


def _html_card(card: Card) -> str:
    return f"<div><b>{_inline(card.value)}</b><span>{_inline(card.label)}</span><small>{_inline(card.note)}</small></div>"


def _html_table(table: Table) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        shown = (f"<{tag}{_class('word', at < table.num_word_columns)}>{_inline(cell)}</{tag}>" for at, cell in enumerate(cells))
        return f"<tr>{''.join(shown)}</tr>"

    body = "".join(row(cells, "td") for cells in table.rows)
    note = f"<figcaption>{_inline(table.caption)}</figcaption>" if table.caption else ""
    return f"<figure><table><thead>{row(table.head, 'th')}</thead><tbody>{body}</tbody></table>{note}</figure>"


def _class(name: str, is_given: bool) -> str:
    return f' class="{name}"' if is_given else ""


def _inline(text: str) -> str:
    escaped = html.escape(text, quote=False)
    escaped = re.sub(r"`([^`]+)`", r"<code>\1</code>", escaped)
    return re.sub(r"\*\*([^*]+)\*\*", r"<strong>\1</strong>", escaped)
