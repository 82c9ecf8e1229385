"""Models of HuggingFace's transformers, from a folder on this machine.

They are models of text, and classifiers of text and of images. Which of a library's classes it is follows from the
data: AutoModelForCausalLM if labels are the next tokens, AutoModelForSequenceClassification for tokens with a label a
sample, and AutoModelForImageClassification for images.
"""

import json
import logging
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import surgery
from fl.base.errors import FLError
from fl.base.plugins import transformers
from fl.data import Dataset, is_text
from fl.data.mapped import pieces
from fl.models.padding import Padded
from fl.models.sources import ModelSource
from surgery.states import shapes_of

_log = logging.getLogger("fl")

BESIDE = ("tokenizer*", "vocab.*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "spiece.model",
          "sentencepiece*", "chat_template*", "preprocessor_config.json", "processor_config.json")  # fmt: skip
"""The files of a folder that an exported model gets as well."""


class HFModel(nn.Module):
    """A model of transformers that takes a data set's samples and returns logits.

    Attributes:
        model: the library's. folder: where it comes from; None: from a file of settings. drawn: its tensors that the
            folder lacks, which are random. next_tokens: whether it gives logits for the token after each.
    """

    scale: Tensor
    shift: Tensor

    def __init__(
        self, model: nn.Module, folder: Path | None, drawn: Sequence[str] = (), next_tokens: bool = False
    ) -> None:
        super().__init__()
        self.model: Any = model
        self.folder, self.drawn = folder, tuple(drawn)
        self.images, self.next_tokens = self.model.main_input_name == "pixel_values", next_tokens
        scale, shift = _normalisation(folder) if self.images else (1.0, 0.0)
        self.register_buffer("scale", torch.tensor(scale).view(-1, 1, 1), persistent=False)
        self.register_buffer("shift", torch.tensor(shift).view(-1, 1, 1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [N, classes] of images [N, C, H, W] from -1 to 1.

        Of tokens [N, T] the logits are [N, classes] or [N, T, vocabulary].
        """
        if self.images:
            return self.model(pixel_values=x * self.scale + self.shift).logits
        config = self.model.config
        options = {"use_cache": False} if hasattr(config, "use_cache") else {}
        if self.next_tokens or config.pad_token_id is None:
            return self.model(input_ids=x, attention_mask=torch.ones_like(x), **options).logits
        with Padded(x.shape):
            return self.model(input_ids=x, attention_mask=x.ne(config.pad_token_id).long(), **options).logits

    def save(self, folder: Path) -> None:
        """Write what the library's `from_pretrained` loads, and the tokenizer.

        FLError for a model that was cut: its configuration does not have its sizes.
        """
        settings = surgery.transformers.settings
        rebuilt = settings.make_from(type(self.model), self.model.config)
        cut = settings.first_difference(shapes_of(self.model), shapes_of(rebuilt))
        if cut:
            raise FLError(
                f"{folder}: a model that --width or --depth has cut is not that of its config.json ({cut}): write its "
                "weights as .pt or .safetensors",
                code="unsupported",
            )
        with transformers(f"export to {folder}", self.folder or folder):
            self.model.save_pretrained(folder)
        for pattern in BESIDE if self.folder else ():
            for file in filter(Path.is_file, self.folder.glob(pattern)):
                shutil.copy(file, folder)


def _normalisation(folder: Path | None) -> tuple[Any, Any]:
    """Read the scale and shift of pixels from -1 to 1; by default 1 and 0."""
    if folder is None or not (file := folder / "preprocessor_config.json").is_file():
        return 1.0, 0.0
    try:
        values = json.loads(file.read_bytes())
        half = 127.5 * (values.get("rescale_factor", 1 / 255) if values.get("do_rescale", True) else 1.0)
        mean, std = (values["image_mean"], values["image_std"]) if values.get("do_normalize", True) else ([0.0], [1.0])
        return [half / s for s in std], [(half - m) / s for m, s in zip(mean, std, strict=True)]
    except (ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError, RecursionError) as error:
        raise FLError(
            f"{file} does not say how images are normalised ({type(error).__name__}: {error}): give image_mean and "
            "image_std, or take the file out to have pixels from -1 to 1",
            code="file",
        ) from None


class Folder(ModelSource):
    """The model that --model hf:FOLDER names: a model with the folder's weights."""

    @property
    def path(self) -> Path:
        """The folder, or of hf-config perhaps a file."""
        return Path(self.name.partition(":")[2]).expanduser()

    def config(self) -> Any:
        """Read the library's configuration; FLError if there is none."""
        with transformers(f"--model {self.name}", self.path) as library:
            if not (self.drawn or self.path.is_dir()):
                raise FLError(f"--model {self.name} is a file: give its folder, or hf-config:FILE for random weights")
            return library.AutoConfig.from_pretrained(self.path, local_files_only=True)

    def check(self) -> None:
        """See `ModelSource.check`."""
        self.config()

    def check_takes(self, data: Dataset) -> None:
        """See `ModelSource.check_takes`."""
        if isinstance(data.x, dict):
            inputs = ", ".join(data.x)
            raise FLError(
                f"--model {self.name} has one input, and samples have {inputs}: give a module of your own",
                code="unsupported",
            )
        if data.dense:
            raise FLError(
                f"--model {self.name} gives a class for a sample, and the data have one for each pixel: give your own",
                code="unsupported",
            )

    def maker(self, tokens: bool, outputs: Sequence[int]) -> Callable[[], nn.Module]:
        """See `ModelSource.maker`."""
        kind = "CausalLM" if len(outputs) > 1 else "SequenceClassification" if tokens else "ImageClassification"
        return partial(self._make, f"AutoModelFor{kind}", outputs[-1])

    def fit_to(self, data: Dataset, config: Any) -> Dataset:
        """Check the model's tokens, and make its vocabulary the classes of text.

        The library computes perplexity over them all: also tokens that the tokenizer never gives have a probability.

        Raises:
            FLError: for data with more tokens.
        """
        tokens = config.data.text.tokens
        if not self.drawn and is_text(config.data.dataset) and ":" not in tokens:
            _log.warning(
                "warning: --text.tokens %s numbers tokens in another way than the model of %s learned them: give "
                "--text.tokens tokenizer:FOLDER, unless that is meant",
                tokens, self.name,
            )  # fmt: skip
        if not data.tokens:
            return data
        most = data.classes if data.text else 1 + max(int(p.max()) for x in (data.x, data.test_x) for p in pieces(x))
        size = getattr(self.config().get_text_config(), "vocab_size", None)
        if size is None:
            raise FLError(
                f"--model {self.name} is no model of text, and {data.name} has tokens: choose another one",
                code="unsupported",
            )
        if most > size:
            raise FLError(
                f"--model {self.name} has a vocabulary of {size:,} tokens, and {data.name} has {most:,}: read text "
                "with the model's own tokenizer, --text.tokens tokenizer:FOLDER, or give hf-config a larger vocab_size",
                code="mismatch",
            )
        return replace(data, classes=size) if data.text else data

    def hint(self, data: Dataset) -> str:
        """See `ModelSource.hint`."""
        if data.tokens:
            return "; is --text.length beyond its max_position_embeddings, or pad_token_id not in its config.json?"
        return (
            "; resize the data to the image_size and num_channels of its config.json, or give hf-config:FILE a "
            "configuration with those of the data"
        )

    def _make(self, kind: str, classes: int) -> nn.Module:
        """Build the model; random weights come from torch's generator."""
        config = self.config()
        if kind != "AutoModelForCausalLM" and config.num_labels != classes:
            config.num_labels = classes
        causal = kind == "AutoModelForCausalLM"
        with transformers(f"--model {self.name} as {kind}", self.path) as library:
            auto = getattr(library, kind)
            # Fused kernels take the random numbers of their dropout from elsewhere.
            options = {"attn_implementation": "eager", "dtype": torch.float32}
            if self.drawn:
                folder = self.path if self.path.is_dir() else None
                return self._check_causal(HFModel(auto.from_config(config, **options), folder, (), causal))
            model, report = auto.from_pretrained(
                self.path, config=config, local_files_only=True, ignore_mismatched_sizes=True, output_loading_info=True,
                **options,
            )  # fmt: skip
        drawn = sorted({*report["missing_keys"], *(entry[0] for entry in report["mismatched_keys"])})
        body = f"{model.base_model_prefix}." if kind != "AutoModelForCausalLM" else ""
        strange = [
            name for name in (*drawn, *report["unexpected_keys"]) if name.startswith(body) and "pooler" not in name
        ]
        if strange:
            raise FLError(
                f"--model {self.name}: the weights of {self.path} are not those of {type(model).__name__}, as its "
                f"config.json describes it ({strange[0]} is missing, unknown, or of another size): save it again",
                code="mismatch",
            )
        return self._check_causal(HFModel(model, self.path, drawn, causal))

    def _check_causal(self, model: HFModel) -> HFModel:
        """Return the model; FLError if it is to say the next tokens and can see them."""
        if model.next_tokens:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                first, other = (model.eval()(torch.tensor([[0, 1, end]]))[:, :2] for end in (0, 1))
            if not torch.allclose(first, other, atol=1e-5):
                raise FLError(
                    f"--model {self.name}: a {type(model.model).__name__} with this config.json sees the tokens that "
                    "come next, so that its perplexity means nothing: set is_decoder, or take another model",
                    code="unsupported",
                )
        return model.train()


class ConfigFile(Folder):
    """The model of --model hf-config:FOLDER or FILE, with random weights."""

    drawn = True


SOURCES = {"hf": Folder, "hf-config": ConfigFile}
