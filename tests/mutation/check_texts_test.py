"""Gives the checker of texts a small tree, and mutations that cannot be planted in it."""

from __future__ import annotations

import tempfile
import unittest
from pathlib import Path

from check_texts import mistakes
from mutations import Mutation

SOURCE = "a = b + 1;\nc = b + 1;\n"

# (mutation, words of its report)
PLANTED = [
    (Mutation("room/file.cpp", "a = b - 1;", "a = b;", "^A"), "has 0 times: a = b - 1;"),
    (Mutation("room/file.cpp", "b + 1;", "b;", "^A"), "has 2 times: b + 1;"),
    (Mutation("room/gone.cpp", "a = b + 1;", "a = b;", "^A"), "gone.cpp has 0 times"),
    (Mutation("room/file.cpp", "a = b + 1;", "a = b + 1;", "^A"), "would not change"),
]


class CheckTexts(unittest.TestCase):
    """The checker on good and on spoilt mutations."""

    def setUp(self) -> None:
        """Writes the tree."""
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)
        (self.root / "src/room").mkdir(parents=True)
        (self.root / "src/room/file.cpp").write_text(SOURCE)

    def test_good_mutation(self) -> None:
        """Nothing is reported."""
        assert mistakes(self.root, [Mutation("room/file.cpp", "a = b + 1;", "a = b;", "^A")]) == []

    def test_spoilt_mutations(self) -> None:
        """Each is reported, and once."""
        for mutation, words in PLANTED:
            with self.subTest(words=words):
                found = mistakes(self.root, [mutation])
                assert len(found) == 1, found
                assert words in found[0]


if __name__ == "__main__":
    unittest.main()
