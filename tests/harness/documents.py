"""The documents of a dataset, all in memory."""

from readers.text import read_documents, survey


def load_text(dataset: str) -> tuple[list[str], list[str]]:
    """The texts for training and for testing."""
    is_test, _ = survey(read_documents(dataset))
    texts = [content for _, _, content in read_documents(dataset)]
    return tuple([each for each, of_test in zip(texts, is_test, strict=True) if of_test == side] for side in (0, 1))
