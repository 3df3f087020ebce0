"""Train a model of your own on text, with everything that a run has: `python own_model.py train.steps=300`.

The model predicts each token from the one before it. In this folder, `python -m ttrain plugins=[own_model]
task=sample run.dir=<run>` draws a text from a run.
"""

import sys
from dataclasses import dataclass

import ttrain
from ttrain import ops
from ttrain.core.spec import DType, TensorSpec
from ttrain.graph import Graph, Value
from ttrain.models.base import LOSS_WEIGHT, SCALAR, scored_positions
from ttrain.nn.layers import Embedding, Linear
from ttrain.nn.module import Module


@dataclass
class OwnConfig:
    """A hidden layer on each token; every field is an option, such as model.width=32."""

    name: str = ttrain.option("own", "registered name of the model")
    width: int = ttrain.option(64, "features of the hidden layer", minimum=1)
    context: int = ttrain.option(32, "tokens of a training sequence", minimum=1)
    vocabulary: int | None = ttrain.option(None, "number of token ids; null takes the tokenizer's", minimum=1)


class OwnModel(Module):
    """tokens int64 [rows, context] -> the loss, or scores of the next token."""

    def __init__(self, config: OwnConfig, compute: DType = DType.FP32) -> None:
        self.config, self.compute = config, compute
        self.embedding = Embedding(config.vocabulary or 256, config.width)
        self.hidden = Linear(config.width, config.width)
        self.head = Linear(config.width, config.vocabulary or 256)
        self.name_parameters()

    def batch_specs(self, rows: int) -> dict[str, TensorSpec]:
        spec = TensorSpec((rows, self.config.context), DType.INT64)
        return {"tokens": spec, "targets": spec}

    def scores(self, graph: Graph, rows: int) -> Value:
        tokens = graph.input("tokens", self.batch_specs(rows)["tokens"])
        x = ops.gelu(self.hidden(self.embedding(tokens, self.compute)))
        scores = self.head(x)
        return ops.reshape(scores, (rows * self.config.context, scores.shape[-1]))

    def loss(self, graph: Graph, rows: int, training: bool) -> Value:
        scores = self.scores(graph, rows)
        targets = ops.reshape(graph.input("targets", self.batch_specs(rows)["targets"]), scores.shape[:1])
        return ops.cross_entropy(scores, targets, graph.input(LOSS_WEIGHT, SCALAR))

    def logits(self, graph: Graph, rows: int, count: int | None = None) -> Value:
        return ops.cast(ops.embedding(scored_positions(graph, count), self.scores(graph, rows)), DType.FP32)


ttrain.register("model", "own", config=OwnConfig, target=OwnModel)

if __name__ == "__main__":
    best = ttrain.run("model=own", "train.steps=200", *sys.argv[1:])
    print(f"best loss on held-out text: {best:.4f}")
