"""Text from tokens while they come: whole characters over any tokenizer, and stop strings by characters."""

from __future__ import annotations

import random

import pytest
import torch

pytest.importorskip("transformers")
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from ds_inference import SamplingParams, load
from ds_inference.answers import ends_with_stop
from ds_inference.text import HfTokenizer, TextStream

TEXTS = [
    "plain words, and more of them",
    "한국어 문장은 여러 음절로 이루어져 있다",
    "ภาษาไทยไม่มีช่องว่าง",
    "🙂🙂 end 👩‍👩‍👧 of 🇩🇪",
    "龘靐 rare, 日本語 mixed",
    "a b  c\n\n d é",
]


def byte_fallback() -> Tokenizer:
    """As Llama 2's: letters and some words are tokens, all else is bytes, and a run of bytes that is no text is read as U+FFFD."""
    vocab = {"<unk>": 0, **{f"<0x{byte:02X}>": 3 + byte for byte in range(256)}, "▁": 259}
    for piece in ["▁of", "▁end", "▁and", *"abcdefghijklmnopqrstuvwxyz,"]:
        vocab.setdefault(piece, len(vocab) + 2)
    inner = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return inner


def byte_level() -> Tokenizer:
    inner = Tokenizer(
        models.BPE({letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, [])
    )
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return inner


def word_piece() -> Tokenizer:
    inner = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece(cleanup=False)
    inner.train_from_iterator(TEXTS, trainers.WordPieceTrainer(vocab_size=200, special_tokens=["[UNK]"]))
    return inner


TOKENIZERS = {"byte fallback": byte_fallback, "byte level": byte_level, "word piece": word_piece}


@pytest.fixture(scope="module", params=TOKENIZERS)
def tokenizer(request):
    return HfTokenizer(PreTrainedTokenizerFast(tokenizer_object=TOKENIZERS[request.param]()))


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("times", [1, 7])
def test_pieces_are_whole_characters_and_add_up(tokenizer, text, times):
    tokens = tokenizer.encode(" ".join([text] * times))
    stream = TextStream(tokenizer)
    pieces = [stream.push(token) for token in tokens]
    assert all("\ufffd" not in piece for piece in pieces)
    assert "".join(pieces) + stream.finish() == tokenizer.decode(tokens)


@pytest.mark.parametrize("seed", range(40))
def test_drawn_sequences_of_characters(tokenizer, seed):
    rng = random.Random(seed)
    text = "".join(rng.choice("".join(TEXTS)) for _ in range(120))
    tokens = tokenizer.encode(text)
    stream = TextStream(tokenizer)
    assert "".join(stream.push(token) for token in tokens) + stream.finish() == tokenizer.decode(tokens)


@pytest.mark.parametrize("name", ["byte fallback", "byte level"])
@pytest.mark.parametrize("seed", range(10))
def test_bytes_that_are_no_text_take_nothing_back_and_stay_short(name, seed):
    """Drawn bytes: what was said stays, a whole character after them is read, and no more than a bounded window is decoded."""
    plain = HfTokenizer(PreTrainedTokenizerFast(tokenizer_object=TOKENIZERS[name]()))
    longest = []

    class Counted:
        encode = plain.encode

        def decode(self, tokens):
            longest.append(len(tokens))
            return plain.decode(tokens)

    rng, vocab = random.Random(seed), plain.inner.get_vocab()
    continuations = (
        [vocab[f"<0x{byte:02X}>"] for byte in range(0x80, 0xC0)]
        if name == "byte fallback"
        else plain.encode("é")[1:] * 64
    )
    tokens = [*plain.encode("a 🙂"), *(rng.choice(continuations) for _ in range(300)), *plain.encode("🙂 of it")]
    stream = TextStream(Counted())
    text = "".join(stream.push(token) for token in tokens) + stream.finish()
    assert text.startswith("a 🙂")
    assert text.endswith("of it")
    assert max(longest) <= 72


STOPS = ["🙂🙂", "있다", "ไทย", "龘", "👩‍👩‍👧", "de", "🇩🇪", "f 🇩", "한국어 문장"]


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("name", ["byte fallback", "byte level"])
def test_a_stop_string_is_seen_with_its_last_token_and_not_before(name, stop):
    tokenizer = HfTokenizer(PreTrainedTokenizerFast(tokenizer_object=TOKENIZERS[name]()))
    for text in (f"abc {stop} more", f"{stop}", "x" * 50 + stop + "tail", "한" * 40 + stop):
        tokens = tokenizer.encode(text)
        wanted = next(n for n in range(1, len(tokens) + 1) if stop in tokenizer.decode(tokens[:n]))
        seen = [n for n in range(1, wanted + 1) if ends_with_stop(tokenizer, tokens[:n], (stop, "never said"))]
        assert seen == [wanted], text


def test_an_answer_ends_with_its_stop_string(tmp_path):
    """A model that says one character for ever, of four tokens: the answer ends with the second, and so does its usage."""
    tokenizer = HfTokenizer(PreTrainedTokenizerFast(tokenizer_object=byte_level()))
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=256,
        eos_token_id=None,
    )
    engine = load(LlamaForCausalLM(config).eval(), tokenizer=tokenizer)
    character = tokenizer.encode("🙂")

    def allowed(answer):
        mask = torch.zeros(256, dtype=torch.bool)
        mask[character[len(answer) % 4]] = True
        return mask

    how = SamplingParams(100, stop=("🙂🙂",), allowed_tokens=allowed)
    (answer,) = engine.generate(["a"], how)
    assert (len(answer.tokens), answer.reason, answer.text) == (8, "stop", "")
