"""Messages of the store's errors: safe to print, short, each complaint once."""

from adapter_store.errors import MAX_PROBLEMS, AdapterInvalid, ProblemList, show


def test_show_is_safe_to_print_and_short() -> None:
    assert show("mia") == "'mia'"
    for text in ("\x00", "\u202e", "\ud800", "\n", "\x1b[31m"):
        shown = show(text)
        shown.encode()
        assert shown.isprintable()
    assert len(show("x" * 1_000_000)) < 200
    assert len(show(list(range(100_000)))) < 200


def test_one_complaint_about_many_places_is_one_problem() -> None:
    problems = ProblemList()
    for i in range(5):
        problems.add("code", f"layer{i}", "is wrong")
    problems.add("code", "other", "is wrong otherwise")
    first, second = problems.problems()
    assert (first.field, first.message) == ("layer0", "is wrong (5 places: layer0, layer1, layer2, …)")
    assert second.to_dict() == {"code": "code", "field": "other", "message": "is wrong otherwise"}
    assert str(AdapterInvalid((first, second))).startswith("adapter refused, 2 problems: layer0: is wrong (5 places")


def test_the_list_is_bounded() -> None:
    problems = ProblemList()
    for i in range(MAX_PROBLEMS + 7):
        problems.add("code", "field", f"wrong in way {i}")
    assert len(problems.problems()) == MAX_PROBLEMS + 1
    assert problems.problems()[-1].message.startswith("7 more")
