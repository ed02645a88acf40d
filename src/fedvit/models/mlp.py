"""A multilayer perceptron on pixels: the smallest of the networks on which PFedEdit's authors measure time."""

import torch
from torch import Tensor, nn

WIDTHS = (512, 256, 128)  # hidden units; the paper gives only the number of layers, four
IMAGE_SIZE = 32  # CIFAR-10's


class Mlp(nn.Module):
    """Four linear layers on the flattened image, with rectifiers between them."""

    def __init__(self, size: int, classes: int):
        super().__init__()
        first, second, third = WIDTHS
        self.fc1, self.fc2 = nn.Linear(3 * size * size, first), nn.Linear(first, second)
        self.fc3, self.fc4 = nn.Linear(second, third), nn.Linear(third, classes)

    def get_classifier(self) -> nn.Linear:
        return self.fc4

    def forward(self, x: Tensor) -> Tensor:  # (batch, 3, size, size) -> (batch, classes)
        hidden = torch.relu(self.fc2(torch.relu(self.fc1(x.flatten(1)))))
        out: Tensor = self.fc4(torch.relu(self.fc3(hidden)))
        return out
