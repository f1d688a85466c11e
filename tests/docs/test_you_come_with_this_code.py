"""The accuracies in guides/you_come_with_this_code.md."""

import pytest
import torch
from torch import nn

from utils.data.images import load_images


@pytest.mark.slow
@pytest.mark.parametrize(("mean", "std", "accuracy"), [(0, 255, 0.7030), (33.3184, 78.5675, 0.8608)])
def test_the_recipe_of_many_posts(mean, std, accuracy):
    """Other processors round differently."""
    (images, labels), (test_images, test_labels) = (split.tensors for split in load_images("ylecun/mnist"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    for _ in range(2):
        for batch in torch.randperm(len(images)).split(64):
            optimizer.zero_grad()
            logits = model((images[batch] - mean) / std)
            nn.functional.cross_entropy(logits, labels[batch]).backward()
            optimizer.step()
    correct = model((test_images - mean) / std).argmax(1) == test_labels
    assert correct.float().mean().item() == pytest.approx(accuracy, abs=0.003)
