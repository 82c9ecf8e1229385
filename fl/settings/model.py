"""Settings of the model: architecture, initial weights, and clients' part of it."""

from dataclasses import dataclass
from typing import Annotated, get_args

import tyro

import zoo
from fl import data, models
from fl.base.errors import FLError
from fl.base.settings import Depths, Named, Rare, Rates, one_of
from fl.models.architectures import ArchitectureOptions
from fl.models.init import check_init
from fl.settings.data import DataSettings
from fl.settings.topic import Topic


@dataclass(frozen=True)
class ModelSettings(Topic):
    """The global model, and the architectures of the clients."""

    name: Annotated[str, Named("model")] = "cnn"
    """cnn (McMahan et al. 2017), resnet20, ... (`python -m zoo` lists them); timm:NAME or torchvision:NAME; hf:FOLDER
    of transformers, or hf-config:FOLDER with new weights; your own: module:MyNet; for text transformer, or
    transformer_masked (predicts all tokens, 15% of them hidden)"""
    width: Rates = (1.0,)
    """shares of the hidden widths: one number for all, or one for each section of the model"""
    depth: Depths = ()
    """blocks in a section of the model: one number for all sections, or one for each"""
    stem: Annotated[str, one_of("default", "imagenet", "cifar"), Rare()] = "default"
    """first layers: imagenet halves images once or twice, cifar keeps their size, default is the model's own choice"""
    norm: Annotated[str, one_of("default", *get_args(zoo.norms.Norm)), Rare()] = "default"
    """norm layers; default is the model's own choice"""
    dropout: Annotated[float | None, tyro.conf.arg(metavar="FLOAT"), Rare()] = None
    """rate of dropout [the model's own]"""
    exits: Annotated[bool, Rare()] = False
    """ResNets with a classifier after each section: clients train all of them, and predictions are their mean. With
    --architectures.depths 2-2-0-0,2-2-2-2 clients lack the last sections"""
    init: Annotated[str | None, tyro.conf.arg(metavar="FILE|timm|torchvision")] = None
    """trained weights to begin from: a file (safetensors, or a state dict of torch.save), or timm or torchvision for
    the library's own; a classifier for other classes gets new weights [all weights are new]"""
    architectures: ArchitectureOptions = ArchitectureOptions()

    def check(self) -> None:
        """Raise FLError for settings of the model that cannot be."""
        if self.init is not None:
            check_init(self.init, self.name)
        self.architectures.check()

    def spec(
        self,
        samples: DataSettings = DataSettings(),
        num_classes: int | None = None,
        in_channels: int | None = None,
        image_size: int | None = None,
        text: bool | None = None,
    ):
        """Make the `zoo.Spec` of the model, for these images and classes, or for text.

        Args:
            samples: the settings of the data.
            text: whether the data are text; None: as their name says, and for data of your own as the model needs it.
        """
        if not self.width:
            raise FLError("give at least one --width")
        if text is None:
            named, custom = data.is_text(samples.dataset), data.is_custom(samples.dataset)
            text = named or (custom and models.takes_text(self.name))
        return models.make_spec(
            self.name,
            num_classes,
            in_channels,
            image_size,
            width=self.width[0] if len(self.width) == 1 else self.width,
            depth=self.depth[0] if len(self.depth) == 1 else self.depth or None,
            norm=None if self.norm == "default" else self.norm,
            stem=None if self.stem == "default" else self.stem,
            tokens=samples.text.length if text else None,
            dropout=self.dropout,
            exits=self.exits,
        )
