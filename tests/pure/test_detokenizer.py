"""Detokenizer: the joined text is one and the same for every split of the ids; nothing of a stop string is ever sent."""

import codecs
import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixserve.tokenizer import Detokenizer, Tokenizer
from tests.support import small_tokenizers as small
from tests.support.examples import examples

BYTE_LEVEL = Tokenizer(small.byte_level(), bos_token="<s>", eos_token="</s>")
SENTENCEPIECE = Tokenizer(small.sentencepiece(), bos_token="<s>", eos_token="</s>")
TOKENIZERS = [BYTE_LEVEL, SENTENCEPIECE]
EOS = 2

CHARACTERS = [*"abcde :\n", "é", "e\u0301", "語", "한", "😀", "👩\u200d👩\u200d👧", "🇩🇪", "ﷺ", "\x00"]
texts = st.lists(st.sampled_from(CHARACTERS), max_size=25).map("".join)
cuts = st.lists(st.integers(0, 60), max_size=8)
stops = st.lists(st.text(st.sampled_from("abc :é語😀"), min_size=1, max_size=4), max_size=3).map(tuple)


def run(tokenizer: Tokenizer, chunks: Sequence[Sequence[int]], stop: tuple[str, ...] = (), prompt: Sequence[int] = (40,)) -> tuple:
    """(joined text, matched stop, num_tokens), checking on the way that what was sent stays true and is no half character."""
    detokenizer = Detokenizer(tokenizer, prompt, stop)
    text, matched, num_tokens = "", None, 0
    sent_after = [""]
    for chunk in chunks:
        new, matched, num_tokens = detokenizer.push(chunk)
        text += new
        sent_after.append(text)
    whole = text + detokenizer.finish()
    # the plain twin: all bytes at once, where only bytes that never became a character are U+FFFD, and the stop string is cut off
    ids = [one for chunk in chunks for one in chunk]
    at_once = plain_text(tokenizer, prompt, ids)
    assert whole == expected_cut(at_once, stop)[0]
    assert all(at_once.startswith(sent) for sent in sent_after)
    return whole, matched, num_tokens


def plain_text(tokenizer: Tokenizer, prompt: Sequence[int], ids: Sequence[int]) -> str:
    """Text of ids after prompt, by decoding bytes in one go."""

    def visible(token_ids: Sequence[int]) -> bytes:
        return b"".join(tokenizer.token_bytes(one) for one in token_ids if not tokenizer.is_special(one))

    head, tail = visible(prompt), visible(ids)
    if not head and tokenizer.strips_first_space:
        tail = tail.removeprefix(b" ")
    # of the prompt only a character that it leaves unfinished belongs to the text
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    decoder.decode(head)
    return (decoder.getstate()[0] + tail).decode("utf-8", errors="replace") if tail else decoder.getstate()[0].decode(errors="replace")


def split(ids: list[int], at: list[int]) -> list[list[int]]:
    bounds = [0, *sorted(min(cut, len(ids)) for cut in at), len(ids)]
    return [ids[low:high] for low, high in itertools.pairwise(bounds)]


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def spelled(text: str) -> list[int]:
    """One token a character, whatever merges the vocabulary has."""
    return [one for character in text for one in encode(BYTE_LEVEL, character)]


def expected_cut(text: str, stop: tuple[str, ...]) -> tuple[str, str | None]:
    """The plain twin: grow the text by one character until it ends in a stop string; the longest of those is cut off."""
    for end in range(1, len(text) + 1):
        found = [one for one in stop if text[:end].endswith(one)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@given(text=texts, at=cuts)
def test_any_split_gives_the_text(tokenizer: Tokenizer, text: str, at: list[int]) -> None:
    ids = encode(tokenizer, text)
    whole = tokenizer.decode(encode(tokenizer, "a") + ids)[1:] if tokenizer is SENTENCEPIECE else text
    assert run(tokenizer, split(ids, at)) == (whole, None, len(ids))
    assert run(tokenizer, [[one] for one in ids])[0] == whole


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@settings(max_examples=examples(150))
@given(text=texts, at=cuts, stop=stops)
def test_any_split_finds_the_same_stop(tokenizer: Tokenizer, text: str, at: list[int], stop: tuple[str, ...]) -> None:
    ids = encode(tokenizer, text)
    one_by_one = run(tokenizer, [[one] for one in ids], stop)
    assert run(tokenizer, split(ids, at), stop) == one_by_one
    assert run(tokenizer, [ids], stop) == one_by_one
    whole = run(tokenizer, [ids])[0]
    assert one_by_one[:2] == expected_cut(whole, stop)
    num_tokens = one_by_one[2]
    if one_by_one[1] is not None:  # one token less does not reach the match
        assert run(tokenizer, [ids[:num_tokens]], stop)[1] == one_by_one[1]
        assert run(tokenizer, [ids[: num_tokens - 1]], stop)[1] is None
    else:
        assert num_tokens == len(ids)


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@given(data=st.data(), at=cuts, stop=stops)
def test_any_ids_in_any_split(tokenizer: Tokenizer, data: st.DataObject, at: list[int], stop: tuple[str, ...]) -> None:
    """Models emit broken UTF-8 and special tokens too."""
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=30))
    prompt = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=6))
    expected = run(tokenizer, [ids], stop, prompt)
    assert run(tokenizer, split(ids, at), stop, prompt) == expected
    assert run(tokenizer, [[one] for one in ids], stop, prompt) == expected


