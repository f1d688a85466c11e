"""Random images for scripts/resnet50.py: reading and copying cost nothing, so the speed of training is measured."""

import torch
from accelerate import PartialState
from torch.utils.data import Dataset

IMAGENET_SIZE = 1_281_167  # training images


class SyntheticImages(Dataset):
    """Random images of 1000 classes. All batches of one length are the same tensors on the device.

    Args:
        num_samples: length of the dataset.
        size: pixels of a side.
        device: where the images lie.
    """

    deterministic = True
    fingerprint = "synthetic"

    def __init__(self, num_samples: int, size: int, device: torch.device):
        self.num_samples, self.size, self.device = num_samples, size, device
        self.classes = [str(label) for label in range(1000)]
        self.batches = {}  # by number of samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> int:
        """The index: `collate` looks at the number of items only."""
        return index

    def __getitems__(self, indices: list[int]) -> list[int]:
        return indices

    def collate(self, indices: list[int]) -> list[torch.Tensor]:
        """Images, uint8 (N, 3, H, W) in channels_last, and labels, int64 (N,)."""
        count = len(indices)
        if count not in self.batches:
            generator = torch.Generator(self.device).manual_seed(0)
            shape = (count, self.size, self.size, 3)
            options = {"generator": generator, "device": self.device}
            images = torch.randint(256, shape, dtype=torch.uint8, **options)
            labels = torch.randint(len(self.classes), (count,), **options)
            self.batches[count] = [images.permute(0, 3, 1, 2), labels]
        return self.batches[count]


def load_data(args):
    """In the place of the function of scripts/resnet50.py."""
    args.num_workers = 0  # the images are on the device
    device = PartialState().device
    train_data = SyntheticImages(IMAGENET_SIZE, args.image_size, device)
    return train_data, SyntheticImages(128, args.eval_size, device), {"dataset": "synthetic"}
