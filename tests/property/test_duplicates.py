"""Repeats are recognised whatever their layout, and different texts are not taken for repeats."""

from hypothesis import given
from hypothesis import strategies as st

from carryover.data.duplicates import SeenTexts, normalise

WORDS = st.lists(
    st.text(st.characters(codec="utf-8", categories=["L", "N"]), min_size=1, max_size=8),
    min_size=1,
    max_size=30,
)


@given(st.text())
def test_normalising_twice_changes_nothing(text):
    assert normalise(normalise(text)) == normalise(text)


@given(WORDS, st.sampled_from([" ", ", ", " - ", "\n\n"]), st.booleans())
def test_layout_case_and_punctuation_do_not_make_a_new_text(words, joint, upper):
    text = " ".join(words)
    # some letters change under upper() for good, such as the long s
    changed = text.upper() if upper and normalise(text.upper()) == normalise(text) else text
    for threshold in (0.7, 1.0):
        seen = SeenTexts(threshold)
        assert seen.add(text)
        assert not seen.add(joint.join(changed.split(" ")) + "?")


@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_texts_without_common_triples_are_different(first, second):
    seen = SeenTexts(0.7)
    assert seen.add(f"first {first} alpha beta gamma delta")
    assert seen.add(f"second {second} one two three four")


def test_nearly_equal_texts_are_found_by_share_and_by_beginning():
    poem = "Write a poem about a dog who loves to swim in the sea on sunny days with friends"
    riddle = "A bat and a ball together cost one dollar. The bat costs a dollar more."
    seen = SeenTexts(0.7)
    assert seen.add(poem) and seen.add(riddle)
    assert not seen.add(poem.replace("friends", "family"))
    assert not seen.add(
        riddle + " I know the solution already, but tell me how to find it, please."
    )
    assert seen.add("Write a poem about a cat who hates to swim in rivers on cold days alone")
    assert seen.add("A bat and a bird together see more than either.")
    exact = SeenTexts(1.0)
    assert exact.add(poem) and exact.add(poem.replace("friends", "family"))
