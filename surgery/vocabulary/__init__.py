"""The vocabulary: keep or add tokens; configuration and tokenizer follow."""

from surgery.vocabulary.resize import Resized as Resized
from surgery.vocabulary.resize import grow as grow
from surgery.vocabulary.resize import keep as keep
from surgery.vocabulary.tokens import needed as needed
