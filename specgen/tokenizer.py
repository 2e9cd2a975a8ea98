"""Text to token ids and back, over the `tokenizers` library and a model folder's tokenizer.json or tiktoken.model.

Knows whether a prompt gets a BOS token (decided once, when it is made), which ids end a row, and how to turn ids into
text piece by piece. Does not know chat templates.
"""

import json
import logging
from collections.abc import Sequence
from pathlib import Path

import tokenizers
from tokenizers.decoders import DecodeStream

from specgen import checks, tiktoken_model
from specgen.errors import ModelError, RowError

logger = logging.getLogger(__name__)

_LFS_START = b"version https://git-lfs"


class Tokenizer:
    """A model folder's tokenizer with its BOS policy.

    The ids put in front of a prompt are those that the tokenizer's own post-processor puts there; if BOS is not among
    them and tokenizer_config.json says `add_bos_token`, BOS too. A prompt that begins with BOS already gets nothing.
    What a post-processor would put behind the text (an EOS, say) is left out: a prompt is to be continued.

    vocab_size: ids the tokenizer knows. bos_token_id: None if there is none. prefix_ids: put in front of a prompt.
    """

    def __init__(self, folder: Path) -> None:
        """Load the tokenizer of `folder`.

        Raises: ModelError if it is missing or broken.
        """
        self._tokenizer = _read_backend(folder)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        config = read_json(folder / "tokenizer_config.json")
        self.vocab_size: int = self._tokenizer.get_vocab_size()
        self.bos_token_id = self._bos_token_id(config, read_json(folder / "config.json"))
        self.prefix_ids = self._post_processor_prefix()
        bos = self.bos_token_id
        self.bos_text: str | None = self._tokenizer.id_to_token(bos) if bos is not None else None
        if bos is not None and bos not in self.prefix_ids and config.get("add_bos_token") is True:
            self.prefix_ids = [bos, *self.prefix_ids]

    def encode(self, text: str) -> list[int]:
        """Return the ids of a prompt, BOS included where the model's tokenizer wants it.

        Raises: RowError if the text is not Unicode (a lone surrogate).
        """
        check_text(text)
        return self.with_prefix(self.encode_batch([text])[0])

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of texts that were checked (`check_text`), with nothing in front of them.

        It takes several threads for several texts, and lets other threads of Python's run.
        """
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def with_prefix(self, ids: list[int]) -> list[int]:
        """Return the ids of a prompt with what is put in front of it, if they do not begin with BOS."""
        return ids if ids and ids[0] == self.bos_token_id else self.prefix_ids + ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of the ids without special tokens; broken UTF-8 gives U+FFFD, unknown ids nothing.

        It lets other threads of Python's run, which the library does for several texts only.
        """
        texts: list[str] = self._tokenizer.decode_batch([list(token_ids)], skip_special_tokens=True)
        return texts[0]

    def token_text(self, token_id: int) -> str:
        """Return the text of one id, also of a special token; half a character gives U+FFFD, an unknown id nothing."""
        if not 0 <= token_id < 2**32:  # the library takes no other numbers
            return ""
        text: str = self._tokenizer.decode([token_id], skip_special_tokens=False)
        return text

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a token's text, None if it is no token."""
        token_id: int | None = self._tokenizer.token_to_id(token)
        return token_id

    def new_stream(self) -> "TextStream":
        """Return a decoder for the ids of one row."""
        return TextStream(self, self._tokenizer)

    def _bos_token_id(self, tokenizer_config: dict[str, object], config: dict[str, object]) -> int | None:
        token = _token_text(tokenizer_config.get("bos_token"))
        if token is not None:
            return self.token_to_id(token)
        number = config.get("bos_token_id")
        return number if isinstance(number, int) and not isinstance(number, bool) else None

    def _post_processor_prefix(self) -> list[int]:
        plain = self._tokenizer.encode("a", add_special_tokens=False).ids
        full = self._tokenizer.encode("a", add_special_tokens=True).ids
        for start in range(len(full) - len(plain) + 1):
            if full[start : start + len(plain)] == plain:
                return list(full[:start])
        return []


def vocabulary_file(folder: Path) -> Path:
    """Return the file of a model folder that its tokenizer is read from, there or not."""
    path = folder / "tokenizer.json"
    other = folder / tiktoken_model.FILE
    return other if other.is_file() and not path.is_file() else path


def _read_backend(folder: Path) -> tokenizers.Tokenizer:
    path = vocabulary_file(folder)
    if not path.is_file():
        raise ModelError("the model has no tokenizer.json", where=str(folder))
    if is_lfs_pointer(path):
        what = f"{path.name} is Git LFS's pointer to the file, not the file"
        raise ModelError(what, where=str(folder), hint="git lfs pull")
    if path.name == tiktoken_model.FILE:
        return tiktoken_model.read_tiktoken(path, read_json(folder / "tokenizer_config.json"))
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"tokenizer.json cannot be read: {error}", where=str(folder)) from error


