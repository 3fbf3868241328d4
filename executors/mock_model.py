"""A tokenizer and a chat template for clusters that serve mock engines: made-up words, the same every time."""

from __future__ import annotations

import random
from functools import cache

from executors.frontend.template import ChatTemplate
from executors.frontend.tokens import ServedTokenizer

NAME = "mock"
SPECIALS = ("<pad>", "<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>")
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
VOCABULARY = 2_000
READABLE = len(SPECIALS) + 256
"""From here on tokens are pieces of words, before them single bytes."""


@cache
def tokenizer() -> ServedTokenizer:
    """Learned from invented sentences in a fraction of a second."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIALS),
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    bpe.train_from_iterator(_sentences(), trainer)
    return ServedTokenizer(bpe.to_str(), ChatTemplate(TEMPLATE, {}))


def _sentences(lines: int = 2_000) -> list[str]:
    rng = random.Random(0)
    syllables = [c + v + e for c in "bdfgklmnprstvz" for v in "aeiou" for e in ("", "n", "r", "s")]
    words = ["".join(rng.choice(syllables) for _ in range(rng.choice((1, 2, 2, 3)))) for _ in range(1_500)]
    weights = [1.0 / (rank + 10) for rank in range(len(words))]
    return [" ".join(rng.choices(words, weights, k=rng.randint(5, 16))).capitalize() + "." for _ in range(lines)]
