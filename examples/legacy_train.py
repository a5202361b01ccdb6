"""A training script for megengine.distributed, of which only the import was changed. Run it: python examples/legacy_train.py"""

import numpy as np

import aiodist.sync as dist  # import megengine.distributed as dist


def gradients(weights: list[np.ndarray], x: np.ndarray, labels: np.ndarray) -> tuple[float, list[np.ndarray]]:
    """Return loss and gradients of a softmax regression."""
    scores = x @ weights[0] + weights[1]
    odds = np.exp(scores - scores.max(axis=1, keepdims=True))
    odds /= odds.sum(axis=1, keepdims=True)
    loss = -float(np.log(odds[np.arange(len(x)), labels]).mean())
    odds[np.arange(len(x)), labels] -= 1
    return loss, [x.T @ odds / len(x), odds.mean(axis=0)]


@dist.launcher(n_gpus=2)
def train(steps: int) -> list[np.ndarray]:
    """Train on this rank's share of the data and return the weights."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    rng = np.random.default_rng(1)
    labels = rng.integers(3, size=300)
    x = (rng.normal(size=(3, 4))[labels] + rng.normal(scale=0.5, size=(300, 4)))[rank::world_size]
    labels = labels[rank::world_size]

    weights = [np.random.default_rng(rank).normal(size=(4, 3)), np.zeros(3)]
    dist.bcast_list_(weights)
    callback = dist.make_allreduce_cb("mean")
    for step in range(steps):
        loss, grads = gradients(weights, x, labels)
        futures = [callback(weight, grad) for weight, grad in zip(weights, grads, strict=True)]
        for weight, future in zip(weights, futures, strict=True):
            weight -= 0.5 * future.get()
        if step % 20 == 0 or step == steps - 1:
            loss = float(dist.functional.all_reduce_sum(np.array(loss))) / world_size
            if rank == 0:
                print(f"step {step}: loss {loss:.3f}", flush=True)
    dist.group_barrier()
    return weights


if __name__ == "__main__":
    results = train(steps=60)
    same = all((mine == first).all() for weights in results for mine, first in zip(weights, results[0], strict=True))
    print("the ranks agree" if same else "the ranks differ")
