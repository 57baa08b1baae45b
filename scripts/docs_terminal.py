"""Draw what `jaxserve top` and `jaxserve chat` show of a running server, for the guide.

jaxserve serve --mesh 2x1
jaxserve bench --num-prompts 60 --request-rate 3 --random-input-len 200 --random-output-len 40   # meanwhile
python scripts/docs_terminal.py --url http://127.0.0.1:8000
"""

from __future__ import annotations

import argparse
import asyncio
import io
import re
from pathlib import Path

from rich.console import Console, RenderableType
from rich.terminal_theme import SVG_EXPORT_THEME
from rich.text import Text

from jaxserve.bench.client import Target
from jaxserve.cli.chat.command import Chat, promise
from jaxserve.cli.chat.conversation import Conversation
from jaxserve.cli.top.command import Reader, Screen

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "images"
TYPED = ("Write a function that reads a file.", "/tpot 5ms", "What does len do?")


def console(width: int) -> Console:
    return Console(record=True, file=io.StringIO(), width=width, force_terminal=True, highlight=False)


def save(drawn: Console, name: str, title: str) -> None:
    """Write an SVG whose letters are those of the reader's machine: rich's would load a font from elsewhere."""
    text = drawn.export_svg(title=title, theme=SVG_EXPORT_THEME, unique_id=name)
    text = re.sub(r"\s*@font-face \{.*?\}\n", "\n", text, flags=re.S)
    assert "url(http" not in text
    (FOLDER / f"{name}.svg").write_text(text, encoding="utf-8")
    print(f"wrote {FOLDER / name}.svg")


async def top(url: str, interval: float) -> None:
    """Draw two looks at a server, an interval apart."""
    drawn = console(100)
    screen = Screen(Reader(url, "none"), interval, drawn)
    await screen.look()
    await asyncio.sleep(interval)
    await screen.look()
    shown: RenderableType = screen.draw()
    drawn.print(shown)
    save(drawn, "top", "jaxserve top")


def chat(url: str) -> None:
    """Draw a conversation, with what would have been typed."""
    drawn = console(100)
    conversation = Conversation(Target(url, "", chat=True), sampling={"max_tokens": 40, "temperature": 0.0})
    asyncio.run(conversation.meet())
    promise(conversation, "ttft", 0.5)
    lines = iter(TYPED)

    def read(prompt: str) -> str:
        line = next(lines, None)
        if line is None:
            raise EOFError
        drawn.print(Text(prompt + line, "bold"))
        return line

    Chat(conversation, drawn, drawn).run(read)
    save(drawn, "chat", "jaxserve chat --ttft-slo 500ms --max-tokens 40 --temperature 0")


def main() -> None:
    """Draw both pictures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--interval", type=float, default=6.0, metavar="SECONDS")
    args = parser.parse_args()
    asyncio.run(top(args.url, args.interval))
    chat(args.url)


if __name__ == "__main__":
    main()
