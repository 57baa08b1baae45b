"""The tokenizer: a thin layer over the tokenizers and chat templates of transformers."""

from __future__ import annotations

import inspect
import json
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

from jaxserve import demo
from jaxserve.errors import InvalidValue
from jaxserve.tools.budget import Budget, metered, within
from jaxserve.tools.native import form_of, in_form
from jaxserve.tools.prompt import as_text, demands_short_ids, has_calls, knows_tools, with_objects, with_short_ids
from jaxserve.tools.roles import Roles, fitted, unusual
from jaxserve.tools.variables import variables_of
from jaxserve.yamlio import text_of

_LOCAL = re.compile(r"name_or_path|is_local|local_files_only|backend|.*_file")  # where files are, not what they say
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")

# Steps of decoders that treat the first token of a text in their own way, and all others alike.
FIRST_DIFFERS = frozenset({"Sequence", "Replace", "ByteFallback", "Fuse", "Strip", "Metaspace", "WordPiece"})
PROBE = Budget(steps=20_000, seconds=1.0)  # of the short conversations that tell what roles a template takes

Message = Mapping[str, Any]


def _reader(name: str | Path) -> Any:
    """Return what reads a tokenizer: AutoTokenizer, whose imports take a second or two, but not for the demo model."""
    if Path(name) == Path(demo.__file__).parent / "model":
        from transformers import PreTrainedTokenizerFast  # transformers is imported late, for --help

        return PreTrainedTokenizerFast
    from transformers import AutoTokenizer

    return AutoTokenizer


def template_of(given: str | None) -> str | None:
    """Return the chat template that a file or a text has. Raises InvalidValue."""
    if given is None or "{" in given:
        return given
    path = Path(given)
    if not path.is_file():
        raise InvalidValue(f"chat_template={given!r} is neither a file nor a template", "chat_template")
    text = text_of(path)
    return text if path.suffix != ".json" else _template_in(text, given)


def _template_in(text: str, given: str) -> str:
    """Return the template in the JSON of a `chat_template.json` or `tokenizer_config.json`. Raises InvalidValue."""
    try:
        template = json.loads(text)
    except ValueError as error:
        raise InvalidValue(f"chat_template={given!r} is not JSON: {error}", "chat_template") from error
    template = template.get("chat_template") if isinstance(template, dict) else template
    if isinstance(template, list):  # several, by name
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    if not isinstance(template, str):
        raise InvalidValue(f"chat_template={given!r} has no key 'chat_template' with a template", "chat_template")
    return template


