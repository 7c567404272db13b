"""FedLAW. Li, Lin, Shang, Wu: Revisiting Weighted Aggregation in Federated Learning with Neural Networks, ICML 2023.
https://arxiv.org/abs/2302.10911

    client k:   as in FedAvg:  y = w^t;  y <- y - eta g_k(y; xi) for each local batch;   w_k = y
    server:     w^{t+1} = gamma sum_k lambda_k w_k,   lambda = softmax(x),  gamma = exp(y)
                (x, y) minimise the loss on a proxy set, from x = log p, y = 0, anew in every round

lambda lies on the simplex; gamma > 0 is free, below 1 it shrinks the global model. x and y follow Adam: learning rate
0.01 on CIFAR-10 and 0.005 elsewhere, betas 0.5 and 0.999, 20 passes in batches of 128, the rate halved after every 20
passes ("exp" of the official code; its "quad", squares in place of exponentials, is not offered).
The proxy set is class-balanced and cut from the TRAINING set before that is dealt to the clients. The official code
cuts it from the test set and tests on the rest: what is learned on must not come from what is tested on.
A network with BatchNorm sees the proxy batches with their own statistics, as in training.
Without passes (proxy_epochs = 0, Python only) this is fedavg with server_lr = 1.
"""

from fl_lightning.algorithms.algorithm import Algorithm
from fl_lightning.local.optimizers import LocalOptimizer, adam
from fl_lightning.local.solver import LocalSolver
from fl_lightning.server.aggregate import PriorWeights, by_samples
from fl_lightning.server.learned import Proxy, learn, side_by_side
from fl_lightning.server.rules import ServerRule


def fedlaw(
    optimizer: LocalOptimizer,
    *,
    proxy: Proxy,
    proxy_lr: float = 0.005,
    proxy_epochs: int = 20,
    proxy_beta1: float = 0.5,
    proxy_beta2: float = 0.999,
    proxy_lr_step: int = 20,
    proxy_lr_decay: float = 0.5,
    prior: PriorWeights = by_samples,
) -> Algorithm:
    """Args: `proxy` the held-out examples with their loss, `proxy_*` how x and y are learned, `prior` the weights p."""
    rule = learned(proxy, proxy_lr, proxy_epochs, (proxy_beta1, proxy_beta2), step=proxy_lr_step, decay=proxy_lr_decay)
    return Algorithm("fedlaw", LocalSolver(optimizer), side_by_side(prior), rule)


def learned(proxy: Proxy, lr: float, epochs: int, betas: tuple[float, float], *, step: int, decay: float) -> ServerRule:
    """FedLAW's server: Adam on (x, y), its learning rate times `decay` after every `step` passes."""
    return learn(proxy, lambda epoch: adam(lr * decay ** (epoch // step), *betas), epochs)