class TextStream:
    """Decodes one row's ids as they come: the pushed pieces and the last one joined are what `decode` gives for all.

    A piece never holds half a character: bytes wait until the character is whole, or until `finish`.
    """

    def __init__(self, tokenizer: Tokenizer, backend: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._backend = backend
        self._stream: DecodeStream | None = DecodeStream(skip_special_tokens=True)
        self._token_ids: list[int] = []
        self._pieces: list[str] = []

    def push(self, token_ids: Sequence[int]) -> str:
        """Take more ids and return the text that is certain now, maybe none."""
        self._token_ids.extend(token_ids)
        if self._stream is None:
            return ""
        piece = ""
        try:
            for token_id in token_ids:
                piece += self._stream.step(self._backend, token_id) or ""
        except Exception:  # the library refuses some sequences of broken bytes: all that is left comes with finish()
            self._stream = None
        self._pieces.append(piece)
        return piece

    @property
    def has_failed(self) -> bool:
        """Whether pieces come no more, since the library refused some ids: see `decoded`."""
        return self._stream is None

    def decoded(self) -> str:
        """Return `decode` of all ids so far: half a character at the end of it is U+FFFD."""
        return self._tokenizer.decode(self._token_ids)

    def finish(self) -> str:
        """Return the text that was still held back; the row is over."""
        whole = self._tokenizer.decode(self._token_ids)
        given = "".join(self._pieces)
        self._pieces = [whole]
        return whole[len(given) :] if whole.startswith(given) else ""

    @property
    def text(self) -> str:
        """The text so far; after `finish`, exactly `decode` of all ids."""
        return "".join(self._pieces)


def check_text(text: str) -> None:
    """Raises: RowError if a text is not Unicode (a lone surrogate)."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise RowError("the prompt holds half of a surrogate pair, which is no text", code="bad_text") from None


def declared_eos(folder: Path, tokenizer: Tokenizer | None) -> dict[int, list[str]]:
    """Return the ids that end a row, in order, with the files that declare them; without a tokenizer, as numbers alone.

    Raises: ModelError for a file that cannot be read, or declares what is no id.
    """
    found: dict[int, list[str]] = {}
    for name in ("config.json", "generation_config.json"):
        declared = read_json(folder / name).get("eos_token_id")
        for token_id in declared if isinstance(declared, list) else [] if declared is None else [declared]:
            if not isinstance(token_id, int) or isinstance(token_id, bool):
                raise ModelError(
                    f"eos_token_id must be a token id or a list of them, not {checks.shown(declared)}",
                    where=str(folder / name),
                )
            found.setdefault(token_id, []).append(name)
    token = _token_text(read_json(folder / "tokenizer_config.json").get("eos_token"))
    token_id = tokenizer.token_to_id(token) if token is not None and tokenizer is not None else None
    if token_id is not None:
        found.setdefault(token_id, []).append("tokenizer_config.json")
    return dict(sorted(found.items()))


def eos_token_ids(folder: Path, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the ids that end a row, sorted: the union of what config, generation_config and the tokenizer declare.

    An id beyond the model's vocabulary, which no row can come to, is left out with a warning.

    Raises: ModelError, see `declared_eos`.
    """
    size = read_json(folder / "config.json").get("vocab_size")
    found = declared_eos(folder, tokenizer)
    beyond = [i for i in found if i < 0 or (isinstance(size, int) and i >= size)]
    for i in beyond:
        logger.warning("%s: EOS id %d of %s is not in the vocabulary: no row ends by it", folder, i, found.pop(i)[0])
    return tuple(found)


def added_token_ids(folder: Path) -> tuple[int, ...]:
    """Return the ids that the tokenizer has beside its vocabulary, special tokens above all; sorted.

    Raises: ModelError if a file is broken; without one there are none.
    """
    listed = read_json(folder / "tokenizer.json").get("added_tokens")
    named = read_json(folder / "tokenizer_config.json").get("added_tokens_decoder")
    ids = {token.get("id") for token in listed if isinstance(token, dict)} if isinstance(listed, list) else set()
    if isinstance(named, dict):
        ids |= {int(name) for name in named if name.isdecimal()}
    return tuple(sorted(i for i in ids if isinstance(i, int)))


def is_lfs_pointer(path: Path) -> bool:
    """Return whether there is only Git LFS's stand-in for a large file: a clone without `git lfs pull`."""
    try:
        with path.open("rb") as file:
            return file.read(len(_LFS_START)) == _LFS_START
    except OSError:
        return False


def read_json(path: Path) -> dict[str, object]:
    """Return the object in a JSON file of a model folder, {} if there is no such file.

    Raises: ModelError if it is not a JSON object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        if is_lfs_pointer(path):
            raise ModelError(
                f"{path.name} is Git LFS's pointer to the file, not the file",
                where=str(path.parent),
                hint="git lfs pull",
            ) from None
        raise ModelError(f"{path.name} cannot be read: {error}", where=str(path.parent)) from error
    if not isinstance(content, dict):
        raise ModelError(f"{path.name} is not a JSON object", where=str(path.parent))
    return content


def _token_text(declared: object) -> str | None:
    if isinstance(declared, dict):  # an AddedToken written out
        declared = declared.get("content")
    return declared if isinstance(declared, str) else None
