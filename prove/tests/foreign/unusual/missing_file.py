"""Needs a file that is not there."""

import torch

weights = torch.load("pretrained.pt")
