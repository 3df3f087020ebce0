"""Drive a training step by hand: your data, your loop, your learning rate. `python by_hand.py`"""

import numpy as np

import ttrain


def main(steps: int = 200, rows: int = 32) -> np.ndarray:
    """Fit targets = inputs @ true.T. Return the fitted weight, fp32 [2, 4]."""
    config = ttrain.load_config(
        "model=mlp", "model.layers=1", "model.inputs=4", "model.outputs=2", "model.bias=false", "optimizer=sgd",
        "optimizer.momentum=0.9", "optimizer.clip_norm=null", "optimizer.weight_decay=0", "device=cpu",
        f"train.batch_size={rows}",
    )  # fmt: skip
    true = np.array([[1.0, -2.0, 0.5, 0.0], [0.0, 3.0, 1.0, -1.0]], np.float32)
    random = np.random.default_rng(0)
    with ttrain.Training(config) as training:
        for step in range(1, steps + 1):
            inputs = random.standard_normal((rows, 4)).astype(np.float32)
            result = training.step({"inputs": inputs, "targets": inputs @ true.T}, lr=0.1 if step < 100 else 0.02)
            if step % 50 == 0:
                print(f"step {step}: loss {result.loss:.2e}, gradient norm {result.grad_norm:.2e}")
        return training.parameters()["layers.0.weight"]


if __name__ == "__main__":
    print(main().round(3))