@given(ids=st.lists(st.integers(0, BYTE_LEVEL.vocab_size - 1), max_size=30))
def test_byte_level_text_equals_the_packages_own(ids: list[int]) -> None:
    assert run(BYTE_LEVEL, [[one] for one in ids], prompt=())[0] == BYTE_LEVEL.decode(ids)


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize("text", ["😀", "한국어", "a👩\u200d👩\u200d👧b"])
def test_no_replacement_mark_is_streamed(tokenizer: Tokenizer, text: str) -> None:
    """STREAM-02, STREAM-03."""
    detokenizer = Detokenizer(tokenizer, encode(tokenizer, "a"))
    pushed = [detokenizer.push([one]).text for one in encode(tokenizer, text)]
    assert "\ufffd" not in "".join(pushed)
    assert "".join(pushed).strip() == text
    assert detokenizer.finish() == ""


def test_an_unfinished_character_comes_out_at_the_end() -> None:
    """STREAM-02: the final flush emits what is left."""
    ids = encode(BYTE_LEVEL, "ab😀")
    detokenizer = Detokenizer(BYTE_LEVEL, [])
    assert detokenizer.push(ids[:-1]).text == "ab"
    assert detokenizer.finish() == "\ufffd"


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize(("text", "stop"), [("abcDEFGHIJ kl", "DEFGHIJ"), ("hello\nUser: hi", "\nUser:"), ("ab<|end|>", "<|end|>")])
def test_nothing_of_a_stop_string_is_sent(tokenizer: Tokenizer, text: str, stop: str) -> None:
    """STREAM-04, STREAM-05, STREAM-07: token by token, each push is checked."""
    ids = encode(tokenizer, text)
    detokenizer = Detokenizer(tokenizer, encode(tokenizer, "a"), (stop,))
    sent, counts = "", []
    for one in ids:
        new = detokenizer.push([one])
        sent += new.text
        counts.append(new.num_tokens)
        assert sent.strip() == sent.strip().removesuffix(stop[0])
    assert sent.strip() == text[: text.index(stop)]
    assert new.matched_stop == stop
    assert counts == [min(index, new.num_tokens) for index in range(1, len(ids) + 1)]
    assert detokenizer.finish() == ""


def test_held_back_text_survives_an_eos() -> None:
    """STREAM-10: the last token could begin the stop string, then EOS comes."""
    detokenizer = Detokenizer(BYTE_LEVEL, [], ("dog!",))
    sent = detokenizer.push(encode(BYTE_LEVEL, "a dog")).text + detokenizer.push([EOS]).text
    assert sent == "a "
    assert sent + detokenizer.finish() == "a dog"


def test_a_false_start_is_given_out_at_once() -> None:
    detokenizer = Detokenizer(BYTE_LEVEL, [], ("aab",))
    texts_of = [detokenizer.push([one]).text for one in encode(BYTE_LEVEL, "x")] + [
        detokenizer.push(encode(BYTE_LEVEL, "a")).text,
        detokenizer.push(encode(BYTE_LEVEL, "a")).text,
        detokenizer.push(encode(BYTE_LEVEL, "a")).text,  # aaa: only the first a is safe
        detokenizer.push(encode(BYTE_LEVEL, "c")).text,
    ]
    assert texts_of == ["x", "", "", "a", "aac"]


def test_the_longer_of_two_stops_that_end_together() -> None:
    assert run(BYTE_LEVEL, [[one] for one in spelled("xabcd")], ("bc", "abc")) == ("x", "abc", 4)


def test_after_a_match_nothing_changes() -> None:
    detokenizer = Detokenizer(BYTE_LEVEL, [], ("b",))
    first = detokenizer.push(spelled("abc"))
    assert first == ("a", "b", 2)
    assert detokenizer.push(encode(BYTE_LEVEL, "xyz b")) == ("", "b", 2)
    assert detokenizer.finish() == ""


def test_special_tokens_are_skipped_or_shown() -> None:
    ids = [*encode(BYTE_LEVEL, "a"), EOS, *encode(BYTE_LEVEL, "<think>b")]
    assert run(BYTE_LEVEL, [ids])[0] == "a<think>b"
    assert Detokenizer(BYTE_LEVEL, [], skip_special_tokens=False).push(ids).text == "a</s><think>b"


def test_a_character_begun_in_the_prompt_is_completed() -> None:
    ids = encode(BYTE_LEVEL, "a😀b")
    for cut in range(len(ids) + 1):
        got = run(BYTE_LEVEL, [ids[cut:]], prompt=ids[:cut])[0]
        assert got == ("a😀b" if cut == 0 else "😀b" if cut < len(ids) - 1 else "b" if cut == len(ids) - 1 else "")


def test_the_first_space_goes_only_at_the_very_start() -> None:
    """Llama 2's vocabulary puts a space before every first word."""
    ids = encode(SENTENCEPIECE, "the ab")
    assert run(SENTENCEPIECE, [ids], prompt=())[0] == "the ab"
    assert run(SENTENCEPIECE, [ids], prompt=(1,))[0] == "the ab"  # BOS is not seen
    assert run(SENTENCEPIECE, [ids], prompt=encode(SENTENCEPIECE, "ab"))[0] == " the ab"
