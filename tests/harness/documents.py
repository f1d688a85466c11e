"""The documents of a dataset, all in memory."""

from readers.text import assign_splits, find_corpus, read_documents


def load_text(dataset: str, text_column: str | None = None) -> tuple[list[str], list[str]]:
    """The texts for training and for testing."""
    corpus = find_corpus(dataset, text_column)
    test_mask, _ = assign_splits(read_documents(corpus))
    texts = ["".join(parts) for _, _, parts in read_documents(corpus)]
    return tuple([each for each, of_test in zip(texts, test_mask, strict=True) if of_test == side] for side in (0, 1))
