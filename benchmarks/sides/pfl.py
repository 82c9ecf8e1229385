"""pfl-research: one process, clients in turn, data on the device as in its image benchmark, or read when asked for."""

from functools import partial
from importlib import metadata
from types import MethodType

import torch
import torch.nn.functional as F
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn

from sides.worker import Job, Link, client_data, make_model, prepare

FOREVER = 10**9


class Turns(TrainingProcessCallback):
    """Waits for the driver between pfl's rounds."""

    def __init__(self, link: Link) -> None:
        self.link = link

    def on_train_begin(self, *, model: PyTorchModel) -> Metrics:
        self.link.begin()
        return Metrics()

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration) -> tuple[bool, Metrics]:
        self.link.end()
        self.link.begin()
        return False, Metrics()


def run(job: Job, link: Link) -> None:
    """Serve rounds until the driver stops. The device is chosen by $PFL_PYTORCH_DEVICE, which the driver sets."""
    prepare(job.threads)
    users = client_data(job, job.device)
    net = make_model(job).to(job.device)
    net.loss, net.metrics = MethodType(loss, net), MethodType(metrics, net)
    model = PyTorchModel(
        net,
        local_optimizer_create=partial(torch.optim.SGD, momentum=job.momentum),
        central_optimizer=torch.optim.SGD(net.parameters(), lr=1.0),  # the server's rate: the mean is the next model
    )
    sampler = get_user_sampler("minimize_reuse", range(job.clients))
    data = FederatedDataset(lambda user: Dataset(users[user], user_id=user), sampler)
    link.ready("pfl", metadata.version("pfl"), f"1 process, {job.threads} torch threads", net.state_dict)
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=FOREVER,
            evaluation_frequency=FOREVER,  # that is in the first round alone, which is not measured
            train_cohort_size=job.participants,
            val_cohort_size=0,
        ),
        SimulatedBackend(data, data, [WeightByDatapoints()]),
        model,
        NNTrainHyperParams(local_batch_size=job.batch, local_num_epochs=job.epochs, local_learning_rate=job.lr),
        NNEvalHyperParams(local_batch_size=None),
        callbacks=[Turns(link)],
    )


def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    model.train()
    return F.cross_entropy(model(x), y)


@torch.no_grad()
def metrics(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Weighted]:
    model.eval()
    return {"loss": Weighted(F.cross_entropy(model(x), y, reduction="sum").item(), len(y))}
