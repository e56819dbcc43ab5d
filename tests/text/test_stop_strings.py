from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.text.stop_strings import StopFinder, StopMatch

SHORT = st.text(alphabet="ab", min_size=1, max_size=5)


@given(pieces=st.lists(st.text(alphabet="abc", max_size=4), max_size=12), stops=st.lists(SHORT, min_size=1, max_size=3))
@settings(derandomize=True, max_examples=400, deadline=None)
def test_matches_and_held_text_are_those_of_a_plain_search(pieces: list[str], stops: list[str]) -> None:
    finder = StopFinder(stops)
    text = ""
    for piece in pieces:
        match = finder.feed(piece)
        for end in range(1, len(piece) + 1):
            found = [stop for stop in stops if (text + piece[:end]).endswith(stop)]
            if found:
                assert match == StopMatch(max(found, key=len), end)
                return
        assert match is None
        text += piece
        heads = {stop[:length] for stop in stops for length in range(1, len(stop))}
        assert finder.num_held == max((len(head) for head in heads if text.endswith(head)), default=0)


def test_a_long_stop_string_that_nearly_repeats_itself_is_found() -> None:
    stop = "ab" * 300 + "c"
    finder = StopFinder([stop])
    assert finder.feed("ab" * 1000) is None
    assert finder.num_held == 600
    assert finder.feed("c!") == StopMatch(stop, 1)
