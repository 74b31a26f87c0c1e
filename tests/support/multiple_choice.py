"""The score of a multiple-choice task, computed by hand to check the harness's."""

import torch


def accuracy(logits, documents):
    """Share of right answers, by one forward pass for each choice, without padding, cache or the harness.

    :param logits: ids (1, length) -> (1, length, vocabulary).
    """
    right = []
    for document in documents:
        scores = []
        for choice in document["choices"]:
            words = [int(word[1:]) for word in [*document["question"].split(), choice]]
            scores.append(float(logits(torch.tensor([words[:-1]]))[0, -1].double().log_softmax(-1)[words[-1]]))
        right.append(scores.index(max(scores)) == document["answer"])
    return sum(right) / len(right)
