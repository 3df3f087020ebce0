"""Graph -> graph with gradients. Uses only the gradient rules that ops declare."""

from ttrain.autodiff.backward import backward