class Tokenizer:
    """A model's tokenizer, safe to use from several threads."""

    def __init__(self, hf: Any, chat_template: str | None = None) -> None:
        """hf: a transformers tokenizer. chat_template: replaces the tokenizer's own template."""
        self._hf = hf
        self._template = chat_template
        self._roles = lru_cache(maxsize=16)(self._roles_of)
        self._pieces = lru_cache(maxsize=65536)(self._piece)
        self._lock = threading.Lock()  # for tokenizers that encode in Python
        if self._reentrant:
            self._backend.no_truncation()  # transformers disables both at each call, which is not thread-safe
            self._backend.no_padding()

    @classmethod
    def load(cls, name: str | Path, revision: str | None = None, chat_template: str | None = None) -> Tokenizer:
        """Load by Hugging Face name or from a folder. chat_template: a file, or the template itself."""
        chat_template = template_of(chat_template)
        try:
            loaded = _reader(name).from_pretrained(str(name), revision=revision, trust_remote_code=False)
        except Exception as error:  # transformers can raise anything, depending on the files
            reason = " ".join(str(error).split())[:300]
            raise InvalidValue(
                f"no tokenizer could be loaded from {str(name)!r} ({type(error).__name__}: {reason}); expected "
                "tokenizer.json or other files that transformers knows, or set --tokenizer",
                "tokenizer",
            ) from error
        return cls(loaded, chat_template)

    @property
    def hf(self) -> Any:
        return self._hf

    def __len__(self) -> int:
        return len(self._hf)

    def json(self) -> str:
        """Return the text of the tokenizer.json. Raises InvalidValue for a tokenizer that runs in Python."""
        if self._backend is None:
            raise InvalidValue("this tokenizer has no tokenizer.json", "tokenizer")
        text: str = self._backend.to_str()
        return text

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Encode a text, with special tokens (BOS) unless `add_special_tokens` is off. Raises InvalidValue."""
        try:
            if self._reentrant:
                return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)
            with self._lock:
                # No warning about lengths: callers check the context.
                return list(self._hf.encode(text, add_special_tokens=add_special_tokens, verbose=False))
        except BaseException as error:  # a panic in Rust is no Exception; expressions have limits
            if type(error).__name__ != "PanicException":
                raise
            raise InvalidValue(f"the model's tokenizer cannot encode this text: {str(error)[:100]}", "prompt") from None

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Decode tokens; invalid UTF-8 becomes U+FFFD, and ids beyond the vocabulary are empty."""
        text: str
        if self._backend is not None:  # as transformers does, without its checks of `tokens`
            text = self._backend.decode(list(tokens), skip_special_tokens=skip_special_tokens)
            return text
        text = self._hf.decode(
            list(tokens), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text

    def chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template: str | None = None,
        arguments: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Render a conversation to a prompt text; `arguments` are further variables of the template.

        Tools are given to the template if it knows them; otherwise they, calls and results become text.
        Roles become those that the template takes (`fitted`). Raises InvalidValue if there is no template, the
        template raises, or it would leave a variable out (`variables_of`).
        """
        template = template or self._template
        taken = set(arguments or ()) & set(inspect.signature(self._hf.apply_chat_template).parameters) - {"documents"}
        if taken:
            raise InvalidValue(
                f"chat_template_kwargs may not set {', '.join(sorted(taken))[:100]}", "chat_template_kwargs"
            )
        if template is None and not self._hf.chat_template:
            raise InvalidValue(
                "this model has no chat template: use /v1/completions, or give --chat-template", "messages"
            )
        text = template or self.template_text
        # Some templates check the length of a list of calls, even if it is empty.
        given = [{key: value for key, value in message.items() if key != "tool_calls" or value} for message in messages]
        if (tools or has_calls(given)) and not knows_tools(text):
            given, tools = as_text(given, tools or ()), None
        if unusual(given):
            given = fitted(given, self._roles(template))
        if demands_short_ids(text):
            given = with_short_ids(given)
        form = form_of(text)
        arguments = variables_of(text, form, given, tools, arguments or {})
        if form is not None:
            given = in_form(form, given, tools or ())
        forms: Iterable[Sequence[Message]] = [given]
        if has_calls(given):  # some templates read arguments as objects only, others join their text with others
            forms = (form(given) for form in (with_objects, partial(with_objects, wrapped=True), list))
        render = partial(
            self._rendered,
            Budget(),
            template,
            tools=list(tools) if tools else None,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **arguments,
        )
        return _first_that_renders(render, forms)

    def pair(self, query: str, document: str) -> tuple[str, bool]:
        """Return the text of a pair to score, and whether special tokens belong before it.

        `--chat-template` renders the pair; without it, one text comes after the other. The model's own template is
        one of conversations, which does not know the roles query and document. Raises InvalidValue if the template
        raises.
        """
        if self._template is None:
            return query + document, True
        messages = [{"role": "query", "content": query}, {"role": "document", "content": document}]
        return _first_that_renders(partial(self._rendered, Budget(), self._template), [messages]), False

    def _roles_of(self, template: str | None) -> Roles:
        return Roles.of(partial(self._rendered, PROBE, template), template or self.template_text)

    def _rendered(self, budget: Budget, template: str | None, messages: Sequence[Message], **given: Any) -> str:
        """Render messages within a budget. Raises whatever a template raises, and OverBudget."""
        metered(self._hf.get_chat_template(template, given.get("tools")))
        render = partial(self._hf.apply_chat_template, messages, chat_template=template, tokenize=False, **given)
        text: str = within(budget, render)
        return text

    @cached_property
    def template_text(self) -> str:
        """The chat templates of the model, as one text."""
        templates = self._template or self._hf.chat_template or ""
        return "\n".join(templates.values()) if isinstance(templates, dict) else str(templates)

    def described(self) -> dict[str, Any]:
        """Return what defines the tokenizer, as JSON: its class, special tokens, settings and chat template."""
        description: dict[str, Any] = {"tokenizer_class": type(self._hf).__name__}
        settings = self._hf.init_kwargs.items()
        description |= {name: _as_json(value) for name, value in settings if not _LOCAL.fullmatch(name)}
        description |= {
            f"{name}_token": getattr(self._hf, f"{name}_token", None) for name in ("bos", "eos", "pad", "unk")
        }
        template = self._template or self._hf.chat_template
        return {**description, "chat_template": _as_json(template), "vocab_size": len(self)}

    @cached_property
    def _backend(self) -> Any:
        """The Rust tokenizer behind transformers' own; None if there is none."""
        return getattr(self._hf, "backend_tokenizer", None)

    @cached_property
    def _reentrant(self) -> bool:
        """Whether the Rust tokenizer alone, which is thread-safe, gives the ids that transformers would."""
        from transformers import PreTrainedTokenizerFast

        own = type(self._hf)._encode_plus is PreTrainedTokenizerFast._encode_plus
        return bool(self._backend is not None and own and not getattr(self._hf, "split_special_tokens", False))

    @cached_property
    def longest_piece(self) -> int:
        """An upper bound on the characters of a token, as vLLM's `max_chars_per_token`.

        Vocabularies that can encode any byte have no token for unknown text. The others may encode a long
        unknown word as one token, so their bound is at least WordPiece's longest word.
        """
        longest = max(map(len, self._hf.get_vocab()))
        return longest if self._byte_level or self.byte_fallback else max(longest, 128)

    @cached_property
    def special(self) -> frozenset[int]:
        """Ids that `skip_special_tokens` omits from the text."""
        if self._backend is None:
            return frozenset(self._hf.all_special_ids)
        added = self._backend.get_added_tokens_decoder()  # reserved tokens too, which have no role in the config
        return frozenset(id for id, token in added.items() if token.special)

    def has_text(self, token: int, skip_special_tokens: bool = False) -> bool:
        """Whether decoding a token gives text: ids beyond the vocabulary do not, nor do omitted ones."""
        if skip_special_tokens and token in self.special:
            return False
        return self._hf.convert_ids_to_tokens(token) is not None

    @cached_property
    def byte_fallback(self) -> frozenset[int]:
        """Ids of single raw bytes (`<0x0A>`); only a whole run of them is valid text."""
        if self._byte_level:
            return frozenset()
        return frozenset(id for piece, id in self._hf.get_vocab().items() if _BYTE_PIECE.fullmatch(piece))

    @cached_property
    def _byte_level(self) -> bool:
        return "ByteLevel" in self._decoders

    @cached_property
    def _decoders(self) -> frozenset[str]:
        """The kinds of steps of the Rust decoder; none if there is no such decoder."""
        decoder = getattr(self._backend, "decoder", None)
        state = {} if decoder is None else json.loads(decoder.__getstate__())
        return frozenset(str(part.get("type")) for part in [state, *state.get("decoders", ())])

    @cached_property
    def _word(self) -> int | None:
        """A token that stands for all that may come before another one; None: it matters which that is."""
        if not self._decoders <= FIRST_DIFFERS:
            return None
        return next((id for id in range(len(self)) if id not in self.special and id not in self.byte_fallback), None)

    def piece_bytes(self, token: int, after: int | None = None) -> bytes:
        """Return the bytes of a token; a character may span several tokens.

        after: the token before it that has text; None: the text begins with it.
        """
        if self._byte_level:
            after = None
        elif after is not None and self._word is not None:
            after = self._word  # so that a few entries serve all
        return self._pieces(token, after)

    def _piece(self, token: int, after: int | None) -> bytes:
        piece = self._hf.convert_ids_to_tokens(token)
        if piece is None:
            return b""
        if self._byte_level:
            table = _byte_alphabet()
            if all(c in table for c in piece):
                return bytes(table[c] for c in piece)
            return str(piece).encode()
        if token in self.byte_fallback:
            return bytes([int(piece[3:5], 16)])
        if after is None:
            return self.decode([token]).encode()
        before, both = self.decode([after]), self.decode([after, token])
        return both[common(before, both) :].encode()


def common(a: str, b: str) -> int:
    """Return the number of characters with which both texts begin."""
    return next((at for at, (left, right) in enumerate(zip(a, b, strict=False)) if left != right), min(len(a), len(b)))


def _first_that_renders(render: Callable[[Sequence[Message]], str], forms: Iterable[Sequence[Message]]) -> str:
    """Return the prompt of the first form of a conversation whose types the template can read."""
    from jinja2 import UndefinedError  # imported late, for --help

    failed: Exception | None = None
    for form in forms:
        try:
            return render(form)
        except Exception as error:  # a template is a program that may raise anything
            failed = failed or error
            if not isinstance(error, TypeError | UndefinedError):
                break
    reason = str(failed)
    reason = reason if len(reason) <= 200 else reason[:199] + "…"
    raise InvalidValue(f"the chat template refuses these messages: {reason}", "messages") from failed


def _as_json(value: Any) -> Any:
    """Return a setting of transformers as JSON; tokens with options become their text."""
    if isinstance(value, Mapping):
        return {str(key): _as_json(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(inner) for inner in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)


@cache
def _byte_alphabet() -> dict[str, int]:
    """Return byte-level BPE's printable character for each byte: itself, or from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {**table, **{chr(256 + i): byte for i, byte in enumerate(others)}}
