"""Byte-pair encoding over bytes, so that any text can be encoded."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

# Tokens 0 to 255 are the single bytes, those of printable Latin-1 characters first.
_BYTES = bytes(sorted(range(256), key=lambda b: b < 33 or 127 <= b < 161 or b == 173))

# No token crosses the border of a word: a space and letters, digits or signs; or white space.
_WORD = re.compile(r"'s| ?[^\W\d_]+| ?\d+| ?(?:[^\w\s]|_)+|\s+(?!\S)|\s+")


def _merged(word: list[int], pair: tuple[int, int], token: int) -> list[int]:
    """The word with `token` in place of each occurrence of the pair."""
    result = []
    for current in word:
        # A token that was just made is no half of the pair: it is new.
        if result and (result[-1], current) == pair:
            result[-1] = token
        else:
            result.append(current)
    return result


class Tokenizer:
    """Text to token numbers and back.

    Args:
        merges: pairs of tokens; the pair at index i makes token 256 + i.
    """

    def __init__(self, merges: Iterable[tuple[int, int]]):
        self.merges = [tuple(pair) for pair in merges]
        self._ranks = {pair: rank for rank, pair in enumerate(self.merges)}
        self._pieces = [bytes([byte]) for byte in _BYTES]
        for left, right in self.merges:
            self._pieces.append(self._pieces[left] + self._pieces[right])
        self._encode_word = lru_cache(maxsize=1 << 16)(self._encode_word)

    @property
    def vocab_size(self) -> int:
        return len(self._pieces)

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """The tokenizer of a file of `save`."""
        return cls(json.loads(path.read_text())["merges"])

    def save(self, path: Path) -> None:
        """Writes JSON: an object whose `merges` are the pairs."""
        path.write_text(json.dumps({"merges": self.merges}, separators=(",", ":")) + "\n")

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> Tokenizer:
        """Merges the pair that is most frequent in the texts' words, again and again.

        Of pairs as frequent as each other the one of the lower tokens is merged.
        """
        counts = Counter(word for text in texts for word in _WORD.findall(text))
        words = [_byte_tokens(word) for word in counts]
        weights = list(counts.values())
        frequency: Counter[tuple[int, int]] = Counter()
        holders = defaultdict(set)  # a pair to the words that may hold it
        for index, word in enumerate(words):
            for pair in pairwise(word):
                frequency[pair] += weights[index]
                holders[pair].add(index)
        merges = []
        for token in range(256, vocab_size):
            best = min(frequency, key=lambda pair: (-frequency[pair], pair))
            merges.append(best)
            for index in holders.pop(best):
                for pair in pairwise(words[index]):
                    frequency[pair] -= weights[index]
                words[index] = _merged(words[index], best, token)
                for pair in pairwise(words[index]):
                    frequency[pair] += weights[index]
                    holders[pair].add(index)
        return cls(merges)

    def encode(self, text: str) -> list[int]:
        """The tokens of any text, bytes of an undecodable command line among it."""
        return [token for word in _WORD.findall(text) for token in self._encode_word(word)]

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of tokens; U+FFFD stands for bytes that are no UTF-8."""
        return b"".join(self._pieces[token] for token in tokens).decode("utf-8", "replace")

    def _encode_word(self, word: str) -> list[int]:
        tokens = _byte_tokens(word)
        while len(tokens) > 1:
            best = min(pairwise(tokens), key=lambda pair: self._ranks.get(pair, len(self.merges)))
            if best not in self._ranks:
                break
            tokens = _merged(tokens, best, 256 + self._ranks[best])
        return tokens


def _byte_tokens(word: str) -> list[int]:
    return [_BYTES.index(byte) for byte in word.encode("utf-8", "surrogateescape")]
