"""The picture of samples by step and rank shows what the records say."""

from prove_training.picture import draw, marks


def record(*steps, line="train.py:1"):
    return {
        "steps": [
            {"micro_batches": [{"samples": [{"key": "train", "pass": 0, "digests": [*digests]}], "line": line}]}
            for digests in steps
        ]
    }


def test_twice_and_missing_samples_are_marked_where_they_are():
    found = marks(record("ab", "cd"), [record("a", "c"), record("a", "c")])
    assert found["rank 0"] == found["rank 1"] == [(1, 0), (2, 2)]
    assert found["twice"] == [(1, 0)]
    assert found["missing"] == [(1, 1), (2, 3)]
    assert found["repeated to fill the last step"] == [(2, 2)]


def test_the_drawn_points_are_the_marks():
    runs = [(record("ab", "c"), [record("a", "c"), record("b", "a")])]
    figure = draw(runs, "proven: the same samples")
    drawn = {each.get_label(): each.get_offsets().tolist() for each in figure.axes[0].collections}
    assert drawn == {
        "rank 0": [[1, 0], [2, 2]],
        "rank 1": [[1, 1], [2, 0]],
        "repeated to fill the last step": [[2, 0]],
    }
    assert draw([({"steps": []}, [{"steps": []}])], "proven") is None
